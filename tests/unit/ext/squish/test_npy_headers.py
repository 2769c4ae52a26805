"""Headers of ``.npy`` files: those that NumPy writes, spellings that are refused, and hostile text."""

from __future__ import annotations

import io

import ml_dtypes
import numpy as np
import pytest

from ingot.errors import IngotError
from ingot.ext.squish.npydir import npy

HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def file_head(text: str, version: int = 1) -> bytes:
    width = 2 if version == 1 else 4
    data = text.encode("latin-1")
    data = data.ljust(len(data) + -(8 + width + len(data)) % 64)
    return npy.MAGIC + bytes((version, 0)) + len(data).to_bytes(width, "little") + data


def rule_of(head: bytes) -> str:
    assert npy.header_span(head[:12], "a.npy") == len(head)
    with pytest.raises(IngotError) as caught:
        npy.parse(head, "a.npy")
    assert caught.value.where == "a.npy"
    return caught.value.rule


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3), (1 << 40, 0), (1,) * 32])
@pytest.mark.parametrize("dtype", npy.CODE_OF)
def test_headers_are_those_that_numpy_saves(dtype: str, shape: tuple[int, ...]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(shape, f"<{npy.CODE_OF[dtype]}"))
    saved = buffer.getvalue()
    head = saved[: npy.header_span(saved[:12], "a.npy")]
    assert npy.encode(dtype, shape) == head
    assert npy.parse(head, "a.npy") == npy.NpyHeader(dtype, shape, len(head))


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (HEADER.replace("<f4", "=f4"), "npydir.npy-dtype"),
        (HEADER.replace("<f4", "f4"), "npydir.npy-dtype"),
        (HEADER.replace("<f4", "float32"), "npydir.npy-dtype"),
        (HEADER.replace("<f4", "?"), "npydir.npy-dtype"),
        (HEADER.replace("<f4", ">i1"), "npydir.npy-dtype"),
        (HEADER.replace("<f4", "<f4,<f4"), "npydir.npy-dtype"),
        (HEADER.replace("'<f4'", "('<f4', (2,))"), "npydir.npy-dtype"),
        (HEADER.replace("'<f4'", "[('gr\xf6\xdfe', '<f4')]"), "npydir.npy-dtype"),
        (HEADER.replace("'<f4'", "[('a', 'O')]"), "npydir.npy-object"),
        (HEADER.replace("<f4", "|O"), "npydir.npy-object"),
        (HEADER.replace("<f4", ">f4"), "npydir.npy-byte-order"),
        (HEADER.replace("'<f4'", "'<f4', 'descr': '<f4'"), "npydir.npy-header"),
        (HEADER.replace("(2, 3)", "(2L, 3L)"), "npydir.npy-header"),
        (HEADER.replace("(2, 3)", "(True, 3)"), "npydir.npy-header"),
        (HEADER.replace("(2, 3)", "(-2, -3)"), "npydir.npy-header"),
        (HEADER.replace("(2, 3)", "[2, 3]"), "npydir.npy-header"),
        (HEADER.replace("False", "0"), "npydir.npy-header"),
        (HEADER.replace("(2, 3)", f"({'9' * 5000},)"), "npydir.npy-header"),
    ],
)
def test_other_spellings_are_refused(version: int, text: str, rule: str) -> None:
    encoded = text if version < 3 else text.encode().decode("latin-1")  # UTF-8 in version 3.0
    assert rule_of(file_head(encoded, version)) == rule


@pytest.mark.parametrize(
    "unit", ["-", "not ", "(", "[", "{", "lambda:", "a.", "1+", "f'{", "'", '"', "\\", "\0", "\n", "#", "{1:", "yield "]
)
def test_deeply_nested_text_is_refused(unit: str) -> None:
    assert rule_of(file_head(unit * ((npy.MAX_HEADER - 64) // len(unit)))) == "npydir.npy-header"


def test_a_longer_header_is_refused_before_it_is_read() -> None:
    long = file_head(HEADER + " " * npy.MAX_HEADER, 2)
    with pytest.raises(IngotError) as caught:
        npy.header_span(long[:12], "a.npy")
    assert caught.value.rule == "npydir.npy-header"


def test_bfloat16_as_numpy_saves_it_is_explained() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(2, ml_dtypes.bfloat16))
    head = buffer.getvalue()[: npy.header_span(buffer.getvalue()[:12], "a.npy")]
    with pytest.raises(IngotError, match="bfloat16") as caught:
        npy.parse(head, "a.npy")
    assert caught.value.rule == "npydir.npy-dtype"
