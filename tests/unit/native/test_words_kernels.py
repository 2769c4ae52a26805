"""Words turned: every instruction set gives the words of the reference, from windows at any address."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.core.runtime import native
from tests.support.reference import words

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


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (8, 16), (16, 16), (37, 5), (200, 130), (3, 0), (0, 3)])
def test_short_elements(each: int, rows: int, cols: int) -> None:
    """Into a window; what lies beside it stays."""
    given = np.random.default_rng(rows + cols).integers(0, 256, (rows, cols, each), np.uint8)
    out = np.full((cols, rows * each + 5), 0xA5, np.uint8)
    wanted = out.copy()
    wanted[:, 3 : 3 + rows * each] = given.transpose(1, 0, 2).reshape(cols, rows * each)
    native.kernels.short_turn(given.reshape(-1), each, rows, cols, out.reshape(-1), 3, out.shape[1])
    assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 8), (16, 128), (40, 136), (8, 1000), (0, 8)])
def test_lines_of_gptq_and_awq(inputs: int, outputs: int) -> None:
    """GPTQ's lines are rows of outputs turned word by word."""
    lines = np.random.default_rng(inputs).integers(0, 2**32, (inputs // 8, outputs), np.uint32)
    awq = np.ascontiguousarray(words.to_awq(words.turn(lines)))
    found, back = np.empty(awq.nbytes, np.uint8), np.empty(lines.nbytes, np.uint8)
    native.kernels.lines_turn(lines.reshape(-1).view(np.uint8), inputs // 8, outputs, True, found)
    assert found.tobytes() == awq.tobytes()
    native.kernels.lines_turn(found, inputs, outputs // 8, False, back)
    assert back.tobytes() == lines.tobytes()


def test_short_elements_and_lines_that_do_not_fit() -> None:
    given, out = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    turn, lines = native.kernels.short_turn, native.kernels.lines_turn
    for call in (
        lambda: turn(given, 4, 2, 2, out, 0, 8),
        lambda: turn(given, 2, 8, 5, out, 0, 16),
        lambda: turn(given, 2, 2**62, 4, out, 0, 16),
        lambda: turn(given, 2, 8, 4, out, 1, 16),
        lambda: turn(given, 2, 8, 4, out, 0, 14),
        lambda: lines(given, 2, 9, True, out),
        lambda: lines(given, 9, 2, False, out),
        lambda: lines(given, 3, 8, True, out),
        lambda: lines(given, 2, 8, True, out[:63]),
        lambda: lines(given, 2**61, 8, True, out),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
