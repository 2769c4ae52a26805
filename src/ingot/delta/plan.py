"""Plan a diff: choose how the difference of each pair of tensors is stored, as a step of the engine."""

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
from ingot.core.parsing.strictjson import preload
from ingot.delta.auto import SAMPLE, exact_bytes
from ingot.delta.pairs import TensorPair
from ingot.delta.strategy import (
    AUTO,
    CALIBRATED,
    EXACT,
    SMALL,
    UNSCALED,
    Storage,
    choices,
    first_fitting,
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
"""Element types for which ``float_entropy`` saves bytes."""
_CHUNK = 1 << 20
_FULL_TENSOR_FACTOR = 1.02
_FULL_TENSOR_BYTES = 64
"""A full tensor is stored instead of an exact difference only if this saves enough: the difference must be larger than
``_FULL_TENSOR_FACTOR`` times the full tensor plus this number of bytes. A difference records its base."""


def exact_dtype(pair: TensorPair) -> str | None:
    """Return the element type in which the exact difference needs the fewest bytes, or None to store the full tensor.

    The candidates are the types of fine-tune and base. Sizes are measured on a sample.
    """
    base, tuned = pair.shared()
    full_tuned = pair.tensors[1]
    if tuned.size <= SMALL:
        return tuned.dtype
    old = sample_of(base, SAMPLE)
    new = sample_of(tuned, SAMPLE)
    if old.shape != new.shape:  # one file was sampled by runs, the other by rows
        return tuned.dtype
    sizes: dict[str | None, int] = {tuned.dtype: exact_bytes(fit_rows(old, len(old), tuned.dtype), new, tuned.dtype)}
    coarse = cast_exactly(new, base.dtype)
    if coarse is not None:
        sizes[base.dtype] = exact_bytes(old, coarse, base.dtype)
    if tuned.dtype in ENTROPY:
        sizes[None] = int(_FULL_TENSOR_FACTOR * _entropy_bytes(new, tuned.dtype)) + _FULL_TENSOR_BYTES
    by_size = sorted(sizes, key=lambda dtype: sizes[dtype])
    return next(dtype for dtype in by_size if dtype != base.dtype or _narrows(full_tuned, base.dtype))


def _entropy_bytes(values: Array, dtype: str) -> int:
    parts = CODECS[FLOAT_ENTROPY].encoder(values.shape, dtype, {}).encode(values)
    return sum(part.nbytes for part in parts.values())


def _narrows(tensor: Tensor, dtype: str) -> bool:
    """Return whether a cast of a tensor to ``dtype`` and back preserves every bit.

    Reading stops at the first chunk that a cast changes.
    """
    matrix = matrix_of(tensor)
    rows = chunks(tensor, matrix, max(1, _CHUNK // max(matrix[1], 1)))
    return all(cast_exactly(values, dtype) is not None for values in rows)


@dataclass(frozen=True, slots=True)
class PlannedDiff:
    """The change of a tensor of the fine-tune, and the step that stores the change.

    ``digest`` is the digest of the values if the step only copies them, else None. ``rounded`` is the storage if a
    calibrated quantizer rounds the difference, else None.
    """

    change: Change
    step: Step
    digest: str | None = None
    rounded: Storage | None = None


@dataclass(frozen=True, slots=True)
class DiffPlanner:
    """A planner of the tensors of a delta in ``container``; ``is_default`` states that the user named no strategy.

    ``statistics`` calibrate the rounding, and ``statistics_id`` identifies them. ``outcomes`` collects the results of
    matrices that were rounded with statistics.
    """

    container: str
    strategy: str
    is_default: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    statistics: StatisticsSource | None = None
    statistics_id: str = ""
    outcomes: dict[str, Outcome] = field(default_factory=dict, compare=False)

    @property
    def auto(self) -> bool:
        """Whether the strategy is ``auto``, which measures storages.

        Tensors without measurements are stored exactly.
        """
        return self.strategy == AUTO and self.container == "zt"

    def matrix_storage(self) -> Storage:
        """Return the storage that the strategy uses for matrices.

        For strategy ``auto``, this is ``EXACT``, the storage of matrices without measurements. Raises ``UsageError``
        ``delta.strategy`` for an unknown strategy.
        """
        return EXACT if self.auto else choices(self.strategy, "", (SMALL, SMALL), "f32", self.container)

    def plan(self, pair: TensorPair, storage: Storage | None = None, count: int | None = None) -> PlannedDiff:
        """Return the change and the step of a tensor that differs from the base's.

        Parameters
        ----------
        pair : TensorPair
        storage : Storage, optional
            How to store the difference; by default as the strategy does.
        count : int, optional
            How many elements differ, for codecs that need the count.

        Raises
        ------
        UnsupportedError, CodecError
            Errors of the container or the codec, with the tensor's name.
        """
        tensor = pair.tuned
        assert tensor is not None
        try:
            return self._plan(pair, tensor, storage or self._storage(tensor, pair.base), count)
        except IngotError as error:
            small = UNSCALED.get(self.container)
            if error.rule == "codec.underflow" and small is not None and self.is_default:
                return self._plan(pair, tensor, small, count)
            raise error if error.where and tensor.name in error.where else error.add_location(tensor.name) from None

    def _storage(self, tensor: Tensor, base: Tensor | None) -> Storage:
        if self.auto:
            return EXACT
        storage = choices(self.strategy, tensor.name, tensor.shape, tensor.dtype, self.container)
        candidates = CALIBRATED.get(self.strategy, ())
        # The shapes in the statistics are those of one of both
        resized = base is not None and base.shape != tensor.shape
        if (
            storage == EXACT
            or not candidates
            or resized
            or not has_statistics(self.statistics, tensor.name, tensor.shape)
        ):
            return storage
        return first_fitting(candidates, tensor.shape[-1])

    def _encoder(self, tensor: Tensor, storage: Storage, options: Mapping[str, Any], dtype: str) -> DeltaEncoder:
        if storage.quantizer is None:
            return delta_codec(storage.codec).encoder(tensor.shape, dtype, options)
        quantizer = (storage.quantizer, storage.codec, options)
        statistics = Statistics.in_memory({}) if self.statistics is None else self.statistics
        return AdditiveEncoder(encoder_under(tensor.name, tensor.shape, quantizer, statistics, self._add_outcomes))

    def _add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes.update({outcome.matrix: outcome for outcome in outcomes})

    def _plan(self, pair: TensorPair, tensor: Tensor, storage: Storage, count: int | None) -> PlannedDiff:
        base = pair.base
        if is_opaque(tensor):
            return self._checked(_replaced(tensor), Move(tensor, tensor.spec(), source=1), tensor_digest(tensor))
        if base is None or not (self.container == "wdelta" or why_incomparable(base, tensor) is None):
            return self._full_tensor(tensor)
        is_strategy = storage == self.matrix_storage() or storage in CALIBRATED.get(self.strategy, ())
        extra = self.options if is_strategy else {}
        storage = replace(storage, options={**storage.options, **extra})
        if base.shape != tensor.shape and not delta_codec(storage.codec).exact:
            storage = _over_rows(storage, base.shape, tensor.shape)
        codec = delta_codec(storage.codec)
        difference_dtype = tensor.dtype
        if codec.exact and base.dtype != tensor.dtype:
            smallest = exact_dtype(pair)
            if smallest is None:
                return self._full_tensor(tensor)
            difference_dtype = smallest

        def make_encoder(options: Mapping[str, Any]) -> DeltaEncoder:
            return self._encoder(tensor, storage, options, difference_dtype)

        options = {**storage.options, **({} if count is None else {"count": count})}
        try:
            encoder = make_encoder(options)
        except UnsupportedError:  # complex numbers have no exact difference
            if not codec.exact:
                raise
            return self._full_tensor(tensor)
        if encoder.observes():
            encoder, resolved = resolve_range(encoder, make_encoder, options, _differences(base, tensor))
            options = merge_options(options, resolved)
        spec = difference_spec(tensor, codec, encoder, storage.encoding)
        rule = storage.codec
        if storage.quantizer is not None:
            rule = f"{storage.codec}, {storage.quantizer} by {self.statistics_id}"
        step = Diff(
            tensor,
            spec,
            ENCODED,
            rule,
            encoder.lossless,
            base=base,
            codec=codec,
            encoder=encoder,
            options=options,
        )
        change = self._applied(base, tensor)
        rounded = None if storage.quantizer is None else storage
        return self._checked(change, step, rounded=rounded)

    def _applied(self, base: Tensor, tensor: Tensor) -> Change:
        """Return the ``Change`` for a tensor that is stored as a difference.

        It records the base's type and shape if they differ from the fine-tune's. A ``.wdelta`` cannot record them.
        """
        retyped = base.dtype != tensor.dtype
        resized = base.shape != tensor.shape
        if self.container == "wdelta":
            return Change("apply", tensor.dtype)
        return Change("apply", tensor.dtype, base.dtype if retyped else None, base.shape if resized else None)

    def _full_tensor(self, tensor: Tensor) -> PlannedDiff:
        codec = FLOAT_ENTROPY if tensor.dtype in ENTROPY and tensor.size > SMALL else DenseLayout.codec
        encoder = CODECS[codec].encoder(tensor.shape, tensor.dtype, {})
        spec = encoded_spec(tensor.name, tensor, encoder, "raw")
        return self._checked(_replaced(tensor), Encode(tensor, spec, ENCODED, codec, encoder=encoder, source=1))

    def _checked(
        self, change: Change, step: Step, digest: str | None = None, rounded: Storage | None = None
    ) -> PlannedDiff:
        reason = FORMATS[self.container].why_unsupported(step.spec)
        if reason is not None:
            raise container_error(self.container, reason)
        return PlannedDiff(change, step, digest, rounded)


def _replaced(tensor: Tensor) -> Change:
    return Change("replace", tensor.dtype)


def _over_rows(storage: Storage, base: tuple[int, ...], tuned: tuple[int, ...]) -> Storage:
    """Return the storage of an approximate difference if base and fine-tune have different numbers of rows.

    ``storage`` is the storage for equal shapes; ``base`` and ``tuned`` are the shapes.
    """
    if len(tuned) < 2:
        return EXACT
    return over_added_rows(storage, base[0]) if base[0] < tuned[0] else storage


def _differences(base: Tensor, tensor: Tensor) -> Iterator[tuple[int, Array]]:
    """Yield differences in chunks of the rows that exist in both tensors, each with the index of its first row."""
    shrinks = tensor.size < base.size
    for start, (smaller, larger) in leading_rows(tensor, base) if shrinks else leading_rows(base, tensor):
        yield start, difference(larger, smaller) if shrinks else difference(smaller, larger)


def container_error(container: str, reason: str) -> UnsupportedError:
    """Return the error ``delta.container`` for a tensor that a container cannot store."""
    return UnsupportedError(f"{container} cannot carry this: {reason}", rule="delta.container")


@dataclass(frozen=True, slots=True)
class PlannedDiffData:
    """``PlannedDiff`` as data for another process."""

    change: Change
    step: StepData
    digest: str | None


@preload
class DiffPlannerData(Struct, frozen=True, forbid_unknown_fields=True):
    """A ``DiffPlanner`` without statistics as data, so that workers can plan.

    A call has the parameters of ``DiffPlanner.plan``, and returns the planned step as data.
    """

    container: str
    strategy: str
    default: bool
    options: dict[str, Any]

    @classmethod
    def from_planner(cls, planner: DiffPlanner) -> DiffPlannerData:
        """Return ``planner`` as data for another process."""
        return cls(planner.container, planner.strategy, planner.is_default, to_json_value(planner.options))

    def __call__(self, pair: TensorPair, storage: Storage | None = None, count: int | None = None) -> PlannedDiffData:
        planner = DiffPlanner(self.container, self.strategy, self.default, from_json_value(self.options))
        planned = planner.plan(pair, storage, count)
        return PlannedDiffData(planned.change, msgspec.convert(step_data(planned.step), StepData), planned.digest)
