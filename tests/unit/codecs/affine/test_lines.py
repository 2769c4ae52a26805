"""GPTQ's words as AWQ's line by line: the same parts as by way of rows, whatever the chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.word_codes import pack_points
from ingot.codecs.affine.word_rows import rows_tensor
from ingot.codecs.affine.words import WordsCodec, between_lines, with_one_point
from ingot.codecs.base import Repacked
from ingot.model.layouts.affine import POINTS, Constant
from ingot.model.layouts.packed_ints import AWQ, GPTQ, GPTQ_V1, PackedIntLayout
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor

SHAPE = (96, 256)
FORMS = (GPTQ, GPTQ_V1, AWQ)


def packed(form: str, group: int | None, points: Array | None = None, bits: int = 4) -> Tensor:
    """A matrix of random codes and scales; its zero points are the middle one unless others are given."""
    random = np.random.default_rng(3)
    layout = PackedIntLayout(form, bits, group, POINTS, "f16")
    count = layout.groups(SHAPE[1])
    points = np.full((count, SHAPE[0]), layout.point, np.uint8) if points is None else points
    words = random.integers(-(2**31), 2**31, layout.code_shape(SHAPE), np.int64).astype(np.int32)
    parts = {
        "packed_weight": memory_part(words, "i32"),
        "scales": memory_part(random.random((count, SHAPE[0])).astype(np.float16), "f16"),
        "zeros": memory_part(pack_points(points, layout).view(np.int32), "i32"),
    }
    return Tensor("w", SHAPE, "f16", layout.codec, parts, layout.attributes(), WordsCodec())


def read(found: Repacked, step: int) -> dict[str, bytes]:
    assert found.exact
    reader, parts = found.reader(), dict[str, bytes]()
    for start in range(0, found.rows, step):
        for role, part in reader.read(min(step, found.rows - start)).items():
            parts[role] = parts.get(role, b"") + np.ascontiguousarray(part).tobytes()
    reader.finish()
    return parts


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_lines_are_what_rows_give(stored: str, target: str, group: int | None, symmetric: bool) -> None:
    count = 1 if group is None else SHAPE[1] // group
    points = None if symmetric else np.random.default_rng(1).integers(1, 16, (count, SHAPE[0])).astype(np.uint8)
    tensor = packed(stored, group, points)
    for zero in (POINTS, Constant(8)):
        layout = replace(PackedIntLayout.from_tensor(tensor), packing=target, zero=zero)
        one = with_one_point(tensor, PackedIntLayout.from_tensor(tensor))
        assert (len(one[0].parts) == 2) == symmetric
        found = between_lines(*one, layout)
        if zero == Constant(8) and not symmetric:
            assert found is None
            continue
        assert found is not None
        by_rows = read(AffineCodec().repack(rows_tensor(tensor, PackedIntLayout.from_tensor(tensor)), layout), 999)
        assert {role: len(part) for role, part in by_rows.items()} == {part.role: part.length for part in found.parts}
        assert read(found, 1) == read(found, 3) == by_rows


@pytest.mark.parametrize("bits", [2, 8])
def test_other_bits_stay_in_their_words(bits: int) -> None:
    tensor = packed(GPTQ, 64, bits=bits)
    layout = replace(PackedIntLayout.from_tensor(tensor), packing=GPTQ_V1)
    found = between_lines(tensor, PackedIntLayout.from_tensor(tensor), layout)
    assert found is not None
    assert read(found, 2) == read(
        AffineCodec().repack(rows_tensor(tensor, PackedIntLayout.from_tensor(tensor)), layout), 9
    )


def test_a_zero_point_of_0_is_none_of_the_first_version() -> None:
    points = np.full((4, SHAPE[0]), 8, np.uint8)
    points[3, 5] = 0
    tensor = packed(AWQ, 64, points)
    stored = PackedIntLayout.from_tensor(tensor)
    assert with_one_point(tensor, stored)[0] is tensor
    assert between_lines(tensor, stored, replace(stored, packing=GPTQ_V1)) is None
    assert between_lines(tensor, stored, replace(stored, packing=GPTQ)) is not None
    assert not WordsCodec().repack(tensor, replace(stored, packing=GPTQ_V1)).exact
