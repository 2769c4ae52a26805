"""How a tensor is stored as a rule of a recipe chooses, in a layout that the format takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.codecs.base import Encoder, repack
from ingot.codecs.dense.repack import holder_of
from ingot.codecs.reach import AUTO, named, reaching
from ingot.codecs.reach import RULE as UNDERFLOW
from ingot.codecs.table import CODECS
from ingot.core.blocks import Blocks
from ingot.core.dtypes import DTYPES
from ingot.engine.specs import encoded_spec, same_storage
from ingot.engine.steps import DECODED, ENCODED, Encode, Move, Repack
from ingot.engine.work import Step
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.accepts import accepts, as_laid, encoding_in
from ingot.formats.base import EvenGroups, FixedScales, Format, FullSize
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.families import alternatives
from ingot.model.layouts.sparse import BlocksLayout, CsrLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.ops.convert.idle import weighs
from ingot.ops.convert.keep import keep, nearest_refusal
from ingot.ops.convert.measure import first_values
from ingot.ops.views.regrouped import even_group
from ingot.recipes.choice import Choice
from ingot.recipes.load import made_for

DENSE = Choice(DenseLayout.codec)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a tensor lacks: blocks along ``axis``; ``stored`` where its file lacks them already."""

    axis: int
    blocks: Blocks
    stored: bool

    def options(self) -> dict[str, object]:
        """Return the options of ``sparse_blocks`` that say so."""
        return {"axis": self.axis, "block": self.blocks.block, "mask": self.blocks.mask}

    def around(self, choice: Choice, format: Format) -> dict[str, object]:
        """Return the options of ``sparse_blocks`` around a choice: in full size where the format asks for that."""
        whole = {"whole": True} if full_size(format) else {}
        return {**self.options(), "inner": choice.codec, "options": choice.options, **whole}


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides on a tensor beside its rule: what tensors lack, and what errors of their columns weigh."""

    allow_requantize: bool
    prune: Mapping[str, Pruned]
    importance: Mapping[str, Array]


def full_size(format: Format) -> bool:
    """Whether a format wants pruned matrices in their full size."""
    return isinstance(format, FullSize) and format.full_size


def encode(tensor: Tensor, format: Format, rule: str, choice: Choice, asked: Asked) -> Step:
    """Encode as a choice says; a tensor whose values are too small for it stays as it is: the label says so."""
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        return keep(tensor, format, f"{rule} (kept: no decoder for {tensor.codec})")
    try:
        return as_chosen(tensor, format, rule, choice, asked)
    except UnsupportedError as error:
        if error.rule != UNDERFLOW:
            raise
    rule = f"{rule} (kept: values too small)"
    pruning = asked.prune.get(tensor.name)
    if pruning is None or pruning.stored:
        return keep(tensor, format, rule)
    return as_chosen(tensor, format, rule, DENSE, asked)


def as_chosen(tensor: Tensor, format: Format, rule: str, choice: Choice, asked: Asked) -> Step:
    """Return how a tensor becomes what is chosen: moved or repacked where it is that already, else encoded.

    Raises
    ------
    UnsupportedError
        ``convert.unsupported``: the format cannot carry it; the codec cannot reach values as small as these.
    UsageError
        ``convert.requantize``: it is quantized already.
    """
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
            return keep(tensor, format, rule)
        others = _instead(choice, options, encoder, format, tensor.matrix_shape[1])
        instead = next(filter(lambda other: format.refuses(specified(made(other))) is None, others), None)
        if instead is not None:
            options, encoder, reason = instead, made(instead), None
            spec = specified(encoder)
    if reason is None and not loses and (stays := _as_asked(tensor, spec, rule)) is not None:
        return stays
    if reason is not None:
        reason = _in_two_steps(format, spec) or nearest_refusal(format, spec) or reason
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
    action = DECODED if not stored_exactly(tensor) and exact else ENCODED
    if not keeps and codec != DenseLayout.codec:  # a narrower type rounds once more, as anybody who decodes it has to
        _refuse_requantizing(tensor, rule, asked)
    return Encode(tensor, spec, action, rule, exact, encoder=encoder, options={**options, **more}, keeps_weights=keeps)


def _in_two_steps(format: Format, spec: TensorSpec) -> str:
    """Return how numbers that a recipe makes get into a format that has them in a layout of its own; empty if not."""
    if next(accepts(format, spec), None) is None:
        return ""
    return (
        f"its layers hold such numbers, but recipes make them in another layout: convert to a .zt by this recipe, and "
        f"that to {format.name} without one"
    )


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
    choice: Choice, options: Mapping[str, Any], encoder: Encoder, format: Format, cols: int
) -> Iterator[Mapping[str, Any]]:
    """Yield options for layouts that other formats take: values in a wider type, rows of codes without padding,
    columns that are known to ascend, unsigned codes around the point in the middle, smaller groups that divide the
    columns.

    For formats of operators, also scales of the values' own type.
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
    middle: dict[str, object] = {"signed": False, "zero_point": 1 << (int(encoder.params["bits"]) - 1)}
    even = encoder.params["signed"] and encoder.params["granularity"] != "tensor"
    zeros: list[dict[str, object]] = [{}, middle] if even else [{}]
    yield from ({**options, **zero, **packing} for zero in zeros for packing in packings)
    if isinstance(format, FixedScales):
        own = {} if options.get("scales", AUTO) != AUTO else {"scales": "source"}
        yield from ({**options, **own, **zero, **packing} for zero in zeros for packing in packings)
    if isinstance(format, EvenGroups):
        group = even_group(encoder.params.get("group_size"), cols, format.even_groups)
        yield from ({**options, **zero, "group": group} for zero in zeros if group)


def _pruned(pruning: Pruned, rule: str) -> tuple[bool, str]:
    """Return whether a pruning drops something now, and the rule's label that says so."""
    loses = not pruning.stored and pruning.blocks.sparsity > 0
    return loses, f"{rule} (pruned {100 * pruning.blocks.sparsity:.1f} %)" if loses else rule


def _refuse_requantizing(tensor: Tensor, rule: str, asked: Asked) -> None:
    if not stored_exactly(tensor) and not asked.allow_requantize:
        raise UsageError(
            f"the tensor is already stored as {tensor.codec}; quantizing it again by rule {rule!r} loses more than "
            "quantizing the original would. Start from the original, or pass --allow-requantize "
            "(allow_requantize=True)",
            rule="convert.requantize",
        )


def _options(tensor: Tensor, choice: Choice, asked: Asked) -> Mapping[str, Any]:
    """Return a choice's options, with what the errors of this tensor's columns weigh where that is known."""
    weighed = tensor.name in asked.importance and weighs(choice)
    return {**choice.options, "importance": asked.importance[tensor.name]} if weighed else choice.options


def stored_exactly(tensor: Tensor) -> bool:
    """Whether the stored values are those that somebody gave, but for blocks that were dropped."""
    codec = BlocksLayout.of(tensor).inner.codec if tensor.codec == BlocksLayout.codec else tensor.codec
    return CODECS[codec].lossless
