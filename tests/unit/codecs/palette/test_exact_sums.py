"""When sums of points are the same in any order (``digits_of``), and that encoders do the same with and without."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from ingot.codecs.palette import fit
from ingot.codecs.palette.codec import PaletteCodec
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.testing.codecs import encode_tensor


@pytest.mark.parametrize(
    ("dtype", "value", "exponent", "digits"),
    [
        ("f16", 0.1, 13, 37),
        ("f16", 0.1, -30, 0),
        ("bf16", 2.0**-30, 0, 37),
        ("bf16", 2.0**-31, 0, 38),
        ("bf16", 0.0, 0, 9),
        ("bf16", 2.0**-140, 0, fit.UNKNOWN),
        ("f32", 0.5, 0, fit.UNKNOWN),
    ],
)
def test_points_are_multiples_of_a_power_of_two(dtype: str, value: float, exponent: int, digits: int) -> None:
    points = np.array([[0.5, -0.0], [value, -0.25]], np.float32)
    assert fit.digits_of(points, dtype, exponent) == digits


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "count"), [("f16", 3 * fit.SAMPLE // 2), ("bf16", 3 * fit.SAMPLE // 2), ("f16", 5000)]
)
def test_centroids_and_codes_are_the_same_however_points_are_added_up(dtype: str, size: int, count: int) -> None:
    """Adding all, moving between sums, and passing whole cells by, which asks all points where errors are close."""
    rng = np.random.default_rng(size)
    points = (rng.normal(0, 0.1, (count, size))).astype(numpy_dtype(dtype)).astype(np.float32)
    points[np.abs(points) < 2.0**-16] = 0
    digits = fit.digits_of(points, dtype, 0)
    assert count << digits <= 1 << 53
    for clusters in (2, 16, 90):
        found = []
        for known in (fit.UNKNOWN, 37, digits):
            cloud = fit.Cloud(points, digits=known)
            centroids = cloud.centroids(clusters)
            found.append((centroids.tobytes(), cloud.assign(centroids + np.float32(2.0**-9)).tobytes()))
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("gain", [1e-4, 1.0001e-4, 0.9999e-4])
def test_errors_too_close_to_tell_are_computed(gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another step is worth it is never guessed: bounds that hold both answers are not taken for one."""
    points = np.random.default_rng(1).normal(0, 0.1, (4096, 2)).astype(np.float16).astype(np.float32)
    first, second = (np.ascontiguousarray(points[i : i + 5]) for i in (0, 9))
    cloud = fit.Cloud(points, digits=fit.digits_of(points, "f16", 0))
    errors = {first.tobytes(): 1.0, second.tobytes(): 1.0 * (1 - gain)}
    asked: list[bytes] = []

    def nearest(centroids: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        asked.append(centroids.tobytes())
        return errors[asked[-1]], np.zeros((5, 2)), np.zeros(5)

    class Near:
        def nearest(self, centroids: np.ndarray) -> tuple[float, float, np.ndarray]:
            error = errors[centroids.tobytes()]
            return error * (1 - 1e-6), error * (1 + 1e-6), centroids

    monkeypatch.setattr(cloud, "nearest", nearest)
    step = fit._BoundedStep(cloud, Near())
    assert step(first)[0]
    assert not asked
    assert step(second)[0] == (1 - gain < 1 - 1e-4)
    assert asked == [first.tobytes(), second.tobytes()]


@pytest.mark.parametrize(("size", "dtype"), [(2, "f16"), (4, "f16"), (2, "f32")])
def test_vectors_take_the_memory_that_they_state(size: int, dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(1024, 2048)).astype(numpy_dtype(dtype)) / 64
    options = {"bits": 2, "vector": size}
    encode_tensor(PaletteCodec(), values[:64], options, dtype=dtype)
    tracemalloc.start()
    try:
        encode_tensor(PaletteCodec(), values, options, dtype=dtype)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    stated = PaletteCodec().encoder(values.shape, dtype, options).scratch_bytes_per_element()
    assert most <= (1 << 20) + values.size * stated
