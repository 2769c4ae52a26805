"""Second moments of what matrices multiply and of the gradients they get back, added up over passes.

Products are seen where they are made, in ``torch.nn.functional.linear``: by the memory of its weight they are told
apart, experts that lie in one stack too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.adapters.skeleton import Piece
from ingot.core.extras import require
from ingot.errors import IntegrityError
from ingot.model.statistics import ABSMAX, COUNT, INPUTS, MEANS, OUTPUTS, SQUARES
from ingot.model.tensor import Array


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is summed of one matrix: A where ``inputs``, G where ``outputs``."""

    name: str
    rows: int
    cols: int
    inputs: bool
    outputs: bool
    expert: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return 4 * (self.cols**2 * self.inputs + self.rows**2 * self.outputs) + 24 * self.cols


class Sums:
    """Second moments of one matrix, as they add up."""

    def __init__(self, torch: Any, wanted: Wanted) -> None:
        self._torch, self._wanted = torch, wanted
        self.inputs = torch.zeros(wanted.cols, wanted.cols) if wanted.inputs else None
        self.outputs = torch.zeros(wanted.rows, wanted.rows) if wanted.outputs else None
        self.squares, self.sums = (torch.zeros(wanted.cols, dtype=torch.float64) for _ in range(2))
        self.absmax = torch.zeros(wanted.cols)
        self.weight, self.count = 0.0, 0

    @property
    def told(self) -> bool:
        """Whether there is something to say: a product was seen, or an expert is known to have seen none."""
        return self.count > 0 or self._wanted.expert

    def forward(self, inputs: Any) -> None:
        """Add what is multiplied: f32 [tokens, cols]."""
        if not len(inputs):
            return
        self.squares += inputs.square().sum(0, dtype=self._torch.float64)
        self.sums += inputs.sum(0, dtype=self._torch.float64)
        self.absmax = self._torch.maximum(self.absmax, inputs.abs().amax(0))
        self.count += len(inputs)

    def second(self, inputs: Any, gradients: Any | None) -> None:
        """Add to A and G; ``gradients``, f32 [tokens, rows], are those at the matrix's outputs."""
        if gradients is None:
            if self.inputs is not None:
                self.inputs.addmm_(inputs.T, inputs)
            self.weight += len(inputs)
            return
        heavy = gradients.square().mean(1)
        if self.inputs is not None:
            self.inputs.addmm_((inputs * heavy[:, None]).T, inputs)
        self.weight += float(heavy.sum(dtype=self._torch.float64))
        if self.outputs is not None:
            self.outputs.addmm_(gradients.T, gradients)

    def arrays(self, tokens: int) -> dict[str, Array]:
        """Return the means by field, G's over all ``tokens`` that were read; raises ``calibrate.value``."""
        found = {
            SQUARES: (self.squares / max(self.count, 1)).float().numpy(),
            ABSMAX: self.absmax.numpy(),
            MEANS: (self.sums / max(self.count, 1)).float().numpy(),
            COUNT: np.array([self.count], np.int64),
        }
        if self.inputs is not None and self.count:
            found[INPUTS] = self.inputs.div_(self.weight or 1.0).numpy()
        if self.outputs is not None and self.count:
            found[OUTPUTS] = self.outputs.div_(max(tokens, 1)).numpy()
        if not all(np.isfinite(array).all() for array in found.values()):
            where = self._wanted.name
            raise IntegrityError("calibrate.value", "expected finite activations, found NaN or infinity", where=where)
        return found


@contextmanager
def listening(
    pieces: Mapping[int, tuple[Any, Sequence[Piece]]], sums: Mapping[str, Sums], *, fisher: bool
) -> Iterator[None]:
    """Add up what products with some parameters multiply, and where ``fisher`` what they get back.

    Parameters
    ----------
    pieces : mapping
        By the address of a parameter's memory: the parameter, and the matrices that it holds.
    sums : mapping of name to Sums
        Of the matrices that are wanted now.
    """
    torch = require("torch", "torch")
    linear = torch.nn.functional.linear

    def hear(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is linear and len(args) > 1:
            for piece, each in _seen(pieces, sums, args[1]):
                heard(each, args[0], out, slice(piece.first, piece.last), fisher=fisher)
        return out

    with type("Listener", (torch.overrides.TorchFunctionMode,), {"__torch_function__": hear})():
        yield


def _seen(
    pieces: Mapping[int, tuple[Any, Sequence[Piece]]], sums: Mapping[str, Sums], weight: Any
) -> Iterator[tuple[Piece, Sums]]:
    """Yield the matrices that a weight is, of those that are wanted."""
    found = pieces.get(weight.untyped_storage().data_ptr())
    if found is None:
        return
    parameter, several = found
    distance = weight.storage_offset() - parameter.storage_offset()
    if weight.stride() != parameter.stride()[-2:] or weight.shape != parameter.shape[-2:]:
        return
    expert = distance // parameter.stride(0) if parameter.ndim == 3 else None
    for piece in several:
        if piece.name in sums and piece.expert == expert:
            yield piece, sums[piece.name]


def heard(sums: Sums, inputs: Any, output: Any, rows: slice, *, fisher: bool) -> None:
    """Add one product: what went in now, what comes back when it does."""
    flat = inputs.detach().flatten(0, -2)
    sums.forward(flat)
    if not fisher:
        sums.second(flat, None)
    elif output.requires_grad:
        output.register_hook(lambda gradient: sums.second(flat, gradient.detach().flatten(0, -2)[:, rows]))
