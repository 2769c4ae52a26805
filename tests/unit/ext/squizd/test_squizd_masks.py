"""Masks of files of the SQUIZD document alone: the zeros in dropped blocks show the order of the bits (section 6)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.ext.squizd.channels import filled_blocks
from ingot.ext.squizd.scales import tables
from ingot.ext.squizd.scan import name_blocks, scan_blocks
from ingot.model.bytesource import MemorySource
from tests.support.squizd_document import (
    INT2_FLAG,
    INT4_FLAG,
    SPARSE_FLAG,
    TCA_FLAG,
    Array,
    document,
    int2,
    int4,
    npcl,
    tcaw,
)

BLOCK, HIDDEN = 4, 6
LOPSIDED = (1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1)  # other blocks from the other end, and half a byte of padding


def network(bits: Sequence[int], hidden: int = HIDDEN) -> list[Array]:
    """Gate, up and down of integers from 1 to 7, zeros in the channels of dropped blocks."""
    rng, kept = np.random.default_rng(0), np.repeat(np.array(bits, bool), BLOCK)
    rows = [np.where(kept[:, None], rng.integers(1, 8, (kept.size, hidden)), 0) for _ in range(2)]
    return [*rows, np.where(kept, rng.integers(1, 8, (hidden, kept.size)), 0)]


def packed(bits: Sequence[int], order: Any = "little", kept: int = 1, padding: int = 0) -> bytes:
    """A mask whose bits past the last block are ``padding``."""
    values = [bit if kept else 1 - bit for bit in bits]
    return np.packbits(values + [padding] * (-len(values) % 8), bitorder=order).tobytes()


def bf16(matrix: Array) -> Array:
    """Words of 16 bits: 1 and a little for what is not 0."""
    return np.where(matrix, 0x3F80 + matrix, 0).astype(np.uint16)


Stored = tuple[bytes, Array]
"""A block and its values."""


def stored(matrix: Array, kind: str, number: int = 0) -> Stored:
    if kind == "NPCL":
        return npcl(matrix.astype(np.float32)), matrix
    if kind == "NPCL f16":  # with -0 in dropped blocks
        return npcl(-matrix.astype(np.float16)), -matrix
    if kind == "INT2":
        return int2(np.minimum(matrix, 1), 0), 0.5 * np.minimum(matrix, 1)
    if kind == "TCAW":
        return tcaw(bf16(matrix)), (bf16(matrix).astype(np.uint32) << 16).view(np.float32)
    return stored(matrix, "NPCL") if kind == "mixed" and not number else (int4(matrix), 0.5 * matrix)


FLAGS = {"NPCL": 0, "NPCL f16": 0, "INT4": INT4_FLAG, "INT2": INT2_FLAG, "TCAW": TCA_FLAG, "mixed": INT4_FLAG}


def write(
    tmp_path: Path, layers: Sequence[Sequence[Array]], masks: Sequence[bytes], mean: float, kind: str = "NPCL"
) -> Path:
    blocks = [[stored(matrix, kind, number)[0] for number, matrix in enumerate(matrices)] for matrices in layers]
    meta = struct.pack("<IIIf16x", 1, BLOCK, len(layers), mean)
    scaled = sum(data[:4] in (b"INT4", b"INT2") for layer in blocks for data in layer)
    entries = [(number + 1, 0.5, 0.0) for number in range(scaled)]
    data = document(blocks, FLAGS[kind] | SPARSE_FLAG, entries, masks=masks, sparsity=meta)
    (tmp_path / "a.squizd").write_bytes(data)
    return tmp_path / "a.squizd"


def check(path: Path, bits: Sequence[int], matrices: Sequence[Array], kind: str = "NPCL", *, sure: bool = True) -> None:
    """Values are those stored; the masks are those of ``bits`` where ``sure``."""
    with ingot.open(path) as checkpoint:
        assert len(checkpoint) == len(matrices)
        for number, (tensor, matrix) in enumerate(zip(checkpoint.values(), matrices, strict=True)):
            assert np.array_equal(tensor.numpy("f32"), stored(matrix, kind, number)[1])
            assert ("mask" in tensor.parts) == (sure or kind == "TCAW")
            if sure and kind != "TCAW":  # a bitmap has a mask of its own
                assert bytes(tensor.parts["mask"].view()) == packed(bits)
    assert not [item for item in ingot.verify(path) if item.level == "error"]


def rules(path: Path) -> set[str]:
    return {item.rule for item in ingot.verify(path)}


def rule_of(path: Path) -> str:
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    return str(caught.value.rule)


@pytest.mark.parametrize("kind", sorted(FLAGS))
@pytest.mark.parametrize("kept", [1, 0])
@pytest.mark.parametrize("order", ["little", "big"])
def test_the_order_of_bits_is_the_one_that_drops_zeros(tmp_path: Path, order: str, kept: int, kind: str) -> None:
    # The columns of a bitmap are known where they fill words of 64.
    bits, hidden = ((*LOPSIDED, 1, 1, 0, 1), 128) if kind == "TCAW" else (LOPSIDED, HIDDEN)
    matrices = network(bits, hidden)
    path = write(tmp_path, [matrices], [packed(bits, order, kept)], bits.count(0) / len(bits), kind)
    check(path, bits, matrices, kind)
    assert ("squizd.mask-order" in rules(path)) == ((order, kept) != ("little", 1))


@pytest.mark.parametrize("order", ["little", "big"])
def test_one_order_fits_all_layers_and_each_matrix_may_have_its_own_mask(tmp_path: Path, order: str) -> None:
    """In the first layer either order fits: its mask reads the same from both ends."""
    bits = [(1, 0, 1, 1, 1, 1, 0, 1), (1, 0, 0, 1, 1, 1, 1, 1)]
    layers = [network(own) for own in bits]
    path = write(tmp_path, layers, [packed(own, order) * 3 for own in bits], 0.25)
    with ingot.open(path) as checkpoint:
        masks = [bytes(tensor.parts["mask"].view()) for tensor in checkpoint.values()]
    assert masks == [packed(own) for own in bits for _ in range(3)]


@pytest.mark.parametrize("order", ["little", "big"])
def test_a_converted_file_keeps_values_and_masks(tmp_path: Path, order: str) -> None:
    matrices = network(LOPSIDED)
    path = write(tmp_path, [matrices], [packed(LOPSIDED, order)], 4 / 12, "INT4")
    ingot.convert(path, tmp_path / "b.squizd")
    assert ingot.compare(path, tmp_path / "b.squizd").same
    check(tmp_path / "b.squizd", LOPSIDED, matrices, "INT4")


@pytest.mark.parametrize("order", ["little", "big"])
def test_padding_bits_may_be_set(tmp_path: Path, order: str) -> None:
    matrices = network(LOPSIDED)
    check(write(tmp_path, [matrices], [packed(LOPSIDED, order, padding=1)], 4 / 12), LOPSIDED, matrices)


def test_where_both_orders_drop_zeros_the_first_block_is_the_lowest_bit(tmp_path: Path) -> None:
    """Zeros lie in more blocks than the mask drops."""
    bits, matrices = (1, 0, 0, 1, 1, 1, 1, 1), network((1, 0, 0, 1, 1, 0, 0, 1))
    path = write(tmp_path, [matrices], [packed(bits)], 0.25)
    check(path, bits, matrices)
    assert "squizd.mask-order" not in rules(path)


@pytest.mark.parametrize("mean", [0.25, 0.4])
@pytest.mark.parametrize("kind", ["NPCL", "INT4", "INT2"])
@pytest.mark.parametrize("bits", [(1, 0, 0, 1, 1, 1, 1, 1), (1, 0, 1, 1, 1, 1, 0, 1)])
def test_masks_that_drop_other_values_in_every_order_are_refused(
    tmp_path: Path, bits: Sequence[int], kind: str, mean: float
) -> None:
    """Also where both orders drop the same blocks, and where ``mean_sparsity`` fits no order."""
    path = write(tmp_path, [network((1,) * 8)], [packed(bits)], mean, kind)
    assert rule_of(path) == "squizd.sparse-conflict"
    assert [item.rule for item in ingot.verify(path)] == ["squizd.sparse-conflict"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_value_in_one_matrix_is_enough(tmp_path: Path, number: int) -> None:
    matrices = network(LOPSIDED)
    matrices[number][4 if number < 2 else 0, 0 if number < 2 else 4] = 1
    path = write(tmp_path, [matrices], [packed(LOPSIDED)], 4 / 12)
    assert rule_of(path) == "squizd.sparse-conflict"


def test_where_the_mean_fits_no_reading_weights_are_as_stored(tmp_path: Path) -> None:
    matrices = network(LOPSIDED)
    path = write(tmp_path, [matrices], [packed(LOPSIDED)], 0.05)
    check(path, LOPSIDED, matrices, sure=False)
    assert "squizd.masks-apart" in rules(path)


@pytest.mark.parametrize(("zero", "rule"), [(-3.0, None), (-2.5, "squizd.sparse-conflict")])
def test_a_zero_point_makes_another_code_the_zero(tmp_path: Path, zero: float, rule: str | None) -> None:
    matrices, meta = network(LOPSIDED), struct.pack("<IIIf16x", 1, BLOCK, 1, 4 / 12)
    entries = [(number + 1, 0.5, zero) for number in range(3)]
    blocks = [int4(matrix - 3) for matrix in matrices]
    masks = [packed(LOPSIDED, "big")]
    path = tmp_path / "a.squizd"
    path.write_bytes(document([blocks], INT4_FLAG | SPARSE_FLAG, entries, masks=masks, sparsity=meta))
    if rule is None:
        check(path, LOPSIDED, matrices, "INT4")
    else:
        assert rule_of(path) == rule


def test_compacted_masks_that_both_orders_fit_are_refused(tmp_path: Path) -> None:
    """Nothing is stored of dropped blocks, so that nothing shows where they were."""
    bits = (1, 1, 0, 1, 0, 1, 1, 1)
    kept = np.repeat(np.array(bits, bool), BLOCK)
    gate, up, down = network(bits)
    path = write(tmp_path, [[gate[kept], up[kept], down[:, kept]]], [packed(bits)], 0.25)
    assert rule_of(path) == "squizd.sparse-ambiguous"


def test_no_more_than_a_piece_is_decoded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of whole rows and of parts of a row find the same blocks."""
    rng = np.random.default_rng(1)
    matrix = np.where(rng.random((40, 24)) < 0.02, rng.integers(1, 8, (40, 24)), 0)
    for data, flag in ((npcl(matrix.astype(np.float32)), 0), (int4(matrix), INT4_FLAG)):
        source = MemorySource(document([[data]], flag, [(1, 0.5, 0.0)] if flag else []), "f")
        start, length = struct.unpack_from("<QQ", source.view(0, 300), 260)
        blocks = scan_blocks(source, [(start, start + length)], "f")
        (located,) = name_blocks(source, blocks, tables(source, start + length, "f")[0], "f").values()
        for axis in (0, 1):
            wanted = np.ones(-(-matrix.shape[axis] // 5), np.bool_)
            channels = matrix.any(axis=1 - axis)
            expected = [bool(channels[at * 5 : at * 5 + 5].any()) for at in range(wanted.size)]
            for elements in (1, 7, 24, 100, 1 << 20):
                monkeypatch.setattr("ingot.ext.squizd.channels._ELEMENTS", elements)
                found = filled_blocks(source, located, axis, 5, wanted)
                assert found is not None
                assert found.tolist() == expected
