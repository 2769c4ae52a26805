"""What a decoder layer computes around its products, in NumPy and f32, in the order of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LANES, SEGMENT = 16, 256


def exponential(x: Array) -> Array:
    """e to the power x by Cephes' polynomial, of x from -87 to 88."""
    f = np.float32
    x = np.minimum(np.maximum(x.astype(f), f(-87)), f(88))
    big = f(1.5 * 2**23)
    n = (x * f(1.44269504088896341) + big) - big
    r = (x - n * f(0.693359375)) - n * f(-2.12194440e-4)
    p = np.full_like(x, f(1.9875691500e-4))
    for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f(term)
    p = p * (r * r) + r + f(1)
    found: Array = np.ldexp(p, n.astype(np.int32))
    return found


def lane_sums(products: Array) -> Array:
    """Sum the last axis: column i goes to lane i mod 16, then the upper half of the lanes to the lower."""
    fill = -products.shape[-1] % LANES
    padded = np.concatenate([products, np.zeros((*products.shape[:-1], fill), np.float32)], axis=-1)
    lanes = np.zeros((*products.shape[:-1], LANES), np.float32)
    for start in range(0, padded.shape[-1], LANES):
        lanes = lanes + padded[..., start : start + LANES]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    found: Array = lanes[..., 0]
    return found


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return x [rows, columns] over its root mean square, rounded, times ``weight``, in the type of x."""
    values = x.astype(np.float32)
    mean = lane_sums(values * values) / np.float32(x.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
    normal = (values * scale[..., None]).astype(x.dtype).astype(np.float32)
    return (weight.astype(np.float32) * normal).astype(x.dtype)


def add(x: Array, y: Array) -> Array:
    """Return the sum, rounded once."""
    return (x.astype(np.float32) + y.astype(np.float32)).astype(x.dtype)


def gate(gates: Array, values: Array) -> Array:
    """Return silu(gates), rounded, times values, rounded."""
    g = gates.astype(np.float32)
    silu = (g / (np.float32(1) + exponential(-g))).astype(gates.dtype).astype(np.float32)
    return (silu * values.astype(np.float32)).astype(gates.dtype)


def rotate(x: Array, cosines: Array, sines: Array) -> Array:
    """Return heads [..., width] turned to their positions; every step is rounded, as by torch's operations."""
    half = x.shape[-1] // 2
    values = x.astype(np.float32)
    turned = np.concatenate([-values[..., half:], values[..., :half]], axis=-1)
    own = (values * cosines.astype(np.float32)).astype(x.dtype)
    other = (turned * sines.astype(np.float32)).astype(x.dtype)
    return add(own, other)


def attend(queries: Array, keys: Array, values: Array, tokens: int, scale: float) -> Array:
    """Return softmax(scale * q k^T) v of queries [heads, rows, width], segment after segment of 256 tokens."""
    k, v = (some.astype(np.float32) for some in (keys, values))
    q: Array = queries.astype(np.float32) * np.float32(scale)
    parts = []
    for start in range(0, tokens, SEGMENT):
        seen = slice(start, min(start + SEGMENT, tokens))
        scores = lane_sums(q[:, :, None] * k[:, None, seen])
        most = scores.max(axis=-1, keepdims=True)
        powers = exponential(scores - most)
        mixed: Array = np.zeros(q.shape, np.float32)
        for number in range(powers.shape[-1]):
            mixed = mixed + powers[:, :, number, None] * v[:, start + number][:, None]
        parts.append((most, lane_sums(powers)[..., None], mixed))
    most = np.max([part[0] for part in parts], axis=0)
    whole: Array = np.zeros_like(most)
    total: Array = np.zeros(q.shape, np.float32)
    for own, powers, mixed in parts:
        weight = exponential(own - most)
        whole, total = whole + powers * weight, total + mixed * weight
    mean: Array = total / whole
    return mean.astype(queries.dtype)
