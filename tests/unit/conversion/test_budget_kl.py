"""Limits of divergence: what is kept was measured to keep to them, and is the smallest found that does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.budget import divergence as budget_kl
from ingot.conversion.budget.divergence import STEPS, Kl, search, smallest
from ingot.core.numeric.knapsack import Allocation
from ingot.errors import IngotError, UsageError
from ingot.runtime.calibration import calibrate
from ingot.runtime.evaluation.divergence import Divergence
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.loading.options import Protocol
from tests.support.models import make, make_tokenizer

TYPES = "int2,int3,int4,int6,int8"
LARGER = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2, "max_position_embeddings": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kl") / "model"
    size = make_tokenizer(path.parent)
    make("llama", path, vocab_size=size, **LARGER)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((path.parent / name).read_bytes())
    return path


def problem() -> tuple[list[list[float]], list[list[int]]]:
    random = np.random.default_rng(4)
    sizes = [[16 * n, 8 * n, 6 * n, 4 * n, 3 * n] for n in random.integers(50, 900, 60).tolist()]
    weights = random.lognormal(0, 1, 60) * 1e-4
    return [[0.0, *(float(weight) * 4.0**step for step in range(4))] for weight in weights], sizes


def searched(limit: float, measured: Callable[[float], float]) -> tuple[Any, list[Any], list[float]]:
    costs, sizes = problem()
    bounds: list[float] = []

    def solve(bound: float) -> Allocation:
        bounds.append(bound)
        return smallest(costs, sizes, bound)

    return *search(limit, solve, lambda allocation: Kl(measured(allocation.cost))), bounds


@pytest.mark.parametrize(
    "measured",
    [
        lambda loss: loss,
        lambda loss: 3 * loss,
        lambda loss: loss / 5,
        lambda loss: 40 * loss**1.3,
        lambda loss: 0.3 * loss**0.5,
    ],
    ids=["true", "too low", "too high", "steep", "flat"],
)
def test_few_steps_come_close_to_the_limit_from_below(measured: Callable[[float], float]) -> None:
    held, steps, bounds = searched(0.02, measured)
    assert len(steps) <= STEPS
    assert bounds[0] == 0.02
    assert held.kl.mean <= 0.02
    assert held.allocation.size == min(step.allocation.size for step in steps if step.kl.mean <= 0.02)
    costs, sizes = problem()
    best = next(
        smallest(costs, sizes, loss).size for loss in np.geomspace(1, 1e-6, 2000) if measured(float(loss)) <= 0.02
    )
    assert held.allocation.size <= 1.03 * best


def test_the_estimate_is_corrected_by_what_was_measured() -> None:
    held, steps, bounds = searched(0.02, lambda loss: 3 * loss)
    assert len(steps) == 2
    assert bounds[1] == pytest.approx(0.02 / 3, rel=0.1)
    assert held is steps[1]


def test_the_most_exact_is_tried_before_a_limit_is_refused() -> None:
    held, steps, _ = searched(0.02, lambda loss: 0.05 + loss)
    assert held is None
    assert len(steps) <= STEPS
    assert steps[-1].loss == 0
    held, steps, _ = searched(0.02, lambda loss: float("nan") if loss else 0.0)
    assert held.loss == 0
    assert len(steps) <= STEPS


def test_a_limit_that_everything_keeps_to_takes_the_smallest() -> None:
    held, steps, _ = searched(0.02, lambda loss: 1e-6 * loss)
    _, sizes = problem()
    assert held.allocation.size == sum(map(min, sizes))
    assert len(steps) <= STEPS


def test_the_smallest_within_a_loss() -> None:
    costs, sizes = [[0.0, 1.0, 3.0], [0.0, 2.0, 2.5]], [[10, 6, 5], [10, 7, 7]]
    assert smallest(costs, sizes, 3.2).picks == (1, 1)
    assert smallest(costs, sizes, 5.0).picks == (2, 1)  # of as many bytes the one of less loss
    assert smallest(costs, sizes, 0.0).picks == (0, 0)


@pytest.mark.parametrize("target", ["out.zt", "out.gguf"])
def test_the_result_keeps_to_the_limit_by_measurement(model: Path, tmp_path: Path, target: str) -> None:
    out, limit = tmp_path / target, 0.05
    types = "q4_0,q5_0,q8_0" if target.endswith("gguf") else TYPES
    report = ingot.convert(model, out, max_kl=limit, types=types, sequences=4)
    assert report.budget is not None
    assert report.budget.kl is not None
    assert 0 < report.budget.kl <= limit
    assert report.size == report.budget.size
    again = Divergence(model, None, 4)
    assert again(str(out), alone=target == "out.zt").mean == pytest.approx(report.budget.kl, rel=1e-5)
    smaller = [step for step in report.budget.steps if step.size < report.size]
    assert all(step.kl > limit for step in smaller)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out.toml", target])
    assert [step.chosen for step in report.budget.steps].count("<- chosen") == 1


def test_a_text_is_read_as_eval_reads_it(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("What nobody has read, a model says again. " * 20)
    report = ingot.convert(model, out, target_bpw=6, types=TYPES, check_kl=True, text=text)
    assert report.budget is not None
    assert str(text) in report.budget.over
    found = evaluate(out, text, model, Protocol(16))
    assert report.budget.kl == pytest.approx(found.kl, rel=1e-6)
    assert len(report.budget.steps) == 1


class Stub:
    """A divergence that says what it is told to, by the bytes of what it is shown."""

    over = "nothing"
    says: Callable[[str], float]

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, path: str, *, alone: bool) -> Kl:
        del alone
        return Kl(type(self).says(path))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Stub]:
    kind: type[Stub] = type("Told", (Stub,), {})
    monkeypatch.setattr(budget_kl, "_DIVERGENCE", {"model": kind})
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return kind


def test_a_limit_that_nothing_keeps_to_names_the_least(model: Path, tmp_path: Path, stub: type[Stub]) -> None:
    stub.says = lambda path: 0.25 + 1 / Path(path).stat().st_size
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, tmp_path / "out.zt", max_kl=0.01, types="int4,int8")
    assert refused.value.rule == "convert.budget"
    assert "0.25" in refused.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, ValueError])
def test_what_is_interrupted_leaves_nothing(
    model: Path, tmp_path: Path, stub: type[Stub], stopped: type[BaseException]
) -> None:
    def says(path: str) -> float:
        assert Path(path).stat().st_size
        raise stopped

    stub.says = says
    with pytest.raises(stopped):
        ingot.convert(model, tmp_path / "out.zt", max_kl=0.01, types="int4,int8")
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(
    "more",
    [
        {"max_kl": 0.02, "target_bpw": 4},
        {"max_kl": 0.02, "recipe": "int4"},
        {"max_kl": 0},
        {"max_kl": float("nan")},
        {"check_kl": True},
        {"target_bpw": 4, "text": "text.txt"},
        {"sequences": 4},
    ],
)
def test_options_that_contradict_each_other_are_refused(model: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, tmp_path / "out.zt", **more)
    assert refused.value.rule == "convert.budget"


def test_what_is_no_language_model_is_refused(tmp_path: Path) -> None:
    make("bert", tmp_path / "bert")
    with pytest.raises(IngotError) as refused:
        ingot.convert(tmp_path / "bert", tmp_path / "out.zt", max_kl=0.02, types="int8")
    assert refused.value.rule == "generate.no-head"
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


def test_a_model_without_statistics_is_calibrated_under_the_same_progress(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TakenError(Exception):
        pass

    def take(subject: Any, options: Any, *rest: Any) -> None:
        assert options.progress is print
        raise TakenError

    monkeypatch.setattr(calibrate, "_collect", take)
    with pytest.raises(TakenError):
        ingot.convert(model, tmp_path / "out.zt", target_bpw=6, types="int4-calibrated", progress=print)
