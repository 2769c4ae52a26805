"""Plan a conversion: the rule that applies to each tensor, the storage of the result, and its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, inf

from ingot.codecs.table import CODECS
from ingot.conversion.candidates import Candidate, pick
from ingot.conversion.encoding import (
    DENSE,
    EncodingInputs,
    Pruned,
    constants_that_stay,
    full_size,
    plan_encoding,
    plan_encoding_or_keep,
    unused_settings,
)
from ingot.conversion.like_stored import choice_like
from ingot.conversion.packed_encoding import in_encoding, plan_packed
from ingot.conversion.packed_layers import unify_merged_layers
from ingot.conversion.placement import KEEP, error_at_tensor, plan_exact, plan_unchanged, why_not_exact
from ingot.core.bytes.packed import PACKED
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.runtime.memory import gc_paused
from ingot.core.runtime.parallel import ordered
from ingot.engine.steps import DECODED, Encode, recode
from ingot.engine.work import Plan, Step
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import (
    RAW,
    Format,
    WriteOptions,
)
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.sparse import BlocksLayout
from ingot.model.tensor import Tensor
from ingot.naming.names import count_layers, role_of
from ingot.recipes.choice import SMALLEST, Choice, Measured
from ingot.recipes.recipe import Decision, Recipe, resolve
from ingot.views.regroup import even_group

_KEEP = Decision(None, KEEP, None)


@dataclass(frozen=True, kw_only=True)
class ConvertPlan(Plan):
    """The plan of a conversion: in addition to the steps, the recipe's name, warnings and notes.

    ``warnings`` concern options without effect. ``notes`` list layers that stay dense, or are not packed as the recipe
    requires, because the runtimes that read the format would otherwise refuse the result.
    """

    recipe: str = "keep"
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of a plan besides source and target format.

    ``workers`` is the number of threads (None: chosen automatically); ``measured`` requests the measurement of errors
    of tensors that are not exact.
    """

    recipe: Recipe | None = None
    allow_requantize: bool = False
    options: WriteOptions = field(default_factory=WriteOptions)
    workers: int | None = None
    measured: bool = True


def plan_conversion(source: Checkpoint, format: Format, request: PlanRequest) -> ConvertPlan:
    """Plan a step for every tensor of ``source`` and compute the size of the result.

    Reads headers. Tensor data are read only if a decision depends on them, for example samples to compare a rule's
    candidates, or zero points that decide whether repacking is exact.

    Raises
    ------
    UnsupportedError
        ``convert.unsupported``: the target cannot carry a tensor with its values.
    UsageError
        ``convert.requantize``: a lossy codec on a tensor that is already quantized, without ``allow_requantize``.
    """
    format = format.for_attachments(source.attachments)
    if request.options.compact:
        format = format.compacted()
    layer_count = layers_of(source)
    inputs = EncodingInputs(request.allow_requantize, dict(_prunings(source)), source.importance)
    with gc_paused():  # many small objects are created, and none of them is garbage
        # Without a recipe every tensor is kept; only the check of --importance needs decisions then.
        decided = source if request.recipe is not None else [name for name in source.importance if name in source]
        decisions = {name: decide(source, name, request.recipe, layer_count) for name in decided}
        general = request.recipe is not None and request.recipe.general
        one_group = format.traits.one_group or (general and format.traits.one_group_preferred)
        adjusted = _with_one_group(decisions, source, format) if one_group else decisions
        planned = [
            # Errors are measured against the tensor before views changed its values.
            _plan_tensor(source[name].origin or source[name], format, inputs, adjusted.get(name, _KEEP))
            for name in source
        ]
    unmeasured = [item for item in planned if isinstance(item, _Unmeasured)]
    measured = ordered(lambda item: item.step(format, inputs), unmeasured, request.workers if unmeasured else 0)
    with gc_paused():
        steps = [next(measured) if isinstance(item, _Unmeasured) else item for item in planned]
        steps, notes = _unify_layers(steps, format, request.recipe, decisions)
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
                *unused_settings(request.recipe, decisions, source.importance),
                *constants_that_stay(source, format, decisions),
            ],
            notes=notes,
        )
        _ = plan.size  # raises an error if the format cannot store these tensors together
    return plan


def _unify_layers(
    steps: list[Step], format: Format, recipe: Recipe | None, decisions: Mapping[str, Decision]
) -> tuple[list[Step], Sequence[str]]:
    """Return the steps that ``unify_merged_layers`` returns, and notes for the report."""
    layers = unify_merged_layers(steps, format, decisions, general=recipe is None or recipe.general)
    return list(layers.steps), layers.notes


def _prunings(source: Checkpoint) -> Iterator[tuple[str, Pruned]]:
    """Yield the name and pruned blocks of each tensor that its file or a view has pruned; only masks are read."""
    from ingot.codecs.sparse.blocks import stored_mask

    for name in source.tensor_map.names_where(
        lambda tensor: tensor.codec == BlocksLayout.codec and tensor.decoder is not None
    ):
        tensor = source[name]
        mask = stored_mask(tensor)  # raises an error for invalid parameters
        yield name, Pruned(int(tensor.params["axis"]), mask, stored=tensor.origin is None)


@dataclass(frozen=True, slots=True)
class _Unmeasured:
    """A tensor whose rule lists candidates that are not measured yet."""

    tensor: Tensor
    rule: str
    measured: Measured

    def step(self, format: Format, inputs: EncodingInputs) -> Step:
        """Measure the candidates and return the step for the best one."""
        try:
            return _plan_measured(self, format, inputs)
        except IngotError as error:
            raise error_at_tensor(error, self.tensor.name) from None


def layers_of(source: Checkpoint) -> int:
    """Return the number of layers, determined from the tensor names that recipes use."""
    return count_layers([source.aliases.get(name, name) for name in source])


def decide(
    source: Checkpoint, name: str, recipe: Recipe | None, layer_count: int, *, transposed: bool = False
) -> Decision:
    """Return a recipe's decision on a tensor, whose rules see the tensor's alias if it has one, else its name.

    If ``transposed`` is true, the decision is for the transpose of the matrix.
    """
    if recipe is None:
        return _KEEP
    tensor = source[name]
    shape = tensor.shape[::-1] if transposed else tensor.shape
    alias = source.aliases.get(name, name)
    decision = resolve(recipe, alias, shape, tensor.dtype, layer_count)
    if alias == name or role_of(alias) == "other" or role_of(alias) != role_of(name):
        return decision
    # A view renamed the tensor; rules for the target's names apply too, such as MLX's "*.weight" for stacks of experts.
    renamed = resolve(recipe, name, shape, tensor.dtype, layer_count)
    return min(decision, renamed, key=lambda item: inf if item.rule_index is None else item.rule_index)


def _plan_tensor(tensor: Tensor, format: Format, inputs: EncodingInputs, decision: Decision) -> Step | _Unmeasured:
    """Return the step of a tensor, or an object with which the candidates of its rule are measured later.

    Errors name the tensor.
    """
    try:
        return _plan_decision(tensor, format, inputs, decision)
    except IngotError as error:
        raise error_at_tensor(error, tensor.name) from None


def _plan_decision(tensor: Tensor, format: Format, inputs: EncodingInputs, decision: Decision) -> Step | _Unmeasured:
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    rule = decision.rule_label
    choice = decision.choice
    if choice is None and tensor.stored_like is not None:
        choice = choice_like(tensor.stored_like)
        rule = f"{rule} (merged, stored as {choice})"
    if choice is not None and _is_exempt(tensor, format):
        return plan_unchanged(tensor, format, f"{rule} (kept: {format.name} has it in {tensor.dtype})")
    reason = format.why_constant(tensor.name) if choice is not None else None
    if reason is not None:
        return plan_unchanged(tensor, format, f"{rule} (kept: {reason})")
    if isinstance(choice, Measured):
        return _Unmeasured(tensor, rule, choice)
    if choice is not None and choice.quantizer is not None:
        if tensor.codec == DenseLayout.codec:
            raise UnsupportedError(
                f"rule {rule!r} has a quantizer, which rounds matrices by their names in the source, but it hits this "
                "tensor only by its name in the result; match both names, or neither",
                rule="quantizer.matrix",
            )
        return plan_rounded(tensor, format, rule, choice.encoding)  # the view of rounding_view has already rounded it
    pruning = inputs.prune.get(tensor.name)
    resized = pruning is not None and full_size(format) and plan_exact(tensor, format, rule) is None
    if choice is None and (pruning is None or pruning.stored) and not resized:
        return plan_unchanged(tensor, format, rule)
    return plan_encoding_or_keep(tensor, format, rule, choice or DENSE, inputs)


def plan_rounded(tensor: Tensor, format: Format, rule: str, encoding: str = RAW) -> Step:
    """Return the step that stores a rounded matrix.

    Raises ``UnsupportedError`` ``convert.unsupported`` if the format lacks the ``encoding`` of the rule, or if a format
    of packed layers could store only the values in 16 bits.
    """
    if encoding != RAW:
        spec = in_encoding(tensor.spec(), encoding)
        reason = format.why_unsupported(spec)
        if reason is None:
            return recode(tensor, spec, f"{rule} ({encoding})")
        raise UnsupportedError(
            f"{format.name} cannot store the result of rule {rule!r}: {reason}. Convert to .zt first, and the result "
            f"to {format.name}: it gets the same codes without this encoding",
            rule="convert.unsupported",
        )
    step = plan_unchanged(tensor, format, rule)
    if step.action == DECODED and (format.traits.packed_codecs or format.traits.f16_scales):
        raise UnsupportedError(
            f"{format.name} cannot store the {tensor.codec} tensors of rule {rule!r}: {why_not_exact(tensor, format)}. "
            "`ingot recipes` lists the programs that run each preset; to store the values in 16 bits, convert to .zt "
            f"first, and the result to {format.name}",
            rule="convert.unsupported",
        )
    return step


def _with_one_group(decisions: Mapping[str, Decision], source: Checkpoint, format: Format) -> Mapping[str, Decision]:
    """Return the decisions with one group size for all matrices.

    This is the greatest common divisor of the sizes. If the format does not support it, the decisions are unchanged.
    """
    sizes = format.traits.group_sizes or ()
    groups = {name: group for name, item in decisions.items() if (group := _new_group(item, source[name], sizes))}
    common = gcd(*groups.values()) if groups else 0
    if len(set(groups.values())) < 2 or common not in sizes:
        return decisions
    return {**decisions, **{name: _with_group(decisions[name], common, format) for name in groups}}


def _new_group(decision: Decision, tensor: Tensor, sizes: Sequence[int]) -> int | None:
    """Return the group size in columns with which an encoder would store a tensor; None if there are no groups."""
    choice = decision.choice
    if not isinstance(choice, Choice) or choice.codec != AffineLayout.codec or choice.quantizer is not None:
        return None
    group = choice.options.get("group")
    cols = tensor.matrix_shape[1]
    if not isinstance(group, int) or not group:
        return None
    return even_group(group, cols, sizes) if cols % group else group


def _with_group(decision: Decision, group: int, format: Format) -> Decision:
    choice = decision.choice
    assert isinstance(choice, Choice)
    if choice.options["group"] == group:
        return decision
    label = f"{decision.rule_label} (groups of {group}: {format.name} has groups of one size)"
    return replace(decision, rule_label=label, choice=replace(choice, options={**choice.options, "group": group}))


def _is_exempt(tensor: Tensor, format: Format) -> bool:
    """Return whether no rule applies to a dense tensor, because the format requires its dtype."""
    return tensor.codec == DenseLayout.codec and tensor.dtype == format.required_dtype(tensor.name, tensor.shape)


def _plan_measured(item: _Unmeasured, format: Format, inputs: EncodingInputs) -> Step:
    """Return the step for the best candidate; the tensor is kept unchanged if no candidate is possible."""
    tensor = item.tensor
    rule = item.rule
    measured = item.measured
    if measured.packed and (packed_step := plan_packed(tensor, format, rule)) is not None:
        return packed_step
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        return plan_encoding_or_keep(tensor, format, rule, measured.candidates[0], inputs)
    options: list[tuple[Choice | None, Step]] = []
    for choice in measured.candidates:
        is_dense = choice.codec == DenseLayout.codec
        if is_dense and choice.encoding == PACKED and DTYPES[tensor.dtype].is_float:
            continue  # codecs of floats are smaller, and the trial takes memory
        try:
            options.append((choice, plan_encoding(tensor, format, rule, choice, inputs)))
        except UnsupportedError:
            continue
    pruning = inputs.prune.get(tensor.name)
    may_stay = pruning is None or pruning.stored
    if may_stay and measured.pick == SMALLEST and (exact_step := plan_exact(tensor, format, rule)) is not None:
        options.append((None, exact_step))
    share = 1 - pruning.blocks.sparsity if pruning is not None else 1.0
    candidates = [Candidate(choice, step.spec, _keeps_weights(step), share) for choice, step in options]
    picked = pick(tensor, measured, candidates)
    if picked.index is None:
        reason = picked.reason or "no candidate applies"
        if may_stay:
            return plan_unchanged(tensor, format, f"{rule} (kept: {reason})")
        return plan_encoding_or_keep(tensor, format, f"{rule} ({reason})", DENSE, inputs)
    step = options[picked.index][1]
    label = f"{step.rule} ({picked.reason})"
    return replace(step, rule=label)


def _keeps_weights(step: Step) -> bool:
    return not isinstance(step, Encode) or step.keeps_weights
