"""Kernel units: what is packed comes back, the records are the published ones, and no damage passes."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import FormatError, IngotError, UsageError
from ingot.ext.ane.chips.activation import fit_lut
from ingot.ext.ane.chips.chips import load_chip
from ingot.ext.ane.chips.kernel_format import pack_lsb, unpack_lsb
from ingot.ext.ane.kernel_units.header import HEADER, seal
from ingot.ext.ane.kernel_units.pack import KernelWeight, channels_per_group, pack_unit
from ingot.ext.ane.kernel_units.unit import read_unit

M1, M4 = load_chip("m1"), load_chip("m4")
LUT = fit_lut("tanh", domain=(-3.0, 3.0)).lut


def weight_of(form: str, shape: tuple[int, ...], seed: int = 0) -> KernelWeight:
    rng = np.random.default_rng(seed)
    rows, cols = shape[0], int(np.prod(shape[1:]))
    halves = rng.standard_normal((rows, cols)).astype(np.float16)
    mask = (rng.random((rows, cols)) < 0.4).reshape(shape)
    scale = rng.random(rows).astype(np.float16)
    if form.startswith("palette"):
        bits, vector, books = map(int, form.removeprefix("palette").split("/")[:3])
        indices = rng.integers(0, 1 << bits, (rows // vector, cols)).astype(np.uint8)
        tables = rng.standard_normal((books, 1 << bits, vector)).astype(np.float16)
        sparse = mask.reshape(indices.shape) if form.endswith("sparse") else None
        if sparse is not None:
            indices[~sparse] = 0
        return KernelWeight(shape, indices, bits, tables, sparse)
    if form == "int8":
        codes = rng.integers(-127, 128, shape).astype(np.int8)
        return KernelWeight(shape, codes, 8, scale=scale)
    values = halves.reshape(shape)
    if form == "sparse":
        return KernelWeight(shape, np.where(mask, values, np.float16(0)), 16, mask=mask)
    return KernelWeight(shape, values, 16, bias=scale, lut=LUT)


FORMS = (
    "dense",
    "int8",
    "sparse",
    "palette4/1/1",
    "palette8/1/4",
    "palette3/2/1",
    "palette6/4/2",
    "palette4/1/1/sparse",
)


def expected(weight: KernelWeight) -> np.ndarray[Any, np.dtype[Any]]:
    """The values by the chapter's formulas, in plain loops."""
    channels = weight.shape[0]
    out = np.zeros((channels, int(np.prod(weight.shape[1:]))), np.float32)
    for row in range(channels):
        for col in range(out.shape[1]):
            if weight.codebooks is None:
                out[row, col] = weight.values.reshape(out.shape)[row, col]
            else:
                group = row // (channels // len(weight.codebooks))
                index = weight.values[row // weight.vector, col]
                out[row, col] = weight.codebooks[group, index, row % weight.vector]
            if weight.mask is not None and not weight.mask.reshape(out.shape)[row, col]:
                out[row, col] = 0
            if weight.scale is not None:
                out[row, col] *= np.float32(weight.scale[row])
    return out.astype(np.float16).reshape(weight.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", [M1, M4], ids=lambda chip: chip.name)
@pytest.mark.parametrize("shape", [(40, 7), (8, 3, 3, 3), (8, 1), (400, 5)])
def test_units_come_back(form: str, chip: Any, shape: tuple[int, ...]) -> None:
    weight = weight_of(form, shape)
    data = pack_unit(weight, chip)
    unit = read_unit(data)
    np.testing.assert_array_equal(unit.dense(), expected(weight))
    assert pack_unit(unit.weight, chip) == data
    assert unit.header.kernel_format == weight.kernel_format


def test_records_are_the_published_block() -> None:
    """14 words: offset, channels, ten slots of -1, two flags of 0 (table 25.3)."""
    unit = read_unit(pack_unit(weight_of("dense", (100, 50)), M1.assuming("ocg_channels", 4)))
    records = unit.records
    assert records.shape == (25, 14)
    assert records[:, 1].tolist() == [4] * 25
    assert (records[:, 2:12] == 0xFFFFFFFF).all()
    assert not records[:, 12:].any()
    assert (records[:18:2, 0] % 64 == 0).all()  # 25 groups, sixteen tiles: nine have two
    assert (records[1:18:2, 0] % 64 == 4 * 50 * 2 % 64).all()


def test_sections_are_in_order_and_the_tables_behind_one_cursor() -> None:
    weight = replace(weight_of("palette4/1/1", (64, 9)), lut=LUT)
    header = read_unit(pack_unit(weight, M1)).header
    sections = header.sections
    assert list(sections) == ["lut", "pal", "ocgs", "scale", "bias", "weights"]
    assert (sections["lut"].length, sections["pal"].length) == (86, 32)
    assert sections["lut"].offset == HEADER
    assert sections["pal"].offset == HEADER + 128
    assert (sections["pal"].typeno, sections["pal"].bits, sections["pal"].count) == (4, 4, 1)
    assert sections["weights"].typeno == 9


def test_the_m1_has_a_copy_of_the_tables_per_tile() -> None:
    weight = weight_of("dense", (64, 9))
    one, many = pack_unit(weight, M4), pack_unit(weight, M1)
    assert read_unit(many).header.copies == 16
    assert len(many) - len(one) == 15 * (128 + 128)  # table and bias
    four = M1.assuming("weight_tiles", 4)
    assert read_unit(pack_unit(weight, four)).header.copies == 4


def test_groups_shrink_with_the_kernel() -> None:
    """M6: at most 16 channels, as many as fit 64 KiB as fp16; TG: as many as give every tile one group, 32 on H13."""
    for per_channel, ocg in ((64, 16), (2048, 16), (2049, 8), (4096, 8), (20000, 1), (100000, 1)):
        assert channels_per_group((512, per_channel), M4) == ocg
    for channels, ocg in ((3, 1), (16, 1), (17, 2), (64, 4), (512, 32), (4096, 32)):
        assert channels_per_group((channels, 64), M1) == ocg
        assert channels_per_group((channels, 64), M4) == min(ocg, 16)


def test_a_nibble_is_low_first() -> None:
    """B7: [1, 0, 0, 1] is the bytes 01 10."""
    assert pack_lsb(np.array([1, 0, 0, 1]), 4).tobytes() == b"\x01\x10"


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=40))
def test_streams_come_back(bits: int, values: list[int]) -> None:
    codes = np.array([value % (1 << bits) for value in values], np.uint8)
    packed = pack_lsb(codes, bits)
    assert packed.size == -(-len(codes) * bits // 8)
    assert unpack_lsb(packed, bits, len(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"values": np.zeros((40, 6), np.float16)},
        {"values": np.zeros((40, 7), np.float32)},
        {"bits": 8},
        {"mask": np.zeros((7, 40), np.bool_)},
        {"scale": np.zeros(39, np.float16)},
        {"codebooks": np.zeros((1, 16, 1), np.float16)},
        {"values": np.zeros((40, 7), np.uint8), "bits": 4, "codebooks": np.zeros((3, 16, 1), np.float16)},
        {"values": np.zeros((40, 7), np.uint8), "bits": 4, "codebooks": np.zeros((1, 8, 1), np.float16)},
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as found:
        pack_unit(replace(weight_of("dense", (40, 7)), **change), M1)
    assert found.value.rule == "ane.layout"


def test_tables_past_the_budget_are_refused() -> None:
    weight = replace(weight_of("palette8/1/1", (64, 9)), lut=LUT)
    pack_unit(weight, M1.assuming("palette_lut_budget", 598))
    for key, value in (("palette_lut_budget", 597), ("activation_lut_budget", 85)):
        with pytest.raises(UsageError) as found:
            pack_unit(weight, M1.assuming(key, value))
        assert found.value.rule == "ane.budget"


UNITS = {form: pack_unit(replace(weight_of(form, (24, 5)), lut=LUT), M1) for form in FORMS}


@given(st.sampled_from(FORMS), st.data())
def test_every_damage_is_found(form: str, data: st.DataObject) -> None:
    unit = bytearray(UNITS[form])
    at = data.draw(st.integers(0, len(unit) - 1))
    unit[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(IngotError):
        read_unit(bytes(unit))


@settings(max_examples=200)
@given(st.sampled_from(FORMS), st.data())
def test_forged_units_are_read_or_refused(form: str, data: st.DataObject) -> None:
    """With the digest made to fit: whatever is not refused reads as a weight of the header's shape."""
    unit = bytearray(UNITS[form])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, HEADER - 1), st.integers(0, len(unit) - 1)))
        unit[at] = data.draw(st.integers(0, 255))
    seal(unit)
    try:
        found = read_unit(bytes(unit))
    except FormatError:
        return
    assert found.dense().shape == found.header.shape


@given(st.sampled_from(FORMS), st.integers(0, 5000))
def test_truncation_is_refused(form: str, length: int) -> None:
    if length < len(UNITS[form]):
        with pytest.raises(FormatError):
            read_unit(UNITS[form][:length])
    with pytest.raises(FormatError):
        read_unit(UNITS[form] + b"\0")


def patched(offset: int, layout: str, *values: int) -> bytes:
    unit = bytearray(UNITS["palette4/1/1"])
    struct.pack_into(layout, unit, offset, *values)
    seal(unit)
    return bytes(unit)


def test_units_of_version_1_have_no_kernel_word_and_are_read() -> None:
    """Without an activation table: that of version 1 had another layout."""
    for table, rule in ((None, None), (LUT, "anek.version")):
        unit = bytearray(pack_unit(replace(weight_of("int8", (20, 9)), lut=table), M4))
        struct.pack_into("<I", unit, 8, 1)
        struct.pack_into("<I", unit, 48, 0)
        seal(unit)
        if rule is None:
            assert (read_unit(unit).header.version, read_unit(unit).header.word) == (1, 0)
            continue
        with pytest.raises(FormatError) as found:
            read_unit(unit)
        assert found.value.rule == rule


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "anek.magic"),
        (b"ANEKUNIT", "anek.magic"),
        (b"NOTAUNIT" + bytes(300), "anek.magic"),
        (patched(8, "<I", 3), "anek.version"),
        (patched(8, "<I", 1), "anek.header"),  # version 1 has no kernel word
        (patched(48, "<I", 0x86), "anek.header"),  # a palette's word over int8
        (patched(12, "<I", 512), "anek.header"),
        (patched(16, "<I", 3), "anek.kind"),
        (patched(16, "<I", 0), "anek.kind"),
        (patched(16, "<I", 27), "anek.header"),  # a palette of 8 bits, and a kernel word that knows none
        (patched(20, "<I", 8), "anek.header"),
        (patched(20, "<I", 2), "anek.kind"),  # zero points of a palette
        (patched(24, "<I", 0), "anek.header"),
        (patched(24, "<I", 2**32 - 1), "anek.header"),
        (patched(28, "<I", 0), "anek.header"),
        (patched(28, "<I", 1), "anek.records"),
        (patched(36, "<I", 7), "anek.kind"),
        (patched(40, "<I", 1), "anek.bounds"),
        (patched(52, "<Q", 2**63), "anek.header"),
        (patched(64, "<I", 2**32 - 1), "anek.records"),
        (patched(64, "<8I", *[2**32 - 1] * 8), "anek.header"),
        (patched(96, "<Q", 2**63), "anek.bounds"),
        (patched(104, "<Q", 2**63), "anek.bounds"),
    ],
)
def test_hostile_headers(data: bytes, rule: str) -> None:
    with pytest.raises(FormatError) as found:
        read_unit(data)
    assert found.value.rule == rule
