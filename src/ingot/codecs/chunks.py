"""What ``float_entropy`` and ``delta_exact`` say of their chunks alike: sizes, and the version of the codec."""

from __future__ import annotations

LEAST_CHUNK, MOST_CHUNK = 1 << 8, 1 << 20
# Elements per call: enough to make a call's cost vanish, few enough to spread over threads.
STEP = 1 << 20
VERSION = 1
LATER = 2  # chunks may be coded by rANS, which those of RANS_CHUNK elements and more are
RANS_CHUNK = 1 << 16


def is_chunk(chunk: int) -> bool:
    """Whether a chunk may have so many elements."""
    return LEAST_CHUNK <= chunk <= MOST_CHUNK and chunk & (chunk - 1) == 0


def version_for(chunk: int, size: int, *, rans: bool = True) -> int:
    """``codec_version`` of a tensor of ``size`` elements; ``rans`` says whether its encoder may choose rANS at all."""
    return LATER if rans and min(chunk, size) >= RANS_CHUNK else VERSION


def is_version(version: object) -> bool:
    """Whether it is a ``codec_version`` that can be read."""
    return version in (VERSION, LATER) and not isinstance(version, bool)
