"""NumPy to torch and back: same bits, shared memory, no warning."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import ingot
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.core.runtime.memory import anonymous_rss
from ingot.errors import UnsupportedError, UsageError
from ingot.runtime.arrays.mlx import from_numpy as mlx_from_numpy
from ingot.runtime.arrays.numpy import from_numpy as numpy_from_numpy
from ingot.runtime.arrays.torch import from_numpy, to_numpy
from ingot.stores.local import LocalStore

CARRIED = tuple(row.name for row in DTYPES.values() if row.torch and hasattr(torch, row.torch))


def sample(dtype: str, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    count = int(np.prod(shape))
    if dtype == "bool":
        return (np.arange(count) % 2 == 0).reshape(shape)
    target = numpy_dtype(dtype)
    data = np.random.default_rng(0).integers(0, 256, count * target.itemsize, np.uint8)
    return data.view(target).reshape(shape)


def bits(array: np.ndarray) -> tuple[object, ...]:
    return array.dtype, array.shape, array.tobytes()


def test_the_usual_types_are_carried():
    assert set(CARRIED) >= {"bf16", "f8_e4m3fn", "f8_e5m2", "f8_e8m0fnu", "u16", "u64", "complex128", "bool"}


@pytest.mark.parametrize("dtype", CARRIED)
class TestEveryType:
    def views(self, dtype):
        array = sample(dtype)
        return [array, array.T, array[:, ::2], array[::-1], array[1, 1, ...], array[:0], array.reshape(2, 2, 6)]

    def test_bits_survive_both_ways(self, dtype):
        for view in self.views(dtype):
            tensor = from_numpy(view)
            assert str(tensor.dtype) == f"torch.{DTYPES[dtype].torch}"
            assert tuple(tensor.shape) == view.shape
            assert bits(to_numpy(tensor)) == bits(view)

    def test_writable_arrays_share_memory(self, dtype):
        array = sample(dtype)
        tensor = from_numpy(array)
        assert tensor.data_ptr() == array.ctypes.data
        assert to_numpy(tensor).ctypes.data == array.ctypes.data

    def test_read_only_arrays_over_writable_memory_share_it(self, dtype):
        source = memoryview(bytearray(sample(dtype).tobytes()))
        array = np.frombuffer(source, numpy_dtype(dtype)).reshape(4, 6)[1:, ::2]
        array.flags.writeable = False
        tensor = from_numpy(array)
        assert tensor.data_ptr() == array.ctypes.data
        assert bits(to_numpy(tensor)) == bits(array)

    def test_read_only_memory_is_copied(self, dtype):
        array = np.frombuffer(sample(dtype).tobytes(), numpy_dtype(dtype))
        tensor = from_numpy(array)
        assert tensor.data_ptr() != array.ctypes.data
        assert bits(to_numpy(tensor)) == bits(array)


def test_a_locked_array_that_owns_its_memory_is_copied():
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    from_numpy(array).add_(1)
    assert array.tolist() == [1, 1, 1, 1]


def test_a_read_only_buffer_is_copied():
    data = np.arange(4, dtype=np.float32).tobytes()
    from_numpy(np.frombuffer(memoryview(data), np.float32)).add_(1)
    assert np.frombuffer(data, np.float32).tolist() == [0, 1, 2, 3]


def test_a_private_view_of_a_mapped_file_is_shared_and_the_file_never_changes(tmp_path):
    data = np.arange(1000, dtype=np.float32).tobytes()
    (tmp_path / "a").write_bytes(data)
    source = LocalStore(tmp_path, io="mmap").open("a")
    array = np.frombuffer(source.private(400, 800), np.float32).reshape(10, 20)
    array.flags.writeable = False
    tensor = from_numpy(array)
    assert tensor.data_ptr() == array.ctypes.data
    tensor.mul_(2)
    source.close()
    assert tensor[0, 1].item() == 202
    assert (tmp_path / "a").read_bytes() == data


def test_a_tensor_keeps_the_mapping_that_it_shares_alive(tmp_path):
    np.arange(1 << 16, dtype=np.float32).tofile(tmp_path / "x")
    source = LocalStore(tmp_path, io="mmap").open("x")
    array = np.frombuffer(source.private(0, source.size), np.float32)
    array.flags.writeable = False
    tensor = from_numpy(array)
    del array
    source.close()
    assert tensor.clone()[-1] == (1 << 16) - 1


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("suffix", [".safetensors", ".zt"])
def test_what_is_written_to_a_tensor_no_later_read_gives(tmp_path, io, suffix):
    path = tmp_path / f"a{suffix}"
    ingot.save(path, {"w": np.arange(3000, dtype=np.float32), "x": np.ones(5, np.float32)})
    before = path.read_bytes()
    with ingot.open(path, io=io) as checkpoint:
        tensor = checkpoint["w"]
        for changed in (tensor.torch(), checkpoint.state_dict("pt")["w"], tensor.torch(copy=True), tensor.to("pt")):
            changed.add_(1)
            assert changed[2999] == 3000
            assert tensor.numpy()[2999] == 2999 == tensor.torch()[2999].item()
        assert not tensor.numpy().flags.writeable
        mine = tensor.numpy(copy=True)
        mine += 1
        assert (mine[0], tensor.numpy()[0]) == (1, 0)
        assert float(tensor.torch("bf16")[1]) == 1.0
    assert path.read_bytes() == before


def test_a_tensor_of_a_mapped_file_takes_no_memory_of_its_own(tmp_path):
    np.save(tmp_path / "big.npy", np.zeros(1 << 22, np.float32))
    ingot.save(tmp_path / "a.safetensors", {"w": np.load(tmp_path / "big.npy")})
    with ingot.open(tmp_path / "a.safetensors", io="mmap") as checkpoint:
        before = anonymous_rss()
        tensor = checkpoint["w"].torch()
        assert float(tensor.sum()) == 0
        assert anonymous_rss() - before < 8 << 20


def test_big_endian_arrays_reach_mlx():
    mx = pytest.importorskip("mlx.core")
    for dtype in (">f4", ">i2", ">f2", ">i8"):
        array = np.arange(5, dtype=dtype)
        assert mlx_from_numpy(array).tolist() == [0, 1, 2, 3, 4]
    assert mlx_from_numpy(np.arange(5, dtype=">f4")).dtype == mx.float32


def test_other_byte_orders_are_converted():
    array = np.arange(5, dtype=">i4")
    assert from_numpy(array).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", [ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn])
def test_types_that_torch_has_not_are_refused(dtype):
    with pytest.raises(UnsupportedError) as caught:
        from_numpy(np.zeros(2, dtype))
    assert caught.value.rule == "adapter.dtype"


def test_devices():
    array = np.ones(3, np.float32)
    assert from_numpy(array, "cpu").data_ptr() == array.ctypes.data
    assert from_numpy(array, torch.device("meta")).device.type == "meta"
    assert numpy_from_numpy(array) is array
    with pytest.raises(UsageError):
        numpy_from_numpy(array, "cuda")


def test_what_is_special_about_tensors():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert to_numpy(weight).tolist() == [[1, 1], [1, 1]]
    conjugated = torch.tensor([1 + 2j]).conj()
    assert to_numpy(conjugated).tolist() == [1 - 2j]
    with pytest.raises(UnsupportedError) as caught:
        to_numpy(torch.ones(2, 2).to_sparse())
    assert caught.value.rule == "adapter.layout"
