"""Deltas in memory under attack: memory shared with what stays, late failures, changes that a sample would miss."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import FormatError, IntegrityError, UsageError

BF16 = ml_dtypes.bfloat16
State = dict[str, Any]


def delta(tmp_path: Path, base: State, tuned: State, strategy: str = "exact", name: str = "delta.zt") -> Path:
    ingot.save(tmp_path / "base.zt", base)
    ingot.save(tmp_path / "tuned.zt", tuned)
    ingot.diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / name, strategy)
    return tmp_path / name


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("undo", [True, False])
def test_what_stays_shares_no_memory_with_what_changes(tmp_path: Path, *, verify: bool, undo: bool) -> None:
    weights = np.arange(4096, dtype=np.float32)
    path = delta(tmp_path, {"p": weights, "q": weights}, {"p": weights, "q": weights + 1})
    shared = weights.copy()
    with pytest.raises(FormatError) as caught:
        ingot.apply_delta({"p": shared, "q": shared}, path, verify_base=verify, undo=undo)
    assert caught.value.rule == "delta.shared"
    assert np.array_equal(shared, weights)


def test_what_stays_may_overlap_what_stays(tmp_path: Path) -> None:
    weights = np.arange(4096, dtype=np.float32)
    base = {"p": weights, "q": weights, "r": weights[:100], "x": weights}
    path = delta(tmp_path, base, {**base, "x": weights + 1})
    shared = weights.copy()
    state = {"p": shared, "q": shared, "r": shared[:100], "x": weights.copy()}
    ingot.apply_delta(state, path).revert()
    assert np.array_equal(shared, weights)
    assert np.array_equal(state["x"], weights)


class _Sealed(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        raise RuntimeError(name)


def test_a_mapping_that_takes_nothing_new_gets_its_values_back(tmp_path: Path) -> None:
    weights = np.arange(4096, dtype=np.float32)
    path = delta(tmp_path, {"p": weights}, {"p": weights + 1, "new": weights})
    state = _Sealed(p=weights.copy())
    with pytest.raises(RuntimeError, match="new"):
        ingot.apply_delta(state, path)
    assert list(state) == ["p"]
    assert np.array_equal(state["p"], weights)


@pytest.mark.parametrize("at", [0, 40_000, (1 << 18) + 5, (1 << 19) - 1])
def test_a_change_anywhere_is_seen_before_anything_is_taken_back(tmp_path: Path, at: int) -> None:
    base = {"a": np.arange(1 << 19, dtype=np.float32), "b": np.ones(64, np.float32)}
    path = delta(tmp_path, base, {name: value + 1 for name, value in base.items()})
    state = {name: value.copy() for name, value in base.items()}
    applied = ingot.apply_delta(state, path)
    state["a"][at] += 1
    before = {name: value.tobytes() for name, value in state.items()}
    with pytest.raises(UsageError) as caught:
        applied.revert()
    assert caught.value.rule == "delta.not-applied"
    assert {name: value.tobytes() for name, value in state.items()} == before
    state["a"][at] -= 1
    applied.revert()
    assert all(np.array_equal(state[name], base[name]) for name in base)


def test_a_delta_that_was_written_to_is_not_taken_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base = {"a": rng.standard_normal((256, 256)).astype(BF16)}
    tuned = {"a": (base["a"].astype(np.float32) * 1.01).astype(BF16)}
    path = delta(tmp_path, base, tuned, "int4")
    state = {"a": base["a"].copy()}
    applied = ingot.apply_delta(state, path)
    left = state["a"].tobytes()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(64))
    os.utime(path, ns=(1, 1))
    with pytest.raises(IntegrityError) as caught:
        applied.revert()
    assert caught.value.rule == "store.changed"
    assert state["a"].tobytes() == left


@pytest.mark.parametrize("strategy", ["int8", "int4", "exact"])
def test_values_that_overflow_warn_of_nothing(tmp_path: Path, strategy: str) -> None:
    largest = np.full((200, 200), 3e38, np.float32)
    ingot.save(tmp_path / "base.zt", {"a": largest})
    ingot.save(tmp_path / "tuned.zt", {"a": -largest})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if strategy == "exact":
            ingot.diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / "delta.zt", strategy)
            return
        with pytest.raises(ingot.IngotError):
            ingot.diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / "delta.zt", strategy)
    assert not (tmp_path / "delta.zt").exists()


@pytest.mark.parametrize("strategy", ["exact", "int8", "int4", "int3", "int2", "int1", "low-rank"])
def test_every_strategy_gives_the_same_with_and_without_undo_and_on_disk(tmp_path: Path, strategy: str) -> None:
    rng = np.random.default_rng(1)
    base = {"a": rng.standard_normal((300, 4000)).astype(BF16), "n": rng.standard_normal(50).astype(np.float16)}
    noise = {name: rng.standard_normal(value.shape) * 0.01 for name, value in base.items()}
    tuned = {name: (value.astype(np.float32) + noise[name]).astype(value.dtype) for name, value in base.items()}
    path = delta(tmp_path, base, tuned, strategy)
    ingot.patch(tmp_path / "base.zt", path, tmp_path / "out.zt", verify=True)
    with ingot.open(tmp_path / "out.zt") as checkpoint:
        wanted = {name: checkpoint[name].numpy().tobytes() for name in checkpoint}
    for undo in (True, False):
        state = {name: value.copy() for name, value in base.items()}
        applied = ingot.apply_delta(state, path, undo=undo)
        assert {name: value.tobytes() for name, value in state.items()} == wanted
        if undo:
            applied.revert()
            assert all(state[name].tobytes() == base[name].tobytes() for name in base)
        else:
            applied.close()


def test_a_tensor_that_cannot_be_read_keeps_no_other_from_its_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    base = {name: rng.standard_normal((200, 300)).astype(BF16) for name in "abc"}
    tuned = {name: (value.astype(np.float32) * 1.01).astype(BF16) for name, value in base.items()}
    path = delta(tmp_path, base, tuned, "int1")
    data = path.read_bytes()
    assert data.count(b"zstd") > 2
    for place in [i for i in range(len(data)) if data.startswith(b"zstd", i)]:
        (tmp_path / "bad.zt").write_bytes(data[:place] + b"z3td" + data[place + 4 :])
        for workers in (0, 1, 2):
            state = {name: value.copy() for name, value in base.items()}
            with pytest.raises(ingot.IngotError):
                ingot.apply_delta(state, tmp_path / "bad.zt", workers=workers)
            assert {name: value.tobytes() for name, value in state.items()} == {
                name: value.tobytes() for name, value in base.items()
            }


def test_a_damaged_file_is_named_before_a_wrong_base(tmp_path: Path) -> None:
    weights = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
    path = delta(tmp_path, {"w": weights}, {"w": weights * 1.01}, "int4", "delta.wdelta")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    state = {"w": weights + 1}
    with pytest.raises(IntegrityError) as caught:
        ingot.apply_delta(state, path)
    assert caught.value.rule == "wdelta.digest-mismatch"
    assert np.array_equal(state["w"], weights + 1)
