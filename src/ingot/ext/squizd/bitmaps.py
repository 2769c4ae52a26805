"""``TCAW`` blocks of section 5.2 of the document, in files without a directory.

Their header states neither columns nor length, so the width of the bitmap follows from the end of the block.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from ingot.errors import FormatError, UnsupportedError
from ingot.ext.squizd.blocks import MAGICS, TCA_WORD, Block, bitmap, bitmap_rows, is_sound, parse
from ingot.model.bytesource import ByteSource
from ingot.model.reading.ranges import read_bytes

MAX_COLUMNS = 1 << 20
_STEP = 4 << 20
_TRY = 64  # cost of one width in addition to the bytes that are read


class Bitmaps:
    """A search for the width of a file's bitmaps.

    A bitmap with a given number of words in a row is followed by one value for each set bit. The search selects the
    width for which the block ends at the end of its layer, or where another block begins.

    Parameters
    ----------
    stops : tuple of bytes
        Further magics, besides those of blocks, that may follow a block.
    """

    def __init__(self, source: ByteSource, stops: tuple[bytes, ...] = ()) -> None:
        self._read = partial(read_bytes, source)
        self._followers = {*MAGICS, *stops}
        self._budget = 16 * source.size + (
            1 << 20
        )  # bytes that may be read, a limit for hostile files with many blocks

    def block(self, offset: int, end: int, location: str) -> Block:
        """Return the ``TCAW`` block at ``offset``, with or without Ingot's header; it must end by ``end``.

        Raises
        ------
        FormatError
            ``squizd.tca-header``, ``squizd.tca-bitmap``, ``squizd.block-out-of-bounds``.
        UnsupportedError
            ``squizd.tca-ambiguous``: several widths fit.
        """
        rows, header = bitmap_rows(self._read, offset, end, location)
        with_header: Block | None = None
        with suppress(FormatError):  # then it has no header of Ingot
            with_header = parse(self._read, offset, end, location)
        if with_header is not None and is_sound(with_header):
            return with_header
        widths_and_ones = self._widths(rows, offset + header, end, location) if rows else []
        if len(widths_and_ones) > 1:
            widths = " or ".join(str(words * TCA_WORD) for words, _ in widths_and_ones[:4])
            raise _ambiguous(f"its bitmap can have rows of {widths} bits", location)
        if widths_and_ones:
            words, ones = widths_and_ones[0]
            self._require_last_column(rows, words, offset + header, location)
            return bitmap(rows, words * TCA_WORD, ones)
        if with_header is not None:
            return with_header
        raise FormatError(
            "squizd.tca-bitmap",
            "expected a TCAW block with columns in its header, or a bitmap followed by one value for each set bit "
            f"that ends at the layer's end, byte {end}, or at another block; found neither at byte {offset}",
            where=location,
        )

    def _widths(self, rows: int, start: int, end: int, location: str) -> list[tuple[int, int]]:
        """Return words in a row and set bits for every width that fits."""
        fitting, ones, stripe = [], 0, rows * TCA_WORD // 8
        for words in range(1, MAX_COLUMNS // TCA_WORD + 1):
            values_start = start + words * stripe
            if values_start + 2 * ones > end:
                break
            ones += self._ones(values_start - stripe, stripe, location)
            last = values_start + 2 * ones
            if last == end or (last + 4 <= end and self._read(last, 4) in self._followers):
                fitting.append((words, ones))
        return fitting

    def _ones(self, offset: int, size: int, location: str) -> int:
        """Return the number of set bits in a range of bytes."""
        self._budget -= size + _TRY
        if self._budget < 0:
            raise _ambiguous("the file has too many blocks without columns to determine their widths", location)
        chunks = (self._read(offset + start, min(_STEP, size - start)) for start in range(0, size, _STEP))
        return sum(int.from_bytes(chunk, "little").bit_count() for chunk in chunks)

    def _require_last_column(self, rows: int, words: int, start: int, location: str) -> None:
        """Raise an error if no row uses the last column, because the last columns may then be padding."""
        width = words * TCA_WORD // 8
        step = max(1, _STEP // width)
        for first in range(0, rows, step):
            data = self._read(start + first * width, min(step, rows - first) * width)
            if max(data[width - 1 :: width]) & 0x80:
                return
        max_columns = words * TCA_WORD
        raise _ambiguous(
            f"it can have {max_columns - TCA_WORD + 1} to {max_columns} columns, of which no row uses the last",
            location,
        )


def _ambiguous(reason: str, location: str) -> UnsupportedError:
    return UnsupportedError(
        f"the header of a TCAW block does not state its columns, and no directory does; {reason}",
        rule="squizd.tca-ambiguous",
        where=location,
    )
