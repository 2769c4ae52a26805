"""What a recipe's rule asks of a quantizer: which grid, and in which layout its numbers are held until they are stored.

Numbers are held as the affine family's integers or as a scaled codebook; containers repack these exactly, blocks of
ggml's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.errors import UsageError
from ingot.model.layouts.affine import NO_ZERO, ROWS_LSB, SCALE_DTYPES, AffineLayout
from ingot.model.layouts.affine import Group as Columns
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.quantizers.grid import Grid
from ingot.quantizers.rounding import QUANTIZERS

_BLOCK = 32  # columns of ggml's plain blocks
_BLOCKS = {"q4_0": 4, "q8_0": 8}
_TABLE_BITS = (2, 3, 4)
_MOST_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A quantizer and a grid."""

    quantizer: str
    grid: Grid

    def layout(self, dtype: str) -> AffineLayout | ScaledCodebookLayout:
        """Return how the numbers of a tensor of this element type are held."""
        grid = self.grid
        if grid.learnt:
            return ScaledCodebookLayout(grid.bits, Columns(grid.group), dtype, "f16", grid.scales)
        return AffineLayout(grid.bits, Columns(grid.group), ROWS_LSB, True, NO_ZERO, dtype, grid.scales)


def asked(quantizer: object, codec: str, options: Mapping[str, Any]) -> Asked:
    """Return what a rule asks for.

    Parameters
    ----------
    quantizer : str
        ``importance``, ``gptq`` or ``two-sided``.
    codec : str
        ``affine``: integers, options ``bits`` (2 to 8), ``group`` and ``scales``. ``scaled_codebook``: a learnt table,
        options ``bits`` (2 to 4), ``group``, ``scales``. ``ggml_blocks``: option ``type``, ``q4_0`` or ``q8_0``.

    Raises
    ------
    UsageError
        ``quantizer.option``.
    """
    if quantizer not in QUANTIZERS:
        raise _wrong(f"quantizer {', '.join(QUANTIZERS)}", quantizer)
    if codec == GgmlBlocksLayout.codec:
        _require_known(options, ("type",))
        kind = options.get("type")
        if kind not in _BLOCKS:
            raise _wrong(f"type {' or '.join(_BLOCKS)} for a quantizer", kind)
        return Asked(str(quantizer), Grid(_BLOCKS[kind], _BLOCK))
    learnt = codec == ScaledCodebookLayout.codec
    if not learnt and codec != AffineLayout.codec:
        known = (AffineLayout.codec, ScaledCodebookLayout.codec, GgmlBlocksLayout.codec)
        raise _wrong(f"codec {', '.join(known)} for a quantizer", codec)
    _require_known(options, ("bits", "group", "scales"))
    bits, group, scales = options.get("bits", 4), options.get("group", 64), options.get("scales", "f16")
    few = _TABLE_BITS if learnt else tuple(range(2, 9))
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in few:
        raise _wrong(f"bits from {few[0]} to {few[-1]}", bits)
    if not isinstance(group, int) or isinstance(group, bool) or not 1 <= group <= _MOST_GROUP:
        raise _wrong(f"group from 1 to {_MOST_GROUP} columns", group)
    if scales not in SCALE_DTYPES:
        raise _wrong(f"scales {', '.join(SCALE_DTYPES)}", scales)
    return Asked(str(quantizer), Grid(bits, group, scales, learnt))


def _require_known(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in options:
        if key not in known:
            raise _wrong(f"the options {', '.join(known)} beside a quantizer", key)


def _wrong(expected: str, found: object) -> UsageError:
    return UsageError(f"expected {expected}, found {found!r:.80}", rule="quantizer.option")
