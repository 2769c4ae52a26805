"""How a tensor is stored as a rule of a recipe chooses, in a layout that the format takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from ingot.codecs.base import Encoder
from ingot.codecs.dense.repack import holder_of
from ingot.codecs.range_probe import AUTO
from ingot.codecs.resolve_range import RULE as UNDERFLOW
from ingot.codecs.resolve_range import describe_types, merge_options, resolve_range
from ingot.codecs.table import CODECS, stored_exactly
from ingot.conversion.candidates import first_values
from ingot.conversion.placement import keep, nearest_refusal
from ingot.core.numeric.blocks import Blocks
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.registry import did_you_mean
from ingot.engine.steps import DECODED, ENCODED, Encode, Move, Repack
from ingot.engine.work import Step, encoded_spec, same_storage
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import Format, encoding_in, layout_variants, with_layout
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.sparse import BlocksLayout, CsrLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.load import made_for
from ingot.recipes.recipe import Decision, Recipe, Rule
from ingot.views.regroup import even_group

# So many rules are named one by one.
_NAMED = 8


def without_effect(
    recipe: Recipe | None, decisions: Mapping[str, Decision], importance: Mapping[str, Array]
) -> list[str]:
    """Return a line for each thing that was asked for and does nothing.

    Parameters
    ----------
    recipe : Recipe or None
    decisions : what it says of each tensor, by name
    importance : what errors of columns weigh, by name of the matrix
    """
    notes = []
    if recipe is not None and decisions:
        notes += _idle_rules(recipe, decisions)
    if importance and not any(_weighs(decisions[name].choice) for name in importance if name in decisions):
        notes.append(
            "--importance has no effect: errors of columns are weighed where a recipe makes palettes or searches "
            "ggml's blocks, and it does that to none of these matrices"
        )
    return notes


def constants_that_stay(source: Checkpoint, format: Format, decisions: Mapping[str, Decision]) -> list[str]:
    """Return a line for each reason why a program keeps tensors that a recipe would change."""
    reasons: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        choice = decision.choice
        reason = format.why_constant(name)
        plain = isinstance(choice, Choice) and choice.codec == DenseLayout.codec and not choice.options
        dense = plain and source[name].codec == DenseLayout.codec  # it is stored so already
        if choice is not None and reason is not None and not dense:
            reasons.setdefault(reason, []).append(name)
    lines = []
    for reason, names in reasons.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        count = "1 tensor stays as it is" if len(names) == 1 else f"{len(names)} tensors stay as they are"
        listed = ", ".join(name[:200] for name in names[:_NAMED])
        lines.append(f"{count}, whatever the recipe says ({reason}): {listed}{more}")
    return lines


def require_effect(warnings: Sequence[str]) -> None:
    """Refuse what has no effect; raises ``UsageError`` ``convert.idle``."""
    if warnings:
        raise UsageError("; ".join(warnings), rule="convert.idle")


def _idle_rules(recipe: Recipe, decisions: Mapping[str, Decision]) -> list[str]:
    hit = {decision.rule_index for decision in decisions.values()}
    if hit == {None} and recipe.rules:
        text = (
            f"recipe {recipe.name} changes nothing here: no rule hits any of {len(decisions)} tensors. Rules go by "
            "role, name and shape (`ingot recipes`); those of ane-m1, ane-m4, ane-m5 and ane-int8 take names that say "
            "nothing"
        )
        return [text]
    if recipe.general:
        return []
    idle = [(index, rule) for index, rule in enumerate(recipe.rules) if index not in hit]
    lines = [_line(index, rule, decisions) for index, rule in idle[:_NAMED]]
    return lines + ([f"{len(idle) - _NAMED} more rules hit no tensor"] if len(idle) > _NAMED else [])


def _line(index: int, rule: Rule, names: Mapping[str, Decision]) -> str:
    near = next((hint for text in rule.match if text not in names and (hint := did_you_mean(text, names))), "")
    return f"rules[{index}] ({rule.label}) hits no tensor: none fits, or rules before it take those that do{near}"


def _weighs(choice: Choice | Measured | None) -> bool:
    """Whether a choice, or one of its candidates, looks at what errors of columns weigh."""
    ways = choice.candidates if isinstance(choice, Measured) else (choice,)
    return any(option is not None and weighs(option) for option in ways)


def weighs(choice: Choice) -> bool:
    """Whether a way to store a tensor looks at what errors of its columns weigh."""
    if choice.codec == GgmlBlocksLayout.codec:
        return choice.options.get("search", True) is True
    return choice.codec == PaletteLayout.codec and choice.options.get("vector", 1) == 1


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

    def around(self, codec: str, options: Mapping[str, Any], format: Format) -> dict[str, object]:
        """Return the options of ``sparse_blocks`` around a codec: in full size where the format asks for that."""
        whole = {"whole": True} if full_size(format) else {}
        return {**self.options(), "inner": codec, "options": options, **whole}


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides on a tensor beside its rule: what tensors lack, and what errors of their columns weigh."""

    allow_requantize: bool
    prune: Mapping[str, Pruned]
    importance: Mapping[str, Array]


def full_size(format: Format) -> bool:
    """Whether a format wants pruned matrices in their full size."""
    return format.traits.full_size


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
    codec, inner = choice.codec, _options(tensor, choice, asked)
    settings = CODECS.get_or_refuse(codec).encoder(tensor.shape, tensor.dtype, inner)
    keeps = settings.lossless
    exact = keeps
    loses = False
    if pruning is not None:
        codec = BlocksLayout.codec
        loses, rule = _pruned(pruning, rule)
        exact = keeps and not loses

    def made(options: Mapping[str, Any]) -> Encoder:
        return CODECS[codec].encoder(tensor.shape, tensor.dtype, options)

    def around(inner: Mapping[str, Any]) -> Mapping[str, Any]:
        return inner if pruning is None else pruning.around(choice.codec, inner, format)

    def specified(encoder: Encoder) -> TensorSpec:
        return encoded_spec(tensor.name, tensor, encoder, encoding_in(format, choice.encoding))

    options = around(inner)
    encoder = made(options)
    spec = specified(encoder)
    reason = format.why_unsupported(spec)
    if reason is not None:
        if pruning is None and choice.codec == tensor.codec == DenseLayout.codec and tensor.dtype == spec.dtype:
            return keep(tensor, format, rule)
        others = _instead(choice, inner, settings, format, _stored_columns(tensor, pruning, format))
        taken = _first_taken(others, lambda inner: format.why_unsupported(specified(made(around(inner)))) is None)
        if taken is None:
            reason = _in_two_steps(format, spec) or nearest_refusal(format, spec) or reason
            raise UnsupportedError(
                f"{format.name} cannot carry what rule {rule!r} asks for: {reason}{made_for(format.name, choice)}",
                rule="convert.unsupported",
            )
        options = around(taken[0])
        encoder = made(options)
        spec = specified(encoder)
        rule = rule + taken[1]
    if not loses and (stays := _as_asked(tensor, spec, rule)) is not None:
        return stays
    encoder, more = resolve_range(
        encoder, made, options, first_values(tensor), lambda wide: format.why_unsupported(specified(wide)) is None
    )
    if more:
        spec = specified(encoder)
        rule = f"{rule} ({describe_types(more)}: small values)"
        if not loses and (stays := _as_asked(tensor, spec, rule)) is not None:
            return stays
    action = DECODED if not stored_exactly(tensor) and exact else ENCODED
    if not keeps and codec != DenseLayout.codec:  # a narrower type rounds once more, as anybody who decodes it has to
        _refuse_requantizing(tensor, rule, asked)
    return Encode(
        tensor, spec, action, rule, exact, encoder=encoder, options=merge_options(options, more), keeps_weights=keeps
    )


def _in_two_steps(format: Format, spec: TensorSpec) -> str:
    """Return how numbers that a recipe makes get into a format that has them in a layout of its own; empty if not."""
    if next(layout_variants(format, spec), None) is None:
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
        if layout.codec == spec.codec and with_layout(tensor.spec(), layout) == spec:
            found = CODECS[tensor.codec].repack(tensor, layout)
            return Repack(tensor, spec, rule=rule, repack=found) if found.exact else None
    return None


def _instead(
    choice: Choice, options: Mapping[str, Any], encoder: Encoder, format: Format, cols: int
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield options for layouts that other formats take, each with a label for the report, empty where none is needed.

    Values in a wider type, rows of codes without padding, columns that are known to ascend, unsigned codes around the
    point in the middle. For formats that need even groups, groups that divide the matrix's ``cols`` columns. For
    formats of operators, also scales of the values' own type.
    """
    if choice.codec == DenseLayout.codec and choice.encoding == "raw":
        holder = holder_of(encoder)
        if holder is not None:
            yield {**options, "holder": holder}, ""
    if choice.codec == CsrLayout.codec:
        yield {**options, "ascending": True}, ""
    if choice.codec != AffineLayout.codec or options.get("cut", "rows") != "rows":
        return
    packings = [{}, {"bit_order": "flat"}] if "bit_order" not in options else [{}]
    middle: dict[str, object] = {"signed": False, "zero_point": 1 << (int(encoder.params["bits"]) - 1)}
    params = encoder.params
    symmetric = params["signed"] and not params["zeros"] and params["granularity"] != "tensor"
    zeros: list[dict[str, object]] = [{}, middle] if symmetric else [{}]
    yield from (({**options, **zero, **packing}, "") for zero in zeros for packing in packings)
    group = encoder.params.get("group_size")
    sizes = format.traits.group_sizes
    if sizes is not None and group is not None:
        even, label = _even_group(group, cols, sizes)
        size = "row" if even == cols and not sizes else even
        forms = [{**zero, **packing} for zero in zeros for packing in packings if even]
        yield from (({**options, **form, "group": size}, label) for form in forms)
    if format.traits.fixed_scales:
        own = {} if options.get("scales", AUTO) != AUTO else {"scales": "source"}
        yield from (({**options, **own, **zero, **packing}, "") for zero in zeros for packing in packings)


def _stored_columns(tensor: Tensor, pruning: Pruned | None, format: Format) -> int:
    """Return the columns of the matrix that the format stores: without those that are dropped where it wants that."""
    compacts = pruning is not None and pruning.axis == 1 and not full_size(format)
    return pruning.blocks.kept if pruning is not None and compacts else tensor.matrix_shape[1]


def _first_taken(
    others: Iterator[tuple[Mapping[str, Any], str]], takes: Callable[[Mapping[str, Any]], bool]
) -> tuple[Mapping[str, Any], str] | None:
    return next((other for other in others if takes(other[0])), None)


def _even_group(group: int, cols: int, sizes: Sequence[int]) -> tuple[int | None, str]:
    """Return the number of columns that takes the place of ``group``, if any, and a label for the report.

    Among the sizes that a format lists, the largest that divides ``group`` and the columns. Without a list, the largest
    divisor of the columns from half of ``group`` on, else the smallest one above it, up to four times as many.
    """
    if sizes:
        return even_group(group, cols, sizes), ""
    divisors = sorted({d for low in range(1, isqrt(cols) + 1) if cols % low == 0 for d in (low, cols // low)})
    smaller = [d for d in divisors if group <= 2 * d <= 2 * group]
    larger = [d for d in divisors if group < d <= 4 * group]
    even = smaller[-1] if smaller else next(iter(larger), None)
    return even, f" (groups of {even}: {group} does not divide {cols} columns)"


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
