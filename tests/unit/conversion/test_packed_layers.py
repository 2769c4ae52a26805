"""Folders of packed layers are what their programs read: even groups, merged matrices packed in one way, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.run import prepare
from ingot.errors import IngotError

RNG = np.random.default_rng(11)
LAYER = "model.layers.0."
FORMATS = ["compressed-tensors", "gptq", "awq", "mlx", "modelopt"]
INT4 = 'codec = "affine"\noptions = { bits = 4, group = %s, symmetric = true, scales = "%s" }'


def folder(path: Path, shapes: dict[str, tuple[int, int]], dtype: Any = np.float16) -> Path:
    """A model folder with these matrices, by the ends of their names."""
    path.mkdir()
    weights = {f"{LAYER}{name}.weight": RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    ingot.save(path / "model.safetensors", {"model.norm.weight": np.ones(8, dtype), **weights})
    (path / "config.json").write_text(
        json.dumps({"model_type": "llama", "model_file": "llama.py", "architectures": ["LlamaForCausalLM"]})
    )
    return path


def recipe(path: Path, rule: str, match: str = "*proj*") -> Path:
    path.write_text(f'name = "own"\n[[rules]]\nmatch = "{match}"\n{rule}\n')
    return path


def values(path: Path) -> dict[str, np.ndarray]:
    with ingot.open(path) as checkpoint:
        return {name: checkpoint[name].numpy("f32") for name in checkpoint}


def same(one: Path, other: Path, dtype: Any = np.float16) -> bool:
    """Whether values are equal once they are rounded to the model's type: what is decoded is."""
    left, right = values(one), values(other)
    equal = [np.array_equal(left[name].astype(dtype), right[name].astype(dtype)) for name in left]
    return left.keys() == right.keys() and all(equal)


def write_plan(source: Path, target: Path, plan: Path, format: str) -> None:
    assert run(["convert", str(source), str(target), "--format", format, "--plan-out", str(plan)]) == 0


def stated(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text()).get("quantization_config", {})
    return config


ATTENTION = {f"self_attn.{part}_proj": (96, 96) for part in "qkvo"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scales", ["f16", "bf16"])
def test_uneven_groups_become_smaller_ones_with_the_same_values(tmp_path: Path, format: str, scales: str) -> None:
    dtype = ml_dtypes.bfloat16 if scales == "bf16" else np.float16
    source = folder(tmp_path / "in", {**ATTENTION, "mlp.down_proj": (96, 128)}, dtype)
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", INT4 % (64, scales)), format="zt")
    report = ingot.convert(tmp_path / "zt", tmp_path / "out", format=format)
    assert report.actions["repacked"] == 5
    assert report.exact
    assert [note for note in report.notes if "groups of 32 columns, with the same scales repeated" in note]
    assert same(tmp_path / "zt", tmp_path / "out", np.float32)
    with ingot.open(tmp_path / "out") as checkpoint:
        groups = {name: checkpoint[name].params.get("group_size") for name in checkpoint if "proj" in name}
    down = 32 if format == "awq" else 64  # its config.json states one size
    assert groups == {name: down if "down" in name else 32 for name in groups}
    assert not [item for item in ingot.verify(tmp_path / "out") if item.level == "error"]


def test_zero_points_and_compressed_parts_are_repeated_too(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", ATTENTION)
    rule = 'codec = "affine"\nencoding = "zstd"\noptions = { bits = 4, group = 64, symmetric = false, scales = "f16" }'
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", rule), format="zt")
    for format in ("gptq", "compressed-tensors"):
        assert ingot.convert(tmp_path / "zt", tmp_path / format, format=format).actions["repacked"] == 4
        assert same(tmp_path / "zt", tmp_path / format)


def test_a_recipe_gets_smaller_groups_that_divide_the_columns(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {**ATTENTION, "mlp.down_proj": (96, 128)})
    report = ingot.convert(source, tmp_path / "out", "int4", format="compressed-tensors")
    assert "4 layers are quantized in groups of 32: groups of 64 do not divide 96 columns" in report.notes
    assert [group["weights"]["group_size"] for group in stated(tmp_path / "out")["config_groups"].values()] == [32]
    own = recipe(tmp_path / "r.toml", INT4 % (64, "f16"))
    ingot.convert(source, tmp_path / "own", own, format="compressed-tensors")
    assert {group["weights"]["group_size"] for group in stated(tmp_path / "own")["config_groups"].values()} == {32, 64}


def test_a_plan_in_a_file_makes_the_same_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", ATTENTION)
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", INT4 % (64, "f16")), format="zt")
    ingot.convert(tmp_path / "zt", tmp_path / "one", format="gptq")
    write_plan(tmp_path / "zt", tmp_path / "two", tmp_path / "plan.json", "gptq")
    ingot.execute(tmp_path / "plan.json")
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("format", "key"), [("compressed-tensors", "ignore"), ("mlx", ""), ("modelopt", "ignore"), ("bitsandbytes", "")]
)
def test_what_no_group_divides_is_decoded_and_said(tmp_path: Path, format: str, key: str) -> None:
    source = folder(tmp_path / "in", {"self_attn.o_proj": (64, 100), "mlp.down_proj": (64, 128)})
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", INT4 % (64, "f16")), format="zt")
    if format == "bitsandbytes":  # has no such integers
        with pytest.raises(IngotError) as caught:
            ingot.convert(tmp_path / "zt", tmp_path / "out", format=format)
        assert caught.value.rule == "convert.nothing-packed"
        return
    report = ingot.convert(tmp_path / "zt", tmp_path / "out", format=format)
    (note,) = [note for note in report.notes if "decoded" in note]
    assert note.startswith("1 quantized layers are decoded and stay dense")
    assert "64 of 100" in note
    if key:
        assert f"{LAYER}self_attn.o_proj" in stated(tmp_path / "out")[key]
        assert f"named under {key} of config.json" in note
    assert same(tmp_path / "zt", tmp_path / "out")


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_a_merged_matrix_is_dense_as_a_whole(tmp_path: Path, format: str) -> None:
    """GPTQ and AWQ have rows in 32s; vLLM loads q, k and v as one matrix."""
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (16, 64), "self_attn.v_proj": (64, 64)}
    source = folder(tmp_path / "in", {**shapes, "mlp.down_proj": (64, 64)})
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", INT4 % (32, "f16")), format="zt")
    report = ingot.convert(tmp_path / "zt", tmp_path / "out", format=format)
    assert report.actions == {"decoded": 3, "repacked": 1, "moved": 1}
    assert [note for note in report.notes if note.startswith("2 more layers stay dense")]
    assert same(tmp_path / "zt", tmp_path / "out")


def test_a_preset_packs_a_merged_matrix_as_a_whole(tmp_path: Path) -> None:
    """The preset passes over small matrices: k_proj here."""
    source = folder(
        tmp_path / "in", {"self_attn.q_proj": (128, 64), "self_attn.k_proj": (16, 64), "mlp.down_proj": (64, 64)}
    )
    report = ingot.convert(source, tmp_path / "out", "int4", format="compressed-tensors")
    assert report.actions == {"moved": 3, "encoded": 1}
    assert stated(tmp_path / "out")["ignore"] == [f"{LAYER}self_attn.k_proj", f"{LAYER}self_attn.q_proj", "lm_head"]


def test_a_recipe_of_the_users_own_is_followed(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", ATTENTION)
    path = recipe(tmp_path / "r.toml", INT4 % (32, "f16"), "*q_proj*")
    report = ingot.convert(source, tmp_path / "out", path, format="compressed-tensors")
    assert report.actions == {"moved": 4, "encoded": 1}
    assert [note for note in report.notes if note.startswith("vLLM refuses 1 merged matrices")]


def test_experts_of_a_layer_are_packed_alike(tmp_path: Path) -> None:
    shapes = {f"mlp.experts.{number}.{part}_proj": (64, 64) for number in range(2) for part in ("gate", "up", "down")}
    shapes["mlp.experts.1.down_proj"] = (16, 64)
    source = folder(tmp_path / "in", {**shapes, "self_attn.o_proj": (64, 64)})
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", INT4 % (32, "f16")), format="zt")
    report = ingot.convert(tmp_path / "zt", tmp_path / "out", format="gptq")
    assert report.actions == {"decoded": 6, "repacked": 1, "moved": 1}


FLOATS = 'codec = "scaled_codebook"\noptions = { %s }'
FP8 = FLOATS % 'table = "f8_e4m3fn", group = [128, 128]'
NVFP4 = FLOATS % 'table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "multiply"'


def test_blocks_across_parts_of_a_merged_matrix_are_reported(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", ATTENTION)
    report = ingot.convert(source, tmp_path / "out", recipe(tmp_path / "r.toml", FP8), "fp8")
    assert [text for text in report.notes if "rows that blocks of 128 do not divide" in text]


def test_parts_of_a_merged_matrix_share_their_second_scale(tmp_path: Path) -> None:
    """The scale of the part with the largest weight; matrices that vLLM does not merge keep their own."""
    source = folder(tmp_path / "in", ATTENTION)
    ingot.convert(source, tmp_path / "out", recipe(tmp_path / "r.toml", NVFP4), "modelopt")
    largest = {name: np.abs(array).max() for name, array in values(source).items()}
    second = {}
    with ingot.open(tmp_path / "out") as checkpoint:
        for part in "qkvo":
            name = f"{LAYER}self_attn.{part}_proj.weight"
            second[part] = float(checkpoint[name].parts["second_scale"].array()[0])
    merged = max(largest[f"{LAYER}self_attn.{part}_proj.weight"] for part in "qkv")
    assert [second[part] for part in "qkv"] == [np.float32(merged / (6 * 448))] * 3
    assert second["o"] == np.float32(largest[f"{LAYER}self_attn.o_proj.weight"] / (6 * 448))


@pytest.mark.parametrize("shared", [True, False])
def test_second_scales_that_differ_are_reported(tmp_path: Path, shared: bool) -> None:
    """Parts that were encoded together share one, in .zt too; those of another program may not."""
    source = folder(tmp_path / "in", ATTENTION)
    options = 'codec = "scaled_codebook"\noptions = { table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", '
    options += 'second = "multiply"%s }'
    text = recipe(tmp_path / "r.toml", options % "").read_text()
    if not shared:
        rules = (options % f", amax = {size}" for size in (4.0, 6.0, 5.0))
        text = 'name = "own"\n' + "".join(
            f'[[rules]]\nmatch = "*{part}_proj*"\n{rule}\n' for part, rule in zip("qkv", rules, strict=True)
        )
    (tmp_path / "r.toml").write_text(text)
    ingot.convert(source, tmp_path / "zt", tmp_path / "r.toml", format="zt")
    report = ingot.convert(tmp_path / "zt", tmp_path / "out", format="modelopt")
    assert [note for note in report.notes if "different second scales" in note] == [] if shared else report.notes[-1:]
    assert shared or "1 merged matrices have different second scales" in report.notes[-1]


INT8 = 'codec = "affine"\noptions = { bits = 8, group = "row", symmetric = %s, scales = "f32" }'
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize("symmetric", ["true", "false"])
@pytest.mark.parametrize("cols", [96, 97])
def test_weights_of_8_bits_alone_are_packed_in_words(tmp_path: Path, symmetric: str, cols: int) -> None:
    """vLLM takes them in bytes only where inputs are quantized too."""
    source = folder(tmp_path / "in", {"mlp.down_proj": (64, cols)})
    path = recipe(tmp_path / "r.toml", INT8 % symmetric)
    ingot.convert(source, tmp_path / "zt", path, format="zt")
    ingot.convert(tmp_path / "zt", tmp_path / "out", format="compressed-tensors")
    config = stated(tmp_path / "out")
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "pack-quantized"
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert same(tmp_path / "zt", tmp_path / "out")


def test_the_preset_of_8_bits_in_one_step(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", ATTENTION)
    ingot.convert(source, tmp_path / "out", "int8", format="compressed-tensors")
    ingot.convert(source, tmp_path / "zt", "int8", format="zt")
    assert stated(tmp_path / "out")["format"] == "pack-quantized"
    assert same(tmp_path / "zt", tmp_path / "out")


def quantized_inputs(tmp_path: Path) -> Path:
    codes = RNG.integers(-127, 128, (64, 64)).astype(np.int8)
    entries = {
        f"{LAYER}mlp.down_proj.weight": codes,
        f"{LAYER}mlp.down_proj.weight_scale": np.ones((64, 1), np.float16),
    }
    path = tmp_path / "w8a8"
    path.mkdir()
    ingot.save(path / "model.safetensors", {"model.norm.weight": np.ones(8, np.float16), **entries})
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": TOKENS, "format": "int-quantized"}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return path


def test_bytes_stay_bytes_where_inputs_are_quantized(tmp_path: Path) -> None:
    path = quantized_inputs(tmp_path)
    assert ingot.convert(path, tmp_path / "out", format="compressed-tensors").actions == {"moved": 2}
    write_plan(path, tmp_path / "two", tmp_path / "plan.json", "compressed-tensors")
    ingot.execute(tmp_path / "plan.json")
    for name in ("out", "two"):
        group = stated(tmp_path / name)["config_groups"]["group_0"]
        assert (group["format"], group["input_activations"]) == ("int-quantized", TOKENS)
    ingot.convert(path, tmp_path / "zt", format="zt")  # which has no place for what config.json says of inputs
    ingot.convert(tmp_path / "zt", tmp_path / "back", format="compressed-tensors")
    assert stated(tmp_path / "back")["format"] == "pack-quantized"


@pytest.mark.parametrize(
    "format",
    ["gptq", "gptq-planes", "awq", "awq-gemv", "compressed-tensors", "fp8", "modelopt", "bitsandbytes", "mxfp4"],
)
def test_a_plain_copy_is_no_packed_folder(tmp_path: Path, format: str) -> None:
    source = folder(tmp_path / "in", ATTENTION)
    for call in (ingot.convert, prepare):
        with pytest.raises(IngotError) as caught:
            call(source, tmp_path / "out", format=format)
        assert caught.value.rule == "convert.nothing-packed"
        assert "nothing would be quantized" in str(caught.value)
        assert "To quantize: " in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_mlx_has_dense_folders(tmp_path: Path) -> None:
    assert ingot.convert(folder(tmp_path / "in", ATTENTION), tmp_path / "out", format="mlx").actions == {"moved": 5}


def test_columns_in_another_order_are_decoded_for_compressed_tensors(tmp_path: Path) -> None:
    """Newer releases and vLLM refuse ``actorder`` group."""
    order = np.repeat(np.arange(2), 32)[np.random.default_rng(1).permutation(64)].astype(np.int32)
    stem, codes = f"{LAYER}mlp.down_proj", RNG.integers(0, 2**31, (8, 64)).astype(np.int32)
    entries = {f"{stem}.qweight": codes, f"{stem}.qzeros": np.full((2, 8), 0x77777777, np.int32)}
    entries |= {f"{stem}.scales": RNG.uniform(0.1, 1, (2, 64)).astype(np.float16), f"{stem}.g_idx": order}
    even = {key.replace("down", "o"): value for key, value in entries.items() if not key.endswith("g_idx")}
    even[f"{LAYER}mlp.o_proj.g_idx"] = np.arange(64, dtype=np.int32) // 32
    path = folder(tmp_path / "in", {})
    ingot.save(path / "model.safetensors", {**entries, **even})
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    report = ingot.convert(path, tmp_path / "out", format="compressed-tensors")
    assert report.actions == {"decoded": 1, "repacked": 1}
    assert [note for note in report.notes if note.startswith("1 quantized layers are decoded")]
    assert stated(tmp_path / "out")["config_groups"]["group_0"]["weights"]["actorder"] is None
    assert same(path, tmp_path / "out")


def test_a_fine_tune_of_a_packed_base_is_a_dense_folder(tmp_path: Path) -> None:
    """A config.json that says otherwise would make programs look for packed layers."""
    source, tuned = folder(tmp_path / "in", ATTENTION), folder(tmp_path / "tuned", ATTENTION)
    ingot.convert(source, tmp_path / "zt", recipe(tmp_path / "r.toml", INT4 % (32, "f16")), format="zt")
    ingot.convert(tmp_path / "zt", tmp_path / "base", format="gptq")
    (tmp_path / "base" / "quantize_config.json").write_text("{}")
    ingot.diff(tmp_path / "base", tuned, tmp_path / "d.zt")
    report = ingot.patch(tmp_path / "base", tmp_path / "d.zt", tmp_path / "out")
    assert (report.format, sorted(report.companions)) == ("safetensors", ["config.json"])
    assert not stated(tmp_path / "out")
    assert same(tuned, tmp_path / "out")
    with pytest.raises(IngotError) as caught:
        ingot.patch(tmp_path / "base", tmp_path / "d.zt", tmp_path / "no", format="gptq")
    assert caught.value.rule == "convert.nothing-packed"
