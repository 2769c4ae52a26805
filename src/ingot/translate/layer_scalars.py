"""Scalar parameters of layers, such as those of xIELU, which GGUF metadata contain as arrays with a value per layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import cast
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.translate.config_numbers import is_number
from ingot.translate.families import Family
from ingot.translate.keys import Typed
from ingot.views.dense import Change, add, change

RULE = "architecture.rows"


def to_metadata(checkpoint: Checkpoint, family: Family) -> Typed:
    """Return GGUF metadata: for each scalar parameter, an array with its value in each layer.

    Raises ``UnsupportedError`` ``architecture.rows``: a parameter has several numbers, or a layer lacks it.
    """
    metadata: Typed = {}
    for parameter, (key, _) in family.scalars.items():
        pattern = re.compile(rf"{re.escape(family.block)}\.([0-9]{{1,6}})\.{re.escape(parameter)}")
        layers = {int(match[1]): name for name in checkpoint if (match := pattern.fullmatch(name))}
        if sorted(layers) != list(range(len(layers))) or not layers:
            raise UnsupportedError(f"expected {parameter} in each layer", rule=RULE, where=checkpoint.location)
        invalid = next((name for name in layers.values() if checkpoint[name].size != 1), None)
        if invalid is not None:
            shape = list(checkpoint[invalid].shape)
            raise UnsupportedError(f"expected one number, found shape {shape}", rule=RULE, where=invalid)
        values = [float(checkpoint[layers[index]].numpy("f32").reshape(-1)[0]) for index in range(len(layers))]
        metadata[key] = ("array:f32", values)
    return metadata


def add_tensors(checkpoint: Checkpoint, metadata: Mapping[str, Any], family: Family, main_dtype: str) -> Checkpoint:
    """Return the checkpoint with the scalars of the metadata as tensors, in ``main_dtype`` if that is exact.

    Raises ``UnsupportedError`` ``architecture.config``: the metadata lack an array.
    """
    arrays: dict[str, Array] = {}
    for parameter, (key, shape) in family.scalars.items():
        values = metadata.get(key)
        count = metadata.get(f"{family.arch}.block_count")
        values = [values] * count if is_number(values) and isinstance(count, int) and count < 1 << 16 else values
        if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
            raise UnsupportedError(
                f"expected a number for each layer as {key}, found {values!r:.80}",
                rule="architecture.config",
                where=checkpoint.location,
            )
        arrays |= {
            f"{family.block}.{index}.{parameter}": np.full(shape, value, np.float32)
            for index, value in enumerate(values)
        }
    if not arrays:
        return checkpoint
    narrowed = {
        name: Change(main_dtype)
        for name, values in arrays.items()
        if main_dtype in ("f16", "bf16") and np.array_equal(cast(cast(values, main_dtype), "f32"), values)
    }
    view = add(checkpoint, arrays)
    return change(view, narrowed) if narrowed else view
