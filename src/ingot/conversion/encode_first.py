"""Integers that a recipe asks for and that a container has in a layout of its own: encoded in a view, then repacked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ingot.codecs.base import Encoder
from ingot.codecs.resolve_range import RULE as UNDERFLOW
from ingot.codecs.resolve_range import merge_options, resolve_range
from ingot.codecs.table import CODECS
from ingot.conversion.candidates import first_values
from ingot.conversion.options import ConvertOptions
from ingot.conversion.plan import decide, layers_of
from ingot.conversion.report import TensorReport
from ingot.conversion.rounding_view import round_weights
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import Format, layout_variants
from ingot.formats.detect import FORMATS
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.view import View
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe
from ingot.runtimes.fit import choices_of, holds, presets_held
from ingot.views.encoded import Encoding, encode
from ingot.views.regrouped import even_group
from ingot.views.rounded_view import Rounding

_SIZES = (128, 64, 32)
_REPACKING = ("gguf",)
"""Containers besides folders of packed layers that have integers in layouts of their own."""


def compute_weights(
    checkpoint: Checkpoint, format: Format, options: ConvertOptions
) -> tuple[View, Rounding | None, Encoding]:
    """Return the model rounded by its recipe's quantizers and encoded for a format, with how it is done.

    Matrices that the format takes as an encoder makes them are left alone. So are those of conversions by other
    processes, which cannot receive such a view. Raises the errors of ``round_weights`` and
    ``require_held``.
    """
    recipe = options.recipe if isinstance(options.recipe, Recipe) else None
    if recipe is not None:
        require_held(FORMATS.get(format.name, format), recipe)
    view, rounding = round_weights(checkpoint, recipe, options)
    repacks = format.traits.packed_codecs or format.name in _REPACKING
    if (
        recipe is None
        or not repacks
        or options.engine != "local"
        or options.prune is not None
        or options.tp is not None
    ):
        return view, rounding, Encoding()
    encoders = dict(_encoders(view.checkpoint, format, recipe))
    texts = {name: f"{encoder.codec} {encoder.params}" for name, encoder in encoders.items()}
    encoding = Encoding(encoders, texts)
    return view.then(partial(encode, encoding=encoding)), rounding, encoding


def require_held(format: Format, recipe: Recipe) -> None:
    """Refuse a preset whose matrices a container would store as 16-bit values.

    Raises ``UnsupportedError`` ``convert.not-held`` with the presets that the container holds.
    """
    quantizers = any(choice.quantizer for rule in recipe.rules for choice in choices_of(rule))
    if not recipe.general or not quantizers or holds(format, recipe):
        return  # without a quantizer, the plan refuses what a container cannot hold
    names = ", ".join(presets_held(format)) or "none"
    raise UnsupportedError(
        f"{format.name} cannot hold what preset {recipe.name} makes; its matrices would be stored as 16-bit "
        f"values. Presets that {format.name} holds: {names}. For the decoded values: convert to a .zt by this "
        f"preset, and that to {format.name}",
        rule="convert.not-held",
    )


def with_errors(tensors: Sequence[TensorReport], encoding: Encoding) -> list[TensorReport]:
    """Return reports of tensors with the errors that encoding caused."""
    errors = {name: error.summary() for name, error in encoding.errors.items() if error.count}
    return [replace(item, error=item.error or errors.get(item.name)) for item in tensors]


def _encoders(checkpoint: Checkpoint, format: Format, recipe: Recipe) -> Iterator[tuple[str, Encoder]]:
    layer_count = layers_of(checkpoint)
    for name, tensor in checkpoint.items():
        choice = decide(checkpoint, name, recipe, layer_count).choice
        if not isinstance(choice, Choice) or choice.quantizer is not None or choice.codec != AffineLayout.codec:
            continue
        if tensor.codec != DenseLayout.codec or choice.encoding != "raw" or len(tensor.shape) < 2:
            continue
        encoder = _encoder(tensor, format, choice)
        if encoder is not None:
            yield name, encoder


def _encoder(tensor: Tensor, format: Format, choice: Choice) -> Encoder | None:
    """Return the encoder of a tensor if the format takes another layout of its integers only; None otherwise."""

    def make(options: Mapping[str, Any]) -> Encoder:
        return CODECS[choice.codec].encoder(tensor.shape, tensor.dtype, options)

    candidates = list(_options(tensor, format, choice))
    try:
        encoders = [make(options) for options in candidates]
        if any(_direct(format, tensor, make({**options, **_middle(options)})) for options in candidates):
            return None
    except IngotError:
        return None
    if any(_direct(format, tensor, encoder) for encoder in encoders):
        return None
    pairs = zip(candidates, encoders, strict=True)
    options, encoder = next((pair for pair in pairs if _repacks(format, tensor, pair[1])), ({}, None))
    if encoder is None:
        return None
    try:
        encoder, more = resolve_range(
            encoder, make, options, first_values(tensor), lambda wide: _repacks(format, tensor, wide)
        )
    except IngotError as error:
        if error.rule == UNDERFLOW:
            return None
        raise
    return make(merge_options(options, more)) if more else encoder


def _middle(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of unsigned codes around the middle, for symmetric integers."""
    symmetric = options.get("symmetric") is True
    return {"signed": False, "zero_point": 1 << (int(options.get("bits", 8)) - 1)} if symmetric else {}


def _options(tensor: Tensor, format: Format, choice: Choice) -> Iterator[Mapping[str, Any]]:
    """Yield the options of a choice with groups that divide the columns, then as they are."""
    group = choice.options.get("group")
    even = even_group(group, tensor.matrix_shape[1], format.traits.group_sizes or _SIZES)
    if even is not None:
        yield {**choice.options, "group": even}
    yield choice.options


def _spec(tensor: Tensor, encoder: Encoder) -> TensorSpec:
    dtype = str(encoder.params.get("dtype", tensor.dtype))
    return TensorSpec(tensor.name, tensor.shape, dtype, encoder.codec, encoder.parts, dict(encoder.params))


def _direct(format: Format, tensor: Tensor, encoder: Encoder) -> bool:
    return format.why_unsupported(_spec(tensor, encoder)) is None


def _repacks(format: Format, tensor: Tensor, encoder: Encoder) -> bool:
    return next(layout_variants(format, _spec(tensor, encoder)), None) is not None
