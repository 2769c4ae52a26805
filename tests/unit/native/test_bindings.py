"""What holds for every native function: how it takes arrays, and the floating-point mode that it runs in."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ingot.core.runtime import native

Array = np.ndarray[Any, np.dtype[Any]]
kernels = native.kernels

# Where in C's fenv_t (glibc) the mode of vector arithmetic lies, and its bits that flush subnormals and round upwards.
MODES = {"x86_64": (28, "<u4", 0x8040 | 0x4000), "aarch64": (0, "<u4", 1 << 24 | 1 << 22)}


def mode_of_thread() -> int:
    place, kind, _ = MODES[platform.machine()]
    state = np.zeros(64, np.uint8)
    assert ctypes.CDLL(ctypes.util.find_library("m")).fegetenv(state.ctypes.data_as(ctypes.c_void_p)) == 0
    return int(state[place : place + 4].view(kind)[0])


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormals are flushed, as ``torch.set_flush_denormal(True)`` has it, and results are rounded up."""
    place, kind, bits = MODES[platform.machine()]
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    state = np.zeros(64, np.uint8)
    library.fegetenv(state.ctypes.data_as(ctypes.c_void_p))
    other = state.copy()
    other[place : place + 4].view(kind)[0] |= bits
    library.fesetenv(other.ctypes.data_as(ctypes.c_void_p))
    try:
        yield
    finally:
        library.fesetenv(state.ctypes.data_as(ctypes.c_void_p))


def cast_all() -> Array:
    """Every f16 to f32, subnormals of f32 to f16 and bf16, and f64 to f32."""
    halves, single = np.arange(1 << 16, dtype=np.uint16), np.empty(1 << 16, np.float32)
    kernels.cast(halves, "f16", single, "f32")
    small = np.ldexp(np.arange(1, 4096, dtype=np.float64), -149)
    found = [single.view(np.uint8)]
    for target, kind in (("f32", np.float32), ("f16", np.uint16), ("bf16", np.uint16)):
        out = np.empty(small.size, kind)
        kernels.cast(small, "f64", out, target)
        found.append(out.view(np.uint8))
    return np.concatenate(found)


def multiply() -> Array:
    """Products of subnormal scales, on four threads."""
    rows, cols = 2048, 64
    packed = np.random.default_rng(1).integers(0, 256, rows * cols // 2, np.uint8)
    scales = np.full(rows, 3 * 2.0**-24, np.float16).view(np.uint16)
    matrix = kernels.PackedMatrix(
        packed, scales, None, rows=rows, cols=cols, group=cols, bits=4, signed=True, per_tensor=False,
        row_bytes=cols // 2, offset=False, zero_point=0, scale_dtype="f16",
    )  # fmt: skip
    x, out = np.full((4, cols), 2.0**-120, np.float32), np.empty((4, rows), np.float32)
    matrix.matmul(x, None, out, "f32", "f32", 4)
    return out


@pytest.mark.skipif(platform.machine() not in MODES, reason="where the mode lies is not known here")
@pytest.mark.parametrize("run", [cast_all, multiply])
def test_subnormals_survive_a_thread_that_flushes_them(run: Callable[[], Array]) -> None:
    wanted = run()
    with flushing():
        before = mode_of_thread()
        found = run()
        assert mode_of_thread() & MODES[platform.machine()][2] == before & MODES[platform.machine()][2]
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


def strided(size: int, kind: Any) -> Array:
    return np.zeros(2 * size, kind)[::2]


def shifted(size: int, kind: Any) -> Array:
    width = np.dtype(kind).itemsize
    return np.zeros(width * size + 1, np.uint8)[1:].view(kind)


ONES, NOWHERE = np.ones(8, np.float32), np.empty(0, np.int64)
WRITERS: dict[str, Callable[[Callable[[int, Any], Array]], Any]] = {
    "cast": lambda out: kernels.cast(ONES, "f32", out(8, np.float32), "f32"),
    "top_prune": lambda out: kernels.top_prune(out(8, np.int64), np.zeros(8, np.float32), 2),
    "top_prune-values": lambda out: kernels.top_prune(np.zeros(8, np.int64), out(8, np.float32), 2),
    "top_of": lambda out: kernels.top_of(ONES, None, "f32", out(2, np.int64), np.zeros(2, np.float32)),
    "top_of-kept": lambda out: kernels.top_of(ONES, ONES, "f32", np.zeros(2, np.int64), out(2, np.float32)),
    "top_collect": lambda out: kernels.top_collect(
        ONES, None, "f32", -1, 0, out(8, np.int64), np.zeros(8, np.float32)
    ),
    "top_collect-kept": lambda out: kernels.top_collect(
        ONES, ONES, "f32", -1, 0, np.zeros(8, np.int64), out(8, np.float32)
    ),
    "sign_encode": lambda out: kernels.sign_encode(ONES, None, "f32", out(1, np.float32), np.zeros(1, np.uint8)),
    "sign_decode": lambda out: kernels.sign_decode(
        np.ones(1, np.uint8), 0, np.ones(1, np.uint32), out(8, np.uint32)
    ),
    "place_values": lambda out: kernels.place_values(np.arange(8), ONES.view(np.uint32), out(8, np.uint32)),
    "int4_decode": lambda out: kernels.int4_decode(
        np.zeros(4, np.uint8), 0, np.ones(16, np.uint32), NOWHERE, np.empty(0, np.uint32), False, out(8, np.uint32)
    ),
    "int4_add": lambda out: kernels.int4_add(
        np.zeros(4, np.uint8), 0, np.ones(16, np.float32), NOWHERE, ONES[:0], False, ONES, out(8, np.float32), None,
        False, "f32",
    ),
    "placed_add": lambda out: kernels.placed_add(
        NOWHERE, 0, ONES[:0], ONES, np.zeros(8, np.float32), out(8, np.float32), False, "f32"
    ),
    "differences": lambda out: kernels.differences(ONES, ONES, out(8, np.float32), "f32"),
    "changed_words": lambda out: kernels.changed_words(
        ONES.view(np.uint32), np.zeros(8, np.uint32), out(8, np.int64), np.zeros(8, np.uint32)
    ),
    "affine_dequantize": lambda out: kernels.affine_dequantize(
        np.ones(8, np.uint8), ONES[:1], None, out(8, np.float32)[None], layout(), "f32", "f32"
    ),
    "affine_errors": lambda out: kernels.affine_errors(
        ONES[None], "f32", 8, True, True, np.ones(1, np.float32), np.ones(1, np.float32), out(1, np.float64)
    )
    if out is shifted
    else kernels.affine_errors(
        ONES[None], "f32", 8, True, True, np.ones(2, np.float32), np.ones(2, np.float32), out(2, np.float64)
    ),
    "mask_expand": lambda out: kernels.mask_expand(np.full(1, 255, np.uint8), ONES.view(np.uint32), out(8, np.uint32)),
    "entropy_decode": lambda out: kernels.entropy_decode(
        np.zeros(16, np.uint8), np.ones(1, np.uint32), 8, out(8, np.uint32)
    ),
    "delta_apply": lambda out: kernels.delta_apply(
        np.zeros(16, np.uint8), np.ones(1, np.uint32), 8, 8, True, 23, ONES.view(np.uint32), out(8, np.uint32)
    ),
    "gather_column": lambda out: kernels.gather_column(np.zeros(128, np.uint8), 0, 0, out(8, np.float32), "f32"),
    "tca_tbe_decode": lambda out: kernels.tca_tbe_decode(
        np.zeros(2, np.uint16), *(np.zeros(64, np.uint64) for _ in range(3)), np.zeros(0, np.uint8),
        np.zeros(4096, np.uint16), 0, out(8, np.uint16).reshape(2, 4) if out is shifted else out(8, np.uint16)[None],
    ),
}  # fmt: skip


def layout(**changed: Any) -> Any:
    given = {"cols": 8, "group": 8, "bits": 8, "signed": True, "msb": False, "per_tensor": False, "row_bytes": 8}
    return kernels.AffineLayout(**{**given, **changed})


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "sign_encode"])
def test_outputs_are_never_copies(name: str) -> None:
    with pytest.raises(TypeError):
        WRITERS[name](strided)


@pytest.mark.parametrize("name", WRITERS)
def test_arrays_are_aligned(name: str) -> None:
    with pytest.raises(ValueError, match="aligned"):
        WRITERS[name](shifted)


def test_positions_may_change_meanwhile() -> None:
    """Another thread moves a position far outside while the kernel runs: checked and followed are the same numbers."""
    size = 1 << 22
    positions, values = np.arange(size), np.ones(size, np.uint32)
    out, stop = np.zeros(size, np.uint32), threading.Event()

    def move() -> None:
        while not stop.is_set():
            positions[-1] = 1 << 45
            positions[-1] = size - 1

    other = threading.Thread(target=move)
    other.start()
    try:
        for _ in range(8):
            try:
                kernels.place_values(positions, values, out)
            except ValueError:  # seen in time
                continue
    finally:
        stop.set()
        other.join()
    assert (out[:-1] == 1).all()


def test_an_instruction_set_needs_all_that_compilers_use() -> None:
    """x86-64 psABI 1.0, table 3.1, by their places in CPUID; v3 without one of them would crash at an instruction."""
    every = (0xFFFFFFFF,) * 4
    needs = {
        "v3": ((0, 0, 9, 12, 13, 19, 20, 22, 23, 27, 28, 29), (3, 5, 8), (0, 5), (1, 2)),
        "v4": ((), (16, 17, 28, 30, 31), (), (5, 6, 7)),
    }
    if platform.machine() != "x86_64":
        assert kernels.best_isa(*every) == "baseline"
        return
    assert kernels.best_isa(*every) == "v4"
    for name, below in (("v3", "baseline"), ("v4", "v3")):
        for word, places in enumerate(needs[name]):
            for place in places:
                words = list(every)
                words[word] &= ~(1 << place)
                assert kernels.best_isa(*words) == below, (name, word, place)


@pytest.mark.parametrize("group", [2**64 - 1, 2**63, 9])
def test_a_group_may_be_longer_than_a_row(group: int) -> None:
    codes, out = np.arange(16, dtype=np.uint8), np.empty((2, 8), np.float32)
    scales = np.array([1, 2], np.float32)
    kernels.affine_dequantize(codes, scales, None, out, layout(group=group), "f32", "f32")
    np.testing.assert_array_equal(out, codes.reshape(2, 8) * scales[:, None])
    base = np.zeros_like(out)
    kernels.affine_add(codes, scales, None, base, base, layout(group=group), "f32", "f32")
    np.testing.assert_array_equal(base, out)


@pytest.mark.parametrize("zero", [np.inf, -np.inf, np.nan, 3e38, -(2.0**31)])
def test_zero_points_of_any_size_may_be_given(zero: float) -> None:
    """A float becomes an integer here: only one in range may be converted (the sanitizer sees it)."""
    packed = np.zeros(8, np.uint8)
    status = kernels.affine_quantize(
        ONES[None],
        "f32",
        packed,
        np.ones(1, np.float32),
        np.full(1, zero, np.float32),
        layout(signed=False),
        "f32",
        "given",
    )
    assert status == (0, 0)


def test_a_matrix_may_be_narrower_than_a_lane() -> None:
    """One scale serves three columns, fewer than the eight codes in four bytes."""
    packed, scales = np.array([0x21, 0x03, 0x21, 0x03], np.uint8), np.array([1, 2], np.float32)
    matrix = kernels.PackedMatrix(
        packed, scales, None, rows=2, cols=3, group=3, bits=4, signed=False, per_tensor=False, row_bytes=2,
        offset=False, zero_point=0, scale_dtype="f32",
    )  # fmt: skip
    out = np.empty((1, 2), np.float32)
    matrix.matmul(np.array([[1, 10, 100]], np.float32), None, out, "f32", "f32", 1)
    np.testing.assert_array_equal(out, [[321, 642]])
