"""When sums of points are the same in any order (``exact_sums``), and that encoders do the same with and without."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.codecs.palette import fit
from ingot.core.dtypes import numpy_dtype


@pytest.mark.parametrize(
    ("dtype", "value", "exponent", "exact"),
    [
        ("f16", 0.1, 13, True),
        ("f16", 0.1, 14, False),
        ("bf16", 2.0**-30, 0, True),
        ("bf16", 2.0**-31, 0, False),
        ("bf16", 0.0, 0, True),
        ("f32", 0.5, 0, False),
    ],
)
def test_sums_are_exact_where_all_are_multiples_of_one_number(
    dtype: str, value: float, exponent: int, exact: bool
) -> None:
    points = np.array([[0.5, -0.0], [value, -0.25]], np.float32)
    assert fit.exact_sums(points, dtype, exponent) is exact


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_centroids_are_the_same_where_points_move_between_sums(dtype: str, size: int) -> None:
    rng = np.random.default_rng(size)
    points = (rng.normal(0, 0.1, (3 * fit.SAMPLE // 2, size))).astype(numpy_dtype(dtype)).astype(np.float32)
    assert fit.exact_sums(points, dtype, 0) or dtype == "bf16"
    points[np.abs(points) < 2.0**-20] = 0
    assert fit.exact_sums(points, dtype, 0)
    found = []
    for exact in (False, True):
        cloud = fit.Cloud(points, exact=exact)
        centroids = cloud.centroids(16)
        cloud.nearest(centroids)
        found.append((centroids.tobytes(), cloud.codes.tobytes()))
    assert found[0] == found[1]
