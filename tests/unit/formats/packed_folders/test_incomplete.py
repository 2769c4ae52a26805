"""Folders that lack something or contradict themselves: refused, or read in the one way that fits, and reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.inspect.inspect import inspect

from . import packing
from .packing import Array, layer

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
F8 = ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(5)


def folder(path: Path, entries: Mapping[str, Array], quantization: Any, key: str = "quantization_config") -> Path:
    path.mkdir()
    ingot.save(path / "model.safetensors", {"model.norm.weight": np.ones(4, np.float16), **entries})
    (path / "config.json").write_text(json.dumps({"model_type": "llama", key: quantization}))
    return path


def z(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CT, FP8 = packing.ct_config(4, 32, sym=True), {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
QUANTO, TORCHAO, HQQ = ({"quant_method": name} for name in ("quanto", "torchao", "hqq"))
MXFP4, MLX = {"quant_method": "mxfp4"}, {"bits": 4, "group_size": 32}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}

CODES_ALONE: list[tuple[str, Any, dict[str, Array]]] = [
    ("gptq", GPTQ, {f"{UP}.qweight": z(8, 64, dtype=np.int32)}),
    ("gptq", GPTQ, {f"{UP}.weight": z(8, 64, dtype=np.int32)}),
    ("gptq", ROUND, {f"{UP}.qweight": z(8, 64, dtype=np.int32)}),
    ("awq", AWQ, {f"{UP}.qweight": z(64, 8, dtype=np.int32)}),
    ("awq", AWQ, {f"{UP}.weight": z(64, 8, dtype=np.uint8)}),
    ("compressed-tensors", CT, {f"{UP}.weight_packed": z(64, 8, dtype=np.int32)}),
    ("compressed-tensors", CT, {f"{UP}.weight": z(64, 64, dtype=np.int8)}),
    ("compressed-tensors", CT, {f"{UP}.weight": z(64, 64, dtype=F8)}),
    ("compressed-tensors", CT, {"model.layers.0.mlp.experts.gate_up_proj": z(2, 64, 64, dtype=F8)}),
    ("fp8", FP8, {f"{UP}.weight": z(64, 64, dtype=F8)}),
    ("fp8", FP8, {f"{UP}.weight": z(64, 64, dtype=np.int8)}),
    ("modelopt", MODELOPT, {f"{UP}.weight": z(64, 32, dtype=np.uint8)}),
    ("modelopt", MODELOPT, {"model.layers.0.mlp.experts.gate_up_proj": z(2, 64, 32, dtype=np.uint8)}),
    ("bitsandbytes", NF4, {f"{UP}.weight": z(2048, 1, dtype=np.uint8)}),
    ("bitsandbytes", NF4, {f"{UP}.weight": z(64, 64, dtype=np.int8)}),
    ("bitsandbytes", {**NF4, "bnb_4bit_quant_storage": "bfloat16"}, {f"{UP}.weight": z(64, 1, dtype=np.float16)}),
    ("mxfp4", MXFP4, {"model.layers.0.mlp.experts.down_proj_blocks": z(2, 32, 2, 16, dtype=np.uint8)}),
    ("quanto", QUANTO, {f"{UP}.weight._data": z(64, 64, dtype=np.int8)}),
    ("hqq", HQQ, {f"{UP}.W_q": z(32, 64, dtype=np.uint8)}),
    ("mlx", MLX, {f"{UP}.weight": z(64, 8, dtype=np.uint32)}),
    ("mlx", {**MLX, UP: False}, {f"{UP}.weight": z(64, 8, dtype=np.uint32)}),
]
SCALES_ALONE: list[tuple[str, Any, dict[str, Array]]] = [
    ("gptq", GPTQ, {f"{UP}.scales": z(2, 64)}),
    ("gptq", GPTQ, {f"{UP}.qzeros": z(2, 8, dtype=np.int32)}),
    ("gptq", GPTQ, {f"{UP}.g_idx": z(64, dtype=np.int32)}),
    ("awq", AWQ, {f"{UP}.scales": z(2, 64)}),
    ("compressed-tensors", CT, {f"{UP}.weight_shape": z(2, dtype=np.int64)}),
    ("compressed-tensors", CT, {f"{UP}.weight_global_scale": z(1)}),
    ("fp8", FP8, {f"{UP}.weight_scale_inv": z(1, 1), f"{UP}.weight": z(64, 64, dtype=np.float16)}),
    ("modelopt", MODELOPT, {f"{UP}.weight_scale": z(64, 4, dtype=F8)}),
    ("modelopt", MODELOPT, {f"{UP}.weight_scale_2": z()}),
    ("bitsandbytes", NF4, {f"{UP}.weight.absmax": z(32)}),
    ("bitsandbytes", NF4, {f"{UP}.weight.quant_state.bitsandbytes__nf4": z(80, dtype=np.uint8)}),
    ("bitsandbytes", NF4, {f"{UP}.SCB": z(64)}),
    ("mxfp4", MXFP4, {"model.layers.0.mlp.experts.down_proj_scales": z(2, 32, 2, dtype=np.uint8)}),
    ("torchao", TORCHAO, {f"{UP}._weight_scale": z(64, 1)}),
    ("quanto", QUANTO, {f"{UP}.weight._scale": z(64, 1)}),
    ("hqq", HQQ, {f"{UP}.zero": z(64, 1)}),
    ("mlx", MLX, {f"{UP}.scales": z(64, 2, dtype=np.float16)}),
]


@pytest.mark.parametrize(("rules", "quantization", "entries"), [*CODES_ALONE, *SCALES_ALONE])
def test_codes_and_scales_belong_together(
    tmp_path: Path, rules: str, quantization: Any, entries: dict[str, Array]
) -> None:
    path = folder(tmp_path / "m", entries, quantization, "quantization" if rules == "mlx" else "quantization_config")
    (finding,) = ingot.verify(path)
    assert finding.level == "error"
    assert finding.rule == f"{rules}.parts"
    assert next(iter(entries)).rpartition(".")[0] in finding.where
    with pytest.raises(IngotError) as caught:
        ingot.convert(path, tmp_path / "out", "decompress", format="safetensors")
    assert caught.value.rule == finding.rule
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [f"{UP}.qweight", f"{UP}.weight_packed", f"{UP}.W_q"])
def test_codes_alone_in_a_file(tmp_path: Path, name: str) -> None:
    """Without a config.json and without scales: these names are no weights'."""
    ingot.save(tmp_path / "x.safetensors", {name: z(64, 8, dtype=np.int32)})
    with pytest.raises(IngotError) as caught:
        ingot.open(tmp_path / "x.safetensors")
    assert caught.value.rule == "model.quantized"


def test_dense_tables_of_integers_stay(tmp_path: Path) -> None:
    """Buffers that programs save beside weights are no codes."""
    entries = {**packing.gptq(UP, layer(64, 64, 4, 32, low=1)), "model.rotary.position_ids": z(1, 8, dtype=np.int64)}
    entries |= {
        "model.layers.0.attn.bias": z(1, 1, 8, 8, dtype=np.uint8),
        "model.relative_index": z(8, 8, dtype=np.int32),
    }
    with ingot.open(folder(tmp_path / "m", entries, GPTQ)) as checkpoint:
        assert len(checkpoint) == 5


def rounded(path: Path) -> Array:
    with ingot.open(path) as checkpoint:
        return checkpoint[f"{UP}.weight"].numpy("f32").astype(np.float16)


def findings(path: Path) -> dict[str, str]:
    return {item.rule: item.level for item in ingot.verify(path)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("less", [True, False])
def test_symmetric_zero_points_decide_between_v1_and_v2(tmp_path: Path, bits: int, less: bool) -> None:
    of = layer(64, 96, bits, 32, sym=True)
    for label in ("gptq", "gptq_v2"):
        stated = {**GPTQ, "bits": bits, "sym": True, "checkpoint_format": label}
        path = folder(tmp_path / label, packing.gptq(UP, of, less=less), stated)
        assert np.array_equal(rounded(path), of.values)
        fits = (label == "gptq") == less
        assert ("gptq.zero-points" in findings(path)) is not fits
        assert ("zero points" in " ".join(inspect(path).notes)) is not fits
        assert ("zero points" in " ".join(ingot.convert(path, tmp_path / f"{label}.zt").notes)) is not fits


def test_what_is_not_symmetric_is_read_as_labelled(tmp_path: Path) -> None:
    of = layer(64, 96, 4, 32, low=1)
    stated = {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}
    assert np.array_equal(rounded(folder(tmp_path / "m", packing.gptq(UP, of, less=False), stated)), of.values)


def one_zero_point_changed(stem: str, at: int, *, rows: int = 64) -> dict[str, Array]:
    entries = packing.gptq(stem, layer(rows, 96, 4, 32, sym=True))
    entries[f"{stem}.qzeros"].reshape(-1).view(np.uint8)[at] ^= 0x10
    return entries


def test_symmetric_codes_with_another_zero_point(tmp_path: Path) -> None:
    """Read in neither way: some programs use stored zero points, others do not."""
    stated = {**GPTQ, "sym": True}
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "first", one_zero_point_changed(UP, 0), stated))
    assert caught.value.rule == "gptq.zero-points"
    ordinary = packing.gptq(DOWN, layer(64, 96, 4, 32, sym=True))
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "one", {**ordinary, **one_zero_point_changed(UP, 0)}, stated))
    assert caught.value.rule == "gptq.zero-points"
    entries = packing.gptq(UP, layer(64, 96, 4, 32, sym=True)) | packing.gptq(
        DOWN, layer(64, 96, 4, 32, sym=True), less=False
    )
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "both", entries, stated))
    assert caught.value.rule == "gptq.zero-points"
    allowed = {**stated, "dynamic": {r"+:.*up.*": {"sym": False}}}
    with ingot.open(folder(tmp_path / "allowed", one_zero_point_changed(UP, 0), allowed)):
        pass


def test_verify_compares_every_zero_point(tmp_path: Path) -> None:
    """Opening compares the first 4 KiB of a layer."""
    path = folder(tmp_path / "m", one_zero_point_changed(UP, 3 * 1024 * 4 - 1, rows=8192), {**GPTQ, "sym": True})
    with ingot.open(path):
        pass
    assert findings(path)["gptq.zero-points"] == "error"


@pytest.mark.parametrize("version", ["gemm", "gemv"])
def test_zero_points_of_awq_without_zero_points(tmp_path: Path, version: str) -> None:
    make: Callable[..., dict[str, Array]] = (
        packing.awq if version == "gemm" else lambda stem, of: packing.gemv(stem, of, 32)
    )
    stated = {**AWQ, "version": version, "zero_point": False}
    of = layer(64, 96, 4, 32, sym=True)
    assert np.array_equal(rounded(folder(tmp_path / "m", make(UP, of), stated)), of.values)
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "n", make(UP, layer(64, 96, 4, 32)), stated))
    assert caught.value.rule == "awq.zero-points"


@pytest.mark.parametrize(
    ("labels", "less", "noted"),
    [
        ({"format": "gptq_v2"}, False, False),
        ({"format": "gptq_v2", "checkpoint_format": "gptq"}, False, True),
        ({"checkpoint_format": "gptq_v2", "format": "gptq"}, True, True),
        ({"format": "GPTQ_V2", "checkpoint_format": "gptq_v2"}, False, False),
    ],
)
def test_format_comes_before_checkpoint_format(tmp_path: Path, labels: dict[str, str], less: bool, noted: bool) -> None:
    """As in GPTQModel; the zero points are not symmetric, and cannot decide."""
    of = layer(64, 96, 4, 32, low=1)
    path = folder(tmp_path / "m", packing.gptq(UP, of, less=less), {**GPTQ, "sym": False, **labels})
    assert np.array_equal(rounded(path), of.values)
    assert ("gptq.format" in findings(path)) is noted


@pytest.mark.parametrize("key", ["version", "format", "checkpoint_format"])
def test_awq_names_its_layout_by_three_keys(tmp_path: Path, key: str) -> None:
    of = layer(64, 96, 4, 32)
    stated = {"quant_method": "awq", "bits": 4, "group_size": 32, key: "gemv"}
    assert np.array_equal(rounded(folder(tmp_path / "m", packing.gemv(UP, of, 32), stated)), of.values)
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "n", packing.gemv(UP, of, 32), {**stated, "version": "gemm", "format": "gemv"}))
    assert caught.value.rule == "awq.version"


def test_groups_of_ordered_columns_are_counted(tmp_path: Path) -> None:
    """With ``dynamic`` rules and ``desc_act`` the first run of ``g_idx`` is no group."""
    order = np.random.default_rng(3).permutation(np.repeat(np.arange(4), 64))
    of = layer(64, 256, 4, 64, order=order, low=1)
    stated = {**GPTQ, "sym": False, "desc_act": True, "group_size": 128, "dynamic": {"+:.*up.*": {"group_size": 64}}}
    path = folder(tmp_path / "m", packing.gptq(UP, of), stated)
    assert np.array_equal(rounded(path), of.values)
    with ingot.open(path) as checkpoint:
        assert checkpoint[f"{UP}.weight"].params["group_size"] == 64


@pytest.mark.parametrize("size", [[64], {"a": 1}, "64", None, -1, 1.5])
def test_a_group_size_that_is_no_number_is_refused_or_ignored(size: Any, tmp_path: Path) -> None:
    of = layer(64, 256, 4, 64, low=1)
    stated = {**GPTQ, "sym": False, "group_size": 64, "dynamic": {"+:.*up.*": {"group_size": size}}}
    path = folder(tmp_path / "m", packing.gptq(UP, of), stated)
    try:
        found = rounded(path)
    except IngotError:
        return
    assert np.array_equal(found, of.values)


def test_groups_of_columns_that_are_not_said(tmp_path: Path) -> None:
    of = layer(64, 64, 4, 32, sym=True)
    stated = packing.ct_config(4, 32, sym=True)
    stated["config_groups"]["group_0"]["weights"] |= {"actorder": "group", "strategy": "group"}
    ordered = folder(tmp_path / "m", packing.pack_quantized(UP, of, sym=True, ordered=True), stated)
    assert np.array_equal(rounded(ordered), of.values)
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "n", packing.pack_quantized(UP, of, sym=True), stated))
    assert caught.value.rule == "compressed-tensors.parts"


def side_file(path: Path, name: str, content: Any, entries: Mapping[str, Array]) -> Path:
    path.mkdir()
    ingot.save(path / "model.safetensors", entries)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float16"}))
    (path / name).write_text(json.dumps(content))
    return path


NVFP4 = {
    f"{UP}.weight": RNG.integers(0, 256, (64, 32), np.uint8),
    f"{UP}.weight_scale": RNG.uniform(1, 64, (64, 4)).astype(F8),
    f"{UP}.weight_scale_2": np.float32(0.25),
    f"{DOWN}.weight": np.ones((4, 64), np.float16),
}
HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


def test_modelopt_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = side_file(tmp_path / "m", "hf_quant_config.json", HF_QUANT, NVFP4)
    with ingot.open(path) as checkpoint:
        assert checkpoint.format == "modelopt"
        wanted = checkpoint[f"{UP}.weight"].numpy("f32")
    report = ingot.convert(path, tmp_path / "same", format="modelopt")
    assert "hf_quant_config.json" not in report.companions
    stated = json.loads((tmp_path / "same" / "config.json").read_text())["quantization_config"]
    assert stated["kv_cache_quant_algo"] == "FP8"
    dense = ingot.convert(path, tmp_path / "dense", "decompress", format="safetensors")
    assert "hf_quant_config.json" not in dense.companions
    assert any("kv_cache_quant_algo (FP8)" in note for note in dense.notes)
    for name in ("same", "dense"):
        with ingot.open(tmp_path / name) as checkpoint:
            assert np.array_equal(checkpoint[f"{UP}.weight"].numpy("f32"), wanted)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ({"quantization": 4}, "modelopt.config"),
        ([], "modelopt.config"),
        ({**HF_QUANT, "quantization": {"quant_algo": "NVFP4", "svd": 1}}, "interop.config-key"),
        ({"quantization": {"quant_algo": "W4A8_AWQ"}}, "modelopt.algorithm"),
    ],
)
def test_files_of_modelopt_that_are_refused(tmp_path: Path, content: Any, rule: str) -> None:
    with pytest.raises(IngotError) as caught:
        ingot.open(side_file(tmp_path / "m", "hf_quant_config.json", content, NVFP4))
    assert caught.value.rule == rule


def test_a_file_that_an_earlier_conversion_left(tmp_path: Path) -> None:
    """Beside dense weights it says nothing."""
    path = side_file(tmp_path / "m", "hf_quant_config.json", HF_QUANT, {f"{UP}.weight": np.ones((4, 4), np.float16)})
    with ingot.open(path) as checkpoint:
        assert checkpoint.format == "safetensors"


def test_a_description_in_the_part_for_text(tmp_path: Path) -> None:
    """As models of several parts have it; the result has one description, of its own packing."""
    of = layer(64, 96, 4, 32, low=1)
    path = folder(tmp_path / "m", packing.gptq(UP, of), None, "model")
    text = {"model_type": "tiny", "quantization_config": {**GPTQ, "sym": False}}
    (path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "quantization_config": None})
    )
    assert np.array_equal(rounded(path), of.values)
    ingot.convert(path, tmp_path / "ct", format="compressed-tensors")
    ingot.convert(path, tmp_path / "dense", "decompress", format="safetensors")
    for name, method in (("ct", "compressed-tensors"), ("dense", None)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in config["text_config"]
        assert (config.get("quantization_config") or {}).get("quant_method") == method
        assert np.array_equal(rounded(tmp_path / name), of.values)


def test_autoawq_in_a_file_of_its_own(tmp_path: Path) -> None:
    of = layer(64, 96, 4, 32)
    stated = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    path = side_file(tmp_path / "m", "quant_config.json", stated, packing.awq(UP, of))
    assert np.array_equal(rounded(path), of.values)
    assert "quant_config.json" not in ingot.convert(path, tmp_path / "gptq", format="gptq").companions


def test_activations_that_are_divided_by_scales(tmp_path: Path) -> None:
    """AutoAWQ's ``ScaledActivation``."""
    entries = {**packing.awq(UP, layer(64, 96, 4, 32)), "model.layers.0.mlp.act.scales": z(96)}
    with pytest.raises(IngotError) as caught:
        ingot.open(folder(tmp_path / "m", entries, AWQ))
    assert caught.value.rule == "awq.activation-scales"
