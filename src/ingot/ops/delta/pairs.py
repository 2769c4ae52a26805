"""What is asked of each pair of tensors, of a base and a fine-tune: by threads here, or by many workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ingot.core.parallel import ordered
from ingot.core.progress import Progress
from ingot.engine.cluster.pool import Pool
from ingot.model.tensor import Tensor
from ingot.ops.cluster.spread import Inquiry, Opened, Wanted, spread
from ingot.ops.identity import tensor_digest
from ingot.ops.open import Source, open_source, weights_of
from ingot.ops.options import AnyPath

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
        first, other = self.base, self.tuned
        return first is not None and other is not None and (first.shape, first.dtype) == (other.shape, other.dtype)

    @property
    def nbytes(self) -> int:
        """Stored bytes of both."""
        return sum(tensor.nbytes for tensor in (self.base, self.tuned) if tensor is not None)


def pairs_of(base: Mapping[str, Tensor], tuned: Mapping[str, Tensor]) -> dict[str, Both]:
    """Return all tensors by their names: the fine-tune's, then those that only the base has."""
    return {name: Both(base.get(name), tuned.get(name)) for name in dict.fromkeys((*tuned, *base))}


class Asking(Protocol):
    """Who answers what is asked of pairs."""

    def each(self, of: Callable[..., R], names: Sequence[str], told: Sequence[tuple[Any, ...]] = ()) -> Iterable[R]:
        """Return ``of(pair, *told)`` for every name, in order.

        ``of`` is a function of a module, or something else that can be pickled and compared; ``told`` is nothing, or
        has as many items as there are names.
        """
        ...


class Here:
    """Threads of this process answer. ``Asking``."""

    def __init__(self, pairs: Mapping[str, Both], workers: int) -> None:
        self._pairs, self._workers = pairs, workers

    def each(self, of: Callable[..., R], names: Sequence[str], told: Sequence[tuple[Any, ...]] = ()) -> Iterator[R]:
        """As ``Asking.each``."""
        asked = zip(names, told or [()] * len(names), strict=True)
        return ordered(lambda item: of(self._pairs[item[0]], *item[1]), asked, self._workers)


@dataclass(frozen=True, slots=True)
class Reading:
    """Two artifacts, and how they are opened."""

    base: AnyPath
    tuned: AnyPath
    io: str
    verify: bool
    max_decompressed: int | str | None


class ByWorkers:
    """The workers of a pool answer. ``Asking``.

    ``sources`` are the two as the driver has opened them; ``progress`` is told of what they read, which is added to its
    total.
    """

    def __init__(
        self, pairs: Mapping[str, Both], sources: Sequence[Source], how: Reading, pool: Pool, progress: Progress
    ) -> None:
        self._pairs, self._how, self._pool, self._progress = pairs, how, pool, progress
        self._numbers = {name: number for number, name in enumerate(pairs)}
        self._addresses = {"base": sources[0].url, "tuned": sources[1].url}
        self._identity = [weights_of(source).identity() for source in sources]

    def each(self, of: Callable[..., R], names: Sequence[str], told: Sequence[tuple[Any, ...]] = ()) -> list[R]:
        """As ``Asking.each``; errors as ``spread``."""
        asked = zip(names, told or [()] * len(names), strict=True)
        wanted = [Wanted(self._numbers[name], self._pairs[name].nbytes, item) for name, item in asked]
        self._progress.total += sum(item.nbytes for item in wanted)
        inquiry = Inquiry(_opened, of, self._how, self._addresses, self._identity)
        return spread(inquiry, wanted, self._pool, self._progress)


@contextmanager
def _opened(how: Reading) -> Iterator[Opened[Both]]:
    """Open both again, in a worker."""
    more: dict[str, Any] = {"io": how.io, "verify": how.verify, "max_decompressed": how.max_decompressed}
    with closing(open_source(how.base, **more)) as first, closing(open_source(how.tuned, **more)) as second:
        base, tuned = weights_of(first), weights_of(second)
        yield Opened(list(pairs_of(base, tuned).values()), [base.identity(), tuned.identity()])


def digest_of(both: Both, side: int) -> str:
    """Return the digest of the base's tensor (0) or the fine-tune's (1)."""
    tensor = both.tuned if side else both.base
    assert tensor is not None
    return tensor_digest(tensor)
