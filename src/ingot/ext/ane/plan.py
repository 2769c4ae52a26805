"""Plan: what becomes of every weight of a checkpoint on a Neural Engine, from headers alone."""

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
from ingot.ext.ane.chips.form import BLOCKWISE, FOREIGN, INTEGER, PALETTE, SPARSE, Form, form_of
from ingot.ext.ane.chips.gates import Conditions, Decision, decide
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
from ingot.reporting.shown import Shown

KERNEL, GATHER, VECTOR, OTHER = "kernel", "gather", "vector", "other"


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One weight on one chip.

    ``use``: ``kernel`` (a matrix or convolution), ``gather`` (an embedding, looked up and not multiplied), ``vector``
    (norms and biases: they travel beside kernels), ``other`` (no weight). Only kernels have the fields that follow
    ``form``. ``moved`` are bytes per dispatch, ``tables`` those of codebooks, ``tables_fit`` whether they are within
    the chip's budget (None: it is not published); ``time`` has milliseconds; ``word`` is the KernelCfg register of the
    form in which the weight moves, ``streams`` the coefficient streams beside it; ``winograd`` says of convolutions
    why not, or is empty.
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
    """All weights on one chip, and what becomes there of the forms that a weight could have."""

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
        """Number of kernels by outcome."""
        counts: dict[str, int] = {}
        for weight in self.kernels:
            if weight.decision is not None:
                counts[weight.decision.outcome] = counts.get(weight.decision.outcome, 0) + 1
        return counts

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of all kernels: stored, moved, and as dense fp16."""
        kernels = self.kernels
        return {
            "stored": sum(weight.stored for weight in kernels),
            "moved": sum(weight.moved for weight in kernels),
            "dense": sum(weight.dense for weight in kernels),
        }

    @property
    def time(self) -> Time | None:
        """Milliseconds of one pass over all kernels in one dispatch, at batch 1; None where no bandwidth is known."""
        times = [weight.time for weight in self.kernels if weight.time is not None]
        if not times:
            return None
        worst = max(times, key=lambda time: EVIDENCE.index(time.evidence))
        return Time(sum(time.share for time in times), times[0].floor, worst.evidence, worst.source)


@dataclass(frozen=True, slots=True)
class ChipSum:
    """All kernels on one chip in a line: how many by outcome, bytes as stored, moved per pass and as dense fp16, and
    the milliseconds of a pass, where a bandwidth is known."""

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
class Plan(Shown):
    """What ``ingot.plan`` returns; ``notes`` say which tensors could not be read and are in no figure."""

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
        """Each chip in a line."""
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
        """Return the sums."""
        table = table_of("chips", self.sums, ChipSum, CHIP_SUM_HEADS)
        return Report([Figure("notes", self.notes, "texts")], [Line("note: {item}", each="notes")], [table])


@takes(PlanOptions, "plan")
def plan(options: PlanOptions) -> Plan:
    """Say what becomes of every weight on one or several chips; reads headers, no weights.

    ``chip`` is ``"m1"``, ``"m1,m4"`` or ``["a17-pro"]``: see ``ingot.ext.ane.chips.chips.chip_names``. Each text of
    ``assume`` replaces what the data files say: a cell or the outcome of a form, ``bandwidth=60``, ``int8=streams``, of
    one chip with ``m5.int8=streams``; or a condition, ``stride=2``, of some tensors with ``*conv1*:stride=2``.

    Raises
    ------
    UsageError
        ``ane.chip``, ``ane.assume``, ``ane.delta``, and those of ``ingot.open``.
    """
    chips = load_chips(options.chip)
    assumptions = parse_assumptions(options.assume, [item.name for item in chips])
    with open_checkpoint(options.path) as checkpoint:
        return plan_checkpoint(checkpoint, chips, assumptions)


def load_chips(chip: str | Sequence[str]) -> list[Chip]:
    """Return the chips of ``"m1,m4"`` or of a sequence of names, each once."""
    names = chip.split(",") if isinstance(chip, str) else list(chip)
    loaded = {item.name: item for item in map(load_chip, names)}
    if not loaded:
        raise UsageError("expected at least one chip, found none", rule="ane.chip")
    return list(loaded.values())


def plan_checkpoint(checkpoint: Checkpoint, chips: Sequence[Chip], assumptions: Assumptions) -> Plan:
    """Plan an open checkpoint; raises ``UsageError`` ``ane.delta``."""
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
    known: dict[Conditions, dict[str, Decision]] = {}
    equal: dict[tuple[object, ...], WeightPlan] = {}
    weights = []
    for name in checkpoint:
        tensor = checkpoint[name]
        conditions = assumptions.conditions(name)
        if conditions not in known:
            known[conditions] = outcomes(chip, conditions)
        form = form_of_tensor(tensor)
        key = (tensor.codec, form, use_of(tensor, form), tensor.shape, conditions)
        if key not in equal:
            equal[key] = plan_tensor(tensor, chip, conditions, known[conditions])
        weights.append(replace(equal[key], name=name, stored=tensor.nbytes))
    ordinary = Conditions()
    forms = known.get(ordinary) or outcomes(chip, ordinary)
    decisions = [*(weight.decision for weight in weights), *forms.values()]
    keys = dict.fromkeys(key for decision in decisions if decision is not None for key in decision.contradictions)
    unknown = tuple(key for key in ("bandwidth", "palette_lut_budget") if chip.known(key) is None)
    told = contradictions()
    return ChipPlan(
        chip.name, chip.target, chip.product, tuple(weights), forms, unknown, tuple(told[key] for key in keys)
    )


def plan_tensor(tensor: Tensor, chip: Chip, conditions: Conditions, known: dict[str, Decision]) -> WeightPlan:
    """Plan one tensor on one chip; ``known`` is ``candidates.outcomes`` of the chip under these conditions."""
    form = form_of_tensor(tensor)
    use = use_of(tensor, form)
    if use != KERNEL:
        return WeightPlan(tensor.name, tensor.shape, tensor.codec, use, tensor.nbytes, form.label)
    decision = decide(form, chip, conditions)
    moved = moved_bytes(form, decision)
    return WeightPlan(
        name=tensor.name,
        shape=tensor.shape,
        codec=tensor.codec,
        use=use,
        stored=tensor.nbytes,
        form=form.label,
        decision=decision,
        moved=moved,
        dense=form.dense_bytes,
        time=predict(form, decision, chip, conditions),
        room=budget(form, decision, chip),
        tables=form.table_bytes,
        tables_fit=tables_fit(form, chip) if chip.known("palette_lut_budget") is not None else None,
        word=_word(form, decision, chip),
        streams=tuple(streams()[section].name for section in _sections(form, decision)),
        better=None if decision.streams else nearest_better(form, moved, tensor.shape[0], known),
        winograd=_winograd(form, tensor.shape, chip, conditions),
    )


def _kind(form: Form, decision: Decision) -> KernelKind:
    """Return what the register tells of a weight: what folds is fp16."""
    inner = form if form.inner is None else form.inner
    if not decision.streams:
        return KernelKind()
    sparse, zero_point = form.kind == SPARSE, inner.zero_point
    if inner.kind == PALETTE:
        return KernelKind(inner.entry, decision.stored_bits or inner.bits, sparse, zero_point, inner.vector)
    integers = inner.kind in (INTEGER, BLOCKWISE)
    return KernelKind("int8" if integers else inner.entry, None, sparse, zero_point)


def _word(form: Form, decision: Decision, chip: Chip) -> int | None:
    if decision.outcome == "refused":
        return None
    return kernel_word(_kind(form, decision), chip.target, chip.value("detect_zeros"))


def _sections(form: Form, decision: Decision) -> list[str]:
    inner = form if form.inner is None else form.inner
    if not decision.streams:
        return []
    return [name for name, there in (("scale", form.scales > 0), ("pal", inner.kind == PALETTE)) if there]


def form_of_tensor(tensor: Tensor) -> Form:
    """Return the form of a stored tensor."""
    parts = {role: part.type or part.dtype for role, part in tensor.parts.items()}
    return form_of(tensor.codec, tensor.shape, tensor.dtype, tensor.params, parts)


def use_of(tensor: Tensor, form: Form) -> str:
    """Return what the engine does with a tensor, told from its name, rank and element type."""
    known = DTYPES.get(tensor.dtype)
    if form.kind == FOREIGN and tensor.codec == DenseLayout.codec and not (known is not None and known.is_float):
        return OTHER
    if len(tensor.shape) < 2 or prod(tensor.shape[1:]) == 1:
        return VECTOR
    role = role_of(tensor.name)
    return GATHER if role == "embedding" else VECTOR if role in ("norm", "bias") else KERNEL


def _winograd(form: Form, shape: tuple[int, ...], chip: Chip, conditions: Conditions) -> str | None:
    if len(shape) != 4 or shape[2:] == (1, 1):
        return None
    ocg = channels_per_group(shape, chip)
    return winograd(form, (shape[2], shape[3]), chip, conditions, ocg=ocg).reason
