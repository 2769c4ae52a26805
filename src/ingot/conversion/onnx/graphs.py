"""Matrices of an ONNX graph as its operators want them: turned where they get, or lose, codes of ``MatMulNBits``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from ingot.artifacts.destination import Destination
from ingot.codecs.table import CODECS
from ingot.conversion.plan import decide, layers_of
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.onnx.format import OnnxFormat
from ingot.formats.onnx.forms import BLOCKS
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe
from ingot.views.names import rename
from ingot.views.transpose import transpose, transpose_codes

_WEIGHT = ".weight"
_BITS = 4  # what the affine family's encoder takes where a recipe states none


def as_graph(
    view: Checkpoint, place: Destination, recipe: Recipe | None, planned: Collection[str], *, requantize: bool
) -> Checkpoint:
    """Return the checkpoint as the graph takes it; itself for other formats, and where no matrix is turned.

    Parameters
    ----------
    view : Checkpoint
    place : Destination
    recipe : Recipe or None
        What decides which matrices are turned.
    planned : collection of str
        The tensors of a plan that was made before: then these decide.
    requantize : bool
        Whether tensors that are quantized already may be quantized.
    """
    if not isinstance(place.format, OnnxFormat) or view.attachments.graph is None:
        return view
    format = place.format.for_attachments(view.attachments)
    names = _planned(view, format, planned) if planned else _wanted(view, format, recipe, requantize=requantize)
    return transpose(view, names) if names else view


def _planned(view: Checkpoint, format: OnnxFormat, planned: Collection[str]) -> Mapping[str, str]:
    names = {}
    for name in view:
        others = (format.turned_name(name, bits) for bits in (4, 8))
        other = next((found for found in others if found in planned), None)
        if name not in planned and other is not None:
            names[name] = other
    return names


def _wanted(view: Checkpoint, format: OnnxFormat, recipe: Recipe | None, *, requantize: bool) -> Mapping[str, str]:
    if recipe is None:
        return {}
    layers = layers_of(view)
    names = {}
    for name, tensor in view.items():
        if format.turned_name(name, _BITS) is None or tensor.codec not in CODECS:
            continue
        choice = decide(view, name, recipe, layers, turned=True).choice
        if not isinstance(choice, Choice) or choice.quantizer is not None:  # that one has rounded it as it lies
            continue
        other = None
        if format.is_turned(name) and choice.codec == DenseLayout.codec:
            other = format.turned_name(name, _BITS)
        elif not format.is_turned(name) and choice.codec == AffineLayout.codec:
            bits = choice.options.get("bits", _BITS)
            group = choice.options.get("group", "row" if bits == 8 else 128)
            # For another grid a graph has DequantizeLinear alone, which takes the matrix as it is.
            if group in ("row", *BLOCKS) and (requantize or CODECS[tensor.codec].lossless):
                other = format.turned_name(name, bits if isinstance(bits, int) else _BITS)
        if other is not None:
            names[name] = other
    return names


def as_weights(view: Checkpoint, place: Destination) -> Checkpoint:
    """Return the checkpoint with matrices of integers under their names as weights, for who goes by names.

    Those of ``MatMulNBits`` as they are; those of ``DequantizeLinear`` that ``MatMul`` multiplies with, turned. Folders
    of packed layers and GGUF have such matrices, [outputs, inputs], under names that end in ``.weight``.
    """
    if view.format != OnnxFormat.name or not _goes_by_names(place.format):
        return view
    format = OnnxFormat().for_attachments(view.attachments)
    coded = {name for name in view if format.turned_name(name, _BITS) and transpose_codes(view[name]) is not None}
    packed = [name for name in view if format.is_turned(name) or name in coded]
    wanted = {name: _weight(format.original_name(name), view.aliases.get(name)) for name in packed}
    counts = Counter(wanted.values())
    names = {name: new for name, new in wanted.items() if (new == name or new not in view) and counts[new] == 1}
    turned = {name: new for name, new in names.items() if name in coded and not format.is_turned(name)}
    view = transpose(view, turned) if turned else view
    names = {name: new for name, new in names.items() if name not in turned and new != name}
    return rename(view, names) if names else view


def _weight(name: str, told: str | None) -> str:
    """Return the name of a weight; where its own says nothing, that of the operator which uses it."""
    return told if told and not name.endswith(_WEIGHT) and told.endswith(_WEIGHT) else name


def _goes_by_names(format: Format) -> bool:
    return bool(format.traits.config_keys) or format.name == GgufFormat.name


def facing(view: Checkpoint, other: Checkpoint) -> Checkpoint:
    """Return the checkpoint with matrices of ``MatMulNBits`` as MatMul has them, where the other has them so.

    A matrix that has the same name before it was packed is another one, turned: compared as they are, equal ones would
    differ.
    """
    format = FORMATS[view.format]
    if not isinstance(format, OnnxFormat) or view.attachments.graph is None or _goes_by_names(FORMATS[other.format]):
        return view
    format = format.for_attachments(view.attachments)
    found = {name: format.turned_name(name, _BITS) for name in view if format.is_turned(name) and name not in other}
    names = {
        name: dense
        for name, dense in found.items()
        if dense is not None and dense in other and other[dense].shape == view[name].shape[::-1]
    }
    return transpose(view, names) if names else view
