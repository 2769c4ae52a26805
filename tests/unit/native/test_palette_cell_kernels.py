"""Points in cells beside trying every centroid for every point, and draws of first points beside the reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ingot.codecs.palette import cells as palette_cells
from ingot.core.runtime import native
from ingot.model.tensor import Array
from tests.support.reference import palette as reference


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def cloud(kind: str, count: int, size: int) -> Array:
    """Points whose sums in f64 are exact."""
    normal = rng(1).normal(0, 0.15, (count, size)).clip(-0.99, 0.99)
    points = {
        "normal": normal,
        "lattice": rng(2).integers(-9, 10, (count, size)) / 16,  # many as near to two centroids
        "line": normal * ([1.0, 0.0] * (size // 2)),
        "one": np.full((count, size), 0.75),
        "aside": 0.9 + normal * 1e-3,
        "outliers": np.where(rng(3).random((count, 1)) < 1e-2, normal, normal * 2.0**-9),
        "zeros": normal * (rng(4).random((count, size)) < 0.3),
        "along": normal[:, :1] * 0.9 + normal * 0.1,
        "large": normal * 4096,  # more than keys tell apart
    }[kind]
    return points.astype(np.float16).astype(np.float32)


KINDS = ["normal", "lattice", "line", "one", "aside", "outliers", "zeros", "along", "large"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "clusters", "count"), [(2, 200, 30001), (2, 3, 17), (2, 16, 2500), (4, 40, 9000), (4, 1, 70)]
)
def test_steps_are_those_of_trying_all(size: int, clusters: int, count: int, kind: str) -> None:
    points = cloud(kind, count, size)
    centroids = points[rng(5).integers(0, count, clusters)].copy()
    centroids[clusters // 2] = centroids[0]  # of equally near ones the first
    found = palette_cells.Cells(points, clusters)
    for _ in range(6):
        codes, wanted, numbers = np.empty(count, np.uint8), np.zeros(clusters * size), np.zeros(clusters)
        error = native.kernels.palette_nearest(points, centroids, codes, wanted, numbers)
        low, high, after = found.nearest(centroids)
        means = (wanted.reshape(clusters, size) / np.maximum(numbers, 1)[:, None]).astype(np.float32)
        centroids = np.where(numbers[:, None] > 0, means, centroids)
        assert after.tobytes() == centroids.tobytes()
        assert low <= error <= high
        assert found.codes().tobytes() == codes.tobytes()


def test_threads_find_the_same() -> None:
    points = cloud("normal", 1 << 18, 2)
    centroids = points[:50].copy()
    one, more = palette_cells.Cells(points, 50, 1), palette_cells.Cells(points, 50, 3)
    for _ in range(3):
        found = [each.nearest(centroids) for each in (one, more)]
        assert found[0][2].tobytes() == found[1][2].tobytes()
        assert one.codes().tobytes() == more.codes().tobytes()
        centroids = found[0][2]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("count", [1, 7, 513, 3000])
@pytest.mark.parametrize("kind", ["normal", "lattice", "one", "zeros"])
def test_draws_are_those_of_sums_one_by_one(size: int, count: int, kind: str) -> None:
    points = cloud(kind, count, size)
    chosen = np.zeros(60, np.uint64)
    chosen[0] = count // 2
    draws = rng(6).random(59)
    draws[:6] = [0.0, 0.5, 0.25, 1 - 2.0**-53, 2.0**-60, 0.75]  # where sums are round numbers, a draw falls between
    native.kernels.palette_spread(points, draws, chosen)
    assert chosen.tolist() == reference.spread_out(points, count // 2, draws).tolist()


def test_what_does_not_fit_is_refused_and_never_followed() -> None:
    kernels, points = native.kernels, cloud("normal", 100, 2)
    columns, starts, boxes = np.zeros(2 * 116, np.float32), np.zeros(65, np.uint32), np.zeros(4 * 80, np.float32)
    places, codes, owners = np.zeros(100, np.uint16), np.zeros(100, np.uint8), np.zeros(64, np.uint16)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_cells(points, columns[:-2].copy(), starts, boxes, places)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_cells(points, columns, starts[:-1].copy(), boxes, places)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_cells(points, columns, starts, boxes[:-1].copy(), places)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_cells(points, columns, starts, boxes, places[:-1].copy())
    kernels.palette_cells(points, columns, starts, boxes, places)
    sums, counts = np.zeros(6), np.zeros(3)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_step(columns, starts, boxes, 0, 2, points[:3], codes, owners, sums, counts)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_step(columns, starts, boxes, 0, 1, points[:3], codes[:-1].copy(), owners, sums, counts)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_step(columns, starts, boxes, 0, 1, points[:3], codes, owners, sums[:-1].copy(), counts)
    wrong = starts.copy()
    wrong[1::2] = 1 << 31  # cells past all points, and such as end before they begin
    for owner, begins in product((3, 255, 256, 257, 65535), (wrong, starts)):
        some, owned = np.full(100, 255, np.uint8), np.full(64, owner, np.uint16)
        kernels.palette_step(columns, begins, boxes, 0, 1, points[:3], some, owned, sums, counts)
    before = sums.copy(), counts.copy()
    nobody, some = np.full(64, 257, np.uint16), np.full(100, 255, np.uint8)
    nowhere = np.full((3, 2), np.nan, np.float32)
    kernels.palette_step(columns, starts, boxes, 0, 1, nowhere, some, nobody, sums, counts)
    assert (sums.tobytes(), counts.tobytes()) == (before[0].tobytes(), before[1].tobytes())
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_codes(places + np.uint16(64), starts, codes, codes.copy())
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_codes(places, wrong, codes, codes.copy())
