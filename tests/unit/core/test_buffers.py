"""Recycled memory: a block is used again only when nobody looks at it any more."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from ingot.core.numeric import buffers
from ingot.core.numeric.buffers import MIN_POOLED, Pool, recycling, scratch, transposed


def place(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_block_comes_back_with_its_last_view() -> None:
    with recycling(1 << 24) as pool:
        first = scratch((512, 1024), np.float32)
        first[:] = 1
        where, part = place(first), first.reshape(-1)[5:100].view(np.uint8)
        data = part.data
        del first, part
        assert pool.free == 0
        other = scratch((512, 1024), np.float32)
        other[:] = 2
        assert place(other) != where
        assert bytes(data[:4]) == np.float32(1).tobytes()
        del data
        assert pool.free == 1 << 21
        again = scratch((512, 1024), ml_dtypes.bfloat16)
        assert place(again) not in (where, place(other))  # half as large: another block
        assert place(scratch((2**19,), np.float32)) == where
        assert again.flags.writeable
        assert again.flags.c_contiguous


def test_no_more_is_kept_than_allowed_and_nothing_after() -> None:
    with recycling(3 * MIN_POOLED) as pool:
        held = [scratch((MIN_POOLED,), np.uint8) for _ in range(5)]
        late = held.pop()
        held.clear()
        assert pool.free == 3 * MIN_POOLED
        large = scratch((4 * MIN_POOLED,), np.uint8)
        del large
        assert pool.free == 3 * MIN_POOLED
    assert pool.free == 0
    del late
    assert pool.free == 0


def test_small_arrays_and_arrays_outside_are_the_allocators() -> None:
    assert scratch((MIN_POOLED,), np.uint8).base is None
    with recycling(1 << 20), recycling(0):
        assert scratch((10,), np.uint8).base is None
        assert scratch((0, 3), np.float32).shape == (0, 3)
        assert scratch((), np.float64).shape == ()
        assert scratch((MIN_POOLED,), np.uint8).base is not None
    assert scratch((MIN_POOLED,), np.uint8).base is None


def test_sizes_that_are_far_apart_do_not_share() -> None:
    pool = Pool(1 << 24)
    pool.take(1 << 20)
    assert pool.free == 1 << 20
    assert pool.take(1 << 19).size == 1 << 19
    assert pool.free == (1 << 20) + (1 << 19)
    near = pool.take((1 << 20) - 9)
    assert near.size == (1 << 20) - 9
    assert pool.free == 1 << 19


def test_many_threads_never_share_a_block() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(200):
            array = scratch((MIN_POOLED,), np.uint8)
            array[::4096] = number
            if (array[::4096] != number).any():
                wrong.append(number)

    with recycling(4 * MIN_POOLED) as pool:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert 0 < pool.free <= 4 * MIN_POOLED


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (7, 5), (8, 8), (129, 33)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_rows_and_columns_change_places(shape: tuple[int, int], dtype: type) -> None:
    matrix = (
        np.arange(2 * shape[0] * shape[1]).astype(dtype).reshape(shape[0], 2 * shape[1])[:, : shape[1]]
    )  # not in one piece
    found = transposed(matrix)
    assert found.flags.c_contiguous
    assert found.dtype == dtype
    assert np.array_equal(found, matrix.T)


def test_large_arrays_begin_at_large_pages_and_belong_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_MIN_ALIGNED", 1 << 20)
    large, small = buffers.fresh((1 << 19, 1), np.float32), buffers.fresh((3, 5), ml_dtypes.bfloat16)
    assert place(large) % buffers.HUGE_PAGE == 0
    assert large.shape == (1 << 19, 1)
    assert large.flags.c_contiguous
    assert buffers.owns_memory(large)
    assert buffers.owns_memory(small)
    view = large.reshape(-1)
    assert not buffers.owns_memory(view)
    assert not buffers.owns_memory(np.frombuffer(bytes(8), np.uint8))
    del large
    assert not buffers.owns_memory(view)  # whoever holds it is not asked
    locked = buffers.fresh((1 << 20,), np.uint8)
    locked.flags.writeable = False
    assert not buffers.owns_memory(locked)


@pytest.mark.parametrize("start", [0, 1, 4097])
def test_only_what_is_entered_is_touched(start: int) -> None:
    whole = np.full(2 * buffers.HUGE_PAGE + 8192, 7, np.uint8)
    count = buffers.HUGE_PAGE + 100
    buffers.prefault(whole[start:], count)
    touched = np.flatnonzero(whole == 0)
    assert len(touched) in (1, 2)
    assert touched.min() >= start
    assert touched.max() < start + count
    assert ((place(whole) + touched + 1) % buffers.HUGE_PAGE == 0).all()
