"""``ingot quantize`` from a shell and from Python: one command to a result that its program would load."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run as run_command
from ingot.conversion.estimate import Estimate, estimate_rounding
from ingot.conversion.options import ConvertOptions
from ingot.conversion.report import ConvertReport
from ingot.errors import IngotError
from ingot.recipes.choice import Choice
from ingot.recipes.load import load_recipe
from ingot.recipes.recipe import Recipe
from ingot.runtime.calibration.calibration import CalibratePlan
from ingot.runtime.quantize import run as quantize_run
from ingot.runtime.quantize.option_names import with_commands
from ingot.runtime.quantize.options import parse_time
from ingot.runtime.quantize.run import with_group_size, with_quantizer
from tests.support import model_folder

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder with a model ``m``; return what it printed."""
    model_folder.write(tmp_path / "m")
    monkeypatch.chdir(tmp_path)

    def call(*words: str, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        found = run_command(list(words))
        printed = capsys.readouterr()
        assert found == code, printed.out + printed.err
        return printed.out, printed.err

    return call


def statistics(model: Path, path: Path) -> Path:
    """Statistics of every matrix of a model, with inputs of different size."""
    arrays: dict[str, Any] = {}
    with ingot.open(model) as checkpoint:
        identity = content_id(checkpoint)
        for name, tensor in checkpoint.items():
            if len(tensor.shape) == 2:
                cols = tensor.shape[1]
                arrays[f"{name}:in_sum2"] = np.linspace(0.1, 4, cols, dtype=np.float32)
                arrays[f"{name}:absmax"] = np.ones(cols, np.float32)
                arrays[f"{name}:count"] = np.array([64], np.int64)
    ingot.save(path, arrays, {"ingot.statistics": "1", "model": identity, "source": "a test"})
    return path


def test_for_alone_decides_and_the_result_verifies(run: Run) -> None:
    out, err = run("quantize", "m", "-o", "w4", "--for", "vllm", "--calibration", "none")
    assert "compressed-tensors, preset w4a16" in out
    assert "vllm serve w4" in out
    assert "bits per weight" in out
    assert "4-bit integers" in out
    assert err.startswith("estimate: about ")
    verified, _ = run("verify", "w4", "--for", "vllm")
    assert "would load this" in verified
    with ingot.open("w4") as checkpoint:
        assert checkpoint.metadata["ingot.preset"] == "w4a16"
        assert "without statistics" in checkpoint.metadata["ingot.rounding"]


@pytest.mark.parametrize(
    ("words", "preset", "command"),
    [
        (("-o", "x.gguf", "--type", "q8_0"), "Q8_0", "llama-cli -m x.gguf"),
        (("-o", "x.gguf", "--outtype", "F16"), "f16", "llama-cli -m x.gguf"),
        (("-o", "x.gguf", "--bits", "4", "--calibration", "none"), "q4_k", "llama-cli -m x.gguf"),
        (("-o", "x", "--to", "mlx", "--q-bits", "4"), "mlx-4bit", "mlx_lm.generate --model x"),
        (("-o", "x", "--for", "transformers", "--dtype", "bfloat16"), "bf16", "transformers"),
        (("-o", "x", "--for", "ollama", "--type", "Q8_0"), "Q8_0", "ollama create x"),
        (("-o", "x", "--for", "vllm", "--format", "gptq", "--calibration", "none"), "w4a16", "vllm serve x"),
        (("-o", "x", "--for", "vllm", "--format", "awq", "--calibration", "none"), "w4a16", "vllm serve x"),
    ],
)
def test_options_of_other_tools_are_understood(run: Run, words: tuple[str, ...], preset: str, command: str) -> None:
    out, _ = run("quantize", "m", *words)
    assert f"preset {preset}" in out
    assert command in out


def test_json_has_the_figures(run: Run) -> None:
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "q8_0", "--json")
    report = json.loads(out)
    assert report["container"] == "gguf"
    assert report["bits_per_weight"] > 8
    assert 0 < report["error"] < 0.02
    assert report["commands"] == ["llama-cli -m x.gguf -p 'Once upon a time'"]
    assert abs(sum(row["share"] for row in report["types"]) - 1) < 1e-9
    assert {row["stored"] for row in report["types"]} == {"Q8_0", "dense f32"}


def test_the_report_lists_the_types_that_took_the_place_of_others(run: Run) -> None:
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "q4_k", "--calibration", "none")
    assert "Q5_0" in out  # 64 columns: Q4_K takes 256
    assert "256 does not divide" in out


def test_statistics_of_a_file_are_used_and_named(run: Run, tmp_path: Path) -> None:
    statistics(tmp_path / "m", tmp_path / "s.safetensors")
    out, _ = run("quantize", "m", "-o", "w4", "--for", "vllm", "--calibration", "s.safetensors")
    assert "preset w4a16-calibrated" in out
    assert "by the statistics of" in out
    report = ingot.quantize("m", "w4b", runtime="vllm", calibration="s.safetensors")
    assert report.error is not None
    assert 0.03 < report.error < 0.2
    run("quantize", "m", "-o", "x.gguf", "--bits", "4", "--calibration", "s.safetensors")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-o", "x", "--for", "vlm"), "did you mean 'vllm'"),
        (("-o", "x"), "--for"),
        (("-o", "x.gguf", "--type", "Q4_X"), "did you mean"),
        (("-o", "x", "--for", "vllm", "--preset", "w4a61"), "did you mean 'w4a16'"),
        (("-o", "x", "--for", "vllm", "--preset", "fp8", "--calibration", "full"), "no calibrated form"),
        (("-o", "x.gguf", "--bits", "2", "--calibration", "none"), "rounded by statistics"),
        (("-o", "x", "--for", "vllm", "--time", "soon"), "such as 30m"),
        (("-o", "x", "--for", "vllm", "--calibration", "none", "--time", "1m"), "--calibration auto alone"),
        (("-o", "x.gguf", "--type", "q8_0", "--group-size", "32"), "integers in groups"),
        (("-o", "x", "--for", "vllm", "--calibration", "ful"), "did you mean 'full'"),
        (("-o", "no/x", "--for", "vllm", "--calibration", "none"), "create it first"),
    ],
)
def test_wrong_options_are_one_line(run: Run, words: tuple[str, ...], text: str) -> None:
    _, err = run("quantize", "m", *words, code=2)
    assert text in err
    assert err.count("\n") == 1
    assert not Path("x").exists()


def test_a_quantized_model_is_refused_with_the_way_out(run: Run) -> None:
    run("quantize", "m", "-o", "w4", "--for", "vllm", "--calibration", "none")
    _, err = run("quantize", "w4", "-o", "x.gguf", "--type", "q4_0", "--calibration", "none", code=2)
    assert "ingot convert w4 x.gguf" in err
    assert "--allow-requantize" in err
    run("quantize", "w4", "-o", "x.gguf", "--type", "q4_0", "--calibration", "none", "--allow-requantize")


def test_a_model_that_no_rule_fits_is_refused(run: Run, tmp_path: Path) -> None:
    odd = {name: array for name, array in model_folder.tensors().items() if "proj" not in name}
    model_folder.write(tmp_path / "odd", {"model_type": "other", "architectures": ["Other"]}, odd)
    _, err = run("quantize", "odd", "-o", "x", "--for", "vllm", "--calibration", "none", code=1)
    assert "nothing would be quantized: no matrix of this model fits preset w4a16" in err
    _, err = run("quantize", "m", "-o", "x", "--for", "vllm", "--calibration", "none", "--group-size", "7", code=1)
    assert "no matrix of this model fits" in err
    assert not Path("x").exists()


def test_an_existing_target_needs_overwrite(run: Run) -> None:
    run("quantize", "m", "-o", "x.gguf", "--type", "q8_0")
    _, err = run("quantize", "m", "-o", "x.gguf", "--type", "q8_0", code=2)
    assert "--overwrite" in err
    run("quantize", "m", "-o", "x.gguf", "--type", "q8_0", "--overwrite")


def test_a_result_that_the_program_would_not_load_is_refused(run: Run, tmp_path: Path) -> None:
    words = model_folder.tokenizer([f"<|more-{index}|>" for index in range(20)])
    model_folder.write(tmp_path / "long", words=words)
    _, err = run("quantize", "long", "-o", "x", "--for", "vllm", "--calibration", "none", code=1)
    assert "vLLM 0.32.0 would not load this" in err
    assert "tokens up to the id 279" in err
    assert not Path("x").exists()


@pytest.mark.parametrize(
    "words", ['{"format": "another", "version": 1, "merges": []}', "{}", "[]", "{", '{"model": {"type": "BPE"}}']
)
@pytest.mark.parametrize("runtime", ["vllm", "mlx", "sglang"])
def test_a_tokenizer_in_another_format_is_refused(words: str, runtime: str, run: Run, tmp_path: Path) -> None:
    (model_folder.write(tmp_path / "unread") / "tokenizer.json").write_text(words)
    _, err = run("quantize", "unread", "-o", "x", "--for", runtime, "--calibration", "none", code=1)
    assert "tokenizer.json has no model with a vocabulary" in err
    assert err.count("\n") == 1
    assert not Path("x").exists()


def test_a_model_without_config_or_tokenizer_is_refused_before_work_begins(run: Run, tmp_path: Path) -> None:
    model_folder.write(tmp_path / "bare", None)
    model_folder.write(tmp_path / "mute", words={})
    for source, word in (("bare", "config.json is missing"), ("mute", "tokenizer.json")):
        _, err = run("quantize", source, "-o", "x", "--for", "vllm", code=1)
        assert word in err
        assert err.count("\n") == 1
    for source in ("bare", "mute"):
        _, err = run("quantize", source, "-o", "x.gguf", "--bits", "8", code=1)
        assert err.count("\n") == 1
    assert not Path("x").exists()
    assert not Path("x.gguf").exists()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("m/model.safetensors", "one file of a model; name the folder, m,"),
        ("m/model-00001-of-00003.safetensors", "one of 3 shards of a model; name the folder, m,"),
        ("m/model.safetensors.index.json", "the index of a model's shards; name the folder, m,"),
        ("m/pytorch_model-00002-of-00002.bin", "one of 2 shards of a model; name the folder, m,"),
    ],
)
def test_a_file_of_a_folder_is_refused_with_the_folder(run: Run, source: str, text: str) -> None:
    if not Path(source).exists():
        Path(source).write_bytes(Path("m/model.safetensors").read_bytes())
    _, err = run("quantize", source, "-o", "x", "--for", "vllm", code=2)
    assert text in err
    assert "[quantize.model]" in err


def test_an_empty_folder_is_a_target(run: Run) -> None:
    Path("x").mkdir()
    run("quantize", "m", "-o", "x", "--for", "vllm", "--calibration", "none", "-q")
    assert Path("x/config.json").exists()
    for words in ((), ("--dry-run",)):
        _, err = run("quantize", "m", "-o", "x", "--for", "vllm", "--calibration", "none", *words, code=2)
        assert "the target exists" in err


def test_a_single_file_for_a_program_that_loads_folders_is_refused(run: Run) -> None:
    _, err = run("quantize", "m", "-o", "x.safetensors", "--for", "vllm", code=2)
    assert "vLLM loads a folder with config.json and tokenizer.json, and x.safetensors is a single file" in err
    assert "write -o x " in err
    _, err = run("convert", "m", "x.safetensors", "--for", "vllm", code=2)
    assert "name the target x [convert.runtime]" in err
    assert not list(Path().glob("x*"))


def test_the_command_that_moves_a_quantized_model_succeeds(run: Run) -> None:
    run("quantize", "m", "-o", "4 bits", "--for", "vllm", "--calibration", "none")
    _, err = run("quantize", "4 bits", "-o", "x", "--for", "mlx", code=2)
    command = err.partition("`")[2].partition("`")[0]
    assert command == "ingot convert '4 bits' x --for mlx"
    run(*shlex.split(command)[1:])
    _, err = run("quantize", "4 bits", "-o", "y", "--for", "onnxruntime", code=2)
    assert "start from the original model" in err
    assert "`" not in err


def test_a_result_larger_than_its_preset_is_explained_first(run: Run) -> None:
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "Q4_K_M", "--calibration", "none", "--json")
    larger = json.loads(out)["larger"]
    assert "the matrices of preset Q4_K_M have 4.79" in larger[0]
    assert any("Q5_0 instead of Q4_K, because 256 does not divide 64 columns" in text for text in larger)
    out, _ = run("quantize", "m", "-o", "w", "--for", "vllm", "--calibration", "none")
    lines = out.splitlines()
    assert "% of the bytes are dense f32: no rule of the preset applies to" in out
    assert next(index for index, text in enumerate(lines) if "larger" in text) < lines.index("next:") - 5
    out, _ = run("quantize", "m", "-o", "w16", "--for", "vllm", "--bits", "16", "--json")
    assert json.loads(out)["larger"] == []


def test_notes_name_only_options_of_the_command(run: Run) -> None:
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "Q8_0", "--calibration", "none")
    assert "12 of them" in out or "of them its order of rows" in out
    assert "--keep-names" not in out


def test_an_error_names_the_command_of_an_option(run: Run) -> None:
    config = json.loads(Path("m/config.json").read_text())
    Path("m/config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    _, err = run("quantize", "m", "-o", "x.gguf", "--type", "Q8_0", "--calibration", "none", code=1)
    assert "--drop" in err
    assert "--drop is an option of `ingot convert`" in err
    assert with_commands("raise --max-ram, or use --largest, --no-fisher").endswith(
        "(--largest and --no-fisher are options of `ingot calibrate`)"
    )
    assert with_commands("run `ingot convert a b --keep-names`") == "run `ingot convert a b --keep-names`"


@pytest.mark.parametrize(("limit", "mode"), [("1h", "full"), ("0s", "none")])
def test_the_estimate_is_one_line(run: Run, limit: str, mode: str) -> None:
    _, err = run("quantize", "m", "-o", "x", "--for", "vllm", "--time", limit)
    assert err.count("estimate: ") == 1
    assert f"calibration {mode}" in err
    out, _ = run("quantize", "m", "-o", "y", "--for", "vllm", "--time", limit, "--dry-run", "--json")
    printed = json.loads(out)
    assert printed["calibration"] == mode
    assert printed["estimated_memory"] > 0
    assert printed["recipe"] == ("w4a16-calibrated" if mode == "full" else "w4a16")


def test_the_divergence_is_measured_on_a_text(run: Run) -> None:
    Path("text.txt").write_text(" ".join(f"w{index % 50}" for index in range(9000)))
    out, _ = run("quantize", "m", "-o", "x", "--for", "mlx", "--calibration", "none", "--kl", "text.txt")
    line = next(text for text in out.splitlines() if text.startswith("  KL"))
    assert float(line.split()[1]) > 0
    _, err = run("quantize", "m", "-o", "y", "--for", "mlx", "--kl", "none.txt", code=2)
    assert "none.txt" in err
    assert not Path("y").exists()


def test_dry_run_prints_decisions_and_writes_nothing(run: Run) -> None:
    out, _ = run("quantize", "m", "-o", "x", "--for", "vllm", "--calibration", "none", "--dry-run")
    assert "model.layers.0.mlp.up_proj.weight" in out
    assert "estimate: about " in out
    assert not Path("x").exists()


def test_quantizers_keep_an_order_of_columns_that_they_have() -> None:
    recipe = load_recipe("w4a16-calibrated")
    for quantizer, ordered in (("gptq", True), ("importance", False)):
        changed = with_quantizer(with_act_order(recipe), quantizer)
        choices = [rule.choice for rule in changed.rules if isinstance(rule.choice, Choice) and rule.choice.quantizer]
        assert choices
        assert {choice.quantizer for choice in choices} == {quantizer}
        assert {"act_order" in choice.options for choice in choices} == {ordered}


def with_act_order(recipe: Recipe) -> Recipe:
    """Return a recipe whose rules with a quantizer round columns in the order of their weight."""
    rules = [
        replace(rule, choice=replace(rule.choice, options={**rule.choice.options, "act_order": True}))
        if isinstance(rule.choice, Choice) and rule.choice.quantizer
        else rule
        for rule in recipe.rules
    ]
    return replace(recipe, rules=tuple(rules))


def test_group_size_and_quantizer_replace_those_of_a_recipe() -> None:
    recipe = with_group_size(load_recipe("w4a16-calibrated"), 32)
    assert [rule.cols_multiple_of for rule in recipe.rules] == [32]
    assert recipe.rules[0].choice.options["group"] == 32  # type: ignore[union-attr]
    changed = with_quantizer(load_recipe("q4_k-calibrated"), "importance")
    assert {getattr(rule.choice, "quantizer", None) for rule in changed.rules} == {"importance", None}
    mixture = with_quantizer(load_recipe("Q4_K_M-calibrated"), "importance").mixture
    assert mixture is not None
    assert mixture.quantizer == "importance"
    with pytest.raises(IngotError):
        with_group_size(load_recipe("w8a16"), 32)


def test_a_mixture_is_rounded_by_the_statistics_that_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = []

    convert = quantize_run.convert

    def convert_with(options: ConvertOptions) -> ConvertReport:
        passed.append(options.calibration)
        return convert(options)

    monkeypatch.setattr(quantize_run, "convert", convert_with)
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "Q4_K_M", "--calibration", "importance")
    assert "preset Q4_K_M-calibrated" in out
    assert len(passed) == 1
    assert passed[0] is not None


@pytest.mark.parametrize(("text", "seconds"), [("30m", 1800), ("90", 90), ("1.5h", 5400), ("2 min", 120)])
def test_times(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


def test_estimates_grow_with_the_model(tmp_path: Path) -> None:
    folder = model_folder.write(tmp_path / "m")
    with ingot.open(folder) as checkpoint:
        for name in ("w4a16", "w4a16-calibrated", "q4_k-calibrated", "mlx-4bit"):
            seconds, memory = estimate_rounding(checkpoint, load_recipe(name))
            assert seconds > 0
            assert memory >= 128 * 64 * 4
    assert "about 2 h 0 min (1 h 0 min of it calibration)" in Estimate("full", 3600, 3600, 1 << 20).describe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "statistics", "source"),
    [
        ("importance", "importance of columns", "text that Ingot ships"),
        ("gptq", "second moments of inputs", "samples of the model"),
        ("full", "statistics of inputs and gradients", "samples of the model"),
        ("auto", "statistics of inputs and gradients", "samples of the model"),
    ],
)
def test_the_model_is_calibrated(run: Run, mode: str, statistics: str, source: str) -> None:
    pytest.importorskip("transformers")
    out, err = run("quantize", "m", "-o", "x.gguf", "--type", "q4_0", "--calibration", mode)
    assert "of it calibration" in err
    assert f"by {statistics}, from {source}" in out
    assert f"rounded by the statistics of {source}" in out


@pytest.mark.parametrize(
    ("limit", "grade"), [("2h", "full"), ("30m", "gptq"), ("10m", "importance"), ("1s", "none"), (None, "full")]
)
def test_the_best_grade_that_fits_the_time_is_chosen(
    run: Run, monkeypatch: pytest.MonkeyPatch, limit: str | None, grade: str
) -> None:
    pytest.importorskip("transformers")
    from ingot.runtime.calibration.calibrate import ModelCalibration

    def plan(calibration: ModelCalibration) -> CalibratePlan:
        options = calibration.options
        seconds = 3600.0 if options.fisher else 300.0 if options.largest == 1 else 1200.0
        return CalibratePlan(seconds, 1 << 20, 3 << 20, 1 << 20, 1, calibration.source)

    monkeypatch.setattr(ModelCalibration, "plan", plan)
    words = () if limit is None else ("--time", limit)
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "q4_0", "--dry-run", *words)
    assert f", calibration {grade}" in out
    assert ("3.00 MiB of disk until it is done" in out) == (grade != "none")


@pytest.mark.slow
def test_calibration_that_does_not_fit_the_time_is_left_out(run: Run) -> None:
    pytest.importorskip("transformers")
    out, _ = run("quantize", "m", "-o", "x.gguf", "--type", "q4_0", "--time", "0s")
    assert "no calibration fits the time" in out
    assert "preset q4_0," not in out
