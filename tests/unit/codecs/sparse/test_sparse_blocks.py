"""``sparse_blocks``: the suite over inner codecs, what is kept and what is zero, and hostile parameters and masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.base import row_step
from ingot.codecs.sparse.blocks import BlocksCodec, stored_mask
from ingot.codecs.table import CODECS
from ingot.core.numeric.blocks import Blocks, block_count, clip_spans, mask_bytes
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor, read_rows

INT4 = {"inner": "affine", "options": {"bits": 4, "group": 8}}
PER_TENSOR = {"inner": "affine", "options": {"bits": 8, "group": "tensor"}}
CSR = {"inner": "sparse_csr"}


def options(channels: int, block: int, axis: int, kept: str, **inner: Any) -> dict[str, Any]:
    """Options that keep the blocks with a 1 in ``kept``."""
    assert len(kept) == block_count(channels, block)
    mask = Blocks.from_flags(channels, block, [char == "1" for char in kept]).mask
    return {"axis": axis, "block": block, "mask": mask, **inner}


def reference(source: np.ndarray, case: Case) -> np.ndarray:
    """The source with zeros where blocks were dropped, by single channels."""
    out = source.astype(np.float64)
    axis, block, mask = (case.options.get(key) for key in ("axis", "block", "mask"))
    for channel in range(source.shape[axis or 0] if mask is not None else 0):
        index = channel // block
        if not mask[index // 8] >> index % 8 & 1:
            out[(slice(None),) * axis + (channel,)] = 0
    return out


class TestSparseBlocks(CodecSuite):
    codec = BlocksCodec()
    cases = (
        Case((6, 5)),
        Case((6, 5), "i32"),
        Case((10, 7), "bf16", options(10, 3, 0, "1011")),
        Case((10, 7), "bf16", options(10, 3, 0, "0110")),
        Case((7, 10), "f16", options(10, 3, 1, "0101")),
        Case((7, 10), "f32", options(10, 3, 1, "1000")),
        Case((40, 16), "f32", options(40, 4, 0, "0100110001", **INT4)),
        Case((12, 40), "f32", options(40, 8, 1, "01101", **INT4)),
        Case((12, 20), "f32", options(12, 4, 0, "010", **PER_TENSOR)),
        Case((12, 20), "f32", options(20, 4, 1, "11010", **PER_TENSOR)),
        Case((12, 20), "f32", options(12, 4, 0, "000", **PER_TENSOR)),
        Case((10, 7), "bf16", options(10, 3, 0, "0110", whole=True)),
        Case((7, 10), "f16", options(10, 3, 1, "0101", whole=True)),
        Case((12, 40), "f32", options(40, 8, 1, "01101", whole=True, **INT4)),
        Case((40, 16), "f32", options(40, 4, 0, "0100110001", whole=True, **INT4)),
        Case((12, 20), "f32", options(12, 4, 0, "011", **CSR)),
        *(Case((12, 20), "f32", options(12, 4, 0, "000", inner=inner)) for inner in ("low_rank", "palette")),
        *(Case((12, 20), "f32", options(20, 4, 1, "00000", inner=inner)) for inner in ("low_rank", "palette")),
        Case((6, 5), "f32", options(6, 2, 0, "000")),
        Case((6, 5), "f32", options(5, 2, 1, "000")),
        Case((0, 5), "f32", options(0, 2, 0, "")),
        Case((5, 0), "f32", options(5, 2, 0, "010")),
        Case((0, 5), "f32", options(5, 2, 1, "010")),
        Case((6, 5), "f32", options(6, 2, 0, "101", inner="dense", options={"dtype": "bf16"})),
    )

    def check_loss(self, case: Case, source: np.ndarray, decoded: np.ndarray) -> None:
        wanted = reference(source, case)
        assert not decoded[wanted == 0].any() or case.options.get("inner") == "affine"
        noise = float(((wanted - decoded) ** 2).sum())
        exact = case.options.get("inner", "dense") != "affine" and "options" not in case.options
        assert noise == 0 if exact else noise <= float((wanted**2).sum()) * 0.02


def test_the_layout() -> None:
    source = np.arange(30, dtype=np.float32).reshape(10, 3)
    tensor = encode_tensor(CODECS["sparse_blocks"], source, options(10, 4, 0, "101"), dtype="f32")
    assert dict(tensor.params) == {
        "codec_version": 1,
        "axis": 0,
        "block": 4,
        "channels": 10,
        "kept": 6,
        "inner": "dense",
        "inner_params": {},
        "dtype": "f32",
    }
    assert list(tensor.parts) == ["mask", "data"]
    assert bytes(tensor.parts["mask"].view()) == b"\x05"
    assert bytes(tensor.parts["data"].view()) == bits(source[[0, 1, 2, 3, 8, 9]])
    columns = encode_tensor(CODECS["sparse_blocks"], source.T.copy(), options(10, 4, 1, "101"), dtype="f32")
    assert bytes(columns.parts["data"].view()) == bits(source.T[:, [0, 1, 2, 3, 8, 9]])
    assert stored_mask(columns) == Blocks(10, 4, b"\x05")


def test_dropped_blocks_are_positive_zero_and_may_hold_anything() -> None:
    source = np.full((4, 4), np.nan, np.float32)
    source[2:] = -1
    for axis, values in ((0, source), (1, source.T.copy())):
        tensor = encode_tensor(CODECS["sparse_blocks"], values, options(4, 2, axis, "01", **INT4), dtype="f32")
        decoded = tensor.numpy()
        assert not bits(decoded if axis else decoded[:2]).count(0x80) or axis
        assert (np.signbit(decoded) == (values == -1)).all()


@given(st.data())
def test_any_mask_and_any_chunks(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(0, 24)), data.draw(st.integers(0, 24))
    axis, block = data.draw(st.integers(0, 1)), data.draw(st.integers(1, 9))
    count = block_count((rows, cols)[axis], block)
    kept = "".join(data.draw(st.lists(st.sampled_from("01"), min_size=count, max_size=count)))
    inner = data.draw(st.sampled_from([{}, CSR, PER_TENSOR, INT4]))
    cuts = tuple(data.draw(st.lists(st.integers(0, 24), max_size=3)))
    case = Case((rows, cols), "f32", options((rows, cols)[axis], block, axis, kept, **inner))
    source = np.random.default_rng(rows).integers(-7, 8, (rows, cols)).astype(np.float32)
    whole = encode_tensor(CODECS["sparse_blocks"], source, case.options, dtype="f32")
    cut = encode_tensor(CODECS["sparse_blocks"], source, case.options, dtype="f32", cuts=cuts)
    assert {role: bytes(part.view()) for role, part in whole.parts.items()} == {
        role: bytes(part.view()) for role, part in cut.parts.items()
    }
    decoded = whole.numpy()
    if inner in ({}, CSR):
        np.testing.assert_array_equal(decoded, reference(source, case))
    assert bits(read_rows(CODECS["sparse_blocks"], whole, "f32", cuts)) == bits(decoded)


def test_chunks_are_decoded_where_they_belong() -> None:
    """The error of a chunk is measured against its own rows, wherever it begins."""
    encoder = CODECS["sparse_blocks"].encoder((8, 3), "f32", options(8, 2, 0, "0110"))
    source = np.arange(1, 25, dtype=np.float32).reshape(8, 3)
    for start, stop in ((0, 2), (2, 3), (3, 8), (6, 8)):
        out = np.full((stop - start, 3), 9, np.float32)
        encoder.decode(encoder.encode(source[start:stop], start), out)
        wanted = np.where((np.arange(start, stop) // 2 % 3 > 0)[:, None], source[start:stop], 0)
        np.testing.assert_array_equal(out, wanted)


class Stepped:
    """A codec of rows that insists on chunks of three."""

    id, lossless, elementwise, streams = "stepped", True, False, True

    def encoder(self, shape: tuple[int, ...], dtype: str, options: Any) -> Any:
        inner = CODECS["dense"].encoder(shape, dtype, options)
        return type("Encoder", (), {**{key: getattr(inner, key) for key in inner.__slots__}, "step": 3})()


def test_inner_steps_decide_how_rows_may_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS._targets, "stepped", "x:x")
    monkeypatch.setitem(CODECS._loaded, "stepped", Stepped())  # type: ignore[arg-type]
    codec = CODECS["sparse_blocks"]

    def cut(axis: int, block: int) -> tuple[int, bool]:
        encoder = codec.encoder((12, 12), "f32", {"axis": axis, "block": block, "inner": "stepped"})
        return row_step(codec, encoder, 12), encoder.single_chunk

    assert cut(0, 6) == (6, False)
    assert cut(0, 3) == (3, False)
    assert cut(0, 4)[1]
    assert cut(1, 4) == (3, False)


# Hostile.


def good(axis: int = 0) -> Tensor:
    source = np.arange(40, dtype=np.float32).reshape(10, 4)
    source = source if axis == 0 else source.T.copy()
    return encode_tensor(CODECS["sparse_blocks"], source, options(10, 3, axis, "1011"), dtype="f32")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"codec_version": 2}, "params"),
        ({"axis": 2}, "params"),
        ({"axis": True}, "params"),
        ({"axis": 1}, "shape"),
        ({"block": 0}, "params"),
        ({"block": "3"}, "params"),
        ({"block": 2**63}, "params"),
        ({"block": 1}, "size"),
        ({"channels": 9}, "shape"),
        ({"channels": -1}, "params"),
        ({"kept": 11}, "params"),
        ({"kept": None}, "params"),
        ({"inner": "sparse_blocks"}, "inner"),
        ({"inner": "sparse_coo"}, "inner"),
        ({"inner": "gzip"}, "inner"),
        ({"inner": 3}, "inner"),
        ({"inner": ["dense"]}, "inner"),
        ({"inner_params": None}, "params"),
        ({"inner_params": [1]}, "params"),
        ({"inner_params": {1: 2}}, "params"),
        ({"inner_params": {"dtype": "bf16"}}, "params"),
        ({"dtype": "f16"}, "params"),
        ({"dtype": None}, "params"),
    ],
)
def test_parameters_that_mean_nothing(change: dict[str, Any], rule: str) -> None:
    if change == {"block": 1}:  # a mask of two bytes, not one
        assert mask_bytes(10, 1) == 2
    wrong = replace(good(), params={**good().params, **change})
    for attempt in (CODECS["sparse_blocks"].check, CODECS["sparse_blocks"].reader):
        with pytest.raises(CodecError) as caught:
            attempt(wrong)
        assert caught.value.rule == f"sparse_blocks.{rule}"


def test_the_inner_codec_refuses_by_its_own_rules() -> None:
    wrong = replace(good(), params={**good().params, "kept": 8})
    with pytest.raises(CodecError) as caught:
        CODECS["sparse_blocks"].check(wrong)
    assert caught.value.rule == "dense.size"
    wrong = replace(good(), params={**good().params, "inner": "quantized_group", "inner_params": {"bits": 4}})
    with pytest.raises(CodecError) as caught:
        CODECS["sparse_blocks"].check(wrong)
    assert caught.value.rule == "affine.params"


def test_other_shapes_are_refused() -> None:
    with pytest.raises(CodecError) as caught:
        CODECS["sparse_blocks"].check(replace(good(), shape=(10, 2, 2)))
    assert caught.value.rule == "sparse_blocks.shape"
    with pytest.raises(UnsupportedError) as refused:
        CODECS["sparse_blocks"].encoder((10, 2, 2), "f32", {})
    assert refused.value.rule == "sparse_blocks.shape"


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mask", [0b11101, 0b10000, 0xFF, 0b0000, 0b1111, 0b0111])
def test_masks_that_disagree_with_the_rest(axis: int, mask: int) -> None:
    tensor = good(axis)
    parts = {**tensor.parts, "mask": memory_part(np.array([mask], np.uint8), "u8")}
    wrong = replace(tensor, parts=parts)
    CODECS["sparse_blocks"].check(wrong)
    for attempt in (CODECS["sparse_blocks"].reader, stored_mask, Tensor.numpy):
        with pytest.raises(CodecError) as caught:
            attempt(wrong)
        assert caught.value.rule == "sparse_blocks.mask"


@pytest.mark.parametrize(
    "wrong",
    [
        {"axis": 2},
        {"axis": False},
        {"block": 0},
        {"block": 1.5},
        {"mask": b""},
        {"mask": b"\x01\x00"},
        {"mask": b"\x10", "block": 16},
        {"mask": [True]},
        {"options": 3},
    ],
)
def test_options_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODECS["sparse_blocks"].encoder((60, 4), "f32", wrong)
    assert caught.value.rule == "sparse_blocks.option"


@pytest.mark.parametrize("inner", ["sparse_blocks", "sparse_coo", "gzip", 3])
def test_inner_codecs_that_cannot_be_within(inner: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODECS["sparse_blocks"].encoder((6, 4), "f32", {"inner": inner})
    assert caught.value.rule == "sparse_blocks.inner"


@given(st.integers(0, 300), st.integers(1, 70), st.data())
def test_spans_are_the_kept_channels(channels: int, block: int, data: st.DataObject) -> None:
    count = block_count(channels, block)
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    blocks = Blocks.from_flags(channels, block, kept)
    wanted = {channel for channel in range(channels) if kept[channel // block]}
    found = [channel for first, last in blocks.spans() for channel in range(first, last)]
    assert found == sorted(wanted)
    assert (blocks.kept_channels, blocks.count, blocks.has_spare_bits) == (len(wanted), count, False)
    start, stop = sorted((data.draw(st.integers(0, channels)), data.draw(st.integers(0, channels))))
    part = [channel for first, last in clip_spans(blocks.spans(), start, stop) for channel in range(first, last)]
    assert part == [channel for channel in found if start <= channel < stop]


def test_a_few_bytes_cannot_claim_a_matrix_without_end() -> None:
    tensor = encode_tensor(BlocksCodec(), np.zeros((8, 4), np.float32), {"block": 4, "mask": b"\x00"}, dtype="f32")
    params = {**tensor.params, "channels": 2**46, "block": 2**46, "kept": 0}
    with pytest.raises(CodecError) as caught:
        BlocksCodec().check(replace(tensor, shape=(2**46, 4), params=params))
    assert caught.value.rule == "sparse_blocks.size"
