"""Any small checkpoint, between any two formats: carried completely, value by value, or refused.

``INGOT_PAIRS=2000`` runs that many cases; each is made from its number, so that a failing one can be run alone with
``-k 'pair[1234]'``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import IngotError
from ingot.formats.table import FORMATS
from ingot.testing.values import random_bits
from tests.support.strategies import WHOLE_BYTE_DTYPES

CASES = int(os.environ.get("INGOT_PAIRS", "100"))
SOURCES = (
    "zt", "zt2", "safetensors", "squizd", "npydir", "npy", "gguf", "mlx", "gptq", "gptq-planes", "awq", "awq-gemv",
    "compressed-tensors", "fp8", "mxfp4", "modelopt", "bitsandbytes",
)  # fmt: skip
TARGETS = (*SOURCES, "coreml", "onnx")
RECIPES = {
    "mlx": "mlx-4bit", "compressed-tensors": "int8", "squizd": "int4", "npydir": "squish-int4", "zt": "int4",
    "zt2": "int8", "gguf": "q8_0",
}  # fmt: skip
STRANGE = (
    "a",
    "a.b",
    "a b",
    "ü.weight",
    "重み",
    "x" * 60,
    "layers.0.attn/q",
    "a.weight.weight",
    "A.weight",
    "w:0",
    "\U0001f9ca",
)
USUAL = tuple(
    f"model.layers.{layer}.{module}.weight"
    for layer in (0, 1)
    for module in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
)
KEYS = {"my_key": 1, "nested": {"a": [1, 2.5, None]}, "text": "ü", "flag": True}


def arrays_of(rng: np.random.Generator) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name in rng.permutation([*USUAL, "lm_head.weight"])[: rng.integers(0, 4)]:
        dtype = str(rng.choice(["f32", "f16", "bf16"]))
        shape = (int(rng.choice([1, 7, 32, 64])), int(rng.choice([1, 6, 32, 64, 96, 128, 160])))
        arrays[str(name)] = rng.standard_normal(shape).astype(_numpy(dtype))
    for name in rng.permutation(STRANGE)[: rng.integers(0, 4)]:
        dtype = str(rng.choice([*WHOLE_BYTE_DTYPES, "f32", "bf16"]))
        shape = tuple(int(size) for size in rng.choice([0, 1, 2, 3, 8, 33], int(rng.integers(0, 4))))
        arrays[str(name)] = random_bits(rng, shape, dtype)
    return arrays


def _numpy(dtype: str) -> Any:
    from ingot.core.numeric.dtypes import numpy_dtype

    return numpy_dtype(dtype)


def destination_of(format: str, path: Path, *, folder: bool) -> tuple[Path, dict[str, Any]]:
    """Return a path for an artifact of a format, and the options that ask for it."""
    suffixes = FORMATS[format].suffixes
    options: dict[str, Any] = {"container": 2, "format": "zt"} if format == "zt2" else {"format": format}
    if folder or not suffixes:
        return path / "artifact", options
    return path / f"artifact{suffixes[0]}", options


def values_of(path: Path) -> dict[str, tuple[str, Any]]:
    with ingot.open(path) as checkpoint:
        return {name: (tensor.dtype, tensor.numpy()) for name, tensor in checkpoint.items()}


def same(path: Path, name: str, dtype: str, values: Any) -> bool:
    """Whether a tensor has these values, decoded in their element type: bit for bit if it is stored in that type."""
    with ingot.open(path) as checkpoint:
        tensor = checkpoint[name]
        castable = DTYPES[tensor.dtype].is_float and DTYPES[dtype].is_float and dtype != "f8_e8m0fnu"
        decoded = tensor.numpy(dtype if castable else None)
        if values.shape != decoded.shape:
            return False
        if tensor.dtype == dtype:
            return bool(values.tobytes() == decoded.tobytes())
        if DTYPES[dtype].is_float:
            with np.errstate(invalid="ignore"):  # of signalling NaN
                return bool(np.array_equal(values.astype(np.float64), decoded.astype(np.float64), equal_nan=True))
        return bool(np.array_equal(values, decoded))


def config_of(path: Path) -> Mapping[str, Any]:
    return json.loads((path / "config.json").read_text()) if (path / "config.json").exists() else {}


def convert_or_refuse(source: Path, target: Path, recipe: str | None, **options: Any) -> Any:
    """Return the report; None where the conversion is refused with exit code 1 and leaves nothing."""
    try:
        return ingot.convert(source, target, recipe, keep_names=True, **options)
    except IngotError as error:
        refusal = error
    if refusal.exit_code != 1 or target.exists() or refusal.rule == "written.unreadable":
        raise AssertionError(f"{target.name}: no clean refusal") from refusal
    return None


@pytest.mark.parametrize("number", range(CASES), ids=lambda number: f"pair[{number}]")
def test_a_checkpoint_is_carried_completely_or_refused(number: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(number)
    source, target = str(rng.choice(SOURCES)), str(rng.choice(TARGETS))
    start = tmp_path / "start"
    start.mkdir()
    arrays = arrays_of(rng)
    ingot.save(start / "model.zt", arrays)
    with ingot.open(start) as checkpoint:
        dtypes = {name: tensor.dtype for name, tensor in checkpoint.items()}
    has_config = bool(rng.integers(0, 2))
    if has_config:
        (start / "config.json").write_text(json.dumps({**KEYS, "model_type": "made_up"}))
    recipe = RECIPES.get(source) if rng.integers(0, 2) else None
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, options = destination_of(source, tmp_path / "first", folder=bool(rng.integers(0, 2)))
    report = convert_or_refuse(start, first, recipe, **options)
    if report is None:
        return
    before = values_of(first)
    assert set(before) == set(arrays)
    for name, values in arrays.items():
        tensor = next(item for item in report.tensors if item.name == name)
        if tensor.exact:
            assert same(first, name, dtypes[name], values), (source, name)

    second, options = destination_of(target, tmp_path / "second", folder=bool(rng.integers(0, 2)))
    report = convert_or_refuse(first, second, None, **options)
    if report is None:
        return
    after = values_of(second)
    assert set(after) == set(before), (source, target)
    rounded = any("rounded" in note for note in report.notes)
    for name in before:
        assert rounded or same(second, name, *before[name]), (source, target, name, before[name][0], after[name][0])
    if first.is_dir() and second.is_dir() and has_config:
        kept = config_of(second)
        assert {key: kept.get(key) for key in KEYS} == KEYS, (source, target)
