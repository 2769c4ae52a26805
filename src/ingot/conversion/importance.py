"""What the errors of a matrix's columns weigh when its codebook is chosen: the mean squares of what they multiply.

Changing a weight by d changes the output by d times its input: the output's squared error is the sum of d^2 times the
mean square of the column's input.
"""

from __future__ import annotations

import numpy as np

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.floats import FLOATS
from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.stores.location import AnyPath, Location

RULE = "convert.importance"


def read_importance(path: AnyPath, source: Checkpoint) -> dict[str, Array]:
    """Return weights per column by name of the matrix, from a checkpoint of activation norms.

    Parameters
    ----------
    path : a checkpoint with a vector per matrix, under the matrix's name or that of its module: the root mean square
        (or, what is the same up to a factor, the norm) of each input channel
    source : the checkpoint whose matrices are meant

    Raises
    ------
    UsageError
        ``convert.importance``: a vector that no matrix has the columns for, or that is no magnitude; and what opening
        the checkpoint raises.
    """
    found = {}
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
            found[matrix] = squares / squares.mean()
    if not found:
        raise UsageError("expected a vector under a matrix's name, found none", rule=RULE, where=location.display)
    return found
