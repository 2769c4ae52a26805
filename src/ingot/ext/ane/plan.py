"""Plan how a Neural Engine treats every weight of a checkpoint; only headers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ingot.artifacts.open import open as open_checkpoint
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.options import takes
from ingot.errors import UsageError
from ingot.ext.ane.assume import Assumptions, parse_assumptions
from ingot.ext.ane.chips.candidates import Better, nearest_better, outcomes
from ingot.ext.ane.chips.chips import EVIDENCE, Chip, Contradiction, contradictions, load_chip
from ingot.ext.ane.chips.cost import Budget, Time, budget, moved_bytes, predict, tables_fit
from ingot.ext.ane.chips.descriptor import KernelKind, kernel_word, streams
from ingot.ext.ane.chips.gates import Conditions, Decision, decide
from ingot.ext.ane.chips.storage_form import BLOCKWISE, FOREIGN, INTEGER, PALETTE, SPARSE, StorageForm, form_of
from ingot.ext.ane.chips.winograd import winograd
from ingot.ext.ane.kernel_units.pack import channels_per_group
from ingot.ext.ane.options import PlanOptions
from ingot.model.account import describe_unread
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import delta_of
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Tensor
from ingot.naming.names import role_of
from ingot.reporting.report import Bytes, Counts, Figure, Line, Report, Texts, table_of
from ingot.reporting.reportable import Reportable

KERNEL = "kernel"
GATHER = "gather"
VECTOR = "vector"
OTHER = "other"


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The plan of a weight on a chip.

    ``use`` is ``kernel`` (a matrix or convolution), ``gather`` (an embedding, whose rows are looked up), ``vector``
    (norms and biases, which are stored with kernels) or ``other`` (no weight). The fields after ``form`` are set only
    for kernels. ``moved`` is the number of bytes that move per dispatch, and ``tables`` the number of bytes of the
    codebooks. ``tables_fit`` states whether the tables fit into the chip's budget; None if the budget is not published.
    ``time`` is in milliseconds. ``word`` is the value of the KernelCfg register for the moved weight, and ``streams``
    the names of additional coefficient streams. ``winograd`` is the reason why a convolution cannot use Winograd; empty
    if it can, None for other weights.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    use: str
    stored: int
    form: str
    decision: Decision | None = None
    moved: int = 0
    dense: int = 0
    time: Time | None = None
    room: Budget | None = None
    tables: int = 0
    tables_fit: bool | None = None
    word: int | None = None
    streams: tuple[str, ...] = ()
    better: Better | None = None
    winograd: str | None = None


@dataclass(frozen=True, slots=True)
class ChipPlan:
    """The plan of all weights on a chip, and the decisions of the chip for all candidate storage forms.

    ``unknown`` are cells of the chip that are not published. ``contradictions`` are the contradictions of sources on
    which decisions depend.
    """

    chip: str
    target: str
    product: str
    weights: tuple[WeightPlan, ...]
    forms: Mapping[str, Decision]
    unknown: tuple[str, ...]
    contradictions: tuple[Contradiction, ...]

    @property
    def kernels(self) -> tuple[WeightPlan, ...]:
        return tuple(weight for weight in self.weights if weight.use == KERNEL)

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of kernels by outcome."""
        counts: dict[str, int] = {}
        for weight in self.kernels:
            if weight.decision is not None:
                counts[weight.decision.outcome] = counts.get(weight.decision.outcome, 0) + 1
        return counts

    @property
    def totals(self) -> dict[str, int]:
        """The number of bytes of all kernels: stored, moved, and as dense fp16."""
        kernels = self.kernels
        return {
            "stored": sum(weight.stored for weight in kernels),
            "moved": sum(weight.moved for weight in kernels),
            "dense": sum(weight.dense for weight in kernels),
        }

    @property
    def time(self) -> Time | None:
        """Milliseconds of a pass over all kernels in one dispatch, at batch 1; None if no bandwidth is published."""
        times = [weight.time for weight in self.kernels if weight.time is not None]
        if not times:
            return None
        worst = max(times, key=lambda time: EVIDENCE.index(time.evidence))
        return Time(sum(time.share for time in times), times[0].floor, worst.evidence, worst.source)


@dataclass(frozen=True, slots=True)
class ChipSum:
    """The totals of all kernels on a chip.

    ``outcomes`` has the number of kernels by outcome. ``stored``, ``moved`` and ``dense`` are the numbers of bytes in
    the file, moved per pass, and as dense fp16. ``milliseconds`` is the time of a pass; None if no bandwidth is
    published.
    """

    chip: str
    product: str
    outcomes: Counts
    stored: Bytes
    moved: Bytes
    dense: Bytes
    milliseconds: float | None


CHIP_SUM_HEADS = {
    "chip": "chip",
    "product": "product",
    "outcomes": "outcomes",
    "stored": "stored",
    "moved": "moved",
    "dense": "dense",
    "milliseconds": "ms",
}
"""Headings of a table of ``ChipSum``."""


@dataclass(frozen=True, slots=True)
class Plan(Reportable):
    """The result of ``ingot.plan``; ``notes`` name unreadable tensors, which no figure includes."""

    path: str
    format: str
    chips: tuple[ChipPlan, ...] = field(default=())
    notes: Texts = ()

    def __getitem__(self, chip: str) -> ChipPlan:
        for plan in self.chips:
            if plan.chip == load_chip(chip).name:
                return plan
        raise KeyError(chip)

    @property
    def sums(self) -> Sequence[ChipSum]:
        """The totals of each chip, in the order of the chips."""
        return [
            ChipSum(
                item.chip,
                item.product,
                item.outcomes,
                **item.totals,
                milliseconds=None if item.time is None else item.time.alone,
            )
            for item in self.chips
        ]

    def report(self) -> Report:
        """Return a report with a line per chip."""
        table = table_of("chips", self.sums, ChipSum, CHIP_SUM_HEADS)
        return Report([Figure("notes", self.notes, "texts")], [Line("note: {item}", items="notes")], [table])


@takes(PlanOptions, "plan")
def plan(options: PlanOptions) -> Plan:
    """Return how chips treat every weight; this reads headers, no weights.

    ``chip`` is ``"m1"``, ``"m1,m4"`` or ``["a17-pro"]``; ``ingot.ext.ane.chips.chips.chip_names`` lists them. Each text
    of ``assume`` replaces a value of the data files. ``bandwidth=60`` replaces a cell, ``int8=streams`` an outcome, and
    ``stride=2`` a condition of layers. ``m5.int8=streams`` applies to one chip only, and ``*conv1*:stride=2`` only to
    tensors whose names match the pattern.

    Raises
    ------
    UsageError
        ``ane.chip``, ``ane.assume``, ``ane.delta``, and the errors of ``ingot.open``.

    Examples
    --------
    >>> ingot.plan("model", "m1").chips[0].outcomes
    {'dense': 29}
    """
    chips = load_chips(options.chip)
    assumptions = parse_assumptions(options.assume, [item.name for item in chips])
    with open_checkpoint(options.path) as checkpoint:
        return plan_checkpoint(checkpoint, chips, assumptions)


def load_chips(chip: str | Sequence[str]) -> list[Chip]:
    """Return the chips of ``"m1,m4"`` or of a sequence of names, without duplicates."""
    names = chip.split(",") if isinstance(chip, str) else list(chip)
    loaded = {item.name: item for item in map(load_chip, names)}
    if not loaded:
        raise UsageError("expected the name of at least one chip", rule="ane.chip")
    return list(loaded.values())


def plan_checkpoint(checkpoint: Checkpoint, chips: Sequence[Chip], assumptions: Assumptions) -> Plan:
    """Return the plan of an open checkpoint. Raises ``UsageError`` ``ane.delta``."""
    if delta_of(checkpoint.metadata, checkpoint.location) is not None:
        raise UsageError(
            "expected a checkpoint, found a delta; patch its base first", rule="ane.delta", where=checkpoint.location
        )
    return Plan(
        checkpoint.location,
        checkpoint.format,
        tuple(_on_chip(checkpoint, assumptions.apply(chip), assumptions) for chip in chips),
        [describe_unread(checkpoint.unread)] if checkpoint.unread else [],
    )


def _on_chip(checkpoint: Checkpoint, chip: Chip, assumptions: Assumptions) -> ChipPlan:
    decisions_by_conditions: dict[Conditions, dict[str, Decision]] = {}
    equal: dict[tuple[object, ...], WeightPlan] = {}
    weights = []
    for name in checkpoint:
        tensor = checkpoint[name]
        conditions = assumptions.conditions(name)
        if conditions not in decisions_by_conditions:
            decisions_by_conditions[conditions] = outcomes(chip, conditions)
        storage_form = form_of_tensor(tensor)
        key = (tensor.codec, storage_form, use_of(tensor, storage_form), tensor.shape, conditions)
        if key not in equal:
            equal[key] = plan_tensor(tensor, chip, conditions, decisions_by_conditions[conditions])
        weights.append(replace(equal[key], name=name, stored=tensor.nbytes))
    ordinary = Conditions()
    decisions_by_form = decisions_by_conditions.get(ordinary) or outcomes(chip, ordinary)
    decisions = [*(weight.decision for weight in weights), *decisions_by_form.values()]
    keys = dict.fromkeys(key for decision in decisions if decision is not None for key in decision.contradictions)
    unknown = tuple(key for key in ("bandwidth", "palette_lut_budget") if chip.published(key) is None)
    all_contradictions = contradictions()
    return ChipPlan(
        chip.name,
        chip.target,
        chip.product,
        tuple(weights),
        decisions_by_form,
        unknown,
        tuple(all_contradictions[key] for key in keys),
    )


def plan_tensor(tensor: Tensor, chip: Chip, conditions: Conditions, decisions: dict[str, Decision]) -> WeightPlan:
    """Return the plan of a tensor on a chip.

    ``decisions`` is the result of ``candidates.outcomes`` for the chip and these conditions.
    """
    storage_form = form_of_tensor(tensor)
    use = use_of(tensor, storage_form)
    if use != KERNEL:
        return WeightPlan(tensor.name, tensor.shape, tensor.codec, use, tensor.nbytes, storage_form.label)
    decision = decide(storage_form, chip, conditions)
    moved = moved_bytes(storage_form, decision)
    return WeightPlan(
        name=tensor.name,
        shape=tensor.shape,
        codec=tensor.codec,
        use=use,
        stored=tensor.nbytes,
        form=storage_form.label,
        decision=decision,
        moved=moved,
        dense=storage_form.dense_bytes,
        time=predict(storage_form, decision, chip, conditions),
        room=budget(storage_form, decision, chip),
        tables=storage_form.table_bytes,
        tables_fit=tables_fit(storage_form, chip) if chip.published("palette_lut_budget") is not None else None,
        word=_word(storage_form, decision, chip),
        streams=tuple(streams()[section].name for section in _sections(storage_form, decision)),
        better=None if decision.streams else nearest_better(storage_form, moved, tensor.shape[0], decisions),
        winograd=_winograd(storage_form, tensor.shape, chip, conditions),
    )


def _kernel_kind(storage_form: StorageForm, decision: Decision) -> KernelKind:
    """Return the fields of the KernelCfg register that follow from a weight and its decision.

    A weight that folds is fp16.
    """
    inner = storage_form if storage_form.inner is None else storage_form.inner
    if not decision.streams:
        return KernelKind()
    sparse = storage_form.category == SPARSE
    zero_point = inner.zero_point
    if inner.category == PALETTE:
        return KernelKind(inner.entry, decision.stored_bits or inner.bits, sparse, zero_point, inner.vector)
    integers = inner.category in (INTEGER, BLOCKWISE)
    return KernelKind("int8" if integers else inner.entry, None, sparse, zero_point)


def _word(storage_form: StorageForm, decision: Decision, chip: Chip) -> int | None:
    if decision.outcome == "refused":
        return None
    return kernel_word(_kernel_kind(storage_form, decision), chip.target, chip.value("detect_zeros"))


def _sections(storage_form: StorageForm, decision: Decision) -> list[str]:
    inner = storage_form if storage_form.inner is None else storage_form.inner
    if not decision.streams:
        return []
    return [name for name, there in (("scale", storage_form.scales > 0), ("pal", inner.category == PALETTE)) if there]


def form_of_tensor(tensor: Tensor) -> StorageForm:
    """Return the storage form of a tensor."""
    parts = {role: part.type or part.dtype for role, part in tensor.parts.items()}
    return form_of(tensor.codec, tensor.shape, tensor.dtype, tensor.params, parts)


def use_of(tensor: Tensor, storage_form: StorageForm) -> str:
    """Return the engine's use of a tensor, from its name, rank and element type."""
    dtype = DTYPES.get(tensor.dtype)
    if (
        storage_form.category == FOREIGN
        and tensor.codec == DenseLayout.codec
        and not (dtype is not None and dtype.is_float)
    ):
        return OTHER
    if len(tensor.shape) < 2 or prod(tensor.shape[1:]) == 1:
        return VECTOR
    role = role_of(tensor.name)
    return GATHER if role == "embedding" else VECTOR if role in ("norm", "bias") else KERNEL


def _winograd(storage_form: StorageForm, shape: tuple[int, ...], chip: Chip, conditions: Conditions) -> str | None:
    if len(shape) != 4 or shape[2:] == (1, 1):
        return None
    ocg = channels_per_group(shape, chip)
    return winograd(storage_form, (shape[2], shape[3]), chip, conditions, ocg=ocg).reason
