"""The defaults of ``Encoder``, and the way in which wrapping encoders forward them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ingot.codecs.base import Encoder
from ingot.codecs.table import CODECS
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array

SHAPE = (8, 64)


class Plain(Encoder):
    """An encoder that states only what has no default."""

    codec = "plain"
    parts = (PartSpec("data", "f32", 4),)
    step = 1
    single_chunk = False
    params: Mapping[str, Any] = {}
    fit_passes = 0
    lossless = True

    def encode(self, rows: Array, start: int = 0) -> dict[str, Array]:
        return {"data": rows.reshape(-1)}

    def decode(self, parts: Mapping[str, Array], out: Array) -> None:
        out[...] = parts["data"].reshape(out.shape)


def test_an_encoder_needs_nothing_unless_it_says_so() -> None:
    encoder = Plain()
    assert (encoder.scratch_bytes(), encoder.scratch_bytes_per_element(), encoder.retained_bytes()) == (0, 0, 0)
    assert not encoder.observes()
    assert encoder.observe(np.zeros((1, 1), np.float32), 0)
    assert (dict(encoder.wider_options()), encoder.underflow()) == ({}, None)
    encoder.ready()
    encoder.fit_pass(np.zeros((1, 1), np.float32))
    encoder.forget()


@pytest.mark.parametrize(
    ("wrapper", "options"), [("sparse_blocks", {}), ("sparse_mask", {}), ("with_outliers", {"count": 1})]
)
def test_a_wrapping_encoder_forwards_the_range_of_its_inner_encoder(wrapper: str, options: Mapping[str, Any]) -> None:
    small = np.full(SHAPE, 1e-7, np.float32)
    within = {"bits": 4, "scales": "f16"}
    encoder = CODECS[wrapper].encoder(SHAPE, "f32", {**options, "inner": "affine", "options": within})
    assert encoder.observes()
    assert not encoder.observe(small, 0)
    assert encoder.underflow()


@pytest.mark.parametrize("wrapper", ["sparse_blocks", "sparse_mask"])
def test_values_are_not_read_for_an_inner_encoder_without_a_range(wrapper: str) -> None:
    assert not CODECS[wrapper].encoder(SHAPE, "f32", {"inner": "dense"}).observes()
