"""Views equal NumPy doing the same on whole arrays: alone, of one another, in pieces, copied, and written."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot import views
from ingot.artifacts.state_dict import open_bytes, save_bytes
from ingot.codecs.table import CODECS
from ingot.core.numeric.blocks import Blocks, block_count
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import bits, encode_tensor, zstd_part

# Pairs, so that some can be joined as they are stored.
STORED: tuple[tuple[str, tuple[int, ...], str, Mapping[str, Any]], ...] = (
    ("dense", (6, 8), "bf16", {}),
    ("dense", (6, 8), "bf16", {}),
    ("dense", (3, 2, 8), "f32", {}),
    ("dense", (7,), "f16", {}),
    ("dense", (), "f32", {}),
    ("dense", (0, 8), "f32", {}),
    ("affine", (6, 8), "f32", {"bits": 4, "group": 4}),
    ("affine", (5, 8), "f32", {"bits": 4, "group": 4}),
    ("affine", (6, 5), "bf16", {"bits": 3, "group": "row", "symmetric": False}),
    ("affine", (6, 8), "f32", {"bits": 8, "group": "tensor"}),
    ("affine", (2, 3, 8), "f32", {"bits": 2, "group": 8, "zero_kind": "offset", "symmetric": False}),
    ("palette", (6, 8), "f32", {"bits": 4}),
    ("palette", (6, 8), "f32", {"bits": 2, "group": 2}),
    ("palette", (6, 8), "f16", {"bits": 3, "vector": 2, "vector_axis": 1}),
    ("float_entropy", (48, 16), "bf16", {"chunk": 256}),
    ("sparse_csr", (6, 8), "f32", {}),
    ("sparse_mask", (6, 8), "f32", {}),
    ("tca_tbe", (16, 64), "bf16", {}),
    ("with_outliers", (6, 64), "f32", {"count": 1, "inner": "affine", "options": {"bits": 4, "group": 32}}),
    ("sparse_blocks", (6, 8), "f32", {"axis": 1, "block": 2, "mask": b"\x0b"}),
)


@cache
def stored() -> bytes:
    rng = np.random.default_rng(5)
    tensors: dict[str, Tensor] = {}
    for index, (codec, shape, dtype, options) in enumerate(STORED):
        values = (rng.standard_normal(shape) * (rng.random(shape) < 0.8)).astype(numpy_dtype(dtype))
        tensor = encode_tensor(CODECS[codec], values, options, dtype=dtype)
        if index % 3 == 1 and codec in ("dense", "affine"):
            tensor = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        tensors[f"t{index}"] = tensor
    return save_bytes(tensors, {"made": "for views"}, format="zt")


def opened() -> tuple[Checkpoint, dict[str, Array]]:
    checkpoint = open_bytes(stored())
    return checkpoint, {name: tensor.numpy() for name, tensor in checkpoint.items()}


State = tuple[Checkpoint, dict[str, Array]]


def rename(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    names = draw(st.lists(st.sampled_from(list(arrays)), unique=True, max_size=4))
    order = draw(st.permutations(names))
    mapping = {old: new if draw(st.booleans()) else f"{old}'" for old, new in zip(names, order, strict=True)}
    mapping = mapping if len({mapping.get(name, name) for name in arrays}) == len(arrays) else {}
    return views.rename(checkpoint, mapping), {mapping.get(name, name): array for name, array in arrays.items()}


def drop(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    names = draw(st.lists(st.sampled_from(list(arrays)), unique=True, max_size=2))
    names = names[: len(arrays) - 1]
    return views.drop(checkpoint, names), {name: array for name, array in arrays.items() if name not in names}


def some(draw: Any, arrays: Mapping[str, Array], *, ranks: range = range(1, 9)) -> list[str]:
    fit = [name for name, array in arrays.items() if array.ndim in ranks]
    return draw(st.lists(st.sampled_from(fit), unique=True, max_size=5)) if fit else []


def take(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    rows: dict[str, Any] = {}
    for name in some(draw, arrays):
        count = len(arrays[name])
        ends = st.none() | st.integers(-count - 1, count + 1)
        anywhere = st.lists(st.integers(-count, count - 1), max_size=6) if count else st.just([])
        rows[name] = draw(anywhere | st.builds(slice, ends, ends, st.sampled_from([None, 2, -1])))
    found = {
        name: array[np.arange(len(array))[rows[name]]] if name in rows else array for name, array in arrays.items()
    }
    return views.take(checkpoint, rows), found


def permute(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    order = {name: draw(st.permutations(range(len(arrays[name])))) for name in some(draw, arrays)}
    found = {name: array[np.array(order[name], np.int64)] if name in order else array for name, array in arrays.items()}
    return views.permute(checkpoint, order), found


def join(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    name = draw(st.sampled_from(list(arrays)))
    stacked = draw(st.booleans())

    def fits(other: Array) -> bool:
        mine = arrays[name]
        same = other.shape == mine.shape if stacked else other.ndim > 0 and other.shape[1:] == mine.shape[1:]
        return other.dtype == mine.dtype and same

    if arrays[name].ndim == 0 and not stacked:
        return state
    others = [other for other, array in arrays.items() if other != name and fits(array)]
    members = [name, *draw(st.lists(st.sampled_from(others), unique=True, max_size=2) if others else st.just([]))]
    verb, numpys = (views.stack, np.stack) if stacked else (views.concatenate, np.concatenate)
    whole = numpys([arrays[member] for member in members])
    found = {
        "joined" if key == name else key: whole if key == name else array
        for key, array in arrays.items()
        if key == name or key not in members
    }
    return state if "joined" in arrays else (verb(checkpoint, {"joined": members}), found)


def split(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    names = [name for name in some(draw, arrays) if len(arrays[name]) < 50][:2]
    if not names or any(f"{name}." in other for name in names for other in arrays):
        return state
    found: dict[str, Array] = {}
    parts: dict[str, Any] = {}
    apart = draw(st.booleans())
    for name, array in arrays.items():
        if name not in names:
            found[name] = array
        elif apart:
            parts[name] = [f"{name}.{row}" for row in range(len(array))]
            found |= {new: array[row] for row, new in enumerate(parts[name])}
        else:
            ends = sorted(draw(st.lists(st.integers(0, len(array)), max_size=3)))
            pieces = np.split(array, ends)
            parts[name] = {f"{name}.{number}": len(piece) for number, piece in enumerate(pieces)}
            found |= {f"{name}.{number}": piece for number, piece in enumerate(pieces)}
    return (views.unstack if apart else views.split)(checkpoint, parts), found


def prune(draw: Any, state: State) -> State:
    checkpoint, arrays = state
    prunings, found = {}, dict(arrays)
    for name in some(draw, arrays, ranks=range(2, 3)):
        if arrays[name].dtype.kind == "b":
            continue
        axis, block = draw(st.integers(0, 1)), draw(st.integers(1, 4))
        channels = arrays[name].shape[axis]
        count = block_count(channels, block)
        kept = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        prunings[name] = views.Pruning(axis, Blocks.from_flags(channels, block, kept))
        array = np.zeros_like(arrays[name])
        channel = np.repeat(np.array(kept, bool), block)[:channels]
        index = (channel, slice(None)) if axis == 0 else (slice(None), channel)
        array[index] = arrays[name][index]
        found[name] = array
    return views.prune(checkpoint, prunings), found


VERBS = (rename, drop, take, permute, join, split, prune)


def check(draw: Any, state: State) -> None:
    checkpoint, arrays = state
    assert list(checkpoint) == list(arrays)
    for name, array in arrays.items():
        tensor = checkpoint[name]
        assert (tensor.name, tensor.shape) == (name, array.shape)
        if array.ndim and draw(st.booleans()):
            key = draw(st.builds(slice, st.integers(0, len(array)), st.integers(0, len(array))))
            assert bits(tensor[key]) == bits(array[key])
        whole = tensor.numpy()
        assert whole.dtype == array.dtype
        assert bits(whole) == bits(array), (name, tensor)


@settings(max_examples=40)
@given(st.data())
def test_views_of_views_equal_numpy(data: st.DataObject) -> None:
    state = opened()
    for verb in data.draw(st.lists(st.sampled_from(VERBS), min_size=1, max_size=4)):
        state = verb(data.draw, state)
    check(data.draw, state)
    how = data.draw(st.sampled_from(["as it is", "copied", "written"]))
    if how == "copied":
        check(data.draw, (pickle.loads(pickle.dumps(state[0])), state[1]))
    elif how == "written":
        check(data.draw, (open_bytes(save_bytes(state[0], format="zt")), state[1]))
