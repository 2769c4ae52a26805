"""diff and patch: the fine-tune comes back, from any container, under any chain; what does not fit is refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.codecs.delta.base import delta_codec
from ingot.core.runtime.progress import ProgressEvent
from ingot.delta.proof import Proof
from ingot.delta.strategy import Storage, choices
from ingot.engine import resources as cost
from ingot.engine.diff_step import Diff
from ingot.engine.work import ChunkBudget, encoded_spec
from ingot.model.delta import DeltaInfo, delta_of
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor

deltatensors = pytest.importorskip("deltatensors")

BF16 = ml_dtypes.bfloat16
Weights = dict[str, np.ndarray]


def nudged(array: np.ndarray, seed: int, scale: float = 0.1) -> np.ndarray:
    """A fine-tune of one tensor."""
    noise = np.random.default_rng(seed).standard_normal(array.shape) * scale * 0.05
    return (array.astype(np.float32) + noise.astype(np.float32)).astype(array.dtype)


def tuned_of(base: Weights, seed: int = 1) -> Weights:
    """A fine-tune of a model: every matrix but one differs, no norm does."""
    same = {"lm_head.weight"}
    return {
        name: nudged(array, seed) if array.ndim == 2 and name not in same else array for name, array in base.items()
    }


def id_of(path: Path) -> str:
    with ingot.open(path) as checkpoint:
        return content_id(checkpoint)


def info_of(path: Path) -> DeltaInfo:
    with ingot.open(path) as checkpoint:
        info = delta_of(checkpoint.metadata)
    assert info is not None
    return info


def same(a: Path, b: Path) -> bool:
    """Whether two checkpoints have the same tensors, NaN payloads and all."""
    return id_of(a) == id_of(b)


def redescribed(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a delta with another description of itself."""
    with ingot.open(source) as delta:
        info = msgspec.structs.replace(delta_of(delta.metadata), **changes)
        ingot.save(target, dict(delta.items()), {**delta.metadata, "delta": info.to_metadata()})
    return target


@pytest.fixture(autouse=True)
def _small_matrices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.delta.strategy.SMALL", 1000)


@pytest.fixture
def tuned(tmp_path: Path, weights: Weights) -> Path:
    folder = tmp_path / "tuned"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", tuned_of(weights), {"format": "pt", "note": "tuned"})
    (folder / "config.json").write_text('{"tuned": true}')
    return folder


def every_case() -> tuple[Weights, Weights]:
    """All that may happen to a tensor, in every element type, with values that no arithmetic would keep."""
    rng = np.random.default_rng(0)
    base: Weights = {}
    tuned: Weights = {}
    for dtype in (np.float64, np.float32, np.float16, BF16, np.int64, np.int8, np.uint16, ml_dtypes.float8_e4m3fn):
        kind = np.dtype(dtype)
        for shape in ((70, 50), (33,)):
            name = f"{kind.name}.{len(shape)}"
            base[name] = rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).reshape(-1).view(kind).reshape(shape)
            tuned[name] = base[name].copy()
            tuned[name].reshape(-1)[::3] = tuned[name].reshape(-1)[1]
    base["bool"], tuned["bool"] = np.array([True, False]), np.array([True, True])
    base["complex"], tuned["complex"] = np.ones(3, np.complex64), np.full(3, 2j, np.complex64)
    base["scalar"], tuned["scalar"] = np.array(1.5, np.float32), np.array(2.5, np.float32)
    base["empty"] = tuned["empty"] = np.zeros((0, 4), BF16)
    base["same"] = tuned["same"] = np.full((4, 4), np.nan, np.float32)
    base["reshaped"], tuned["reshaped"] = np.ones((4, 6), BF16), np.ones((6, 4), BF16)
    base["retyped"], tuned["retyped"] = np.ones(4, BF16), np.ones(4, np.float32)
    base["grown"], tuned["grown"] = np.ones((40, 6), BF16), np.full((43, 6), 2, BF16)
    base["shrunk"], tuned["shrunk"] = np.arange(9), np.arange(7)
    base["both"], tuned["both"] = np.full((40, 6), 1e-30, np.float64), np.full((43, 6), -0.0, np.float16)
    base["removed"] = np.ones(3, np.int8)
    tuned["added"] = rng.standard_normal((300, 100)).astype(BF16)
    return base, tuned


class TestExact:
    def test_every_case_comes_back(self, tmp_path):
        base, tuned = every_case()
        ingot.save(tmp_path / "base.zt", base)
        ingot.save(tmp_path / "tuned.zt", tuned)
        report = ingot.diff(tmp_path / "base.zt", tmp_path / "tuned.zt", tmp_path / "delta.zt")
        ops = {item.name: item.op for item in report.tensors}
        assert {name for name, op in ops.items() if op == "replace"} == {"reshaped", "added", "complex"}
        assert {name for name, op in ops.items() if op == "same"} == {"same", "empty"}
        assert report.removed == ["removed"]
        assert report.exact
        done = ingot.patch(tmp_path / "base.zt", tmp_path / "delta.zt", tmp_path / "out.zt", verify=True)
        assert done.verified
        assert done.result_id == report.result_id == id_of(tmp_path / "tuned.zt")
        with ingot.open(tmp_path / "out.zt") as out:
            for name, array in tuned.items():
                assert out[name].numpy().tobytes() == array.tobytes(), name
                assert out[name].shape == array.shape
            assert list(out) == list(tuned)

    def test_the_report_and_the_file_say_the_same(self, model, tuned, tmp_path):
        report = ingot.diff(model, tuned, tmp_path / "delta.zt")
        info = info_of(tmp_path / "delta.zt")
        assert info.base.content == report.base_id == id_of(model)
        assert info.result.content == report.result_id == id_of(tuned)
        with ingot.open(tmp_path / "delta.zt") as delta:
            assert {name: tensor.nbytes for name, tensor in delta.items()} == {
                item.name: item.nbytes for item in report.tensors if item.op != "same"
            }
        assert report.size == (tmp_path / "delta.zt").stat().st_size
        assert report.share < 0.75

    def test_nothing_is_stored_of_what_is_the_same(self, model, tmp_path):
        report = ingot.diff(model, model, tmp_path / "delta.zt")
        assert set(report.ops) == {"same"}
        with ingot.open(tmp_path / "delta.zt") as delta:
            assert len(delta) == 0
        ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.safetensors", verify=True)
        assert same(tmp_path / "out.safetensors", model)

    def test_layouts_and_containers_do_not_matter(self, model, tuned, tmp_path):
        ingot.convert(model, tmp_path / "base.zt", recipe="lossless")
        ingot.convert(model, tmp_path / "sharded", format="safetensors", max_shard="100KB")
        ingot.convert(tuned, tmp_path / "tuned.squizd")
        ingot.diff(tmp_path / "base.zt", tmp_path / "tuned.squizd", tmp_path / "a.zt")
        ingot.diff(model, tuned, tmp_path / "b.zt")
        a, b = info_of(tmp_path / "a.zt"), info_of(tmp_path / "b.zt")
        assert (a.base, a.result) == (b.base, b.result)
        for number, base in enumerate((model, tmp_path / "base.zt", tmp_path / "sharded")):
            out = tmp_path / f"out{number}.safetensors"
            ingot.patch(base, tmp_path / ("a.zt", "b.zt")[number % 2], out, verify=True)
            assert same(out, tuned)

    def test_chunks_and_threads_do_not_show(self, model, tuned, tmp_path, monkeypatch):
        ingot.diff(model, tuned, tmp_path / "a.zt")
        monkeypatch.setattr(cost, "CHUNK_ELEMENTS", 500)
        monkeypatch.setattr("ingot.engine.resources.CHUNK_ELEMENTS", 500)
        ingot.diff(model, tuned, tmp_path / "b.zt", threads=1)
        assert (tmp_path / "a.zt").read_bytes() == (tmp_path / "b.zt").read_bytes()
        ingot.patch(model, tmp_path / "b.zt", tmp_path / "out.safetensors", threads=3, verify=True)
        assert same(tmp_path / "out.safetensors", tuned)


class TestLossy:
    @pytest.mark.parametrize("strategy", ["int8", "int4", "int2"])
    def test_what_is_promised_comes_out(self, model, tuned, tmp_path, strategy):
        report = ingot.diff(model, tuned, tmp_path / "delta.zt", strategy)
        assert not report.exact
        done = ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out", verify=True)
        assert done.result_id == report.result_id == id_of(tmp_path / "out")
        found = {item.name: item.stats for item in ingot.compare(tuned, tmp_path / "out").tensors}
        for item in report.tensors:
            assert item.exact == (found[item.name].different == 0) or not item.exact
            if item.error:
                assert item.error == pytest.approx(found[item.name].summary())

    def test_fewer_bits_are_smaller_and_worse(self, model, tuned, tmp_path):
        reports = [ingot.diff(model, tuned, tmp_path / f"{bits}.zt", f"int{bits}") for bits in (8, 4, 2)]
        sizes = [report.size for report in reports]
        assert sizes == sorted(sizes, reverse=True)
        errors = [report.worst.error["rms"] for report in reports if report.worst]
        assert errors == sorted(errors)

    def test_options_go_to_matrices(self, model, tuned, tmp_path):
        fine = ingot.diff(model, tuned, tmp_path / "a.zt", "int4", options={"group": 16})
        coarse = ingot.diff(model, tuned, tmp_path / "b.zt", "int4", options={"group": 96})
        assert fine.size > coarse.size

    def test_single_tensors_may_go_another_way(self, model, tuned, tmp_path):
        name = "model.layers.0.mlp.up_proj.weight"
        storages = {name: Storage("affine", {"bits": 8, "group": "row"})}
        report = ingot.diff(model, tuned, tmp_path / "delta.zt", storages=storages)
        found = {item.name: item.codec for item in report.tensors if item.op == "apply"}
        assert found.pop(name) == "affine"
        assert set(found.values()) == {"delta_exact"}
        ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.zt", verify=True)

    @pytest.mark.parametrize("who", ["base", "tuned"])
    def test_a_nan_is_refused_and_nothing_is_left(self, weights, tmp_path, strays, who):
        pair = {"base": dict(weights), "tuned": tuned_of(weights)}
        name = "model.layers.1.mlp.up_proj.weight"
        pair[who][name] = nudged(pair[who][name], 5)
        pair[who][name][3, 4] = np.nan
        for key, arrays in pair.items():
            ingot.save(tmp_path / f"{key}.safetensors", arrays)
        paths = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
        with pytest.raises(ingot.IngotError) as caught:
            ingot.diff(*paths, tmp_path / "delta.zt", "int8")
        assert caught.value.rule == "affine.non-finite"
        assert name in str(caught.value)
        assert not (tmp_path / "delta.zt").exists()
        assert strays() == []
        ingot.diff(*paths, tmp_path / "delta.zt", "exact")
        ingot.patch(paths[0], tmp_path / "delta.zt", tmp_path / "out.zt", verify=True)
        assert same(tmp_path / "out.zt", paths[1])

    def test_the_error_need_not_be_measured(self, model, tuned, tmp_path):
        report = ingot.diff(model, tuned, tmp_path / "delta.zt", "int4", measure=False)
        assert all(item.error is None for item in report.tensors)
        assert report.result_id is not None
        assert not report.exact


class TestRefusals:
    @pytest.fixture
    def delta(self, model, tuned, tmp_path) -> Path:
        ingot.diff(model, tuned, tmp_path / "delta.zt")
        return tmp_path / "delta.zt"

    def refused(self, rule: str, call: Callable[[], Any]) -> ingot.IngotError:
        with pytest.raises(ingot.IngotError) as caught:
            call()
        assert caught.value.rule == rule
        return caught.value

    def wrong_base(self, weights: Weights, tmp_path: Path, name: str = "model.layers.2.mlp.down_proj.weight") -> Path:
        wrong = {**weights, name: weights[name].copy()}
        wrong[name].reshape(-1).view(np.uint16)[-1] ^= 1
        ingot.save(tmp_path / "wrong.safetensors", wrong)
        return tmp_path / "wrong.safetensors"

    @pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "lm_head.weight", "model.norm.weight"])
    @pytest.mark.parametrize("strategy", ["exact", "int4"])
    def test_one_wrong_bit_in_the_base(self, model, tuned, weights, tmp_path, strays, name, strategy):
        ingot.diff(model, tuned, tmp_path / "delta.zt", strategy)
        wrong = self.wrong_base(weights, tmp_path, name)
        out = tmp_path / "out.safetensors"
        self.refused("delta.base", lambda: ingot.patch(wrong, tmp_path / "delta.zt", out))
        assert not out.exists()
        assert strays() == []

    def test_a_base_of_other_values_altogether(self, delta, weights, tmp_path):
        ingot.save(tmp_path / "other.safetensors", tuned_of(weights, 9))
        out = tmp_path / "out.safetensors"
        self.refused("delta.base", lambda: ingot.patch(tmp_path / "other.safetensors", delta, out))
        assert not out.exists()

    def test_who_trusts_the_base_may_say_so(self, model, tuned, weights, tmp_path):
        ingot.diff(model, tuned, tmp_path / "delta.zt", "int8")
        wrong, out = self.wrong_base(weights, tmp_path), tmp_path / "out.safetensors"
        ingot.patch(wrong, tmp_path / "delta.zt", out, verify_base=False)
        assert out.exists()
        call = lambda: ingot.patch(wrong, tmp_path / "delta.zt", tmp_path / "b.zt", verify_base=False, verify=True)  # noqa: E731
        self.refused("delta.result", call)
        assert not (tmp_path / "b.zt").exists()

    def test_other_names_shapes_and_types(self, delta, weights, tmp_path):
        name = "model.layers.0.mlp.up_proj.weight"
        for changed in (
            {key: value for key, value in weights.items() if key != name},
            {**weights, "extra": np.zeros(3, np.float32)},
            {**weights, name: weights[name][:-1]},
            {**weights, name: weights[name].astype(np.float32)},
            {**weights, "model.norm.weight": weights["model.norm.weight"].astype(np.float32)},
        ):
            ingot.save(tmp_path / "base.zt", changed)
            self.refused("delta.base", lambda: ingot.patch(tmp_path / "base.zt", delta, tmp_path / "out.zt"))

    def test_what_is_no_delta_and_what_is_one(self, delta, model, tuned, tmp_path):
        out = tmp_path / "out.zt"
        self.refused("delta.none", lambda: ingot.patch(model, tuned, out))
        self.refused("delta.of-delta", lambda: ingot.patch(delta, delta, out))
        self.refused("delta.of-delta", lambda: ingot.diff(delta, tuned, out))
        self.refused("patch.option", lambda: ingot.patch(model, [], out))
        self.refused("delta.container", lambda: ingot.diff(model, tuned, tmp_path / "out.squizd"))
        self.refused("delta.strategy", lambda: ingot.diff(model, tuned, tmp_path / "out.safetensors", "exact"))
        self.refused("delta.strategy", lambda: ingot.diff(model, tuned, out, "int5"))
        self.refused("diff.option", lambda: ingot.diff(model, tuned, out, bits=4))
        self.refused("patch.option", lambda: ingot.patch(model, delta, out, threads=0))
        self.refused("convert.same-path", lambda: ingot.patch(model, delta, delta))
        self.refused("convert.same-path", lambda: ingot.patch(model, delta, model / "model.safetensors"))

    def test_a_description_that_does_not_fit_the_file(self, delta, model, tmp_path):
        info = info_of(delta)
        name = next(name for name, change in info.tensors.items() if change.op == "apply")
        change = info.tensors[name]
        cases = [
            ("delta.tensor", {**info.tensors, "ghost": type(change)("replace", "f32")}),
            ("delta.tensor", {**info.tensors, name: type(change)("same", "bf16")}),
            ("delta.base", {**info.tensors, "ghost": type(change)("same", "f32")}),
            ("delta.base", {**info.tensors, name: type(change)("apply", "f32")}),
            ("delta.op", {**info.tensors, name: type(change)("xor", "bf16")}),
        ]
        for rule, tensors in cases:
            bad = redescribed(delta, tmp_path / "bad.zt", tensors=tensors)
            if rule in ("delta.tensor", "delta.op"):
                assert rule in {item.rule for item in ingot.verify(bad) if item.level == "error"}
            self.refused(rule, lambda bad=bad: ingot.patch(model, bad, tmp_path / "out.zt"))
        bad = redescribed(delta, tmp_path / "bad.zt", version=3)
        self.refused("delta.version", lambda: ingot.patch(model, bad, tmp_path / "out.zt"))
        with ingot.open(delta) as opened:
            ingot.save(tmp_path / "bad.zt", dict(opened.items()), {"delta": {"version": "one"}})
        self.refused("delta.metadata", lambda: ingot.patch(model, tmp_path / "bad.zt", tmp_path / "out.zt"))

    def test_a_delta_that_names_no_base_or_result(self, delta, model, tmp_path):
        info = info_of(delta)
        unnamed = redescribed(delta, tmp_path / "unnamed.zt", base=type(info.base)(), result=type(info.base)())
        out = tmp_path / "out.zt"
        self.refused("delta.no-identity", lambda: ingot.patch(model, unnamed, out))
        self.refused("delta.no-result", lambda: ingot.patch(model, unnamed, out, verify_base=False, verify=True))
        ingot.patch(model, unnamed, out, verify_base=False)
        assert id_of(out) == info.result.content

    def test_damage_is_seen_before_anything_is_published(self, delta, model, tmp_path, strays):
        with ingot.open(delta) as opened:
            part = opened["model.layers.1.mlp.gate_proj.weight"].parts["planes"]
            place = part.offset + part.length // 2
        data = bytearray(delta.read_bytes())
        data[place] ^= 0x10
        delta.write_bytes(data)
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(model, delta, tmp_path / "out.zt")
        assert str(caught.value.rule).startswith(("part.", "delta_exact."))
        assert not (tmp_path / "out.zt").exists()
        assert strays() == []

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
    def test_cut_off_anywhere(self, delta, model, tmp_path, share):
        data = delta.read_bytes()
        delta.write_bytes(data[: int(share * len(data))])
        with pytest.raises(ingot.IngotError):
            ingot.patch(model, delta, tmp_path / "out.zt")
        assert not (tmp_path / "out.zt").exists()


class TestChains:
    @pytest.fixture
    def chain(self, model, weights, tmp_path) -> list[Path]:
        """Three steps: an exact one, a lossy one from what the first gives, one that adds, removes and replaces."""
        first = tuned_of(weights, 1)
        ingot.save(tmp_path / "m1.zt", first)
        ingot.diff(model, tmp_path / "m1.zt", tmp_path / "d1.zt")
        ingot.save(tmp_path / "wanted.zt", tuned_of(first, 2))
        ingot.diff(tmp_path / "m1.zt", tmp_path / "wanted.zt", tmp_path / "d2.zt", "int4")
        ingot.patch(tmp_path / "m1.zt", tmp_path / "d2.zt", tmp_path / "m2.zt")
        with ingot.open(tmp_path / "m2.zt") as second:
            third = {name: tensor.numpy() for name, tensor in second.items()}
        third["new"] = np.arange(5.0)
        third["model.norm.weight"] = np.ones(7, np.float32)
        del third["model.layers.0.mlp.up_proj.weight"]
        third["lm_head.weight"] = nudged(third["lm_head.weight"], 3)
        ingot.save(tmp_path / "m3.zt", third)
        ingot.diff(tmp_path / "m2.zt", tmp_path / "m3.zt", tmp_path / "d3.zt")
        return [tmp_path / f"d{number}.zt" for number in (1, 2, 3)]

    def test_three_links(self, model, chain, tmp_path):
        report = ingot.patch(model, chain, tmp_path / "out.zt", verify=True)
        assert same(tmp_path / "out.zt", tmp_path / "m3.zt")
        assert report.result_id == id_of(tmp_path / "m3.zt")
        ingot.patch(model, chain[:2], tmp_path / "out2.zt", verify=True)
        assert same(tmp_path / "out2.zt", tmp_path / "m2.zt")

    @pytest.mark.parametrize("order", [(1, 0, 2), (0, 2), (1,), (0, 0), (0, 2, 1), (2, 1, 0)])
    def test_wrong_orders(self, model, chain, tmp_path, order):
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(model, [chain[number] for number in order], tmp_path / "out.zt")
        assert caught.value.rule == "delta.base"
        assert not (tmp_path / "out.zt").exists()

    @pytest.mark.parametrize("unnamed", [(0,), (1,), (0, 1), (0, 1, 2)])
    def test_results_that_are_not_stated_are_computed(self, model, chain, tmp_path, unnamed):
        links = list(chain)
        for number in unnamed:
            identity = type(info_of(chain[number]).result)()
            links[number] = redescribed(chain[number], tmp_path / f"u{number}.zt", result=identity)
        ingot.patch(model, links, tmp_path / "out.zt", verify=2 not in unnamed)
        assert same(tmp_path / "out.zt", tmp_path / "m3.zt")

    def test_a_wrong_link_is_seen_without_stated_results(self, model, chain, weights, tmp_path):
        ingot.save(tmp_path / "other.zt", tuned_of(weights, 7))
        ingot.diff(model, tmp_path / "other.zt", tmp_path / "o.zt", "int8")
        identity = type(info_of(chain[0]).result)()
        other = redescribed(tmp_path / "o.zt", tmp_path / "u.zt", result=identity)
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(model, [other, chain[1]], tmp_path / "out.zt")
        assert caught.value.rule == "delta.base"
        assert "delta 1" in str(caught.value)
        assert not (tmp_path / "out.zt").exists()


class TestSurroundings:
    def test_a_folder_is_like_the_base(self, model, tuned, tmp_path):
        ingot.diff(model, tuned, tmp_path / "delta.zt")
        report = ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out")
        assert report.format == "safetensors"
        assert (tmp_path / "out" / "config.json").read_text() == (model / "config.json").read_text()
        with ingot.open(tmp_path / "out") as out:
            assert out.metadata == {"format": "pt", "note": "tuned"}

    def test_element_types_may_be_asked_for(self, model, tuned, tmp_path):
        ingot.diff(model, tuned, tmp_path / "delta.zt")
        ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.zt", dtype="float32", verify=True)
        with ingot.open(tmp_path / "out.zt") as out, ingot.open(tuned) as wanted:
            for name, tensor in wanted.items():
                assert out[name].dtype == "f32"
                assert np.array_equal(out[name].numpy(), tensor.numpy("f32"))

    def test_a_delta_moves_to_another_file(self, model, tuned, tmp_path):
        ingot.diff(model, tuned, tmp_path / "a.zt", "int4")
        report = ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", digest="sha256")
        assert set(report.actions) == {"moved"}
        ingot.patch(model, tmp_path / "b.zt", tmp_path / "out.zt", verify=True)

    def test_a_delta_of_dense_parts_moves_to_safetensors(self, model, weights, tmp_path):
        more = {**weights, "new": np.arange(6, dtype=np.float32)}
        ingot.save(tmp_path / "more.zt", more)
        ingot.diff(model, tmp_path / "more.zt", tmp_path / "a.zt")
        ingot.convert(tmp_path / "a.zt", tmp_path / "b.safetensors")
        ingot.patch(model, tmp_path / "b.safetensors", tmp_path / "out.zt", verify=True)
        assert same(tmp_path / "out.zt", tmp_path / "more.zt")

    def test_a_difference_alone_has_no_values(self, model, tuned, tmp_path):
        ingot.diff(model, tuned, tmp_path / "delta.zt")
        with ingot.open(tmp_path / "delta.zt") as delta:
            tensor = next(iter(delta.values()))
            assert tensor.codec == "delta_exact"
            with pytest.raises(ingot.IngotError) as caught:
                tensor.numpy()
        assert caught.value.rule == "delta_exact.base"
        assert [item.level for item in ingot.verify(tmp_path / "delta.zt")] == []

    def test_a_full_disk(self, model, tuned, tmp_path, strays, monkeypatch):
        ingot.diff(model, tuned, tmp_path / "delta.zt")
        real, left = os.pwrite, [100_000]

        def pwrite(descriptor: int, data: bytes, offset: int) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            return real(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        calls = (
            lambda: ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out"),
            lambda: ingot.diff(model, tuned, tmp_path / "second.zt"),
        )
        for call in calls:
            left[0] = 100_000
            with pytest.raises(ingot.IngotError) as caught:
                call()
            assert caught.value.rule == "store.disk-full"
        monkeypatch.undo()
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "second.zt").exists()
        assert strays() == []

    def test_interrupted(self, model, tuned, tmp_path, strays):
        ingot.diff(model, tuned, tmp_path / "delta.zt")

        def stop(event: ProgressEvent) -> None:
            if event.processed > event.total / 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ingot.diff(model, tuned, tmp_path / "second.zt", progress=stop)
        with pytest.raises(KeyboardInterrupt):
            ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.zt", progress=stop)
        assert not (tmp_path / "second.zt").exists()
        assert not (tmp_path / "out.zt").exists()
        assert strays() == []

    def test_progress_ends_at_its_total(self, model, tuned, tmp_path):
        events: list[ProgressEvent] = []
        ingot.diff(model, tuned, tmp_path / "delta.zt", progress=events.append)
        assert events[-1].processed == events[-1].total
        events.clear()
        ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.zt", progress=events.append)
        assert events[-1].processed == events[-1].total

    def test_a_ceiling_that_nothing_fits_under(self, model, tuned, tmp_path, strays):
        ingot.diff(model, tuned, tmp_path / "delta.zt")
        for call in (
            lambda: ingot.diff(model, tuned, tmp_path / "second.zt", max_ram="1MB"),
            lambda: ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.zt", max_ram="1MB"),
        ):
            with pytest.raises(ingot.IngotError) as caught:
                call()
            assert caught.value.rule == "ram.ceiling"
        assert strays() == []

    def test_packed_types_move(self, tmp_path):
        spec = {"x": np.arange(8, dtype=np.uint8)}
        for name, value in (("base", 0), ("tuned", 1)):
            header = (
                b'{"x":{"dtype":"F4","shape":[16],"data_offsets":[0,8]},'
                b'"y":{"dtype":"F4","shape":[4],"data_offsets":[8,10]}}'
            )
            data = len(header).to_bytes(8, "little") + header + bytes(spec["x"] ^ value) + b"ab"
            (tmp_path / f"{name}.safetensors").write_bytes(data)
        base, tuned = tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"
        report = ingot.diff(base, tuned, tmp_path / "delta.zt")
        assert report.ops == {"replace": 1, "same": 1}
        ingot.patch(base, tmp_path / "delta.zt", tmp_path / "out.safetensors", verify=True)
        assert same(tmp_path / "out.safetensors", tuned)


class TestWdelta:
    @pytest.fixture
    def pair(self, model, tuned, tmp_path) -> tuple[Path, Path]:
        ingot.convert(tuned, tmp_path / "tuned-shards", format="safetensors", max_shard="150KB")
        return model / "model.safetensors", tmp_path / "tuned-shards"

    @pytest.mark.parametrize("strategy", ["sparse", "quantized", "int4"])
    def test_round_trip(self, pair, tmp_path, strategy, monkeypatch):
        report = ingot.diff(*pair, tmp_path / "x.wdelta", strategy)
        assert report.parent_hash == info_of(tmp_path / "x.wdelta").base.hashes["wdelta"]
        assert set(report.ops) == {"apply"}
        monkeypatch.setattr(Proof, "_parent", None)  # the hash comes on the way, in the first order
        monkeypatch.setattr(Proof, "_matches_other_order", None)
        monkeypatch.setattr("ingot.engine.resources.CHUNK_ELEMENTS", 700)
        ingot.patch(pair[0], tmp_path / "x.wdelta", tmp_path / "out.safetensors", threads=3)
        found = {item.name: item.stats for item in ingot.compare(pair[1], tmp_path / "out.safetensors").tensors}
        for item in report.tensors:
            assert item.error is None or item.error == pytest.approx(found[item.name].summary())

    @pytest.mark.parametrize("strategy", ["sparse", "int4"])
    def test_large_tensors_go_in_chunks_to_the_same_bytes(self, pair, tmp_path, strategy, monkeypatch):
        """Errors as well; and the base in rows that were compressed, which cannot be cut anywhere."""
        whole = ingot.diff(*pair, tmp_path / "whole.wdelta", strategy)
        packed = tmp_path / "packed.zt"
        ingot.convert(pair[0], packed, recipe="lossless")
        for name, value in {"MAX_SINGLE_CHUNK": 900, "BATCH": 64, "_GRID": 200}.items():
            monkeypatch.setattr(f"ingot.codecs.delta.top.{name}", value)
        monkeypatch.setattr("ingot.engine.resources.CHUNK_ELEMENTS", 500)
        for base in (pair[0], packed):
            chunks = ingot.diff(base, pair[1], tmp_path / "chunks.wdelta", strategy, overwrite=True, threads=3)
            assert (tmp_path / "chunks.wdelta").read_bytes() == (tmp_path / "whole.wdelta").read_bytes()
            for one, other in zip(whole.tensors, chunks.tensors, strict=True):
                assert one.error is None or one.error == pytest.approx(other.error)

    @pytest.mark.parametrize("codec", ["delta_sparse", "delta_int4"])
    def test_what_chunks_will_give_is_known(self, model, tuned, tmp_path, codec, monkeypatch):
        for name, value in {"MAX_SINGLE_CHUNK": 900, "BATCH": 64, "_GRID": 200}.items():
            monkeypatch.setattr(f"ingot.codecs.delta.top.{name}", value)
        monkeypatch.setattr("ingot.engine.resources.CHUNK_ELEMENTS", 500)
        storages = {"model.layers.0.mlp.up_proj.weight": Storage(codec)}
        ingot.diff(model, tuned, tmp_path / "delta.zt", storages=storages)
        ingot.patch(model, tmp_path / "delta.zt", tmp_path / "out.zt", verify=True)

    @pytest.mark.parametrize("strategy", ["sparse", "int4"])
    def test_a_large_tensor_takes_a_chunk_of_memory(self, strategy):
        """An embedding of 1 GB, whose pages nobody touches: what is set aside is no share of it."""
        values = np.zeros((1 << 17, 1 << 12), BF16)
        tensor = Tensor("embed", values.shape, "bf16", "dense", {"data": memory_part(values, "bf16")})
        way = choices(strategy, tensor.name, tensor.shape, tensor.dtype, "wdelta")
        codec = delta_codec(way.codec)
        encoder = codec.encoder(tensor.shape, tensor.dtype, way.options)
        spec = encoded_spec(tensor.name, tensor, encoder, "raw")
        step = Diff(tensor, spec, "encoded", way.codec, base=tensor, codec=codec, encoder=encoder)
        assert step.plan_chunks(ChunkBudget(1 << 28, 5)).cost * 5 <= 1 << 28

    @pytest.mark.parametrize("sharded", [False, True])
    def test_the_peer_takes_it(self, pair, model, tmp_path, sharded):
        base = tmp_path / "base"
        ingot.convert(model, base, format="safetensors", max_shard="100KB" if sharded else None)
        ingot.diff(base, pair[1], tmp_path / "x.wdelta", "int4")
        ingot.patch(base, tmp_path / "x.wdelta", tmp_path / "out.safetensors")
        rebuilt = deltatensors.load_delta_from_paths(tmp_path / "x.wdelta", base)
        with ingot.open(tmp_path / "out.safetensors") as out:
            for name, tensor in out.items():
                assert np.array_equal(rebuilt[name].astype(BF16).view(np.uint16), tensor.numpy().view(np.uint16))

    def test_a_sharded_base_is_known_again_in_one_piece(self, pair, model, tmp_path):
        ingot.convert(model, tmp_path / "base", format="safetensors", max_shard="100KB")
        ingot.diff(tmp_path / "base", pair[1], tmp_path / "x.wdelta", "int4")
        ingot.patch(model, tmp_path / "x.wdelta", tmp_path / "a.safetensors")
        ingot.patch(tmp_path / "base", tmp_path / "x.wdelta", tmp_path / "b.safetensors")
        assert same(tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    def test_wrong_bases_and_damage(self, pair, weights, tmp_path):
        ingot.diff(*pair, tmp_path / "x.wdelta", "quantized")
        wrong = {**weights, "lm_head.weight": weights["lm_head.weight"] * BF16(2)}
        ingot.save(tmp_path / "wrong.safetensors", wrong)
        out = tmp_path / "out.safetensors"
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(tmp_path / "wrong.safetensors", tmp_path / "x.wdelta", out)
        assert caught.value.rule == "delta.base"
        data = bytearray((tmp_path / "x.wdelta").read_bytes())
        data[-40] ^= 1
        (tmp_path / "x.wdelta").write_bytes(data)
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(pair[0], tmp_path / "x.wdelta", out)
        assert caught.value.rule == "wdelta.digest-mismatch"
        assert not out.exists()

    def test_what_the_format_cannot_say(self, pair, weights, tmp_path):
        for changed in (
            {**weights, "new": np.ones(3, np.float32)},
            {name: value for name, value in weights.items() if name != "lm_head.weight"},
            {**weights, "lm_head.weight": weights["lm_head.weight"][:3]},
        ):
            ingot.save(tmp_path / "other.safetensors", changed)
            with pytest.raises(ingot.IngotError) as caught:
                ingot.diff(pair[0], tmp_path / "other.safetensors", tmp_path / "x.wdelta", "int4")
            assert caught.value.rule == "delta.keys"
        with pytest.raises(ingot.IngotError) as caught:
            ingot.diff(*pair, tmp_path / "x.wdelta", "exact")
        assert caught.value.rule == "delta.strategy"

    def test_a_chain_of_both_kinds(self, pair, tmp_path):
        ingot.diff(*pair, tmp_path / "one.wdelta", "int4")
        ingot.patch(pair[0], tmp_path / "one.wdelta", tmp_path / "m1.safetensors")
        ingot.diff(tmp_path / "m1.safetensors", pair[1], tmp_path / "two.zt")
        ingot.patch(pair[0], [tmp_path / "one.wdelta", tmp_path / "two.zt"], tmp_path / "out.zt", verify=True)
        assert same(tmp_path / "out.zt", pair[1])
        ingot.diff(pair[1], tmp_path / "m1.safetensors", tmp_path / "three.wdelta", "sparse")
        links = [tmp_path / name for name in ("one.wdelta", "two.zt", "three.wdelta")]
        ingot.patch(pair[0], links, tmp_path / "end.safetensors")
        with pytest.raises(ingot.IngotError) as caught:
            ingot.patch(pair[0], [links[0], links[2]], tmp_path / "bad.safetensors")
        assert caught.value.rule == "delta.base"


def test_version_2_hashes_sorted_names_whatever_the_shards(tmp_path: Path) -> None:
    """Version 1 goes by the base's shards, as deltatensors 0.2.0 does; version 2 does not (spec/wdelta.md)."""
    rng = np.random.default_rng(3)
    base = {name: rng.standard_normal((8, 8), np.float32) for name in ("z", "b", "a", "y")}
    tuned = {name: values + np.float32(0.01) for name, values in base.items()}
    folder = tmp_path / "base"
    folder.mkdir()
    for number, names in enumerate((("z", "a"), ("y", "b")), start=1):
        ingot.save(folder / f"model-{number:05}-of-00002.safetensors", {name: base[name] for name in names})
    places = {"z": 1, "a": 1, "y": 2, "b": 2}
    index = {name: f"model-{number:05}-of-00002.safetensors" for name, number in places.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    ingot.save(tmp_path / "tuned.safetensors", tuned)
    ordered = {}
    for layout, names in ((1, ("a", "z", "b", "y")), (2, ("a", "b", "y", "z"))):
        out = tmp_path / f"d{layout}.wdelta"
        ingot.diff(folder, tmp_path / "tuned.safetensors", out, "int4", options={"layout": layout})
        expected = hashlib.sha256(b"".join(name.encode() + base[name].tobytes() for name in names)).hexdigest()
        with ingot.open(out) as delta:
            ordered[layout] = delta.metadata["delta"]["base"]["hashes"]["wdelta"] == expected
        ingot.patch(folder, out, tmp_path / f"p{layout}.safetensors")
    assert ordered == {1: True, 2: True}


def test_what_is_equal_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((3, 300_000)).astype(np.float32)
    for name in ("a", "b"):
        ingot.save(tmp_path / f"{name}.safetensors", {f"t{index}": row for index, row in enumerate(values)})
    count, real = [0], os.preadv

    def counted(*args: Any) -> int:
        found = real(*args)
        count[0] += found
        return found

    monkeypatch.setattr(os, "preadv", counted)
    report = ingot.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "d.zt")
    assert report.ops == {"same": 3}
    assert 2 * values.nbytes <= count[0] < 2.2 * values.nbytes
    with ingot.open(tmp_path / "a.safetensors") as base:
        assert report.base_id == report.result_id == content_id(base)
