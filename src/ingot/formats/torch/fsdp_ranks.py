"""The format of FSDP's rank files, ``model_world_size_N_rank_K.pt``, as verl saves them; read only.

Each file is a state dict of DTensors: the elements of one rank, the placements (``Shard``, ``Replicate``), and the
position of the rank in the mesh. Each axis of the mesh in turn divides a tensor as ``torch.chunk`` does
(``torch.distributed.tensor``). The files are read as plain data, without a process group and without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog, FormatTraits, ReadOnlyFormat
from ingot.formats.torch.inert_pickle import Record
from ingot.formats.torch.saved_tensors import SavedFile, SavedTensor, size_of
from ingot.formats.torch.sharded import RULE, Chunk, sharded_tensor
from ingot.formats.torch.training_state import TrainingState
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store
from ingot.model.tensor import Tensor

_NAME = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
_WRAPPED = "torch._tensor._rebuild_from_type_v2"
_DTENSOR = re.compile(r"torch\.distributed\._?tensor\.(_api\.|api\.)?DTensor")
_WHY = "Ingot only reads checkpoints of trainers: write safetensors, which every trainer loads"
_MAX_RANKS = 4096
_MAX_COMPARED = 16 << 20


class FsdpRanksFormat(ReadOnlyFormat):
    """The format of dense tensors in one file of ``torch.save`` for each rank of FSDP."""

    name = "fsdp-ranks"
    suffixes: tuple[str, ...] = ()
    summary = "tensors in one file per rank of FSDP (model_world_size_N_rank_K.pt); read only"
    why_read_only = _WHY
    read_only_rule = "torchfile.read-only"
    traits = FormatTraits()

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file has the name of a rank's file."""
        return _NAME.fullmatch(name.rpartition("/")[2]) is not None

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file of the lowest rank; None if the folder has no such file, or files of different numbers of
        ranks.
        """
        matches = [match for name in names if (match := _NAME.fullmatch(name))]
        counts = {match[1] for match in matches}
        return min((int(match[2]), match[0]) for match in matches)[1] if len(counts) == 1 else None

    def file_name(self, stem: str) -> str:
        """Return the name of a rank's file in a checkpoint of one rank."""
        return f"{stem}_world_size_1_rank_0.pt"

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the tensors, each assembled from the files of all ranks.

        Raises
        ------
        FormatError
            ``torchfile.shards``: a rank's file is missing, or ranks contradict each other; ``torchfile.zip``,
            ``torchfile.pickle``, ``torchfile.damaged``.
        UnsupportedError
            ``torchfile.placement``: a placement other than ``Shard`` and ``Replicate``; ``torchfile.content``,
            ``torchfile.tensor``.
        """
        files: list[ByteSource] = []
        try:
            ranks = _open_ranks(store, name, files)
            return _catalog(ranks, files, name)
        except BaseException:
            for file in files:
                file.close()
            raise


class _Rank(NamedTuple):
    """The file of one rank, and its state dict as plain data."""

    name: str
    file: SavedFile
    state: Mapping[Any, Any]


def _open_ranks(store: Store, name: str, files: list[ByteSource]) -> list[_Rank]:
    folder, _, last = name.rpartition("/")
    match = _NAME.fullmatch(last)
    count = int(match[1]) if match else 0
    if not 1 <= count <= _MAX_RANKS:
        raise FormatError(RULE, f"expected the file of one of 1 to {_MAX_RANKS} ranks, found {last!r}", where=name)
    prefix = f"{folder}/" if folder else ""
    names = [f"{prefix}model_world_size_{count}_rank_{rank}.pt" for rank in range(count)]
    missing = [rank for rank, file_name in enumerate(names) if not store.exists(file_name)]
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise FormatError(RULE, f"expected the files of {count} ranks, but those of {listed} are missing", where=name)
    ranks = []
    for file_name in names:
        source = store.open(file_name)
        files.append(source)
        file = SavedFile(source, file_name)
        if not isinstance(file.content, dict):
            raise UnsupportedError(
                "expected a state dict of names to tensors", rule="torchfile.content", where=file_name
            )
        ranks.append(_Rank(file_name, file, file.content))
    return ranks


def _catalog(ranks: Sequence[_Rank], files: Sequence[ByteSource], name: str) -> Catalog:
    first = ranks[0]
    differing = next((rank for rank in ranks if rank.state.keys() != first.state.keys()), None)
    if differing is not None:
        key = next(iter(differing.state.keys() ^ first.state.keys()))
        raise FormatError(RULE, f"expected the same tensors in each rank, found {key!r:.200} in some", where=name)
    state = TrainingState({key: (key,) for key in first.state if isinstance(key, str)})
    tensors: dict[str, Tensor] = {}
    other_values = 0
    for key, tensor_name in state.weights.items():
        tensor = _tensor(key, tensor_name, ranks, files)
        if tensor is None:
            other_values += 1
        else:
            tensors[tensor_name] = tensor
    if not tensors:
        raise UnsupportedError(
            "expected a state dict of tensors, but it has none", rule="torchfile.content", where=name
        )
    return Catalog(
        tensors,
        metadata={"format": "pt"},
        headers={rank.name: rank.file.pickle for rank in ranks},
        sources=tuple(files),
        remarks=state.remarks(name, state.training, other_values),
    )


def _tensor(key: str, name: str, ranks: Sequence[_Rank], files: Sequence[ByteSource]) -> Tensor | None:
    """Return the tensor that is assembled from the ranks' values of a key; None if the values are no tensors."""
    location = f"{ranks[0].name}: {key[:200]}"
    parts = [_rank_part(rank, key) for rank in ranks]
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None
    if len(tensors) != len(parts) or len({(part.saved.dtype.name, part.shape) for part in tensors}) > 1:
        raise FormatError(RULE, "expected tensors of the same type and shape in each rank", where=location)
    first = tensors[0]
    if first.placements is None:
        _require_equal([part.saved for part in tensors], location)
        chunks = [Chunk((0,) * len(first.shape), first.shape, partial(_located, first.saved))]
        return sharded_tensor(name, first.saved.dtype, first.shape, chunks, files, location)
    sizes = _mesh_sizes(tensors, location)
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], SavedTensor] = {}
    for part in tensors:
        box = _box(part, sizes)
        if box[1] != part.saved.shape:
            raise FormatError(
                RULE, f"expected a part of {list(box[1])}, found {list(part.saved.shape)}", where=location
            )
        if prod(box[1]) or not box[1]:
            boxes.setdefault(box, part.saved)
    chunks = [Chunk(offsets, shape, partial(_located, saved)) for (offsets, shape), saved in boxes.items()]
    return sharded_tensor(name, first.saved.dtype, first.shape, chunks, files, location)


def _located(saved: SavedTensor) -> SavedTensor:
    return saved


class _RankPart(NamedTuple):
    """A rank's part of a tensor.

    ``shape`` is that of the full tensor. ``placements`` is None for a plain tensor. For a DTensor, it has one entry for
    each axis of the mesh: the axis of the tensor that is divided, or None for replicas. ``position`` is the rank's
    position on each axis of the mesh.
    """

    saved: SavedTensor
    shape: tuple[int, ...]
    placements: tuple[int | None, ...] | None
    position: tuple[int, ...]


def _rank_part(rank: _Rank, key: str) -> _RankPart | None:
    location = f"{rank.name}: {key[:200]}"
    value = rank.state[key]
    plain = rank.file.tensor(value, key)
    if plain is not None:
        return _RankPart(plain, plain.shape, None, ())
    if not isinstance(value, Record):
        return None
    state = _dtensor_state(value)
    spec = state.get("_spec")
    if not isinstance(spec, Record):
        raise UnsupportedError(
            f"expected a tensor or a DTensor, found {value.name[:120]}; save the model with "
            "torch.distributed.checkpoint, or as a full state dict",
            rule="torchfile.placement",
            where=location,
        )
    saved = rank.file.tensor(state.get("_local_tensor"), key)
    meta = spec.get("tensor_meta")
    mesh = spec.get("mesh")
    position = mesh.get("_coordinate_on_dim") if isinstance(mesh, Record) else None
    if saved is None or not (isinstance(meta, Record) and meta.args) or not isinstance(position, tuple | list):
        raise FormatError("torchfile.damaged", "expected the fields of a DTensor", where=location)
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) != len(position):
        raise FormatError("torchfile.damaged", "expected a placement for each axis of the mesh", where=location)
    shape = size_of(meta.args[0], location)
    axes = tuple(_axis(placement, len(shape), location) for placement in placements)
    return _RankPart(saved, shape, axes, size_of(tuple(position), location))


def _dtensor_state(value: Record) -> Mapping[Any, Any]:
    """Return the fields of a DTensor; an empty mapping for other objects."""
    if value.name != _WRAPPED or len(value.args) != 4 or not _DTENSOR.fullmatch(getattr(value.args[1], "text", "")):
        return {}
    state = value.args[3]
    if isinstance(state, tuple) and len(state) == 2:  # a class with slots has two states: its __dict__, and its slots
        state = state[1]
    return state if isinstance(state, dict) else {}


def _axis(placement: Any, rank: int, location: str) -> int | None:
    """Return the axis of the tensor that a placement divides; None for replicas."""
    placement_type = placement.name.rpartition(".")[2] if isinstance(placement, Record) else "nothing"
    if placement_type == "Replicate" and isinstance(placement, Record):
        return None
    if placement_type == "Shard":
        axis = placement.get("dim") if placement.state is not None else (placement.args or (None,))[0]
        if type(axis) is int and 0 <= axis < rank:
            return axis
    raise UnsupportedError(
        f"expected the placements Shard and Replicate, found {placement_type[:60]}; save the model with "
        "torch.distributed.checkpoint, or as a full state dict",
        rule="torchfile.placement",
        where=location,
    )


def _mesh_sizes(parts: Sequence[_RankPart], location: str) -> tuple[int, ...]:
    """Return the size of each axis of the mesh; raise an error unless each position has exactly one rank."""
    positions = {part.position for part in parts}
    axes = {(len(part.position), part.placements) for part in parts}
    sizes = tuple(max(indices) + 1 for indices in zip(*positions, strict=False))
    if len(axes) != 1 or len(positions) != len(parts) or prod(sizes) != len(parts):
        raise FormatError(RULE, "expected one mesh of all ranks, in which each has its position", where=location)
    return sizes


def _box(part: _RankPart, mesh: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets and sizes of a rank's part, one per axis of the full tensor."""
    offsets = [0] * len(part.shape)
    sizes = list(part.shape)
    for axis, index, count in zip(part.placements or (), part.position, mesh, strict=True):
        if axis is not None:
            chunk = -(-sizes[axis] // count)
            start = min(index * chunk, sizes[axis])
            offsets[axis] += start
            sizes[axis] = min(chunk, sizes[axis] - start)
    return tuple(offsets), tuple(sizes)


def _require_equal(replicas: Sequence[SavedTensor], location: str) -> None:
    """Raise an error unless all ranks have the same values. Only plain tensors, such as buffers, are compared."""
    first = replicas[0]
    nbytes = prod(first.shape) * first.itemsize
    if len(replicas) > 1 and nbytes > _MAX_COMPARED:
        raise UnsupportedError(
            f"expected a DTensor, found a plain tensor of {nbytes} bytes in each rank, perhaps a part of a larger one; "
            "save the model with torch.distributed.checkpoint",
            rule="torchfile.placement",
            where=location,
        )
    rows = first.shape[0] if first.shape else 1
    values = first.read_rows(0, rows).tobytes()
    if any(saved.read_rows(0, rows).tobytes() != values for saved in replicas[1:]):
        raise UnsupportedError(
            "expected a DTensor, or equal values in all ranks, found plain tensors with different values, which do not "
            "declare their place in the full tensor; save the model with torch.distributed.checkpoint",
            rule="torchfile.placement",
            where=location,
        )
