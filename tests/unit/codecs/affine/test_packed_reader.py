"""Rows of codes that are read in order, wherever they lie; and some rows of integers in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.parts import PackedReader
from ingot.codecs.affine.windows import ComputedRows
from ingot.codecs.base import Repacked
from ingot.codecs.table import CODECS
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.affine import FLAT_LSB, POINTS, ROWS_LSB, AffineLayout, Constant, Row
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.base import Storable
from ingot.model.layouts.packed_ints import (
    AWQ,
    AWQ_GEMV,
    GPTQ,
    GPTQ_PLANES,
    GPTQ_V1,
    MODELOPT,
    PACKED,
    PACKING_FORMS,
    PackedIntLayout,
)
from ingot.model.part import Part
from ingot.model.reading.view import ElementRuns, assemble
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import encode_tensor, repacked

CODEC = AffineCodec()
ROWS, COLS = 96, 64


def made(stored: Array, again: bool) -> ComputedRows:
    """Rows that are made when they are read, a few at a time."""

    def make(first: int, last: int) -> Array:
        return stored[first:last].copy()

    source = ComputedRows(MemorySource(b""), *stored.shape, make, max_bytes=32 * stored.shape[1])
    source.again = again
    return source


SOURCES: dict[str, Callable[[Array], ComputedRows | MemorySource]] = {
    "made": lambda stored: made(stored, again=False),
    "made of all again": lambda stored: made(stored, again=True),
    "memory": lambda stored: MemorySource(stored.tobytes()),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("first", [0, 5, 33])
def test_rows_come_in_order_however_they_are_asked_for(source: str, first: int) -> None:
    """A part may be rows of its source from ``first`` on."""
    stored = np.random.default_rng(first).integers(0, 256, (ROWS, COLS // 2), np.uint8)
    params = AffineLayout(4, Row(), ROWS_LSB, False, Constant(8), "f32", "f32")
    part = Part("u8", stored[first:].size, SOURCES[source](stored), first * stored.shape[1])
    reader, at, kept = PackedReader(part, params, COLS), first, list[tuple[Array, Array]]()
    for ask, rows in [
        *(("keep", 2), ("reuse", 3), ("skip", 4), ("keep", 1), ("next", 6), ("keep", 40)),  # more than is made at once
        *(("skip", 1), ("reuse", 1), ("next", 2), ("keep", 2), ("skip", 0), ("keep", ROWS - first - 62)),
    ]:
        wanted, at = stored[at : at + rows].reshape(-1), at + rows
        if ask == "skip":
            reader.skip(rows)
        elif ask == "next":
            assert np.array_equal(reader.next(rows), wanted)
        else:
            found, own = reader.take(rows, reused=ask == "reuse")
            assert np.array_equal(found, wanted)
            if ask == "keep":
                kept.append((found, wanted))
            elif own:
                found[:] = 0  # as a repack does
    reader.finish()
    assert at == ROWS
    assert all(np.array_equal(found, wanted) for found, wanted in kept)  # read on, nothing was written into them
    assert np.array_equal(np.frombuffer(part.source.view(0, stored.size), np.uint8), stored.reshape(-1))


@pytest.mark.parametrize("source", SOURCES)
def test_rows_that_begin_within_a_byte_come_in_order(source: str) -> None:
    """Nine codes of 3 bits: the stream's rows 8 on begin at a byte of it, those between do not."""
    codes = np.random.default_rng(1).integers(0, 8, (64, 9), np.uint8)
    bits = codes[:, :, None] >> np.arange(3, dtype=np.uint8) & 1
    stream = np.packbits(bits.reshape(8, -1), axis=1, bitorder="little")  # eight rows each
    rows = np.packbits(bits.reshape(64, -1), axis=1, bitorder="little")
    params = AffineLayout(3, Row(), FLAT_LSB, False, Constant(4), "f32", "f32")
    part = Part("u8", stream[1:].size, SOURCES[source](stream), stream.shape[1])
    reader, at = PackedReader(part, params, 9), 8
    for ask, count in [("keep", 3), ("skip", 2), ("next", 4), ("reuse", 10), ("skip", 7), ("keep", 30)]:
        wanted, at = rows[at : at + count].reshape(-1), at + count
        if ask == "skip":
            reader.skip(count)
        else:
            found = reader.next(count) if ask == "next" else reader.take(count, reused=ask == "reuse")[0]
            assert np.array_equal(np.asarray(found).reshape(-1), wanted)
    reader.finish()


def packed(repack: Repacked, source: Tensor) -> Tensor:
    found = repacked(repack, source)
    return replace(found, decoder=CODECS[found.codec])


def in_words(form: str, bits: int) -> Tensor:
    """Random numbers as integers of a form, with zero points where it has such."""
    values = np.random.default_rng(bits).standard_normal((ROWS, COLS)).astype(np.float32)
    symmetric = PACKING_FORMS[form].zeros is None or form == GPTQ_V1
    options = {"bits": bits, "group": 32, "scales": "f16", "signed": PACKING_FORMS[form].signed, "symmetric": symmetric}
    if symmetric and not PACKING_FORMS[form].signed:
        options["zero_point"] = 1 << (bits - 1)
    source = encode_tensor(CODEC, values, options, dtype="f32")
    zero = (Constant(0) if PACKING_FORMS[form].signed else Constant(1 << (bits - 1))) if symmetric else POINTS
    found = packed(CODEC.repack(source, PackedIntLayout(form, bits, 32, zero, "f32")), source)
    assert np.array_equal(found.numpy(), source.numpy())
    return found


def rows_of(source: Tensor, first: int, last: int) -> Tensor:
    """Return some rows as a view has them."""
    taken = ElementRuns.from_indices(source, np.arange(first, last))
    return assemble("piece", (last - first, COLS), taken, CODECS["dense"])


def anew(piece: Tensor, source: Tensor, *, whole_words: bool) -> list[Storable]:
    """Layouts in which some rows are packed again."""
    own = [PackedIntLayout.from_tensor(source)] if whole_words else []
    return [*own, *islice(alternatives(AffineLayout.from_tensor(piece), piece), 3)]


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        *((GPTQ, bits) for bits in (2, 4, 8)),
        *((GPTQ_PLANES, bits) for bits in (3, 5, 6)),
        *((PACKED, bits) for bits in (3, 4)),
        *((form, 4) for form in (GPTQ_V1, AWQ, AWQ_GEMV, MODELOPT)),
    ],
)
def test_rows_of_words_are_those_of_the_whole(form: str, bits: int) -> None:
    """As pieces, as views, and packed anew: into the same words, and as rows."""
    source = in_words(form, bits)
    whole = source.numpy()
    for first, last in ((0, 32), (32, 64), (5, 41)):
        assert np.array_equal(source[first:last], whole[first:last])
        piece = rows_of(source, first, last)
        assert np.array_equal(piece.numpy(), whole[first:last])
        assert np.array_equal(piece[1:3], whole[first:last][1:3])
        exact = 0
        for layout in anew(piece, source, whole_words=first % 32 == 0):
            fresh = rows_of(source, first, last)  # of which nothing was read, and nothing is held
            way = CODECS[fresh.codec].repack(fresh, layout)
            if way.exact:
                assert np.array_equal(packed(way, fresh).numpy(), whole[first:last])
                exact += 1
        assert exact
