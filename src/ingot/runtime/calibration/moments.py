"""Second moments of what matrices multiply and of the gradients they get back, added up over passes.

Products are seen where they are made, in ``torch.nn.functional.linear``: by the memory of its weight they are told
apart, experts that lie in one stack too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.errors import IntegrityError
from ingot.model.statistics import ABSMAX, COUNT, INPUTS, MEANS, OUTPUTS, SQUARES
from ingot.model.tensor import Array
from ingot.runtime.calibration.skeleton import Piece

_BLOCK = 1024  # rows of a moment that are added to at once
_TOKENS = 512  # that are looked at together where it takes memory


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


class Moment:
    """A sum of ``x^T x``, of whose symmetric halves the lower one is computed: f32 [size, size]."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros((size, size), np.float32)

    def add(self, values: Array) -> None:
        """Add that of f32 [tokens, size]."""
        size = len(self._sum)
        with np.errstate(invalid="ignore", over="ignore"):  # told when it is all there
            for first in range(0, size, _BLOCK):
                last = min(first + _BLOCK, size)
                some = values[:, first:last]
                self._sum[first:last, :first] += some.T @ values[:, :first]
                self._sum[first:last, first:last] += some.T @ some  # of one array: NumPy has BLAS compute half of it

    @property
    def diagonal(self) -> Array:
        """What it has on its diagonal: f64 [size]."""
        return self._sum.diagonal().astype(np.float64)

    def mean(self, count: float) -> Array:
        """Return it over ``count``, whole; nothing can be added from now on."""
        size = len(self._sum)
        self._sum /= np.float32(count)
        for first in range(0, size, _BLOCK):
            last = min(first + _BLOCK, size)
            self._sum[:first, first:last] = self._sum[first:last, :first].T
        return self._sum


class ApartError(Exception):
    """Matrices that were taken to multiply the same inputs did not go on to: their sums have to begin anew."""


class Inputs:
    """What is summed of the inputs of a matrix, or of several that multiply the same."""

    def __init__(self, torch: Any, cols: int, moment: Moment | None) -> None:
        self._torch, self.moment = torch, moment
        self.squares, self.sums = (torch.zeros(cols, dtype=torch.float64) for _ in range(2))
        self.absmax = torch.zeros(cols)
        self.count = 0

    def add(self, inputs: Any) -> None:
        """Add what is multiplied: f32 [tokens, cols]."""
        if not len(inputs):
            return
        for some in inputs.split(_TOKENS):
            if self.moment is None:
                self.squares += some.square().sum(0).double()
            self.sums += some.sum(0).double()
            self.absmax = self._torch.maximum(self.absmax, some.abs().amax(0))
        self.count += len(inputs)
        if self.moment is not None:
            self.moment.add(inputs.numpy())

    def squared(self) -> Any:
        """Return the sums of squares: f64 [cols]. They stay when the moment is let go of."""
        if self.moment is not None:
            self.squares = self._torch.from_numpy(self.moment.diagonal)
        return self.squares


class Sums:
    """Second moments of one matrix, as they add up.

    Parameters
    ----------
    wanted : Wanted
    fisher : bool
        A weighs tokens by their gradients, and is the matrix's own.

    Attributes
    ----------
    leader : Sums or None
        The matrix that multiplies the same inputs, and holds their sums.
    """

    def __init__(self, torch: Any, wanted: Wanted, *, fisher: bool) -> None:
        self._torch, self.wanted, self._fisher = torch, wanted, fisher
        self.leader: Sums | None = None
        self._own: Inputs | None = None
        self._moments: dict[str, Moment] = {}
        self._weight = 0.0

    @property
    def _shared(self) -> Inputs | None:
        return self._own if self.leader is None else self.leader._own

    @property
    def _count(self) -> int:
        return 0 if self._shared is None else self._shared.count

    @property
    def told(self) -> bool:
        """Whether there is something to say: a product was seen, or an expert is known to have seen none."""
        return self._count > 0 or self.wanted.expert

    @property
    def same(self) -> str | None:
        """The name of the matrix under which A stands, where it is another's."""
        kept = self.wanted.inputs and not self._fisher
        return self.leader.wanted.name if kept and self.leader is not None and self._count else None

    def forward(self, inputs: Any, leader: Sums | None) -> None:
        """Add what is multiplied: f32 [tokens, cols]; ``leader`` was given the same. Raises ``ApartError``."""
        if not len(inputs):
            return
        if self._own is None and self.leader is None:
            self.leader = leader
        if leader is not self.leader:
            raise ApartError(self.wanted.name)
        if leader is not None:
            return
        if self._own is None:
            plain = self.wanted.inputs and not self._fisher
            self._own = Inputs(self._torch, self.wanted.cols, Moment(self.wanted.cols) if plain else None)
        self._own.add(inputs)

    def back(self, inputs: Any, gradients: Any) -> None:
        """Add to A and G; ``gradients``, f32 [tokens, rows], are those at the matrix's outputs."""
        heavy = gradients.square().mean(1)
        self._weight += float(heavy.sum(dtype=self._torch.float64))
        if self.wanted.inputs:
            self._moment(INPUTS, self.wanted.cols).add((inputs * heavy.sqrt()[:, None]).numpy())
        if self.wanted.outputs:
            self._moment(OUTPUTS, self.wanted.rows).add(gradients.numpy())

    def _moment(self, field: str, size: int) -> Moment:
        if field not in self._moments:
            self._moments[field] = Moment(size)
        return self._moments[field]

    def arrays(self, tokens: int) -> dict[str, Array]:
        """Return the means by field, G's over all ``tokens`` that were read; raises ``calibrate.value``."""
        shared = self._shared or Inputs(self._torch, self.wanted.cols, None)
        count, moments = max(shared.count, 1), dict(self._moments)
        found = {
            SQUARES: (shared.squared() / count).float().numpy(),
            ABSMAX: shared.absmax.numpy(),
            MEANS: (shared.sums / count).float().numpy(),
            COUNT: np.array([shared.count], np.int64),
        }
        if self.leader is None and shared.moment is not None:
            moments[INPUTS], shared.moment = shared.moment, None
        by = {INPUTS: self._weight if self._fisher else float(count), OUTPUTS: float(max(tokens, 1))}
        found |= {field: moment.mean(by[field] or 1.0) for field, moment in moments.items()}
        # No product of two columns is larger than the larger one's square: a moment's diagonal tells of all of it.
        if not all(np.isfinite(array.diagonal() if array.ndim > 1 else array).all() for array in found.values()):
            where = self.wanted.name
            raise IntegrityError("calibrate.value", "expected finite activations, found NaN or infinity", where=where)
        return found


@contextmanager
def listening(
    pieces: Mapping[int, tuple[Any, Sequence[Piece]]],
    sums: Mapping[str, Sums],
    *,
    fisher: bool,
    share: bool = True,
    product: Callable[[Any, Any, Any], Any] | None = None,
) -> Iterator[None]:
    """Add up what products with some parameters multiply, and where ``fisher`` what they get back.

    Parameters
    ----------
    pieces : mapping
        By the address of a parameter's memory: the parameter, and the matrices that it holds.
    sums : mapping of name to Sums
        Of the matrices that are wanted now.
    share : bool
        Take those that are given the same tensor one after the other to be given the same always.
    product : callable, optional
        Computes ``linear(inputs, weight, bias)`` in torch's stead.

    Raises
    ------
    ApartError
        Matrices that multiplied the same inputs do no longer.
    """
    torch = require("torch", "torch")
    linear, latest = torch.nn.functional.linear, _Latest()

    def hear(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func is linear and len(args) > 1
        if known and product is not None and not kwargs:
            out = product(args[0], args[1], args[2] if len(args) > 2 else None)
        else:
            out = func(*args, **(kwargs or {}))
        if known:
            for piece, each in _seen(pieces, sums, args[1]):
                leader = latest.leader(args[0], each) if share else None
                heard(each, args[0], out, slice(piece.first, piece.last), fisher=fisher, leader=leader)
        return out

    with type("Listener", (torch.overrides.TorchFunctionMode,), {"__torch_function__": hear})():
        yield


class _Latest:
    """The tensor that was multiplied last, and by which matrix first."""

    def __init__(self) -> None:
        self._tensor: Callable[[], Any] = lambda: None
        self._version = 0
        self._first: Sums | None = None

    def leader(self, inputs: Any, sums: Sums) -> Sums | None:
        """Return the matrix that multiplied these inputs before, if the last one did."""
        if self._first is not None and self._tensor() is inputs and self._version == inputs._version:
            return None if self._first is sums else self._first
        self._tensor, self._version, self._first = weakref.ref(inputs), inputs._version, sums
        return None


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


def heard(sums: Sums, inputs: Any, output: Any, rows: slice, *, fisher: bool, leader: Sums | None = None) -> None:
    """Add one product: what went in now, what comes back when it does. ``leader`` was given the same inputs."""
    flat = inputs.detach().flatten(0, -2)
    sums.forward(flat, leader)
    if fisher and output.requires_grad:
        output.register_hook(lambda gradient: sums.back(flat, gradient.detach().flatten(0, -2)[:, rows]))
