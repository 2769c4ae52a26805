"""Strategy auto: what is chosen for a size and for an error, and the merged adapter that it finds by itself."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.codecs.dense.codec import DenseCodec
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime.progress import ProgressEvent
from ingot.delta.auto import OVERHEAD, PER_PAIR, choose, measure, target_bytes
from ingot.delta.diff import diff
from ingot.delta.patch import patch
from ingot.delta.strategy import EVERY, EXACT, STRATEGIES, choices
from ingot.errors import UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor

BF16 = numpy_dtype("bf16")


def tensor(name: str, array: Array) -> Tensor:
    return Tensor(
        name, array.shape, "bf16", "dense", {"data": memory_part(array.view(np.uint16), "bf16")}, {}, DenseCodec()
    )


def pair(name: str, kind: str, shape: tuple[int, int] = (160, 224), seed: int = 0) -> tuple[Tensor, Tensor]:
    """A base and a fine-tune: ``adapter`` of rank 8, ``dense`` noise, or ``few`` elements changed."""
    rng = np.random.default_rng(seed)
    base = rng.normal(0, 0.02, shape).astype(BF16)
    change = rng.normal(0, 0.002, shape)
    if kind == "adapter":
        change = rng.normal(0, 0.03, (shape[0], 8)) @ rng.normal(0, 0.03, (8, shape[1]))
    if kind == "few":
        change *= rng.random(shape) < 0.01
    return tensor(name, base), tensor(name, (base.astype(np.float32) + change.astype(np.float32)).astype(BF16))


def test_a_merged_adapter_is_found_and_its_rank() -> None:
    storages = choose([pair("a", "adapter"), pair("b", "dense", seed=1)], max_error=0.2)
    assert storages["a"].codec == "low_rank"
    assert storages["a"].options["rank"] == 8
    assert storages["b"].codec != "low_rank"


def test_an_error_is_kept_to_by_the_smallest_way() -> None:
    one = pair("t", "dense")
    trials = measure(*one).trials
    for most in (0.7, 0.1, 0):
        found = choose([one], max_error=most)["t"]
        chosen = next(trial for trial in trials if trial.storage == found)
        assert chosen.error <= most**2
        assert not [trial for trial in trials if trial.error <= most**2 and trial.size < chosen.size]
    assert found == EXACT


def test_more_bytes_never_make_it_worse_and_are_not_exceeded() -> None:
    pairs = [pair("a", "adapter"), pair("b", "dense", seed=1), pair("c", "few", seed=2)]
    measured = {item.name: item for item in (measure(*one) for one in pairs)}
    last = np.inf
    whole = sum(one.nbytes for _, one in pairs)
    for share in (0.1, 0.3, 1):
        storages = choose(pairs, target_size=int(share * whole))
        trials = {
            name: next(trial for trial in measured[name].trials if trial.storage == storage)
            for name, storage in storages.items()
        }
        assert sum(trial.size for trial in trials.values()) + 3 * OVERHEAD <= share * whole
        harm = sum(measured[name].weight * trial.weighted_error for name, trial in trials.items())
        assert harm <= last
        last = harm


def test_what_cannot_be_is_refused() -> None:
    one = pair("t", "dense")
    for target in ({}, {"target_size": 10**6, "max_error": 0.1}, {"max_error": -1.0}, {"target_size": 100}):
        with pytest.raises(UsageError) as caught:
            choose([one], **target)
        assert caught.value.rule == "delta.target"
    with pytest.raises(UsageError) as caught:
        target_bytes("-1", 100)
    assert caught.value.rule == "delta.target"
    assert (target_bytes(0.25, 1000), target_bytes("1KiB", 1000), target_bytes(400, 1000)) == (250, 1024, 400)


def test_a_target_is_for_auto_alone(tmp_path: Path) -> None:
    for name in ("base", "tuned"):
        ingot.save(tmp_path / f"{name}.zt", {"t": np.full((4, 4), len(name), np.float32)})
    for options in ({"strategy": "int4", "target_size": 0.1}, {"max_error": 0.1}, {"strategy": "auto"}):
        with pytest.raises(UsageError) as caught:
            diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / "delta.zt", **options)
        assert caught.value.rule == "delta.target"


def test_small_tensors_vectors_and_integers_are_kept_exactly() -> None:
    for strategy in STRATEGIES:
        for shape, dtype in (((4096,), "bf16"), ((4, 4), "f32"), ((512, 512), "i8")):
            assert choices(strategy, "t", shape, dtype) == (STRATEGIES[strategy] if strategy in EVERY else EXACT)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_a_delta_of_the_asked_size_is_written_and_applied(tmp_path: Path, share: float) -> None:
    pairs = [pair(name, kind, (512, 512), seed) for seed, (name, kind) in enumerate((("a", "adapter"), ("b", "dense")))]
    for number, file in enumerate(("base", "tuned")):
        ingot.save(tmp_path / f"{file}.zt", {one[number].name: one[number].numpy() for one in pairs})
    delta = tmp_path / "delta.zt"
    diff(tmp_path / "base.zt", tmp_path / "tuned.zt", delta, "auto", target_size=share)
    assert delta.stat().st_size <= share * sum(one.nbytes for _, one in pairs)
    patch(tmp_path / "base.zt", [delta], tmp_path / "again.zt")
    with ingot.open(tmp_path / "again.zt") as found:
        for base, tuned in pairs:
            before, wanted, got = (item.numpy("f32") for item in (base, tuned, found[tuned.name]))
            assert np.linalg.norm(got - wanted) < 0.7 * np.linalg.norm(before - wanted)


def test_a_matrix_is_measured_by_chunks() -> None:
    one = pair("t", "adapter", (2048, 3072))
    tracemalloc.start()
    try:
        found = measure(*one)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert any(trial.storage.codec == "low_rank" and trial.storage.options["rank"] == 8 for trial in found.trials)
    assert peak < PER_PAIR


def test_measuring_tells_how_far_it_is(tmp_path: Path) -> None:
    one = pair("a", "dense")
    for number, file in enumerate(("base", "tuned")):
        ingot.save(tmp_path / f"{file}.zt", {"a": one[number].numpy()})
    events: list[ProgressEvent] = []
    diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / "d.zt", "auto", max_error=0.1, progress=events.append)
    assert events[0].processed == 0
    assert events[0].total == 4 * one[0].nbytes  # measured, then written
    assert events[-1].processed == events[-1].total == events[0].total
