"""The chapter's listings as they are printed, run over what packed units hold: the reader gives the same values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.ext.ane.chips.chips import load_chip
from ingot.ext.ane.chips.gates import decide
from ingot.ext.ane.chips.storage_form import StorageForm
from ingot.ext.ane.kernel_units.pack import KernelWeight, pack_unit
from ingot.ext.ane.kernel_units.unit import KernelUnit, read_unit

M1, M6 = load_chip("m1"), load_chip("m6")
N = 1 << 16


def dequant_affine(q: Any, scale: Any, zero_point: Any) -> Any:
    return scale * (q - zero_point)


def dequant_lut(index: int, codebook: Any, g: int, vector_size: int) -> Any:
    return codebook[g // vector_size][index][g % vector_size]


def densify_sparse(mask_bits: Any, nonzeros: Any, n: int) -> list[Any]:
    out = [0.0] * n
    j = 0
    for i in range(n):
        if mask_bits[i]:
            out[i] = nonzeros[j]
            j += 1
    return out


def packed(weight: KernelWeight, chip: Any = M6) -> KernelUnit:
    return read_unit(pack_unit(weight, chip))


def stream(unit: KernelUnit, weight: KernelWeight, chip: Any = M6) -> bytes:
    """The bytes of the section `weights`."""
    section = unit.header.sections["weights"]
    return pack_unit(weight, chip)[section.offset : section.offset + section.length]


@pytest.mark.parametrize("zero", [0, 5])
def test_affine(zero: int) -> None:
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-100, 100, (6, 9)).astype(np.int8), rng.random(6).astype(np.float16)
    points = np.full(6, zero, np.int8) if zero else None
    unit = packed(KernelWeight((6, 9), codes, 8, scale=scale, zero=points))
    expected = [[dequant_affine(np.float32(q), np.float32(scale[c]), zero) for q in codes[c]] for c in range(6)]
    np.testing.assert_array_equal(unit.dense(), np.array(expected, np.float16))


@pytest.mark.parametrize("vector_size", [1, 2, 4])
def test_tables_by_group_and_vector(vector_size: int) -> None:
    """A codebook serves as many consecutive output channels as a vector has; g is the output channel."""
    rng = np.random.default_rng(1)
    books = rng.standard_normal((8 // vector_size, 16, vector_size)).astype(np.float16)
    indices = rng.integers(0, 16, (8 // vector_size, 5)).astype(np.uint8)
    unit = packed(KernelWeight((8, 5), indices, 4, books))
    expected = [
        [dequant_lut(int(indices[g // vector_size, k]), books, g, vector_size) for k in range(5)] for g in range(8)
    ]
    np.testing.assert_array_equal(unit.dense(), np.array(expected))


def test_one_table_of_sixteen_entries_is_one_look_up() -> None:
    rng = np.random.default_rng(2)
    books, indices = rng.standard_normal((1, 16, 1)).astype(np.float16), rng.integers(0, 16, (4, 6)).astype(np.uint8)
    unit = packed(KernelWeight((4, 6), indices, 4, books), M1)
    np.testing.assert_array_equal(unit.dense(), books[0, indices, 0])
    assert unit.header.sections["pal"].length == 32


def test_a_mask_then_its_values() -> None:
    """One group's bytes: the mask, first weight in bit 0, then the kept halves in their order."""
    rng = np.random.default_rng(3)
    mask = rng.random((1, 21)) < 0.4
    halves = np.where(mask, rng.standard_normal((1, 21)), 0).astype(np.float16)
    weight = KernelWeight((1, 21), halves, 16, mask=mask)
    unit = packed(weight, M1)
    data, kept = stream(unit, weight, M1), int(mask.sum())
    assert len(data) == -(-21 // 8) + 2 * kept
    bits = [data[i // 8] >> i % 8 & 1 for i in range(21)]
    values = np.frombuffer(data[3:], np.float16)
    np.testing.assert_array_equal(unit.dense()[0], np.array(densify_sparse(bits, values, 21), np.float16))


def test_sparsity_asks_the_master_alone_and_tables_their_own_gate_too() -> None:
    sparse, table = StorageForm("sparse", N, nonzeros=N // 2), StorageForm("palette", N, 4)
    without = M1.assuming("gate_palette", 0)
    assert (decide(sparse, without).outcome, decide(table, without).outcome) == ("streams", "folds")
    assert decide(sparse, load_chip("m1-pro")).gate.startswith("gate_master")
    for key in ("gate_affine", "gate_blockwise"):
        assert decide(sparse, load_chip("m4").assuming(key, 0)).streams
    alone = M1.assuming("gate_master", 0)
    assert {decide(form, alone).outcome for form in (sparse, table)} == {"folds"}
