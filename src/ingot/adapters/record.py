"""Classes for the changes that an adapter makes to tensors of its base; they are the same for all adapter formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import CodecError, FormatError
from ingot.model.checkpoint import CheckpointSource
from ingot.model.tensor import Array, Tensor

RULE = "adapter.values"


def finite_number(value: object) -> float | None:
    """Return a number of a config as a float; None if it is not a number, not finite, or too large for f64."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if isfinite(number) else None


@dataclass(frozen=True, slots=True)
class Factor:
    """An array of an adapter. Its values are read on demand.

    Parameters
    ----------
    name : str
        The name of the stored tensor, for error messages.
    shape : tuple of int
    dtype : str
        The stored element type. It represents every value exactly.
    load : callable
        Returns the values in f32.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Array] = field(repr=False)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Factor:
        """Return a stored tensor as a factor; raise ``FormatError`` ``adapter.tensors`` for integers and booleans."""
        if not DTYPES[tensor.dtype].is_float:
            raise FormatError(
                "adapter.tensors",
                f"expected floating-point values in the adapter, found {tensor.dtype}",
                where=tensor.name,
            )
        return cls(tensor.name, tensor.shape, tensor.dtype, lambda: tensor.numpy("f32"))

    @classmethod
    def from_array(cls, name: str, values: Array) -> Factor:
        """Return an f32 array in memory as a factor."""
        return cls(name, values.shape, "f32", lambda: values)

    def values(self) -> Array:
        """Return the values in f32, in C order; raises ``CodecError`` ``adapter.values`` for NaN and infinities."""
        values = np.ascontiguousarray(self.load(), np.float32)
        if not np.isfinite(values).all():
            raise CodecError(
                RULE, "expected finite values, found NaN or infinity; the adapter is damaged", where=self.name
            )
        return values

    def map(self, function: Callable[[Array], Array], shape: Sequence[int]) -> Factor:
        """Return a factor of the given shape whose values are ``function`` of this factor's values."""
        return replace(self, shape=tuple(shape), load=lambda: function(self.load()))

    def transpose(self) -> Factor:
        """Return the factor with its last two dimensions exchanged."""
        return self.map(lambda values: values.swapaxes(-1, -2), (*self.shape[:-2], self.shape[-1], self.shape[-2]))

    def take(self, index: Array, axis: int = 0) -> Factor:
        """Return the factor with the entries ``index`` along an axis."""
        shape = list(self.shape)
        shape[axis] = len(index)
        return self.map(lambda values: np.take(values, index, axis), shape)

    def scaled(self, scale: float) -> Factor:
        """Return the factor multiplied by ``scale`` in f32; the factor itself if the scale is 1."""
        if scale == 1:
            return self
        scaled = self.map(lambda values: values * np.float32(scale), self.shape)
        return replace(scaled, dtype="f32")

    def flat(self) -> Factor:
        """Return the factor as a matrix with the first dimension as rows."""
        shape = (self.shape[0], prod(self.shape[1:]))
        return self if shape == self.shape else self.map(lambda values: values.reshape(shape), shape)


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change ``scale * b @ a`` of a matrix, or of each matrix of a stack.

    Parameters
    ----------
    a, b : Factor
        Shapes [r, columns] and [rows, r] for a weight that is stored as [rows, columns]. For a stack, the number of
        matrices precedes both shapes.
    scale : float
    magnitude : Factor, optional
        For DoRA: the norm of each output's weights after the change.
    transposed : bool
        Whether the weight is stored as [inputs, outputs], as in GPT-2. Then ``a`` is the transpose of PEFT's B.
    embedding : bool
        Whether the weight is an embedding. Then ``b`` is the transpose of PEFT's A.
    any_orientation : bool
        Whether the weight is a stack of experts of unknown orientation, because the adapter does not declare it.
    """

    a: Factor
    b: Factor
    scale: float
    magnitude: Factor | None = None
    transposed: bool = False
    embedding: bool = False
    any_orientation: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ``b @ a``. It is the weight's shape; for a convolution, the dimensions after the first are
        flattened.
        """
        return (*self.b.shape[:-1], self.a.shape[-1])

    def transpose(self) -> LowRank:
        """Return the change of the transposed weight."""
        return replace(self, a=self.b.transpose(), b=self.a.transpose(), transposed=not self.transposed)

    def with_scale(self, scale: float) -> LowRank:
        """Return an equal change with another scale; ``b`` is multiplied by the ratio of the scales."""
        factor = float(np.float32(self.scale / scale))
        return replace(self, b=self.b.scaled(factor), scale=scale)

    def with_rank(self, rank: int) -> LowRank:
        """Return an equal change with a larger rank; the factors are padded with zeros."""
        added = rank - self.rank
        if not added:
            return self
        stack = [(0, 0)] * (len(self.a.shape) - 2)
        a_shape = (*self.a.shape[:-2], rank, self.a.shape[-1])
        b_shape = (*self.b.shape[:-1], rank)
        a = self.a.map(lambda values: np.pad(values, (*stack, (0, added), (0, 0))), a_shape)
        return replace(self, a=a, b=self.b.map(lambda values: np.pad(values, (*stack, (0, 0), (0, added))), b_shape))

    def plain(self) -> LowRank:
        """Return the change for a weight stored as [outputs, inputs]."""
        return self.transpose() if self.transposed else self


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition of ``scale * values`` to a tensor, such as a bias."""

    values: Factor
    scale: float


@dataclass(frozen=True, slots=True)
class Replacement:
    """New values of a tensor, or of its rows ``rows``."""

    values: Factor
    rows: tuple[int, ...] | None = None


Change = LowRank | Addition | Replacement


def factors_of(change: Change) -> list[Factor]:
    """Return the arrays of a change."""
    if isinstance(change, LowRank):
        return [change.a, change.b, *([] if change.magnitude is None else [change.magnitude])]
    return [change.values]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter.

    Parameters
    ----------
    location : str
    writer : str
        ``peft``, ``gguf`` or ``mlx``.
    method : str
        ``lora``, ``dora`` or ``full``.
    changes : mapping of name to sequence of Change
        Keyed by the name of the changed tensor in the base. The changes of a tensor are applied in order.
    settings : mapping
        The adapter's config or metadata.
    base : str or None
        The name of the base that the adapter declares.
    source : CheckpointSource
        The opened files.
    """

    location: str
    writer: str
    method: str
    changes: Mapping[str, Sequence[Change]] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    base: str | None = None
    source: CheckpointSource = field(default_factory=CheckpointSource, repr=False)

    @property
    def ranks(self) -> list[int]:
        """The distinct ranks, ascending."""
        return sorted({item.rank for items in self.changes.values() for item in items if isinstance(item, LowRank)})

    @property
    def low_rank(self) -> Mapping[str, LowRank]:
        """The low-rank changes, keyed by tensor name."""
        return {name: item for name, items in self.changes.items() for item in items if isinstance(item, LowRank)}

    def close(self) -> None:
        """Release the files."""
        self.source.close()

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
