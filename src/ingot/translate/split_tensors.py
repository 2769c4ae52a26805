"""Split and join tensors that either transformers or llama.cpp fuses: experts of gpt-oss, keys and values of DeepSeek.

All names are those of transformers. The split experts of gpt-oss have the layout of MLX and llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.formats.packed_folders.compressed_tensors import CompressedTensorsFormat
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.reading.view import View
from ingot.model.tensor import Tensor
from ingot.naming.config import CONFIG
from ingot.translate import companions, hyper
from ingot.translate.families import FAMILIES, Family
from ingot.views.names import rename
from ingot.views.rows import stack, unstack
from ingot.views.transpose import transpose
from ingot.views.units import Units, UnitSelection, interleave, split_units

_GATE_UP = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"
_BIAS = "_bias"
_GATE = ".mlp.experts.gate_proj"
_UP = ".mlp.experts.up_proj"
_KV, _K, _V = (f".self_attn.{part}_proj.weight" for part in ("kv_b", "k_b", "v_b"))
_UNTRANSPOSED = ".held"
_EXPERTS = ".mlp.experts."
_PUBLISHED = "as published"
_STACKED = "gate, up and down, as mlx_lm has them"
_PER_EXPERT = "matrices of their own"
_INTERLEAVED = {family.model_type for family in FAMILIES.values() if family.interleaved}
RULE = "architecture.rows"


def packed_latent(checkpoint: Checkpoint) -> list[str]:
    """Return the names of matrices of keys and values that remain packed and therefore cannot be split.

    Splitting transposes the keys, which is impossible for packed matrices. FP8 matrices are not listed, because they
    are always decoded for GGUF.
    """
    return [name for name, tensor in checkpoint.items() if name.endswith(_KV) and not _is_decoded(tensor)]


def _is_decoded(tensor: Tensor) -> bool:
    """Return whether a tensor is dense in GGUF: it is dense already, or has 8-bit floats, which GGUF cannot store."""
    if tensor.codec != ScaledCodebookLayout.codec:
        return tensor.codec == DenseLayout.codec
    return (ScaledCodebookLayout.from_tensor(tensor).values or "").startswith("f8_")


def split_tensors(
    checkpoint: Checkpoint, config: Mapping[str, Any], family: Family, *, parted: bool = True
) -> Checkpoint:
    """Return the checkpoint with the experts' gate, up and down, or the keys and values, as separate tensors.

    ``parted`` is False if keys and values stay in one tensor.

    Raises ``UnsupportedError`` ``architecture.rows``: tensors of other shapes.
    """
    if family.interleaved:
        return split_experts(checkpoint)
    return _split_latent(checkpoint, config) if family.latent and parted else checkpoint


def join_tensors(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> Checkpoint:
    """Undo ``split_tensors``.

    Raises ``UnsupportedError`` ``architecture.rows``: tensors of other shapes, or a missing tensor.
    """
    if family.interleaved:
        return join_experts(checkpoint)
    return _join_latent(checkpoint, config) if family.latent else checkpoint


def split_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with experts as ``gate_proj``, ``up_proj``, ``down_proj``, [experts, outputs, inputs]."""
    names = dict[str, str]()
    biases = dict[str, str]()
    slices: dict[str, dict[str, UnitSelection]] = {}
    for name, tensor in checkpoint.items():
        if name.endswith((_GATE_UP, _DOWN)):
            _require(name, tensor.shape, 3, even=-1 if name.endswith(_GATE_UP) else None)
            names[name] = f"{name}.weight"
        elif name.endswith((_GATE_UP + _BIAS, _DOWN + _BIAS)):
            _require(name, tensor.shape, 2, even=-1 if name.endswith(_GATE_UP + _BIAS) else None)
            biases[name] = f"{name.removesuffix(_BIAS)}.bias"
    view = transpose(checkpoint, names) if names else checkpoint
    down_biases = {name: new for name, new in biases.items() if name.endswith(_DOWN + _BIAS)}
    view = rename(view, down_biases) if down_biases else view
    slices |= {name: _halves(new, checkpoint[name].shape) for name, new in biases.items() if name not in down_biases}
    for new in names.values():
        if new.endswith(f"{_GATE_UP}.weight"):
            slices[new] = _halves(new, view[new].shape)
    return split_units(view, slices) if slices else view


def _halves(name: str, shape: tuple[int, ...]) -> dict[str, UnitSelection]:
    count, rows = shape[:2]
    half = (count, rows // 2, *shape[2:])
    ends = (name.replace(_GATE_UP, part) for part in (_GATE, _UP))
    return {new: UnitSelection(half, Units(count, rows, start, rows // 2, 2)) for start, new in enumerate(ends)}


def join_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Undo ``split_experts``."""
    interleaved: dict[str, tuple[tuple[int, ...], dict[str, Units]]] = {}
    names = {}
    for name, tensor in checkpoint.items():
        ending = next((end for end in (".weight", ".bias") if name.endswith(end)), "")
        if not ending or not name.endswith((_GATE + ending, _DOWN + ending)):
            continue
        start = name.removesuffix(ending)
        shape = tensor.shape
        _require(name, shape, 3 if ending == ".weight" else 2)
        if start.endswith(_DOWN):
            names[name] = start + (_BIAS if ending == ".bias" else "")
            continue
        up_name = name.replace(_GATE, _UP)
        rows = 2 * shape[1]
        if up_name not in checkpoint or checkpoint[up_name].shape != shape:
            raise UnsupportedError(f"expected {up_name} of shape {list(shape)} next to it", rule=RULE, where=name)
        units = [Units(shape[0], rows, first, shape[1], 2) for first in range(2)]
        joined_name = name.replace(_GATE, _GATE_UP)
        interleaved[joined_name] = ((shape[0], rows, *shape[2:]), dict(zip((name, up_name), units, strict=True)))
        names[joined_name] = joined_name.removesuffix(ending) + (_BIAS if ending == ".bias" else "")
    weights = {name: new for name, new in names.items() if name.endswith(".weight")}
    biases = {name: new for name, new in names.items() if name not in weights}
    view = interleave(checkpoint, interleaved) if interleaved else checkpoint
    view = transpose(view, weights) if weights else view
    return rename(view, biases) if biases else view


def experts_for_format(checkpoint: Checkpoint, format: str, *, hint: str = "") -> View:
    """Return a checkpoint of gpt-oss with its experts in the layout that a format's runtime reads.

    mlx_lm reads ``gate_proj``, ``up_proj`` and ``down_proj`` that stack all experts. llm-compressor
    (compressed-tensors) reads matrices per expert, ``mlp.experts.N.gate_proj``. Every other format keeps the published
    tensors, and checkpoints of other models are returned unchanged. ``hint`` is appended to the note.

    Raises ``UnsupportedError`` ``architecture.rows``: tensors of other shapes, or a missing tensor.
    """
    files = companions.read_files({key: path for key, path in checkpoint.companions.items() if key == CONFIG})
    if companions.parse_file(files, CONFIG).get("model_type") not in _INTERLEAVED:
        return View(checkpoint)
    members = _names_by_expert(checkpoint)
    target_layout = {MlxFormat.name: _STACKED, CompressedTensorsFormat.name: _PER_EXPERT}.get(format, _PUBLISHED)
    source_layout = (
        _PER_EXPERT
        if members
        else _STACKED
        if any(name.endswith(f"{_GATE}.weight") for name in checkpoint)
        else _PUBLISHED
    )
    if source_layout == target_layout:
        return View(checkpoint)
    view = stack(checkpoint, members) if members else checkpoint
    if target_layout == _PUBLISHED:
        view = join_experts(view)
    else:
        view = split_experts(view)
        view = _unstack_experts(view) if target_layout == _PER_EXPERT else view
    return View(view, [f"experts of gpt-oss are {target_layout}{hint}"])


def _unstack_experts(checkpoint: Checkpoint) -> Checkpoint:
    names = {}
    for name, tensor in checkpoint.items():
        start, middle, tail = name.partition(_EXPERTS)
        if middle and tail.endswith((".weight", ".bias")):
            names[name] = [f"{start}{middle}{index}.{tail}" for index in range(tensor.shape[0])]
    return unstack(checkpoint, names) if names else checkpoint


def _names_by_expert(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the names of single experts' tensors, in the order of experts, by the name of the stacked tensor.

    Raises ``UnsupportedError`` ``architecture.rows``: an expert is missing.
    """
    by_stack: dict[str, dict[int, str]] = {}
    for name in checkpoint:
        start, middle, tail = name.partition(_EXPERTS)
        index, _, part = tail.partition(".")
        if middle and index.isascii() and index.isdigit() and len(index) <= 6:
            by_stack.setdefault(f"{start}{middle}{part}", {})[int(index)] = name
    for stacked, members in by_stack.items():
        if sorted(members) != list(range(len(members))):
            raise UnsupportedError(f"expected each expert, found {sorted(members)[:8]}", rule=RULE, where=stacked)
    return {stacked: [members[index] for index in sorted(members)] for stacked, members in by_stack.items()}


def _split_latent(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Split ``kv_b_proj`` [heads * (key + value), latent].

    Keys become [heads, latent, key], values [heads, value, latent].
    """
    heads, key, value = hyper.latent_sizes(config)
    slices = {}
    transposed = {}
    for name, tensor in checkpoint.items():
        if not name.endswith(_KV):
            continue
        if len(tensor.shape) != 2 or tensor.shape[0] != heads * (key + value):
            raise UnsupportedError(
                f"expected {heads} heads of {key} and {value} rows, found shape {list(tensor.shape)}",
                rule=RULE,
                where=name,
            )
        start = name.removesuffix(_KV)
        cols = tensor.shape[1]
        slices[name] = {
            f"{start}{_K}{_UNTRANSPOSED}": UnitSelection((heads, key, cols), Units(heads, key + value, 0, key)),
            f"{start}{_V}": UnitSelection((heads, value, cols), Units(heads, key + value, key, value)),
        }
        transposed[f"{start}{_K}{_UNTRANSPOSED}"] = f"{start}{_K}"
    return transpose(split_units(checkpoint, slices), transposed) if slices else checkpoint


def _join_latent(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    heads, key, value = hyper.latent_sizes(config)
    transposed = {}
    interleaved = {}
    for name, tensor in checkpoint.items():
        if not name.endswith(_K):
            continue
        value_name = name.removesuffix(_K) + _V
        shapes = [checkpoint[member].shape if member in checkpoint else () for member in (name, value_name)]
        latent = tensor.shape[1] if len(tensor.shape) == 3 else 0
        if shapes != [(heads, latent, key), (heads, value, latent)]:
            raise UnsupportedError(
                f"expected keys [{heads}, latent, {key}] and values [{heads}, {value}, latent], found "
                f"{[list(shape) for shape in shapes]}",
                rule=RULE,
                where=name,
            )
        transposed[name] = name + _UNTRANSPOSED
        members = {
            name + _UNTRANSPOSED: Units(heads, key + value, 0, key),
            value_name: Units(heads, key + value, key, value),
        }
        interleaved[name.removesuffix(_K) + _KV] = ((heads * (key + value), latent), members)
    return interleave(transpose(checkpoint, transposed), interleaved) if interleaved else checkpoint


def _require(name: str, shape: tuple[int, ...], rank: int, even: int | None = None) -> None:
    """Raise an error if a tensor does not have ``rank`` dimensions, or if dimension ``even`` has an odd size."""
    if len(shape) != rank or (even is not None and shape[even] % 2):
        pairs = "" if even is None else ", the last an even number"
        raise UnsupportedError(
            f"expected experts' tensor of {rank} dimensions{pairs}, found shape {list(shape)}", rule=RULE, where=name
        )
