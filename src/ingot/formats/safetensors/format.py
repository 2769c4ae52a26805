"""The format of safetensors files and shards: supported tensors, reader and writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.formats.safetensors.header import MAX_HEADER, PREFIX, read_single
from ingot.formats.safetensors.index import INDEX_SUFFIX, SUFFIX, read_sharded
from ingot.formats.safetensors.patch import FORMAT, read_patch
from ingot.formats.safetensors.pieces import FileEntry, file_entries
from ingot.formats.safetensors.writer import SafetensorsWriter, files_size, why_unsupported
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store


class SafetensorsFormat(Format):
    """The safetensors format: one file, or shards under an index, of dense tensors (spec/safetensors.md).

    It also reads and writes sparse patches of a base (spec/sparse_patch.md).
    """

    name = "safetensors"
    suffixes: tuple[str, ...] = (SUFFIX, INDEX_SUFFIX)
    summary = "dense tensors, one file or shards with an index (Hugging Face)"
    traits = FormatTraits(
        shards=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the suffix fits, or the file begins with a plausible header length and ``{``."""
        if name.lower().endswith((SUFFIX, INDEX_SUFFIX)):
            return True
        return head[PREFIX : PREFIX + 1] == b"{" and int.from_bytes(head[:PREFIX], "little") <= MAX_HEADER

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file to open: ``model.safetensors``, its index, the only index, or the only file; None if
        ambiguous.
        """
        for usual in ("model" + SUFFIX, "model" + INDEX_SUFFIX):
            if usual in names:
                return usual
        for suffix in (INDEX_SUFFIX, SUFFIX):
            matching = [name for name in names if name.lower().endswith(suffix)]
            if matching:
                return matching[0] if len(matching) == 1 else None
        return None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Return why this format cannot store the tensor; None if it can."""
        return why_unsupported(spec)

    def file_entries(self, spec: TensorSpec) -> Sequence[FileEntry]:
        """Return the entries of a tensor in a file's header (``Carrier``)."""
        return file_entries(spec)

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of a file or index. A sparse patch is read as a delta; only sparse patches have digests to
        verify.
        """
        reader = read_sharded if name.lower().endswith(INDEX_SUFFIX) else read_single
        catalog = reader(store, name, verify=verify)
        if catalog.metadata.get("format") != FORMAT or catalog.metadata.get("sparse", "True") != "True":
            return catalog  # TRL's full checkpoints have sparse False
        try:
            return read_patch(catalog, name, verify=verify)
        except BaseException:
            for source in catalog.sources:
                source.close()
            raise

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metadata as strings, as ``__metadata__`` requires; other values become JSON text."""
        return {
            key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for key, value in values.items()
        }

    def file_name(self, stem: str) -> str:
        """Return ``stem.safetensors``; packed folder formats, which have no suffix, use it too."""
        return stem + SUFFIX

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Return the exact number of bytes of all files, including the index."""
        return files_size(self.file_name("model"), artifact, options, self)

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> SafetensorsWriter:
        """Return a writer of one file, or of shards with an index if the artifact exceeds the size of a shard.

        Raises ``UnsupportedError`` for tensors that ``why_unsupported`` rejects and for metadata that is not text.
        """
        return SafetensorsWriter(target, name, artifact, options, self)
