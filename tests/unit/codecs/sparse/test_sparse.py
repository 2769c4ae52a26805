"""The sparse codecs: the suite, the document's layouts byte by byte, and hostile indices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs import base
from ingot.codecs.sparse.coo import CooCodec
from ingot.codecs.sparse.csr import CsrCodec
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError, IngotError, ResourceError, UnsupportedError
from ingot.model.layouts.alternatives import alternatives
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor, array_part
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor, read_rows
from tests.support.strategies import WHOLE_BYTE_DTYPES

U64_MAX = 2**64 - 1


class TestCsrCodec(CodecSuite):
    codec = CsrCodec()
    cases = (
        *(Case((6, 5), dtype) for dtype in WHOLE_BYTE_DTYPES),
        *(Case(shape, "f32") for shape in [(0, 0), (0, 3), (3, 0), (1, 1), (40, 3), (3, 40)]),
    )


class TestCooCodec(CodecSuite):
    codec = CooCodec()
    cases = (
        *(Case((6, 5), dtype) for dtype in WHOLE_BYTE_DTYPES),
        *(Case(shape, "f32") for shape in [(0,), (9,), (0, 3), (3, 0), (2, 3, 4), (2, 0, 4), (1, 2, 1, 5)]),
    )


def csr(
    indptr: Sequence[int],
    indices: Sequence[int],
    values: Sequence[float] | None = None,
    shape: tuple[int, ...] = (3, 4),
) -> Tensor:
    stored = np.arange(1, len(indices) + 1) if values is None else values
    parts = {
        "values": memory_part(np.array(stored, np.float32), "f32"),
        "indices": memory_part(np.array(indices, np.uint64), "u64"),
        "indptr": memory_part(np.array(indptr, np.uint64), "u64"),
    }
    return Tensor("t", shape, "f32", "sparse_csr", parts, decoder=CODECS["sparse_csr"])


def coo(coords: Sequence[Sequence[int]], shape: tuple[int, ...] = (3, 4), count: int | None = None) -> Tensor:
    flat = np.array(coords, np.uint64).reshape(-1)
    stored = len(coords[0]) if count is None else count
    parts = {
        "values": memory_part(np.arange(1, stored + 1).astype(np.float32), "f32"),
        "coords": memory_part(flat, "u64"),
    }
    return Tensor("t", shape, "f32", "sparse_coo", parts, decoder=CODECS["sparse_coo"])


def all_ways(tensor: Tensor) -> list[Callable[[], object]]:
    codec = CODECS[tensor.codec]
    return [
        tensor.numpy,
        lambda: tensor.numpy("f16"),
        lambda: read_rows(codec, tensor, "f32"),
        lambda: read_rows(codec, tensor, "f32", (1, 2)),
    ]


def refused(tensor: Tensor) -> str | None:
    """Return the rule by which every way of decoding refuses the tensor."""
    rules = set()
    for attempt in all_ways(tensor):
        with pytest.raises(CodecError) as caught:
            attempt()
        rules.add(caught.value.rule)
    assert len(rules) == 1
    return rules.pop()


def test_csr_layout_of_the_document() -> None:
    dense = np.array([[0, 5, 0, 6], [0, 0, 0, 0], [7, 0, 0, 0]], np.float32)
    tensor = encode_tensor(CODECS["sparse_csr"], dense, dtype="f32")
    assert {role: part.array().tolist() for role, part in tensor.parts.items()} == {
        "values": [5.0, 6.0, 7.0],
        "indices": [1, 3, 0],
        "indptr": [0, 2, 2, 3],
    }
    assert [part.dtype for part in tensor.parts.values()] == ["f32", "u64", "u64"]


def test_coo_layout_of_the_document() -> None:
    dense = np.array([[0, 5, 0, 6], [0, 0, 0, 0], [7, 0, 0, 0]], np.float32)
    tensor = encode_tensor(CODECS["sparse_coo"], dense, dtype="f32")
    assert tensor.parts["values"].array().tolist() == [5.0, 6.0, 7.0]
    assert tensor.parts["coords"].array().tolist() == [0, 0, 2, 1, 3, 0]


def test_only_plus_zero_is_left_out() -> None:
    dense = np.array([[0.0, -0.0, np.nan, 1e-45]], np.float32)
    dense.view(np.uint32)[0, 2] = 0x7F800001  # a signalling NaN with a payload
    for codec in ("sparse_csr", "sparse_coo"):
        tensor = encode_tensor(CODECS[codec], dense, dtype="f32")
        assert tensor.parts["values"].count == 3
        assert bits(tensor.numpy()) == bits(dense)


def test_order_within_a_row_is_free() -> None:
    assert csr([0, 3, 3, 3], [3, 0, 2]).numpy()[0].tolist() == [2.0, 0.0, 3.0, 1.0]
    assert coo([[2, 0], [0, 3]]).numpy()[2, 0] == 1.0


@pytest.mark.parametrize(
    ("indptr", "indices", "rule"),
    [
        ([1, 1, 1, 1], [0], "sparse_csr.indptr"),  # does not begin with 0
        ([0, 1, 1, 1], [0, 1], "sparse_csr.indptr"),  # ends before the stored values
        ([0, 1, 2, 3], [0, 1], "sparse_csr.indptr"),  # ends after them
        ([0, 2, 1, 2], [0, 1], "sparse_csr.indptr"),  # falls
        ([0, U64_MAX, 1, 2], [0, 1], "sparse_csr.indptr"),
        ([0, 0, U64_MAX, U64_MAX], [0], "sparse_csr.indptr"),
        ([0, 1, 1, 1], [4], "sparse_csr.index"),
        ([0, 1, 1, 1], [U64_MAX], "sparse_csr.index"),
        ([0, 0, 0, 2], [1, 1], "sparse_csr.duplicate"),
        ([0, 3, 3, 3], [1, 2, 1], "sparse_csr.duplicate"),
        ([0, 0, 5, 5], [0, 1, 2, 3, 3], "sparse_csr.duplicate"),  # more than there are columns
    ],
)
def test_hostile_csr_indices(indptr: list[int], indices: list[int], rule: str) -> None:
    tensor = csr(indptr, indices)
    CODECS["sparse_csr"].check(tensor)
    assert refused(tensor) == rule


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (coo([[3], [0]]), "sparse_coo.index"),
        (coo([[0], [4]]), "sparse_coo.index"),
        (coo([[U64_MAX], [0]]), "sparse_coo.index"),
        (coo([[0, 1, 0], [1, 1, 1]]), "sparse_coo.duplicate"),
        (coo([[U64_MAX], [U64_MAX]]), "sparse_coo.index"),
    ],
)
def test_hostile_coo_coordinates(tensor: Tensor, rule: str) -> None:
    CODECS["sparse_coo"].check(tensor)
    assert refused(tensor) == rule


@pytest.mark.parametrize(("shape", "count"), [((), 2), ((0,), 1), ((2, 2), 5)])
def test_more_coo_values_than_positions(shape: tuple[int, ...], count: int) -> None:
    assert refused(coo([[0] * count] * len(shape), shape=shape, count=count)) == "sparse_coo.duplicate"


def test_scalars_of_coo() -> None:
    codec = CODECS["sparse_coo"]
    for value in (0.0, -0.0, 2.5):
        tensor = encode_tensor(codec, np.array(value, np.float32), dtype="f32")
        assert tensor.parts["coords"].length == 0
        for decoded in (tensor.numpy(), read_rows(codec, tensor, "f32")):
            assert bits(decoded) == bits(np.array(value, np.float32))
            assert decoded.shape == ()
    out = np.empty((1, 1), np.float32)
    encoder = codec.encoder((), "f32", {})
    encoder.decode(encoder.encode(np.full((1, 1), 7, np.float32)), out)
    assert out[0, 0] == 7


@pytest.mark.parametrize("codec", ["sparse_csr", "sparse_coo"])
@pytest.mark.parametrize("dtype", ["i64", "u16", "f64"])
def test_index_parts_must_be_u64_or_u32(codec: str, dtype: str) -> None:
    tensor = csr([0, 1, 1, 1], [0]) if codec == "sparse_csr" else coo([[0], [0]])
    role = "indices" if codec == "sparse_csr" else "coords"
    part = tensor.parts[role]
    width = DTYPES[dtype].bits // 8
    wrong = replace(part, dtype=dtype, length=part.length // 8 * width)
    with pytest.raises(CodecError) as caught:
        CODECS[codec].check(replace(tensor, parts={**tensor.parts, role: wrong}))
    assert caught.value.rule == f"{codec}.index-dtype"


@pytest.mark.parametrize("shape", [(), (12,), (1, 3, 4)])
def test_csr_takes_matrices_only(shape: tuple[int, ...]) -> None:
    with pytest.raises(CodecError) as caught:
        CODECS["sparse_csr"].check(csr([0, 0, 0, 0], [], shape=shape))
    assert caught.value.rule == "sparse_csr.shape"
    with pytest.raises(UnsupportedError):
        CODECS["sparse_csr"].encoder(shape, "f32", {})


@pytest.mark.parametrize("codec", ["sparse_csr", "sparse_coo"])
def test_unknown_value_types_are_checked_structurally_and_not_decoded(codec: str) -> None:
    tensor = csr([0, 1, 1, 1], [0]) if codec == "sparse_csr" else coo([[0], [0]])
    for dtype in ("posit16", "f4_e2m1fn"):
        unknown = replace(tensor, dtype=dtype)
        if dtype == "posit16":
            CODECS[codec].check(unknown)
        with pytest.raises(IngotError):
            unknown.numpy()


def test_encoders_want_all_rows_at_once() -> None:
    for codec in ("sparse_csr", "sparse_coo"):
        encoder = CODECS[codec].encoder((3, 4), "f32", {})
        assert encoder.single_chunk
        assert encoder.lossless
        with pytest.raises(CodecError) as caught:
            encoder.encode(np.zeros((2, 4), np.float32))
        assert caught.value.rule == f"{codec}.whole"


def test_csr_reader_holds_only_a_chunk() -> None:
    rows = 50
    dense = np.eye(rows, 8, dtype=np.float32)
    tensor = encode_tensor(CODECS["sparse_csr"], dense, dtype="f32")
    reader = CODECS["sparse_csr"].reader(tensor)
    out = np.empty((1, 8), np.float32)
    for row in range(rows):
        reader.read_into(out)
        assert bits(out[0]) == bits(dense[row])
    reader.finish()


def test_absurd_shapes_are_refused_before_memory_is_taken() -> None:
    tensor = coo([[0], [0]], shape=(2**31, 2**31))
    with pytest.raises(ResourceError) as caught:
        tensor.numpy()
    assert caught.value.rule == "decoded.limit"


@pytest.mark.parametrize("codec", ["sparse_csr", "sparse_coo"])
@pytest.mark.parametrize("piece", [1, 3, 7])
def test_pieces_change_nothing(codec: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored values are scattered in pieces; a row may be longer than one, and may be empty."""
    dense = np.random.default_rng(piece).integers(0, 3, (9, 8)).astype(np.float32)
    dense[[0, 4, 8]] = 0
    dense[2] = 1
    tensor = encode_tensor(CODECS[codec], dense, dtype="f32")
    for module in ("csr", "coo"):
        monkeypatch.setattr(f"ingot.codecs.sparse.{module}.BATCH", piece)
    for attempt in all_ways(tensor):
        np.testing.assert_array_equal(attempt(), dense)


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_doubles_are_found_across_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("csr", "coo"):
        monkeypatch.setattr(f"ingot.codecs.sparse.{module}.BATCH", piece)
    assert refused(coo([[0, 1, 0], [1, 1, 1]])) == "sparse_coo.duplicate"
    assert refused(csr([0, 3, 3, 3], [1, 2, 1])) == "sparse_csr.duplicate"
    unordered = coo([[2, 0, 1], [1, 3, 0]])
    assert np.asarray(unordered.numpy()).sum() == 6


def test_more_than_there_is_room_for_is_refused_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system grants more than it has: from 256 MiB on what is free is looked at."""
    monkeypatch.setattr(base, "available_ram", lambda: 1 << 20)
    assert base.empty((1 << 13, 1 << 13), "f32", "t").nbytes == 1 << 28
    with pytest.raises(CodecError) as caught:
        base.empty((1 << 13, (1 << 13) + 1), "f32", "t")
    assert caught.value.rule == "codec.too-large"
    monkeypatch.setattr(base, "available_ram", lambda: 1 << 29)
    assert base.empty((1 << 13, (1 << 13) + 1), "f32", "t").nbytes > 1 << 28


@pytest.mark.parametrize("codec", ["sparse_csr", "sparse_coo"])
def test_indices_of_u32_decode_and_become_u64(codec: str) -> None:
    tensor = csr([0, 2, 2, 3], [2, 0, 1]) if codec == "sparse_csr" else coo([[1, 0], [0, 2]])
    narrow = {
        role: part if role == "values" else array_part(part.array().astype(np.uint32))
        for role, part in tensor.parts.items()
    }
    small = replace(tensor, parts=narrow)
    assert small.numpy().tobytes() == tensor.numpy().tobytes()
    assert small[1:].tobytes() == tensor[1:].tobytes()
    assert small.sparse().toarray().tobytes() == tensor.numpy().tobytes()
    layout = next(one for one in alternatives(small.layout, small) if one.indices == "u64")
    found = CODECS[codec].repack(small, layout).reader().read(1)
    assert {role: array.dtype.name for role, array in found.items() if role != "values"} == {
        role: "uint64" for role in narrow if role != "values"
    }


def test_columns_that_are_said_to_ascend_are_checked_and_others_sorted() -> None:
    tensor = csr([0, 2, 2, 3], [2, 0, 1])
    said = replace(tensor, params={**tensor.params, "ascending": True})
    for read in (said.numpy, said.sparse):
        with pytest.raises(CodecError) as caught:
            read()
        assert caught.value.rule == "sparse_csr.order"
    layout = next(one for one in alternatives(tensor.layout, tensor) if one.ascending)
    found = CODECS["sparse_csr"].repack(tensor, layout).reader().read(1)
    assert found["indices"].tolist() == [0, 2, 1]
    assert found["values"].tolist() == tensor.parts["values"].array()[[1, 0, 2]].tolist()
