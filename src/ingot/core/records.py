"""Tables of records of 16 bytes: a 64-bit key and two 32-bit floats, little-endian, not aligned."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core import native

RECORD = np.dtype([("key", "<u8"), ("first", "<f4"), ("second", "<f4")])


def gather(records: Any, key: int, column: int) -> tuple[np.ndarray[Any, np.dtype[np.float32]], bool, bool]:
    """Return one column as float32, whether every record has ``key``, and whether the other column is not all zero.

    Parameters
    ----------
    records : u8, 16 bytes per record
    key : int
    column : {0, 1}
    """
    if not RECORD["first"].isnative:
        table = records.view(RECORD)
        other = table["second" if column == 0 else "first"]
        own = table["first" if column == 0 else "second"].astype(np.float32)
        return own, bool((table["key"] == key).all()), bool(other.any())
    out = np.empty(records.size // RECORD.itemsize, np.float32)
    one_key, other_filled = native.kernels.gather_column(records, key, column, out.view(np.uint32))
    return out, one_key, other_filled
