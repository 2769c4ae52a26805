"""Tensors that one side has in one piece and the other in several: experts of gpt-oss, keys and values of DeepSeek.

Both sides here have transformers' names. Experts of gpt-oss are taken apart into what MLX and llama.cpp have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.formats.packed_folders.compressed_tensors import CompressedTensorsFormat
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.view import View
from ingot.naming.config import CONFIG
from ingot.translate import companions, hyper
from ingot.translate.families import FAMILIES, Family
from ingot.views.names import rename
from ingot.views.rows import stack, unstack
from ingot.views.strided import Strided, Units, strided, woven
from ingot.views.turn import turn

_TOGETHER = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"
_BIAS = "_bias"
_GATE = ".mlp.experts.gate_proj"
_UP = ".mlp.experts.up_proj"
_KV, _K, _V = (f".self_attn.{part}_proj.weight" for part in ("kv_b", "k_b", "v_b"))
_HELD = ".held"
_EXPERTS = ".mlp.experts."
_PUBLISHED = "as published"
_STACKED = "gate, up and down, as mlx_lm has them"
_SINGLE = "matrices of their own"
_INTERLEAVED = {family.model_type for family in FAMILIES.values() if family.interleaved}
RULE = "architecture.rows"


def has_parted(checkpoint: Checkpoint) -> bool:
    """Whether keys and values are to have matrices of their own: packed ones cannot be turned, as keys are."""
    return all(tensor.codec == DenseLayout.codec for name, tensor in checkpoint.items() if name.endswith(_KV))


def apart(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family, *, parted: bool = True) -> Checkpoint:
    """Return the checkpoint with gate, up and down of the experts, or keys and values, as tensors of their own.

    Raises ``UnsupportedError`` ``architecture.rows``: tensors of other shapes.
    """
    if family.interleaved:
        return experts_apart(checkpoint)
    return _latent_apart(checkpoint, config) if family.latent and parted else checkpoint


def together(checkpoint: Checkpoint, config: Mapping[str, Any], family: Family) -> Checkpoint:
    """Undo ``apart``, where it was done; errors as there."""
    if family.interleaved:
        return experts_together(checkpoint)
    return _latent_together(checkpoint, config) if family.latent else checkpoint


def experts_apart(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with experts as ``gate_proj``, ``up_proj``, ``down_proj``, [experts, outputs, inputs]."""
    names = dict[str, str]()
    biases = dict[str, str]()
    pieces: dict[str, dict[str, Strided]] = {}
    for name, tensor in checkpoint.items():
        if name.endswith((_TOGETHER, _DOWN)):
            _require(name, tensor.shape, 3, even=-1 if name.endswith(_TOGETHER) else None)
            names[name] = f"{name}.weight"
        elif name.endswith((_TOGETHER + _BIAS, _DOWN + _BIAS)):
            _require(name, tensor.shape, 2, even=-1 if name.endswith(_TOGETHER + _BIAS) else None)
            biases[name] = f"{name.removesuffix(_BIAS)}.bias"
    view = turn(checkpoint, names) if names else checkpoint
    whole = {name: new for name, new in biases.items() if name.endswith(_DOWN + _BIAS)}
    view = rename(view, whole) if whole else view
    pieces |= {name: _halves(new, checkpoint[name].shape) for name, new in biases.items() if name not in whole}
    for new in names.values():
        if new.endswith(f"{_TOGETHER}.weight"):
            pieces[new] = _halves(new, view[new].shape)
    return strided(view, pieces) if pieces else view


def _halves(name: str, shape: tuple[int, ...]) -> dict[str, Strided]:
    count, rows = shape[:2]
    half = (count, rows // 2, *shape[2:])
    ends = (name.replace(_TOGETHER, part) for part in (_GATE, _UP))
    return {new: Strided(half, Units(count, rows, start, rows // 2, 2)) for start, new in enumerate(ends)}


def experts_together(checkpoint: Checkpoint) -> Checkpoint:
    """Undo ``experts_apart``."""
    joined: dict[str, tuple[tuple[int, ...], dict[str, Units]]] = {}
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
        other = name.replace(_GATE, _UP)
        rows = 2 * shape[1]
        if other not in checkpoint or checkpoint[other].shape != shape:
            raise UnsupportedError(f"expected {other} of shape {list(shape)} beside it", rule=RULE, where=name)
        units = [Units(shape[0], rows, first, shape[1], 2) for first in range(2)]
        whole = name.replace(_GATE, _TOGETHER)
        joined[whole] = ((shape[0], rows, *shape[2:]), dict(zip((name, other), units, strict=True)))
        names[whole] = whole.removesuffix(ending) + (_BIAS if ending == ".bias" else "")
    weights = {name: new for name, new in names.items() if name.endswith(".weight")}
    biases = {name: new for name, new in names.items() if name not in weights}
    view = woven(checkpoint, joined) if joined else checkpoint
    view = turn(view, weights) if weights else view
    return rename(view, biases) if biases else view


def experts_for(checkpoint: Checkpoint, format: str, *, hint: str = "") -> View:
    """Return a checkpoint of gpt-oss with its experts as the programs of a format have them; itself for other models.

    mlx_lm has ``gate_proj``, ``up_proj`` and ``down_proj`` of all experts, llm-compressor (compressed-tensors) those
    of each, ``mlp.experts.N.gate_proj``; others what is published. ``hint`` is appended to the note. Errors as
    ``apart``.
    """
    files = companions.read_files({key: path for key, path in checkpoint.companions.items() if key == CONFIG})
    if companions.parsed(files, CONFIG).get("model_type") not in _INTERLEAVED:
        return View(checkpoint)
    single = _by_expert(checkpoint)
    wanted = {MlxFormat.name: _STACKED, CompressedTensorsFormat.name: _SINGLE}.get(format, _PUBLISHED)
    here = (
        _SINGLE if single else _STACKED if any(name.endswith(f"{_GATE}.weight") for name in checkpoint) else _PUBLISHED
    )
    if here == wanted:
        return View(checkpoint)
    view = stack(checkpoint, single) if single else checkpoint
    if wanted == _PUBLISHED:
        view = experts_together(view)
    else:
        view = experts_apart(view)
        view = _one_by_one(view) if wanted == _SINGLE else view
    return View(view, [f"experts of gpt-oss are {wanted}{hint}"])


def _one_by_one(checkpoint: Checkpoint) -> Checkpoint:
    names = {}
    for name, tensor in checkpoint.items():
        start, middle, rest = name.partition(_EXPERTS)
        if middle and rest.endswith((".weight", ".bias")):
            names[name] = [f"{start}{middle}{number}.{rest}" for number in range(tensor.shape[0])]
    return unstack(checkpoint, names) if names else checkpoint


def _by_expert(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the tensors of single experts by the name that they have together.

    Raises ``UnsupportedError`` ``architecture.rows``: one is missing.
    """
    found: dict[str, dict[int, str]] = {}
    for name in checkpoint:
        start, middle, rest = name.partition(_EXPERTS)
        number, _, part = rest.partition(".")
        if middle and number.isascii() and number.isdigit() and len(number) <= 6:
            found.setdefault(f"{start}{middle}{part}", {})[int(number)] = name
    for whole, members in found.items():
        if sorted(members) != list(range(len(members))):
            raise UnsupportedError(f"expected each expert, found {sorted(members)[:8]}", rule=RULE, where=whole)
    return {whole: [members[number] for number in sorted(members)] for whole, members in found.items()}


def _latent_apart(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Part ``kv_b_proj`` [heads (key + value), latent] into keys, turned, and values: [heads, ...] both."""
    heads, key, value = hyper.latent_of(config)
    pieces = {}
    turned = {}
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
        pieces[name] = {
            f"{start}{_K}{_HELD}": Strided((heads, key, cols), Units(heads, key + value, 0, key)),
            f"{start}{_V}": Strided((heads, value, cols), Units(heads, key + value, key, value)),
        }
        turned[f"{start}{_K}{_HELD}"] = f"{start}{_K}"
    return turn(strided(checkpoint, pieces), turned) if pieces else checkpoint


def _latent_together(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    heads, key, value = hyper.latent_of(config)
    turned = {}
    joined = {}
    for name, tensor in checkpoint.items():
        if not name.endswith(_K):
            continue
        other = name.removesuffix(_K) + _V
        shapes = [checkpoint[each].shape if each in checkpoint else () for each in (name, other)]
        latent = tensor.shape[1] if len(tensor.shape) == 3 else 0
        if shapes != [(heads, latent, key), (heads, value, latent)]:
            raise UnsupportedError(
                f"expected keys [{heads}, latent, {key}] and values [{heads}, {value}, latent], found "
                f"{[list(shape) for shape in shapes]}",
                rule=RULE,
                where=name,
            )
        turned[name] = name + _HELD
        members = {
            name + _HELD: Units(heads, key + value, 0, key),
            other: Units(heads, key + value, key, value),
        }
        joined[name.removesuffix(_K) + _KV] = ((heads * (key + value), latent), members)
    return woven(turn(checkpoint, turned), joined) if joined else checkpoint


def _require(name: str, shape: tuple[int, ...], rank: int, even: int | None = None) -> None:
    """Refuse a tensor of other than ``rank`` dimensions, or with an odd number of what are pairs."""
    if len(shape) != rank or (even is not None and shape[even] % 2):
        pairs = "" if even is None else ", the last an even number"
        raise UnsupportedError(
            f"expected experts' tensor of {rank} dimensions{pairs}, found shape {list(shape)}", rule=RULE, where=name
        )
