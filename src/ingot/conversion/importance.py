"""Weights of column errors for codebooks: the mean square of the input that each column is multiplied by.

If a weight changes by d, the output changes by d times the input. The squared error of an output is therefore the sum
over columns of d^2 times the mean square of the column's input.
"""

from __future__ import annotations

import numpy as np

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.dtypes import FLOATS
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.stores.location import AnyPath, Location

RULE = "convert.importance"


def read_importance(path: AnyPath, source: Checkpoint) -> dict[str, Array]:
    """Read activation norms; return weights per column, f64 with mean 1, keyed by the name of the matrix.

    Parameters
    ----------
    path : path
        A checkpoint with a vector per matrix, under the name of the matrix or of its module: the root mean square of
        each input channel, up to a common factor.
    source : Checkpoint
        The checkpoint with the matrices.

    Raises
    ------
    UsageError
        ``convert.importance``: a vector with the wrong length, dtype or values, or no vector for any matrix.
    IngotError
        Errors of opening the checkpoint.
    """
    weights = {}
    location = Location.parse(path)
    with open_checkpoint(location) as norms:
        for name, vector in norms.items():
            matrix = next((candidate for candidate in (name, f"{name}.weight") if candidate in source), None)
            if matrix is None:
                continue
            cols = source[matrix].matrix_shape[1]
            if vector.shape != (cols,) or vector.dtype not in FLOATS:
                raise UsageError(
                    f"expected a vector of {cols} floats, found {vector.dtype} of shape {list(vector.shape)}",
                    rule=RULE,
                    where=name,
                )
            squares = np.square(vector.numpy().astype(np.float64))
            if not np.isfinite(squares).all() or not squares.any():
                raise UsageError("expected finite magnitudes, not all 0", rule=RULE, where=name)
            weights[matrix] = squares / squares.mean()
    if not weights:
        raise UsageError(
            "no vector has the name of a matrix of the source; name each vector after its matrix or module",
            rule=RULE,
            where=location.display,
        )
    return weights
