"""Chunk sizes and codec versions that ``float_entropy`` and ``delta_exact`` share."""

from __future__ import annotations

MIN_CHUNK, MAX_CHUNK = 1 << 8, 1 << 20
# Elements per call: enough to make a call's cost vanish, few enough to spread over threads.
STEP = 1 << 20
VERSION = 1
LATER = 2  # a chunk may be coded by rANS, as chunks of at least RANS_CHUNK elements are
RANS_CHUNK = 1 << 16


def is_chunk(chunk: int) -> bool:
    """Return whether a chunk may have ``chunk`` elements: a power of two within the limits."""
    return MIN_CHUNK <= chunk <= MAX_CHUNK and chunk & (chunk - 1) == 0


def version_for(chunk: int, size: int, *, rans: bool = True) -> int:
    """Return ``codec_version`` of a tensor of ``size`` elements.

    ``rans``: whether its encoder may choose rANS at all.
    """
    return LATER if rans and min(chunk, size) >= RANS_CHUNK else VERSION


def is_version(version: object) -> bool:
    """Return whether ``version`` is a ``codec_version`` that can be read."""
    return version in (VERSION, LATER) and not isinstance(version, bool)
