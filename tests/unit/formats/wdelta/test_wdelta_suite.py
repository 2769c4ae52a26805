"""``.wdelta`` keeps what every format promises, for each of its codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np
import pytest

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES
from ingot.formats.wdelta.format import WdeltaFormat
from ingot.model.artifact import Artifact
from ingot.model.delta import Change, DeltaInfo, Identity
from ingot.model.spec import TensorSpec
from ingot.testing.codecs import encode_parts
from ingot.testing.formats import FormatSuite, Item
from tests.support.wdelta import PARENT


class WdeltaSuite(FormatSuite):
    """A tensor of element type D is a difference to a tensor of type D."""

    format = WdeltaFormat()
    codec: ClassVar[str]
    codec_options: ClassVar[Mapping[str, Any]] = {}

    def item(self, name: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Item:
        codec = CODECS[self.codec]
        encoder = codec.encoder(shape, "f32", self.codec_options)
        values = np.random.default_rng(seed).normal(0, 0.01, prod(shape)).astype(np.float32).reshape(shape)
        parts = {role: array.tobytes() for role, array in encode_parts(codec, encoder, values).items()}
        return Item(TensorSpec(name, shape, "f32", self.codec, encoder.parts, encoder.params), parts)

    def described(self, items: Sequence[Item], metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        strategy = {"delta_sparse": "sparse", "delta_sign": "quantized", "delta_int4": "int4"}[self.codec]
        strategy = strategy if items else "sparse"
        changes = {item.spec.name: Change("apply", "bf16") for item in items}
        info = DeltaInfo(1, strategy, Identity(hashes={"wdelta": PARENT}), tensors=changes)
        return {**(metadata or {}), "delta": info.to_metadata()}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_base_of_any_element_type(self, dtype: str) -> None:
        item = self.item("x", (4, 6), "f32")
        info = DeltaInfo(1, "int4", Identity(hashes={"wdelta": PARENT}), tensors={"x": Change("apply", dtype)})
        target, _ = self.write([item])
        writer = self.format.writer(
            target, self.file, Artifact([item.spec], {"delta": info.to_metadata()}), self.options
        )
        writer.begin(item.spec)
        for role, data in item.parts.items():
            writer.write(role, data)
        writer.end()
        writer.finish()
        assert self.read(target).metadata["delta"]["tensors"] == {"x": {"op": "apply", "dtype": dtype}}


class TestSparse(WdeltaSuite):
    codec = "delta_sparse"


class TestQuantized(WdeltaSuite):
    codec = "delta_sign"


class TestInt4(WdeltaSuite):
    codec = "delta_int4"
    codec_options: ClassVar[Mapping[str, Any]] = {"outlier_fraction": 0.2}


class TestInt4OfVersion2(WdeltaSuite):
    codec = "delta_int4"
    codec_options: ClassVar[Mapping[str, Any]] = {"layout": 2}
