"""Sparse objects of SciPy and torch go into files and come back; attributes of single tensors do."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import CodecError, MissingExtraError, UnsupportedError, UsageError
from ingot.model.layouts.affine import NO_ZERO, ROWS_LSB, AffineLayout, Group
from tests.support.zt import component, manifest, tensor, zt_file

sparse = pytest.importorskip("scipy.sparse")
torch = pytest.importorskip("torch")

DENSE = np.zeros((5, 7), np.float32)
DENSE[[0, 3, 3, 4], [6, 1, 0, 6]] = [1.5, -2, 3, 0.25]


def saved(folder: Path, value: Any, **options: Any) -> ingot.Tensor:
    ingot.save(folder / "a.zt", {"w": value}, **options)
    return ingot.open(folder / "a.zt")["w"]


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "bsr", "dia", "dok", "lil"])
@pytest.mark.parametrize("container", ["array", "matrix"])
def test_every_form_of_scipy(tmp_path: Path, kind: str, container: str) -> None:
    made = saved(tmp_path, getattr(sparse, f"{kind}_{container}")(DENSE))
    assert made.codec == ("sparse_coo" if kind == "coo" else "sparse_csr")
    assert made.nbytes < DENSE.nbytes * 2
    assert np.array_equal(made.numpy(), DENSE)
    back = made.sparse("scipy")
    assert isinstance(back, sparse.coo_array if kind == "coo" else sparse.csr_array)
    assert back.dtype == np.float32
    assert np.array_equal(back.toarray(), DENSE)
    assert [item for item in ingot.verify(tmp_path / "a.zt") if item.level == "error"] == []


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_of_torch(tmp_path: Path, layout: str, dtype: str) -> None:
    whole = torch.zeros(4, 6, dtype=getattr(torch, dtype))
    whole[0, 5], whole[2, 0], whole[2, 1] = 1.5, -2, 3
    options = {"blocksize": (2, 3)} if layout.startswith("bs") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its compressed layouts beta
        value = whole.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **options)
    made = saved(tmp_path, value.requires_grad_())
    assert made.codec == ("sparse_coo" if layout == "coo" else "sparse_csr")
    assert torch.equal(made.torch(), whole)
    back = made.sparse("torch")
    assert (back.layout, back.dtype) == (torch.sparse_coo if layout == "coo" else torch.sparse_csr, whole.dtype)
    assert torch.equal(back.to_dense(), whole)
    wide = made.sparse("scipy", "f64")
    assert np.array_equal(wide.toarray(), whole.double().numpy())


def test_other_ranks_and_values(tmp_path: Path) -> None:
    cube = np.zeros((2, 3, 4), np.int64)
    cube[1, 2, 3], cube[0, 1, 0] = 2**60, -1
    for value in (sparse.coo_array(cube), torch.from_numpy(cube).to_sparse()):
        made = saved(tmp_path, value)
        assert (made.shape, made.codec, made.dtype) == ((2, 3, 4), "sparse_coo", "i64")
        assert np.array_equal(made.numpy(), cube)
        assert np.array_equal(made.sparse("scipy").toarray(), cube)
        assert np.array_equal(made.sparse("torch").to_dense().numpy(), cube)
    made = saved(tmp_path, sparse.coo_array(([1j], ([2],)), shape=(5,)))
    assert (made.shape, made.dtype, made.numpy()[2]) == ((5,), "complex128", 1j)
    nothing = saved(tmp_path, sparse.csr_array((0, 3), dtype=bool))
    assert (nothing.sparse("scipy").shape, nothing.sparse("torch").dtype) == ((0, 3), torch.bool)


def test_values_of_one_place_are_added_and_stored_zeros_stay(tmp_path: Path) -> None:
    twice = sparse.coo_array(([1.0, 2.0, 0.0], ([1, 1, 0], [2, 2, 0])), shape=(3, 3))
    made = saved(tmp_path, twice)
    assert made.numpy()[1, 2] == 3
    assert made.sparse("scipy").nnz == 2
    assert twice.nnz == 3  # the caller's object is as it was
    listed = torch.sparse_coo_tensor([[1, 1], [2, 2]], [1.0, 2.0], (3, 3), check_invariants=True)
    assert saved(tmp_path, listed).numpy()[1, 2] == 3


def test_positions_outside_the_shape_are_never_written_nor_handed_out(tmp_path: Path) -> None:
    wrong = sparse.csr_array(DENSE)
    wrong.indices[0] = 7
    with pytest.raises(CodecError) as caught:
        saved(tmp_path, wrong)
    assert caught.value.rule == "sparse_csr.index"
    assert not (tmp_path / "a.zt").exists()
    parts = {
        "values": component("f32", 64, 8),
        "indices": component("u64", 128, 16),
        "indptr": component("u64", 192, 24),
    }
    for columns, pointers, rule in (
        ([1, 2**63], [0, 1, 2], "sparse_csr.index"),
        ([1, 1], [0, 2, 2], "sparse_csr.duplicate"),
        ([1, 2], [0, 2, 1], "sparse_csr.indptr"),
        ([1, 2], [1, 1, 2], "sparse_csr.indptr"),
    ):
        blobs = {
            64: bytes(8),
            128: np.array(columns, np.uint64).tobytes(),
            192: np.array(pointers, np.uint64).tobytes(),
        }
        made = zt_file(manifest({"w": tensor((2, 3), "sparse_csr", parts)}), blobs)
        (tmp_path / "b.zt").write_bytes(made)
        for framework in ("scipy", "torch"):
            with pytest.raises(CodecError) as caught:
                ingot.open(tmp_path / "b.zt")["w"].sparse(framework)
            assert caught.value.rule == rule


def test_unsorted_positions_are_put_in_order(tmp_path: Path) -> None:
    """What is compressed may have columns in any order; torch wants them to ascend."""
    parts = {"values": component("f32", 64, 8), "coords": component("u64", 128, 32)}
    coords = np.array([1, 0, 0, 2], np.uint64)  # (1, 0) before (0, 2)
    file = zt_file(
        manifest({"w": tensor((2, 3), "sparse_coo", parts)}),
        {64: np.array([5, 6], "<f4").tobytes(), 128: coords.tobytes()},
    )
    (tmp_path / "a.zt").write_bytes(file)
    made = ingot.open(tmp_path / "a.zt")["w"]
    assert made.sparse("torch").is_coalesced()
    assert made.sparse("torch").values().tolist() == [6, 5]
    assert np.array_equal(made.sparse("scipy").toarray(), made.numpy())


def test_what_has_no_sparse_object_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saved(tmp_path, torch.eye(3, dtype=torch.bfloat16).to_sparse())
    for call, rule in (
        (lambda: made.sparse("scipy"), "adapter.dtype"),
        (lambda: saved(tmp_path, DENSE).sparse(), "tensor.sparse"),
        (lambda: saved(tmp_path, torch.zeros(2, 3, 4).to_sparse(1)), "adapter.layout"),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert caught.value.rule == rule
    with pytest.raises(UnsupportedError) as caught:  # no place for them; nothing is made dense unasked
        ingot.save(tmp_path / "a.safetensors", {"w": sparse.csr_array(DENSE)})
    assert caught.value.rule == "save.unsupported"
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(MissingExtraError):
        made.sparse("scipy", "f32")


def test_attributes_of_a_tensor_are_kept(tmp_path: Path) -> None:
    told = {"source": "layer 3", "scale": 0.5, "ranks": [1, 2], "nested": {"a": None}}
    for value in (DENSE, sparse.csr_array(DENSE)):
        made = saved(tmp_path, value, attributes={"w": told})
        assert made.params == told
        assert np.array_equal(made.numpy(), DENSE)
    again = saved(tmp_path / "..", saved(tmp_path, DENSE, attributes={"w": told}), attributes={"w": {"source": "x"}})
    assert again.params == {**told, "source": "x"}
    ingot.convert(tmp_path / "a.zt", tmp_path / "c.zt")
    assert ingot.open(tmp_path / "c.zt")["w"].params == told


def test_attributes_that_change_the_meaning_are_refused(tmp_path: Path) -> None:
    layout = AffineLayout(4, Group(2), ROWS_LSB, False, NO_ZERO, "f32", "f16")
    packed = ingot.Tensor.from_parts(
        layout, {"packed_weight": np.zeros((2, 2), np.uint8), "scales": np.ones(4, np.float16)}, (2, 4)
    )
    for value, attributes in (
        (packed, {"w": {"bits": 3}}),
        (packed, {"w": {"zero_point": 1}}),
        (sparse.csr_array(DENSE), {"w": {"dtype": "f16"}}),
        (DENSE, {"other": {"a": 1}}),
    ):
        with pytest.raises(UsageError) as caught:
            saved(tmp_path, value, attributes=attributes)
        assert caught.value.rule == "save.attributes"
    with pytest.raises(UnsupportedError) as caught:
        ingot.save(tmp_path / "a.safetensors", {"w": DENSE}, attributes={"w": {"a": 1}})
    assert caught.value.rule == "save.attributes"
    assert saved(tmp_path, packed, attributes={"w": {"from": "a calibration"}}).layout == layout
