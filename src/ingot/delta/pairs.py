"""Pairs of tensors, of a base and a fine-tune, and the calls of functions for each pair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec import Struct

from ingot.artifacts.identity import tensor_digest
from ingot.artifacts.open import open_source, weights_of
from ingot.cluster.driver.spread import Opened
from ingot.codecs.table import CODECS
from ingot.core.parsing.strictjson import warm
from ingot.core.runtime.parallel import ordered
from ingot.engine.fit import why_incomparable
from ingot.model.checkpoint import tensor_map_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import ComputedMap, TensorMap
from ingot.model.reading.view import ElementRuns, assemble
from ingot.model.tensor import Tensor
from ingot.stores.location import Location

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Both:
    """A tensor of the base and that of its name in the fine-tune; None where there is none."""

    base: Tensor | None
    tuned: Tensor | None

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Both, where both are there."""
        assert self.base is not None
        assert self.tuned is not None
        return self.base, self.tuned

    @property
    def is_alike(self) -> bool:
        """Whether both are there, and have one shape and element type."""
        first = self.base
        other = self.tuned
        return first is not None and other is not None and (first.shape, first.dtype) == (other.shape, other.dtype)

    @property
    def is_fitted(self) -> bool:
        """Whether both are there, of other shapes or element types, and a difference leads from one to the other."""
        first = self.base
        other = self.tuned
        if first is None or other is None or self.is_alike:
            return False
        return why_incomparable(first, other) is None

    def shared(self) -> tuple[Tensor, Tensor]:
        """Return the rows that both have, of comparable tensors: themselves where that is all."""
        first, other = self.pair
        if first.shape == other.shape:
            return first, other
        count = min(first.shape[0], other.shape[0])
        return first_rows(first, count), first_rows(other, count)

    @property
    def added_nbytes(self) -> int:
        """Stored bytes of the rows that only the fine-tune's tensor has, of comparable tensors."""
        base, tuned = self.pair
        return tuned.nbytes * max(tuned.size - base.size, 0) // max(tuned.size, 1)

    @property
    def nbytes(self) -> int:
        """Stored bytes of both."""
        return sum(tensor.nbytes for tensor in (self.base, self.tuned) if tensor is not None)


class Pairs(ComputedMap[Both]):
    """All tensors by their names: the fine-tune's, then those that only the base has. None is kept."""

    def __init__(self, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> None:
        self._base = tensor_map_of(base)
        self._tuned = tensor_map_of(tuned)
        more = [name for name in self._base if name not in self._tuned]
        names = dict.fromkeys((*self._tuned, *more)) if more else self._tuned
        super().__init__(names, self._pair)

    def _pair(self, name: str) -> Both:
        return Both(_passing(self._base, name), _passing(self._tuned, name))


def _passing(tensors: TensorMap[Tensor], name: str) -> Tensor | None:
    return tensors.get_uncached(name) if name in tensors else None


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows of a tensor, in the first dimension, as a tensor that is read when it is used."""
    if count == tensor.shape[0]:
        return tensor
    shape = (count, *tensor.shape[1:])
    runs = np.array([[0], [0], [prod(shape)]], np.int64)
    return assemble(tensor.name, shape, ElementRuns([tensor], runs), CODECS[DenseLayout.codec])


def pairs_of(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> Pairs:
    """Return all tensors by their names, each pair made when it is asked for."""
    return Pairs(base, tuned)


class Asking(Protocol):
    """Who answers what is asked of pairs."""

    def each(self, of: Callable[..., R], names: Sequence[str], told: Sequence[tuple[Any, ...]] = ()) -> Iterable[R]:
        """Return ``of(pair, *told)`` for every name, in order.

        Workers know the functions of ``delta.questions.pair_question``. ``told`` is nothing, or has as many items
        as there are names.
        """
        ...


class Here:
    """Threads of this process answer. ``Asking``."""

    def __init__(self, pairs: Mapping[str, Both], workers: int) -> None:
        self._pairs = pairs
        self._workers = workers

    def each(self, of: Callable[..., R], names: Sequence[str], told: Sequence[tuple[Any, ...]] = ()) -> Iterator[R]:
        """As ``Asking.each``."""
        asked = zip(names, told or [()] * len(names), strict=True)
        return ordered(lambda item: of(self._pairs[item[0]], *item[1]), asked, self._workers)


@warm
class PairFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """A base and a fine-tune, as a worker opens them."""

    base: str
    tuned: str
    io: str
    verify: bool
    max_decompressed: int | str | None


@contextmanager
def open_pairs(files: PairFiles) -> Iterator[Opened[Both]]:
    """Open both again, in a worker."""
    more: dict[str, Any] = {"io": files.io, "verify": files.verify, "max_decompressed": files.max_decompressed}
    locations = Location.parse(files.base), Location.parse(files.tuned)
    with closing(open_source(locations[0], **more)) as first, closing(open_source(locations[1], **more)) as second:
        base, tuned = weights_of(first), weights_of(second)
        yield Opened(list(pairs_of(base, tuned).values()), [base.identity(), tuned.identity()])


def digest_of(both: Both, side: int) -> str:
    """Return the digest of the base's tensor (0) or the fine-tune's (1)."""
    tensor = both.tuned if side else both.base
    assert tensor is not None
    return tensor_digest(tensor)
