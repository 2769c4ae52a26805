"""The lists of presets of each program agree with the conversions: what is listed plans, what is not is refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ingot.cli.main import run
from ingot.conversion import preset_fit
from ingot.conversion.options import ConvertOptions
from ingot.conversion.preset_fit import container_for, holds, plan_presets_of, presets_of, quantizes
from ingot.conversion.run import prepare as prepare_conversion
from ingot.errors import IngotError
from ingot.formats.detect import FORMATS
from ingot.inspect.catalog import recipes
from ingot.model.layouts.dense import DenseLayout
from ingot.model.statistics import Statistics
from ingot.recipes.load import ALL_PRESETS, load_recipe
from ingot.runtime.quantize.options import NONE, QuantizeOptions
from ingot.runtime.quantize.run import prepare
from ingot.runtimes.table import BUILT_IN, RUNTIMES
from tests.support import model_folder

WITHOUT_A_GRAPH = [name for name in BUILT_IN if name not in ("onnxruntime", "coreml")]
SIZE = 256
LAYERS = 2
FACTOR = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama in bf16 whose rows and columns every group and block divides."""
    random = np.random.default_rng(0)
    matrices = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    shapes = {f"model.layers.{layer}.{name}.weight": (SIZE, SIZE) for layer in range(LAYERS) for name in matrices}
    shapes |= {
        f"model.layers.{layer}.{name}.weight": (SIZE,)
        for layer in range(LAYERS)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (model_folder.ROWS, SIZE))
    shapes |= {"model.norm.weight": (SIZE,)}

    weights = {
        name: (random.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
    config = dict(model_folder.CONFIG, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=LAYERS)
    config |= {"head_dim": SIZE // FACTOR, "num_key_value_heads": FACTOR, "torch_dtype": "bfloat16"}
    return model_folder.write(tmp_path_factory.mktemp("model") / "m", config, weights)


def quantize_container(model: Path, runtime: str, preset: str) -> str:
    """Return the container of a dry run of ``ingot quantize``; empty if it is refused."""
    calibration = NONE if not preset.endswith("-calibrated") else "importance"
    options = QuantizeOptions(model, model.parent / "out", runtime=runtime, preset=preset, calibration=calibration)
    try:
        prepared, _ = prepare(options)
    except IngotError:
        return ""
    with prepared:
        return prepared.plan.format.name


def convert_container(model: Path, runtime: str, preset: str, statistics: Statistics) -> str:
    """Return the container of a dry run of ``ingot convert --for``; empty if it is refused."""
    known = statistics if load_recipe(preset).has_quantizer else None
    options = ConvertOptions(
        model, model.parent / "out", recipe=preset, runtime=runtime, calibration=known, measure=False
    )
    try:
        with prepare_conversion(options) as prepared:
            dense = all(step.spec.codec == DenseLayout.codec for step in prepared.plan.steps)
            return "" if dense and quantizes(load_recipe(preset)) else prepared.plan.format.name
    except IngotError:
        return ""


def uniform_statistics(model: Path) -> Statistics:
    """Return statistics in which all inputs of the matrices have the same size."""
    arrays = {}
    with prepare_conversion(ConvertOptions(model, model.parent / "all.zt")) as prepared:
        for name, tensor in prepared.checkpoint.items():
            if len(tensor.shape) > 1:
                arrays[f"{name}:in_sum2"] = np.ones(tensor.shape[1], np.float32)
                arrays[f"{name}:count"] = np.array([64], np.int64)
    return Statistics.in_memory(arrays)


def disagreements(model: Path, runtime: str, presets: list[str]) -> list[str]:
    statistics = uniform_statistics(model)
    listed = presets_of(RUNTIMES[runtime])
    different = []
    for preset in presets:
        expected = container_for(RUNTIMES[runtime], load_recipe(preset)) or ""
        outcomes = (quantize_container(model, runtime, preset), convert_container(model, runtime, preset, statistics))
        if (preset in listed) != bool(expected) or set(outcomes) != {expected}:
            different.append(f"{preset}: listed for {expected or 'nothing'}; quantize, convert: {outcomes}")
    return different


@pytest.mark.parametrize("runtime", ["vllm", "mlx"])
def test_presets_that_only_some_programs_read(model: Path, runtime: str) -> None:
    presets = ["w8a16", "int4", "mlx-4bit", "mlx-nvfp4", "ane-int8", "q4_0", "nf4", "Q4_K_M", "lossless", "bf16"]
    assert not disagreements(model, runtime, presets)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", WITHOUT_A_GRAPH)
def test_every_preset_of_every_program(model: Path, runtime: str) -> None:
    assert not disagreements(model, runtime, list(ALL_PRESETS))


@pytest.mark.parametrize("runtime", BUILT_IN)
def test_the_table_of_presets_has_the_programs_that_run_them(runtime: str) -> None:
    profile = RUNTIMES[runtime]
    assert presets_of(profile) == plan_presets_of(profile), "run tools/presets_table.py"


def test_the_table_says_where_each_preset_runs() -> None:
    rows = {item.name: item.runs_in for item in recipes()}
    assert "vLLM" not in rows["mlx-4bit"]
    assert rows["mlx-6bit"] == ("MLX (mlx-lm)",)
    assert rows["trellis4-calibrated"] == ("Ingot",)
    assert rows["16bit"] == ("any program",)
    assert {"vLLM", "transformers"} <= set(rows["w4a16"])


def test_compressed_presets_do_not_fit_containers_of_plain_values() -> None:
    for name in ("lossless", "lossless-max", "tca-tbe"):
        assert holds(FORMATS["zt" if name != "tca-tbe" else "squizd"], load_recipe(name))
        assert not holds(FORMATS["safetensors"], load_recipe(name))
        assert container_for(RUNTIMES["vllm"], load_recipe(name)) is None


def test_matrix_refuses_the_folders_that_convert_refuses(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["matrix", str(model), "--for", "vllm"]) == 0
    printed = capsys.readouterr().out
    assert "gptq: lm_head.weight: nothing would be quantized" in printed
    assert run(["convert", str(model), str(model.parent / "g"), "--format", "gptq", "--dry-run"]) == 1
    assert "nothing would be quantized" in capsys.readouterr().err


def test_the_question_whether_a_format_holds_a_preset_leaves_later_answers_alone() -> None:
    preset_fit._planned.cache_clear()
    recipe = load_recipe("w8a8")
    assert holds(FORMATS["compressed-tensors"], recipe)  # the format before it declares inputs
    assert not holds(FORMATS["gptq"], recipe)
    assert container_for(RUNTIMES["vllm"], recipe) == "compressed-tensors"
