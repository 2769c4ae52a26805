"""The scale (and zero point) of an entire tensor, from chunks of its rows (``spec/affine.md``, "Quantizers")."""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.numeric.floats import as_bits, float_name
from ingot.core.runtime import native
from ingot.errors import CodecError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.tensor import Array


class TensorFit:
    """A fit that reads all rows once for their range, and a second time for the search by squared error.

    Parameters
    ----------
    settings : AffineLayout
    search : bool
        Choose among ``AFFINE_CANDIDATES`` shrunk ranges by squared error. Errors are added row by row in double
        precision, so that chunks do not matter.
    rows : int
        Rows of the tensor; a pass ends after them.

    Attributes
    ----------
    seen : int
        Rows processed in the present pass.
    scales, zeros : arrays of one element
        The result; 1 and ``settings.no_zero`` for a tensor without values.
    """

    def __init__(self, settings: AffineLayout, search: bool, rows: int) -> None:
        self._search, self._rows = search, rows
        self._low, self._high = np.inf, -np.inf
        self.seen = 0
        self._codes = settings.bits, settings.signed, not settings.zeros  # arguments of the kernels
        self._candidates: tuple[Array, Array, Array] | None = None  # steps, offsets, squared errors so far
        self.scales = np.ones(1, numpy_dtype(settings.scales))
        self.zeros = np.full(1, settings.no_zero, numpy_dtype(settings.scales))
        self._scale_dtype = settings.scales

    @property
    def fit_passes(self) -> int:
        """The number of passes over all rows."""
        return 2 if self._search else 1

    def add(self, rows: Array) -> int | None:
        """Process the next rows; return the index of the first value that is not finite, None if all are.

        Raises ``CodecError`` ``affine.scale-overflow`` at the end of a pass.
        """
        values, dtype = as_bits(rows), float_name(rows)
        if self._candidates is None:
            low, high, bad = native.kernels.affine_range(values, dtype)
            if bad < rows.size:
                return int(bad)
            self._low, self._high = min(self._low, low), max(self._high, high)
        else:
            native.kernels.affine_errors(values, dtype, *self._codes, *self._candidates)
        self.seen += len(rows)
        if self.seen == self._rows:
            self.seen = 0
            self._end_of_pass()
        return None

    def _end_of_pass(self) -> None:
        if self._candidates is None:
            self._candidates = self._propose()
        steps, offsets, totals = self._candidates
        best = int(np.argmin(totals))
        self.scales[0], self.zeros[0] = steps[best], offsets[best]

    def _propose(self) -> tuple[Array, Array, Array]:
        steps, offsets = (np.empty(native.kernels.AFFINE_CANDIDATES, np.float32) for _ in range(2))
        native.kernels.affine_candidates(self._low, self._high, *self._codes, self._scale_dtype, steps, offsets)
        fits = np.flatnonzero(np.isfinite(steps if self._search else steps[:1]))
        if not len(fits):
            raise CodecError(
                "affine.scale-overflow",
                f"{self._scale_dtype} cannot hold the scale of the entire tensor; use scales=bf16 or scales=f32",
            )
        return steps[fits], offsets[fits], np.zeros(len(fits))
