"""Sum second moments of the inputs of matrices, and of the gradients at their outputs, over several passes.

Calls of ``torch.nn.functional.linear`` are intercepted. The address of the weight's memory identifies the matrix, also
for experts in one stack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.device import widest_float
from ingot.errors import IntegrityError
from ingot.model.statistics import ABSMAX, COUNT, INPUTS, MEANS, OUTPUTS, SQUARES
from ingot.model.tensor import Array
from ingot.runtime.calibration.skeleton import MatrixRows

_BLOCK = 1024  # rows of a moment that are updated together
_TOKENS = 512  # tokens that are processed together, to limit memory


@dataclass(frozen=True, slots=True)
class MomentSpec:
    """The size of a matrix, and the moments to sum: A (inputs) if ``inputs``, G (output gradients) if ``outputs``."""

    name: str
    rows: int
    cols: int
    inputs: bool
    outputs: bool
    expert: bool = False

    @property
    def nbytes(self) -> int:
        """The number of bytes of the sums."""
        return 4 * (self.cols**2 * self.inputs + self.rows**2 * self.outputs) + 24 * self.cols


class Moment(Protocol):
    """A sum of ``x^T x`` over tokens, f32 [size, size]."""

    def add(self, values: Any) -> None:
        """Add ``x^T x`` for values x, f32 [tokens, size]."""
        ...

    @property
    def diagonal(self) -> Array:
        """The diagonal of the sum, f64 [size]."""
        ...

    def mean(self, count: float) -> Array:
        """Return the matrix divided by ``count``, f32 [size, size]; the sum may not be used afterwards."""
        ...


def start_moment(torch: Any, size: int, device: Any) -> Moment:
    """Return an empty moment that is summed on a device."""
    return HostMoment(size) if device.type == "cpu" else DeviceMoment(torch, size, device)


class DeviceMoment:
    """A moment on a device; its mean is computed there."""

    def __init__(self, torch: Any, size: int, device: Any) -> None:
        self._sum = torch.zeros(size, size, device=device)

    def add(self, values: Any) -> None:
        self._sum.addmm_(values.T, values)

    @property
    def diagonal(self) -> Array:
        diagonal: Array = self._sum.diagonal().cpu().numpy().astype(np.float64)
        return diagonal

    def mean(self, count: float) -> Array:
        self._sum /= count
        mean: Array = self._sum.cpu().numpy()
        del self._sum
        return mean


class HostMoment:
    """A moment in the host's memory; only the lower half of the symmetric matrix is computed."""

    def __init__(self, size: int) -> None:
        self._sum = np.zeros((size, size), np.float32)

    def add(self, values: Any) -> None:
        size = len(self._sum)
        values = values.numpy()
        with np.errstate(invalid="ignore", over="ignore"):  # ``Sums.arrays`` checks the result
            for first in range(0, size, _BLOCK):
                last = min(first + _BLOCK, size)
                columns = values[:, first:last]
                self._sum[first:last, :first] += columns.T @ values[:, :first]
                # Both operands are one array, so that BLAS computes half of the product.
                self._sum[first:last, first:last] += columns.T @ columns

    @property
    def diagonal(self) -> Array:
        return self._sum.diagonal().astype(np.float64)

    def mean(self, count: float) -> Array:
        size = len(self._sum)
        self._sum /= np.float32(count)
        for first in range(0, size, _BLOCK):
            last = min(first + _BLOCK, size)
            self._sum[:first, first:last] = self._sum[first:last, :first].T
        return self._sum


class InputsDivergedError(Exception):
    """Matrices that shared sums received different inputs, so the sums must be computed again."""


class Inputs:
    """Sums over the inputs of a matrix: moment, squares, values, largest magnitudes and number of tokens.

    Matrices that multiply the same inputs share one object. All sums are on ``device``.
    """

    def __init__(self, torch: Any, cols: int, moment: Moment | None, device: Any) -> None:
        self._torch = torch
        self.moment = moment
        self._wide = widest_float(torch, device)
        self.squares, self.sums = (torch.zeros(cols, dtype=self._wide, device=device) for _ in range(2))
        self.absmax = torch.zeros(cols, device=device)
        self.count = 0

    def add(self, inputs: Any) -> None:
        """Add the inputs of a batch of tokens, f32 [tokens, cols], to the sums."""
        if not len(inputs):
            return
        for batch in inputs.split(_TOKENS):
            if self.moment is None:
                self.squares += batch.square().sum(0).to(self._wide)
            self.sums += batch.sum(0).to(self._wide)
            self.absmax = self._torch.maximum(self.absmax, batch.abs().amax(0))
        self.count += len(inputs)
        if self.moment is not None:
            self.moment.add(inputs)

    def squared(self) -> Any:
        """Return the sums of squares on the CPU: f64 [cols]. They remain available after the moment is released."""
        if self.moment is not None:
            self.squares = self._torch.from_numpy(self.moment.diagonal)
        return self.squares.cpu().double()


class Sums:
    """The sums of one matrix's second moments.

    Parameters
    ----------
    spec : MomentSpec
    fisher : bool
        Whether A weights tokens by their gradients; if so, it is not shared with other matrices.
    device : torch.device
        The device of all sums; ``arrays`` copies the results to the CPU.

    Attributes
    ----------
    leader : Sums or None
        Sums of another matrix that gets the same inputs. Its sums over inputs are also those of this matrix.
    """

    def __init__(self, torch: Any, spec: MomentSpec, *, fisher: bool, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._wide = widest_float(torch, device)
        self.spec = spec
        self._fisher = fisher
        self.leader: Sums | None = None
        self._inputs: Inputs | None = None
        self._moments: dict[str, Moment] = {}
        self._weight = torch.zeros((), dtype=self._wide, device=device)

    @property
    def weight(self) -> float:
        """The sum of the tokens' weights, which are the mean squares of their gradients."""
        return float(self._weight)

    @property
    def _shared(self) -> Inputs | None:
        return self._inputs if self.leader is None else self.leader._inputs

    @property
    def _count(self) -> int:
        return 0 if self._shared is None else self._shared.count

    @property
    def has_statistics(self) -> bool:
        """Whether the matrix has statistics: a product was recorded, or the matrix is an expert without tokens."""
        return self._count > 0 or self.spec.expert

    @property
    def same(self) -> str | None:
        """The name of another matrix with the same inputs, whose A this matrix uses; else None."""
        summed = self.spec.inputs and not self._fisher
        return self.leader.spec.name if summed and self.leader is not None and self._count else None

    def forward(self, inputs: Any, leader: Sums | None) -> None:
        """Add inputs f32 [tokens, cols]; ``leader`` contains the sums of the first matrix with the same inputs.

        Raises ``InputsDivergedError`` if an earlier call had another leader.
        """
        if not len(inputs):
            return
        if self._inputs is None and self.leader is None:
            self.leader = leader
        if leader is not self.leader:
            raise InputsDivergedError(self.spec.name)
        if leader is not None:
            return
        if self._inputs is None:
            plain = self.spec.inputs and not self._fisher
            moment = start_moment(self._torch, self.spec.cols, self._device) if plain else None
            self._inputs = Inputs(self._torch, self.spec.cols, moment, self._device)
        self._inputs.add(inputs)

    def back(self, inputs: Any, gradients: Any) -> None:
        """Add a batch to A and G: ``inputs`` f32 [tokens, cols], and the gradients of the outputs, f32 [tokens,
        rows].
        """
        weights = gradients.square().mean(1)
        self._weight += weights.sum(dtype=self._wide)
        if self.spec.inputs:
            self._moment(INPUTS, self.spec.cols).add(inputs * weights.sqrt()[:, None])
        if self.spec.outputs:
            self._moment(OUTPUTS, self.spec.rows).add(gradients)

    def _moment(self, field: str, size: int) -> Moment:
        if field not in self._moments:
            self._moments[field] = start_moment(self._torch, size, self._device)
        return self._moments[field]

    def arrays(self, tokens: int) -> dict[str, Array]:
        """Return the mean statistics by field; G is averaged over all ``tokens`` of the calibration.

        Raises ``IntegrityError`` ``calibrate.value`` if a mean is NaN or infinite.
        """
        shared = self._shared or Inputs(self._torch, self.spec.cols, None, self._device)
        count = max(shared.count, 1)
        moments = dict(self._moments)
        arrays = {
            SQUARES: (shared.squared() / count).float().numpy(),
            ABSMAX: shared.absmax.cpu().numpy(),
            MEANS: (shared.sums.cpu().double() / count).float().numpy(),
            COUNT: np.array([shared.count], np.int64),
        }
        if self.leader is None and shared.moment is not None:
            moments[INPUTS], shared.moment = shared.moment, None
        divisors = {INPUTS: self.weight if self._fisher else float(count), OUTPUTS: float(max(tokens, 1))}
        arrays |= {field: moment.mean(divisors[field] or 1.0) for field, moment in moments.items()}
        # A product of two columns is at most the larger column's square, so a finite diagonal means a finite moment.
        if not all(np.isfinite(array.diagonal() if array.ndim > 1 else array).all() for array in arrays.values()):
            name = self.spec.name
            raise IntegrityError("calibrate.value", "expected finite activations, found NaN or infinity", where=name)
        return arrays


@contextmanager
def record_products(
    matrices: Mapping[int, tuple[Any, Sequence[MatrixRows]]],
    sums: Mapping[str, Sums],
    *,
    fisher: bool,
    share: bool = True,
    product: Callable[[Any, Any, Any], Any] | None = None,
) -> Iterator[None]:
    """Add the inputs of all products with the given parameters to ``sums`` while this context is active.

    With ``fisher``, the gradients of the outputs of these products are added too.

    Parameters
    ----------
    matrices : mapping
        The parameter and the matrices that it contains, keyed by the address of the parameter's memory.
    sums : mapping of name to Sums
        The sums of the matrices to record.
    share : bool
        Whether successive products with the same input tensor share sums; the input must then be the same in every
        pass.
    product : callable, optional
        A replacement for torch's ``linear(inputs, weight, bias)``.

    Raises
    ------
    InputsDivergedError
        Matrices that shared sums received different inputs.
    """
    torch = require("torch", "torch")
    linear, latest = torch.nn.functional.linear, _LatestInputs()

    def intercept(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_product = func is linear and len(args) > 1
        if is_product and product is not None and not kwargs:
            out = product(args[0], args[1], args[2] if len(args) > 2 else None)
        else:
            out = func(*args, **(kwargs or {}))
        if is_product:
            for matrix, matrix_sums in _matrices_of(matrices, sums, args[1]):
                leader = latest.leader(args[0], matrix_sums) if share else None
                record_product(
                    matrix_sums, args[0], out, slice(matrix.first, matrix.last), fisher=fisher, leader=leader
                )
        return out

    with type("Listener", (torch.overrides.TorchFunctionMode,), {"__torch_function__": intercept})():
        yield


class _LatestInputs:
    """Detects successive products with the same inputs; stores the latest inputs and the first matrix that got them."""

    def __init__(self) -> None:
        self._tensor: Callable[[], Any] = lambda: None
        self._version = 0
        self._first: Sums | None = None

    def leader(self, inputs: Any, sums: Sums) -> Sums | None:
        """Return the sums of the first matrix that multiplied ``inputs``, if the latest product had the same inputs.

        Otherwise, store ``inputs`` and ``sums`` as the latest, and return None.
        """
        if self._first is not None and self._tensor() is inputs and self._version == inputs._version:
            return None if self._first is sums else self._first
        self._tensor, self._version, self._first = weakref.ref(inputs), inputs._version, sums
        return None


def _matrices_of(
    matrices: Mapping[int, tuple[Any, Sequence[MatrixRows]]], sums: Mapping[str, Sums], weight: Any
) -> Iterator[tuple[MatrixRows, Sums]]:
    """Yield the matrices that the parameter ``weight`` contains, each with its sums."""
    entry = matrices.get(weight.untyped_storage().data_ptr())
    if entry is None:
        return
    parameter, candidates = entry
    distance = weight.storage_offset() - parameter.storage_offset()
    if weight.stride() != parameter.stride()[-2:] or weight.shape != parameter.shape[-2:]:
        return
    expert = distance // parameter.stride(0) if parameter.ndim == 3 else None
    for matrix in candidates:
        if matrix.name in sums and matrix.expert == expert:
            yield matrix, sums[matrix.name]


def record_product(
    sums: Sums, inputs: Any, output: Any, rows: slice, *, fisher: bool, leader: Sums | None = None
) -> None:
    """Add the inputs of a product to ``sums`` now, and the gradients of its ``rows`` in the backward pass.

    ``leader`` is passed to ``Sums.forward``.
    """
    flat = inputs.detach().flatten(0, -2)
    sums.forward(flat, leader)
    if fisher and output.requires_grad:
        output.register_hook(lambda gradient: sums.back(flat, gradient.detach().flatten(0, -2)[:, rows]))
