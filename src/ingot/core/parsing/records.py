"""Tables of records of 16 bytes: a 64-bit key and two 32-bit floats, little-endian, not aligned."""

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
    """One column of some records.

    ``own`` tells whether every record has the key that was asked for, ``other_filled`` whether the other column is not
    all zero, ``exact`` whether ``values`` hold in their type just what the records say.
    """

    values: Array
    own: bool
    other_filled: bool
    exact: bool


def gather(records: Array, key: int, column: int, dtype: str) -> Column:
    """Gather a column.

    Parameters
    ----------
    records : u8, 16 bytes per record
    key : int
    column : {0, 1}
    dtype : {"f32", "f16", "bf16"}
        Of the values returned.
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
