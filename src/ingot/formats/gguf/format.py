"""The GGUF format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.formats.gguf.header import MAGIC, why_unsupported
from ingot.formats.gguf.metadata import to_gguf_metadata
from ingot.formats.gguf.reader import SUFFIX, read, split_name
from ingot.formats.gguf.writer import GgufWriter, files_of
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

_WIDE = ("position_embd.weight", "token_types.weight", "v.position_embd.weight", "mm.input_projection.weight")


_WIDE_ENDINGS = (
    *(".bias", ".ssm_a", ".ssm_d", ".ssm_conv1d.weight", ".ssm_norm.weight", ".shortconv.conv.weight"),
    *(".attn_q_norm.weight", ".attn_k_norm.weight", ".patch_embd.weight", ".patch_embd.weight.1"),
)
"""Endings of names of tensors that llama.cpp requires in f32, although they are not vectors."""


class GgufFormat(Format):
    """The files of llama.cpp: tensors in blocks or dense, all metadata, and the tokenizer, in one file or several."""

    name = "gguf"
    suffixes: tuple[str, ...] = (SUFFIX,)
    summary = "llama.cpp's files, one or a split, with all types of blocks and all metadata"
    traits = FormatTraits(
        shards=True,
        shards_on_request=True,
        f16_scales=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the suffix is ``.gguf`` or the file begins with the magic."""
        return name.lower().endswith(SUFFIX) or head.startswith(MAGIC)

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file to open in a folder; None if the choice is ambiguous.

        It is ``model.gguf``, the only file with the suffix, or the first file of the only split.
        """
        matching = sorted(name for name in names if name.lower().endswith(SUFFIX) and not name.startswith("."))
        if f"model{SUFFIX}" in matching:
            return f"model{SUFFIX}"
        artifacts = {(split[0], split[2]) if (split := split_name(name)) else name for name in matching}
        return matching[0] if len(artifacts) == 1 else None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why llama.cpp cannot load the tensor from a file; None if it can."""
        return why_unsupported(spec)

    def required_dtype(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return f32 for a tensor that llama.cpp requires in f32; None for any other tensor.

        llama.cpp requires f32 for vectors, biases, small tensors of state-space layers and convolutions, routers of
        experts, and BERT's embeddings of positions and types. With another type, llama.cpp aborts.
        """
        is_wide = name in _WIDE or name.endswith(_WIDE_ENDINGS) or ".ffn_gate_inp" in name
        return "f32" if len(shape) <= 1 or is_wide else None

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the file and of all files of its split; there are no digests to verify."""
        return read(store, name)

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata with a GGUF type for each value, declared by ``ingot.gguf`` or inferred.

        Raises ``UnsupportedError`` ``gguf.metadata``.
        """
        return to_gguf_metadata(values)

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact number of bytes of all files, padding included."""
        return sum(file.size for file, _ in files_of(self.file_name("model"), artifact, options))

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> GgufWriter:
        """Return a writer; raises ``UnsupportedError`` for tensors that ``why_unsupported`` rejects."""
        return GgufWriter(target, name, artifact, options)
