"""Sparse patches as files: TRL's two versions and bare pairs in, TRL's second out, hostile files refused by rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import ingot
from ingot.codecs.delta.sparse_patch import as_unsigned
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.model.delta import KEY, delta_of

BF16 = ml_dtypes.bfloat16
Weights = dict[str, np.ndarray]
FIRST = {"format": "sparse_weight_patch", "version": "1", "model_version": "3"}
SECOND = {**FIRST, "sparse": "True", "encoding": "raw"}
GAPS = {**SECOND, "encoding": "gap_delta"}


def st_bytes(tensors: Weights, metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file made by hand: any arrays in the order given."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    blob = b""
    for name, array in tensors.items():
        kind = resolve_dtype(array.dtype).safetensors
        data = array.tobytes()
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob


@pytest.fixture
def base() -> Weights:
    rng = np.random.default_rng(0)
    weights = {f"layers.{i}.w": (rng.standard_normal((24, 40)) * 0.02).astype(BF16) for i in range(3)}
    return {**weights, "norm": np.ones(7, BF16)}


@pytest.fixture
def tuned(base: Weights) -> Weights:
    """Some elements changed, one of them to NaN, one to minus zero; one tensor as before."""
    rng, found = np.random.default_rng(1), {name: array.copy() for name, array in base.items()}
    for name in ("layers.0.w", "layers.2.w"):
        flat = found[name].reshape(-1)
        flat[rng.permutation(flat.size)[:30]] *= BF16(1.5)
    found["layers.2.w"][0, 0] = BF16("nan")
    found["norm"][3] = BF16(-0.0)
    return found


@pytest.fixture
def files(base: Weights, tuned: Weights, tmp_path: Path) -> tuple[Path, Path]:
    ingot.save(tmp_path / "base.safetensors", base, {"format": "pt"})
    ingot.save(tmp_path / "tuned.safetensors", tuned, {"format": "pt", "note": "mine"})
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


def theirs(base: Weights, tuned: Weights, kind: str) -> bytes:
    """What a trainer writes of the elements that changed."""
    first, second = ("indices", "values") if kind in ("first", "pairs") else ("idx", "val")
    tensors: Weights = {}
    for name in base:
        at = np.flatnonzero(as_unsigned(base[name]) != as_unsigned(tuned[name]))
        if at.size:
            gaps = (np.diff(at, prepend=-1) - 1).astype(np.uint16)
            wide = at.astype(np.int64 if kind == "pairs" else np.int32)
            tensors[f"{name}.{first}"] = gaps if kind == "gaps" else wide
            tensors[f"{name}.{second}"] = tuned[name].reshape(-1)[at]
    metadata = {"first": FIRST, "raw": SECOND, "gaps": GAPS, "pairs": {"format": "pt"}}[kind]
    return st_bytes(tensors, metadata)


def same(path: Path, wanted: Weights) -> bool:
    found = load_file(path)
    return set(found) == set(wanted) and all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def stranger(patch: Path, base: Weights) -> Weights:
    """What the receiving side of TRL does, by the package safetensors alone: every pair, overwritten."""
    state = {name: array.copy() for name, array in base.items()}
    with safe_open(patch, "np") as file:
        told = file.metadata()
        assert (told["format"], told["version"], told["sparse"], told["encoding"]) == (
            "sparse_weight_patch", "1", "True", "raw"
        )  # fmt: skip
        for name in sorted(key[: -len(".val")] for key in file.keys() if key.endswith(".val")):  # noqa: SIM118
            index = file.get_tensor(f"{name}.idx")
            assert index.dtype == np.int32
            state[name].reshape(-1)[index] = file.get_tensor(f"{name}.val")
    return state


@pytest.mark.parametrize("kind", ["first", "raw", "gaps"])
def test_what_a_trainer_wrote_is_applied_and_moved(kind, base, tuned, files, tmp_path):
    patch, out = tmp_path / "patch.safetensors", tmp_path / "out.safetensors"
    patch.write_bytes(theirs(base, tuned, kind))
    with pytest.raises(ingot.IngotError) as caught:
        ingot.patch(files[0], patch, out)
    assert caught.value.rule == "delta.no-identity"
    for delta in (patch, tmp_path / "moved.zt", tmp_path / "back.safetensors"):
        if delta != patch:
            report = ingot.convert(tmp_path / "moved.zt" if delta.suffix != ".zt" else patch, delta)
            assert {item.action for item in report.tensors} == {"moved"}
        ingot.patch(files[0], delta, out, verify_base=False, overwrite=True)
        assert same(out, tuned)
        with ingot.open(out) as result:
            assert result.metadata == {"format": "pt"}
        assert ingot.verify(delta) is not None


@pytest.mark.parametrize("kind", ["first", "raw", "gaps", "pairs"])
def test_in_memory_and_back(kind, base, tuned, tmp_path):
    patch = tmp_path / "patch.safetensors"
    patch.write_bytes(theirs(base, tuned, kind))
    state = {name: array.copy() for name, array in base.items()}
    applied = ingot.apply_delta(state, patch, verify_base=False)
    assert all(state[name].tobytes() == tuned[name].tobytes() for name in base)
    applied.revert()
    assert all(state[name].tobytes() == base[name].tobytes() for name in base)


def test_bare_pairs_are_a_patch_only_where_one_is_asked_for(base, tuned, files, tmp_path):
    patch = tmp_path / "pairs.safetensors"
    patch.write_bytes(theirs(base, tuned, "pairs"))
    with ingot.open(patch) as checkpoint:
        assert KEY not in checkpoint.metadata
        assert {tensor.codec for tensor in checkpoint.values()} == {"dense"}
    ingot.patch(files[0], patch, tmp_path / "out.safetensors", verify_base=False)
    assert same(tmp_path / "out.safetensors", tuned)


def test_ours_is_exact_and_read_by_a_stranger(base, tuned, files, tmp_path):
    patch, out = tmp_path / "patch.safetensors", tmp_path / "out.safetensors"
    report = ingot.diff(*files, patch, "sparse-patch")
    assert report.exact
    assert report.ops == {"apply": 3, "same": 1}
    ingot.patch(files[0], patch, out, verify=True)
    assert same(out, tuned)
    with ingot.open(out) as result, ingot.open(files[1]) as wanted:
        assert result.metadata == wanted.metadata
    assert all(array.tobytes() == tuned[name].tobytes() for name, array in stranger(patch, base).items())
    with ingot.open(patch) as checkpoint:
        info = delta_of(checkpoint.metadata)
        assert info is not None
        assert (info.base.content, info.result.content) == (report.base_id, report.result_id)
        assert checkpoint["layers.0.w"].shape == (24, 40)
    ingot.diff(*files, tmp_path / "again.safetensors", "sparse-patch", threads=1)
    assert (tmp_path / "again.safetensors").read_bytes() == patch.read_bytes()


def test_through_zt_and_back_is_the_same_file(files, tmp_path):
    patch = tmp_path / "patch.safetensors"
    ingot.diff(*files, patch, "sparse-patch")
    ingot.diff(*files, tmp_path / "direct.zt", "sparse-patch")
    for number, delta in enumerate((patch, tmp_path / "direct.zt")):
        ingot.convert(delta, tmp_path / f"{number}.zt")
        ingot.convert(tmp_path / f"{number}.zt", tmp_path / f"{number}.safetensors")
        assert (tmp_path / f"{number}.safetensors").read_bytes() == patch.read_bytes()


def test_nothing_changed_and_a_wrong_base(base, tuned, files, tmp_path):
    ingot.diff(files[0], files[0], tmp_path / "none.safetensors", "sparse-patch")
    ingot.patch(files[0], tmp_path / "none.safetensors", tmp_path / "out.safetensors", verify=True)
    assert same(tmp_path / "out.safetensors", base)
    ingot.diff(*files, tmp_path / "patch.safetensors", "sparse-patch")
    with pytest.raises(ingot.IngotError) as caught:
        ingot.patch(files[1], tmp_path / "patch.safetensors", tmp_path / "wrong.safetensors")
    assert caught.value.rule == "delta.base"
    assert not (tmp_path / "wrong.safetensors").exists()


def test_a_chain_of_patches_and_an_exact_delta(base, tuned, files, tmp_path):
    later = {name: array.copy() for name, array in tuned.items()}
    later["layers.1.w"][5, 5] = BF16(3)
    ingot.save(tmp_path / "later.safetensors", later)
    ingot.diff(*files, tmp_path / "one.safetensors", "sparse-patch")
    ingot.diff(files[1], tmp_path / "later.safetensors", tmp_path / "two.zt")
    ingot.patch(files[0], [tmp_path / "one.safetensors", tmp_path / "two.zt"], tmp_path / "out.zt", verify=True)
    with ingot.open(tmp_path / "out.zt") as result:
        assert all(result[name].numpy().tobytes() == later[name].tobytes() for name in later)


@pytest.mark.parametrize("change", ["gone", "new", "reshaped", "retyped"])
def test_what_a_patch_cannot_say_is_refused(change, base, tuned, files, tmp_path):
    other = dict(tuned)
    if change == "gone":
        del other["norm"]
    elif change == "new":
        other["more"] = np.ones(3, BF16)
    elif change == "reshaped":
        other["norm"] = np.ones(8, BF16)
    else:
        other["norm"] = other["norm"].astype(np.float32)
    ingot.save(tmp_path / "other.safetensors", other)
    with pytest.raises(ingot.IngotError) as caught:
        ingot.diff(files[0], tmp_path / "other.safetensors", tmp_path / "patch.safetensors", "sparse-patch")
    assert caught.value.rule == "delta.keys"
    ingot.diff(files[0], tmp_path / "other.safetensors", tmp_path / "patch.zt", "sparse-patch")
    ingot.patch(files[0], tmp_path / "patch.zt", tmp_path / "out.safetensors", verify=True)
    assert same(tmp_path / "out.safetensors", other)


def test_a_tensor_that_was_sent_whole_is_replaced(base, files, tmp_path):
    whole = np.full(7, 2, BF16)
    patch = tmp_path / "patch.safetensors"
    patch.write_bytes(st_bytes({"norm": whole}, SECOND))
    ingot.patch(files[0], patch, tmp_path / "out.safetensors", verify_base=False)
    assert same(tmp_path / "out.safetensors", {**base, "norm": whole})


def test_a_trainers_whole_checkpoint_is_ordinary(base, tmp_path):
    path = tmp_path / "anchor.safetensors"
    path.write_bytes(st_bytes(base, {**SECOND, "sparse": "False"}))
    with ingot.open(path) as checkpoint:
        assert KEY not in checkpoint.metadata
        assert {tensor.codec for tensor in checkpoint.values()} == {"dense"}


AT, VALUE, WIDE = np.array([1, 2], np.int32), np.ones(2, BF16), np.array([1, 2], np.uint16)


def own(**fields: Any) -> dict[str, str]:
    return {**SECOND, "ingot": json.dumps(fields)}


HOSTILE: list[tuple[str, Weights, dict[str, str]]] = [
    ("pair", {"norm.idx": AT}, SECOND),
    ("pair", {"norm.val": VALUE}, SECOND),
    ("pair", {"norm.indices": AT}, FIRST),
    ("pair", {"norm.idx": AT, "norm.val": VALUE, "norm": np.ones(7, BF16)}, SECOND),
    ("pair", {"norm": np.ones(7, BF16), "norm.idx": AT, "norm.val": VALUE}, SECOND),
    ("shape", {"norm.idx": AT, "norm.val": np.ones(3, BF16)}, SECOND),
    ("shape", {"norm.idx": AT.reshape(2, 1), "norm.val": VALUE.reshape(2, 1)}, SECOND),
    ("index-dtype", {"norm.idx": AT.astype(np.uint8), "norm.val": VALUE}, SECOND),
    ("index-dtype", {"norm.idx": AT.astype(np.float32), "norm.val": VALUE}, SECOND),
    ("index-dtype", {"norm.idx": AT, "norm.val": VALUE}, GAPS),
    ("index-dtype", {"norm.idx": WIDE, "norm.val": VALUE}, SECOND),
    ("encoding", {"norm.idx": AT, "norm.val": VALUE}, {**SECOND, "encoding": "nvcomp_cascaded"}),
    ("version", {"norm.idx": AT, "norm.val": VALUE}, {**SECOND, "version": "2"}),
    ("metadata", {"norm.idx": AT, "norm.val": VALUE}, {**SECOND, "ingot": "{"}),
    ("metadata", {"norm.idx": AT, "norm.val": VALUE}, {**SECOND, "ingot": "[" * 100_000}),
    ("metadata", {"norm.idx": AT, "norm.val": VALUE}, own(shapes={"norm": [-7]})),
    ("metadata", {"norm.idx": AT, "norm.val": VALUE}, own(shapes={"norm": [2**40, 2**40]})),
    ("metadata", {"norm.idx": AT, "norm.val": VALUE}, own(shapes={"ghost": [7]})),
    ("metadata", {"norm.idx": AT, "norm.val": VALUE}, own(metadata={"delta": {}})),
]


@pytest.mark.parametrize(("rule", "tensors", "metadata"), HOSTILE)
def test_hostile_files_are_refused_when_opened(rule, tensors, metadata, tmp_path):
    path = tmp_path / "patch.safetensors"
    path.write_bytes(st_bytes(tensors, metadata))
    with pytest.raises(ingot.IngotError) as caught:
        ingot.open(path)
    assert caught.value.rule == f"sparse_patch.{rule}"


UNFIT: list[tuple[str, Weights, dict[str, str]]] = [
    ("sparse_patch.index", {"norm.idx": np.array([1, 7], np.int32), "norm.val": VALUE}, SECOND),
    ("sparse_patch.index", {"norm.idx": np.array([-1, 2], np.int32), "norm.val": VALUE}, SECOND),
    ("sparse_patch.index", {"norm.idx": np.array([1, 65535], np.uint16), "norm.val": VALUE}, GAPS),
    ("sparse_patch.order", {"norm.idx": np.array([2, 2], np.int32), "norm.val": VALUE}, SECOND),
    ("sparse_patch.order", {"norm.idx": np.array([2, 1], np.int64), "norm.val": VALUE}, SECOND),
    ("sparse_patch.size", {"norm.idx": np.arange(8, dtype=np.int32), "norm.val": np.ones(8, BF16)}, own(
        shapes={"norm": [7]})),
    ("delta.base", {"norm.idx": np.arange(8, dtype=np.int32), "norm.val": np.ones(8, BF16)}, SECOND),
    ("delta.base", {"norm.idx": AT, "norm.val": VALUE}, own(shapes={"norm": [8]})),
    ("delta.base", {"norm.idx": AT, "norm.val": np.ones(2, np.float16)}, SECOND),
    ("delta.base", {"ghost.idx": AT, "ghost.val": VALUE}, SECOND),
    ("delta.tensor", {"norm.idx": AT, "norm.val": VALUE}, {**SECOND, "delta": json.dumps(
        {"version": 1, "strategy": "x", "base": {}, "tensors": {}})}),
    ("delta.metadata", {"norm.idx": AT, "norm.val": VALUE}, {**SECOND, "delta": "{"}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "tensors", "metadata"), UNFIT)
def test_what_does_not_fit_its_base_is_refused_and_changes_nothing(rule, tensors, metadata, base, files, tmp_path):
    path, state = tmp_path / "patch.safetensors", {name: array.copy() for name, array in base.items()}
    path.write_bytes(st_bytes(tensors, metadata))
    calls: list[Callable[[], Any]] = [
        lambda: ingot.patch(files[0], path, tmp_path / "out.safetensors", verify_base=False),
        lambda: ingot.apply_delta(state, path, verify_base=False),
    ]
    for call in calls:
        with pytest.raises(ingot.IngotError) as caught:
            call()
        assert caught.value.rule == rule
    assert not (tmp_path / "out.safetensors").exists()
    assert all(state[name].tobytes() == base[name].tobytes() for name in base)


def test_every_truncation_is_refused(base, tuned, files, tmp_path):
    whole = theirs(base, tuned, "raw")
    path = tmp_path / "cut.safetensors"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ingot.IngotError):
            ingot.open(path)
