"""The grids of ggml's blocks (``spec/gguf.md``)."""

from __future__ import annotations

from collections.abc import Mapping

from ingot.quantization.grid import OFFSETS, Grid, Nested

_IQ4 = "iq4_nl"

GRIDS: Mapping[str, Grid] = {
    "q4_0": Grid(4, 32),
    "q4_1": Grid(4, 32, zeros=OFFSETS),
    "q5_0": Grid(5, 32),
    "q5_1": Grid(5, 32, zeros=OFFSETS),
    "q8_0": Grid(8, 32),
    "q2_k": Grid(2, 16, zeros=OFFSETS, nested=Nested("q2_k", 0, 15, 15)),
    "q3_k": Grid(3, 16, nested=Nested("q3_k", -32, 31)),
    "q4_k": Grid(4, 32, zeros=OFFSETS, nested=Nested("q4_k", 0, 63, 63)),
    "q5_k": Grid(5, 32, zeros=OFFSETS, nested=Nested("q5_k", 0, 63, 63)),
    "q6_k": Grid(6, 16, nested=Nested("q6_k", -128, 127)),
    "iq4_nl": Grid(4, 32, table=_IQ4),
    "iq4_xs": Grid(4, 32, table=_IQ4, nested=Nested("iq4_xs", -32, 31)),
}
"""The grid of each block type; the columns of a matrix are a whole number of blocks."""

AS_INTEGERS = ("q4_0", "q5_0", "q8_0")
"""Types that are stored as signed integers, which a container repacks as blocks or in another form for integers."""
