"""The defaults of ``Codec`` and ``Encoder``, and the way in which wrapping encoders forward them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ingot.codecs.base import Codec, Encoder
from ingot.codecs.table import CODECS
from ingot.model.spec import PartSpec
from ingot.model.tensor import Array
from ingot.testing.encoding import encode_tensor

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


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_derives_from_the_base_class_and_implements_what_it_promises(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, Codec)
    assert codec.checks_stored == (type(codec).stored is not Codec.stored)


def test_a_codec_without_a_feature_says_so() -> None:
    codec = CODECS["float_entropy"]
    tensor = encode_tensor(codec, np.ones((2, 16), np.float32), dtype="f32")
    assert (codec.runs(tensor, (1, 16)), codec.columns(tensor, 4)) == (None, None)
    assert (codec.to_runs(tensor), codec.sparse(tensor, "f32")) == (None, None)
    assert codec.repack(tensor, tensor.layout).why_not == "codec float_entropy has one layout only"
