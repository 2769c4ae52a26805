"""Folders as ``mlx_lm`` opens them: safetensors whose packed layers ``config.json`` describes (``spec/mlx.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ingot.core.config import CONFIG
from ingot.formats.base import Catalog, WriteOptions
from ingot.formats.mlx import layers as mlx_layers
from ingot.formats.mlx.layers import KEYS
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.formats.safetensors.index import INDEX_SUFFIX, encode_index, read_sharded, split
from ingot.formats.safetensors.reader import read_single
from ingot.formats.safetensors.writer import SafetensorsWriter, layout, refuses
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.layouts.affine import AffineLayout
from ingot.model.spec import TensorSpec
from ingot.model.store import Store


class MlxFormat(SafetensorsFormat):
    """Dense tensors and packed layers in one file or shards, described by the folder's ``config.json``."""

    name = "mlx"
    suffixes = ()
    summary = "a folder for mlx_lm: dense tensors, and layers of 2 to 8 bits packed as MLX computes with them"
    config_keys = KEYS
    one_head = True

    def entry(self, names: Sequence[str]) -> str | None:
        """Return what safetensors would, where there is a ``config.json``."""
        return super().entry(names) if CONFIG in names else None

    def confirms(self, store: Store) -> bool:
        """Whether ``config.json`` says that layers are packed."""
        return mlx_layers.is_quantized(mlx_layers.read_config(store, store.names()))

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why this format cannot carry the tensor; None if it can."""
        return _refuses(spec)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate and locate; there are no digests to verify.

        Raises, beside what safetensors raises, ``FormatError`` ``mlx.config``, ``mlx.parts``, ``mlx.dtype``,
        ``mlx.shape`` and ``UnsupportedError`` ``mlx.mode``.
        """
        quantization = mlx_layers.quantization_of(mlx_layers.read_config(store, store.names()))
        catalog = read_sharded(store, name) if name.lower().endswith(INDEX_SUFFIX) else read_single(store, name)
        try:
            return replace(catalog, tensors=mlx_layers.tensors_of(catalog.tensors, quantization))
        except BaseException:
            for source in catalog.sources:
                source.close()
            raise

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Text, as safetensors has it; ``format`` says ``mlx``, which MLX's own loaders look at."""
        return {**super().metadata(values), "format": "mlx"}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files, index and the writer's ``config.json`` included."""
        shards = layout(self.file_name("model"), artifact, options, _refuses)
        total = sum(shard.size for shard in shards) + len(mlx_layers.config_of(artifact))
        if len(shards) > 1:
            total += len(encode_index(split(artifact.tensors, options.max_shard), [shard.name for shard in shards]))
        return total

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> MlxWriter:
        """Start writing; raises ``UnsupportedError`` for what ``refuses`` names and for metadata that is not text."""
        return MlxWriter(target, name, artifact, options)


class MlxWriter(SafetensorsWriter):
    """A safetensors writer that ends with ``config.json``: the artifact's, with the keys in ``config_keys``."""

    def __init__(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> None:
        super().__init__(target, name, artifact, options, _refuses)
        self._artifact = artifact

    def finish(self) -> list[str]:
        """Complete all files; return the names."""
        names = super().finish()
        content = mlx_layers.config_of(self._artifact)
        sink = self._target.create(CONFIG)
        sink.write_at(0, content)
        sink.truncate(len(content))
        sink.close()
        return [*names, CONFIG]


def _refuses(spec: TensorSpec) -> str | None:
    return mlx_layers.refusal(spec) if spec.codec == AffineLayout.codec else refuses(spec)
