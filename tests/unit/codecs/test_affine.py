"""The affine codec: the suite, and what only this codec promises."""

from __future__ import annotations

from ingot.codecs.affine import AffineCodec
from ingot.testing.codecs import Case, CodecSuite


class TestAffineCodec(CodecSuite):
    codec = AffineCodec()
    cases = (
        *(Case((5, 300), "bf16", {"bits": bits, "group": 64}) for bits in range(2, 9)),
        *(Case((6, 131), dtype, {"bits": 4, "group": 32}) for dtype in ("f16", "f32", "f64")),
        *(Case(shape) for shape in ((), (0,), (1,), (7,), (0, 3), (3, 0), (2, 3, 40), (2, 0, 3), (1, 2, 1, 2))),
        *(Case((5, 77), "f32", {"bits": 8, "group": group}) for group in ("row", "tensor", 1, 1000)),
        *(Case((5, 77), "bf16", {"symmetric": False, "group": group, "bits": 3}) for group in ("row", "tensor", 10)),
        *(Case((5, 77), "f32", {"scales": scales, "bit_order": "msb"}) for scales in ("f16", "bf16", "f32")),
        *(Case((5, 77), "f16", {"quantizer": "mse", "symmetric": way}) for way in (True, False)),
        *(Case((5, 77), "f16", {"quantizer": "mse", "symmetric": way, "group": "tensor"}) for way in (True, False)),
        *(Case(shape, "f32", {"group": "tensor", "symmetric": False}) for shape in ((), (0, 3), (3, 0))),
        *(Case(shape, "f32", {"group": "row", "bits": 8}) for shape in ((), (0, 3), (3, 0))),
    )
    min_snr_db = 3.0
