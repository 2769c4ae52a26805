"""``ingot adapter extract``: the least error of every rank, limits by error and size, the residual, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.core.numeric.dtypes import cast
from ingot.delta import extract_adapter as module
from ingot.errors import IngotError
from tests.support import model_folder
from tests.support.adapters import DOWN, EMBED, Q, lora, peft_folder, values

WEIGHT = f"{Q}.weight"
NORM = "model.norm.weight"


def write_tuned(base: Path, path: Path, changes: dict[str, Any], dtype: str = "f32") -> Path:
    """Write a copy of a model folder with additions to some of its tensors."""
    path.mkdir()
    with ingot.open(base) as opened:
        tensors = {
            name: cast((tensor.numpy("f32") + changes.get(name, np.float32(0))).astype(np.float32), dtype)
            for name, tensor in opened.items()
        }
    ingot.save(path / "model.safetensors", tensors)
    (path / "config.json").write_text((base / "config.json").read_text())
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return model_folder.write(tmp_path / "base")


@pytest.fixture
def tuned(base: Path, tmp_path: Path) -> Path:
    changes = {WEIGHT: 0.1 * values(64, 64), f"{DOWN}.weight": 0.1 * values(64, 128)}
    return write_tuned(base, tmp_path / "tuned", changes)


def factors(adapter: Path, module: str) -> tuple[Any, Any]:
    with ingot.open(adapter) as opened:
        names = (f"base_model.model.{module}.lora_{part}.weight" for part in "AB")
        a, b = (opened[name].numpy("f32") for name in names)
    return a, b


def change(base: Path, tuned: Path, name: str) -> Any:
    with ingot.open(base) as first, ingot.open(tuned) as second:
        return second[name].numpy("f32").astype(np.float64) - first[name].numpy("f32")


def left(difference: Any, rank: int) -> float:
    """Return the share of a matrix that the best approximation of a rank leaves (Eckart and Young)."""
    singular = np.linalg.svd(difference, compute_uv=False)
    return float(np.linalg.norm(singular[rank:]) / np.linalg.norm(singular))


def test_the_error_is_that_of_the_best_approximation(base: Path, tuned: Path, tmp_path: Path) -> None:
    report = ingot.extract_adapter(base, tuned, tmp_path / "a", rank=8)
    assert {item.name for item in report.tensors} == {f"{DOWN}.weight", WEIGHT}
    for item in report.tensors:
        difference = change(base, tuned, item.name)
        a, b = factors(tmp_path / "a", item.name.removesuffix(".weight"))
        error = np.linalg.norm(difference - b.astype(np.float64) @ a) / np.linalg.norm(difference)
        assert error == pytest.approx(left(difference, 8), rel=1e-4)
        assert item.error == pytest.approx(error, rel=1e-4)
        assert item.rank == 8
    assert report.omitted == []
    assert report.warnings == []


def test_large_matrices_come_near_the_best_approximation() -> None:
    from ingot.adapters.low_rank_fit import Change

    difference = (values(300, 40) * 0.8 ** np.arange(40, dtype=np.float32)) @ values(40, 200) + values(300, 200)
    fitted = Change("m", difference, None).with_rank(12, "f32")
    assert left(difference, 12) <= fitted.error <= 1.005 * left(difference, 12)


def test_an_adapter_is_extracted_from_its_own_merge(base: Path, tmp_path: Path) -> None:
    adapter = peft_folder(tmp_path / "adapter", lora(Q, rows=64, cols=64))
    ingot.merge(base, adapter, tmp_path / "merged")
    report = ingot.extract_adapter(base, tmp_path / "merged", tmp_path / "a", rank=4)
    assert report.error < 1e-6
    assert [item.name for item in report.tensors] == [WEIGHT]
    report = ingot.extract_adapter(base, tmp_path / "merged", tmp_path / "b", max_error=1e-3)
    assert [item.rank for item in report.tensors] == [4]


@pytest.mark.parametrize("max_error", [0.9, 0.5])
def test_max_error_takes_the_smallest_ranks(base: Path, tuned: Path, tmp_path: Path, max_error: float) -> None:
    report = ingot.extract_adapter(base, tuned, tmp_path / "a", max_error=max_error)
    for item in report.tensors:
        difference = change(base, tuned, item.name)
        assert left(difference, item.rank) <= max_error < left(difference, item.rank - 1)
        assert item.error <= max_error


def test_max_error_refuses_factors_larger_than_the_matrix(base: Path, tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, tuned, tmp_path / "a", max_error=0.01)
    assert error.value.rule == "adapter.error"
    assert not (tmp_path / "a").exists()


def test_size_bounds_the_file_and_spends_ranks_on_large_changes(base: Path, tmp_path: Path) -> None:
    changes = {WEIGHT: values(64, 64), f"{DOWN}.weight": 0.01 * values(64, 128)}
    tuned = write_tuned(base, tmp_path / "tuned", changes)
    report = ingot.extract_adapter(base, tuned, tmp_path / "a", size="20KiB")
    assert (tmp_path / "a" / "adapter_model.safetensors").stat().st_size <= 20 << 10
    ranks = {item.name: item.rank for item in report.tensors}
    assert ranks[WEIGHT] >= 8
    assert ranks.get(f"{DOWN}.weight", 0) < ranks[WEIGHT]
    with pytest.raises(IngotError, match="size= with room"):
        ingot.extract_adapter(base, tuned, tmp_path / "b", size=100)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_factors_have_the_requested_type(base: Path, tuned: Path, tmp_path: Path, dtype: Any) -> None:
    report = ingot.extract_adapter(base, tuned, tmp_path / "a", rank=4, dtype=dtype)
    with ingot.open(tmp_path / "a") as opened:
        assert {tensor.dtype for tensor in opened.values()} == {dtype}
    difference = change(base, tuned, WEIGHT)
    a, b = factors(tmp_path / "a", Q)
    expected = np.linalg.norm(difference - b.astype(np.float64) @ a) / np.linalg.norm(difference)
    assert next(item.error for item in report.tensors if item.name == WEIGHT) == pytest.approx(expected, rel=1e-4)


def test_statistics_minimize_the_error_of_outputs(base: Path, tuned: Path, tmp_path: Path) -> None:
    inputs = (values(1000, 64, seed=3) @ np.diag(1.5 ** -np.arange(64, dtype=np.float32))).astype(np.float32)
    moment = (inputs.T @ inputs / len(inputs)).astype(np.float32)
    arrays = {
        f"{WEIGHT}:inputs": moment,
        f"{WEIGHT}:in_sum2": np.ascontiguousarray(np.diag(moment)),
        f"{WEIGHT}:count": np.array([1000], np.int64),
    }
    ingot.save(tmp_path / "statistics.safetensors", arrays, metadata={"ingot.statistics": "1"})
    weighted = ingot.extract_adapter(
        base, tuned, tmp_path / "w", rank=2, calibration=tmp_path / "statistics.safetensors"
    )
    ingot.extract_adapter(base, tuned, tmp_path / "p", rank=2)
    assert weighted.weighted == 1
    difference = change(base, tuned, WEIGHT)

    def output_error(adapter: Path) -> float:
        a, b = factors(adapter, Q)
        return float(np.linalg.norm(inputs @ (difference - b @ a).T) / np.linalg.norm(inputs @ difference.T))

    item = next(item for item in weighted.tensors if item.name == WEIGHT)
    assert output_error(tmp_path / "w") < 0.6 * output_error(tmp_path / "p")
    assert item.error == pytest.approx(output_error(tmp_path / "w"), rel=0.05)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_base_adapter_and_residual_are_the_fine_tune(base: Path, tmp_path: Path, dtype: str) -> None:
    dense = write_tuned(base, tmp_path / "dense", {}, dtype)
    changes = {WEIGHT: 0.1 * values(64, 64), NORM: 0.1 * values(64), f"{EMBED}.weight": 0.1 * values(264, 64)}
    tuned = write_tuned(dense, tmp_path / "tuned", changes, dtype)
    report = ingot.extract_adapter(dense, tuned, tmp_path / "a", rank=8, residual="exact")
    assert report.residual is not None
    assert [item.name for item in report.omitted] == [NORM]
    assert report.warnings == []
    ingot.merge(dense, tmp_path / "a", tmp_path / "merged")
    ingot.patch(tmp_path / "merged", report.residual, tmp_path / "restored")
    with ingot.open(tmp_path / "restored") as restored, ingot.open(tuned) as expected:
        assert set(restored) == set(expected)
        for name, tensor in expected.items():
            assert restored[name].dtype == tensor.dtype
            assert restored[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_omitted_tensors_are_listed(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {WEIGHT: 0.1 * values(64, 64), NORM: 0.1 * values(64)}
    tuned = write_tuned(base, tmp_path / "tuned", changes)
    arguments = ["adapter", "extract", str(base), str(tuned), "-o", str(tmp_path / "a"), "--rank", "4"]
    assert run([*arguments, "--json"]) == 0
    output = capsys.readouterr()
    assert f"1 changed tensors of the fine-tune are not in the adapter: {NORM}" in output.err
    data = json.loads(output.out)
    assert [item["name"] for item in data["omitted"]] == [NORM]
    assert [(item["name"], item["rank"]) for item in data["tensors"]] == [(WEIGHT, 4)]
    assert run([*arguments, "--overwrite"]) == 0
    assert f"not in the adapter: {NORM}" in capsys.readouterr().out.replace("\n", " ")


def test_an_embedding_is_left_out_if_it_is_also_the_head(tmp_path: Path) -> None:
    config = {**model_folder.CONFIG, "tie_word_embeddings": True}
    weights = {name: item for name, item in model_folder.tensors().items() if name != "lm_head.weight"}
    base = model_folder.write(tmp_path / "base", config, weights)
    changes = {WEIGHT: 0.1 * values(64, 64), f"{EMBED}.weight": 0.1 * values(264, 64)}
    tuned = write_tuned(base, tmp_path / "tuned", changes)
    report = ingot.extract_adapter(base, tuned, tmp_path / "a", rank=4)
    assert [item.name for item in report.omitted] == [f"{EMBED}.weight"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_computes_the_extracted_change(base: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    changes = {
        WEIGHT: values(64, 1) @ values(1, 64),
        f"{DOWN}.weight": values(64, 3) @ values(3, 128),
        f"{EMBED}.weight": values(264, 2) @ values(2, 64),
        "lm_head.weight": values(264, 2, seed=3) @ values(2, 64, seed=3),
    }
    tuned = write_tuned(base, tmp_path / "tuned", changes)
    ingot.extract_adapter(base, tuned, tmp_path / "a", max_error=1e-3)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, tmp_path / "a").merge_and_unload()
    state = merged.state_dict()
    with ingot.open(tuned) as expected:
        for name in changes:
            assert np.allclose(state[name].numpy(), expected[name].numpy("f32"), atol=1e-4), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "4", "--size", "1MB"], "expected one of"),
        (["--max-error", "0"], "between 0 and 1"),
        (["--max-error", "nan"], "between 0 and 1"),
        (["--size", "many"], "expected a size"),
        (["--rank", "0"], "rank"),
    ],
)
def test_refused_options(
    base: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(["adapter", "extract", str(base), str(tuned), "-o", str(tmp_path / "a"), *options]) in (1, 2)
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "a").exists()


def test_models_without_a_change_and_other_models_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, write_tuned(base, tmp_path / "same", {}), tmp_path / "a")
    assert error.value.rule == "adapter.base"
    config = {**model_folder.CONFIG, "hidden_size": 32, "head_dim": 8}
    other = model_folder.write(tmp_path / "other", config=config)
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, other, tmp_path / "a")
    assert error.value.rule == "adapter.base"
    adapter = peft_folder(tmp_path / "adapter", lora(Q, rows=64, cols=64))
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, adapter, tmp_path / "a")
    assert error.value.rule == "model.adapter"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(base: Path, tmp_path: Path, value: float) -> None:
    changes = {WEIGHT: np.full((64, 64), value, np.float32)}
    tuned = write_tuned(base, tmp_path / "tuned", changes)
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, tuned, tmp_path / "a", residual="exact")
    assert error.value.rule == "adapter.values"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["base", "tuned"]


def test_a_residual_to_a_quantized_base_is_refused(base: Path, tuned: Path, tmp_path: Path) -> None:
    ingot.convert(base, tmp_path / "q", "mlx-4bit", format="mlx")
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(tmp_path / "q", tuned, tmp_path / "a", residual="exact")
    assert error.value.rule == "adapter.residual"
    assert ingot.extract_adapter(tmp_path / "q", tuned, tmp_path / "a", rank=8).error < 1


def test_an_existing_destination_stays(base: Path, tuned: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"mine")
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, tuned, tmp_path / "a", residual="exact")
    assert error.value.rule == "target.exists"
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == b"mine"
    assert not (tmp_path / "a.residual.zt").exists()


def test_an_existing_residual_stays_and_is_refused_before_the_work(
    base: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.residual.zt").write_bytes(b"mine")
    monkeypatch.setattr(module._Pair, "extract", lambda *_: pytest.fail("the factors were computed"))
    with pytest.raises(IngotError) as error:
        ingot.extract_adapter(base, tuned, tmp_path / "a", residual="exact")
    assert error.value.rule == "target.exists"
    assert (tmp_path / "a.residual.zt").read_bytes() == b"mine"
    assert not (tmp_path / "a").exists()
