"""``TCAW`` blocks as section 5.2 of the document has them, in files without a directory.

Their header tells neither columns nor length: where the block ends tells how wide its bitmap is.
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
_TRY = 64  # what one width costs beside the bytes that are read for it


class Bitmaps:
    """Finds out how wide the bitmaps of a file are.

    A bitmap of so many words a row is followed by as many values as it has bits. Of the widths that there are, that is
    taken with which the block ends at the end of its layer, or where another block begins.

    Parameters
    ----------
    stops : tuple of bytes
        Magics beside those of blocks that may follow a block.
    """

    def __init__(self, source: ByteSource, stops: tuple[bytes, ...] = ()) -> None:
        self._read = partial(read_bytes, source)
        self._followers = {*MAGICS, *stops}
        self._left = 16 * source.size + (1 << 20)  # bytes that may be looked at: a hostile file has many blocks

    def block(self, offset: int, end: int, where: str) -> Block:
        """Return the ``TCAW`` block at ``offset``, which may not reach past ``end``: one with our header, or without.

        Raises
        ------
        FormatError
            ``squizd.tca-header``, ``squizd.tca-bitmap``, ``squizd.block-out-of-bounds``.
        UnsupportedError
            ``squizd.tca-ambiguous``: several widths fit.
        """
        rows, header = bitmap_rows(self._read, offset, end, where)
        own: Block | None = None
        with suppress(FormatError):  # then it is not one of ours
            own = parse(self._read, offset, end, where)
        if own is not None and is_sound(own):
            return own
        found = self._widths(rows, offset + header, end, where) if rows else []
        if len(found) > 1:
            widths = " or ".join(str(words * TCA_WORD) for words, _ in found[:4])
            raise _ambiguous(f"its bitmap can have rows of {widths} bits", where)
        if found:
            words, ones = found[0]
            self._require_last_column(rows, words, offset + header, where)
            return bitmap(rows, words * TCA_WORD, ones)
        if own is not None:
            return own
        raise FormatError(
            "squizd.tca-bitmap",
            "expected a TCAW block with columns in its header, or one of a bitmap and as many values as it has bits "
            f"that ends at the layer's end, byte {end}, or at another block; found neither at byte {offset}",
            where=where,
        )

    def _widths(self, rows: int, start: int, end: int, where: str) -> list[tuple[int, int]]:
        """Return words a row and bits of every bitmap that fits."""
        found, ones, stripe = [], 0, rows * TCA_WORD // 8
        for words in range(1, MAX_COLUMNS // TCA_WORD + 1):
            behind = start + words * stripe
            if behind + 2 * ones > end:
                break
            ones += self._ones(behind - stripe, stripe, where)
            last = behind + 2 * ones
            if last == end or (last + 4 <= end and self._read(last, 4) in self._followers):
                found.append((words, ones))
        return found

    def _ones(self, offset: int, size: int, where: str) -> int:
        """Return how many bits are set in a run of bytes."""
        self._left -= size + _TRY
        if self._left < 0:
            raise _ambiguous("the file has too many blocks without columns to find out how wide each is", where)
        pieces = (self._read(offset + at, min(_STEP, size - at)) for at in range(0, size, _STEP))
        return sum(int.from_bytes(piece, "little").bit_count() for piece in pieces)

    def _require_last_column(self, rows: int, words: int, start: int, where: str) -> None:
        """Refuse a bitmap whose last columns may be padding as well: no row has a value in the very last."""
        width = words * TCA_WORD // 8
        step = max(1, _STEP // width)
        for first in range(0, rows, step):
            data = self._read(start + first * width, min(step, rows - first) * width)
            if max(data[width - 1 :: width]) & 0x80:
                return
        most = words * TCA_WORD
        raise _ambiguous(f"it can have {most - TCA_WORD + 1} to {most} columns, of which no row uses the last", where)


def _ambiguous(found: str, where: str) -> UnsupportedError:
    return UnsupportedError(
        f"the header of a TCAW block does not state its columns, and no directory does; {found}",
        rule="squizd.tca-ambiguous",
        where=where,
    )
