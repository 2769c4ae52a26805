"""Presets for vLLM and transformers: one step into the container, and the config.json that the program needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.options import ConvertOptions
from ingot.conversion.run import prepare
from ingot.errors import IngotError, UnsupportedError
from ingot.model.statistics import Statistics
from ingot.naming.names import INPUT_SCALE
from ingot.recipes.load import load_recipe, parse_recipe, preset_text
from ingot.views.input_scales import input_scales
from tests.support import preset_model
from tests.support.preset_model import statistics, written

FIELDS = ("inputs", "in_sum2", "count")
W4A4 = "nvfp4-w4a4-calibrated"
DYNAMIC = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model whose every dimension 64 divides, in bf16."""
    return written(tmp_path / "source", ml_dtypes.bfloat16)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def packed(folder: Path) -> dict[str, str]:
    with ingot.open(folder) as checkpoint:
        return {name: checkpoint[name].codec for name in checkpoint if checkpoint[name].codec != "dense"}


def scale_dtypes(folder: Path) -> set[str]:
    with ingot.open(folder) as checkpoint:
        return {checkpoint[name].parts["scales"].dtype for name in packed(folder)}


@pytest.mark.parametrize(
    ("preset", "format", "keys"),
    [
        ("w4a16", "compressed-tensors", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}),
        ("w8a16", "compressed-tensors", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("w8a8", "compressed-tensors", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("fp8", "compressed-tensors", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("nvfp4", "compressed-tensors", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
        ("mxfp4", "compressed-tensors", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ],
)
def test_settings_of_compressed_tensors(
    source: Path, tmp_path: Path, preset: str, format: str, keys: dict[str, Any]
) -> None:
    report = ingot.convert(source, tmp_path / "out", preset, format=format)
    assert set(report.actions) == {"moved", "encoded"}
    assert len(packed(tmp_path / "out")) == 7
    config = config_of(tmp_path / "out")
    formats = {"w8a8": "int-quantized", "fp8": "float-quantized", "nvfp4": "nvfp4-pack-quantized"}
    assert config["format"] == formats.get(
        preset, f"{preset}-pack-quantized" if preset == "mxfp4" else "pack-quantized"
    )
    group = config["config_groups"]["group_0"]
    assert keys.items() <= group["weights"].items()
    inputs = {"w8a8": {**DYNAMIC, "type": "int"}, "fp8": {**DYNAMIC, "type": "float"}}.get(preset)
    assert (
        group["input_activations"] is None if inputs is None else inputs.items() <= group["input_activations"].items()
    )
    assert config["ignore"] == ["lm_head"]


@pytest.mark.parametrize(
    ("preset", "format", "keys"),
    [
        ("w4a16", "gptq", {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}),
        ("w4a16", "awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}),
        ("w8a16", "gptq", {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}),
        ("nf4", "bitsandbytes", {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "load_in_4bit": True}),
    ],
)
def test_other_containers(source: Path, tmp_path: Path, preset: str, format: str, keys: dict[str, Any]) -> None:
    report = ingot.convert(source, tmp_path / "out", preset, format=format)
    assert set(report.actions) == {"moved", "encoded"}
    assert len(packed(tmp_path / "out")) == 7
    assert keys.items() <= config_of(tmp_path / "out").items()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_scales_have_the_type_in_which_the_program_computes(tmp_path: Path, dtype: Any) -> None:
    """vLLM rounds scales to the model's type; GPTQ and AWQ have f16 only."""
    source = written(tmp_path / "in", dtype)
    ingot.convert(source, tmp_path / "ct", "w4a16", format="compressed-tensors")
    ingot.convert(source, tmp_path / "gptq", "w4a16", format="gptq")
    assert scale_dtypes(tmp_path / "ct") == ({"bf16"} if dtype is ml_dtypes.bfloat16 else {"f16"})
    assert scale_dtypes(tmp_path / "gptq") == {"f16"}


def test_blocks_of_fp8_where_they_divide_merged_rows(tmp_path: Path) -> None:
    """k and v have 64 rows here: q, k and v stay dense; gate and up, which have 256, are packed."""
    source = written(tmp_path / "in", ml_dtypes.bfloat16)
    report = ingot.convert(source, tmp_path / "out", "fp8-block", format="fp8")
    config = config_of(tmp_path / "out")
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    names = {name.removesuffix(".weight").rpartition(".")[2] for name in packed(tmp_path / "out")}
    assert names == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    dense = {name.rpartition(".")[2] for name in config["modules_to_not_convert"]}
    assert {"q_proj", "k_proj", "v_proj"} <= dense
    note = next(note for note in report.notes if "blocks of 128 rows do not divide" in note)
    assert note.startswith("3 layers stay dense")


@pytest.mark.parametrize("format", ["gptq", "mlx", "safetensors", "zt", "gguf"])
def test_activations_that_a_container_cannot_declare_are_refused(source: Path, tmp_path: Path, format: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "out", "w8a8", format=format)
    assert caught.value.rule == "recipe.activations"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
def test_nvfp4_has_one_second_scale_for_merged_matrices(source: Path, tmp_path: Path, format: str) -> None:
    """compressed-tensors divides by it, ModelOpt multiplies: both are encoded in one step, with equal codes."""
    report = ingot.convert(source, tmp_path / "out", "nvfp4", format=format)
    assert not [note for note in report.notes if "different second scales" in note]
    second = {}
    with ingot.open(tmp_path / "out") as checkpoint:
        for name in packed(tmp_path / "out"):
            second[name.split(".")[-2]] = float(checkpoint[name].parts["second_scale"].array()[0])
    assert second["q_proj"] == second["k_proj"] == second["v_proj"]
    assert second["gate_proj"] == second["up_proj"]
    assert second["down_proj"] != second["o_proj"] != second["q_proj"]


@pytest.mark.parametrize("tied", [True, False])
def test_mlx_rounds_a_tied_head_by_its_statistics(tmp_path: Path, tied: bool) -> None:
    """An embedding that is the head too is rounded by the head's statistics; another one, to nearest."""
    source = written(tmp_path / "in", np.float16)
    arrays = preset_model.arrays()
    if tied:
        with ingot.open(source) as checkpoint:
            weights = {name: checkpoint[name].numpy(copy=True) for name in checkpoint if name != "lm_head.weight"}
        ingot.save(source / "model.safetensors", weights, overwrite=True)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
        arrays |= {f"model.embed_tokens.weight:{key}": arrays[f"lm_head.weight:{key}"] for key in FIELDS}
    calibration = Statistics.in_memory(arrays)
    report = ingot.convert(source, tmp_path / "out", "mlx-4bit-calibrated", format="mlx", calibration=calibration)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert {outcome.matrix for outcome in report.rounded if "layers" not in outcome.matrix} == {head}
    assert set(report.actions) <= {"moved", "encoded"}
    with ingot.open(source) as original, ingot.open(tmp_path / "out") as rounded:
        change = original[head].numpy("f32") - rounded[head].numpy("f32")
        ingot.convert(source, tmp_path / "plain", "mlx-4bit", format="mlx")
        with ingot.open(tmp_path / "plain") as nearest:
            before = original[head].numpy("f32") - nearest[head].numpy("f32")
    moment = arrays["lm_head.weight:inputs"]
    assert np.vdot(change @ moment, change) < 0.9 * np.vdot(before @ moment, before)


def scales_of_inputs(folder: Path) -> dict[str, float]:
    with ingot.open(folder) as checkpoint:
        names = [name for name in checkpoint if name.endswith(INPUT_SCALE)]
        return {name.split(".")[-2]: float(checkpoint[name].numpy()[0]) for name in names}


def test_nvfp4_of_weights_and_inputs(source: Path, tmp_path: Path) -> None:
    """The layout of llm-compressor 0.14 and vLLM 0.32: divisors for weights and inputs, shared by merged matrices."""
    calibration = statistics()
    report = ingot.convert(source, tmp_path / "out", W4A4, format="compressed-tensors", calibration=calibration)
    assert report.actions == {"moved": 12, "encoded": 7}
    group = config_of(tmp_path / "out")["config_groups"]["group_0"]
    assert group["format"] == "nvfp4-pack-quantized"
    expected = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    assert {**expected, "dynamic": False}.items() <= group["weights"].items()
    assert {**expected, "dynamic": "local", "observer": "static_minmax"}.items() <= group["input_activations"].items()
    second = {}
    with ingot.open(source) as original, ingot.open(tmp_path / "out") as checkpoint:
        for name in packed(tmp_path / "out"):
            second[name.split(".")[-2]] = float(checkpoint[name].parts["second_scale"].array()[0])
            weights, decoded = original[name].numpy("f32"), checkpoint[name].numpy("f32")
            assert np.linalg.norm(weights - decoded) < 0.2 * np.linalg.norm(weights)
    inputs = scales_of_inputs(tmp_path / "out")
    for scales in (second, inputs):
        assert len(scales) == 7
        assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"]
        assert scales["gate_proj"] == scales["up_proj"]
        assert scales["down_proj"] != scales["o_proj"] != scales["q_proj"]
    absmax = [calibration.for_matrix(f"model.layers.0.self_attn.{name}_proj.weight").absmax.max() for name in "qkv"]
    assert inputs["q_proj"] == np.float32(6 * 448 / float(max(absmax)))


def test_the_plan_of_nvfp4_inputs_reads_no_statistics(source: Path, tmp_path: Path) -> None:
    """A plan compares second scales; rounding, which reads the statistics, waits until the matrices are written."""
    options = ConvertOptions(str(source), str(tmp_path / "out"), recipe=W4A4, format="compressed-tensors")
    with prepare(options) as prepared:
        assert [step.spec.name for step in prepared.plan.steps if step.spec.name.endswith(INPUT_SCALE)]
        assert not [note for note in prepared.notes if "second scales" in note]


@pytest.mark.parametrize("missing", ["absmax", "quantizer"])
def test_inputs_without_scales_are_refused(source: Path, tmp_path: Path, missing: str) -> None:
    arrays = {key: value for key, value in preset_model.arrays().items() if missing not in key}
    recipe: Any = W4A4
    if missing == "quantizer":
        recipe = tmp_path / "r.toml"
        recipe.write_text(preset_text(W4A4).replace('quantizer = "two-sided"', ""))
    calibration = None if missing == "quantizer" else Statistics.in_memory(arrays)
    with pytest.raises(IngotError) as caught:
        ingot.convert(source, tmp_path / "out", recipe, format="compressed-tensors", calibration=calibration)
    assert caught.value.rule == {"absmax": "statistics.absmax", "quantizer": "recipe.activations"}[missing]
    assert not (tmp_path / "out").exists()


def test_experts_without_tokens_take_the_scale_of_the_others(tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{index}.up_proj.weight" for index in range(2)]
    absmax = {names[0]: (3.0, 10), names[1]: (0.0, 0)}
    arrays: dict[str, Any] = {}
    for name, (value, count) in absmax.items():
        arrays |= {f"{name}:in_sum2": np.ones(32, np.float32), f"{name}:count": np.array([count])}
        arrays[f"{name}:absmax"] = np.full(32, value, np.float32)
    ingot.save(tmp_path / "x.safetensors", {name: np.ones((32, 32), np.float32) for name in names})
    with ingot.open(tmp_path / "x.safetensors") as checkpoint:
        scales = input_scales(checkpoint, names, lambda: Statistics.in_memory(arrays))
        values = [float(build().numpy()[0]) for _, build in scales.values()]
    assert values == [6 * 448 / 3] * 2


def test_activations_without_layers_that_fit_are_refused(source: Path, tmp_path: Path) -> None:
    text = 'activations = "int8"\n[[rules]]\nroles = ["mlp"]\ncodec = "affine"\noptions = { bits = 4, group = 32 }\n'
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "out", tmp_path / "r.toml", format="compressed-tensors")
    assert caught.value.rule == "recipe.activations"


@pytest.mark.parametrize("text", ['activations = "int4"', "activations = 8", 'runs_in = ["vLLM", 1]'])
def test_recipe_keys_are_checked(text: str) -> None:
    with pytest.raises(IngotError) as caught:
        parse_recipe(text, location="r.toml")
    assert caught.value.rule in ("recipe.activations", "recipe.type")


def test_a_plan_in_a_file_declares_activations(source: Path, tmp_path: Path) -> None:
    command = ["convert", str(source), str(tmp_path / "out"), "--recipe", "w8a8", "--format", "compressed-tensors"]
    assert run([*command, "--plan-out", str(tmp_path / "plan.json"), "-q"]) == 0
    assert run(["run-plan", str(tmp_path / "plan.json"), "-q"]) == 0
    ingot.convert(source, tmp_path / "direct", "w8a8", format="compressed-tensors")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_a_folder_with_activations_is_read_and_kept(source: Path, tmp_path: Path) -> None:
    ingot.convert(source, tmp_path / "one", "w8a8", format="compressed-tensors")
    report = ingot.convert(tmp_path / "one", tmp_path / "two", format="compressed-tensors")
    assert set(report.actions) == {"moved"}
    assert config_of(tmp_path / "one") == config_of(tmp_path / "two")


def test_a_fingerprint_contains_the_activations() -> None:
    rule = '[[rules]]\ncodec = "dense"\n'
    plain, other = (parse_recipe(text + rule, location="r") for text in ("", 'activations = "int8"\n'))
    assert plain.fingerprint() != other.fingerprint()
    assert load_recipe("w8a16").fingerprint() != load_recipe("w8a8").fingerprint()


@pytest.mark.parametrize("preset", ["w4a16-calibrated", "int4-calibrated"])
@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq", "mlx", "gguf"])
def test_calibrated_integers_go_into_every_container(source: Path, tmp_path: Path, preset: str, format: str) -> None:
    """The integers and scales of a .zt, exactly; the values of bf16 scales are exact in f16."""
    ingot.convert(source, tmp_path / "zt", preset, format="zt", calibration=statistics())
    target = tmp_path / ("out.gguf" if format == "gguf" else "out")
    options = {"format": format, "calibration": statistics(), "keep_names": format == "gguf"}
    report = ingot.convert(source, target, preset, **options)
    assert "decoded" not in report.actions
    with ingot.open(tmp_path / "zt") as expected, ingot.open(target) as checkpoint:
        names = [name for name in expected if expected[name].codec != "dense"]
        assert len(names) == 7
        same_scales = preset == "int4-calibrated" or format in ("compressed-tensors", "mlx")
        for name in names if same_scales else ():
            assert np.array_equal(checkpoint[name].numpy("f32"), expected[name].numpy("f32")), name


def test_calibration_lessens_the_error_under_the_inputs(source: Path, tmp_path: Path) -> None:
    collected = statistics()
    for preset in ("w4a16", "w4a16-calibrated"):
        calibration = collected if preset.endswith("calibrated") else None
        ingot.convert(source, tmp_path / preset, preset, format="compressed-tensors", calibration=calibration)
    with ingot.open(source) as weights:
        for name in packed(tmp_path / "w4a16"):
            matrix = collected.for_matrix(name)
            assert matrix is not None
            errors = []
            for preset in ("w4a16", "w4a16-calibrated"):
                with ingot.open(tmp_path / preset) as checkpoint:
                    change = checkpoint[name].numpy("f32") - weights[name].numpy("f32")
                errors.append(float(np.vdot(change, change @ matrix.inputs)))
            assert errors[1] < 0.8 * errors[0], name


@pytest.mark.parametrize("format", ["compressed-tensors", "gptq", "awq", "mlx", "gguf"])
@pytest.mark.parametrize("preset", ["trellis4-calibrated", "table3-calibrated"])
def test_what_only_ingot_reads_is_refused_elsewhere(source: Path, tmp_path: Path, preset: str, format: str) -> None:
    target = tmp_path / ("out.gguf" if format == "gguf" else "out")
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, target, preset, format=format, calibration=statistics(), keep_names=True)
    assert caught.value.rule == "convert.not-held"
    assert "Presets that" in caught.value.message
    assert not target.exists()


def test_awq_has_groups_of_one_size(tmp_path: Path) -> None:
    """Rows of 96 columns want groups of 32, so all layers get them."""
    shapes = {"self_attn.o_proj": (128, 96), "mlp.down_proj": (128, 256)}
    rng = np.random.default_rng(7)
    weights = {
        f"model.layers.0.{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    (tmp_path / "in").mkdir()
    ingot.save(tmp_path / "in" / "model.safetensors", weights)
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama"}')
    report = ingot.convert(tmp_path / "in", tmp_path / "out", "w4a16", format="awq")
    assert config_of(tmp_path / "out")["group_size"] == 32
    assert len(packed(tmp_path / "out")) == 2
    assert any("awq has groups of one size" in tensor.rule for tensor in report.tensors)
