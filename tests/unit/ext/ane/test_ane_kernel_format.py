"""The kernel-format enum and its five helpers, as far as they are known."""

from __future__ import annotations

import pytest

from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.ext.ane.chips import kernel_format as formats


def test_the_ranges_are_the_compilers_guards() -> None:
    for code in range(64):
        assert formats.is_palette(code) == ((code - 7) % 2**32 < 0x15)
        assert formats.is_unity(code) == ((code - 0x1C) % 2**32 < 3)


@pytest.mark.parametrize(
    ("bits", "entry", "code"),
    [
        (1, "int8", 7),
        (2, "half", 13),
        (3, "uint8", 16),
        (4, "half", 21),
        (4, "e4m3", 22),
        (6, "half", 25),
        (8, "half", 27),
    ],
)
def test_codes_of_palettes(bits: int, entry: str, code: int) -> None:
    assert formats.palette_code(bits, entry) == code
    assert (formats.bit_depth(code), formats.underlying_type(code)) == (bits, entry)
    primary = {"int8": 1, "uint8": 2, "half": 4, "e4m3": 5}[entry]
    assert formats.palette_format(code) == primary


def test_every_palette_has_one_code() -> None:
    codes = [formats.palette_code(bits, entry) for bits in (1, 2, 3, 4, 6) for entry in formats.ENTRY_TYPES]
    assert [*codes, formats.palette_code(8, "half")] == list(range(7, 28))


@pytest.mark.parametrize(
    ("bits", "vector", "nbytes"), [(1, 1, 4), (2, 1, 8), (3, 1, 16), (4, 1, 32), (6, 1, 128), (8, 1, 512), (4, 4, 128)]
)
def test_bytes_of_codebooks(bits: int, vector: int, nbytes: int) -> None:
    """32 and 512 bytes are the chapter's figures, the others the formula's."""
    code = formats.palette_code(bits, "half")
    assert formats.palette_lut_bytes(code, 1, vector) == nbytes
    assert formats.palette_lut_bytes(code, 5, vector) == 5 * nbytes


@pytest.mark.parametrize(("code", "number"), [(1, 2), (2, 3), (4, 5), (5, 16), (31, 23)])
def test_type_numbers(code: int, number: int) -> None:
    assert formats.typeno(code) == number


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (lambda: formats.kernel_format(0), "ane.kernel-format"),
        (lambda: formats.kernel_format(36), "ane.kernel-format"),
        (lambda: formats.bit_depth(30), "ane.unknown-cell"),
        (lambda: formats.underlying_type(3), "ane.unknown-cell"),
        (lambda: formats.typeno(21), "ane.unknown-cell"),
        (lambda: formats.typeno(28), "ane.unknown-cell"),
        (lambda: formats.palette_format(4), "ane.palette"),
        (lambda: formats.palette_format(28), "ane.palette"),
        (lambda: formats.palette_lut_bytes(1, 1), "ane.palette"),
        (lambda: formats.palette_code(8, "int8"), "ane.palette"),
        (lambda: formats.palette_code(5, "half"), "ane.palette"),
        (lambda: formats.palette_code(4, "int16"), "ane.palette"),
    ],
)
def test_unknown_cells_are_named_errors(call: object, rule: str) -> None:
    with pytest.raises(IngotError) as found:
        call()  # type: ignore[operator]
    assert found.value.rule == rule
    assert isinstance(found.value, UnsupportedError | UsageError)
