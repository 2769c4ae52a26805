"""The tasks of workers for diffs, and for the errors of a delta; the calls of functions for pairs by workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from ingot.artifacts.open import Source, weights_of
from ingot.cluster.driver.spread import Opened, Query, Question, ask, files_of
from ingot.cluster.messages import Digest
from ingot.cluster.pool import Pool
from ingot.core.parsing.strictjson import preload
from ingot.core.runtime.progress import Progress
from ingot.delta.auto import Measured, measure_both
from ingot.delta.compare_inputs import changed, common_digest, is_cast
from ingot.delta.cost import DeltaFiles, cost_of, open_items
from ingot.delta.pairs import Both, PairFiles, digest_of, open_pairs
from ingot.delta.plan import DraftData, DraftedData
from ingot.delta.report import TensorDiff
from ingot.delta.strategy import Storage

R = TypeVar("R")


@preload
class DraftFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """A base and a fine-tune, and how their difference is to be stored."""

    base: str
    tuned: str
    io: str
    verify: bool
    max_decompressed: int | str | None
    draft: DraftData


@contextmanager
def _open_drafts(files: DraftFiles) -> Iterator[Opened[Callable[..., DraftedData]]]:
    pair = PairFiles(files.base, files.tuned, files.io, files.verify, files.max_decompressed)
    with open_pairs(pair) as opened:
        yield Opened([partial(files.draft, both) for both in opened.items], opened.identity)


def _draft(item: Callable[..., DraftedData], storage: Storage | None, count: int | None) -> DraftedData:
    return item(storage, count)


DELTA_COST = Question(DeltaFiles, tuple[()], TensorDiff, open_items, cost_of)
PAIR_CAST = Question(PairFiles, tuple[()], bool, open_pairs, is_cast)
PAIR_EQUAL = Question(PairFiles, tuple[()], Digest | None, open_pairs, common_digest)
PAIR_DIGEST = Question(PairFiles, tuple[int], Digest, open_pairs, digest_of)
PAIR_CHANGED = Question(PairFiles, tuple[()], int, open_pairs, changed)
PAIR_MEASURE = Question(PairFiles, tuple[()], Measured, open_pairs, measure_both)
PAIR_DRAFT = Question(DraftFiles, tuple[Storage | None, int | None], DraftedData, _open_drafts, _draft)

_PAIR_QUESTIONS: dict[Callable[..., Any], str] = {
    is_cast: "pair-cast",
    common_digest: "pair-equal",
    digest_of: "pair-digest",
    changed: "pair-changed",
    measure_both: "pair-measure",
}


def pair_question(function: Callable[..., Any], files: PairFiles) -> tuple[str, Struct]:
    """Return the name of the question that a function of pairs is, or a ``DraftData``, and its options."""
    if isinstance(function, DraftData):
        named = (files.base, files.tuned, files.io, files.verify, files.max_decompressed)
        return "pair-draft", DraftFiles(*named, function)
    return _PAIR_QUESTIONS[function], files


class ByWorkers:
    """The workers of a pool answer. ``Asking``.

    ``sources`` are the two as the driver has opened them; ``progress`` gets the bytes that workers read, which are
    added to its total.
    """

    def __init__(
        self, pairs: Mapping[str, Both], sources: Sequence[Source], files: PairFiles, pool: Pool, progress: Progress
    ) -> None:
        self._pairs = pairs
        self._files = files
        self._pool = pool
        self._progress = progress
        self._numbers = {name: number for number, name in enumerate(pairs)}
        self._addresses = {"base": sources[0].url, "tuned": sources[1].url}
        self._identity = [weights_of(source).identity() for source in sources]

    def each(self, of: Callable[..., R], names: Sequence[str], told: Sequence[tuple[Any, ...]] = ()) -> list[R]:
        """As ``Asking.each``, for the functions of ``pair_question``; raises the errors of ``ask``."""
        pairs = zip(names, told or [()] * len(names), strict=True)
        queries = [Query(self._numbers[name], name, self._pairs[name].nbytes, item) for name, item in pairs]
        self._progress.total += sum(item.nbytes for item in queries)
        question, options = pair_question(of, self._files)
        return ask(question, files_of(options, self._addresses, self._identity), queries, self._pool, self._progress)
