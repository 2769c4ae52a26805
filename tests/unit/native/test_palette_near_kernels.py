"""Lloyd's steps by slacks beside trying every centroid for every point, in all instruction sets."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.palette.near import Near
from ingot.core.runtime import native
from ingot.model.tensor import Array

KINDS = ["normal", "lattice", "line", "one", "aside", "outliers", "zeros", "small"]


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def cloud(kind: str, count: int, size: int) -> Array:
    """Points below 1 whose sums in f64 are exact."""
    normal = rng(1).normal(0, 0.15, (count, size)).clip(-0.99, 0.99)
    points = {
        "normal": normal,
        "lattice": rng(2).integers(-9, 10, (count, size)) / 16,  # many as near to two centroids
        "line": normal * ([1.0, 0.0] * (size // 2)),
        "one": np.full((count, size), 0.75),
        "aside": 0.9 + normal * 1e-3,
        "outliers": np.where(rng(3).random((count, 1)) < 1e-2, normal, normal * 2.0**-9),
        "zeros": normal * (rng(4).random((count, size)) < 0.3),
        "small": normal * 2.0**-12,
    }[kind]
    return points.astype(np.float16).astype(np.float32)


def tried(points: Array, centroids: Array) -> tuple[float, Array, Array]:
    """Return the squared error, the codes and the means of trying all."""
    (count, size), clusters = points.shape, len(centroids)
    codes, sums, numbers = np.empty(count, np.uint8), np.zeros(clusters * size), np.zeros(clusters)
    error = native.kernels.palette_nearest(points, centroids, codes, sums, numbers)
    means = (sums.reshape(clusters, size) / np.maximum(numbers, 1)[:, None]).astype(np.float32)
    return error, codes, np.where(numbers[:, None] > 0, means, centroids)


@pytest.mark.parametrize("set_name", native.available_isas())
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "clusters", "count"), [(4, 256, 20001), (4, 65, 33001), (4, 40, 17), (4, 1, 70), (2, 100, 5000)]
)
def test_steps_are_those_of_trying_all(size: int, clusters: int, count: int, kind: str, set_name: str) -> None:
    points = cloud(kind, count, size)
    centroids = points[rng(5).integers(0, count, clusters)].copy()
    centroids[clusters // 2] = centroids[0]  # of equally near ones the first
    used = native.isa()
    native.set_isa(set_name)
    try:
        found = Near(points)
        for step in range(12):
            error, codes, means = tried(points, centroids)
            low, high, after = found.nearest(centroids)
            assert found.codes().tobytes() == codes.tobytes()
            assert after.tobytes() == means.tobytes()
            assert low <= error <= high
            # Moves of all sizes: to the means, and a few centroids far away.
            centroids = after
            if step in (4, 7):
                centroids = np.roll(centroids, 1, axis=0) if step == 4 else centroids + np.float32(2.0**-9)
    finally:
        native.set_isa(used)


def test_most_points_are_passed_by_where_centroids_stay() -> None:
    points = cloud("normal", 20000, 4)
    centroids, found = points[:128].copy(), Near(points)
    for _ in range(20):
        centroids = found.nearest(centroids)[2]
    found.nearest(centroids)
    before = found._slacks.copy()
    found.nearest(centroids)
    kept = before > 1e-6
    assert kept.mean() > 0.8
    assert np.allclose(found._slacks[kept], before[kept], atol=1e-10)


def test_slacks_never_exceed_what_is_left() -> None:
    """A slack is at most how much farther any other centroid is than the point's own."""
    points = cloud("normal", 3000, 4)
    centroids, found = points[:90].copy(), Near(points)
    for _ in range(10):
        after = found.nearest(centroids)[2]
        away = np.sqrt(((points[:, None].astype(np.float64) - centroids) ** 2).sum(axis=2))
        own = away[np.arange(3000), found.codes()]
        away[np.arange(3000), found.codes()] = np.inf
        assert (found._slacks <= np.maximum(away.min(axis=1) - own, 0)).all()
        assert (found._slacks > 0).any()
        centroids = after


def test_threads_find_the_same() -> None:
    points = cloud("normal", 1 << 18, 4)
    centroids = points[:80].copy()
    one, more = Near(points, 1), Near(points, 3)
    for _ in range(3):
        found = [each.nearest(centroids)[2] for each in (one, more)]
        assert found[0].tobytes() == found[1].tobytes()
        assert one.codes().tobytes() == more.codes().tobytes()
        centroids = found[0]


@pytest.mark.parametrize("set_name", native.available_isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_what_is_no_number_is_never_followed(bad: float, set_name: str) -> None:
    """Points, centroids, reaches and slacks of any value: codes are those of centroids, and nothing else is read."""
    kernels, count, used = native.kernels, 500, native.isa()
    native.set_isa(set_name)
    try:
        for place in range(4):
            points, centroids = cloud("normal", count, 4), cloud("normal", 70, 4)
            codes, slacks, sums, counts = (
                np.zeros(count, np.uint8),
                np.zeros(count, np.float32),
                np.zeros(280),
                np.zeros(70),
            )
            reach, lost = np.full(70, 0.2, np.float32), np.zeros(70, np.float32)
            (points if place == 0 else centroids if place == 1 else reach if place == 2 else slacks)[::7] = bad
            kernels.palette_guess(points, centroids, codes, slacks, sums, counts)
            kernels.palette_near(points, centroids, reach, lost, codes, slacks, sums, counts)
            kernels.palette_reach(centroids, centroids[::-1].copy(), reach, lost)
            kernels.palette_near(points, centroids, reach, lost, codes, slacks, sums, counts)
            assert (codes < 70).all()
            assert counts.sum() == count
    finally:
        native.set_isa(used)


def test_what_does_not_fit_is_refused() -> None:
    kernels, points, centroids = native.kernels, cloud("normal", 100, 4), cloud("normal", 3, 4)
    codes, slacks, sums, counts = np.zeros(100, np.uint8), np.zeros(100, np.float32), np.zeros(12), np.zeros(3)
    reach, lost = np.zeros(3, np.float32), np.zeros(3, np.float32)
    for wrong in (
        (points, centroids[:, :2].copy(), codes, slacks, sums, counts),
        (points, centroids, codes[:-1].copy(), slacks, sums, counts),
        (points, centroids, codes, slacks[:-1].copy(), sums, counts),
        (points, centroids, codes, slacks, sums[:-1].copy(), counts),
    ):
        with pytest.raises(ValueError, match="expected"):
            kernels.palette_guess(*wrong)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_reach(centroids[:-1].copy(), centroids, reach, lost)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_reach(None, centroids, reach[:-1].copy(), lost)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_near(points, centroids, reach[:-1].copy(), lost, codes, slacks, sums, counts)
    codes[5] = 3
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_near(points, centroids, reach, lost, codes, slacks, sums, counts)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_means(np.zeros(14), centroids, 0.0, 1, np.zeros(12, np.float32))
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_means(np.zeros(15), centroids, 0.0, 1, np.zeros(11, np.float32))


def test_means_are_of_sums_in_several_rows() -> None:
    totals = rng(6).integers(-9, 10, (3, 5, 3)).astype(np.float64)
    totals = np.concatenate([totals[:, :, :2].reshape(3, -1), np.abs(totals[:, :, 2])], axis=1)
    totals[:, -1] = 0  # a centroid without points stays
    centroids, after = rng(7).random((5, 2), np.float32), np.empty((5, 2), np.float32)
    native.kernels.palette_means(totals.reshape(-1), centroids, 1.0, 9, after.reshape(-1))
    total = totals.sum(axis=0)
    means = (total[:10].reshape(5, 2) / np.maximum(total[10:], 1)[:, None]).astype(np.float32)
    assert np.array_equal(after, np.where(total[10:, None] > 0, means, centroids))


@pytest.mark.parametrize("set_name", native.available_isas())
def test_reaches_are_numbers_where_centroids_are_none(set_name: str) -> None:
    centroids, reach = cloud("normal", 100, 4), np.zeros(100, np.float32)
    centroids[10:] = np.nan
    used = native.isa()
    native.set_isa(set_name)
    try:
        native.kernels.palette_reach(None, centroids, reach, np.zeros(100, np.float32))
    finally:
        native.set_isa(used)
    assert np.isfinite(reach).all()


@pytest.mark.parametrize("set_name", native.available_isas())
@pytest.mark.parametrize("blocks", [0, 3, 4096])
def test_points_that_are_no_numbers_stay_infinitely_far_from_what_was_drawn(blocks: int, set_name: str) -> None:
    points, draws = cloud("normal", 64 * (blocks + 8) + 5, 2), rng(8).random(20)
    points[512 : 512 + 64 * blocks] = np.nan
    chosen, away = [3], np.full(len(points), np.inf)
    for draw in draws:
        parts = (points.astype(np.float64) - points[chosen[-1]].astype(np.float64)) ** 2
        squares = parts[:, 0] + parts[:, 1]
        away = np.where(squares < away, squares, away)
        sums = np.cumsum(away)
        chosen.append(min(int(np.searchsorted(sums, draw * sums[-1], "right")), len(points) - 1))
    found, used = np.full(21, 3, np.uint64), native.isa()
    native.set_isa(set_name)
    try:
        native.kernels.palette_spread(points, draws, found)
    finally:
        native.set_isa(used)
    assert found.tolist() == chosen
