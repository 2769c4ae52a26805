"""Weights as windows of bit streams: the suite, and what only this codec promises."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.codecs.trellis.codec import TrellisCodec
from ingot.codecs.trellis.streams import band_for, bands_of, pack_band, values_of
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.layouts.trellis import TrellisLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import Case, CodecSuite, encode_tensor, read_rows
from tests.support.reference import trellis as reference

CODEC = TrellisCodec()


class TestTrellis(CodecSuite):
    codec = CODEC
    cases = (
        *(Case((20, 16), dtype, {"group": 8}) for dtype in ("f32", "f16", "bf16")),
        Case((17, 12), "f32", {"group": 12, "bits": 2, "scales": "f32"}),
        Case((33, 6), "bf16", {"group": 3, "bits": 3, "scales": "bf16"}),
        Case((270, 4), "f32", {"group": 4}),
        Case((2, 7, 10), "f32", {"group": 5}),
        *(Case(shape, "f32", {"group": 1}) for shape in ((), (1,), (7,), (0,), (0, 3), (3, 0))),
    )
    min_snr_db = 9.0


def test_values_are_quantiles() -> None:
    for bits in (2, 3, 4):
        values = values_of(bits)
        assert len(np.unique(values)) > 4000
        assert np.array_equal(np.sort(values), np.sort(-values))
        assert (values == values.astype(np.float16)).all()
        assert np.square(values, dtype=np.float64).mean() == pytest.approx(1, abs=1e-3)
    digests = [sha256(values_of(bits).astype("<f2").tobytes()).hexdigest()[:16] for bits in (2, 3, 4)]
    assert digests == ["5284330311014b9a", "069a40a901d96a29", "39101ae17cb1e441"]


@pytest.mark.parametrize(("bits", "most"), [(2, 0.074), (3, 0.0190), (4, 0.0050)])
def test_error_of_gaussian_weights(bits: int, most: float) -> None:
    source = np.random.default_rng(1).normal(size=(256, 24)).astype(np.float32)
    found = encode_tensor(CODEC, source, {"bits": bits, "group": 24}, dtype="f32").numpy("f32")
    assert np.square(found - source).mean() < most


def test_a_stream_worked_by_hand() -> None:
    # Four rows of three bits: the stream of a column is the symbols 1, 2, 3, 4 from the low bits on, and goes round.
    layout = TrellisLayout(3, 1, 16, "f32", "f32")
    word = 1 | 2 << 3 | 3 << 6 | 4 << 9
    parts = {"streams": np.array([word & 255, word >> 8], np.uint8), "scales": np.array([1, 2, -1, 0.5], np.float32)}
    tensor = Tensor.from_parts(layout, parts, (4, 1))
    windows = [word, word >> 3 | (1 << 9), word >> 6 | (1 | 2 << 3) << 6, word >> 9 | (1 | 2 << 3 | 3 << 6) << 3]
    wanted = values_of(3)[windows] * np.array([1, 2, -1, 0.5], np.float32)
    assert tensor.numpy("f32")[:, 0].tolist() == wanted.tolist()


@settings(max_examples=15)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 9), bits=st.integers(2, 4), lead=st.integers(1, 3),
    band=st.sampled_from((16, 32)), seed=st.integers(0, 99), dtype=st.sampled_from(("f32", "f16", "bf16")),
)  # fmt: skip
def test_any_streams_decode_as_the_reference_does(
    rows: int, cols: int, bits: int, lead: int, band: int, seed: int, dtype: str
) -> None:
    rng, layout = np.random.default_rng(seed), TrellisLayout(bits, 1, band, "f32", "f32")
    scales = rng.normal(size=(lead * rows, cols)).astype(np.float32)
    streams, wanted = [], []
    for first, last in bands_of(lead * rows, rows, band):
        packed = pack_band(rng.integers(0, 1 << 12, (cols, last - first)).astype(np.uint16), layout)
        streams.append(packed)
        wanted.append(reference.decode(packed, bits, last - first, values_of(bits), scales[first:last], dtype))
    tensor = Tensor.from_parts(
        layout, {"streams": np.concatenate(streams), "scales": scales.reshape(-1)}, (lead, rows, cols)
    )
    found = np.concatenate(wanted).reshape(tensor.shape)
    assert tensor.numpy(dtype).tobytes() == found.tobytes()
    assert read_rows(CODEC, tensor, dtype, (rows // 2, rows)).tobytes() == found.tobytes()
    assert tensor[lead - 1, rows // 3 :].tobytes() == tensor.numpy()[lead - 1, rows // 3 :].tobytes()


def test_bands_are_even_and_each_is_moved_alone() -> None:
    assert [band_for(rows) for rows in (1, 16, 17, 256, 257, 288, 768, 4096)] == [16, 16, 32, 256, 144, 144, 256, 256]
    source = np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32)
    tensor = encode_tensor(CODEC, source, {"bits": 3, "group": 8}, dtype="f32")
    assert CODEC.runs(tensor, (32, 8)) is None
    run = CODEC.runs(tensor, (128, 8))
    assert run is not None
    assert (run.elements, dict(run.nbytes)) == (512, {"streams": 192, "scales": 128})


def test_instruction_sets_give_the_same_bytes() -> None:
    source, seen, before = np.random.default_rng(5).normal(size=(40, 12)).astype(np.float32), set(), native.isa()
    for name in native.available_isas():
        native.set_isa(name)
        tensor = encode_tensor(CODEC, source, {"bits": 2, "group": 6}, dtype="f32")
        seen.add(b"".join(bytes(part.view()) for part in tensor.parts.values()) + tensor.numpy().tobytes())
    native.set_isa(before)
    assert len(seen) == 1


def test_zeros_stay_zeros() -> None:
    source = np.random.default_rng(7).normal(size=(16, 8)).astype(np.float32)
    source[5, :4] = 0
    found = encode_tensor(CODEC, source, {"group": 4}, dtype="f32").numpy()
    assert not found[5, :4].any()
    assert found[5, 4:].all()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"bits": 5}, "trellis.option"),
        ({"bits": True}, "trellis.option"),
        ({"group": "row"}, "trellis.option"),
        ({"scales": "f64"}, "trellis.option"),
        ({"table": "nf4"}, "trellis.option"),
        ({"group": 48}, "trellis.group"),
    ],
)
def test_options_are_checked(options: dict[str, object], rule: str) -> None:
    with pytest.raises((UsageError, UnsupportedError)) as caught:
        CODEC.encoder((4, 64), "f32", options)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"bits": 1}, "trellis.params"),
        ({"bits": 5}, "trellis.params"),
        ({"bits": 3}, "trellis.size"),
        ({"group_size": 0}, "trellis.params"),
        ({"group_size": 3}, "trellis.group"),
        ({"group_size": 4}, "trellis.size"),
        ({"band": 24}, "trellis.params"),
        ({"band": 8192}, "trellis.params"),
        ({"band": None}, "trellis.params"),
        ({"table": "nf4"}, "trellis.params"),
        ({"dtype": "f16"}, "trellis.params"),
        ({"codec_version": 2}, "trellis.params"),
    ],
)
def test_attributes_are_checked(change: dict[str, object], rule: str) -> None:
    tensor = encode_tensor(CODEC, np.ones((20, 8), np.float32), {"group": 8}, dtype="f32")
    with pytest.raises(IngotError) as caught:
        CODEC.check(replace(tensor, params={**tensor.params, **change}))
    assert caught.value.rule == rule


def test_bits_behind_a_stream_are_refused() -> None:
    tensor = encode_tensor(CODEC, np.ones((5, 2), np.float32), {"bits": 2, "group": 2}, dtype="f32")
    streams = tensor.parts["streams"].array().copy()
    streams[-1] |= 0x80
    wrong = replace(tensor, parts={**tensor.parts, "streams": memory_part(streams, "u8")})
    for read in (wrong.numpy, lambda: read_rows(CODEC, wrong, "f32")):
        with pytest.raises(CodecError) as caught:
            read()
        assert caught.value.rule == "trellis.padding"


def test_parts_of_other_types_are_refused() -> None:
    tensor = encode_tensor(CODEC, np.ones((16, 8), np.float32), {"group": 8}, dtype="f32")
    for role, dtype in (("streams", "i8"), ("scales", "u16")):
        part = memory_part(tensor.parts[role].array().view(numpy_dtype(dtype)), dtype)
        with pytest.raises(CodecError) as caught:
            CODEC.check(replace(tensor, parts={**tensor.parts, role: part}))
        assert caught.value.rule == "trellis.dtype"


def test_finite_numbers_never_become_infinite() -> None:
    source = np.random.default_rng(2).normal(size=(16, 8)).astype(np.float32)
    tensor = encode_tensor(CODEC, source, {"group": 8, "scales": "f32"}, dtype="f32")
    for scale, refused in ((2e38, ("f32", "f16", "bf16")), (7e4, ("f16",)), (np.inf, ())):
        loud = memory_part(np.full(16, scale, np.float32), "f32")
        for dtype in ("f32", "f16", "bf16"):
            wrong = replace(tensor, parts={**tensor.parts, "scales": loud})
            if dtype not in refused:
                wrong.numpy(dtype)
                continue
            with pytest.raises(CodecError) as caught:
                wrong.numpy(dtype)
            assert caught.value.rule == "trellis.overflow"


def test_what_cannot_be_encoded_is_refused() -> None:
    for value, options, rule in ((np.nan, {}, "non-finite"), (1e30, {}, "scale-overflow")):
        source = np.full((2, 64), value, np.float32)
        with pytest.raises(CodecError) as caught:
            encode_tensor(CODEC, source, options, dtype="f32")
        assert caught.value.rule == f"trellis.{rule}"
    assert encode_tensor(CODEC, np.full((2, 64), 1e30, np.float32), {"scales": "f32"}, dtype="f32").numpy().all()
