"""The format of DeepSpeed's ZeRO checkpoints of stages 1, 2 and 3; read only.

A folder of one tag (``global_step100``) has two types of files. Each ``*_optim_states.pt`` has one rank's share of the
weights in f32. ``*_model_states.pt`` have names, shapes, buffers and frozen weights. The layout is that of DeepSpeed's
``zero_to_fp32.py``. The files are read as plain data, without a process group and without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.base import Catalog, FormatTraits, ReadOnlyFormat
from ingot.formats.torch.inert_pickle import Record
from ingot.formats.torch.saved_tensors import SavedFile, SavedTensor, size_of
from ingot.formats.torch.sharded import RULE, Chunk, sharded_tensor
from ingot.model.bytesource import ByteSource
from ingot.model.store import Store
from ingot.model.tensor import Tensor

_LATEST = "latest"
_MODEL = "mp_rank_00_model_states.pt"
_MODEL_OF_RANK = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_OPTIMIZER_OF_RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
_PREFIXES = ("", "bf16_", "fp16_")
_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d{1,6}_mp_rank_\d{2,6}_optim_states|zero_pp_rank_\d{1,6}_mp_rank_\d{2,6}_model_states)\.pt"
)
_TAG = re.compile(r"[\w][\w .+=-]{0,199}")
_OPTIMIZER = "optimizer_state_dict"
_MAX_RANKS = 4096
_METADATA = "torchfile.metadata"
_SECOND_PARALLEL = ("mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_01_model_states.pt")
_EXPERTS = tuple(f"layer_{layer}_expert_0_mp_rank_00_model_states.pt" for layer in range(4))
_UNIVERSAL = "convert the checkpoint with DeepSpeed's ds_to_universal.py"


class ZeroRanksFormat(ReadOnlyFormat):
    """The format of weights in the files of DeepSpeed's ranks."""

    name = "deepspeed-zero"
    suffixes: tuple[str, ...] = ()
    summary = "weights in the files of DeepSpeed's ranks, ZeRO stages 1 to 3 (*_optim_states.pt); read only"
    why_read_only = "Ingot only reads checkpoints of trainers: write safetensors, which every trainer loads"
    read_only_rule = "torchfile.read-only"
    traits = FormatTraits()

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file has the name of a rank's file."""
        return _FILE.fullmatch(name.rpartition("/")[2]) is not None

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file of names and shapes, if the folder has files of ranks."""
        ranked = [name for name in names if _FILE.fullmatch(name)]
        if not ranked:
            return None
        first = _MODEL_OF_RANK.format(0)
        return first if first in names else _MODEL if _MODEL in names else min(ranked)

    def fallback_entry(self, names: Sequence[str], store: Store) -> str | None:
        """Return the checkpoint's file with tensor names and shapes.

        This file is in the subfolder whose name the file ``latest`` contains. Returns None if either file is missing.
        """
        if _LATEST not in names:
            return None
        try:
            tag = store.read(_LATEST, 1024, RULE).decode("utf-8").strip()
        except UnicodeDecodeError:
            return None
        if not _TAG.fullmatch(tag):
            return None
        models = (f"{tag}/{name}" for name in (_MODEL_OF_RANK.format(0), _MODEL))
        is_zero = any(store.exists(f"{tag}/{prefix}{_OPTIMIZER_OF_RANK.format(0)}") for prefix in _PREFIXES)
        return next((name for name in models if is_zero and store.exists(name)), None)

    def file_name(self, stem: str) -> str:
        """Return the name of the file of names and shapes."""
        return _MODEL

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the weights, assembled from the files of all ranks.

        Raises
        ------
        FormatError
            ``torchfile.shards``: a rank's file is missing, or ranks contradict each other; ``torchfile.metadata``: an
            entry of DeepSpeed is missing; ``torchfile.zip``, ``torchfile.pickle``, ``torchfile.damaged``.
        UnsupportedError
            ``torchfile.placement``: tensor, pipeline or expert parallelism.
        """
        reader = _Reader(store, name)
        try:
            return reader.catalog()
        except BaseException:
            reader.close()
            raise


@dataclass(frozen=True, slots=True)
class _File:
    """A file of one rank, and its content as plain data."""

    name: str
    saved: SavedFile
    content: Mapping[Any, Any]

    def mapping(self, key: str) -> Mapping[Any, Any]:
        """Return an entry that is a mapping; an empty mapping if the entry is absent or None."""
        value = self.content.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise FormatError(_METADATA, f"expected a mapping {key}", where=self.name)
        return value


class _Reader:
    """A reader of a checkpoint that consists of one file per rank."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        folder = name.rpartition("/")[0]
        self._folder = f"{folder}/" if folder else ""
        self._sources: list[ByteSource] = []
        self._files: list[_File] = []

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def catalog(self) -> Catalog:
        self._refuse_other_parallelism()
        first = self._optimizer_file(0)
        stage = _stage(first)
        ranks = _rank_count(first)
        optimizers = [first, *(self._optimizer_file(rank) for rank in range(1, ranks))]
        if self._find(_OPTIMIZER_OF_RANK.format(ranks)) is not None:
            raise FormatError(
                RULE, f"expected {ranks} ranks, found a file of rank {ranks}; two saves are mixed", where=self._name
            )
        model_names = [_MODEL_OF_RANK.format(rank) for rank in range(ranks)] if stage == 3 else [_MODEL]
        models = [self._open(name) for name in model_names]
        for file in optimizers[1:]:
            if _stage(file) != stage or _rank_count(file) != ranks:
                raise FormatError(RULE, "expected the same stage and count of ranks in each file", where=file.name)
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        groups = [_flat_groups(file, key) for file in optimizers]
        tensors = self._weights(stage, models, groups, optimizers[0])
        return Catalog(
            tensors,
            metadata={"format": "pt"},
            headers={file.name: file.saved.pickle for file in self._files},
            sources=tuple(self._sources),
            remarks=[("torchfile.left-out", f"{self._name}: the optimizer's state of {ranks} ranks is left out")],
        )

    def _refuse_other_parallelism(self) -> None:
        for names, text in ((_SECOND_PARALLEL, "tensor parallelism"), (_EXPERTS, "expert parallelism")):
            refused = next((name for name in names if self._store.exists(self._folder + name)), None)
            if refused is not None:
                raise UnsupportedError(
                    f"expected ranks of data parallelism, found {text} ({refused}); {_UNIVERSAL}",
                    rule="torchfile.placement",
                    where=self._name,
                )

    def _find(self, name: str) -> str | None:
        """Return the name of a rank's file, with the prefix of its precision; None if it is missing."""
        names = (f"{self._folder}{prefix}{name}" for prefix in _PREFIXES)
        return next((path for path in names if self._store.exists(path)), None)

    def _optimizer_file(self, rank: int) -> _File:
        name = _OPTIMIZER_OF_RANK.format(rank)
        path = self._find(name)
        if path is None:
            raise FormatError(
                RULE,
                f"expected {name} with the weights of rank {rank}, but it is missing; did each node save into this "
                "folder?",
                where=self._name,
            )
        return self._opened(path)

    def _open(self, name: str) -> _File:
        path = self._folder + name
        if not self._store.exists(path):
            raise FormatError(RULE, f"expected {name} with names and shapes, but it is missing", where=self._name)
        return self._opened(path)

    def _opened(self, path: str) -> _File:
        source = self._store.open(path)
        self._sources.append(source)
        saved = SavedFile(source, path)
        if not isinstance(saved.content, dict):
            raise FormatError(_METADATA, "expected a mapping of DeepSpeed's entries", where=path)
        file = _File(path, saved, saved.content)
        self._files.append(file)
        return file

    def _weights(
        self, stage: int, models: Sequence[_File], groups: Sequence[Sequence[SavedTensor]], optimizer: _File
    ) -> dict[str, Tensor]:
        model = models[0]
        shapes = _param_shapes(model)
        ordered = [list(group.items()) for group in shapes]
        if any([list(group.items()) for group in _param_shapes(file)] != ordered for file in models[1:]):
            raise FormatError(RULE, "expected the same names and shapes in the files of all ranks", where=self._name)
        tensors: dict[str, Tensor] = {}
        for name in _names(model.content.get("buffer_names"), model.name):
            saved = model.saved.tensor(model.mapping("module").get(name), name)
            if saved is not None:  # buffers that are not persistent are not saved
                tensors[name] = self._joined(name, saved.shape, [_range(saved, 0, prod(saved.shape))])
        read_runs = _stage3_runs if stage == 3 else _stage2_runs
        paddings = optimizer.mapping(_OPTIMIZER).get("param_alignment_paddings")
        for name, shape, parts in read_runs(shapes, groups, paddings, self._name):
            tensors[name] = self._joined(name, shape, parts)
        for name, value in model.mapping("frozen_param_shapes").items():
            tensors[name] = self._frozen(name, size_of(value, model.name), models)
        for alias, name in model.mapping("shared_params").items():
            if name in tensors and isinstance(alias, str):
                tensors[alias] = replace(tensors[name], name=alias)
        if not tensors:
            raise UnsupportedError("the files contain no weights", rule="torchfile.content", where=self._name)
        unknown = next(
            (key for key, value in model.mapping("module").items() if _is_unknown(key, value, tensors)), None
        )
        if unknown is not None:
            raise FormatError(
                _METADATA, f"expected the shape of {unknown!r:.200}, which the model has", where=model.name
            )
        return tensors

    def _frozen(self, name: str, shape: tuple[int, ...], models: Sequence[_File]) -> Tensor:
        """Return a frozen weight, which one file contains completely, or the files of all ranks contain in equal
        shares.
        """
        parts = []
        remaining = prod(shape)
        for model in models:
            saved = model.saved.tensor(model.mapping("frozen_param_fragments").get(name), name)
            if saved is None or not saved.is_contiguous:
                raise FormatError(
                    RULE,
                    "expected the frozen weight, but the checkpoint was saved without frozen weights; take them from "
                    "the base model",
                    where=f"{model.name}: {name[:200]}",
                )
            count = min(remaining, prod(saved.shape))
            parts.append(_range(saved, 0, count))
            remaining -= count
        return self._joined(name, shape, parts)

    def _joined(self, name: str, shape: tuple[int, ...], parts: Sequence[SavedTensor]) -> Tensor:
        """Return the tensor whose elements are those of ``parts``, one after another."""
        location = f"{self._name}: {name[:200]}"
        parts = [part for part in parts if part.shape[0]]
        ends = list(accumulate(part.shape[0] for part in parts))
        starts = [0, *ends][: len(parts)]
        chunks = [
            Chunk((start,), part.shape, partial(_located, part)) for start, part in zip(starts, parts, strict=True)
        ]
        if len({part.dtype.name for part in parts}) > 1:
            raise FormatError(RULE, "expected one element type in all ranks", where=location)
        if not parts:
            raise UnsupportedError("the tensor has no elements", rule="torchfile.tensor", where=location)
        flat = sharded_tensor(name, parts[0].dtype, (prod(shape),), chunks, tuple(self._sources), location)
        return replace(flat, shape=shape)


_Shapes = list[dict[str, tuple[int, ...]]]
_WeightRuns = Iterator[tuple[str, tuple[int, ...], list[SavedTensor]]]


def _stage2_runs(shapes: _Shapes, groups: Sequence[Sequence[SavedTensor]], paddings: Any, location: str) -> _WeightRuns:
    """Yield the name, shape and runs of each weight of stages 1 and 2.

    The concatenated shares of the ranks contain the weights of a group, in order.
    """
    if any(len(rank) != len(shapes) for rank in groups):
        raise FormatError(RULE, f"expected {len(shapes)} groups of parameters in each rank", where=location)
    for index, group in enumerate(shapes):
        flat = _Flat([rank[index] for rank in groups])
        gaps = _gaps(paddings, index, len(group), location)
        position = 0
        for (name, shape), gap in zip(group.items(), gaps, strict=True):
            yield name, shape, flat.runs(position, prod(shape), f"{location}: {name[:200]}")
            position += prod(shape) + gap
        unit = 2 * len(groups)
        if -(-position // unit) != -(-flat.size // unit):
            raise FormatError(
                RULE, f"expected {position} elements and padding in group {index}, found {flat.size}", where=location
            )


def _gaps(paddings: Any, index: int, count: int, location: str) -> Sequence[int]:
    """Return the number of unused elements after each weight of the group ``index``."""
    if paddings is None:
        return [0] * count
    gaps = paddings[index] if isinstance(paddings, list) and index < len(paddings) else None
    if (
        not isinstance(gaps, list)
        or len(gaps) != count
        or not all(type(gap) is int and 0 <= gap < 1 << 40 for gap in gaps)
    ):
        raise FormatError(_METADATA, "expected a padding for each parameter", where=location)
    return gaps or []


def _stage3_runs(shapes: _Shapes, groups: Sequence[Sequence[SavedTensor]], paddings: Any, location: str) -> _WeightRuns:
    """Yield the name, shape and runs of each weight of stage 3.

    Each weight is divided into equal shares, one per rank; the last shares may be padded.
    """
    sizes = [[prod(tensor.shape) for tensor in rank] for rank in groups]
    if any(rank != sizes[0] for rank in sizes):
        raise FormatError(RULE, "expected shares of the same sizes in each rank", where=location)
    flats = [_Flat(rank) for rank in groups]
    position = 0
    for group in shapes:
        for name, shape in group.items():
            count = prod(shape)
            share = -(-count // len(groups))
            parts = []
            for rank, flat in enumerate(flats):
                used = min(share, max(0, count - rank * share))
                parts += flat.runs(position, used, f"{location}: {name[:200]}")
            yield name, shape, parts
            position += share
    if position != flats[0].size:
        raise FormatError(RULE, f"expected {position} elements in each rank, found {flats[0].size}", where=location)


class _Flat:
    """Flat tensors that are treated as one tensor: their elements are numbered one after another."""

    def __init__(self, tensors: Sequence[SavedTensor]) -> None:
        self._tensors = tensors
        self._ends = list(accumulate(prod(tensor.shape) for tensor in tensors))
        self.size = self._ends[-1] if self._ends else 0

    def runs(self, first: int, count: int, location: str) -> list[SavedTensor]:
        """Return the ``count`` elements from ``first`` on, as runs of elements of the flat tensors."""
        if first + count > self.size:
            raise FormatError(
                RULE, f"expected elements up to {first + count} in the ranks' shares, found {self.size}", where=location
            )
        runs = []
        for tensor, end in zip(self._tensors, self._ends, strict=True):
            begin = end - prod(tensor.shape)
            low = max(first, begin)
            high = min(first + count, end)
            if low < high:
                runs.append(_range(tensor, low - begin, high - low))
        return runs


def _range(tensor: SavedTensor, first: int, count: int) -> SavedTensor:
    """Return ``count`` elements of a contiguous tensor, from ``first`` on, as a tensor of one axis."""
    if not tensor.is_contiguous:
        raise UnsupportedError(
            "expected elements in row-major order", rule="torchfile.tensor", where=tensor.source.name
        )
    return replace(tensor, shape=(count,), first=tensor.first + first, stride=(1,))


def _is_unknown(key: Any, value: Any, tensors: Mapping[str, Tensor]) -> bool:
    return isinstance(value, Record) and value.name.startswith("torch._utils._rebuild") and key not in tensors


def _located(saved: SavedTensor) -> SavedTensor:
    return saved


def _param_shapes(model: _File) -> _Shapes:
    """Return the names and shapes of each group of parameters."""
    listed = model.content.get("param_shapes")
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        raise FormatError(
            _METADATA,
            "expected param_shapes, a list of names and shapes; was the checkpoint saved with the optimizer's state?",
            where=model.name,
        )
    groups = []
    seen: set[str] = set()
    for group in listed:
        names = _names(list(group), model.name)
        if len(seen | set(names)) != len(seen) + len(names):
            raise FormatError(_METADATA, "expected each name in one group", where=model.name)
        seen.update(names)
        groups.append({name: size_of(group[name], model.name) for name in names})
    return groups


def _names(value: Any, location: str) -> list[str]:
    if isinstance(value, Record) and value.name == "builtins.set":
        value = [*value.elements, *(value.args[0] if value.args and isinstance(value.args[0], list) else [])]
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise FormatError(_METADATA, "expected a list of names", where=location)
    return list(value)


def _rank_count(file: _File) -> int:
    count = file.mapping(_OPTIMIZER).get("partition_count")
    if isinstance(count, list) and count and all(type(item) is int for item in count):
        if len(set(count)) > 1:
            raise UnsupportedError(
                f"expected one count of ranks for all parameters, found expert parallelism; {_UNIVERSAL}",
                rule="torchfile.placement",
                where=file.name,
            )
        count = count[0]
    if type(count) is not int or not 1 <= count <= _MAX_RANKS:
        raise FormatError(_METADATA, f"expected partition_count, 1 to {_MAX_RANKS} ranks", where=file.name)
    return count


def _stage(file: _File) -> int:
    """Return the stage of ZeRO.

    It is stored as a number, or as a member of an enumeration, whose pickle is a call of the class with the number.

    Raises ``UnsupportedError`` ``torchfile.content``.
    """
    stage = file.mapping(_OPTIMIZER).get("zero_stage")
    if isinstance(stage, Record) and len(stage.args) == 1:
        stage = stage.args[0]
    if type(stage) is not int or not 1 <= stage <= 3:
        raise UnsupportedError(
            "expected stage 1, 2 or 3 of ZeRO in the optimizer's state; open the file *_model_states.pt of a "
            "checkpoint without ZeRO",
            rule="torchfile.content",
            where=file.name,
        )
    return stage


def _flat_groups(file: _File, key: str) -> list[SavedTensor]:
    """Return the flat tensors that a rank stores under a key."""
    listed = file.mapping(_OPTIMIZER).get(key)
    if not isinstance(listed, list) or not listed:
        raise FormatError(_METADATA, f"expected {key}, a list of flat tensors", where=file.name)
    groups = []
    for index, value in enumerate(listed):
        tensor = file.saved.tensor(value, f"{key}[{index}]")
        if tensor is None or len(tensor.shape) != 1:
            raise FormatError(_METADATA, f"expected flat tensors in {key}", where=file.name)
        groups.append(tensor)
    return groups
