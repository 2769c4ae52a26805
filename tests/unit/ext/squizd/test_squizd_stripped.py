"""What Ingot writes has the same values without its directory: a reader of the SQUIZD document loses names alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.recipes.load import PRESETS

Array = np.ndarray[Any, np.dtype[Any]]
VOCABULARY = 40
PRUNE = {"prune": 0.4, "prune_block": 16}


def model(hidden: int, inner: int, dtype: Any) -> dict[str, Array]:
    """Three layers: the first and last one have rules of their own in some presets."""
    rng = np.random.default_rng(7)

    def matrix(*shape: int) -> Array:
        return (rng.standard_normal(shape) * 0.05).astype(dtype)

    weights = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden), "model.norm.weight": matrix(hidden)}
    weights["lm_head.weight"] = matrix(VOCABULARY, hidden)
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}self_attn.{name}_proj.weight": matrix(hidden, hidden) for name in "qkvo"}
        weights |= {f"{prefix}mlp.{name}_proj.weight": matrix(inner, hidden) for name in ("gate", "up")}
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
        weights[prefix + "input_layernorm.weight"] = matrix(hidden)
    return weights


def shapes() -> dict[str, Array]:
    """Matrices of few, odd and prime columns, of three dimensions, and one without elements."""
    rng = np.random.default_rng(8)
    sizes = [(96, 288), (5, 960), (300, 1), (1, 300), (7, 67), (64, 254), (3, 4, 33), (0, 16), (9, 48)]
    return {f"model.layers.{at}.mlp.up_proj.weight": rng.standard_normal(size) for at, size in enumerate(sizes)}


def convert(source: Path, recipe: str | Path, **options: Any) -> Path | None:
    """Return the file; None where the format does not take what the recipe makes."""
    path = source.with_suffix(".squizd")
    try:
        ingot.convert(source, path, recipe, overwrite=True, **options)
    except UnsupportedError:
        return None
    return path


def values(path: Path) -> list[Array]:
    """In f32, which the document's scales are, as flat arrays: it has no shapes of three dimensions either."""
    with ingot.open(path) as checkpoint:
        floats = ("f16", "bf16", "f32")
        return [item.numpy("f32" if item.dtype in floats else None).reshape(-1) for item in checkpoint.values()]


def check(path: Path) -> None:
    data = path.read_bytes()
    stripped = path.with_name("stripped.squizd")
    stripped.write_bytes(data[: data.rindex(b"TDIR")])
    for found, expected in zip(values(stripped), values(path), strict=True):
        assert np.array_equal(found, expected)
    assert not [item for item in ingot.verify(stripped, strict=True) if item.level == "error"]


# 288 and 960 columns: most groups of the presets do not divide them.
@pytest.mark.parametrize(("hidden", "inner", "prune"), [(64, 960, {}), (96, 288, {}), (96, 288, PRUNE)])
@pytest.mark.parametrize("preset", sorted(name for name in PRESETS if not name.endswith("-calibrated")))
def test_every_preset_keeps_its_values(
    tmp_path: Path, preset: str, hidden: int, inner: int, prune: dict[str, Any]
) -> None:
    ingot.save(tmp_path / "model.safetensors", model(hidden, inner, ml_dtypes.bfloat16))
    written = convert(tmp_path / "model.safetensors", preset, **prune)
    assert (written is not None) == (preset in TAKEN and not (preset in ("astc", "q4_0") and prune))
    if written is not None:
        check(written)


TAKEN = {
    "16bit", "ane-m1", "ane-m4", "ane-m5", "astc", "bf16", "decompress", "f16", "int2-hybrid", "int4", "int8-fine", "keep",
    "lossless", "lossless-max", "mlx-3bit", "q4_0", "squish-int3", "tca-tbe", "w4a16",
}  # fmt: skip


@pytest.mark.parametrize("zeros", ["symmetric = true", "symmetric = false, signed = true"])
@pytest.mark.parametrize("quantizer", ["", ', quantizer = "mse"'])
@pytest.mark.parametrize("group", [64, 128, 16, 7, '"row"', '"tensor"'])
@pytest.mark.parametrize("bits", [4, 2])
def test_every_group_and_shape_keeps_its_values_or_is_refused(
    tmp_path: Path, bits: int, group: Any, quantizer: str, zeros: str
) -> None:
    rule = f'[[rules]]\ncodec = "affine"\noptions = {{ bits = {bits}, group = {group}, {zeros}{quantizer} }}\n'
    (tmp_path / "r.toml").write_text(rule)
    written = {}
    for name, tensor in shapes().items():
        ingot.save(tmp_path / "one.safetensors", {name: tensor.astype(np.float32)})
        path = convert(tmp_path / "one.safetensors", tmp_path / "r.toml")
        if path is None:
            continue
        check(path)
        with ingot.open(path) as checkpoint:
            (stored,) = checkpoint.values()
            written[tensor.shape] = stored.params.get("group_size", stored.params["granularity"])
    assert len(written) > 5  # groups of 7 divide no row of 67 columns, and nothing near 7 does
    if group == 64:
        assert written == {
            (96, 288): 48, (5, 960): 64, (300, 1): 64, (1, 300): 60, (7, 67): "row", (64, 254): 127, (3, 4, 33): 64,
            (0, 16): 64, (9, 48): 64,
        }  # fmt: skip


@pytest.mark.parametrize("zeros", ["symmetric = true", "symmetric = false, signed = true"])
@pytest.mark.parametrize("bits", [4, 2])
def test_dropped_blocks_hold_zeros(tmp_path: Path, bits: int, zeros: str) -> None:
    """Also where a group has a zero point, and in groups that are dropped as a whole."""
    ingot.save(tmp_path / "model.safetensors", model(32, 160, np.float32))
    rule = '[[rules]]\nmatch = "*_proj*"\ncodec = "affine"\n'
    (tmp_path / "r.toml").write_text(f"{rule}options = {{ bits = {bits}, group = 32, {zeros}, quantizer = 'mse' }}\n")
    ingot.convert(tmp_path / "model.safetensors", tmp_path / "a.squizd", tmp_path / "r.toml", prune=0.5, prune_block=16)
    check(tmp_path / "a.squizd")
    with ingot.open(tmp_path / "stripped.squizd") as checkpoint:
        assert sum("mask" in tensor.parts for tensor in checkpoint.values()) == 9
