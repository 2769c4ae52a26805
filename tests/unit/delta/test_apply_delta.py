"""Deltas in memory: in place, without a second copy, and back again bit for bit."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.model.delta import delta_of

torch = pytest.importorskip("torch")

BF16 = ml_dtypes.bfloat16
State = dict[str, Any]
STRATEGIES = ("exact", "int8", "int4", "int2")


@pytest.fixture(autouse=True)
def _small_matrices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.delta.strategy.SMALL", 100)
    monkeypatch.setattr("ingot.delta.in_place.UNDO_CHUNK", 3000)


def make(seed: int, dtype: Any = BF16) -> State:
    rng = np.random.default_rng(seed)
    shapes = {"a.weight": (64, 96), "b.weight": (96, 64), "norm": (96,), "c.weight": (3, 32, 40), "same": (50, 50)}
    found = {name: (rng.standard_normal(shape) * 0.05).astype(dtype) for name, shape in shapes.items()}
    found["same"] = np.ones((50, 50), dtype)
    found["step"] = np.array([seed], np.int64)
    return found


def copied(state: State) -> State:
    return {name: value.copy() for name, value in state.items()}


def bits(state: State) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, value in state.items():
        array = value
        if isinstance(value, torch.Tensor):
            array = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()
        found[name] = (str(value.dtype), tuple(value.shape), array.tobytes())
    return found


def content(state: State, tmp_path: Path) -> str:
    ingot.save(tmp_path / "state.zt", state)
    with ingot.open(tmp_path / "state.zt") as checkpoint:
        return content_id(checkpoint)


@pytest.fixture
def base(tmp_path: Path) -> State:
    state = make(0)
    ingot.save(tmp_path / "base.zt", state)
    return state


def delta_to(tmp_path: Path, tuned: State, strategy: str, name: str = "delta") -> Path:
    ingot.save(tmp_path / f"{name}-tuned.zt", tuned)
    ingot.diff(tmp_path / "base.zt", tmp_path / f"{name}-tuned.zt", tmp_path / f"{name}.zt", strategy)
    return tmp_path / f"{name}.zt"


def near(base: State, seed: int) -> State:
    """A fine-tune: matrices a little off, an infinity and a NaN where nothing adds, integers changed."""
    rng = np.random.default_rng(seed)
    tuned = copied(base)
    for name in ("a.weight", "b.weight", "c.weight"):
        wide = base[name].astype(np.float32)
        tuned[name] = (wide + rng.standard_normal(wide.shape).astype(np.float32) * 0.02).astype(base[name].dtype)
    tuned["norm"].reshape(-1)[:2] = [np.nan, np.inf]
    tuned["step"] += seed
    return tuned


class TestBothWays:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
    def test_numpy(self, tmp_path, strategy, dtype):
        state = make(0, dtype)
        ingot.save(tmp_path / "base.zt", state)
        before, places = bits(state), {name: value.ctypes.data for name, value in state.items()}
        path = delta_to(tmp_path, near(state, 1), strategy)
        applied = ingot.apply_delta(state, path)
        assert content(state, tmp_path) == applied.result_id
        assert {name: value.ctypes.data for name, value in state.items()} == places
        assert bits(state) != before
        applied.revert()
        assert bits(state) == before

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_torch(self, base, tmp_path, strategy):
        path = delta_to(tmp_path, near(base, 1), strategy)
        with ingot.open(tmp_path / "base.zt") as checkpoint:
            state = {name: tensor.clone() for name, tensor in checkpoint.state_dict("pt").items()}
        before, places = bits(state), {name: value.data_ptr() for name, value in state.items()}
        applied = ingot.apply_delta(state, path)
        assert content(state, tmp_path) == applied.result_id
        assert {name: value.data_ptr() for name, value in state.items()} == places
        ingot.revert(state, applied)
        assert bits(state) == before

    def test_a_module_sees_it(self, tmp_path):
        module = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        other = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        ingot.save(tmp_path / "base.zt", dict(module.state_dict()))
        path = delta_to(tmp_path, dict(other.state_dict()), "exact")
        x = torch.ones(1, 8, dtype=torch.bfloat16)
        before = module(x)
        applied = ingot.apply_delta(module.state_dict(), path)
        assert torch.equal(module(x), other(x))
        applied.revert()
        assert torch.equal(module(x), before)

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_without_undo_the_result_is_the_same(self, base, tmp_path, strategy):
        path = delta_to(tmp_path, near(base, 1), strategy)
        applied = ingot.apply_delta(base, path, undo=False)
        assert content(base, tmp_path) == applied.result_id
        with pytest.raises(ingot.IngotError) as caught:
            applied.revert()
        assert caught.value.rule == "delta.reverted"

    @pytest.mark.parametrize("strategy", ["sparse", "quantized", "int4"])
    def test_a_wdelta(self, base, tmp_path, strategy):
        floats = {name: value for name, value in base.items() if name not in ("step", "norm")}
        ingot.save(tmp_path / "base.safetensors", floats)
        tuned = {name: value for name, value in near(base, 1).items() if name in floats}
        ingot.save(tmp_path / "tuned.safetensors", tuned)
        ingot.diff(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "x.wdelta", strategy)
        ingot.patch(tmp_path / "base.safetensors", tmp_path / "x.wdelta", tmp_path / "out.safetensors")
        before = bits(floats)
        applied = ingot.apply_delta(floats, tmp_path / "x.wdelta")
        with ingot.open(tmp_path / "out.safetensors") as out:
            assert content(floats, tmp_path) == content_id(out)
        applied.revert()
        assert bits(floats) == before

    def test_two_fine_tunes_a_hundred_times(self, base, tmp_path):
        paths = [delta_to(tmp_path, near(base, 1), "exact", "one"), delta_to(tmp_path, near(base, 2), "int4", "two")]
        before, seen = bits(base), set()
        with ingot.open(paths[0]) as one, ingot.open(paths[1]) as two:
            for number in range(100):
                applied = ingot.apply_delta(base, (one, two)[number % 2], verify_base=number < 2)
                seen.add(base["a.weight"].tobytes())
                applied.revert()
        assert bits(base) == before
        assert len(seen) == 2

    def test_one_on_top_of_the_other(self, base, tmp_path):
        first = delta_to(tmp_path, near(base, 1), "int4", "one")
        before = bits(base)
        one = ingot.apply_delta(base, first)
        middle = bits(base)
        ingot.save(tmp_path / "base.zt", base)
        second = delta_to(tmp_path, near(base, 2), "exact", "two")
        two = ingot.apply_delta(base, second)
        with pytest.raises(ingot.IngotError) as caught:
            one.revert()
        assert caught.value.rule == "delta.not-applied"
        two.revert()
        assert bits(base) == middle
        one.revert()
        assert bits(base) == before


class TestStructure:
    def test_new_reshaped_and_removed_tensors(self, base, tmp_path):
        tuned = near(base, 1)
        tuned["new"] = np.arange(6, dtype=np.float32)
        tuned["b.weight"] = np.ones((7, 3), BF16)
        del tuned["norm"]
        path = delta_to(tmp_path, tuned, "exact")
        before, kept = bits(base), base["norm"]
        applied = ingot.apply_delta(base, path)
        assert bits(base) == bits(tuned) or dict(sorted(bits(base).items())) == dict(sorted(bits(tuned).items()))
        applied.revert()
        assert bits(base) == before
        assert base["norm"] is kept

    def test_new_tensors_are_of_the_same_framework(self, base, tmp_path):
        path = delta_to(tmp_path, {**base, "new": np.ones(3, BF16)}, "exact")
        with ingot.open(tmp_path / "base.zt") as checkpoint:
            state = {name: tensor.clone() for name, tensor in checkpoint.state_dict("pt").items()}
        ingot.apply_delta(state, path)
        assert state["new"].dtype == torch.bfloat16
        state["new"].add_(1)

    @pytest.mark.parametrize("stored", ["once", "twice"])
    def test_tied_tensors_change_once(self, base, tmp_path, stored):
        names = ("a.weight",) if stored == "once" else ("a.weight", "head")
        weights = {**base, **dict.fromkeys(names, base["a.weight"])}
        ingot.save(tmp_path / "base.zt", weights)
        tuned = near(base, 1)
        path = delta_to(tmp_path, {**tuned, **dict.fromkeys(names, tuned["a.weight"])}, "exact")
        state = {**copied(base)}
        state["head"] = state["a.weight"]
        before = bits(state)
        applied = ingot.apply_delta(state, path)
        assert state["head"] is state["a.weight"]
        assert state["a.weight"].tobytes() == tuned["a.weight"].tobytes()
        applied.revert()
        assert bits(state) == before

    def test_one_memory_with_two_differences(self, base, tmp_path):
        state = {**base, "head": base["a.weight"]}
        ingot.save(tmp_path / "base.zt", state)
        tuned = near(base, 1)
        path = delta_to(tmp_path, {**tuned, "head": near(base, 2)["a.weight"]}, "exact")
        before = bits(state)
        with pytest.raises(ingot.IngotError) as caught:
            ingot.apply_delta(state, path)
        assert caught.value.rule == "delta.shared"
        assert bits(state) == before

    def test_empty_and_scalar(self, tmp_path):
        state = {"empty": np.zeros((0, 3), BF16), "scalar": np.array(1.0, np.float32)}
        ingot.save(tmp_path / "base.zt", state)
        path = delta_to(tmp_path, {**state, "scalar": np.array(3.0, np.float32)}, "exact")
        applied = ingot.apply_delta(state, path)
        assert state["scalar"] == 3
        applied.revert()
        assert state["scalar"] == 1


class TestRefusals:
    @pytest.fixture
    def path(self, base, tmp_path) -> Path:
        return delta_to(tmp_path, near(base, 1), "int4")

    def refused(self, rule: str, state: State, path: Path, **options: Any) -> None:
        before = bits(state)
        with pytest.raises(ingot.IngotError) as caught:
            ingot.apply_delta(state, path, **options)
        assert caught.value.rule == rule
        assert bits(state) == before

    def test_a_base_that_is_another(self, base, path):
        base["same"][3, 3] = 2
        self.refused("delta.base", base, path)
        self.refused("delta.base", make(5), path)

    def test_other_names_shapes_and_types(self, base, path):
        self.refused("delta.base", {name: base[name] for name in base if name != "norm"}, path)
        self.refused("delta.base", {**base, "extra": np.ones(3)}, path)
        self.refused("delta.base", {**base, "a.weight": base["a.weight"][:-1]}, path, verify_base=False)
        self.refused("delta.base", {**base, "norm": base["norm"].astype(np.float32)}, path, verify_base=False)

    def test_memory_that_cannot_be_changed_in_place(self, base, path):
        self.refused("delta.layout", {**base, "a.weight": np.asfortranarray(base["a.weight"])}, path)
        locked = base["a.weight"].copy()
        locked.flags.writeable = False
        self.refused("delta.layout", {**base, "a.weight": locked}, path)
        strided = torch.zeros(96, 64, dtype=torch.bfloat16).T
        with pytest.raises(ingot.IngotError) as caught:
            ingot.apply_delta({**base, "a.weight": strided}, path)
        assert caught.value.rule == "delta.layout"
        with pytest.raises(ingot.IngotError) as caught:
            ingot.apply_delta({**base, "a.weight": [1, 2]}, path)
        assert caught.value.rule == "delta.layout"

    def test_weights_are_no_delta(self, base, tmp_path):
        self.refused("delta.none", base, tmp_path / "base.zt")

    @pytest.mark.parametrize("undo", [True, False])
    @pytest.mark.parametrize("strategy", ["exact", "int4"])
    def test_damage_leaves_everything_as_it_was(self, base, tmp_path, strategy, undo):
        path = delta_to(tmp_path, near(base, 1), strategy)
        with ingot.open(path) as delta:
            part = list(delta["c.weight"].parts.values())[-1 if strategy == "exact" else 0]
            place = part.offset + part.length - 3
        data = bytearray(path.read_bytes())
        data[place] ^= 0x55
        path.write_bytes(data)
        before = bits(base)
        with pytest.raises(ingot.IngotError):
            ingot.apply_delta(base, path, undo=undo, workers=1)
        assert bits(base) == before

    def test_a_base_that_is_not_named(self, base, path, tmp_path):
        with ingot.open(path) as delta:
            info = delta_of(delta.metadata)
            bare = msgspec.structs.replace(info, base=type(info.base)())
            ingot.save(tmp_path / "bare.zt", dict(delta.items()), {"delta": bare.to_metadata()})
        self.refused("delta.no-identity", base, tmp_path / "bare.zt")
        ingot.apply_delta(base, tmp_path / "bare.zt", verify_base=False).revert()

    def test_reverting_twice_or_what_was_changed_since(self, base, path):
        applied = ingot.apply_delta(base, path)
        base["a.weight"][0, 0] += 1
        after = bits(base)
        with pytest.raises(ingot.IngotError) as caught:
            applied.revert()
        assert caught.value.rule == "delta.not-applied"
        assert bits(base) == after
        applied.close()
        with pytest.raises(ingot.IngotError) as caught:
            applied.revert()
        assert caught.value.rule == "delta.reverted"


def test_no_second_copy_of_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("ingot.delta.in_place.UNDO_CHUNK", 1 << 16)
    rng = np.random.default_rng(0)
    state = {f"{n}": (rng.standard_normal((2048, 1024)) * 0.05).astype(BF16) for n in range(4)}
    ingot.save(tmp_path / "base.zt", state)
    tuned = {name: (value.astype(np.float32) * 1.01).astype(BF16) for name, value in state.items()}
    path = delta_to(tmp_path, tuned, "int4")
    tracemalloc.start()
    applied = ingot.apply_delta(state, path, workers=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    weights = sum(value.nbytes for value in state.values())
    assert applied.nbytes < 0.15 * weights
    assert peak - applied.nbytes < 0.3 * weights
