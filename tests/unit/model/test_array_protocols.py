"""Tensors as arguments of NumPy, torch and MLX: ``__array__``, ``__dlpack__``, ``len`` and iteration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot import Checkpoint
from ingot.errors import UsageError

VALUES = np.linspace(-2, 2, 64 * 128, dtype="f4").reshape(64, 128)
STORED = {
    "floats": VALUES,
    "bf16": VALUES.astype(ml_dtypes.bfloat16),
    "fp8": VALUES.astype(ml_dtypes.float8_e4m3fn),
    "integers": np.arange(6, dtype="i8").reshape(2, 3),
    "booleans": np.array([True, False]),
    "scalar": np.float32(3),
    "empty": np.zeros((0, 4), "f4"),
    "complex": np.ones(3, "c8"),
}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Checkpoint]:
    ingot.save(tmp_path / "a.zt", STORED)
    with ingot.open(tmp_path / "a.zt") as checkpoint:
        yield checkpoint


@pytest.fixture
def packed(tmp_path: Path) -> Iterator[Checkpoint]:
    """A matrix in four bits."""
    ingot.save(tmp_path / "b.zt", {"model.layers.0.mlp.up_proj.weight": VALUES})
    ingot.convert(tmp_path / "b.zt", tmp_path / "packed.zt", recipe="int4")
    with ingot.open(tmp_path / "packed.zt") as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("name", STORED)
def test_numpy_accepts_a_tensor(opened: Checkpoint, name: str) -> None:
    tensor = opened[name]
    array = np.asarray(tensor)
    assert (array.dtype, array.shape) == (STORED[name].dtype, STORED[name].shape)
    assert array.tobytes() == STORED[name].tobytes()
    assert np.array_equal(tensor, tensor.numpy())  # type: ignore[arg-type]
    assert tensor.ndim == array.ndim == np.ndim(tensor)  # type: ignore[arg-type]
    assert np.shape(tensor) == tensor.shape  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", ">f4", "i4", "c8", ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["floats", "bf16", "integers"])
def test_numpy_casts_to_the_requested_type(opened: Checkpoint, name: str, dtype: object) -> None:
    array = np.asarray(opened[name], dtype=dtype)  # type: ignore[call-overload]
    assert array.dtype == np.dtype(dtype)  # type: ignore[call-overload]
    assert np.array_equal(array, STORED[name].astype(dtype))  # type: ignore[call-overload]


def test_a_packed_tensor_is_decoded_in_the_requested_type(packed: Checkpoint) -> None:
    tensor = packed["model.layers.0.mlp.up_proj.weight"]
    assert tensor.codec != "dense"
    assert np.array_equal(np.asarray(tensor, dtype="f8"), tensor.numpy("f64"))
    with pytest.raises(ValueError, match="makes a new array"):
        np.asarray(tensor, copy=False)  # type: ignore[call-overload]


def test_copies_follow_the_protocol_of_numpy_2(opened: Checkpoint) -> None:
    tensor = opened["floats"]
    assert not np.asarray(tensor, copy=False).flags.writeable  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="copy=None or copy=True"):
        np.asarray(tensor, dtype="f8", copy=False)  # type: ignore[call-overload]
    copied = np.array(tensor, copy=True)
    copied[:] = 7
    assert np.array_equal(tensor, VALUES)  # type: ignore[arg-type]


def test_the_length_is_that_of_the_first_dimension(opened: Checkpoint) -> None:
    assert (len(opened["floats"]), len(opened["empty"])) == (64, 0)
    assert all(bool(tensor) for tensor in opened.values())
    assert [row.tolist() for row in opened["integers"]] == [[0, 1, 2], [3, 4, 5]]
    for function in (len, iter):
        with pytest.raises(TypeError, match="without dimensions"):
            function(opened["scalar"])  # type: ignore[operator]


@pytest.mark.parametrize("name", STORED)
def test_torch_accepts_a_tensor(opened: Checkpoint, name: str) -> None:
    torch = pytest.importorskip("torch")
    for convert in (torch.as_tensor, torch.from_dlpack, torch.tensor):
        value = convert(opened[name])
        assert value.dtype == opened[name].torch().dtype
        assert torch.equal(value, opened[name].torch())
    value.fill_(1)
    assert np.asarray(opened[name]).tobytes() == STORED[name].tobytes()


def test_writes_through_dlpack_do_not_reach_the_file(opened: Checkpoint) -> None:
    torch = pytest.importorskip("torch")
    torch.as_tensor(opened["floats"]).fill_(9)
    assert np.array_equal(np.from_dlpack(opened["floats"]), VALUES)


def test_mlx_accepts_a_tensor(opened: Checkpoint) -> None:
    mx = pytest.importorskip("mlx.core")
    assert np.array_equal(np.array(mx.array(opened["floats"])), VALUES)
    assert mx.array(opened["bf16"]).dtype == mx.bfloat16


def test_bfloat16_without_torch_is_a_buffer_error(opened: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert np.array_equal(np.from_dlpack(opened["floats"]), VALUES)
    with pytest.raises(BufferError, match="need torch"):
        opened["bf16"].__dlpack__()
    assert opened["bf16"].__dlpack_device__() == (1, 0)


def test_frameworks_have_their_usual_names(opened: Checkpoint) -> None:
    torch = pytest.importorskip("torch")
    for name in ("torch", "pt"):
        assert isinstance(opened.state_dict(framework=name)["bf16"], torch.Tensor)
        assert isinstance(opened["bf16"].to(name), torch.Tensor)
    for name in ("numpy", "np"):
        assert isinstance(opened["floats"].to(name), np.ndarray)
    out = {"floats": np.empty_like(VALUES)}
    assert opened.state_dict("numpy", names=["floats"], out=out)["floats"] is out["floats"]
    with pytest.raises(UsageError, match="unknown framework 'tf'"):
        opened.state_dict("tf")


def test_one_text_is_no_list_of_names(opened: Checkpoint) -> None:
    with pytest.raises(UsageError, match="expected names to be a list") as error:
        opened.state_dict(names="floats")
    assert error.value.rule == "tensor.names"
