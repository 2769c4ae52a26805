"""Planning a conversion: which rule hits which tensor, what will be stored, how large the result is.

Headers alone decide, except where a rule lists candidates, which are measured on samples, where zero points would have
to be shifted, which are read, and where a codec's scales might not reach down to small values: of these tensors the
beginning is read, as far as it must be to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ingot.codecs.table import CODECS
from ingot.conversion.candidates import Candidate, pick
from ingot.conversion.encoding import (
    DENSE,
    Asked,
    Pruned,
    as_chosen,
    constants_that_stay,
    encode,
    full_size,
    without_effect,
)
from ingot.conversion.packed_layers import settle
from ingot.conversion.placement import KEEP, as_stored, keep, located
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.parallel import ordered
from ingot.engine.steps import Encode
from ingot.engine.work import Plan, Step
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import (
    Format,
    WriteOptions,
)
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.tensor import Tensor
from ingot.naming.names import count_layers
from ingot.recipes.choice import SMALLEST, Choice, Measured
from ingot.recipes.recipe import Decision, Recipe, resolve

_KEEP = Decision(None, KEEP, None)


@dataclass(frozen=True, kw_only=True)
class ConvertPlan(Plan):
    """The plan of a conversion: the recipe's name, and ``warnings`` that say what was asked for and has no effect.

    ``notes`` say which layers stay dense, or are packed otherwise than asked for, because of the format's programs.
    """

    recipe: str = "keep"
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked of a plan, beside source and target format.

    ``workers`` are threads, as many as pay by default; ``measured`` tells whether the error of what is not exact is to
    be measured.
    """

    recipe: Recipe | None = None
    allow_requantize: bool = False
    options: WriteOptions = field(default_factory=WriteOptions)
    workers: int | None = None
    measured: bool = True


def plan_conversion(source: Checkpoint, format: Format, request: PlanRequest) -> ConvertPlan:
    """Decide for every tensor of ``source`` and compute the exact size.

    Reads no tensor bytes but samples of tensors whose rule lists candidates, zero points where they decide whether a
    tensor can be repacked, and the first values of what is quantized.

    Raises
    ------
    UnsupportedError
        The target cannot carry a tensor in any way that keeps its values.
    UsageError
        A lossy codec on tensors that are already quantized, without ``allow_requantize``.
    """
    format = format.for_attachments(source.attachments)
    if request.options.compact:
        format = format.compacted()
    layer_count = layers_of(source)
    asked = Asked(request.allow_requantize, dict(_prunings(source)), source.importance)
    with gc_paused():  # many small objects, none of them garbage
        # Without a recipe all are kept; those are asked for that something else goes by.
        every = source if request.recipe is not None else [name for name in source.importance if name in source]
        decisions = {name: decide(source, name, request.recipe, layer_count) for name in every}
        planned = [
            # Errors are measured against the tensor as it was before views changed its values.
            _step_or_where(source[name].origin or source[name], format, asked, decisions.get(name, _KEEP))
            for name in source
        ]
    open_steps = [item for item in planned if isinstance(item, _Open)]
    measured = ordered(lambda item: item.step(format, asked), open_steps, request.workers if open_steps else 0)
    with gc_paused():
        steps = [next(measured) if isinstance(item, _Open) else item for item in planned]
        steps, notes = _settled(steps, format, request.recipe, decisions)
        steps = [steps[index] for index in format.order([step.spec for step in steps])]
        plan = ConvertPlan(
            steps=steps,
            format=format,
            metadata=format.metadata(source.metadata),
            options=request.options,
            measured=request.measured,
            attachments=source.attachments,
            recipe=request.recipe.name if request.recipe else "keep",
            warnings=[
                *without_effect(request.recipe, decisions, source.importance),
                *constants_that_stay(source, format, decisions),
            ],
            notes=notes,
        )
        _ = plan.size  # refuses what the format cannot carry together
    return plan


def _settled(
    steps: list[Step], format: Format, recipe: Recipe | None, decisions: Mapping[str, Decision]
) -> tuple[list[Step], Sequence[str]]:
    """Return the steps as the programs take them that read a folder of packed layers, and notes for the report."""
    if not format.traits.packed_codecs:
        return steps, ()
    layers = settle(steps, format, decisions, general=recipe is None or recipe.general)
    return list(layers.steps), layers.notes


def _prunings(source: Checkpoint) -> Iterator[tuple[str, Pruned]]:
    """Yield what tensors lack, in their files already or by a view; reads masks alone."""
    from ingot.codecs.sparse.blocks import stored_mask

    for name in source.many.where(lambda tensor: tensor.codec == BlocksLayout.codec and tensor.decoder is not None):
        tensor = source[name]
        mask = stored_mask(tensor)  # checks the parameters
        yield name, Pruned(int(tensor.params["axis"]), mask, stored=tensor.origin is None)


@dataclass(frozen=True, slots=True)
class _Open:
    """A tensor whose rule lists candidates: to be measured."""

    tensor: Tensor
    rule: str
    measured: Measured

    def step(self, format: Format, asked: Asked) -> Step:
        try:
            return _measured_step(self, format, asked)
        except IngotError as error:
            raise located(error, self.tensor.name) from None


def layers_of(source: Checkpoint) -> int:
    """Return the number of layers, as names tell it that recipes go by."""
    return count_layers([source.aliases.get(name, name) for name in source])


def decide(source: Checkpoint, name: str, recipe: Recipe | None, layer_count: int, *, turned: bool = False) -> Decision:
    """Return what a recipe says of a tensor, by its name or what it is called where that tells nothing.

    ``turned``: of the matrix with its rows and columns in each other's place.
    """
    if recipe is None:
        return _KEEP
    tensor = source[name]
    shape = tensor.shape[::-1] if turned else tensor.shape
    return resolve(recipe, source.aliases.get(name, name), shape, tensor.dtype, layer_count)


def _step_or_where(tensor: Tensor, format: Format, asked: Asked, decision: Decision) -> Step | _Open:
    try:
        return _step(tensor, format, asked, decision)
    except IngotError as error:
        raise located(error, tensor.name) from None


def _step(tensor: Tensor, format: Format, asked: Asked, decision: Decision) -> Step | _Open:
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    rule = decision.rule_label
    choice = decision.choice
    if choice is not None and _is_exempt(tensor, format):
        return keep(tensor, format, f"{rule} (kept: {format.name} has it in {tensor.dtype})")
    reason = format.why_constant(tensor.name) if choice is not None else None
    if reason is not None:
        return keep(tensor, format, f"{rule} (kept: {reason})")
    if isinstance(choice, Measured):
        return _Open(tensor, rule, choice)
    is_encoded = choice is not None and tensor.source_bits and tensor.codec == choice.codec != DenseLayout.codec
    if choice is not None and (choice.quantizer is not None or is_encoded):
        if tensor.codec == DenseLayout.codec:
            raise UnsupportedError(
                f"rule {rule!r} asks for a quantizer, which rounds matrices under the names that they have in the "
                "source, and hits this one under its name in the result alone; name both, or no names",
                rule="quantizer.matrix",
            )
        return keep(tensor, format, rule)  # a view has rounded or encoded it (conversion.encode_first)
    pruning = asked.prune.get(tensor.name)
    resized = pruning is not None and full_size(format) and as_stored(tensor, format, rule) is None
    if choice is None and (pruning is None or pruning.stored) and not resized:
        return keep(tensor, format, rule)
    return encode(tensor, format, rule, choice or DENSE, asked)


def _is_exempt(tensor: Tensor, format: Format) -> bool:
    """Whether the programs that read the format take this tensor only as it is."""
    return tensor.codec == DenseLayout.codec and tensor.dtype == format.required_dtype(tensor.name, tensor.shape)


def _measured_step(item: _Open, format: Format, asked: Asked) -> Step:
    """Measure the candidates that the tensor and the target allow; keep the tensor where none is left."""
    tensor = item.tensor
    rule = item.rule
    measured = item.measured
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        return encode(tensor, format, rule, measured.candidates[0], asked)
    ways: list[tuple[Choice | None, Step]] = []
    for choice in measured.candidates:
        try:
            ways.append((choice, as_chosen(tensor, format, rule, choice, asked)))
        except UnsupportedError:
            continue
    pruning = asked.prune.get(tensor.name)
    may_stay = pruning is None or pruning.stored
    if may_stay and measured.pick == SMALLEST and (stays := as_stored(tensor, format, rule)) is not None:
        ways.append((None, stays))
    share = 1 - pruning.blocks.sparsity if pruning is not None else 1.0
    candidates = [Candidate(choice, step.spec, _keeps_weights(step), share) for choice, step in ways]
    picked = pick(tensor, measured, candidates)
    if picked.index is None and not may_stay:
        return encode(tensor, format, f"{rule} ({picked.reason or 'no candidate applies'})", DENSE, asked)
    if picked.index is None:
        return keep(tensor, format, f"{rule} (kept: {picked.reason or 'no candidate applies'})")
    step = ways[picked.index][1]
    label = f"{step.rule} ({picked.reason})"
    return replace(step, rule=label)


def _keeps_weights(step: Step) -> bool:
    return not isinstance(step, Encode) or step.keeps_weights
