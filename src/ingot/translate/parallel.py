"""Views that slice a model for one rank of tensor parallelism, as vLLM and Megatron do (``spec/parallel.md``).

Matrices that produce a split dimension are cut by rows, matrices that consume it by columns. Packed tensors stay
packed; a slice that would require decoding is refused.
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
from ingot.translate import companions, config_numbers
from ingot.views.common import BuildTensor, view_of
from ingot.views.units import Units, UnitSelection, select_units

KEY = "ingot.tensor_parallel"
"""Metadata key of a slice: its rank, the number of ranks, and the vocabulary's rows before padding."""
VOCABULARY = 64
"""vLLM pads the vocabulary to a multiple of this."""
MAX_RANKS = 1 << 12

_PARAMETER = re.compile(r"(?:.*\.)?([A-Za-z0-9_]+)\.(weight|bias)")
_VOCABULARY = ("embed_tokens", "lm_head")
_QUERIES = ("q_proj", "q_b_proj", "kv_b_proj")
_KEYS = ("k_proj", "v_proj")
_UNSPLIT_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
_BY_ROWS = ("gate_proj", "up_proj", "w1", "w3", "c_fc", "fc1")
_BY_COLUMNS = ("o_proj", "down_proj", "w2", "c_proj", "fc2")
_CORRECTION = "e_score_correction_bias"
_SINKS = "sinks"
_HEAD_NORMS = ("q_norm", "k_norm")
_FUSED_QKV = "qkv_proj"
_FUSED_MLP = "gate_up_proj"
_COPIED = ("gate", "router", "shared_expert_gate", *_UNSPLIT_LATENT)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of ``size`` slices; ``rank`` counts from 0."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class _AttentionSizes:
    """The numbers of query heads and key-value heads, and the size of a head."""

    heads: int
    key_heads: int
    head_size: int


def slice_for_rank(checkpoint: Checkpoint, rank: Rank) -> Checkpoint:
    """Return one rank's slice of a model's checkpoint.

    Raises
    ------
    UnsupportedError
        ``parallel.config``: there is no ``config.json`` next to the model. ``architecture.config``: its numbers of
        heads are not integers. ``parallel.tensor``: a tensor whose role in the model is unknown. ``parallel.heads``,
        ``parallel.cut``: the number of ranks does not divide the heads, rows, columns or groups.
    """
    files = companions.read_files({key: path for key, path in checkpoint.companions.items() if key == CONFIG})
    config = companions.parse_file(files, CONFIG)
    if not config:
        raise UnsupportedError(
            "the model's folder lacks config.json, whose counts of heads are needed to slice the model",
            rule="parallel.config",
            where=checkpoint.location,
        )
    sizes = _attention_sizes(config, rank.size)
    cuts = {name: _cut(name, checkpoint[name], sizes, rank) for name in checkpoint}

    def make(name: str) -> BuildTensor:
        return lambda: _sliced_tensor(checkpoint[name], cuts[name], rank)

    entries = [(name, None if cuts[name] is None else make(name), name) for name in checkpoint]
    view = view_of(checkpoint, entries, slice_for_rank, rank, [rank.rank, rank.size])
    rows = next((checkpoint[name].shape[0] for name in checkpoint if name.endswith("embed_tokens.weight")), None)
    view.metadata = {**checkpoint.metadata, KEY: json.dumps({"rank": rank.rank, "size": rank.size, "vocabulary": rows})}
    return view


@dataclass(frozen=True, slots=True)
class _Cut:
    """The rows that a rank gets: ``rows`` are runs (first row, number of rows), followed by ``zeros`` rows of zeros.

    If ``rows`` is empty, the rank gets all rows, and its share of the columns.
    """

    rows: Sequence[tuple[int, int]] = ()
    zeros: int = 0


def _attention_sizes(config: Mapping[str, Any], size: int) -> _AttentionSizes:
    heads, key_heads = config_numbers.heads(config)
    if heads % size:
        _refuse_division("parallel.heads", f"{heads} attention heads", heads, size)
    if key_heads % size and size % key_heads:
        _refuse_division("parallel.heads", f"{key_heads} key-value heads, which are cut or repeated", key_heads, size)
    return _AttentionSizes(heads, key_heads, config_numbers.head_size(config))


def _cut(name: str, tensor: Tensor, sizes: _AttentionSizes, rank: Rank) -> _Cut | None:
    """Return a rank's cut of a tensor; None if every rank has the full tensor."""
    match = _PARAMETER.fullmatch(name)
    module = match[1] if match is not None else name.rpartition(".")[2]
    vector = len(tensor.shape) == 1
    if module in _HEAD_NORMS and tensor.shape != (sizes.head_size,):
        raise _unknown_role(name, tensor)
    if tensor.size == 1 or (vector and ("norm" in module or module == _CORRECTION)):
        return None
    if vector and module == _SINKS:
        return _equal_share(name, tensor.shape[0], sizes.heads, rank)
    if match is None or len(tensor.shape) not in (1, 2):
        raise _unknown_role(name, tensor)
    if module in _COPIED or (vector and module in _BY_COLUMNS):
        return None
    return _columns(name, tensor, rank) if module in _BY_COLUMNS else _rows(name, module, tensor, sizes, rank)


def _rows(name: str, module: str, tensor: Tensor, sizes: _AttentionSizes, rank: Rank) -> _Cut:
    rows = tensor.shape[0]
    if module in _VOCABULARY:
        return _vocabulary(rows, rank)
    if module in (*_QUERIES, *_BY_ROWS):
        return _equal_share(name, rows, sizes.heads if module in _QUERIES else rank.size, rank)
    if module in _KEYS:
        return _key_heads(name, rows, sizes, rank)
    if module == _FUSED_MLP and rows % 2 == 0:
        half = _equal_share(name, rows // 2, rank.size, rank).rows
        return _Cut((*half, *((start + rows // 2, count) for start, count in half)))
    if module == _FUSED_QKV and rows % (sizes.heads + 2 * sizes.key_heads) == 0:
        return _fused_qkv(name, rows, sizes, rank)
    raise _unknown_role(name, tensor)


def _equal_share(name: str, rows: int, units: int, rank: Rank) -> _Cut:
    """Return an equal share of the rows; their number must be a multiple of ``units`` (heads, or ranks)."""
    if rows % units or rows % rank.size:
        _refuse_division("parallel.cut", f"{rows} rows", rows, rank.size, name)
    return _Cut(((rank.rank * (rows // rank.size), rows // rank.size),))


def _key_heads(name: str, rows: int, sizes: _AttentionSizes, rank: Rank) -> _Cut:
    """Return key-value heads: an equal share, or one head for several ranks if there are fewer heads than ranks."""
    if rows % sizes.key_heads:
        _refuse_division("parallel.cut", f"{rows} rows of {sizes.key_heads} heads", sizes.key_heads, rank.size, name)
    size = rows // sizes.key_heads
    if sizes.key_heads >= rank.size:
        return _equal_share(name, rows, sizes.key_heads, rank)
    return _Cut(((rank.rank // (rank.size // sizes.key_heads) * size, size),))


def _fused_qkv(name: str, rows: int, sizes: _AttentionSizes, rank: Rank) -> _Cut:
    head_rows = rows // (sizes.heads + 2 * sizes.key_heads)
    runs = list[tuple[int, int]]()
    runs += _equal_share(name, sizes.heads * head_rows, sizes.heads, rank).rows
    ((start, count),) = _key_heads(name, sizes.key_heads * head_rows, sizes, rank).rows
    runs += [((sizes.heads + shift * sizes.key_heads) * head_rows + start, count) for shift in range(2)]
    return _Cut(runs)


def _vocabulary(rows: int, rank: Rank) -> _Cut:
    """Return an equal share of a vocabulary's rows, after padding with zeros."""
    count = -(-rows // lcm(VOCABULARY, rank.size)) * lcm(VOCABULARY, rank.size) // rank.size
    start = min(rank.rank * count, rows)
    stored = min(count, rows - start)
    return _Cut(((start, stored),), count - stored)


def _columns(name: str, tensor: Tensor, rank: Rank) -> _Cut:
    cols = tensor.shape[1]
    if cols % rank.size:
        _refuse_division("parallel.cut", f"{cols} columns", cols, rank.size, name)
    return _Cut()


def _sliced_tensor(tensor: Tensor, cut: _Cut | None, rank: Rank) -> Tensor:
    assert cut is not None
    stored = _as_row_layout(tensor)
    if not cut.rows:
        rows, cols = stored.shape
        units = Units(rows, rank.size, rank.rank, 1)
        sliced = select_units(stored, tensor.name, UnitSelection((rows, cols // rank.size), units))
        return _require_packed(sliced, tensor, rank)
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
    row_runs = ElementRuns(origins, np.array(runs, np.int64).T)
    return _require_packed(assemble(tensor.name, shape, row_runs, CODECS[DenseLayout.codec]), tensor, rank)


def _as_row_layout(tensor: Tensor) -> Tensor:
    """Return packed integers in row layout; raises ``UnsupportedError`` ``parallel.cut`` if columns are reordered."""
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


def _require_packed(sliced: Tensor, tensor: Tensor, rank: Rank) -> Tensor:
    """Return a slice; raise an error if a packed tensor would have to be decoded for it."""
    if sliced.codec != DenseLayout.codec or tensor.codec == DenseLayout.codec:
        return sliced
    sizes = [size for size in range(2, rank.size) if _is_packed_slice(tensor, size)]
    raise UnsupportedError(
        f"expected slices that begin where groups and bytes do, found {tensor.codec} {list(tensor.shape)} cut into "
        f"{rank.size}; {_advice(sizes)}, or decode it (--recipe decompress)",
        rule="parallel.cut",
        where=tensor.name,
    )


def _is_packed_slice(tensor: Tensor, size: int) -> bool:
    rows, cols = tensor.matrix_shape
    if cols % size:
        return False
    units = Units(rows, size, 0, 1)
    return (
        select_units(_as_row_layout(tensor), "", UnitSelection((rows, cols // size), units)).codec != DenseLayout.codec
    )


def _zeros(tensor: Tensor, rows: int) -> Tensor:
    row = DTYPES[tensor.dtype]
    shape = (rows, *tensor.shape[1:])
    part = memory_part(np.zeros(shape, numpy_dtype(tensor.dtype)), row.storage, None if row.is_storage else row.name)
    return replace(tensor, shape=shape, parts={DATA: part}, origin=None)


def _refuse_division(rule: str, subject: str, count: int, size: int, location: str = "") -> NoReturn:
    works = [divisor for divisor in range(2, min(count, MAX_RANKS) + 1) if count % divisor == 0]
    raise UnsupportedError(f"expected {size} to divide {subject}; {_advice(works)}", rule=rule, where=location)


def _advice(works: Sequence[int]) -> str:
    return (
        f"these numbers would work: --tp {', '.join(map(str, works[:6]))}" if works else "no number of ranks would work"
    )


def _unknown_role(name: str, tensor: Tensor) -> UnsupportedError:
    return UnsupportedError(
        "the tensor's role in the model is unknown (expected attention, feed-forward network, embedding, norm), found "
        f"{tensor.dtype} {list(tensor.shape)}; experts of gpt-oss have known roles after --format mlx or "
        "compressed-tensors",
        rule="parallel.tensor",
        where=name,
    )
