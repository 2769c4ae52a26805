"""The codec float_entropy: the suite, both levels, every float type, every kind of plane, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.float_entropy import EntropyCodec
from ingot.core.dtypes import DTYPES
from ingot.errors import CodecError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, Unreadable, read_rows, with_parts
from ingot.testing.strategies import random_bits

TYPES = tuple(row.name for row in DTYPES.values() if row.is_float and row.bits >= 8)
SMALL: dict[str, Any] = {"chunk": 256}
CODEC = EntropyCodec()


class TestEntropyCodec(CodecSuite):
    codec = CODEC
    cases = (
        *(Case((7, 150), dtype) for dtype in TYPES),
        *(Case((7, 150), dtype, {"level": "max"}) for dtype in TYPES),
        *(Case((40, 96), dtype, {**SMALL, "level": "max"}) for dtype in ("bf16", "f64")),
        *(
            Case(shape, "bf16", SMALL)
            for shape in ((), (0,), (1,), (255,), (257,), (0, 3), (3, 0), (2, 3, 170), (2, 0, 3))
        ),
        Case((64, 64), "f32"),
        Case((64, 64), "f32", {"level": "max"}),
    )

    def values(self, case: Case) -> Array:
        if "level" in case.options:
            return self.weights(case)
        return random_bits(np.random.default_rng(len(str(case))), case.shape, case.dtype, zeros=0.5)

    def test_check_refuses_wrong_sizes(self, case: Case) -> None:
        """How many bytes ``planes`` takes only the sizes tell, and ``check`` reads nothing: decoding tells then."""
        tensor = self.tensor(case)
        sizes, planes = tensor.parts["sizes"], tensor.parts["planes"]
        for wrong in (sizes.length + 4, sizes.length + 1, sizes.length - 4):
            if wrong >= 0:
                refused(with_parts(tensor, {"sizes": replace(sizes, length=wrong, source=Unreadable(wrong))}))
        for wrong in (CODEC.encoder(case.shape, case.dtype, case.options).parts[1].at_most + 1, 0):
            if wrong != planes.length:
                refused(with_parts(tensor, {"planes": replace(planes, length=wrong, source=Unreadable(wrong))}))
        data = bytes(planes.view())
        for other in (data + b"\0", data[:-1]):
            if len(other) == len(data):
                continue
            damaged = with_parts(tensor, {"planes": memory_part(np.frombuffer(other, np.uint8), "u8")})
            for read in (damaged.numpy, lambda damaged=damaged: read_rows(CODEC, damaged, tensor.dtype)):
                with pytest.raises(CodecError) as caught:
                    read()
                assert caught.value.rule == "float_entropy.size"


def refused(tensor: Tensor, rule: str = "float_entropy.size") -> None:
    with pytest.raises(CodecError) as caught:
        CODEC.check(tensor)
    assert caught.value.rule == rule
