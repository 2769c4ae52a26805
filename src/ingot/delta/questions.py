"""Tasks of workers for diffs and for the cost of a delta, and an executor that runs functions of pairs on workers."""

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
from ingot.delta.auto import Measured, measure_pair
from ingot.delta.compare_inputs import common_digest, count_changed, is_cast
from ingot.delta.cost import DeltaFiles, cost_of, open_items
from ingot.delta.pairs import PairFiles, TensorPair, digest_of, open_pairs
from ingot.delta.plan import DiffPlannerData, PlannedDiffData
from ingot.delta.report import TensorDiff
from ingot.delta.strategy import Storage

R = TypeVar("R")


@preload
class PlannerFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of workers that plan differences: the locations of base and fine-tune, and the planner's fields."""

    base: str
    tuned: str
    io: str
    verify: bool
    max_decompressed: int | str | None
    draft: DiffPlannerData


@contextmanager
def _open_planners(files: PlannerFiles) -> Iterator[Opened[Callable[..., PlannedDiffData]]]:
    files_of_pair = PairFiles(files.base, files.tuned, files.io, files.verify, files.max_decompressed)
    with open_pairs(files_of_pair) as opened:
        yield Opened([partial(files.draft, pair) for pair in opened.items], opened.identity)


def _plan(item: Callable[..., PlannedDiffData], storage: Storage | None, count: int | None) -> PlannedDiffData:
    return item(storage, count)


DELTA_COST = Question(DeltaFiles, tuple[()], TensorDiff, open_items, cost_of)
PAIR_CAST = Question(PairFiles, tuple[()], bool, open_pairs, is_cast)
PAIR_EQUAL = Question(PairFiles, tuple[()], Digest | None, open_pairs, common_digest)
PAIR_DIGEST = Question(PairFiles, tuple[int], Digest, open_pairs, digest_of)
PAIR_CHANGED = Question(PairFiles, tuple[()], int, open_pairs, count_changed)
PAIR_MEASURE = Question(PairFiles, tuple[()], Measured, open_pairs, measure_pair)
PAIR_DRAFT = Question(PlannerFiles, tuple[Storage | None, int | None], PlannedDiffData, _open_planners, _plan)

_PAIR_QUESTIONS: dict[Callable[..., Any], str] = {
    is_cast: "pair-cast",
    common_digest: "pair-equal",
    digest_of: "pair-digest",
    count_changed: "pair-changed",
    measure_pair: "pair-measure",
}


def pair_question(function: Callable[..., Any], files: PairFiles) -> tuple[str, Struct]:
    """Return the name and the options of the worker task for a function of pairs, or for a ``DiffPlannerData``."""
    if isinstance(function, DiffPlannerData):
        named = (files.base, files.tuned, files.io, files.verify, files.max_decompressed)
        return "pair-draft", PlannerFiles(*named, function)
    return _PAIR_QUESTIONS[function], files


class ClusterExecutor:
    """A ``PairExecutor`` that runs on the workers of a pool.

    ``sources`` are the base and the fine-tune, opened by the driver. ``progress`` counts the bytes that workers read.
    """

    def __init__(
        self,
        pairs: Mapping[str, TensorPair],
        sources: Sequence[Source],
        files: PairFiles,
        pool: Pool,
        progress: Progress,
    ) -> None:
        self._pairs = pairs
        self._files = files
        self._pool = pool
        self._progress = progress
        self._indices = {name: index for index, name in enumerate(pairs)}
        self._addresses = {"base": sources[0].url, "tuned": sources[1].url}
        self._identity = [weights_of(source).identity() for source in sources]

    def map(
        self, function: Callable[..., R], names: Sequence[str], arguments: Sequence[tuple[Any, ...]] = ()
    ) -> list[R]:
        """Return ``function(pair, *arguments[i])`` for each name, computed by the pool's workers.

        ``pair_question`` must support the function. Raises the errors of ``ask``.
        """
        calls = zip(names, arguments or [()] * len(names), strict=True)
        queries = [Query(self._indices[name], name, self._pairs[name].nbytes, values) for name, values in calls]
        self._progress.total += sum(item.nbytes for item in queries)
        question, options = pair_question(function, self._files)
        return ask(question, files_of(options, self._addresses, self._identity), queries, self._pool, self._progress)
