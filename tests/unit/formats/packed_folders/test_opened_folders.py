"""Weights that other programs packed: refused by name wherever values are wanted, shown and verified with a note."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, UnsupportedError
from ingot.inspect.inspect import inspect

F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def z(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


# As the packages save one layer (names, element types): what files look like without their config.json.
LAYERS: dict[str, Mapping[str, np.ndarray]] = {
    "gptq": {"l.qweight": z(2, 8, dtype=np.int32), "l.qzeros": z(1, 1, dtype=np.int32), "l.scales": z(1, 8)},
    "awq": {"l.qweight": z(8, 1, dtype=np.int32), "l.scales": z(1, 8)},
    "compressed-tensors pack": {"l.weight_packed": z(8, 2, dtype=np.int32), "l.weight_scale": z(8, 1)},
    "compressed-tensors int8": {"l.weight": z(8, 8, dtype=np.int8), "l.weight_scale": z(8, 1)},
    "compressed-tensors mxfp8": {"l.weight": z(8, 32, dtype=F8), "l.weight_scale": z(8, 1, dtype=np.uint8)},
    "nvfp4": {"l.weight_packed": z(8, 8, dtype=np.uint8), "l.weight_scale": z(8, 1, dtype=F8)},
    "modelopt": {"l.weight": z(8, 8, dtype=np.uint8), "l.weight_scale": z(8, 1, dtype=F8), "l.weight_scale_2": z()},
    "fp8 blocks": {"l.weight": z(8, 8, dtype=F8), "l.weight_scale_inv": z(1, 1)},
    "fp8, scaled": {"l.weight": z(8, 8, dtype=F8), "l.scale_weight": z()},
    "bitsandbytes nf4": {"l.weight": z(32, 1, dtype=np.uint8), "l.weight.absmax": z(1), "l.weight.quant_map": z(16)},
    "bitsandbytes int8": {"l.weight": z(8, 8, dtype=np.int8), "l.SCB": z(8)},
    "gpt-oss": {"l.up_proj_blocks": z(2, 8, 1, 16, dtype=np.uint8), "l.up_proj_scales": z(2, 8, 1, dtype=np.uint8)},
    "hqq": {"l.W_q": z(4, 8, dtype=np.uint8), "l.scale": z(8, 1), "l.zero": z(8, 1)},
    "torchao": {"l._weight_qdata": z(8, 8, dtype=np.int8), "l._weight_scale": z(8, 1)},
    "quanto": {"l.weight._data": z(8, 8, dtype=np.int8), "l.weight._scale": z(8, 1)},
    "mlx": {"l.weight": z(8, 2, dtype=np.uint32), "l.scales": z(8, 1), "l.biases": z(8, 1)},
}


def rule(call: Callable[..., Any], *arguments: Any, **options: Any) -> str | None:
    with pytest.raises(IngotError) as caught:
        call(*arguments, **options)
    return caught.value.rule


@pytest.mark.parametrize("name", LAYERS)
def test_names_and_types_tell(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ingot.save(path, {"norm.weight": z(8, dtype=BF16), **LAYERS[name]})
    assert rule(ingot.open, path) == "model.quantized"
    assert rule(ingot.convert, path, tmp_path / "out.zt") == "model.quantized"
    assert not (tmp_path / "out.zt").exists()
    assert "model.quantized" in [item.rule for item in ingot.verify(path, strict=True) if item.level == "note"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"l.weight": z(8, 8, dtype=F8)},
        {"l.weight": z(8, 8, dtype=np.int8), "l.bias": z(8)},
        {"l.weight": z(8, dtype=BF16), "l.scale": z(8), "l.scales": z(8)},
        {"a_blocks": z(4), "a_scales": z(4), "position_ids": z(4, dtype=np.int32)},
    ],
)
def test_plain_tensors_are_plain(tmp_path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    ingot.save(tmp_path / "x.safetensors", tensors)
    with ingot.open(tmp_path / "x.safetensors") as checkpoint:
        assert set(checkpoint) == set(tensors)


@pytest.fixture
def foreign(model: Path) -> Path:
    """A folder whose config.json alone says that its weights are packed."""
    config = {"model_type": "llama", "quantization_config": {"quant_method": "vptq", "bits": 4}}
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_the_config_tells(foreign: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ingot.open(foreign)
    assert caught.value.rule == "model.quantized"
    assert "vptq" in str(caught.value)
    assert rule(ingot.convert, foreign, tmp_path / "out", "bf16") == "model.quantized"
    assert rule(ingot.convert, foreign, tmp_path / "out", format="mlx") == "model.quantized"
    assert rule(ingot.convert, foreign, tmp_path / "out.zt") == "model.quantized"
    assert rule(ingot.compare, foreign, foreign) == "model.quantized"
    assert rule(ingot.diff, foreign, foreign, tmp_path / "d.zt") == "model.quantized"
    assert "vptq" in " ".join(inspect(foreign).notes)
    assert not [item for item in ingot.verify(foreign) if item.level == "error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["safetensors", "zt", "npydir"])
def test_what_moves_as_it_is_stays_told(foreign: Path, tmp_path: Path, format: str) -> None:
    report = ingot.convert(foreign, tmp_path / "out", "keep", format)
    assert report.exact
    assert "vptq" in " ".join(report.notes)
    assert rule(ingot.open, tmp_path / "out") == "model.quantized"


def test_a_shard_by_itself_says_so(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "cut", format="safetensors", max_shard="100kB")
    shard = min((tmp_path / "cut").glob("model-00001-of-*.safetensors"))
    assert "shard 1 of" in " ".join(inspect(shard).notes)
    assert "open.one-shard" in [item.rule for item in ingot.verify(shard)]
    assert "shard 1 of" in " ".join(ingot.convert(shard, tmp_path / "one.zt").notes)
    assert not inspect(tmp_path / "cut").notes


@pytest.mark.parametrize("format", ["torchao", "quanto", "hqq"])
def test_folders_that_are_only_read_are_not_written(tmp_path: Path, format: str) -> None:
    ingot.save(tmp_path / "m.safetensors", {"w.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "m.safetensors", tmp_path / "out", format=format)
    assert caught.value.rule == "convert.unsupported"
    assert not (tmp_path / "out").exists()
