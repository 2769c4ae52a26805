"""DeepSeek V4's folders by hand: experts of FP4 in bytes that say I8, beside FP8 in blocks, both with powers of two.

Names, nibbles and scales as ``inference/convert.py`` of deepseek-ai/DeepSeek-V4-Flash unpacks them
(``cast_e2m1fn_to_e4m3fn``): the first of two in the low bits, a scale for 32 of a row.
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import FormatError

TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
EXPERT, DENSE = "layers.0.ffn.experts.0.w1", "layers.0.attn.wq_b"


def folder(path: Path, scales: tuple[int, int] = (128, 4)) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    entries = {
        f"{EXPERT}.weight": ("I8", random.integers(0, 256, (128, 64), np.uint8)),
        f"{EXPERT}.scale": ("F8_E8M0", random.integers(120, 132, scales, np.uint8)),
        f"{DENSE}.weight": ("F8_E4M3", random.integers(0, 120, (256, 128), np.uint8)),
        f"{DENSE}.scale": ("F8_E8M0", random.integers(120, 132, (2, 1), np.uint8)),
    }
    header, at = {}, 0
    for name, (dtype, array) in entries.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for _, array in entries.values())
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "dtype": "bfloat16", "quantization_config": CONFIG}
    (path / "config.json").write_text(json.dumps(config))
    return {name: array for name, (_, array) in entries.items()}


def powers(scales: np.ndarray) -> np.ndarray:
    return np.float32(2) ** (scales.astype(np.float32) - 127)


def test_experts_and_what_is_beside_them(tmp_path: Path) -> None:
    found = folder(tmp_path)
    codes = found[f"{EXPERT}.weight"]
    values = TABLE[np.stack([codes & 15, codes >> 4], axis=-1).reshape(128, 128)]
    dense = found[f"{DENSE}.weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    with ingot.open(tmp_path) as checkpoint:
        assert sorted(checkpoint) == [f"{DENSE}.weight", f"{EXPERT}.weight"]
        expert, linear = (checkpoint[f"{name}.weight"] for name in (EXPERT, DENSE))
        assert np.array_equal(expert.numpy("f32"), values * np.repeat(powers(found[f"{EXPERT}.scale"]), 32, axis=1))
        assert np.array_equal(linear.numpy("f32"), dense * np.repeat(powers(found[f"{DENSE}.scale"]), 128, axis=0))


def test_their_codes_move_into_other_families(tmp_path: Path) -> None:
    folder(tmp_path)
    report = ingot.convert(tmp_path, tmp_path / "out", format="compressed-tensors")
    assert report.actions == {"moved": 1, "repacked": 1}
    assert report.exact
    assert ingot.compare(tmp_path, tmp_path / "out").same


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    folder(tmp_path, (128, 3))
    with pytest.raises(FormatError) as caught:
        ingot.open(tmp_path)
    assert caught.value.rule == "fp8.shape"
