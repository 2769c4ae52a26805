"""Look-ups, bit streams, histograms, clusters and masks against their NumPy reference, for every instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.core.numeric.dtypes import as_bits, numpy_dtype
from ingot.core.runtime import native
from tests.support.reference import palette as reference

Array = np.ndarray[Any, np.dtype[Any]]
WIDTHS = (1, 2, 3, 4, 6, 8)
# Around the kernels' chunk of 1024 and their vectors of 16 and 32.
COUNTS = (0, 1, 15, 33, 1023, 1024, 1025, 5000)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("width", range(1, 9))
def test_streams(width: int, count: int) -> None:
    codes = rng(count).integers(0, 2**width, count).astype(np.uint8)
    packed = np.empty(-(-count * width // 8), np.uint8)
    native.kernels.palette_pack(codes, width, packed)
    assert packed.tobytes() == reference.pack(codes, width).tobytes()
    out = np.empty(count, np.uint8)
    native.kernels.palette_unpack(packed, width, out)
    assert out.tobytes() == codes.tobytes() == reference.unpack(packed, width, count).tobytes()


@pytest.mark.parametrize(("run", "phase"), [(1, 0), (3, 2), (32, 5), (1000, 999), (1024, 0), (9000, 77)])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("width", WIDTHS)
def test_look_ups(width: int, size: int, run: int, phase: int) -> None:
    for count in COUNTS:
        codes = rng(count).integers(0, 2**width, count).astype(np.uint8)
        ids = rng(1).integers(0, 5, -(-(phase + count) // run)).astype(np.uint32)
        entry = (np.uint64, 2) if size == 16 else (f"u{size}", 1)
        tables = rng(2).integers(0, 2**16, (5, 2**width, entry[1])).astype(entry[0]) * 3
        tables = tables if size == 16 else tables[:, :, 0].copy()
        out = np.zeros((count, 2) if size == 16 else count, entry[0])
        native.kernels.palette_decode(reference.pack(codes, width), width, tables, ids, run, phase, out)
        wanted = tables[ids[(np.arange(count) + phase) // run], codes]
        assert out.tobytes() == wanted.tobytes()
        native.kernels.palette_decode(reference.pack(codes, width), width, tables, None, run, phase, out)
        assert out.tobytes() == tables[0, codes].tobytes()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("entries", [2, 3, 16, 256])
def test_the_nearest_entry(dtype: str, entries: int) -> None:
    book = np.sort(rng(entries).normal(0, 1, entries)).astype(np.float32).astype(np.float64)
    book[1] = book[0]  # of equal ones the first
    limits = (book[1:] + book[:-1]) / 2
    values = np.concatenate([rng(3).normal(0, 2, 3000), limits, book, [0.0, -0.0]]).astype(numpy_dtype(dtype))
    codes = np.empty(values.size, np.uint8)
    native.kernels.palette_assign(as_bits(values), dtype, limits, codes)
    assert codes.tolist() == np.searchsorted(limits, values.astype(np.float32).astype(np.float64), "left").tolist()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_histograms(dtype: str) -> None:
    values = rng(4).normal(0, 1, (100, 7)).astype(numpy_dtype(dtype))
    importance = rng(5).random(7)
    for weights in (None, importance):
        bins = np.zeros(65536)
        assert native.kernels.palette_count(as_bits(values), dtype, 7, weights, 0, bins, None) == 700
        each = np.broadcast_to(1.0 if weights is None else weights, (100, 7)).reshape(-1)
        assert np.allclose(bins, np.bincount(as_bits(values).reshape(-1), each, 65536), rtol=1e-12)
    values[50, 3] = np.inf
    assert native.kernels.palette_count(as_bits(values), dtype, 7, None, 0, np.zeros(65536), None) == 353


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_histograms_of_wide_types_keep_sums(dtype: str) -> None:
    values = rng(6).normal(0, 1e-9, 500).astype(numpy_dtype(dtype))
    bins, sums = np.zeros(65536), np.zeros(65536)
    assert native.kernels.palette_count(values, dtype, 500, None, 40, bins, sums) == 500
    keys = (values.astype(np.float64) * 2.0**40).astype(np.float32).astype(np.float16).view(np.uint16)
    assert np.array_equal(bins, np.bincount(keys, minlength=65536))
    assert np.allclose(sums, np.bincount(keys, values.astype(np.float32), 65536), rtol=1e-12, atol=0)
    values[7] = np.nan
    assert native.kernels.palette_count(values, dtype, 500, None, 40, bins, sums) == 7


@pytest.mark.parametrize("clusters", [1, 2, 7, 16, 100, 256])
@pytest.mark.parametrize("kind", ["normal", "steps", "few", "one"])
def test_penalties_find_what_layers_find(clusters: int, kind: str) -> None:
    values = {
        "normal": rng(7).normal(0, 1, 4000),
        "steps": np.arange(400) % 200,
        "few": rng(8).integers(-3, 4, 1000) / 8,
        "one": np.zeros(5),
    }[kind].astype(np.float16)
    bins = np.bincount(values.view(np.uint16), minlength=65536).astype(np.float64)
    errors = []
    for layers in (False, True):
        found = np.zeros(clusters)
        there = native.kernels.palette_solve(bins, None, "f16", found, layers)
        assert there == min(clusters, len(np.unique(values)))
        assert (np.diff(found[:there]) > 0).all()
        errors.append(((values.astype(np.float64)[:, None] - found[:there]) ** 2).min(axis=1).sum())
    assert errors[0] == pytest.approx(errors[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("kind", ["normal", "small", "levels", "even", "apart", "few", "weighted"])
def test_partitions_are_those_of_the_baseline(kind: str, dtype: str) -> None:
    """Long runs are found by blocks in wide registers, one by one without: also where partitions are equally good."""
    values = {
        "normal": rng(7).normal(0, 1, 30000),
        "small": rng(8).normal(0, 1e-6, 3000),
        "levels": rng(9).integers(-300, 300, 4000) / 8,
        "even": np.arange(-1000, 1000),
        "apart": rng(10).normal(0, 0.01, 3000) + rng(11).choice([-8.0, 1.0, 9.0], 3000),
        "few": rng(12).integers(-30, 31, 500) / 8,
        "weighted": rng(13).normal(0, 1, 5000),
    }[kind].astype(numpy_dtype(dtype))
    weights = rng(14).lognormal(0, 3, values.size) if kind == "weighted" else None
    bins = np.bincount(as_bits(values), weights, minlength=65536).astype(np.float64)
    used = native.isa()
    for clusters in (2, 3, 5, 16, 60, 256):
        found = [np.zeros(clusters) for _ in range(2)]
        there = [native.kernels.palette_solve(bins, None, dtype, found[0])]
        native.set_isa("baseline")
        try:
            there.append(native.kernels.palette_solve(bins, None, dtype, found[1]))
        finally:
            native.set_isa(used)
        assert there[0] == there[1]
        assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("set_name", native.available_isas())
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("some", ["ends", "zeros", "spread", "row"])
def test_bins_that_weigh_something_are_found_in_order(some: str, dtype: str, set_name: str) -> None:
    infinity = 0x7C00 if dtype == "f16" else 0x7F80
    keys = {
        "ends": np.array([0, infinity - 1, 0x8000, 0x8000 + infinity - 1]),
        "zeros": np.array([0, 0x8000]),
        "spread": rng(15).choice(np.r_[0:infinity, 0x8000 : 0x8000 + infinity], 250, replace=False),
        "row": np.r_[15:49, 0x8000 + 31 : 0x8000 + 65],
    }[some].astype(np.uint16)
    bins, found, used = np.zeros(65536), np.zeros(256), native.isa()
    bins[keys] = rng(16).integers(1, 9, keys.size)
    native.set_isa(set_name)
    try:
        there = native.kernels.palette_solve(bins, None, dtype, found)
    finally:
        native.set_isa(used)
    values = np.unique(keys.view(numpy_dtype(dtype)).astype(np.float64))
    assert there == values.size
    assert np.array_equal(found[:there], values)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("clusters", [1, 5, 16, 200])
def test_nearest_centroids(size: int, clusters: int) -> None:
    points = rng(9).normal(0, 1, (700, size)).astype(np.float32)
    centroids = points[:clusters].copy()
    centroids[-1] = centroids[0]  # of equally near ones the first
    codes, sums, counts = np.empty(700, np.uint8), np.zeros(clusters * size), np.zeros(clusters)
    error = native.kernels.palette_nearest(points, centroids, codes, sums, counts)
    distance = np.zeros((700, clusters), np.float32)
    for axis in range(size):
        away = points[:, axis, None] - centroids[:, axis]
        distance += away * away
    assert codes.tolist() == distance.argmin(axis=1).tolist()
    assert error == pytest.approx(float(distance.min(axis=1).astype(np.float64).sum()), rel=1e-12)
    assert counts.tolist() == np.bincount(codes, minlength=clusters).tolist()
    for axis in range(size):
        wanted = np.bincount(codes, points[:, axis].astype(np.float64), clusters)
        assert np.allclose(sums.reshape(clusters, size)[:, axis], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("clusters", "count"), [(1, 40), (3, 1), (16, 1025), (200, 5000)])
def test_bounds_change_no_code_and_no_sum(size: int, clusters: int, count: int) -> None:
    """Lloyd's steps with bounds beside trying every centroid, on points that repeat and on sizes far apart."""
    some = rng(11).normal(0, 1, (count, size)) * 10.0 ** rng(12).integers(-8, 1, (count, 1))
    points = np.ldexp(some, -4).astype(np.float32)
    points[count // 2 :] = points[: count - count // 2].copy()
    centroids = points[rng(13).integers(0, count, clusters)].copy()
    codes, bounds, moved = np.zeros(count, np.uint8), np.zeros(count, np.float32), 0.0
    for _ in range(12):
        plain, wanted, numbers = np.empty(count, np.uint8), np.zeros(clusters * size), np.zeros(clusters)
        error = native.kernels.palette_nearest(points, centroids, plain, wanted, numbers)
        sums, counts = np.zeros(clusters * size), np.zeros(clusters)
        found = native.kernels.palette_nearest(points, centroids, codes, sums, counts, bounds, moved)
        assert (codes.tobytes(), sums.tobytes(), counts.tobytes(), found) == (
            plain.tobytes(),
            wanted.tobytes(),
            numbers.tobytes(),
            error,
        )
        after = (sums.reshape(clusters, size) / np.maximum(counts, 1)[:, None]).astype(np.float32)
        away = after.astype(np.float64) - centroids
        moved, centroids = float(np.sqrt((away * away).sum(axis=1).max()) * (1 + 1e-6)), after
    assert clusters == 1 or count == 1 or bounds.any()


def cloud_of_pairs(kind: str, count: int) -> Array:
    normal = rng(18).normal(0, 0.2, (count, 2)).clip(-1, 1)
    points = {
        "normal": normal.astype(np.float16),
        "lattice": rng(19).integers(-9, 10, (count, 2)) / 16,  # many as near to two centroids
        "line": normal * [1.0, 0.0],
        "one": np.full((count, 2), 0.75),
        "far": normal * 10.0 ** rng(20).integers(-9, 1, (count, 1)),
        "aside": 0.9 + normal * 1e-6,  # squares of few steps of f32
        "outliers": np.where(np.arange(count)[:, None] % 999, normal * 1e-3, normal * 1e12),
        "tiny": normal * 1e-25,  # squares below what f32 holds in full
    }[kind]
    return np.asarray(points, np.float32)


@pytest.mark.parametrize("kind", ["normal", "lattice", "line", "one", "far", "aside", "outliers", "tiny"])
@pytest.mark.parametrize(("clusters", "count"), [(65, 16384), (200, 20001), (256, 17000)])
def test_a_grid_finds_the_first_of_the_nearest(clusters: int, count: int, kind: str) -> None:
    """Many pairs and centroids, beside trying every centroid; what bounds are left says nothing that is wrong."""
    points = cloud_of_pairs(kind, count)
    centroids = points[rng(21).integers(0, count, clusters)].copy()
    centroids[clusters // 2] = centroids[3]  # of equally near ones the first
    codes, bounds = np.zeros(count, np.uint8), np.full(count, 0.5, np.float32)
    for _ in range(4):
        plain, wanted, numbers = np.empty(count, np.uint8), np.zeros(clusters * 2), np.zeros(clusters)
        error = native.kernels.palette_nearest(points, centroids, plain, wanted, numbers)
        sums, counts = np.zeros(clusters * 2), np.zeros(clusters)
        # What was known is of no use: all centroids went far.
        found = native.kernels.palette_nearest(points, centroids, codes, sums, counts, bounds, 1e30)
        assert found == error
        assert codes.tobytes() == plain.tobytes()
        assert sums.tobytes() == wanted.tobytes()
        assert counts.tobytes() == numbers.tobytes()
        tried, centroids = centroids, (sums.reshape(clusters, 2) / np.maximum(counts, 1)[:, None]).astype(np.float32)
    # Bounds that are kept hold for a call without a grid too.
    centroids = tried + np.float32(2.0**-10)
    again = codes.copy()
    native.kernels.palette_nearest(points, centroids, codes, np.zeros(clusters * 2), np.zeros(clusters))
    few = 16000  # too few for a grid
    sums, counts = np.zeros(clusters * 2), np.zeros(clusters)
    native.kernels.palette_nearest(points[:few], centroids, again[:few], sums, counts, bounds[:few], 2.0**-9)
    assert again[:few].tobytes() == codes[:few].tobytes()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("clusters", "count"), [(2, 17), (16, 1040), (32, 3000), (33, 1023), (64, 5000), (65, 1200), (90, 16400)]
)
def test_points_that_move_change_two_sums(size: int, clusters: int, count: int) -> None:
    """Where sums are exact, those of the codes before, less and more what changed, are those of adding all."""
    points = rng(16).normal(0, 0.2, (count, size)).astype(np.float16).astype(np.float32)
    centroids = points[rng(17).integers(0, count, clusters)].copy()
    codes, bounds, moved = np.zeros(count, np.uint8), np.zeros(count, np.float32), 0.0
    sums, counts, changed = np.zeros(clusters * size), np.zeros(clusters), 0
    for step in range(10):
        plain, wanted, numbers = np.empty(count, np.uint8), np.zeros(clusters * size), np.zeros(clusters)
        error = native.kernels.palette_nearest(points, centroids, plain, wanted, numbers)
        changed += int((plain != codes).sum()) if step else 0
        found = native.kernels.palette_nearest(points, centroids, codes, sums, counts, bounds, moved, step > 0)
        assert found == error
        assert codes.tobytes() == plain.tobytes()
        assert sums.tobytes() == wanted.tobytes()
        assert counts.tobytes() == numbers.tobytes()
        after = (sums.reshape(clusters, size) / np.maximum(counts, 1)[:, None]).astype(np.float32)
        away = after.astype(np.float64) - centroids
        moved, centroids = float(np.sqrt((away * away).sum(axis=1).max()) * (1 + 1e-6)), after
    assert changed or count < 1000
    with pytest.raises(ValueError, match="expected"):
        native.kernels.palette_nearest(points, centroids, codes, sums, counts, None, 0.0, True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("count", [1, 7, 3000])
def test_points_to_begin_with(size: int, count: int) -> None:
    points = rng(14).normal(0, 1, (count, size)).astype(np.float32)
    chosen = np.zeros(40, np.uint64)
    chosen[0] = count // 2
    draws = rng(15).random(39)
    native.kernels.palette_spread(points, draws, chosen)
    assert chosen.tolist() == reference.spread_out(points, count // 2, draws).tolist()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_masks(width: int, share: float) -> None:
    for count in COUNTS:
        keep = rng(count).random(count) < share
        mask = np.packbits(keep, bitorder="little")
        values = rng(10).integers(1, 250, count).astype(f"u{width}") * np.array(256 ** (width - 1), f"u{width}")
        kept = int(keep.sum())
        assert native.kernels.mask_count(mask, count) == kept
        some = np.empty(kept, values.dtype)
        native.kernels.mask_select(mask, values, some)
        assert some.tobytes() == values[keep].tobytes()
        out = np.full(count, 7, values.dtype)
        native.kernels.mask_expand(mask, some, out)
        assert out.tobytes() == reference.expand(mask, some, count).tobytes()
        native.kernels.mask_clear(mask, values)
        assert values.tobytes() == out.tobytes()


def test_wrong_sizes_are_refused() -> None:
    kernels = native.kernels
    byte, table = np.zeros(1, np.uint8), np.zeros((1, 16), np.uint16)
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_decode(byte, 4, table, None, 1, 0, np.zeros(3, np.uint16))
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_decode(byte, 4, table[:, :8].copy(), None, 1, 0, np.zeros(2, np.uint16))
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_decode(byte, 4, table, np.array([0, 1], np.uint32), 1, 0, np.zeros(2, np.uint16))
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_decode(byte, 4, table, np.array([0], np.uint32), 1, 0, np.zeros(2, np.uint16))
    with pytest.raises(ValueError, match="expected"):
        kernels.mask_expand(byte, byte, np.zeros(9, np.uint8))
    with pytest.raises(ValueError, match="expected"):
        kernels.palette_count(np.zeros(4, np.float32), "f32", 3, None, 0, np.zeros(65536), np.zeros(65536))


@pytest.mark.parametrize("size", [2, 4])
def test_of_equal_centroids_wherever_they_stand_the_first_is_taken(size: int) -> None:
    points = rng(3).normal(0, 1, (4, size)).astype(np.float32)
    far = rng(4).normal(50, 1, (40, size)).astype(np.float32)
    codes, sums, counts = np.empty(4, np.uint8), np.zeros(40 * size), np.zeros(40)
    for first in range(39):
        for second in range(first + 1, 40):
            centroids = far.copy()
            centroids[first] = centroids[second] = points[0]
            native.kernels.palette_nearest(points, centroids, codes, sums, counts)
            assert codes[0] == first
