"""The steps of a diff: how the difference of one pair of tensors is stored, as a step that makes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import Struct

from ingot.artifacts.identity import tensor_digest
from ingot.codecs.delta.base import AdditiveEncoder, DeltaEncoder, delta_codec, difference
from ingot.codecs.resolve_range import merge_options, resolve_range
from ingot.codecs.table import CODECS, FLOAT_ENTROPY
from ingot.conversion.candidates import sample_of
from ingot.core.parsing.strictjson import warm
from ingot.delta.auto import SAMPLE, exact_bytes
from ingot.delta.pairs import Both
from ingot.delta.strategy import (
    AUTO,
    CALIBRATED,
    EXACT,
    SMALL,
    UNSCALED,
    Storage,
    calibrated,
    choices,
    over_added_rows,
)
from ingot.engine.chunks import chunks, leading_rows, matrix_of
from ingot.engine.data import StepData, from_json_value, step_data, to_json_value
from ingot.engine.diff_step import Diff
from ingot.engine.fit import cast_exactly, fit_rows, is_opaque, why_incomparable
from ingot.engine.steps import ENCODED, Encode, Move
from ingot.engine.work import Step, difference_spec, encoded_spec
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.model.delta import Change
from ingot.model.layouts.dense import DenseLayout
from ingot.model.statistics import Statistics
from ingot.model.tensor import Array, Tensor
from ingot.quantization.encode import encoder_under
from ingot.quantization.tensor import Outcome, StatisticsSource, has_statistics

ENTROPY = ("bf16", "f16", "f32")
"""Element types that ``float_entropy`` stores in fewer bytes than they take."""
_CHUNK = 1 << 20
_WORTH, _FRAME = 1.02, 64
"""What the tensor itself has to save: a difference names the base, and what is the same in both takes nothing."""


def exact_dtype(both: Both) -> str | None:
    """Return the element type that the exact difference is taken in; None if the tensor itself is smaller."""
    (base, tuned), every = both.shared(), both.pair[1]
    if tuned.size <= SMALL:
        return tuned.dtype
    old = sample_of(base, SAMPLE)
    new = sample_of(tuned, SAMPLE)
    if old.shape != new.shape:  # read in runs from one file and in rows from the other
        return tuned.dtype
    sizes: dict[str | None, int] = {tuned.dtype: exact_bytes(fit_rows(old, len(old), tuned.dtype), new, tuned.dtype)}
    coarse = cast_exactly(new, base.dtype)
    if coarse is not None:
        sizes[base.dtype] = exact_bytes(old, coarse, base.dtype)
    if tuned.dtype in ENTROPY:
        sizes[None] = int(_WORTH * _entropy_bytes(new, tuned.dtype)) + _FRAME
    ways = sorted(sizes, key=lambda dtype: sizes[dtype])
    return next(dtype for dtype in ways if dtype != base.dtype or _narrows(every, base.dtype))


def _entropy_bytes(values: Array, dtype: str) -> int:
    parts = CODECS[FLOAT_ENTROPY].encoder(values.shape, dtype, {}).encode(values)
    return sum(part.nbytes for part in parts.values())


def _narrows(tensor: Tensor, dtype: str) -> bool:
    """Whether a cast to ``dtype`` and back keeps every bit of a tensor; stops at the first that it does not."""
    matrix = matrix_of(tensor)
    rows = chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1)))
    return all(cast_exactly(values, dtype) is not None for values in rows)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What becomes of a tensor of the fine-tune: ``change``, and the step that stores it.

    ``digest`` is the digest of values that only move, ``rounded`` the storage of numbers that a quantizer chooses.
    """

    change: Change
    step: Step
    digest: str | None = None
    rounded: Storage | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """What is asked of a delta in ``container``; ``default`` tells that nobody named the strategy.

    ``known`` are statistics that numbers are chosen by, where there are some, ``said`` what tells them from others;
    ``outcomes`` gets what became of each matrix that was rounded under them.
    """

    container: str
    strategy: str
    default: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    known: StatisticsSource | None = None
    said: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict, compare=False)

    @property
    def auto(self) -> bool:
        """Whether measured storages are given, and all others are exact."""
        return self.strategy == AUTO and self.container == "zt"

    @property
    def asked(self) -> Storage:
        """The strategy's storage of matrices, which ``options`` are for; raises ``UsageError`` ``delta.strategy``."""
        return EXACT if self.auto else choices(self.strategy, "", (SMALL, SMALL), "f32", self.container)

    def drafted(self, both: Both, storage: Storage | None = None, count: int | None = None) -> Drafted:
        """Return the step of a tensor that is not the same in both.

        Parameters
        ----------
        both : Both
        storage : Storage, optional
            How the difference is stored; by default as the strategy has it.
        count : int, optional
            How many elements differ, for those that need it known.

        Raises
        ------
        UnsupportedError, CodecError
        """
        tensor = both.tuned
        assert tensor is not None
        try:
            return self._drafted(both, tensor, storage or self._storage(tensor, both.base), count)
        except IngotError as error:
            small = UNSCALED.get(self.container)
            if error.rule == "codec.underflow" and small is not None and self.default:
                return self._drafted(both, tensor, small, count)
            raise error if error.where and tensor.name in error.where else error.at(tensor.name) from None

    def _storage(self, tensor: Tensor, base: Tensor | None) -> Storage:
        if self.auto:
            return EXACT
        chosen = choices(self.strategy, tensor.name, tensor.shape, tensor.dtype, self.container)
        ways = CALIBRATED.get(self.strategy, ())
        resized = base is not None and base.shape != tensor.shape  # statistics are of one of the two shapes
        if chosen == EXACT or not ways or resized or not has_statistics(self.known, tensor.name, tensor.shape):
            return chosen
        return calibrated(ways, tensor.shape[-1])

    def _encoder(self, tensor: Tensor, storage: Storage, options: Mapping[str, Any], dtype: str) -> DeltaEncoder:
        if storage.quantizer is None:
            return delta_codec(storage.codec).encoder(tensor.shape, dtype, options)
        how = (storage.quantizer, storage.codec, options)
        known = Statistics.in_memory({}) if self.known is None else self.known
        return AdditiveEncoder(encoder_under(tensor.name, tensor.shape, how, known, self._take))

    def _take(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes.update({outcome.matrix: outcome for outcome in outcomes})

    def _drafted(self, both: Both, tensor: Tensor, storage: Storage, count: int | None) -> Drafted:
        base = both.base
        if is_opaque(tensor):
            return self._checked(_replaced(tensor), Move(tensor, tensor.spec(), source=1), tensor_digest(tensor))
        if base is None or not (self.container == "wdelta" or why_incomparable(base, tensor) is None):
            return self._whole(tensor)
        mine = storage == self.asked or storage in CALIBRATED.get(self.strategy, ())
        extra = self.options if mine else {}
        storage = replace(storage, options={**storage.options, **extra})
        if base.shape != tensor.shape and not delta_codec(storage.codec).exact:
            storage = _over_rows(storage, base.shape, tensor.shape)
        codec = delta_codec(storage.codec)
        taken_in = tensor.dtype
        if codec.exact and base.dtype != tensor.dtype:
            smallest = exact_dtype(both)
            if smallest is None:
                return self._whole(tensor)
            taken_in = smallest

        def made(options: Mapping[str, Any]) -> DeltaEncoder:
            return self._encoder(tensor, storage, options, taken_in)

        options = {**storage.options, **({} if count is None else {"count": count})}
        try:
            encoder = made(options)
        except UnsupportedError:  # complex numbers
            if not codec.exact:
                raise
            return self._whole(tensor)
        more: Mapping[str, Any] = {}
        if encoder.observes():
            encoder, more = resolve_range(encoder, made, options, _differences(base, tensor))
            options = merge_options(options, more)
        spec = difference_spec(tensor, codec, encoder, storage.encoding)
        rule = storage.codec if storage.quantizer is None else f"{storage.codec}, {storage.quantizer} by {self.said}"
        told = (tensor, spec, ENCODED, rule, encoder.lossless)
        step = Diff(*told, base=base, codec=codec, encoder=encoder, options=options)
        change = self._applied(base, tensor)
        rounded = None if storage.quantizer is None else storage
        return self._checked(change, step, rounded=rounded)

    def _applied(self, base: Tensor, tensor: Tensor) -> Change:
        """Return the change by a difference; a ``.wdelta`` has no place for what the base is."""
        retyped = base.dtype != tensor.dtype
        resized = base.shape != tensor.shape
        if self.container == "wdelta":
            return Change("apply", tensor.dtype)
        return Change("apply", tensor.dtype, base.dtype if retyped else None, base.shape if resized else None)

    def _whole(self, tensor: Tensor) -> Drafted:
        codec = FLOAT_ENTROPY if tensor.dtype in ENTROPY and tensor.size > SMALL else DenseLayout.codec
        encoder = CODECS[codec].encoder(tensor.shape, tensor.dtype, {})
        spec = encoded_spec(tensor.name, tensor, encoder, "raw")
        return self._checked(_replaced(tensor), Encode(tensor, spec, ENCODED, codec, encoder=encoder, source=1))

    def _checked(
        self, change: Change, step: Step, digest: str | None = None, rounded: Storage | None = None
    ) -> Drafted:
        reason = FORMATS[self.container].why_unsupported(step.spec)
        if reason is not None:
            raise refused(self.container, reason)
        return Drafted(change, step, digest, rounded)


def _replaced(tensor: Tensor) -> Change:
    return Change("replace", tensor.dtype)


def _over_rows(storage: Storage, base: tuple[int, ...], tuned: tuple[int, ...]) -> Storage:
    """Return how a difference is stored that is not exact, for tensors of other numbers of rows."""
    if len(tuned) < 2:
        return EXACT
    return over_added_rows(storage, base[0]) if base[0] < tuned[0] else storage


def _differences(base: Tensor, tensor: Tensor) -> Iterator[tuple[int, Array]]:
    """Yield the first row and some differences of the rows that both have."""
    shrinks = tensor.size < base.size
    for start, (first, other) in leading_rows(tensor, base) if shrinks else leading_rows(base, tensor):
        yield start, difference(other, first) if shrinks else difference(first, other)


def refused(container: str, reason: str) -> UnsupportedError:
    """Return the refusal ``delta.container``."""
    return UnsupportedError(f"{container} cannot carry this: {reason}", rule="delta.container")


@dataclass(frozen=True, slots=True)
class DraftedData:
    """``Drafted`` on its way to another process."""

    change: Change
    step: StepData
    digest: str | None


@warm
class DraftData(Struct, frozen=True, forbid_unknown_fields=True):
    """A draft without statistics, whose steps are returned as data; called with the arguments of ``Draft.drafted``."""

    container: str
    strategy: str
    default: bool
    options: dict[str, Any]

    @classmethod
    def from_draft(cls, draft: Draft) -> DraftData:
        """Return the fields of a draft."""
        return cls(draft.container, draft.strategy, draft.default, to_json_value(draft.options))

    def __call__(self, both: Both, storage: Storage | None = None, count: int | None = None) -> DraftedData:
        draft = Draft(self.container, self.strategy, self.default, from_json_value(self.options))
        drafted = draft.drafted(both, storage, count)
        return DraftedData(drafted.change, msgspec.convert(step_data(drafted.step), StepData), drafted.digest)
