"""NumPy reference of attention over packed blocks (``spec/kv-cache.md``, "Products"): the order of every sum."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 16


def scores(queries: Array, codes: Array, scales: Array, zeros: Array) -> Array:
    """Return f32 [heads, n, blocks * tokens] of queries [heads, n, channels].

    Codes are [heads, blocks, channels, tokens]; scales and zeros [heads, blocks, channels].
    """
    heads, blocks, channels, tokens = codes.shape
    out = np.zeros((heads, queries.shape[1], blocks, tokens), np.float32)
    numbers, steps, offsets = codes.astype(np.float32), scales.astype(np.float32), zeros.astype(np.float32)
    for block in range(blocks):
        factors = queries * steps[:, None, block]
        for channel in range(channels):
            out[:, :, block] += factors[:, :, channel, None] * numbers[:, None, block, channel]
        out[:, :, block] += lane_sum(queries * offsets[:, None, block])[..., None]
    return out.reshape(heads, queries.shape[1], blocks * tokens)


def weighted(weights: Array, codes: Array, scales: Array, zeros: Array, group: int) -> Array:
    """Return f32 [heads, n, width]: values summed by weights [heads, n, blocks * tokens].

    Codes are [heads, blocks, tokens, width]; scales and zeros [heads, blocks, tokens, groups].
    """
    heads, blocks, tokens, width = codes.shape
    given = weights.reshape(heads, -1, blocks, tokens)
    numbers, steps, offsets = codes.astype(np.float32), scales.astype(np.float32), zeros.astype(np.float32)
    spread = np.arange(width) // group
    out = np.zeros((heads, given.shape[1], width), np.float32)
    for block in range(blocks):
        part = np.zeros_like(out)
        for token in range(tokens):
            factors = given[:, :, block, token, None] * steps[:, None, block, token][..., spread]
            part += factors * numbers[:, None, block, token]
        shift = lane_sum(np.moveaxis(given[:, :, block, :, None] * offsets[:, None, block], 2, -1))
        out += part + shift[..., spread]
    return out


def lane_sum(products: Array) -> Array:
    """Return the sums over the last axis: element i goes to partial sum i % 16, which are then added in halves."""
    count = products.shape[-1]
    lanes = np.zeros((*products.shape[:-1], LANES), np.float32)
    for start in range(0, count, LANES):
        some = products[..., start : start + LANES]
        lanes[..., : some.shape[-1]] += some
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0], np.float32)
