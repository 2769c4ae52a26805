"""Tables of 16-byte records: a 64-bit key and two 32-bit floats, little-endian, not aligned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native

RECORD = np.dtype([("key", "<u8"), ("first", "<f4"), ("second", "<f4")])
FIELDS = ("first", "second")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one column of records.

    ``keys_match`` is set if all records have the requested key, ``other_filled`` if the other column is not all zero,
    and ``exact`` if ``values`` equal the records' floats without rounding.
    """

    values: Array
    keys_match: bool
    other_filled: bool
    exact: bool


def gather(records: Array, key: int, column: int, dtype: str) -> Column:
    """Return one column of a table, with checks of the records.

    Parameters
    ----------
    records : u8, 16 bytes per record
    key : int
        The key that all records should have.
    column : {0, 1}
    dtype : {"f32", "f16", "bf16"}
        The element type of the returned values.
    """
    values = np.empty(records.size // RECORD.itemsize, numpy_dtype(dtype))
    if not RECORD["first"].isnative:
        table = records.view(RECORD)
        wide = table[FIELDS[column]].astype(np.float32)
        values[...] = wide
        exact = bool((values.astype(np.float32).view(np.uint32) == wide.view(np.uint32)).all())
        return Column(values, bool((table["key"] == key).all()), bool(table[FIELDS[1 - column]].any()), exact)
    bits = values.view(np.uint16) if values.itemsize == 2 else values
    return Column(values, *native.kernels.gather_column(records, key, column, bits, dtype))
