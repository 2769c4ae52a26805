"""The example plugin's codec and format pass the suites that Ingot offers to authors."""

from __future__ import annotations

import sys
from pathlib import Path

from ingot.testing.codecs import Case, CodecSuite
from ingot.testing.formats import FormatSuite

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ingot_example.codec import Fixed16Codec
from ingot_example.format import FlatFormat


class TestFixed16(CodecSuite):
    codec = Fixed16Codec()
    cases = (
        Case((4, 6)),
        Case((0, 3), "bf16"),
        Case((), "f32", {"exponent": -11}),
        Case((2, 3, 5), "f16", {"exponent": -10}),
    )
    min_snr_db = 40.0


class TestFlat(FormatSuite):
    format = FlatFormat()
