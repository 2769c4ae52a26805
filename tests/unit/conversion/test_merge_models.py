"""``ingot merge --method``: values by formulas written here, operands of all forms, containers and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.merging import methods
from ingot.conversion.merging.methods import Merger, TensorMerge, random_bits
from ingot.core.numeric.dtypes import cast
from ingot.core.runtime.memory import anonymous_in_use
from ingot.errors import IngotError
from tests.support.adapters import DOWN, EMBED, SHAPES, Array, Q, base_folder, lora, peft_folder, values

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}


def model(path: Path, seed: int, dtype: str = "f32", config: dict[str, Any] | None = None, **changes: Array) -> Path:
    """Write a fine-tune of the base: each value moves a little. ``changes`` replaces tensors by the last word."""
    base_folder(path, config=config or CONFIG)
    ingot.save(path / "model.safetensors", {**tensors(seed, dtype), **changes})
    return path


def tensors(seed: int, dtype: str = "f32") -> dict[str, Array]:
    moved = {name: values(*shape) + values(*shape, seed=seed) / 8 for name, shape in SHAPES.items()}
    return {name: cast(item.astype(np.float32), dtype) for name, item in moved.items()}


def wide(seed: int, name: str, dtype: str = "f32") -> Array:
    return cast(tensors(seed, dtype)[name], "f32")


def merged(tmp_path: Path, *operands: Any, name: str = "out", **options: Any) -> dict[str, Array]:
    base, *models = operands
    ingot.merge(base, models, tmp_path / name, **options)
    with ingot.open(tmp_path / name) as result:
        return {key: np.asarray(item.numpy()) for key, item in result.items()}


@pytest.fixture
def int8(tmp_path: Path) -> Path:
    """Return a recipe that quantizes the small matrices too."""
    path = tmp_path / "int8.toml"
    path.write_text('[[rules]]\nmin_ndim = 2\ncodec = "affine"\noptions = { bits = 8, group = 8 }\n')
    return path


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [base_folder(tmp_path / "base", config=CONFIG), *(model(tmp_path / f"m{seed}", seed) for seed in (1, 2, 3))]


def keep_largest(delta: Array, density: float) -> Array:
    """Return the ``int(density * n)`` largest magnitudes; of equal ones those that come first."""
    count = max(1, int(density * delta.size))
    order = np.argsort(-np.abs(delta).reshape(-1), kind="stable")[:count]
    result = np.zeros(delta.size, np.float32)
    result[order] = delta.reshape(-1)[order]
    return result.reshape(delta.shape)


def ties(base: Array, models: list[Array], weights: list[float], density: float) -> Array:
    deltas = np.stack(
        [keep_largest(item - base, density) * np.float32(w) for item, w in zip(models, weights, strict=True)]
    )
    sign = np.where(deltas.sum(axis=0) >= 0, 1, -1)
    agrees = np.sign(deltas) == sign
    total = np.where(agrees, deltas, 0).sum(axis=0)
    shares = (agrees * np.array(weights, np.float32).reshape(-1, *[1] * base.ndim)).sum(axis=0)
    return base + total / np.where(shares == 0, 1, shares)


def test_linear_is_the_mean_by_weight(folders: list[Path], tmp_path: Path) -> None:
    result = merged(tmp_path, f"{folders[0]}:2", folders[1], f"{folders[2]}:0.5", method="linear")
    for name, shape in SHAPES.items():
        expected = (2 * values(*shape) + wide(1, name) + 0.5 * wide(2, name)) / 3.5
        np.testing.assert_allclose(result[name], expected, rtol=0, atol=1e-6)
    same = merged(tmp_path, folders[1], folders[1], method="linear", name="same")
    assert all(np.array_equal(same[name], wide(1, name)) for name in SHAPES)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_slerp_keeps_the_angle(folders: list[Path], tmp_path: Path, share: float) -> None:
    far = model(tmp_path / "far", 9, **{f"{DOWN}.weight": values(16, 40, seed=77)})
    result = merged(tmp_path, f"{folders[0]}:{1 - share}", f"{far}:{share}", method="slerp")[f"{DOWN}.weight"]
    first, second = values(16, 40).astype(np.float64), values(16, 40, seed=77).astype(np.float64)
    angle = np.arccos((first * second).sum() / np.linalg.norm(first) / np.linalg.norm(second))
    expected = (np.sin((1 - share) * angle) * first + np.sin(share * angle) * second) / np.sin(angle)
    np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.0])
def test_slerp_of_parallel_and_opposite_tensors_is_linear(tmp_path: Path, factor: float) -> None:
    base = base_folder(tmp_path / "base", config=CONFIG)
    name = f"{Q}.weight"
    second = model(tmp_path / "b", 1, **{name: values(16, 16) * np.float32(factor)})
    result = merged(tmp_path, f"{base}:3", second, method="slerp")[name]
    np.testing.assert_allclose(result, values(16, 16) * (0.75 + 0.25 * factor), atol=1e-6)


def test_task_arithmetic_adds_the_differences(folders: list[Path], tmp_path: Path) -> None:
    result = merged(tmp_path, folders[0], f"{folders[1]}:0.5", f"{folders[2]}:-1", method="task-arithmetic", scale=2.0)
    name = f"{Q}.weight"
    base = values(16, 16)
    expected = base + 2 * (0.5 * (wide(1, name) - base) - (wide(2, name) - base))
    np.testing.assert_allclose(result[name], expected, atol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_ties(tmp_path: Path, dtype: str, density: float) -> None:
    # In bf16 many differences have the magnitude of the threshold.
    base = base_folder(tmp_path / "base", dtype, CONFIG)
    models = [model(tmp_path / f"t{seed}", seed, dtype) for seed in (1, 2, 3)]
    options = {"method": "ties", "density": density, "recipe": "keep"}
    result = merged(tmp_path, base, models[0], f"{models[1]}:2", models[2], **options)
    for name, shape in SHAPES.items():
        start = cast(cast(values(*shape), dtype), "f32")
        expected = ties(start, [wide(seed, name, dtype) for seed in (1, 2, 3)], [1, 2, 1], density)
        assert np.array_equal(cast(result[name], "f32"), cast(cast(expected.astype(np.float32), dtype), "f32"))


def test_ties_of_several_blocks_keeps_the_exact_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "BLOCK", 64)
    rng = np.random.default_rng(0)
    base = np.zeros(1000, np.float32)
    changed = rng.integers(-3, 4, 1000).astype(np.float32)  # many equal magnitudes
    merger = Merger(
        "t", 1000, TensorMerge("ties", (1.0,), (0.3,)), lambda start, stop: [base[start:stop], changed[start:stop]]
    )
    result = np.concatenate([merger.block(index) for index in range(16)])
    assert np.array_equal(result, keep_largest(changed, 0.3))
    assert np.count_nonzero(result) == 300
    assert np.array_equal(merger.block(7), result[7 * 64 : 8 * 64])  # blocks in any order


def test_dare_drops_by_the_seed_and_scales_up(folders: list[Path], tmp_path: Path) -> None:
    options = {"method": "dare-linear", "density": 0.5}
    first = merged(tmp_path, *folders[:3], name="a", seed=1, **options)
    limit = anonymous_in_use() + (256 << 20)
    again = merged(tmp_path, *folders[:3], name="b", seed=1, threads=1, max_ram=limit, **options)
    second = merged(tmp_path, *folders[:3], name="c", seed=2, **options)
    name = f"{DOWN}.weight"
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert np.array_equal(first[name], again[name])
    assert not np.array_equal(first[name], second[name])
    base = values(16, 40)
    deltas = [2 * (wide(seed, name) - base) for seed in (1, 2)]
    choices = np.stack([base, base + deltas[0], base + deltas[1], base + deltas[0] + deltas[1]])
    assert (np.abs(choices - first[name]).min(axis=0) < 1e-6).all()
    shares = [(np.abs(choices[index] - first[name]) < 1e-6).mean() for index in range(4)]
    assert all(0.15 < share < 0.35 for share in shares)


def test_dare_ties_elects_a_sign_without_the_mean(folders: list[Path], tmp_path: Path) -> None:
    name = f"{Q}.weight"
    result = merged(tmp_path, *folders[:3], method="dare-ties")[name]  # density 1 drops nothing
    base = values(16, 16)
    deltas = np.stack([wide(seed, name) - base for seed in (1, 2)])
    agrees = np.sign(deltas) == np.where(deltas.sum(axis=0) >= 0, 1, -1)
    assert np.array_equal(result, base + np.where(agrees, deltas, 0).sum(axis=0))
    assert np.array_equal(merged(tmp_path, *folders[:3], method="dare", name="d")[name], base + deltas.sum(axis=0))


def test_the_random_bits_do_not_change() -> None:
    assert random_bits(0, 0, "a", 0, 3).tolist() == [2680442343, 2719366942, 650322664]
    full = random_bits(5, 1, "x", 0, methods.BLOCK * 2)
    assert np.array_equal(full[methods.BLOCK :], random_bits(5, 1, "x", 1, methods.BLOCK))
    assert abs(full.mean() / 2**32 - 0.5) < 0.002


def test_weights_by_layer_and_role(folders: list[Path], tmp_path: Path) -> None:
    rules = tmp_path / "weights.toml"
    rules.write_text(
        '[[rules]]\nmodel = "m1"\nroles = "mlp"\nweight = 0.0\n'
        '[[rules]]\nlayers = "0"\nroles = ["attention", "bias"]\nweight = 0.25\n'
    )
    result = merged(tmp_path, folders[0], folders[1], method="task-arithmetic", weights=rules)
    base = values(16, 16)
    assert np.array_equal(result[f"{DOWN}.weight"], values(16, 40))
    np.testing.assert_allclose(result[f"{Q}.weight"], base + 0.25 * (wide(1, f"{Q}.weight") - base), atol=1e-6)
    np.testing.assert_allclose(result[f"{EMBED}.weight"], wide(1, f"{EMBED}.weight"), atol=1e-6)


def test_deltas_and_adapters_are_operands(folders: list[Path], tmp_path: Path) -> None:
    delta = tmp_path / "m1.zt"
    ingot.diff(folders[0], folders[1], delta)
    plain = merged(tmp_path, *folders[:3], method="ties", density=0.5, name="plain")
    result = merged(tmp_path, folders[0], delta, folders[2], method="ties", density=0.5, name="delta")
    assert all(np.array_equal(plain[name], result[name]) for name in SHAPES)
    adapter = peft_folder(tmp_path / "adapter", lora())
    tuned = merged(tmp_path, folders[0], f"{adapter}:0.5", method="task-arithmetic", name="tuned")
    direct = merged(tmp_path, folders[0], f"{adapter}:0.5", name="direct")
    np.testing.assert_allclose(tuned[f"{Q}.weight"], direct[f"{Q}.weight"], atol=1e-6)


def test_a_quantized_operand_is_decoded_and_reported(folders: list[Path], tmp_path: Path, int8: Path) -> None:
    ingot.convert(folders[1], tmp_path / "q.zt", int8)
    report = ingot.merge(folders[0], tmp_path / "q.zt", tmp_path / "out", method="linear")
    with ingot.open(tmp_path / "q.zt") as opened:
        expected = (values(16, 16) + opened[f"{Q}.weight"].numpy()) / 2
    with ingot.open(tmp_path / "out") as opened:
        np.testing.assert_allclose(opened[f"{Q}.weight"].numpy(), expected, atol=1e-6)
    assert "decoded from affine" in report.models[1].describe()


def test_into_other_containers_and_recipes(folders: list[Path], tmp_path: Path, int8: Path) -> None:
    ingot.merge(folders[0], folders[1:3], tmp_path / "dense.zt", method="ties", density=0.5)
    ingot.merge(folders[0], folders[1:3], tmp_path / "int8.zt", method="ties", density=0.5, recipe=int8)
    ingot.convert(tmp_path / "dense.zt", tmp_path / "twice.zt", int8)
    with ingot.open(tmp_path / "int8.zt") as first, ingot.open(tmp_path / "twice.zt") as second:
        assert all(np.array_equal(first[name].numpy(), second[name].numpy()) for name in SHAPES)
        assert first[f"{DOWN}.weight"].codec == "affine"


def test_the_base_may_be_quantized(folders: list[Path], tmp_path: Path, int8: Path) -> None:
    ingot.convert(folders[0], tmp_path / "base.zt", int8)
    ingot.merge(tmp_path / "base.zt", folders[1], tmp_path / "out.zt", method="linear")
    with ingot.open(tmp_path / "base.zt") as base, ingot.open(tmp_path / "out.zt") as result:
        name = f"{DOWN}.weight"
        assert result[name].codec == base[name].codec == "affine"
        exact = (base[name].numpy() + wide(1, name)) / 2
        assert 0 < np.abs(result[name].numpy() - exact).max() < 0.05


def test_a_tied_head_is_the_embeddings(folders: list[Path], tmp_path: Path) -> None:
    head = values(24, 16, seed=5)
    base = model(tmp_path / "with_head", 4, **{"lm_head.weight": head})
    result = merged(tmp_path, base, folders[1], method="linear")
    np.testing.assert_allclose(result["lm_head.weight"], (head + wide(1, f"{EMBED}.weight")) / 2, atol=1e-6)
    copy = wide(2, f"{EMBED}.weight")
    repeated = model(tmp_path / "repeated", 2, **{"lm_head.weight": copy})
    assert "lm_head.weight" not in merged(tmp_path, folders[0], repeated, method="linear", name="tied")


def test_integers_must_be_equal(tmp_path: Path) -> None:
    ids = np.arange(4)
    first = model(tmp_path / "a", 1, ids=ids)
    second = model(tmp_path / "b", 2, ids=ids)
    assert np.array_equal(merged(tmp_path, first, second, method="linear")["ids"], ids)
    third = model(tmp_path / "c", 2, ids=ids + 1)
    assert refusal(tmp_path, [first, third], method="linear")[0] == "merge.tensors"


def test_a_resumed_merge_has_the_same_bytes(folders: list[Path], tmp_path: Path) -> None:
    options = {"method": "dare-ties", "density": 0.5, "seed": 3}
    merged(tmp_path, *folders[:3], name="once", **options)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingot.merge(folders[0], folders[1:3], tmp_path / "twice", progress=stop, **options)
    merged(tmp_path, *folders[:3], name="twice", resume=True, **options)
    files = [tmp_path / name / "model.safetensors" for name in ("once", "twice")]
    assert files[0].read_bytes() == files[1].read_bytes()


def refusal(tmp_path: Path, operands: list[Any], **options: Any) -> tuple[str | None, int]:
    """Return rule and exit code of the error of a merge that must leave nothing behind."""
    with pytest.raises(IngotError) as error:
        ingot.merge(operands[0], operands[1:], tmp_path / "refused", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "refused").exists()
    assert not list(tmp_path.glob(".refused*"))
    return error.value.rule, error.value.exit_code


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (lambda items: items.pop(f"{Q}.bias"), "merge.tensors"),
        (lambda items: items.update(extra=values(3)), "merge.tensors"),
        (lambda items: items.update({f"{EMBED}.weight": values(25, 16)}), "merge.tensors"),
        (lambda items: items.update({"lm_head.weight": values(24, 16, seed=8)}), "merge.tensors"),
        (lambda items: items.update({f"{Q}.bias": np.full(16, np.nan, np.float32)}), "merge.values"),
        (lambda items: items.update({f"{Q}.bias": np.full(16, np.inf, np.float32)}), "merge.values"),
        (lambda items: items.update({f"{Q}.bias": np.arange(16)}), "merge.tensors"),
    ],
)
@pytest.mark.parametrize("method", ["linear", "dare-linear", "ties"])
def test_models_that_do_not_fit(
    folders: list[Path], tmp_path: Path, changes: Callable[[dict[str, Array]], Any], rule: str, method: str
) -> None:
    items = tensors(1)
    changes(items)
    ingot.save(folders[1] / "model.safetensors", items)
    options: dict[str, Any] = {} if method == "linear" else {"density": 0.01}
    assert refusal(tmp_path, folders[:2], method=method, **options) == (rule, 1)


def test_overflow_of_the_sum_is_refused(folders: list[Path], tmp_path: Path) -> None:
    assert refusal(tmp_path, [folders[0], f"{folders[1]}:3e38"], method="task-arithmetic", scale=1e6) == (
        "merge.values",
        1,
    )


@pytest.mark.parametrize(
    "config", [{"model_type": "qwen2"}, {"num_attention_heads": 4}, {"rope_theta": 5}, {"model_type": 3}]
)
def test_models_of_other_architectures(tmp_path: Path, config: dict[str, Any]) -> None:
    base = base_folder(tmp_path / "base", config={**CONFIG, "rope_theta": 10000.0})
    other = model(tmp_path / "other", 1, config={**CONFIG, "rope_theta": 10000.0, **config})
    assert refusal(tmp_path, [base, other], method="linear") == ("merge.model", 1)


def test_other_settings_are_noted(folders: list[Path], tmp_path: Path) -> None:
    (folders[1] / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    report = ingot.merge(folders[0], folders[1], tmp_path / "out", method="linear")
    assert "rms_norm_eps" in report.notes[0]


def test_other_vocabularies_of_equal_size(folders: list[Path], tmp_path: Path) -> None:
    for folder, vocabulary in zip(folders, ({"a": 0, "b": 1}, {"b": 0, "a": 1}), strict=False):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))
    assert refusal(tmp_path, folders[:2], method="linear") == ("merge.model", 1)
    added = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "c"}]}
    (folders[1] / "tokenizer.json").write_text(json.dumps(added))
    merged(tmp_path, *folders[:2], method="linear")  # a token more, and the same for the others


def test_a_delta_of_another_base(folders: list[Path], tmp_path: Path) -> None:
    ingot.diff(folders[2], folders[1], tmp_path / "d.zt")
    assert refusal(tmp_path, [folders[0], tmp_path / "d.zt"], method="ties") == ("delta.base", 1)


@pytest.mark.parametrize(
    ("models", "options"),
    [
        (3, {"method": "slerp"}),
        (2, {"method": "mean"}),
        (2, {"method": "linear", "density": 0.5}),
        (2, {"method": "linear", "scale": 0.5}),
        (2, {"method": "ties", "density": 0.0}),
        (2, {"method": "ties", "density": 1.5}),
        (2, {"method": "ties", "density": float("nan")}),
        (2, {"method": "ties", "seed": 1}),
        (2, {"method": "dare", "seed": -1}),
        (2, {"method": "ties", "scale": float("inf")}),
        (2, {"density": 0.5}),
        (1, {"method": "linear"}),
    ],
)
def test_options_that_contradict_the_method(
    folders: list[Path], tmp_path: Path, models: int, options: dict[str, Any]
) -> None:
    assert refusal(tmp_path, folders[:models], **options) == ("merge.option", 2)


def test_weights_that_a_method_cannot_use(folders: list[Path], tmp_path: Path) -> None:
    base, first, *_ = folders
    assert refusal(tmp_path, [f"{base}:0.5", first], method="ties")[0] == "merge.option"
    assert refusal(tmp_path, [base, f"{first}:-1"], method="linear")[0] == "merge.weights"
    assert refusal(tmp_path, [base, f"{first}:-1"], method="slerp")[0] == "merge.weights"
    assert refusal(tmp_path, [base, (first, float("nan"))], method="linear")[0] == "adapter.weight"


@pytest.mark.parametrize(
    "text",
    [
        '[[rules]]\nmodel = "m7"\nweight = 1',
        '[[rules]]\nmodel = "base"\nweight = 1',
        '[[rules]]\nlayers = "7"\nweight = 1',
        '[[rules]]\nweight = 1\n[[rules]]\nmodel = "m1"\nweight = 2',
        "[[rules]]\nweight = nan",
        '[[rules]]\nweight = "1"',
        "[[rules]]\nwidth = 1",
        '[[rules]]\nmodel = "m1"',
        "rules = []",
        "weight = 1",
        "[[rules",
        "",
    ],
)
def test_files_of_weights_that_do_not_fit(folders: list[Path], tmp_path: Path, text: str) -> None:
    (tmp_path / "weights.toml").write_text(text)
    rule, code = refusal(tmp_path, folders[:2], method="task-arithmetic", weights=tmp_path / "weights.toml")
    assert (rule, code) == ("merge.weights", 2)


def test_the_command(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(folder) for folder in folders]
    out = str(tmp_path / "out")
    assert run(["merge", names[0], names[1], f"{names[2]}:0.5", "-o", out, "--method", "ties", "--density", "0.3"]) == 0
    text = capsys.readouterr().out
    assert "ties of 4 tensors in f32, density 0.3" in text
    assert "m2: weight 0.5" in text
    assert run(["merge", *names, "-o", str(tmp_path / "other"), "--method", "slerp"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "between two models" in error


def test_a_sum_beyond_the_type_of_the_base_is_refused(tmp_path: Path) -> None:
    name = f"{Q}.weight"
    base = model(tmp_path / "small", 1, **{name: np.full((16, 16), 100, np.float16)})
    other = model(tmp_path / "large", 1, **{name: np.full((16, 16), 60000, np.float16)})
    assert refusal(tmp_path, [base, f"{other}:2"], method="task-arithmetic") == ("dense.overflow", 1)
