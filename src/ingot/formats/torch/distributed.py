"""The format of torch's distributed checkpoints: ``.metadata`` and the ``.distcp`` files of all ranks; read only.

FSDP2, torchtitan, Megatron (``torch_dist``) and NeMo write this format with ``torch.distributed.checkpoint``.
``.metadata`` is a pickle of dataclasses that lists each tensor's shape, type and chunks, and their places in the files.
It is read as plain data (``inert_pickle``), without a process group and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog, FormatTraits, ReadOnlyFormat
from ingot.formats.torch.inert_pickle import MAX_PICKLE, Record, load
from ingot.formats.torch.saved_tensors import SavedFile, SavedTensor, size_of, type_of
from ingot.formats.torch.sharded import RULE, Chunk, sharded_tensor
from ingot.formats.torch.training_state import TrainingState
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store
from ingot.model.tensor import Tensor

METADATA = ".metadata"
SHARD_SUFFIX = ".distcp"
_CLASSES = "torch.distributed.checkpoint."
_WHY = "Ingot only reads checkpoints of trainers: write safetensors, which every trainer loads"


class TorchDistributedFormat(ReadOnlyFormat):
    """The format of dense tensors that ``torch.distributed.checkpoint`` writes."""

    name = "torch-distributed"
    suffixes: tuple[str, ...] = (METADATA, SHARD_SUFFIX)
    summary = "tensors in the shards of several ranks, as torch.distributed.checkpoint writes them; read only"
    why_read_only = _WHY
    read_only_rule = "torchfile.read-only"
    traits = FormatTraits()

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file is the pickle ``.metadata``."""
        return name.rpartition("/")[2] == METADATA and head.startswith(b"\x80")

    def entry(self, names: Sequence[str]) -> str | None:
        """Return ``.metadata``, which listings leave out because it is hidden, if there are shards."""
        return METADATA if any(name.endswith(SHARD_SUFFIX) for name in names) else None

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of all weights; a remark lists what else the checkpoint contains, such as optimizer state.

        Raises
        ------
        FormatError
            ``torchfile.pickle``, ``torchfile.metadata``: ``.metadata`` is missing or damaged; ``torchfile.shards``:
            chunks are missing or overlap.
        UnsupportedError
            ``torchfile.tensor``: an unsupported element type; ``torchfile.transform``: compressed chunks.
        """
        if not store.exists(name):
            raise FormatError(
                "torchfile.metadata",
                "expected the file .metadata beside the shards, but it is missing; was the save finished, and were "
                "hidden files copied?",
                where=name,
            )
        data = store.read(name, MAX_PICKLE, "torchfile.pickle-size")
        metadata = load(data, name)
        if not (isinstance(metadata, Record) and metadata.name == f"{_CLASSES}metadata.Metadata"):
            raise FormatError("torchfile.metadata", "expected the metadata of a distributed checkpoint", where=name)
        reader = _Reader(store, name, metadata)
        try:
            return reader.catalog(data)
        except BaseException:
            reader.close()
            raise


class _Reader:
    """The entries of ``.metadata``, and the files that they refer to."""

    def __init__(self, store: Store, name: str, metadata: Record) -> None:
        self._store = store
        self._name = name
        self._files: dict[str, ByteSource] = {}
        self._entries = _mapping(metadata.get("state_dict_metadata"), name)
        self._paths = metadata.get("planner_data")
        self._storage = self._storage_of(metadata.get("storage_data"))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def catalog(self, data: bytes) -> Catalog:
        state = TrainingState({key: self._path(key) for key in self._entries})
        tensors: dict[str, Tensor] = {}
        other_values = 0
        for key, entry in self._entries.items():
            if not isinstance(entry, Record) or entry.name != f"{_CLASSES}metadata.TensorStorageMetadata":
                other_values += 1
            elif key in state.weights:
                name = state.weights[key]
                if name in tensors:
                    raise FormatError("torchfile.metadata", f"expected one tensor {name[:200]!r}, found two")
                tensors[name] = self._tensor(key, name, entry)
        optimizer = [key for key in state.training if isinstance(self._entries[key], Record)]
        if not tensors:
            raise UnsupportedError(
                f"expected weights, found {len(self._entries)} entries of an optimizer or of a trainer's state",
                rule="torchfile.content",
                where=self._name,
            )
        return Catalog(
            tensors,
            metadata={"format": "pt"},
            headers={self._name: data},
            sources=tuple(self._files.values()),
            remarks=state.remarks(self._name, optimizer, other_values),
        )

    def _path(self, key: str) -> tuple[str, ...]:
        """Return the path of an entry in the nested state dict that was saved; the entry's key if no path is stored."""
        path = self._paths.get(key) if isinstance(self._paths, dict) else None
        if isinstance(path, tuple) and path and all(isinstance(part, str | int) for part in path):
            return tuple(str(part) for part in path)
        return (key,)

    def _tensor(self, key: str, name: str, entry: Record) -> Tensor:
        location = f"{self._name}: {key[:200]}"
        shape = size_of(entry.get("size"), location)
        properties = entry.get("properties")
        state = properties.state if isinstance(properties, Record) else None
        dtype_name = state[0] if isinstance(state, tuple) and state else None
        if isinstance(state, dict):
            dtype_name = state.get("dtype")
        dtype = type_of(dtype_name, location)
        listed = entry.get("chunks")
        if not isinstance(listed, list):
            raise FormatError("torchfile.metadata", "expected a list of chunks", where=location)
        chunks = [self._chunk(key, record, location) for record in listed]
        return sharded_tensor(name, dtype, shape, chunks, tuple(self._files.values()), location)

    def _chunk(self, key: str, record: Any, location: str) -> Chunk:
        if not isinstance(record, Record):
            raise FormatError("torchfile.metadata", "expected the sizes and offsets of a chunk", where=location)
        offsets = size_of(record.get("offsets"), location)
        sizes = size_of(record.get("sizes"), location)
        entry = self._storage.get((key, offsets)) or (None if offsets else self._storage.get((key, None)))
        if entry is None:
            raise FormatError(
                RULE, f"expected a file for the chunk at {list(offsets)}, but none is listed", where=location
            )
        file_name, start, length = entry
        return Chunk(offsets, sizes, partial(self._saved, file_name, start, length, location))

    def _saved(self, file_name: str, start: int, length: int, location: str) -> SavedTensor:
        """Return the tensor whose archive is stored in a range of bytes of a file; the archive's header is read."""
        saved = SavedFile(self._files[file_name], f"{file_name}: {location}", start, length)
        tensor = saved.tensor(saved.content, location)
        if tensor is None:
            raise FormatError("torchfile.damaged", "expected a tensor", where=f"{file_name}: {location}")
        return tensor

    def _storage_of(self, listed: Any) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
        """Return the file, offset and length of each chunk, keyed by tensor name and position.

        Raises an error if a file is missing or too short.
        """
        located: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
        for index, info in _mapping(listed, self._name).items():
            if not (isinstance(index, Record) and isinstance(info, Record)):
                raise FormatError("torchfile.metadata", "expected the location of each chunk", where=self._name)
            key = index.get("fqn")
            file_name = info.get("relative_path")
            start = info.get("offset")
            length = info.get("length")
            if not (isinstance(key, str) and isinstance(file_name, str) and type(start) is type(length) is int):
                raise FormatError("torchfile.metadata", "expected the location of each chunk", where=self._name)
            if file_name in ("", ".", "..") or any(character in file_name for character in "/\\\0"):
                raise FormatError(
                    "torchfile.metadata", f"expected a file of the same folder, found {file_name[:200]!r}", where=key
                )
            if info.get("transform_descriptors"):
                raise UnsupportedError(
                    "expected plain chunks, found compressed ones (transform_descriptors); save the checkpoint without "
                    "extensions",
                    rule="torchfile.transform",
                    where=f"{self._name}: {key[:200]}",
                )
            offset = index.get("offset")
            position = None if offset is None else size_of(offset, self._name)
            located[key, position] = (file_name, start, length)
        for file_name in sorted({file_name for file_name, _, _ in located.values()}):
            if not self._store.exists(file_name):
                raise FormatError(RULE, f"expected the shard {file_name}, but it is missing", where=self._name)
            self._files[file_name] = self._store.open(file_name)
        for (key, _), (file_name, start, length) in located.items():
            if start < 0 or length < 0 or start + length > self._files[file_name].size:
                raise FormatError(
                    RULE,
                    f"expected {length} bytes at {start}, found {self._files[file_name].size} in the file; was the "
                    "copy cut off?",
                    where=f"{file_name}: {key[:200]}",
                )
        return located


def _mapping(value: Any, location: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError("torchfile.metadata", "expected a mapping of the checkpoint's entries", where=location)
    return value
