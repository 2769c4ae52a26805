"""Maps of streams: orthogonal where they are to be, undone by their inverses, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.quantization.hadamard import order_of, signs_of, transform
from ingot.quantization.maps import Chain, Parts, RepeatableMap, Rotation, Scale, both_backs, both_sides


def matrix(size: int) -> np.ndarray:
    """Return what rows are multiplied by: the images of the unit vectors are its columns."""
    return transform(np.eye(size, dtype=np.float32), order_of(size)).T.astype(np.float64)


def test_two_and_four_are_sylvesters() -> None:
    assert (matrix(2) * np.sqrt(2)).round(6).tolist() == [[1, 1], [1, -1]]
    assert (matrix(4) * 2).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, "Hadamard 1"),
        (12, "Hadamard 12"),
        (20, "Hadamard 20"),
        (28, "Hadamard 28"),
        (36, "Hadamard 36"),
        (288, "Hadamard 36 x Hadamard 8"),
        (896, "Hadamard 28 x Hadamard 32"),
        (2304, "Hadamard 36 x Hadamard 64"),
        (104, "Hadamard 104"),  # 52 would need a field of 25
        (5120, "Hadamard 20 x Hadamard 256"),
        (10, "Hartley 5 x Hadamard 2"),
        (7, "Hartley 7"),
    ],
)
def test_sizes_are_made_of_known_matrices(size: int, text: str) -> None:
    order = order_of(size)
    assert str(order) == text
    if size > 1000:
        return
    found = matrix(size)
    np.testing.assert_allclose(found @ found.T, np.eye(size), atol=2e-6)
    largest = np.abs(found).max() * np.sqrt(size)
    assert largest == pytest.approx(1, abs=1e-5) if order.hadamard else largest < 1.4143


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700))
def test_every_size_is_orthogonal(size: int) -> None:
    random = np.random.default_rng(size)
    rows = random.normal(size=(3, size)).astype(np.float32)
    found = transform(rows, order_of(size))
    np.testing.assert_allclose(found @ found.T, rows @ rows.T, rtol=1e-4, atol=1e-4 * size**0.5)


def test_signs_are_the_same_everywhere() -> None:
    assert signs_of(12, 0, "residual").tolist() == [-1, -1, -1, 1, 1, 1, 1, 1, -1, -1, -1, 1]
    assert signs_of(12, 1, "residual").tolist() != signs_of(12, 0, "residual").tolist()


def maps(size: int, seed: int) -> list[RepeatableMap]:
    random = np.random.default_rng(seed)
    by = np.exp(random.normal(size=size)).astype(np.float32)
    rotation = Rotation(order_of(size), signs_of(size, seed, "x"))
    return [Scale(by, 1 / by), rotation, Chain([Scale(by, 1 / by), rotation])]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31))
def test_products_stay_what_they_are(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, w = random.normal(size=(2, 5, size)).astype(np.float32)
    for change in maps(size, seed):
        found = change.back(w) @ change.forward(x).T
        np.testing.assert_allclose(found, w @ x.T, atol=1e-3, rtol=1e-3)
        wide = change.repeat(size, 3)
        assert wide.size == 3 * size
        several, heavy = np.tile(x, 3), random.normal(size=(2, 3 * size)).astype(np.float32)
        np.testing.assert_allclose(wide.forward(several), np.tile(change.forward(x), 3), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(wide.back(heavy) @ wide.forward(several).T, heavy @ several.T, atol=1e-3, rtol=1e-3)


def test_moments_follow_what_they_are_of() -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(50, 12)).astype(np.float32)
    for change in maps(12, 4):
        turned = change.forward(x)
        np.testing.assert_allclose(both_sides(x.T @ x, change), turned.T @ turned, rtol=1e-3, atol=1e-3)
        # y' = T y; a loss whose gradient at y is g has T^-T g at y'.
        back = change.back(x)
        np.testing.assert_allclose(both_backs(x.T @ x, change), back.T @ back, rtol=1e-3, atol=1e-3)


def test_pieces_are_changed_apart() -> None:
    rows = np.arange(10, dtype=np.float32).reshape(2, 5)
    by = np.array([2, 4], np.float32)
    change = Parts([1, Scale(by, 1 / by), 2])
    assert change.size == 5
    assert change.forward(rows).tolist() == [[0, 2, 8, 3, 4], [5, 12, 28, 8, 9]]
    assert change.back(change.forward(rows)).tolist() == rows.tolist()
