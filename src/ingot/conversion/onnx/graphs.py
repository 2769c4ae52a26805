"""Transposition of matrices of an ONNX graph for its operators.

``MatMulNBits`` takes codes as [outputs, inputs]; ``MatMul`` and ``DequantizeLinear`` take [inputs, outputs].
"""

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
_BITS = 4  # the default of the affine codecs if a recipe declares no bits


def transpose_for_graph(
    view: Checkpoint, target: Destination, recipe: Recipe | None, planned: Collection[str], *, requantize: bool
) -> Checkpoint:
    """Return the checkpoint with matrices transposed for the graph's operators; the same checkpoint if none is.

    Parameters
    ----------
    view : Checkpoint
    target : Destination
        For other formats than ONNX no matrix is transposed.
    recipe : Recipe or None
        The recipe whose decisions determine which matrices are transposed.
    planned : collection of str
        The tensor names of an earlier plan. If there are any, they determine it instead of the recipe.
    requantize : bool
        Whether tensors that are already quantized may be quantized.
    """
    if not isinstance(target.format, OnnxFormat) or view.attachments.graph is None:
        return view
    format = target.format.for_attachments(view.attachments)
    if planned:
        names = _names_by_plan(view, format, planned)
    else:
        names = _names_by_recipe(view, format, recipe, requantize=requantize)
    return transpose(view, names) if names else view


def _names_by_plan(view: Checkpoint, format: OnnxFormat, planned: Collection[str]) -> Mapping[str, str]:
    """Return old and new name of each matrix that the plan stores as its transpose, under another name."""
    names = {}
    for name in view:
        transposed = (format.turned_name(name, bits) for bits in (4, 8))
        new_name = next((candidate for candidate in transposed if candidate in planned), None)
        if name not in planned and new_name is not None:
            names[name] = new_name
    return names


def _names_by_recipe(
    view: Checkpoint, format: OnnxFormat, recipe: Recipe | None, *, requantize: bool
) -> Mapping[str, str]:
    """Return old and new name of each matrix that must be transposed for the recipe's decision on it."""
    if recipe is None:
        return {}
    layers = layers_of(view)
    names = {}
    for name, tensor in view.items():
        if format.turned_name(name, _BITS) is None or tensor.codec not in CODECS:
            continue
        choice = decide(view, name, recipe, layers, transposed=True).choice
        if not isinstance(choice, Choice) or choice.quantizer is not None:  # a quantizer has rounded it untransposed
            continue
        new_name = None
        if format.is_turned(name) and choice.codec == DenseLayout.codec:
            new_name = format.turned_name(name, _BITS)
        elif not format.is_turned(name) and choice.codec == AffineLayout.codec:
            bits = choice.options.get("bits", _BITS)
            group = choice.options.get("group", "row" if bits == 8 else 128)
            # For other group sizes a graph uses DequantizeLinear, which takes the matrix untransposed.
            if group in ("row", *BLOCKS) and (requantize or CODECS[tensor.codec].lossless):
                new_name = format.turned_name(name, bits if isinstance(bits, int) else _BITS)
        if new_name is not None:
            names[name] = new_name
    return names


def with_weight_names(view: Checkpoint, target: Destination) -> Checkpoint:
    """Return the checkpoint of a graph with integer matrices named and oriented as in model folders.

    Folders of packed layers and GGUF have these matrices as [outputs, inputs] under names that end in ``.weight``.
    Codes of ``MatMulNBits`` have this orientation; those of ``DequantizeLinear`` before a ``MatMul`` are transposed.
    For other targets the checkpoint itself is returned.
    """
    if view.format != OnnxFormat.name or not _selects_by_names(target.format):
        return view
    format = OnnxFormat().for_attachments(view.attachments)
    coded = {name for name in view if format.turned_name(name, _BITS) and transpose_codes(view[name]) is not None}
    packed = [name for name in view if format.is_turned(name) or name in coded]
    new_names = {name: _weight_name(format.original_name(name), view.aliases.get(name)) for name in packed}
    counts = Counter(new_names.values())
    names = {name: new for name, new in new_names.items() if (new == name or new not in view) and counts[new] == 1}
    transposed = {name: new for name, new in names.items() if name in coded and not format.is_turned(name)}
    view = transpose(view, transposed) if transposed else view
    names = {name: new for name, new in names.items() if name not in transposed and new != name}
    return rename(view, names) if names else view


def _weight_name(name: str, alias: str | None) -> str:
    """Return the alias of a matrix if only that ends in ``.weight``, else its name."""
    return alias if alias and not name.endswith(_WEIGHT) and alias.endswith(_WEIGHT) else name


def _selects_by_names(format: Format) -> bool:
    """Return whether a format requires matrices under the names of a model folder or of llama.cpp."""
    return bool(format.traits.config_keys) or format.name == GgufFormat.name


def align_orientation(view: Checkpoint, reference: Checkpoint) -> Checkpoint:
    """Return the checkpoint with codes of ``MatMulNBits`` transposed if ``reference`` has them transposed.

    Matrices correspond if the reference's matrix has the original name of the packed one and its transposed shape.
    Without this step, a comparison would report equal matrices as different.
    """
    format = FORMATS[view.format]
    if (
        not isinstance(format, OnnxFormat)
        or view.attachments.graph is None
        or _selects_by_names(FORMATS[reference.format])
    ):
        return view
    format = format.for_attachments(view.attachments)
    dense_names = {
        name: format.turned_name(name, _BITS) for name in view if format.is_turned(name) and name not in reference
    }
    names = {
        name: dense
        for name, dense in dense_names.items()
        if dense is not None and dense in reference and reference[dense].shape == view[name].shape[::-1]
    }
    return transpose(view, names) if names else view
