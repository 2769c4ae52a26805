"""How a tensor goes into a format as it is stored: moved, repacked exactly, or decoded; and what is in the way."""

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
"""The rule of a tensor that no rule hits."""


def kept(tensor: Tensor, format: Format) -> Step:
    """Return how a tensor goes into a format without a recipe: moved, repacked or decoded.

    Raises
    ------
    CodecError
        By the codec's rules: parameters and parts do not fit together.
    UnsupportedError
        ``convert.unsupported``: the format cannot carry it.
    """
    try:
        if tensor.codec in CODECS:
            CODECS[tensor.codec].check(tensor)
        return keep(tensor, format, KEEP)
    except IngotError as error:
        raise located(error, tensor.name) from None


def as_stored(tensor: Tensor, format: Format, rule: str) -> Step | None:
    """Return how the tensor keeps what is stored of it: moved, or repacked where the format wants another layout."""
    spec = tensor.spec()
    stays = Move(tensor, spec, rule=rule) if format.why_unsupported(spec) is None else None
    foreign = is_rows_first(tensor.layout) and not format.traits.config_keys
    ways = [] if stays is not None else [recode(tensor, wanted, rule) for wanted in encoding_variants(format, spec)]
    for way in ways:
        if any(part.encoding != RAW for part in way.spec.parts):
            return way
    if tensor.codec not in CODECS or (stays is not None and not foreign):
        return stays or next(iter(ways), None)
    for layout, wanted in layout_variants(format, spec):
        found = CODECS[tensor.codec].repack(tensor, layout)
        if found.exact:
            told = f"{rule} (values equal in {tensor.dtype}, not in f32)" if found.rounded else rule
            return Repack(tensor, wanted, rule=told, repack=found)
    if tensor.codec == DenseLayout.codec:  # its values are its bytes
        return stays
    return stays or next(iter(ways), None)


def keep(tensor: Tensor, format: Format, rule: str) -> Step:
    """Return how a tensor stays as it is stored, or is decoded where a format does not take it; raises as ``kept``."""
    stays = as_stored(tensor, format, rule)
    if stays is not None:
        return stays
    return decoded(tensor, format, rule)


def decoded(tensor: Tensor, format: Format, rule: str) -> Step:
    """Return how a tensor is decoded for a format; raises ``UnsupportedError`` ``convert.unsupported``."""
    reason = format.why_unsupported(tensor.spec())
    if tensor.decoder is None or tensor.dtype not in DTYPES:
        raise UnsupportedError(f"{format.name} cannot carry this tensor: {reason}", rule="convert.unsupported")
    wanted = format.declared_dtype(tensor.name)
    for dtype in dict.fromkeys(
        (tensor.dtype, *(("f32",) if tensor.dtype in EXACT_WIDER_DTYPES else ()), wanted or tensor.dtype)
    ):
        dense = _decoded(tensor, rule, dtype)
        reason = format.why_unsupported(dense.spec)
        if reason is None:
            return dense
    raise UnsupportedError(f"{format.name} cannot carry this tensor: {reason}", rule="convert.unsupported")


def obstacle(tensor: Tensor, format: Format) -> str:
    """Return why a tensor is neither moved nor repacked.

    Of the layouts that the format takes the nearest one's reason; else the format's reason against the nearest of a
    codec that it carries, or against the tensor as stored.
    """
    spec = tensor.spec()
    for layout, _ in layout_variants(format, spec) if tensor.codec in CODECS else ():
        found = CODECS[tensor.codec].repack(tensor, layout)
        if not found.exact:
            return found.why_not or ""
    return nearest_refusal(format, spec)


def nearest_refusal(format: Format, spec: TensorSpec) -> str:
    """Return why a format refuses the layout of a tensor's numbers that comes nearest to its own."""
    carried, forms = format.traits.packed_codecs, format.traits.word_forms
    others = [with_layout(spec, layout) for layout in alternatives(layout_of(spec), spec)]
    near = [other for other in (spec, *others) if other.codec in carried]
    nearest = next((other for other in near if not forms or other.params.get("form") in forms), next(iter(near), spec))
    return format.why_unsupported(nearest) or ""


def _decoded(tensor: Tensor, rule: str, dtype: str) -> Step:
    options = {"dtype": dtype}
    encoder = CODECS[DenseLayout.codec].encoder(tensor.shape, tensor.dtype, options)
    spec = encoded_spec(tensor.name, tensor, encoder, "raw")
    return Encode(tensor, spec, DECODED, rule, encoder=encoder, options=options)


def located(error: IngotError, name: str) -> IngotError:
    """Return an error that names the tensor it is about."""
    return error if error.where and name in error.where else error.at(name)
