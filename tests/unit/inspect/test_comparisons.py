"""Comparisons of very many tensors: kept as columns, given back as they were, worst first, in little memory."""

from __future__ import annotations

import copy
import pickle
import random
import tracemalloc
from math import inf, isnan
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.numeric.stats import ErrorStats
from ingot.inspect.compare import compare_sides, open_sides
from ingot.inspect.comparisons import (
    DIFFERS,
    EQUAL,
    IDENTICAL,
    ONLY_A,
    ONLY_B,
    SHAPE,
    UNKNOWN,
    Comparisons,
    TensorComparison,
)
from ingot.inspect.options import CompareOptions

STATUSES = [IDENTICAL, EQUAL, DIFFERS, ONLY_A, ONLY_B, SHAPE, UNKNOWN]


def some(count: int, seed: int = 0) -> list[TensorComparison]:
    """Comparisons of all kinds, in no order."""
    rng = random.Random(seed)
    numbers = [0.0, -0.0, 5e-324, 1e300, inf, 0.1]
    counts = [0, 1, 2**53 + 1, 2**63 - 1]

    def stats() -> ErrorStats | None:
        if rng.random() < 0.3:
            return None
        error = rng.choice([0.0, 0.25, 0.5, rng.random()])
        more = [rng.choice(numbers) for _ in range(3)]
        return ErrorStats(rng.choice(counts), error, rng.random(), *more, rng.choice(counts), rng.choice(counts))

    names = [f"w.{index}.é" for index in range(count)]
    rng.shuffle(names)
    details = ["", "f32 and bf16", "[1, 2] and [2, 1]"]
    return [TensorComparison(name, rng.choice(STATUSES), rng.choice(details), stats()) for name in names]


def badness(item: TensorComparison) -> tuple[int, float, str]:
    order = {DIFFERS: 1, IDENTICAL: 2, EQUAL: 2}.get(item.status, 0)
    return order, item.stats.snr_db if item.stats else 0.0, item.name


@pytest.mark.parametrize("count", [0, 1, 2, 3, 500])
def test_they_are_those_that_were_added_worst_first(count: int) -> None:
    for seed in range(4):
        items = some(count, seed)
        wanted = sorted(items, key=badness)
        found = Comparisons(iter(items))
        assert repr(found) == repr(wanted)  # tells -0.0 from 0.0
        assert [found[index] for index in range(-count, count)] == wanted * 2
        assert found == wanted
        assert len(found) == count


def test_they_are_a_sequence() -> None:
    items = some(20)
    wanted, found = sorted(items, key=badness), Comparisons(items)
    for part in (slice(3), slice(None), slice(5, 2), slice(None, None, -2), slice(-4, None)):
        assert list(found[part]) == wanted[part]
    assert found[2:9][1:][0] == wanted[3]
    assert found == pickle.loads(pickle.dumps(found)) == copy.deepcopy(found)
    assert found != wanted[1:]
    assert found != Comparisons(items[1:])
    assert found != tuple(wanted)
    assert wanted[4] in found
    assert found.index(wanted[7]) == 7
    assert list(reversed(found)) == wanted[::-1]
    for index in (20, -21):
        with pytest.raises(IndexError):
            found[index]
    with pytest.raises(TypeError, match="unhashable"):
        hash(found)


def test_an_unknown_ratio_is_behind_those_that_are_known() -> None:
    """Squares that were too large: whatever the order in which they come."""
    large = ErrorStats(1, inf, inf, inf, -inf, 2e200, 0, 1)
    assert isnan(large.snr_db)
    items = [TensorComparison(f"x{index}", DIFFERS, "", large) for index in range(5)]
    items += [TensorComparison(f"w{index}", DIFFERS, "", ErrorStats(1, 0.5, 1.0 + index)) for index in range(5)]
    items.append(TensorComparison("same", IDENTICAL))
    wanted = [*(f"w{index}" for index in range(5)), *(f"x{index}" for index in range(5)), "same"]
    for seed in range(5):
        random.Random(seed).shuffle(items)
        assert [item.name for item in Comparisons(items)] == wanted


def test_little_is_kept_of_each() -> None:
    count = 20_000
    names = [f"model.layers.{index}.weight" for index in range(count)]

    def found(name: str) -> TensorComparison:
        values = [float(len(name)) + index for index in range(5)]
        return TensorComparison(name, DIFFERS, f"{name[:3]} and bf16", ErrorStats(1000, *values, 1000, 1000))

    tracemalloc.start()
    kept = Comparisons(map(found, names))
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept) == count
    assert now / count < 110  # eight numbers, a name, a detail, a place
    assert peak / count < 170


def test_comparing_takes_little_memory_for_each(tmp_path: Path) -> None:
    count = 6_000
    values = np.random.default_rng(0).standard_normal((count, 4)).astype(np.float32)
    for side, moved in (("a", 0), ("b", 1)):
        ingot.save(tmp_path / f"{side}.safetensors", {f"w.{index}": row + moved for index, row in enumerate(values)})
    with open_sides(CompareOptions(tmp_path / "a.safetensors", tmp_path / "b.safetensors")) as (first, second):
        assert first.nbytes == second.nbytes  # what headers keep of all is there
        assert all(name in second for name in first)
        tracemalloc.start()
        found = compare_sides(first, second)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(found) == count
    assert found[0].status == DIFFERS
    assert peak / count < 250
