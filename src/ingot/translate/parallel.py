"""One rank's slice of a model for tensor parallelism, as vLLM and Megatron cut (``spec/parallel.md``).

What makes outputs is cut by rows, what takes them by columns; both in the packed form, or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod
from typing import Any, NoReturn

import numpy as np

from ingot.codecs.affine.word_rows import rows_tensor
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.layouts.packed_ints import PackedIntLayout
from ingot.model.part import memory_part
from ingot.model.reading.view import ElementRuns, assemble
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.translate import companions, numbers
from ingot.views.common import Make, view_of
from ingot.views.strided import Strided, Units, strided_tensor

KEY = "ingot.tensor_parallel"
"""Metadata of a slice: its rank, the number of ranks, and the rows of the vocabulary before they were padded."""
VOCABULARY = 64
"""To a multiple of which vLLM pads the vocabulary."""
MOST = 1 << 12

_PARAMETER = re.compile(r"(?:.*\.)?([A-Za-z0-9_]+)\.(weight|bias)")
_VOCABULARY = ("embed_tokens", "lm_head")
_QUERIES = ("q_proj", "q_b_proj", "kv_b_proj")
_KEYS = ("k_proj", "v_proj")
_WHOLE_KV = ("q_a_proj", "kv_a_proj_with_mqa")
_BY_ROWS = ("gate_proj", "up_proj", "w1", "w3", "c_fc", "fc1")
_BY_COLUMNS = ("o_proj", "down_proj", "w2", "c_proj", "fc2")
_CORRECTION = "e_score_correction_bias"
_SINKS = "sinks"
_HEAD_NORMS = ("q_norm", "k_norm")
_FUSED_QKV = "qkv_proj"
_FUSED_MLP = "gate_up_proj"
_COPIED = ("gate", "router", "shared_expert_gate", *_WHOLE_KV)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of ``size`` slices, counted from 0."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the cuts of attention go by."""

    heads: int
    keys: int
    size: int


def sliced(checkpoint: Checkpoint, rank: Rank) -> Checkpoint:
    """Return the slice of a model's checkpoint that one rank holds.

    Raises
    ------
    UnsupportedError
        ``parallel.config``: no ``config.json`` beside it; ``architecture.config``: one without whole numbers of heads.
        ``parallel.tensor``: a tensor whose place in the model is not known. ``parallel.heads``, ``parallel.cut``:
        heads, rows, columns or groups that cannot be cut so.
    """
    files = companions.read_files({key: path for key, path in checkpoint.companions.items() if key == CONFIG})
    config = companions.parsed(files, CONFIG)
    if not config:
        raise UnsupportedError(
            "expected a model's folder with its config.json, which tells of the heads, found none",
            rule="parallel.config",
            where=checkpoint.location,
        )
    shape = _shape(config, rank.size)
    cuts = {name: _cut(name, checkpoint[name], shape, rank) for name in checkpoint}

    def make(name: str) -> Make:
        return lambda: _made(checkpoint[name], cuts[name], rank)

    entries = [(name, None if cuts[name] is None else make(name), name) for name in checkpoint]
    view = view_of(checkpoint, entries, sliced, rank, [rank.rank, rank.size])
    rows = next((checkpoint[name].shape[0] for name in checkpoint if name.endswith("embed_tokens.weight")), None)
    view.metadata = {**checkpoint.metadata, KEY: json.dumps({"rank": rank.rank, "size": rank.size, "vocabulary": rows})}
    return view


@dataclass(frozen=True, slots=True)
class _Cut:
    """Runs of rows, with zero rows behind them; or, where there are none, a run of columns."""

    rows: Sequence[tuple[int, int]] = ()
    zeros: int = 0


def _shape(config: Mapping[str, Any], size: int) -> _Shape:
    heads, keys = numbers.heads(config)
    if heads % size:
        _refuse("parallel.heads", f"{heads} attention heads", heads, size)
    if keys % size and size % keys:
        _refuse("parallel.heads", f"{keys} key-value heads, which are cut or repeated", keys, size)
    return _Shape(heads, keys, numbers.head_size(config))


def _cut(name: str, tensor: Tensor, shape: _Shape, rank: Rank) -> _Cut | None:
    """Return what a rank has of a tensor; None for all of it."""
    found = _PARAMETER.fullmatch(name)
    module = found[1] if found is not None else name.rpartition(".")[2]
    vector = len(tensor.shape) == 1
    if module in _HEAD_NORMS and tensor.shape != (shape.size,):
        raise _unknown(name, tensor)
    if tensor.size == 1 or (vector and ("norm" in module or module == _CORRECTION)):
        return None
    if vector and module == _SINKS:
        return _even(name, tensor.shape[0], shape.heads, rank)
    if found is None or len(tensor.shape) not in (1, 2):
        raise _unknown(name, tensor)
    if module in _COPIED or (vector and module in _BY_COLUMNS):
        return None
    return _columns(name, tensor, rank) if module in _BY_COLUMNS else _rows(name, module, tensor, shape, rank)


def _rows(name: str, module: str, tensor: Tensor, shape: _Shape, rank: Rank) -> _Cut:
    rows = tensor.shape[0]
    if module in _VOCABULARY:
        return _vocabulary(rows, rank)
    if module in (*_QUERIES, *_BY_ROWS):
        return _even(name, rows, shape.heads if module in _QUERIES else rank.size, rank)
    if module in _KEYS:
        return _keys(name, rows, shape, rank)
    if module == _FUSED_MLP and rows % 2 == 0:
        half = _even(name, rows // 2, rank.size, rank).rows
        return _Cut((*half, *((start + rows // 2, count) for start, count in half)))
    if module == _FUSED_QKV and rows % (shape.heads + 2 * shape.keys) == 0:
        return _fused(name, rows, shape, rank)
    raise _unknown(name, tensor)


def _even(name: str, rows: int, units: int, rank: Rank) -> _Cut:
    """Rows of ``units`` heads, or any, of which each rank has as many."""
    if rows % units or rows % rank.size:
        _refuse("parallel.cut", f"{rows} rows", rows, rank.size, name)
    return _Cut(((rank.rank * (rows // rank.size), rows // rank.size),))


def _keys(name: str, rows: int, shape: _Shape, rank: Rank) -> _Cut:
    """Key-value heads: cut, or, where there are fewer than ranks, one of them for several ranks."""
    if rows % shape.keys:
        _refuse("parallel.cut", f"{rows} rows of {shape.keys} heads", shape.keys, rank.size, name)
    size = rows // shape.keys
    if shape.keys >= rank.size:
        return _even(name, rows, shape.keys, rank)
    return _Cut(((rank.rank // (rank.size // shape.keys) * size, size),))


def _fused(name: str, rows: int, shape: _Shape, rank: Rank) -> _Cut:
    size = rows // (shape.heads + 2 * shape.keys)
    runs = list[tuple[int, int]]()
    runs += _even(name, shape.heads * size, shape.heads, rank).rows
    ((start, count),) = _keys(name, shape.keys * size, shape, rank).rows
    runs += [((shape.heads + shift * shape.keys) * size + start, count) for shift in range(2)]
    return _Cut(runs)


def _vocabulary(rows: int, rank: Rank) -> _Cut:
    """Rows of a vocabulary that is padded with zeros, so that each rank has as many."""
    count = -(-rows // lcm(VOCABULARY, rank.size)) * lcm(VOCABULARY, rank.size) // rank.size
    start = min(rank.rank * count, rows)
    own = min(count, rows - start)
    return _Cut(((start, own),), count - own)


def _columns(name: str, tensor: Tensor, rank: Rank) -> _Cut:
    cols = tensor.shape[1]
    if cols % rank.size:
        _refuse("parallel.cut", f"{cols} columns", cols, rank.size, name)
    return _Cut()


def _made(tensor: Tensor, cut: _Cut | None, rank: Rank) -> Tensor:
    assert cut is not None
    stored = _in_rows(tensor)
    if not cut.rows:
        rows, cols = stored.shape
        units = Units(rows, rank.size, rank.rank, 1)
        made = strided_tensor(stored, tensor.name, Strided((rows, cols // rank.size), units))
        return _as_packed(made, tensor, rank)
    if cut.zeros and stored.codec != DenseLayout.codec:
        raise UnsupportedError(
            f"expected {VOCABULARY} and {rank.size} to divide the rows of a packed vocabulary, found "
            f"{tensor.shape[0]}; decode it (a recipe with codec dense for it)",
            rule="parallel.cut",
            where=tensor.name,
        )
    width = prod(stored.shape[1:])
    origins = [stored]
    runs = [(0, start * width, count * width) for start, count in cut.rows]
    if cut.zeros:
        origins.append(_zeros(stored, cut.zeros))
        runs.append((1, 0, cut.zeros * width))
    shape = (sum(count for _, count in cut.rows) + cut.zeros, *stored.shape[1:])
    every = ElementRuns(origins, np.array(runs, np.int64).T)
    return _as_packed(assemble(tensor.name, shape, every, CODECS[DenseLayout.codec]), tensor, rank)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return integers in words as rows; raises ``UnsupportedError`` ``parallel.cut`` where columns have an order."""
    if tensor.codec != PackedIntLayout.codec:
        return tensor
    CODECS[tensor.codec].check(tensor)
    layout = PackedIntLayout.from_tensor(tensor)
    if layout.scattered:
        raise UnsupportedError(
            "expected groups of neighbouring columns, found an order or factors of columns (act-order, g_idx), whose "
            "groups every rank would need; quantize without act-order, or decode (--recipe decompress)",
            rule="parallel.cut",
            where=tensor.name,
        )
    return replace(rows_tensor(tensor, layout), decoder=CODECS[AffineLayout.codec])


def _as_packed(made: Tensor, tensor: Tensor, rank: Rank) -> Tensor:
    """Return a slice, refused where it would have to be decoded."""
    if made.codec != DenseLayout.codec or tensor.codec == DenseLayout.codec:
        return made
    sizes = [size for size in range(2, rank.size) if _fits(tensor, size)]
    raise UnsupportedError(
        f"expected slices that begin where groups and bytes do, found {tensor.codec} {list(tensor.shape)} cut into "
        f"{rank.size}; {_advice(sizes)}, or decode it (--recipe decompress)",
        rule="parallel.cut",
        where=tensor.name,
    )


def _fits(tensor: Tensor, size: int) -> bool:
    rows, cols = tensor.matrix_shape
    if cols % size:
        return False
    units = Units(rows, size, 0, 1)
    return strided_tensor(_in_rows(tensor), "", Strided((rows, cols // size), units)).codec != DenseLayout.codec


def _zeros(tensor: Tensor, rows: int) -> Tensor:
    row = DTYPES[tensor.dtype]
    shape = (rows, *tensor.shape[1:])
    part = memory_part(np.zeros(shape, numpy_dtype(tensor.dtype)), row.storage, None if row.is_storage else row.name)
    return replace(tensor, shape=shape, parts={DATA: part}, origin=None)


def _refuse(rule: str, what: str, count: int, size: int, where: str = "") -> NoReturn:
    works = [other for other in range(2, min(count, MOST) + 1) if count % other == 0]
    raise UnsupportedError(f"expected {size} to divide {what}; {_advice(works)}", rule=rule, where=where)


def _advice(works: Sequence[int]) -> str:
    return f"what would work: --tp {', '.join(map(str, works[:6]))}" if works else "no number of ranks would work"


def _unknown(name: str, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        f"expected a tensor whose place in a model is known (attention, feed-forward network, embedding, norm), found "
        f"{tensor.dtype} {list(tensor.shape)}; experts of gpt-oss have such places after --format mlx or "
        "compressed-tensors",
        rule="parallel.tensor",
        where=name,
    )
