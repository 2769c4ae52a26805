"""What is published of descriptors: table 25.4, kernel words that compilers wrote, type numbers, skipped zeros."""

from __future__ import annotations

import pytest

from ingot.errors import UnsupportedError
from ingot.ext.ane.chips.chips import EVIDENCE, contradictions, data, load_chip
from ingot.ext.ane.chips.cost import predict
from ingot.ext.ane.chips.descriptor import (
    KernelKind,
    kernel_word,
    multiplications_left,
    slots,
    streams,
    type_numbers,
)
from ingot.ext.ane.chips.gates import Conditions, decide
from ingot.ext.ane.chips.kernel_format import E4M3, FP16, INT8, index_typeno, typeno
from ingot.ext.ane.chips.storage_form import StorageForm

N = 1 << 22


def test_the_four_streams_are_those_of_table_25_4() -> None:
    """Enable, base offset and relocation of every section that a loader patches."""
    table = {
        "bias": (0x5548, 0x554C, 0x1554),
        "scale": (0x5558, 0x555C, 0x1558),
        "pal": (0x5568, 0x556C, 0x155C),
        "lut": (0x5578, 0x557C, 0x1560),
    }
    assert {key: (item.enable, item.base, item.relocation) for key, item in streams().items()} == table
    assert len({register for row in table.values() for register in row}) == 12
    assert len(slots()) == 10
    assert {item.name for item in streams().values()} < set(slots())


def test_kernel_words_are_those_that_compilers_wrote() -> None:
    """Four of the M6 study, one of a compiled program for H13."""
    for row in data("descriptor")["words"]:
        kind = KernelKind(row["entry"], row.get("palette_bits"), row.get("sparse", False))
        chip = load_chip(row["target"])
        assert kernel_word(kind, chip.target, chip.value("detect_zeros")) == row["word"], row


def test_the_register_of_the_m1_has_no_code_for_e4m3() -> None:
    with pytest.raises(UnsupportedError) as found:
        kernel_word(KernelKind("e4m3"), "H13", detect_zeros=True)
    assert found.value.rule == "ane.refused"
    assert kernel_word(KernelKind("e4m3"), "H18", detect_zeros=False) & 3 == 3


def test_type_numbers() -> None:
    known = type_numbers()
    assert len(set(known.values())) == len(known) == 12
    assert (typeno(INT8), typeno(FP16), typeno(E4M3)) == (2, 5, 16)
    assert (known["lut"], known["uint8"], known["uint4"], known["int4"]) == (8, 3, 9, 23)
    assert [index_typeno(bits) for bits in (2, 4, 6, 8)] == [0, 9, 10, 3]


def test_every_row_has_evidence_and_source() -> None:
    rows = data("descriptor")
    told = contradictions()
    one_by_one = [rows["slots"], *(row for key in ("streams", "kernel_word", "format_codes", "types", "winograd",
                                                   "zero_skip") for row in rows[key].values())]  # fmt: skip
    for row in one_by_one:
        assert row["evidence"] in EVIDENCE
        assert row["source"]
        assert ("contradiction" in row) == (row["evidence"] == "contradicted")
        assert row.get("contradiction") is None or row["contradiction"] in told


def test_skipped_zeros_shorten_what_multiplications_bind() -> None:
    """Measured on the M4 and M6, elsewhere the compiler's rule; nothing where weights bind."""
    assert [multiplications_left(0.5, load_chip(chip))[0] for chip in ("m1", "m4", "m6")] == [0.5, 0.68, 0.66]
    assert multiplications_left(0.02, load_chip("m4"))[0] == 0.33  # not extrapolated
    assert multiplications_left(0.5, load_chip("m1").assuming("detect_zeros", False))[0] == 1.0
    m1, half, dense = load_chip("m1"), StorageForm("sparse", N, nonzeros=N // 2), StorageForm("dense", N)
    many = Conditions(positions=4096)
    times = [predict(form, decide(form, m1, many), m1, many) for form in (dense, half)]
    assert times[0] is not None
    assert times[1] is not None
    assert (times[0].bound, times[1].bound) == ("multiplications", "multiplications")
    assert times[1].share == pytest.approx(times[0].share / 2)
    alone = predict(half, decide(half, m1), m1)
    assert alone is not None
    assert alone.bound == "bytes"


def test_the_m1s_sparse_stack_is_as_much_faster_as_measured() -> None:
    """B25: 1.55 to 1.64 times at 63 percent zeros, a stack whose dense weights came at 29.5 GB/s (B16)."""
    m1 = load_chip("m1")
    floor, rate = m1.value("floor") * 1e-3, m1.value("bandwidth") * 1e9
    elements = round(floor * 29.5e9 / (1 - 29.5e9 / rate) / 2)
    dense, sparse = StorageForm("dense", elements), StorageForm("sparse", elements, nonzeros=round(0.37 * elements))
    times = [predict(form, decide(form, m1), m1) for form in (dense, sparse)]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].alone / times[1].alone == pytest.approx(1.55, rel=0.10)
    assert times[0].alone / times[1].alone == pytest.approx(1.64, rel=0.10)
