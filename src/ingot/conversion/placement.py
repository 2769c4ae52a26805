"""Plan how a format stores a tensor without quantizing it: moved, repacked exactly, or decoded; and give the reason."""

from __future__ import annotations

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import DTYPES
from ingot.core.numeric.exact_cast import EXACT_WIDER_DTYPES
from ingot.engine.steps import DECODED, Encode, Move, Repack, recode
from ingot.engine.work import Step, encoded_spec
from ingot.errors import IngotError, UnsupportedError
from ingot.formats.base import RAW, Format, encoding_variants, layout_variants, with_layout
from ingot.model.layouts.alternatives import alternatives
from ingot.model.layouts.base import is_rows_first
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.table import layout_of
from ingot.model.spec import TensorSpec
from ingot.model.tensor import Tensor

KEEP = "keep"
"""The label of the rule in reports for a tensor to which no rule applies."""


def plan_without_rule(tensor: Tensor, format: Format) -> Step:
    """Return the step that stores a tensor in a format without a recipe: move, repack or decode.

    Raises
    ------
    CodecError
        Rules of the codec: parameters and parts do not fit together.
    UnsupportedError
        ``convert.unsupported``: the format cannot store it.
    """
    try:
        if tensor.codec in CODECS:
            CODECS[tensor.codec].check(tensor)
        return plan_unchanged(tensor, format, KEEP)
    except IngotError as error:
        raise error_at_tensor(error, tensor.name) from None


def plan_exact(tensor: Tensor, format: Format, rule: str) -> Step | None:
    """Return the step that moves a tensor, or repacks it exactly if the format requires another layout.

    Returns None if neither is possible.
    """
    spec = tensor.spec()
    move = Move(tensor, spec, rule=rule) if format.why_unsupported(spec) is None else None
    foreign = is_rows_first(tensor.layout) and not format.traits.config_keys
    recoded = [] if move is not None else [recode(tensor, variant, rule) for variant in encoding_variants(format, spec)]
    for step in recoded:
        if any(part.encoding != RAW for part in step.spec.parts):
            return step
    if tensor.codec not in CODECS or (move is not None and not foreign):
        return move or next(iter(recoded), None)
    for layout, variant in layout_variants(format, spec):
        repack = CODECS[tensor.codec].repack(tensor, layout)
        if repack.exact:
            label = f"{rule} (values equal in {tensor.dtype}, not in f32)" if repack.rounded else rule
            return Repack(tensor, variant, rule=label, repack=repack)
    if tensor.codec == DenseLayout.codec:  # decoding keeps its bytes as well, so that exact repacking is not needed
        return move
    return move or next(iter(recoded), None)


def plan_unchanged(tensor: Tensor, format: Format, rule: str) -> Step:
    """Return the step that stores a tensor with its values: move or exact repacking, else decoding.

    Raises ``UnsupportedError`` ``convert.unsupported`` if the format cannot store it.
    """
    return plan_exact(tensor, format, rule) or plan_decoded(tensor, format, rule)


def plan_decoded(tensor: Tensor, format: Format, rule: str) -> Step:
    """Return the step that decodes a tensor for a format; raises ``UnsupportedError`` ``convert.unsupported``."""
    reason = format.why_unsupported(tensor.spec())
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        raise UnsupportedError(f"{format.name} cannot carry this tensor: {reason}", rule="convert.unsupported")
    declared = format.declared_dtype(tensor.name) or tensor.dtype
    for dtype in dict.fromkeys((tensor.dtype, *(("f32",) if tensor.dtype in EXACT_WIDER_DTYPES else ()), declared)):
        dense = _decoded(tensor, rule, dtype)
        reason = format.why_unsupported(dense.spec)
        if reason is None:
            return dense
    raise UnsupportedError(f"{format.name} cannot carry this tensor: {reason}", rule="convert.unsupported")


def why_not_exact(tensor: Tensor, format: Format) -> str:
    """Return why a tensor is neither moved nor repacked into a format.

    If the format accepts another layout of the tensor's codes, the reason says why repacking into it is not exact.
    Otherwise it says why the format refuses the tensor (``nearest_refusal``).
    """
    spec = tensor.spec()
    for layout, _ in layout_variants(format, spec) if tensor.codec in CODECS else ():
        repack = CODECS[tensor.codec].repack(tensor, layout)
        if not repack.exact:
            return repack.why_not or ""
    return nearest_refusal(format, spec)


def nearest_refusal(format: Format, spec: TensorSpec) -> str:
    """Return why a format refuses a tensor, for the layout of its codes that is closest to an accepted one."""
    packed_codecs = format.traits.packed_codecs
    packings = format.traits.word_forms
    variants = [with_layout(spec, layout) for layout in alternatives(layout_of(spec), spec)]
    near = [variant for variant in (spec, *variants) if variant.codec in packed_codecs]
    fitting = [variant for variant in near if not packings or variant.params.get("form") in packings]
    return format.why_unsupported(next(iter([*fitting, *near]), spec)) or ""


def _decoded(tensor: Tensor, rule: str, dtype: str) -> Step:
    options = {"dtype": dtype}
    encoder = CODECS[DenseLayout.codec].encoder(tensor.shape, tensor.dtype, options)
    spec = encoded_spec(tensor.name, tensor, encoder, "raw")
    return Encode(tensor, spec, DECODED, rule, encoder=encoder, options=options)


def error_at_tensor(error: IngotError, name: str) -> IngotError:
    """Return the error with the tensor's name as its location, unless the location already contains the name."""
    return error if error.where and name in error.where else error.add_location(name)
