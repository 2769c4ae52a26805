"""The safetensors format as the rest of Ingot sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.formats.safetensors.header import MAX_HEADER, PREFIX
from ingot.formats.safetensors.index import INDEX_SUFFIX, SUFFIX, read_sharded
from ingot.formats.safetensors.patch import is_patch, read_patch
from ingot.formats.safetensors.pieces import Piece, pieces
from ingot.formats.safetensors.reader import read_single
from ingot.formats.safetensors.writer import SafetensorsWriter, files_size, refuses
from ingot.formats.usage import Made
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store


class SafetensorsFormat(Format):
    """Dense tensors in one file, or in shards under an index (spec/safetensors.md); sparse patches of a base
    (spec/sparse_patch.md)."""

    name = "safetensors"
    suffixes: tuple[str, ...] = (SUFFIX, INDEX_SUFFIX)
    summary = "dense tensors, one file or shards with an index (Hugging Face)"
    traits = FormatTraits(
        shards=True,
    )
    served = True
    """Whether vLLM runs folders of it."""

    def claims(self, name: str, head: bytes) -> bool:
        """By suffix; else by a plausible header length followed by ``{``."""
        if name.lower().endswith((SUFFIX, INDEX_SUFFIX)):
            return True
        return head[PREFIX : PREFIX + 1] == b"{" and int.from_bytes(head[:PREFIX], "little") <= MAX_HEADER

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``model.safetensors``, else its index, else the only index, else the only file; None for a choice."""
        for usual in ("model" + SUFFIX, "model" + INDEX_SUFFIX):
            if usual in names:
                return usual
        for suffix in (INDEX_SUFFIX, SUFFIX):
            matching = [name for name in names if name.lower().endswith(suffix)]
            if matching:
                return matching[0] if len(matching) == 1 else None
        return None

    def refuses(self, spec: TensorSpec) -> str | None:
        """Why this format cannot carry the tensor; None if it can."""
        return refuses(spec)

    def pieces(self, spec: TensorSpec) -> Sequence[Piece]:
        """Return the entries that a tensor takes in a file (``Carrier``)."""
        return pieces(spec)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Validate and locate; only a sparse patch has digests to verify, and is read as a delta."""
        reader = read_sharded if name.lower().endswith(INDEX_SUFFIX) else read_single
        catalog = reader(store, name, verify=verify)
        if not is_patch(catalog.metadata):
            return catalog
        try:
            return read_patch(catalog, name, verify=verify)
        except BaseException:
            for source in catalog.sources:
                source.close()
            raise

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """``__metadata__`` maps strings to strings: any other value is carried as its JSON text."""
        return {
            key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for key, value in values.items()
        }

    def file_name(self, stem: str) -> str:
        """Return ``stem.safetensors``: dialects, which have no suffix, use it too."""
        return stem + SUFFIX

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Exact bytes of all files, index included."""
        return files_size(self.file_name("model"), artifact, options, self)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> SafetensorsWriter:
        """Start writing; raises ``UnsupportedError`` for what ``refuses`` names and for metadata that is not text."""
        return SafetensorsWriter(target, name, artifact, options, self)

    def commands(self, made: Made) -> Sequence[Sequence[str]]:
        """vLLM's, of a model's folder."""
        return [("vllm", "serve", made.path)] if self.served and made.generates else []
