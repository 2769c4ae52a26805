"""Features of a ``.squizd``, as its header flags them (SQUIZD, section 1); the kernels that run it follow from them."""

from __future__ import annotations

import enum


class Flags(enum.IntFlag):
    """Bits 0 to 6; the others are reserved."""

    ASTC = 1 << 0
    TCA_TBE = 1 << 1
    INT4 = 1 << 2
    SPARSE = 1 << 3
    EAGLE = 1 << 4
    INT2 = 1 << 5
    ANE_COREML = 1 << 6


KNOWN = 0x7F
