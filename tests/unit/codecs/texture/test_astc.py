"""The ASTC codec: the suite on every footprint, the promised quality, hostile parts, the missing package."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.table import CODECS
from ingot.codecs.texture.astc import AstcCodec
from ingot.codecs.texture.astc_blocks import FOOTPRINTS, Blocks
from ingot.core.runtime import parallel
from ingot.errors import CodecError, MissingExtraError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_parts, encode_tensor, read_rows, with_parts

CODEC = CODECS["astc"]
# Of the Khronos enumeration (KHR_texture_compression_astc), and the rate of each: 128 bits over its texels.
RATES = (8.00, 6.40, 5.12, 4.27, 3.56, 3.20, 2.67, 2.00, 2.56, 2.13, 1.60, 1.28, 1.07, 0.89)


class TestAstcCodec(CodecSuite):
    codec = AstcCodec()
    cases = (
        *(Case((25, 26), "f32", {"footprint": footprint}) for footprint in FOOTPRINTS),
        *(Case(shape, "f32") for shape in [(), (7,), (0,), (0, 3), (3, 0), (1, 1), (6, 6), (12, 40), (2, 3, 5)]),
        *(Case((13, 20), dtype) for dtype in ("f16", "bf16", "f64")),
        Case((13, 20), "bf16", {"footprint": "4x4", "quality": 60}),
        Case((13, 20), "f32", {"quality": 0}),
    )

    def check_loss(self, case: Case, source: Array, decoded: Array) -> None:
        """A texel lies between the ends of its block's colours, so no value is past the largest magnitude."""
        if source.size:
            largest = float(np.abs(source.astype(np.float64)).max())
            assert float(np.abs(decoded).max()) <= largest * (1 + 1e-6)
            assert float(((source.astype(np.float64) - decoded) ** 2).sum()) <= float((source.astype(float) ** 2).sum())


def gaussian(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


def snr(source: Array, decoded: Array) -> float:
    reference = source.astype(np.float64)
    return float(10 * np.log10((reference**2).sum() / ((reference - decoded) ** 2).sum()))


def test_footprints_are_those_of_the_standard() -> None:
    assert list(FOOTPRINTS)[:3] == ["4x4", "5x4", "5x5"]
    assert tuple(round(128 / (width * height), 2) for width, height in FOOTPRINTS.values()) == RATES


def test_quality_at_6x6_is_that_of_the_reference() -> None:
    source = gaussian((480, 480))
    tensor = encode_tensor(CODEC, source, dtype="f32")
    assert tensor.nbytes == 80 * 80 * 16 + 8  # 3.56 bits per weight and the map
    assert abs(snr(source, tensor.numpy()) - 13.9) < 0.3


def test_large_blocks_lose_more() -> None:
    source = gaussian((120, 120))
    found = [
        snr(source, encode_tensor(CODEC, source, {"footprint": one}, dtype="f32").numpy())
        for one in ("4x4", "5x5", "6x6", "8x8", "12x12")
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 29


def test_values_that_are_all_zero_or_all_one_survive() -> None:
    for value in (0.0, 0.125, -3.0):
        source = np.full((13, 9), value, np.float32)
        tensor = encode_tensor(CODEC, source, dtype="f32")
        assert np.array_equal(tensor.numpy(), source), value
    assert tensor.parts["scales"].array() == 6
    assert tensor.parts["zeros"].array() == -3


def test_extremes_of_the_range_keep_their_size() -> None:
    for amax in (2.0**-149, 1e-38, 2.0**126):
        source = gaussian((12, 12)) * 0
        source[0, 0], source[11, 11] = amax, -amax
        decoded = encode_tensor(CODEC, source, {"footprint": "4x4", "quality": 60}, dtype="f32").numpy()
        assert abs(float(decoded[0, 0]) / amax - 1) < 0.3


@pytest.mark.parametrize("shape", [(60, 4000), (13, 22_003)])
def test_bands_and_split_rows_are_those_of_small_chunks(shape: tuple[int, int]) -> None:
    """More than one band, and rows so long that a block row is coded in several calls."""
    source, options = gaussian(shape), {"footprint": "12x12", "quality": 0}
    whole = encode_tensor(CODEC, source, options, dtype="f32")
    cut = encode_tensor(CODEC, source, options, dtype="f32", cuts=(12, 36, 48))
    assert bytes(whole.parts["blocks"].view()) == bytes(cut.parts["blocks"].view())
    assert bits(read_rows(CODEC, whole, "f32", (1, 13, 40))) == bits(whole.numpy())


def test_every_band_covers_its_own_rows_and_bytes() -> None:
    layout = Blocks(rows=1000, cols=999, width=8, height=5)
    bands = [layout.band(index) for index in range(layout.bands)]
    assert len(bands) > 5
    assert [rows.start for rows, _ in bands] == [0, *(rows.stop for rows, _ in bands[:-1])]
    assert [data.start for _, data in bands] == [0, *(data.stop for _, data in bands[:-1])]
    assert (bands[-1][0].stop, bands[-1][1].stop) == (1000, layout.nbytes)


def test_threads_may_share_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coder's contexts serve one thread at a time: used by two at once they wait for each other forever."""
    monkeypatch.setattr(parallel, "default_workers", lambda: 4)
    source = gaussian((240, 240))
    encoder = CODEC.encoder(source.shape, "f32", {"quality": 0})
    expected = encode_parts(CODEC, encoder, source)["blocks"]
    found: list[bool] = []

    def run() -> None:
        found.append(bits(encoder.encode(source)["blocks"]) == bits(expected))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 4


@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(dtype: str, value: float) -> None:
    source = np.zeros((8, 9), {"f32": np.float32, "f16": np.float16, "f64": np.float64}[dtype])
    source[7, 4] = value
    with pytest.raises(CodecError) as caught:
        encode_tensor(CODEC, source, dtype=dtype, cuts=(6,))
    assert caught.value.rule == "astc.non-finite"
    assert "row 7, column 4" in str(caught.value)


def test_a_range_that_f32_cannot_hold_is_refused() -> None:
    with pytest.raises(CodecError) as caught:
        encode_tensor(CODEC, np.array([[2.0**127, -(2.0**127) * 1.5]], np.float32), dtype="f32")
    assert caught.value.rule == "astc.scale-overflow"


@pytest.mark.parametrize("dtype", ["i8", "bool", "f8_e4m3fn", "complex64"])
def test_only_floats_are_compressed(dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODEC.encoder((8, 8), dtype, {})
    assert caught.value.rule == "astc.dtype"


@pytest.mark.parametrize(
    "options",
    [{"footprint": "7x7"}, {"footprint": 6}, {"footprint": ["6x6"]}, {"footprint": "3x3x3"}]
    + [{"quality": value} for value in (-1, 101, True, "high", float("nan"))],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((8, 8), "f32", options)
    assert caught.value.rule == "astc.option"


def sample() -> Tensor:
    return encode_tensor(CODEC, gaussian((12, 18)), dtype="f32")


@pytest.mark.parametrize(
    "change",
    [
        {"codec_version": 2},
        {"codec_version": "1"},
        {"profile": "hdr"},
        {"footprint": "9x9"},
        {"footprint": [6, 6]},
        {"footprint": None},
        {"dtype": "i8"},
        {"dtype": ["f32"]},
        {"dtype": "f16"},  # another than the tensor's
    ],
)
def test_wrong_attributes_are_refused(change: dict[str, object]) -> None:
    tensor = sample()
    wrong = replace(tensor, params={**tensor.params, **change})
    for attempt in (lambda: CODEC.check(wrong), wrong.numpy, lambda: CODEC.reader(wrong)):
        with pytest.raises(CodecError) as caught:
            attempt()
        assert caught.value.rule == "astc.params"


def test_wrong_part_types_are_refused() -> None:
    tensor = sample()
    wrong = with_parts(tensor, {"scales": memory_part(np.zeros(1, np.int32), "i32")})
    with pytest.raises(CodecError) as caught:
        CODEC.check(wrong)
    assert caught.value.rule == "astc.dtype"


@pytest.mark.parametrize("block", [b"\0" * 16, b"\xff" * 16, bytes.fromhex("fcffffffffffffff003c003c003c003c")])
def test_blocks_outside_the_profile_are_refused(block: bytes) -> None:
    """Reserved block modes, and a constant block of the HDR profile."""
    tensor = sample()
    data = np.frombuffer(bytes(tensor.parts["blocks"].view()[:-16]) + block, np.uint8)
    wrong = with_parts(tensor, {"blocks": memory_part(data, "u8")})
    for attempt in (wrong.numpy, lambda: wrong.numpy("f16"), lambda: read_rows(CODEC, wrong, "f32", (3,))):
        with pytest.raises(CodecError) as caught:
            attempt()
        assert caught.value.rule == "astc.block"


@pytest.mark.parametrize(("scale", "zero"), [(np.nan, 0.0), (1.0, np.inf), (-np.inf, 0.0)])
def test_a_map_that_is_not_finite_is_refused(scale: float, zero: float) -> None:
    wrong = with_parts(
        sample(),
        {
            "scales": memory_part(np.array([scale], np.float32), "f32"),
            "zeros": memory_part(np.array([zero], np.float32), "f32"),
        },
    )
    for attempt in (wrong.numpy, lambda: CODEC.reader(wrong)):
        with pytest.raises(CodecError) as caught:
            attempt()
        assert caught.value.rule == "astc.scale"


@pytest.mark.parametrize(("dtype", "scale"), [("f16", 1e6), ("f32", 3e38), ("bf16", 3e38), ("f64", 3e38)])
def test_values_past_the_range_are_refused(dtype: str, scale: float) -> None:
    wrong = with_parts(
        sample(),
        {
            "scales": memory_part(np.array([scale], np.float32), "f32"),
            "zeros": memory_part(np.array([scale], np.float32), "f32"),
        },
    )
    with pytest.raises(CodecError) as caught:
        wrong.numpy(dtype)
    assert caught.value.rule == "astc.overflow"


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = sample()
    monkeypatch.setitem(sys.modules, "astc_encoder", None)
    CODEC.check(tensor)  # what a file says can be told without the coder
    for attempt in (tensor.numpy, CODEC.encoder((8, 8), "f32", {}).ready):
        with pytest.raises(MissingExtraError) as caught:
            attempt()
        assert (caught.value.extra, caught.value.exit_code) == ("astc", 3)
