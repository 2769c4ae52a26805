"""Pairs of tensors of a base and a fine-tune, and executors that call a function for each pair."""

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
from ingot.core.parsing.strictjson import preload
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
class TensorPair:
    """The tensors of one name in base and fine-tune; a missing tensor is None."""

    base: Tensor | None
    tuned: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The base's tensor and the fine-tune's tensor, which must both exist."""
        assert self.base is not None
        assert self.tuned is not None
        return self.base, self.tuned

    @property
    def is_same_type(self) -> bool:
        """Whether both tensors exist and have one shape and element type."""
        base = self.base
        tuned = self.tuned
        return base is not None and tuned is not None and (base.shape, base.dtype) == (tuned.shape, tuned.dtype)

    @property
    def is_comparable(self) -> bool:
        """Whether both tensors exist and differ in shape or element type, but a difference can be computed."""
        base = self.base
        tuned = self.tuned
        if base is None or tuned is None or self.is_same_type:
            return False
        return why_incomparable(base, tuned) is None

    def shared(self) -> tuple[Tensor, Tensor]:
        """Return the leading rows that exist in both tensors, as lazily read tensors: the base's and the fine-tune's.

        Both tensors must exist, and ``is_same_type`` or ``is_comparable`` must be true.
        """
        base, tuned = self.tensors
        if base.shape == tuned.shape:
            return base, tuned
        count = min(base.shape[0], tuned.shape[0])
        return first_rows(base, count), first_rows(tuned, count)

    @property
    def added_nbytes(self) -> int:
        """The number of stored bytes of rows that exist only in the fine-tune's tensor. Both tensors must exist."""
        base, tuned = self.tensors
        return tuned.nbytes * max(tuned.size - base.size, 0) // max(tuned.size, 1)

    @property
    def nbytes(self) -> int:
        """The number of stored bytes of both tensors."""
        return sum(tensor.nbytes for tensor in (self.base, self.tuned) if tensor is not None)


class PairMap(ComputedMap[TensorPair]):
    """All pairs by name, uncached: names of the fine-tune, then names that only the base has."""

    def __init__(self, base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> None:
        self._base = tensor_map_of(base)
        self._tuned = tensor_map_of(tuned)
        base_only = [name for name in self._base if name not in self._tuned]
        names = dict.fromkeys((*self._tuned, *base_only)) if base_only else self._tuned
        super().__init__(names, self._pair)

    def _pair(self, name: str) -> TensorPair:
        return TensorPair(_get_uncached(self._base, name), _get_uncached(self._tuned, name))


def _get_uncached(tensors: TensorMap[Tensor], name: str) -> Tensor | None:
    return tensors.get_uncached(name) if name in tensors else None


def first_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first rows of a tensor as a lazily read tensor."""
    if count == tensor.shape[0]:
        return tensor
    shape = (count, *tensor.shape[1:])
    runs = np.array([[0], [0], [prod(shape)]], np.int64)
    return assemble(tensor.name, shape, ElementRuns([tensor], runs), CODECS[DenseLayout.codec])


class PairExecutor(Protocol):
    """Calls a function for pairs of tensors."""

    def map(
        self, function: Callable[..., R], names: Sequence[str], arguments: Sequence[tuple[Any, ...]] = ()
    ) -> Iterable[R]:
        """Return ``function(pair, *arguments[i])`` for every name, in order.

        Workers support the functions of ``delta.questions.pair_question``. ``arguments`` is empty, or has an item per
        name.
        """
        ...


class LocalExecutor:
    """A ``PairExecutor`` that uses threads of this process."""

    def __init__(self, pairs: Mapping[str, TensorPair], workers: int) -> None:
        self._pairs = pairs
        self._workers = workers

    def map(
        self, function: Callable[..., R], names: Sequence[str], arguments: Sequence[tuple[Any, ...]] = ()
    ) -> Iterator[R]:
        """Yield ``function(pair, *arguments[i])`` for each name in order, computed by threads of this process."""
        calls = zip(names, arguments or [()] * len(names), strict=True)
        return ordered(lambda call: function(self._pairs[call[0]], *call[1]), calls, self._workers)


@preload
class PairFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """The locations of a base and a fine-tune, from which workers open them."""

    base: str
    tuned: str
    io: str
    verify: bool
    max_decompressed: int | str | None


@contextmanager
def open_pairs(files: PairFiles) -> Iterator[Opened[TensorPair]]:
    """Open base and fine-tune, in a worker."""
    options: dict[str, Any] = {"io": files.io, "verify": files.verify, "max_decompressed": files.max_decompressed}
    locations = Location.parse(files.base), Location.parse(files.tuned)
    with (
        closing(open_source(locations[0], **options)) as first,
        closing(open_source(locations[1], **options)) as second,
    ):
        base = weights_of(first)
        tuned = weights_of(second)
        yield Opened(list(PairMap(base, tuned).values()), [base.identity(), tuned.identity()])


def digest_of(pair: TensorPair, side: int) -> str:
    """Return the digest of the base's tensor (side 0) or the fine-tune's (side 1)."""
    tensor = pair.tuned if side else pair.base
    assert tensor is not None
    return tensor_digest(tensor)
