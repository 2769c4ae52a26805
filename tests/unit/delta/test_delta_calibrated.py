"""Deltas whose numbers are chosen by what matrices multiply: less error in as few bytes, and whose statistics."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.delta.auto import OVERHEAD, measure
from ingot.delta.calibrated_auto import calibrated_equivalent, measure_calibrated
from ingot.delta.diff import diff
from ingot.delta.pairs import TensorPair
from ingot.delta.patch import patch
from ingot.delta.plan import DiffPlanner
from ingot.delta.strategy import EXACT, SIGNS, RoundingEstimate, Storage, estimate_rounding_time
from ingot.engine.data import step_data
from ingot.errors import FormatError, IngotError, UsageError
from ingot.model.statistics import Statistics
from ingot.quantization.factors import Factors, factors_of
from ingot.quantization.rounding import error_under

UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
TABLE = "model.embed_tokens.weight"
SHAPES = {UP: (128, 192), DOWN: (192, 128), TABLE: (150, 128)}


def moments(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    found = {}
    for field, size in (("outputs", shape[0]), ("inputs", shape[1])):
        values = random.normal(size=(400, size)) @ (random.normal(size=(size, size)) * np.linspace(0.05, 1, size))
        found[field] = (values.T @ values / 400).astype(np.float32)
    return found | {"in_sum2": np.ascontiguousarray(found["inputs"].diagonal()), "count": np.array([400])}


def stated(path: Path, model: Path, *names: str, **more: np.ndarray) -> Path:
    """Write statistics of some of a model's matrices; ``more`` replaces entries of the first."""
    arrays = {f"{name}:{key}": array for name in names for key, array in moments(SHAPES[name], len(name)).items()}
    with ingot.open(model) as checkpoint:
        of = content_id(checkpoint)
    arrays |= {f"{names[0]}:{key}": array for key, array in more.items()}
    ingot.save(path, arrays, metadata={"ingot.statistics": "1", "model": of})
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder, random = tmp_path_factory.mktemp("models"), np.random.default_rng(0)
    old = {name: random.normal(0, 0.05, shape).astype(numpy_dtype("bf16")) for name, shape in SHAPES.items()}
    new = {
        name: (array.astype(np.float32) + random.normal(0, 0.01, array.shape)).astype(array.dtype)
        for name, array in old.items()
    }
    ingot.save(folder / "base.safetensors", old)
    ingot.save(folder / "tuned.safetensors", new)
    return folder / "base.safetensors", folder / "tuned.safetensors"


@pytest.fixture(scope="module")
def statistics(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stated(tmp_path_factory.mktemp("statistics") / "s.safetensors", models[1], UP, DOWN)


def factors(name: str) -> Factors:
    found = Statistics.in_memory({f"w:{key}": array for key, array in moments(SHAPES[name], len(name)).items()})
    matrix = found.for_matrix("w")
    assert matrix is not None
    return factors_of(matrix)


def errors(models: tuple[Path, Path], patched: Path) -> dict[str, float]:
    """Return the error of each matrix under its factors, over that of the base."""
    found = {}
    with ingot.open(models[0]) as base, ingot.open(models[1]) as tuned, ingot.open(patched) as result:
        for name in (UP, DOWN):
            old, new, made = (each[name].numpy("f32") for each in (base, tuned, result))
            found[name] = error_under(new - old, made - old, factors(name))
    return found


@pytest.mark.parametrize("strategy", ["int1", "int2", "int4", "low-rank"])
def test_less_error_in_no_more_bytes(
    strategy: str, models: tuple[Path, Path], statistics: Path, tmp_path: Path
) -> None:
    found = {}
    for calibration in (None, statistics):
        delta, result = tmp_path / f"{calibration is None}.zt", tmp_path / "result.safetensors"
        report = diff(*models, delta, strategy, calibration=calibration)
        patched = patch(models[0], [delta], result, overwrite=True, verify=True)
        assert patched.verified
        found[calibration is None] = errors(models, result), {item.name: item.nbytes for item in report.tensors}
        by_quantizer = {UP, DOWN} if calibration and strategy != "low-rank" else set()
        assert {item.matrix for item in report.rounded} == by_quantizer
    for name in (UP, DOWN):
        assert found[False][0][name] < 0.8 * found[True][0][name]
        assert found[False][1][name] <= found[True][1][name] + 64  # zstd's framing
    assert found[False][1][TABLE] == found[True][1][TABLE]
    assert TABLE in " ".join(report.notes)


def test_options_of_the_strategy_are_taken(models: tuple[Path, Path], statistics: Path, tmp_path: Path) -> None:
    diff(*models, tmp_path / "d.zt", "low-rank", options={"rank": 4}, calibration=statistics)
    with ingot.open(tmp_path / "d.zt") as delta:
        assert {tensor.params["rank"] for tensor in delta.values()} == {4}
    diff(*models, tmp_path / "d.zt", "int3", options={"group": 32}, calibration=statistics, overwrite=True)
    with ingot.open(tmp_path / "d.zt") as delta:
        assert {delta[name].params["group_size"] for name in (UP, DOWN)} == {32}


def test_statistics_of_the_base_serve_and_others_are_refused(
    models: tuple[Path, Path], statistics: Path, tmp_path: Path
) -> None:
    of_base = stated(tmp_path / "base.safetensors", models[0], UP)
    report = diff(*models, tmp_path / "d.zt", "int2", calibration=of_base)
    assert [item.matrix for item in report.rounded] == [UP]
    with Statistics.open(statistics) as held:
        diff(*models, tmp_path / "e.zt", "int2", calibration=held)
        assert held.for_matrix(UP) is not None  # whose it is closes it
    other = tmp_path / "other.safetensors"
    ingot.save(other, {UP: np.ones(SHAPES[UP], np.float32)})
    with pytest.raises(UsageError) as found:
        diff(*models, tmp_path / "no.zt", "int2", calibration=stated(tmp_path / "o.safetensors", other, UP))
    assert found.value.rule == "statistics.model"
    assert not (tmp_path / "no.zt").exists()


@pytest.mark.parametrize(
    ("field", "array", "rule"),
    [
        ("inputs", np.full((192, 192), np.nan, np.float32), "statistics.value"),
        ("in_sum2", np.full(191, 1, np.float32), "statistics.shape"),
        ("count", np.array([-1]), "statistics.value"),
    ],
)
def test_damaged_statistics_are_refused(
    field: str, array: np.ndarray, rule: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(FormatError) as found:
        diff(
            *models,
            tmp_path / "no.zt",
            "int2",
            calibration=stated(tmp_path / "s.safetensors", models[1], UP, **{field: array}),
        )
    assert found.value.rule == rule
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.safetensors"]


@pytest.mark.parametrize(
    "asked",
    [
        {"out": "d.zt"},
        {"out": "d.zt", "strategy": "int8"},
        {"out": "d.wdelta", "strategy": "int4"},
        {"out": "d.safetensors"},
        {"out": "d.zt", "strategy": "int4", "engine": "ray"},
    ],
)
def test_what_nothing_goes_by_is_refused(
    asked: dict[str, str], models: tuple[Path, Path], statistics: Path, tmp_path: Path
) -> None:
    out = tmp_path / asked.pop("out")
    with pytest.raises(IngotError) as found:
        diff(*models, out, calibration=statistics, **asked)
    assert found.value.rule == "delta.calibration"


def test_a_run_by_other_statistics_is_not_gone_on_with(
    models: tuple[Path, Path], statistics: Path, tmp_path: Path
) -> None:
    # What tells one run from another is that of the steps: the same matrices, rounded by other statistics.
    with ingot.open(models[0]) as base, ingot.open(models[1]) as tuned, Statistics.open(statistics) as known:
        planners = [
            DiffPlanner("zt", "int2", is_default=False, statistics=known, statistics_id=name) for name in ("one", "two")
        ]
        steps = [step_data(planner.plan(TensorPair(base[UP], tuned[UP])).step) for planner in planners]
    assert steps[0] != steps[1]
    assert steps[0]["spec"] == steps[1]["spec"]


def test_single_tensors_can_be_asked_for(models: tuple[Path, Path], statistics: Path, tmp_path: Path) -> None:
    report = diff(*models, tmp_path / "d.zt", storages={UP: SIGNS}, calibration=statistics)
    assert [item.matrix for item in report.rounded] == [UP]
    report = diff(*models, tmp_path / "d.zt", storages={UP: SIGNS}, overwrite=True)
    assert [item.tokens for item in report.rounded] == [None]


def test_what_rounding_will_take_is_told_before_it_starts(
    models: tuple[Path, Path], statistics: Path, tmp_path: Path
) -> None:
    told: list[RoundingEstimate] = []

    def tell(plan: RoundingEstimate) -> None:
        assert not (tmp_path / "d.zt").exists()
        told.append(plan)

    report = diff(*models, tmp_path / "d.zt", "int2", calibration=statistics, threads=1, plan=tell)
    assert [plan.matrices for plan in told] == [len(report.rounded)]
    assert told[0].weights == sum(SHAPES[item.matrix][0] * SHAPES[item.matrix][1] for item in report.rounded)
    assert told[0].seconds == pytest.approx(told[0].weights * 1e-5)
    assert re.search(r": about \d+ s$", told[0].describe())
    assert (
        "2 h 47 min" in estimate_rounding_time([(10**9, Storage("trellis"))] * 2, 4).describe()
    )  # a tensor each for two threads
    diff(*models, tmp_path / "plain.zt", "int2", plan=tell)
    assert len(told) == 1  # without statistics it is quick


def test_auto_keeps_to_a_size_and_loses_less_than_without(
    models: tuple[Path, Path], statistics: Path, tmp_path: Path
) -> None:
    share, whole = 0.12, sum(2 * rows * cols for rows, cols in SHAPES.values())
    lost = {}
    for calibration in (None, statistics):
        delta, result = tmp_path / "d.zt", tmp_path / "r.safetensors"
        report = diff(*models, delta, "auto", target_size=share, calibration=calibration, overwrite=True)
        assert report.size <= share * whole + 2 * OVERHEAD
        patch(models[0], [delta], result, overwrite=True)
        lost[calibration is None] = sum(errors(models, result).values())
    assert lost[False] < 0.5 * lost[True]


def test_errors_that_are_allowed_are_kept_to(models: tuple[Path, Path], statistics: Path, tmp_path: Path) -> None:
    diff(*models, tmp_path / "d.zt", "auto", max_error=0.3, calibration=statistics)
    patch(models[0], [tmp_path / "d.zt"], tmp_path / "r.safetensors")
    assert all(0.001 < error <= 0.3**2 for error in errors(models, tmp_path / "r.safetensors").values())


def test_ways_have_counterparts_of_as_many_bits(models: tuple[Path, Path], statistics: Path) -> None:
    with ingot.open(models[0]) as base, ingot.open(models[1]) as tuned, Statistics.open(statistics) as known:
        plain, found = measure(base[UP], tuned[UP]), measure_calibrated(base[UP], tuned[UP], known)
        assert measure_calibrated(base[TABLE], tuned[TABLE], known) == measure(base[TABLE], tuned[TABLE])
    assert found.weight == plain.weight
    assert any(trial.storage.quantizer for trial in found.trials)
    for old, new in zip(plain.trials, found.trials, strict=True):
        assert new.error == old.error
        if new.storage.quantizer:
            assert new.storage.options.get("bits") == old.storage.options.get("bits")
            assert new.weighted_error <= old.weighted_error
        else:
            assert new == old
    assert calibrated_equivalent(Storage("low_rank", {"rank": 0}), 64) is None
    assert calibrated_equivalent(Storage("low_rank", {"rank": 8}), 64) == Storage(
        "low_rank", {"rank": 8}, "raw", "two-sided"
    )
    assert calibrated_equivalent(EXACT, 64) is None


@pytest.mark.parametrize("strategy", ["int4", "auto"])
def test_other_element_types_are_calibrated_and_other_rows_are_not(
    strategy: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Statistics of the base do not fit a matrix that has more rows in the fine-tune."""
    with ingot.open(models[1]) as tuned:
        arrays = {name: tensor.numpy("f16") for name, tensor in tuned.items()}
    arrays[UP] = np.concatenate([arrays[UP], arrays[UP][:4]])
    ingot.save(tmp_path / "tuned.safetensors", arrays)
    known = stated(tmp_path / "s.safetensors", models[0], UP, DOWN)
    more = {"target_size": 0.3} if strategy == "auto" else {}
    report = diff(
        models[0], tmp_path / "tuned.safetensors", tmp_path / "d.zt", strategy, calibration=known, measure=True, **more
    )
    assert [item.matrix for item in report.rounded] == [DOWN]
    codecs = {item.name: item.codec for item in report.tensors}
    assert codecs[UP] == "delta_rows"
    assert codecs[DOWN] == "trellis"
    result = tmp_path / "result.safetensors"
    assert patch(models[0], [tmp_path / "d.zt"], result, verify=True).verified
    with ingot.open(result) as found:
        assert np.array_equal(found[UP].numpy()[128:], arrays[UP][128:])
