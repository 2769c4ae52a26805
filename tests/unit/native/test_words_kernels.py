"""Words turned: every instruction set gives the words of the reference, from windows at any address."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.core import native
from ingot.testing.reference import words

KERNELS = {
    "turn": (native.kernels.words_turn, words.turn),
    "from_awq": (native.kernels.words_from_awq, words.from_awq),
    "to_awq": (native.kernels.words_to_awq, words.to_awq),
}


def target(name: str, rows: int, cols: int) -> tuple[int, int]:
    """Rows and words of what a window becomes."""
    return (cols, rows) if name == "turn" else (8 * cols, rows // 8)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("rows", "cols"), [(8, 1), (16, 3), (40, 16), (136, 37), (528, 80), (8, 0), (0, 5)])
def test_windows(name: str, rows: int, cols: int) -> None:
    """From a window at an odd address into one; what lies beside it stays."""
    kernel, reference = KERNELS[name]
    matrix = np.random.default_rng(rows + cols).integers(0, 256, (rows, 4 * cols + 13), np.uint8)
    window = np.ascontiguousarray(matrix[:, 5 : 5 + 4 * cols]).view(np.uint32)
    lines, across = target(name, rows, cols)
    out = np.full((lines, 4 * across + 7), 0xA5, np.uint8)
    kernel(matrix.reshape(-1), 5, matrix.shape[1], rows, cols, out.reshape(-1), 3, out.shape[1])
    wanted = np.full_like(out, 0xA5)
    wanted[:, 3 : 3 + 4 * across] = np.ascontiguousarray(reference(window)).view(np.uint8)
    assert out.tobytes() == wanted.tobytes()


def test_the_two_of_awq_undo_each_other() -> None:
    given = np.random.default_rng(0).integers(0, 2**32, (64, 9), np.uint32)
    assert np.array_equal(words.to_awq(words.from_awq(given)), given)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("size", "start", "stride", "rows", "cols"),
    [(255, 0, 32, 8, 8), (256, 1, 32, 8, 8), (256, 0, 33, 8, 8), (256, 0, 2**63, 8, 8), (256, 0, 32, 2**61, 8)],
)
def test_what_does_not_fit(name: str, size: int, start: int, stride: int, rows: int, cols: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        KERNELS[name][0](np.zeros(size, np.uint8), start, stride, rows, cols, np.empty(256, np.uint8), 0, 32)


@pytest.mark.parametrize("name", KERNELS)
def test_where_it_does_not_fit(name: str) -> None:
    lines, across = target(name, 16, 8)
    size, stride = 4 * lines * across, 4 * across
    given = np.zeros(512, np.uint8)
    for out, start, step in ((size - 1, 0, stride), (size, 1, stride), (size, 0, stride - 1), (size, 0, 2**63)):
        with pytest.raises(ValueError, match="expected"):
            KERNELS[name][0](given, 0, 32, 16, 8, np.empty(out, np.uint8), start, step)


def test_rows_in_eights() -> None:
    for name in ("from_awq", "to_awq"):
        with pytest.raises(ValueError, match="eights"):
            KERNELS[name][0](np.zeros(36, np.uint8), 0, 4, 9, 1, np.empty(36, np.uint8), 0, 4)
