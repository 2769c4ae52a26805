"""Planning a conversion: which rule hits which tensor, what will be stored, how large the result is.

Headers alone decide, except where a rule lists candidates, which are measured on samples, where zero points would have
to be shifted, which are read, and where a codec's scales might not reach down to small values: of these tensors the
beginning is read, as far as it must be to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.codecs.base import Encoder, repack
from ingot.codecs.dense.repack import holder_of
from ingot.codecs.reach import AUTO, named, reaching
from ingot.codecs.reach import RULE as UNDERFLOW
from ingot.codecs.table import CODECS
from ingot.core.blocks import Blocks
from ingot.core.dtypes import DTYPES
from ingot.core.gcpause import gc_paused
from ingot.core.names import count_layers
from ingot.core.parallel import ordered
from ingot.core.retype import HOLDERS
from ingot.engine.plan import Plan
from ingot.engine.specs import encoded_spec, same_storage
from ingot.engine.steps import DECODED, ENCODED, Encode, Move, Repack, recode
from ingot.engine.work import Step
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.formats.base import (
    RAW,
    ConfigKeys,
    Fitting,
    FixedScales,
    Format,
    FullSize,
    Packs,
    WriteOptions,
    accepts,
    as_laid,
    encoding_in,
    recoded,
)
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.base import RowsFirst
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.families import alternatives
from ingot.model.layouts.sparse import BlocksLayout, CsrLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.ops.convert.idle import weighs, without_effect
from ingot.ops.convert.measure import Candidate, first_values, pick
from ingot.recipes.choice import SMALLEST, Choice, Measured
from ingot.recipes.load import made_for
from ingot.recipes.recipe import Decision, Recipe, resolve

_KEEP = Decision(None, "keep", None)
_DENSE = Choice(DenseLayout.codec)


@dataclass(frozen=True, kw_only=True)
class ConvertPlan(Plan):
    """The plan of a conversion: the recipe's name, and ``warnings`` that say what was asked for and has no effect."""

    recipe: str = "keep"
    warnings: Sequence[str] = ()


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


@dataclass(frozen=True, slots=True)
class _Pruned:
    """What a tensor lacks: blocks along ``axis``; ``stored`` where its file lacks them already."""

    axis: int
    blocks: Blocks
    stored: bool

    def options(self) -> dict[str, object]:
        """Return the options of ``sparse_blocks`` that say so."""
        return {"axis": self.axis, "block": self.blocks.block, "mask": self.blocks.mask}

    def around(self, choice: Choice, format: Format) -> dict[str, object]:
        """Return the options of ``sparse_blocks`` around a choice: in full size where the format asks for that."""
        whole = {"whole": True} if _full_size(format) else {}
        return {**self.options(), "inner": choice.codec, "options": choice.options, **whole}


@dataclass(frozen=True, slots=True)
class _Asked:
    """What decides on a tensor beside its rule: what tensors lack, and what errors of their columns weigh."""

    allow_requantize: bool
    prune: Mapping[str, _Pruned]
    importance: Mapping[str, Array]


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
    if isinstance(format, Fitting):
        format = format.fit(source.attachments)
    if isinstance(format, FullSize) and request.options.compact:
        format = format.compacting()
    layer_count = layers_of(source)
    asked = _Asked(request.allow_requantize, dict(_prunings(source)), source.importance)
    with gc_paused():  # many small objects, none of them garbage
        decisions = {name: decide(source, name, request.recipe, layer_count) for name in source}
        # Errors are measured against what a tensor was before views changed its values.
        tensors = {name: source[name].origin or source[name] for name in source}
        planned = [_step_or_where(tensors[name], format, asked, decision) for name, decision in decisions.items()]
    open_steps = [item for item in planned if isinstance(item, _Open)]
    measured = ordered(lambda item: item.step(format, asked), open_steps, request.workers if open_steps else 0)
    with gc_paused():
        steps = [next(measured) if isinstance(item, _Open) else item for item in planned]
        steps = [steps[index] for index in format.order([step.spec for step in steps])]
        plan = ConvertPlan(
            steps=steps,
            format=format,
            metadata=format.metadata(source.metadata),
            options=request.options,
            measured=request.measured,
            attachments=source.attachments,
            recipe=request.recipe.name if request.recipe else "keep",
            warnings=without_effect(request.recipe, decisions, source.importance),
        )
        _ = plan.size  # refuses what the format cannot carry together
    return plan


def _prunings(source: Checkpoint) -> Iterator[tuple[str, _Pruned]]:
    """Yield what tensors lack, in their files already or by a view; reads masks alone."""
    from ingot.codecs.sparse.blocks import stored_mask

    for name, tensor in source.items():
        if tensor.codec == BlocksLayout.codec and tensor.decoder is not None:
            mask = stored_mask(tensor)  # checks the parameters
            yield name, _Pruned(int(tensor.params["axis"]), mask, stored=tensor.origin is None)


@dataclass(frozen=True, slots=True)
class _Open:
    """A tensor whose rule lists candidates: to be measured."""

    tensor: Tensor
    rule: str
    measured: Measured

    def step(self, format: Format, asked: _Asked) -> Step:
        try:
            return _measured_step(self, format, asked)
        except IngotError as error:
            raise _located(error, self.tensor.name) from None


def layers_of(source: Checkpoint) -> int:
    """Return the number of layers, as names tell it that recipes go by."""
    return count_layers([source.called.get(name, name) for name in source])


def decide(source: Checkpoint, name: str, recipe: Recipe | None, layer_count: int, *, turned: bool = False) -> Decision:
    """Return what a recipe says of a tensor, by its name or what it is called where that tells nothing.

    ``turned``: of the matrix with its rows and columns in each other's place.
    """
    if recipe is None:
        return _KEEP
    tensor = source[name]
    shape = tensor.shape[::-1] if turned else tensor.shape
    return resolve(recipe, source.called.get(name, name), shape, tensor.dtype, layer_count)


def _step_or_where(tensor: Tensor, format: Format, asked: _Asked, decision: Decision) -> Step | _Open:
    try:
        return _step(tensor, format, asked, decision)
    except IngotError as error:
        raise _located(error, tensor.name) from None


def _located(error: IngotError, name: str) -> IngotError:
    return error if error.where and name in error.where else error.at(name)


def _step(tensor: Tensor, format: Format, asked: _Asked, decision: Decision) -> Step | _Open:
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    rule, choice = decision.rule_label, decision.choice
    if isinstance(choice, Measured):
        return _Open(tensor, rule, choice)
    pruning = asked.prune.get(tensor.name)
    resized = pruning is not None and _full_size(format) and as_stored(tensor, format, rule) is None
    if choice is None and (pruning is None or pruning.stored) and not resized:
        return _keep(tensor, format, rule)
    return _encode(tensor, format, rule, choice or _DENSE, asked)


def _full_size(format: Format) -> bool:
    return isinstance(format, FullSize) and format.full_size


def _measured_step(item: _Open, format: Format, asked: _Asked) -> Step:
    """Measure the candidates that the tensor and the target allow; keep the tensor where none is left."""
    tensor, rule, measured = item.tensor, item.rule, item.measured
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        return _encode(tensor, format, rule, measured.candidates[0], asked)
    ways: list[tuple[Choice | None, Step]] = []
    for choice in measured.candidates:
        try:
            ways.append((choice, _as_chosen(tensor, format, rule, choice, asked)))
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
        return _encode(tensor, format, f"{rule} ({picked.reason or 'no candidate applies'})", _DENSE, asked)
    if picked.index is None:
        return _keep(tensor, format, f"{rule} (kept: {picked.reason or 'no candidate applies'})")
    step = ways[picked.index][1]
    label = f"{step.rule} ({picked.reason})"
    return replace(step, rule=label)


def _keeps_weights(step: Step) -> bool:
    return not isinstance(step, Encode) or step.keeps_weights


def _keep(tensor: Tensor, format: Format, rule: str) -> Step:
    stays = as_stored(tensor, format, rule)
    if stays is not None:
        return stays
    reason = format.refuses(tensor.spec())
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        raise UnsupportedError(f"{format.name} cannot carry this tensor: {reason}", rule="convert.unsupported")
    for dtype in (tensor.dtype, "f32") if tensor.dtype in HOLDERS else (tensor.dtype,):
        dense = _decoded(tensor, rule, dtype)
        reason = format.refuses(dense.spec)
        if reason is None:
            return dense
    raise UnsupportedError(f"{format.name} cannot carry this tensor: {reason}", rule="convert.unsupported")


def as_stored(tensor: Tensor, format: Format, rule: str) -> Step | None:
    """Return how the tensor keeps what is stored of it: moved, or repacked where the format wants another layout."""
    spec = tensor.spec()
    stays = Move(tensor, spec, rule=rule) if format.refuses(spec) is None else None
    foreign = isinstance(tensor.layout, RowsFirst) and not isinstance(format, ConfigKeys)
    ways = [] if stays is not None else [recode(tensor, wanted, rule) for wanted in recoded(format, spec)]
    for way in ways:
        if any(part.encoding != RAW for part in way.spec.parts):
            return way
    if tensor.codec not in CODECS or (stays is not None and not foreign):
        return stays or next(iter(ways), None)
    for layout, wanted in accepts(format, spec):
        found = repack(CODECS[tensor.codec], tensor, layout)
        if found.exact:
            told = f"{rule} (values equal in {tensor.dtype}, not in f32)" if found.rounded else rule
            return Repack(tensor, wanted, rule=told, repack=found)
    if tensor.codec == DenseLayout.codec:  # its values are its bytes
        return stays
    return stays or next(iter(ways), None)


def kept(tensor: Tensor, format: Format) -> Step:
    """Return how a tensor goes into a format without a recipe: moved, repacked or decoded.

    Raises
    ------
    CodecError
        By the codec's rules: parameters and parts do not fit together.
    UnsupportedError
        ``convert.unsupported``: the format cannot carry it.
    """
    return _step_or_where(tensor, format, _Asked(False, {}, {}), _KEEP)  # type: ignore[return-value] # of no choice


def obstacle(tensor: Tensor, format: Format) -> str:
    """Return why a tensor is neither moved nor repacked.

    Of the layouts that the format takes the nearest one's reason; else the format's reason against the nearest of a
    codec that it carries, or against the tensor as stored.
    """
    spec = tensor.spec()
    for layout, _ in accepts(format, spec) if tensor.codec in CODECS else ():
        found = repack(CODECS[tensor.codec], tensor, layout)
        if not found.exact:
            return found.why_not or ""
    carried = format.codecs if isinstance(format, Packs) else ()
    others = (as_laid(spec, layout) for layout in alternatives(tensor.layout, tensor))
    nearest = spec if spec.codec in carried else next((other for other in others if other.codec in carried), spec)
    return format.refuses(nearest) or ""


def _decoded(tensor: Tensor, rule: str, dtype: str) -> Step:
    options = {"dtype": dtype}
    encoder = CODECS[DenseLayout.codec].encoder(tensor.shape, tensor.dtype, options)
    spec = encoded_spec(tensor.name, tensor, encoder, "raw")
    return Encode(tensor, spec, DECODED, rule, encoder=encoder, options=options)


def _encode(tensor: Tensor, format: Format, rule: str, choice: Choice, asked: _Asked) -> Step:
    """Encode as a choice says; a tensor whose values are too small for it stays as it is: the label says so."""
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        return _keep(tensor, format, f"{rule} (kept: no decoder for {tensor.codec})")
    try:
        return _as_chosen(tensor, format, rule, choice, asked)
    except UnsupportedError as error:
        if error.rule != UNDERFLOW:
            raise
    rule = f"{rule} (kept: values too small)"
    pruning = asked.prune.get(tensor.name)
    if pruning is None or pruning.stored:
        return _keep(tensor, format, rule)
    return _as_chosen(tensor, format, rule, _DENSE, asked)


def _as_chosen(tensor: Tensor, format: Format, rule: str, choice: Choice, asked: _Asked) -> Step:
    pruning = asked.prune.get(tensor.name)
    codec, options = choice.codec, _options(tensor, choice, asked)
    keeps = CODECS.get_or_refuse(codec).encoder(tensor.shape, tensor.dtype, options).lossless
    exact, loses = keeps, False
    if pruning is not None:
        codec, options = BlocksLayout.codec, pruning.around(choice, format)
        loses, rule = _pruned(pruning, rule)
        exact = keeps and not loses

    def made(options: Mapping[str, Any]) -> Encoder:
        return CODECS[codec].encoder(tensor.shape, tensor.dtype, options)

    def specified(encoder: Encoder) -> TensorSpec:
        return encoded_spec(tensor.name, tensor, encoder, encoding_in(format, choice.encoding))

    encoder = made(options)
    spec = specified(encoder)
    reason = format.refuses(spec)
    if reason is not None and pruning is None:
        if choice.codec == tensor.codec == DenseLayout.codec and tensor.dtype == spec.dtype:
            return _keep(tensor, format, rule)
        others = _instead(choice, options, encoder, format)
        instead = next(filter(lambda other: format.refuses(specified(made(other))) is None, others), None)
        if instead is not None:
            options, encoder, reason = instead, made(instead), None
            spec = specified(encoder)
    if reason is None and not loses and (stays := _as_asked(tensor, spec, rule)) is not None:
        return stays
    if reason is not None:
        raise UnsupportedError(
            f"{format.name} cannot carry what rule {rule!r} asks for: {reason}{made_for(format.name, choice)}",
            rule="convert.unsupported",
        )
    encoder, more = reaching(
        encoder, made, options, first_values(tensor), lambda wide: format.refuses(specified(wide)) is None
    )
    if more:
        spec, rule = specified(encoder), f"{rule} ({named(more)}: small values)"
        if not loses and (stays := _as_asked(tensor, spec, rule)) is not None:
            return stays
    action = DECODED if not _stored_exactly(tensor) and exact else ENCODED
    if not keeps and codec != DenseLayout.codec:  # a narrower type rounds once more, as anybody who decodes it has to
        _refuse_requantizing(tensor, rule, asked)
    return Encode(tensor, spec, action, rule, exact, encoder=encoder, options={**options, **more}, keeps_weights=keeps)


def _as_asked(tensor: Tensor, spec: TensorSpec, rule: str) -> Step | None:
    """Return how a tensor's own numbers become what is asked for: moved, or repacked exactly; None if they do not."""
    if same_storage(tensor, spec):
        return Move(tensor, tensor.spec(), rule=rule)
    if tensor.codec == DenseLayout.codec or tensor.codec not in CODECS:
        return None
    for layout in alternatives(tensor.layout, tensor):
        if layout.codec == spec.codec and as_laid(tensor.spec(), layout) == spec:
            found = repack(CODECS[tensor.codec], tensor, layout)
            return Repack(tensor, spec, rule=rule, repack=found) if found.exact else None
    return None


def _instead(
    choice: Choice, options: Mapping[str, Any], encoder: Encoder, format: Format
) -> Iterator[Mapping[str, Any]]:
    """Yield options for layouts that other formats take: values in a wider type, rows of codes without padding,
    columns that are known to ascend.

    For formats of operators, also scales of the values' own type, and unsigned codes around the point in the middle.
    """
    if choice.codec == DenseLayout.codec and choice.encoding == "raw":
        holder = holder_of(encoder)
        if holder is not None:
            yield {**options, "holder": holder}
    if choice.codec == CsrLayout.codec:
        yield {**options, "ascending": True}
    if choice.codec != AffineLayout.codec or options.get("cut", "rows") != "rows":
        return
    packings = [{}, {"bit_order": "flat"}] if "bit_order" not in options else [{}]
    yield from ({**options, **packing} for packing in packings if packing)
    if not isinstance(format, FixedScales):
        return
    own = {} if options.get("scales", AUTO) != AUTO else {"scales": "source"}
    middle = {"signed": False, "zero_point": 1 << (int(encoder.params["bits"]) - 1)}
    even = encoder.params["signed"] and encoder.params["granularity"] != "tensor"
    for zero in ({}, middle) if even else ({},):
        yield from ({**options, **own, **zero, **packing} for packing in packings)


def _pruned(pruning: _Pruned, rule: str) -> tuple[bool, str]:
    """Return whether a pruning drops something now, and the rule's label that says so."""
    loses = not pruning.stored and pruning.blocks.sparsity > 0
    return loses, f"{rule} (pruned {100 * pruning.blocks.sparsity:.1f} %)" if loses else rule


def _refuse_requantizing(tensor: Tensor, rule: str, asked: _Asked) -> None:
    if not _stored_exactly(tensor) and not asked.allow_requantize:
        raise UsageError(
            f"the tensor is already stored as {tensor.codec}; quantizing it again by rule {rule!r} loses more than "
            "quantizing the original would. Start from the original, or pass --allow-requantize "
            "(allow_requantize=True)",
            rule="convert.requantize",
        )


def _options(tensor: Tensor, choice: Choice, asked: _Asked) -> Mapping[str, Any]:
    """Return a choice's options, with what the errors of this tensor's columns weigh where that is known."""
    weighed = tensor.name in asked.importance and weighs(choice)
    return {**choice.options, "importance": asked.importance[tensor.name]} if weighed else choice.options


def _stored_exactly(tensor: Tensor) -> bool:
    """Whether the stored values are those that somebody gave, but for blocks that were dropped."""
    codec = BlocksLayout.of(tensor).inner.codec if tensor.codec == BlocksLayout.codec else tensor.codec
    return CODECS[codec].lossless
