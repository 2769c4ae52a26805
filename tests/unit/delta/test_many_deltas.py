"""Deltas of many small tensors of a few types, and one large tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
import ingot.numpy
from ingot.delta.pairs import PairMap
from ingot.errors import IngotError
from ingot.model.delta import KEY, Change, DeltaInfo, Identity, delta_of

KINDS = (("weight", (4, 6), np.float16), ("scale", (5,), np.float32), ("bias", (4,), np.float16))
CASES = [("x.wdelta", "sparse"), ("x.wdelta", "quantized"), ("x.wdelta", "int4"), ("x.zt", "exact")]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Tensors of three kinds in turn, a large one, and for a ``.zt`` some that are the same in both."""
    rng = np.random.default_rng(0)
    base: dict[str, Any] = {
        f"layers.{i}.{kind}": rng.random(shape).astype(dtype) for i in range(30) for kind, shape, dtype in KINDS
    }
    base["large.ü"] = rng.random((300, 200)).astype(np.float32)
    tuned = {name: (array + rng.normal(0, 0.1, array.shape)).astype(array.dtype) for name, array in base.items()}
    tuned["layers.7.scale"] = base["layers.7.scale"]
    ingot.save(tmp_path / "base.safetensors", base)
    ingot.save(tmp_path / "tuned.safetensors", tuned)
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


def run(pair: tuple[Path, Path], folder: Path, name: str, strategy: str, *, measure: bool) -> tuple[Any, ...]:
    folder.mkdir()
    delta, out = folder / name, folder / "out.safetensors"
    made = ingot.diff(*pair, delta, strategy=strategy, measure=measure)
    ingot.patch(pair[0], delta, out)
    tensors = [(item.name, item.op, item.nbytes, item.exact, item.error, item.unrestored) for item in made.tensors]
    return delta.read_bytes(), out.read_bytes(), tensors, made.parent_hash, made.base_id, made.result_id


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_every_tensor_is_reported_and_patched(
    pair: tuple[Path, Path], tmp_path: Path, name: str, strategy: str, measure: bool
) -> None:
    report = ingot.diff(*pair, tmp_path / name, strategy=strategy, measure=measure)
    ingot.patch(pair[0], tmp_path / name, tmp_path / "out.safetensors")
    base, tuned, patched = (ingot.numpy.load_file(path) for path in (*pair, tmp_path / "out.safetensors"))
    assert sorted(item.name for item in report.tensors) == sorted(tuned)
    for item in report.tensors:
        before, wanted, found = (arrays[item.name].astype(np.float64) for arrays in (base, tuned, patched))
        assert np.abs(found - wanted).max() <= np.abs(before - wanted).max(), item.name
        assert not item.exact or np.array_equal(found, wanted), item.name
        assert (item.error is not None) == (measure and not item.exact), item.name


def test_a_damaged_tensor_among_many_is_told(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ingot.convert(pair[0], tmp_path / "base.zt")
    with ingot.open(tmp_path / "base.zt") as checkpoint:
        offset = checkpoint["layers.21.weight"].parts["data"].offset
    data = bytearray((tmp_path / "base.zt").read_bytes())
    data[offset + 1] ^= 1
    (tmp_path / "base.zt").write_bytes(data)
    with pytest.raises(IngotError, match=r"layers\.21\.weight"):
        ingot.diff(tmp_path / "base.zt", pair[1], tmp_path / "x.wdelta", strategy="sparse")
    assert not (tmp_path / "x.wdelta").exists()


def test_pairs_are_made_when_they_are_asked_for(pair: tuple[Path, Path]) -> None:
    with ingot.open(pair[0]) as base, ingot.open(pair[1]) as tuned:
        pairs = PairMap(base, {"new": tuned["layers.0.bias"], **tuned})
        assert next(iter(pairs)) == "new"
        assert pairs["new"].base is None
        assert set(pairs) == {"new", *base}
        assert pairs["layers.3.bias"].is_same_type
        with pytest.raises(KeyError):
            pairs["none"]


def test_a_description_shares_what_becomes_of_tensors() -> None:
    changes = {f"t{i}": Change("apply", "f16" if i % 2 else "f32") for i in range(6)}
    info = DeltaInfo(1, "exact", Identity("blake3:" + "0" * 64), tensors=changes, removed=["gone"])
    said: Mapping[str, Any] = info.to_metadata()
    assert list(said) == ["version", "strategy", "base", "tensors", "removed"]
    assert said["tensors"]["t1"] is said["tensors"]["t3"]
    found = delta_of({KEY: said})
    assert found == info
    assert found is not None
    assert found.tensors["t1"] is found.tensors["t3"]


@pytest.mark.parametrize("wrong", [None, 3, {"op": "apply"}, {"op": 1, "dtype": "f32"}])
def test_a_wrong_change_among_equal_ones_is_refused(wrong: Any) -> None:
    same = {"op": "same", "dtype": "f32"}
    said = {"version": 1, "strategy": "exact", "base": {}, "tensors": {"a": same, "b": same, "c": wrong, "d": wrong}}
    with pytest.raises(IngotError) as caught:
        delta_of({KEY: said})
    assert caught.value.rule == "delta.metadata"
