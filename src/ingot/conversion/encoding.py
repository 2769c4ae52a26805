"""Plan how a recipe's rule encodes a tensor, in a layout that the format accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isqrt
from typing import Any, NoReturn

import numpy as np

from ingot.codecs.base import Encoder
from ingot.codecs.dense.repack import holder_of
from ingot.codecs.range_probe import AUTO, HALF
from ingot.codecs.repacked_encoder import REPACKED_FROM, RepackedEncoder, repacked
from ingot.codecs.resolve_range import RULE as UNDERFLOW
from ingot.codecs.resolve_range import describe_types, merge_options, resolve_range
from ingot.codecs.table import CODECS, stored_exactly
from ingot.conversion.candidates import first_values
from ingot.conversion.placement import nearest_refusal, plan_unchanged
from ingot.core.numeric.blocks import Blocks
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.registry import did_you_mean
from ingot.engine.steps import DECODED, ENCODED, Encode, Move, Repack
from ingot.engine.work import Step, encoded_spec, same_storage
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.base import RAW, Format, encoding_in, layout_variants, with_layout
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.base import Storable
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.scaled_codebook import DIVIDE, MULTIPLY, ScaledCodebookLayout
from ingot.model.layouts.sparse import BlocksLayout, CsrLayout
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Array, Tensor
from ingot.recipes.choice import Choice, Measured
from ingot.recipes.load import preset_hint
from ingot.recipes.recipe import Decision, Recipe, Rule
from ingot.views.regroup import even_group

# The maximum number of rules or tensors that a note lists by name.
_MAX_LISTED = 8
# The number of rows that are encoded and repacked as a trial; a packed word holds codes of up to 32 rows.
_SAMPLE_ROWS = 64


def unused_settings(
    recipe: Recipe | None, decisions: Mapping[str, Decision], importance: Mapping[str, Array]
) -> list[str]:
    """Return a note for each rule that applies to no tensor, and one if ``--importance`` has no effect.

    Parameters
    ----------
    recipe : Recipe or None
    decisions : mapping of str to Decision
        The recipe's decision on each tensor, keyed by tensor name.
    importance : mapping of str to array
        The weights of column errors, keyed by the name of the matrix.
    """
    notes = []
    if recipe is not None and decisions:
        notes += _unused_rules(recipe, decisions)
    if importance and not any(_uses_importance(decisions[name].choice) for name in importance if name in decisions):
        notes.append(
            "--importance has no effect: only palettes and the search of ggml's blocks use weights of column errors, "
            "and the recipe applies neither to these matrices"
        )
    return notes


def constants_that_stay(source: Checkpoint, format: Format, decisions: Mapping[str, Decision]) -> list[str]:
    """Return notes on constants that the format requires unchanged, although the recipe would change them.

    There is one note per reason.
    """
    reasons: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        choice = decision.choice
        reason = format.why_constant(name)
        plain = isinstance(choice, Choice) and choice.codec == DenseLayout.codec and not choice.options
        dense = plain and source[name].codec == DenseLayout.codec  # the rule would not change it
        if choice is not None and reason is not None and not dense:
            reasons.setdefault(reason, []).append(name)
    lines = []
    for reason, names in reasons.items():
        more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
        count = "1 tensor stays unchanged" if len(names) == 1 else f"{len(names)} tensors stay unchanged"
        listed = ", ".join(name[:200] for name in names[:_MAX_LISTED])
        lines.append(f"{count}, although the recipe has a rule for it ({reason}): {listed}{more}")
    return lines


def require_all_used(warnings: Sequence[str]) -> None:
    """Raise ``UsageError`` ``convert.idle`` with the notes of ``unused_settings``, if there are any."""
    if warnings:
        raise UsageError("; ".join(warnings), rule="convert.idle")


def _unused_rules(recipe: Recipe, decisions: Mapping[str, Decision]) -> list[str]:
    used = {decision.rule_index for decision in decisions.values()}
    if used == {None} and recipe.rules:
        text = (
            f"recipe {recipe.name} changes nothing here: no rule hits any of {len(decisions)} tensors. Rules select by "
            "role, name and shape (`ingot recipes`); those of ane-m1, ane-m4, ane-m5 and ane-int8 hit tensors of any "
            "name"
        )
        return [text]
    if recipe.general:
        return []
    unused = [(index, rule) for index, rule in enumerate(recipe.rules) if index not in used]
    lines = [_unused_rule(index, rule, decisions) for index, rule in unused[:_MAX_LISTED]]
    return lines + ([f"{len(unused) - _MAX_LISTED} more rules hit no tensor"] if len(unused) > _MAX_LISTED else [])


def _unused_rule(index: int, rule: Rule, names: Mapping[str, Decision]) -> str:
    similar = next((hint for text in rule.match if text not in names and (hint := did_you_mean(text, names))), "")
    return f"rules[{index}] ({rule.label}) hits no tensor: none matches, or earlier rules hit all that do{similar}"


def _uses_importance(choice: Choice | Measured | None) -> bool:
    """Return whether a choice, or one of its candidates, uses weights of column errors."""
    choices = choice.candidates if isinstance(choice, Measured) else (choice,)
    return any(option is not None and uses_importance(option) for option in choices)


def uses_importance(choice: Choice) -> bool:
    """Return whether the codec of a choice uses weights of column errors."""
    if choice.codec == GgmlBlocksLayout.codec:
        return choice.options.get("search", True) is True
    return choice.codec == PaletteLayout.codec and choice.options.get("vector", 1) == 1


DENSE = Choice(DenseLayout.codec)
_OTHER_SECOND = {MULTIPLY: DIVIDE, DIVIDE: MULTIPLY}


@dataclass(frozen=True, slots=True)
class Pruned:
    """The pruned blocks of a tensor along ``axis``.

    ``stored`` is true if the source's file already omits these blocks.
    """

    axis: int
    blocks: Blocks
    stored: bool

    def options(self) -> dict[str, object]:
        """Return the options of the codec ``sparse_blocks`` for these blocks."""
        return {"axis": self.axis, "block": self.blocks.block, "mask": self.blocks.mask}

    def around(self, codec: str, options: Mapping[str, Any], format: Format) -> dict[str, object]:
        """Return the options of ``sparse_blocks`` around the codec ``codec`` with ``options``.

        If the format requires it, the matrix is stored in full size.
        """
        size = {"whole": True} if full_size(format) else {}
        return {**self.options(), "inner": codec, "options": options, **size}


@dataclass(frozen=True, slots=True)
class EncodingInputs:
    """Inputs of a decision in addition to the rule.

    ``prune`` contains the pruned blocks, keyed by tensor name; ``importance`` the weights of column errors, keyed by
    matrix name.
    """

    allow_requantize: bool
    prune: Mapping[str, Pruned]
    importance: Mapping[str, Array]


def full_size(format: Format) -> bool:
    """Return whether a format stores pruned matrices in full size, with zeros for the pruned blocks."""
    return format.traits.full_size


def plan_encoding_or_keep(tensor: Tensor, format: Format, rule: str, choice: Choice, inputs: EncodingInputs) -> Step:
    """Return the step that encodes a tensor by a choice.

    If the tensor has no decoder, or its values are too small for the codec, it stays unchanged; the rule's label says
    so.
    """
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        return plan_unchanged(tensor, format, f"{rule} (kept: no decoder for {tensor.codec})")
    try:
        return plan_encoding(tensor, format, rule, choice, inputs)
    except UnsupportedError as error:
        if error.rule != UNDERFLOW:
            raise
    rule = f"{rule} (kept: values too small)"
    pruning = inputs.prune.get(tensor.name)
    if pruning is None or pruning.stored:
        return plan_unchanged(tensor, format, rule)
    return plan_encoding(tensor, format, rule, DENSE, inputs)


def plan_encoding(tensor: Tensor, format: Format, rule: str, choice: Choice, inputs: EncodingInputs) -> Step:
    """Return the step that stores a tensor by a choice.

    If the tensor already has the codes that the choice requires, it is moved or repacked exactly; else it is encoded.

    Raises
    ------
    UnsupportedError
        ``convert.unsupported``: the format cannot carry the result, or the tensor's values are too small for the codec.
    UsageError
        ``convert.requantize``: the tensor is already quantized.
    """
    pruning = inputs.prune.get(tensor.name)
    codec = choice.codec
    inner = _options(tensor, choice, inputs, format)
    dtype = _declared_dtype(tensor, codec)
    settings = CODECS.get_or_refuse(codec).encoder(tensor.shape, dtype, inner)
    keeps = settings.lossless
    exact = keeps
    loses = False
    if pruning is not None:
        codec = BlocksLayout.codec
        loses, rule = _pruned(pruning, rule)
        exact = keeps and not loses

    def build(options: Mapping[str, Any]) -> Encoder:
        return CODECS[codec].encoder(tensor.shape, dtype, options)

    def around(inner: Mapping[str, Any]) -> Mapping[str, Any]:
        return inner if pruning is None else pruning.around(choice.codec, inner, format)

    def spec_of(encoder: Encoder) -> TensorSpec:
        return encoded_spec(tensor.name, tensor, encoder, encoding_in(format, choice.encoding))

    options = around(inner)
    encoder = build(options)
    spec = spec_of(encoder)
    reason = format.why_unsupported(spec)
    if reason is not None:
        if pruning is None and choice.codec == tensor.codec == DenseLayout.codec and tensor.dtype == spec.dtype:
            return plan_unchanged(tensor, format, rule)
        variants = _option_variants(choice, inner, settings, format, _stored_columns(tensor, pruning, format))
        accepted = _first_accepted(
            variants, lambda inner: format.why_unsupported(spec_of(build(around(inner)))) is None
        )
        if accepted is None:
            more = _option_variants(choice, inner, settings, format, tensor.matrix_shape[1])
            variants = chain([(inner, "")], more) if pruning is None else iter(())
            return _plan_repacked(tensor, format, rule, choice, variants, inputs) or _refuse(format, spec, rule, choice)
        options = around(accepted[0])
        encoder = build(options)
        spec = spec_of(encoder)
        rule = rule + accepted[1]
    if not loses and (exact_step := _plan_same_codes(tensor, spec, rule)) is not None:
        return exact_step
    encoder, wider = resolve_range(
        encoder, build, options, first_values(tensor), lambda wide: format.why_unsupported(spec_of(wide)) is None
    )
    if wider:
        spec = spec_of(encoder)
        rule = f"{rule} ({describe_types(wider)}: small values)"
        if not loses and (exact_step := _plan_same_codes(tensor, spec, rule)) is not None:
            return exact_step
    action = DECODED if not stored_exactly(tensor) and exact else ENCODED
    if not keeps and codec != DenseLayout.codec:  # a narrower dtype of a dense tensor is no second quantization
        _refuse_requantizing(tensor, rule, inputs)
    return Encode(
        tensor, spec, action, rule, exact, encoder=encoder, options=merge_options(options, wider), keeps_weights=keeps
    )


_ENCODERS_OF_F32 = (AffineLayout.codec, ScaledCodebookLayout.codec, GgmlBlocksLayout.codec)
"""Codecs whose encoders accept f32 values for any declared element type."""


def _declared_dtype(tensor: Tensor, codec: str) -> str:
    """Return the element type that the result of a codec declares.

    Normally this is the tensor's type. Exception: if a view has computed the values in f32, it is the type of the
    tensor that the view replaces. The exception applies only to codecs in ``_ENCODERS_OF_F32``.
    """
    base = tensor.stored_like
    return tensor.dtype if base is None or codec not in _ENCODERS_OF_F32 else base.dtype


def _refuse(format: Format, spec: TensorSpec, rule: str, choice: Choice) -> NoReturn:
    reason = nearest_refusal(format, spec) or format.why_unsupported(spec)
    raise UnsupportedError(
        f"{format.name} cannot carry the result of rule {rule!r}: {reason}{preset_hint(format.name, choice)}",
        rule="convert.unsupported",
    )


def _plan_repacked(
    tensor: Tensor,
    format: Format,
    rule: str,
    choice: Choice,
    variants: Iterable[tuple[Mapping[str, Any], str]],
    inputs: EncodingInputs,
) -> Step | None:
    """Return the step that encodes a tensor as chosen and repacks it for the format; None if no layout is exact.

    ``variants`` are options of the codec, each with a label for the report.
    """
    codec = CODECS[choice.codec]

    dtype = _declared_dtype(tensor, choice.codec)

    def prepare(options: Mapping[str, Any]) -> Encoder:
        return codec.encoder(tensor.shape, dtype, options)

    def layouts(encoder: Encoder) -> Iterator[tuple[Storable, TensorSpec]]:
        return layout_variants(format, encoded_spec(tensor.name, tensor, encoder, RAW))

    for options, label in variants:
        encoder = prepare(options)
        if "dtype" not in encoder.params or next(layouts(encoder), None) is None:
            continue
        encoder, wider = resolve_range(
            encoder, prepare, options, first_values(tensor), lambda wide: next(layouts(wide), None) is not None
        )
        text = f" ({describe_types(wider)}: small values)" if wider else ""
        chosen = merge_options(options, wider)
        if same_storage(tensor, encoded_spec(tensor.name, tensor, encoder, RAW)):
            return plan_unchanged(tensor, format, rule)
        if encoder.lossless:
            continue
        for layout, spec in layouts(encoder):
            if not _repacks_sample(tensor, choice.codec, chosen, layout):
                continue
            _refuse_requantizing(tensor, rule, inputs)
            return Encode(
                tensor,
                spec,
                ENCODED,
                rule + label + text,
                exact=False,
                encoder=RepackedEncoder(encoder, tensor.name, tensor.shape, layout),
                options={REPACKED_FROM: {"codec": choice.codec, "options": chosen}},
                keeps_weights=False,
            )
    return None


def _repacks_sample(tensor: Tensor, codec: str, options: Mapping[str, Any], layout: Storable) -> bool:
    """Return whether the first rows of the tensor, encoded, can be repacked exactly into ``layout``."""
    first = next((values for _, values in first_values(tensor)), None)
    if first is None:
        return False
    rows = np.resize(first, (_SAMPLE_ROWS, first.shape[1]))
    encoder = CODECS[codec].encoder(rows.shape, _declared_dtype(tensor, codec), options)
    for _ in range(encoder.fit_passes):
        encoder.fit_pass(rows)
    return repacked(encoder, encoder.encode(rows), tensor.name, rows.shape, layout).exact


def _plan_same_codes(tensor: Tensor, spec: TensorSpec, rule: str) -> Step | None:
    """Return the step that moves or exactly repacks a tensor into ``spec``; None if neither is possible."""
    if same_storage(tensor, spec):
        return Move(tensor, tensor.spec(), rule=rule)
    if tensor.codec == DenseLayout.codec or tensor.codec not in CODECS:
        return None
    for layout in alternatives(tensor.layout, tensor):
        if layout.codec == spec.codec and with_layout(tensor.spec(), layout) == spec:
            repack = CODECS[tensor.codec].repack(tensor, layout)
            return Repack(tensor, spec, rule=rule, repack=repack) if repack.exact else None
    return None


def _option_variants(
    choice: Choice, options: Mapping[str, Any], encoder: Encoder, format: Format, cols: int
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield options for equivalent layouts that formats may accept, each with a label for the report (often empty).

    The layouts are: values in a wider dtype, rows of codes without padding, ascending column indices, and unsigned
    codes whose zero point is the middle of the range. For formats that need groups of equal size, the group size
    divides the matrix's ``cols`` columns. For formats that store operators, scales may have the dtype of the values.
    """
    if choice.codec == DenseLayout.codec and choice.encoding == "raw":
        holder = holder_of(encoder)
        if holder is not None:
            yield {**options, "holder": holder}, ""
    if choice.codec == ScaledCodebookLayout.codec and options.get("second") in _OTHER_SECOND:
        yield {**options, "second": _OTHER_SECOND[options["second"]]}, ""
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
        yield from (
            ({**options, **zero, **packing, "group": size}, label) for zero in zeros for packing in packings if even
        )
    if format.traits.fixed_scales:
        scales = {} if options.get("scales", AUTO) != AUTO else {"scales": "source"}
        yield from (({**options, **scales, **zero, **packing}, "") for zero in zeros for packing in packings)


def _stored_columns(tensor: Tensor, pruning: Pruned | None, format: Format) -> int:
    """Return the number of columns that the format stores; pruned columns are not counted if the format omits them."""
    compacts = pruning is not None and pruning.axis == 1 and not full_size(format)
    return pruning.blocks.kept_channels if pruning is not None and compacts else tensor.matrix_shape[1]


def _first_accepted(
    variants: Iterator[tuple[Mapping[str, Any], str]], accepts: Callable[[Mapping[str, Any]], bool]
) -> tuple[Mapping[str, Any], str] | None:
    return next((variant for variant in variants if accepts(variant[0])), None)


def _even_group(group: int, cols: int, sizes: Sequence[int]) -> tuple[int | None, str]:
    """Return the group size that replaces ``group`` (None if there is none), and a label for the report.

    If the format has a list of sizes, it is the largest size that divides ``group`` and ``cols``. Otherwise it is the
    largest divisor of ``cols`` from half of ``group`` to ``group``, else the smallest divisor up to four times
    ``group``.
    """
    if sizes:
        return even_group(group, cols, sizes), ""
    divisors = sorted({d for low in range(1, isqrt(cols) + 1) if cols % low == 0 for d in (low, cols // low)})
    smaller = [d for d in divisors if group <= 2 * d <= 2 * group]
    larger = [d for d in divisors if group < d <= 4 * group]
    even = smaller[-1] if smaller else next(iter(larger), None)
    return even, f" (groups of {even}: {group} does not divide {cols} columns)"


def _pruned(pruning: Pruned, rule: str) -> tuple[bool, str]:
    """Return whether this conversion prunes the tensor, and the rule's label with the pruned share if it does."""
    loses = not pruning.stored and pruning.blocks.sparsity > 0
    return loses, f"{rule} (pruned {100 * pruning.blocks.sparsity:.1f} %)" if loses else rule


def _refuse_requantizing(tensor: Tensor, rule: str, inputs: EncodingInputs) -> None:
    if not stored_exactly(tensor) and not inputs.allow_requantize:
        raise UsageError(
            f"the tensor is already stored as {tensor.codec}; quantizing it again by rule {rule!r} loses more than "
            "quantizing the original would. Start from the original, or pass --allow-requantize "
            "(allow_requantize=True)",
            rule="convert.requantize",
        )


def _options(tensor: Tensor, choice: Choice, inputs: EncodingInputs, format: Format) -> Mapping[str, Any]:
    """Return a choice's options, with the tensor's weights of column errors if the codec uses them.

    For ``scales = "half"``, scales are f16 if the format stores no other type.
    """
    options = choice.options
    if format.traits.f16_scales and options.get("scales") == HALF:
        options = {**options, "scales": AUTO}
    weighed = tensor.name in inputs.importance and uses_importance(choice)
    return {**options, "importance": inputs.importance[tensor.name]} if weighed else options
