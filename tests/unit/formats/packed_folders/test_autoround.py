"""AutoRound's folders: the layers of other dialects, under a description of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError

from . import packing
from .packing import Array, Layer, layer

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
RNG = np.random.default_rng(8)
BASE = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", "iters": 0}
BASE |= {"autoround_version": "0.16.1", "block_name_to_quantize": "model.layers", "low_gpu_mem_usage": True}


def without_order(entries: dict[str, Array]) -> dict[str, Array]:
    return {name: entry for name, entry in entries.items() if not name.endswith("g_idx")}


def gptq(stem: str, of: Layer, *, less: bool = True) -> dict[str, Array]:
    return without_order(packing.gptq(stem, of, less=less))


def fp4(stem: str) -> dict[str, Array]:
    codes, scales = RNG.integers(0, 256, (64, 32), np.uint8), RNG.integers(110, 126, (64, 2), np.uint8)
    return {f"{stem}.weight_packed": codes, f"{stem}.weight_scale": scales}


def fp8(stem: str, scale: str, shape: tuple[int, ...]) -> dict[str, Array]:
    codes = RNG.integers(0, 120, (256, 128), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {f"{stem}.weight": codes, f"{stem}.{scale}": RNG.uniform(0.1, 1, shape).astype(ml_dtypes.bfloat16)}


def values(path: Path) -> Array:
    with ingot.open(path) as checkpoint:
        assert list(checkpoint) == [f"{UP}.weight"]
        return checkpoint[f"{UP}.weight"].numpy("f32")


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize(
    ("stated", "less"),
    [
        ({"packing_format": "auto_round:auto_gptq"}, True),
        ({"packing_format": "auto_round:gptq"}, True),
        ({}, True),
        ({"backend": "auto_round:gptq:exllamav2"}, True),
        ({"packing_format": "auto_round"}, False),
        ({"packing_format": "auto_round:gptqmodel"}, False),
    ],
)
def test_words_of_gptq(tmp_path: Path, stated: dict[str, Any], less: bool, method: str) -> None:
    of = layer(64, 96, 4, 32, low=1)
    path = packing.folder(tmp_path / "m", gptq(UP, of, less=less), {**BASE, "quant_method": method, **stated})
    assert np.array_equal(values(path).astype(np.float16), of.values)


@pytest.mark.parametrize("packing_format", ["auto_round:auto_awq", "auto_round:awq"])
def test_words_of_awq(tmp_path: Path, packing_format: str) -> None:
    of = layer(64, 96, 4, 32)
    path = packing.folder(tmp_path / "m", packing.awq(UP, of), {**BASE, "packing_format": packing_format})
    assert np.array_equal(values(path).astype(np.float16), of.values)


FP8 = {**BASE, "bits": 8, "sym": True, "data_type": "fp", "packing_format": "auto_round:fp8", "fmt": "e4m3"}
MX = {**BASE, "sym": True, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor", "act_bits": 4}
WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
CT |= {"config_groups": {"g": {"targets": ["Linear"], "weights": WEIGHTS}}}


@pytest.mark.parametrize(
    ("stated", "other", "entries"),
    [
        (MX, CT, fp4(UP)),
        ({**FP8, "packing_format": "auto_round:fp8_static"}, {"quant_method": "fp8"}, fp8(UP, "weight_scale", (256,))),
        (
            {**FP8, "group_size": [128, 128]},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            fp8(UP, "weight_scale_inv", (2, 1)),
        ),
    ],
    ids=["mxfp4", "fp8-rows", "fp8-blocks"],
)
def test_floats_are_those_of_the_other_dialect(
    tmp_path: Path, stated: dict[str, Any], other: dict[str, Any], entries: dict[str, Array]
) -> None:
    ingot.save(tmp_path / "w.safetensors", entries)
    found = []
    for name, quantization in (("a", stated), ("b", other)):
        path = packing.folder(tmp_path / name, {}, quantization)
        (path / "model.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes())
        found.append(values(path))
    assert np.array_equal(*found)
    assert found[0].any()


def test_layers_that_differ(tmp_path: Path) -> None:
    """Of other bits and groups by name or pattern, and dense ones; ragged groups have a shorter last one."""
    one, two, ragged = layer(64, 96, 4, 32, low=1), layer(64, 128, 8, 64, low=1), layer(64, 96, 4, 64, low=1)
    stems = [f"model.layers.{number}.mlp.up_proj" for number in range(4)]
    extra: dict[str, Any] = {stems[1]: {"bits": 8, "group_size": 64}, stems[3]: {"bits": 16, "data_type": "float"}}
    extra[r".*layers\.2\..*"] = {"group_size": 64}
    entries = {**gptq(stems[0], one), **gptq(stems[1], two), **gptq(stems[2], ragged)}
    entries[f"{stems[3]}.weight"] = np.ones((4, 4), np.float16)
    path = packing.folder(tmp_path / "m", entries, {**BASE, "extra_config": extra})
    with ingot.open(path) as checkpoint:
        for stem, of in zip(stems, (one, two, ragged), strict=False):
            assert np.array_equal(checkpoint[f"{stem}.weight"].numpy("f32").astype(np.float16), of.values)
        assert checkpoint[f"{stems[3]}.weight"].codec == "dense"


def test_groups_that_shapes_do_not_tell_apart(tmp_path: Path) -> None:
    """192 columns in groups of 128, the last one shorter, or of 96: the rule for a layer's name decides, no pattern."""
    of = layer(64, 192, 4, 96, low=1)
    stated = {**BASE, "group_size": 128}
    path = packing.folder(tmp_path / "named", gptq(UP, of), {**stated, "extra_config": {UP: {"group_size": 96}}})
    assert np.array_equal(values(path).astype(np.float16), of.values)
    path = packing.folder(
        tmp_path / "pattern", gptq(UP, of), {**stated, "extra_config": {".*up.*": {"group_size": 96}}}
    )
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    assert caught.value.rule == "gptq.shape"
    one = layer(64, 192, 4, 128, low=1)
    path = packing.folder(tmp_path / "usual", gptq(UP, one), {**stated, "extra_config": {DOWN: {"group_size": 96}}})
    assert np.array_equal(values(path).astype(np.float16), one.values)


def test_words_of_mlx(tmp_path: Path) -> None:
    """Its own object stands beside the one that MLX reads."""
    rule = (
        'codec = "affine"\noptions = { bits = 4, group = 32, zero_kind = "offset", symmetric = false, scales = "f16" }'
    )
    (tmp_path / "r.toml").write_text(f'name = "r"\n[[rules]]\nmatch = "*up_proj*"\n{rule}\n')
    ingot.save(tmp_path / "w.safetensors", {f"{UP}.weight": RNG.standard_normal((64, 64)).astype(np.float16)})
    ingot.convert(tmp_path / "w.safetensors", tmp_path / "m", tmp_path / "r.toml", format="mlx", keep_names=True)
    wanted = values(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {**BASE, "packing_format": "mlx"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert np.array_equal(values(tmp_path / "m"), wanted)


@pytest.mark.parametrize(
    ("stated", "rule"),
    [
        ({"packing_format": "auto_round:fake"}, "autoround.packing"),
        ({"packing_format": "auto_round:llm_compressor_nvfp4_e5m3"}, "autoround.packing"),
        ({"packing_format": 4}, "autoround.packing"),
        ({"data_type": "mx_int"}, "autoround.type"),
        ({"data_type": "fp8_to_int_sym"}, "autoround.type"),
        ({"packing_format": "auto_round", "act_bits": 8}, "autoround.type"),
        ({"packing_format": "auto_round:fp8", "data_type": "fp", "sym": False}, "autoround.type"),
        ({"rotation_config": {"block_size": 32}}, "interop.config-key"),
        ({"bits": 5}, "gptq.bits"),
        ({"bits": None}, "gptq.config"),
    ],
)
def test_the_rest_is_refused_by_name(tmp_path: Path, stated: dict[str, Any], rule: str) -> None:
    path = packing.folder(tmp_path / "m", gptq(UP, layer(64, 96, 4, 32, low=1)), {**BASE, **stated})
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    assert caught.value.rule == rule


def test_activations_are_noted(tmp_path: Path) -> None:
    path = packing.folder(tmp_path / "m", {}, {**MX, "static_kv_dtype": "fp8"})
    ingot.save(path / "model.safetensors", fp4(UP))
    notes = " ".join(ingot.convert(path, tmp_path / "x.zt").notes)
    assert "act_bits (4 bits" in notes
    assert "static_kv_dtype (fp8)" in notes
