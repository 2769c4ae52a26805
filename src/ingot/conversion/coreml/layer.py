"""Writing of one layer of a checkpoint as a Core ML package (``spec/coreml.md``, "Writing")."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.artifacts.extract_options import LayerOptions
from ingot.conversion.coreml.program import Execution, open_for_package, with_program
from ingot.core.options import takes
from ingot.errors import CodecError, UsageError
from ingot.formats.coreml.layer import BIAS, OPSETS, WEIGHT, Layer
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Tensor
from ingot.stores.location import Location
from ingot.views.names import rename, select

SPATIAL = 32


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The written package: shapes of input and output, codec of the weight, and whether values were rounded to f16."""

    path: str
    weight: str
    bias: str | None
    codec: str
    input: tuple[int, ...]
    output: tuple[int, ...]
    rounded: bool
    size: int


@takes(LayerOptions, "extract")
def extract_layer(options: LayerOptions) -> LayerReport:
    """Write a package with the linear or convolution layer whose weight is the tensor ``name``.

    The weight keeps its codec if the opset has an operation for it, else it is written as f16. The bias is the tensor
    with ``.bias`` instead of ``.weight`` in its name, if there is one. Input ``x`` and output ``y`` are f16 arrays with
    a batch size of 1. The input of a convolution has 32 elements along each spatial dimension, or the size of a
    larger kernel; the convolution has stride 1 and no padding.

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``coreml.layer``: a wrong shape of the tensor or its bias, or an unknown opset.
    CodecError
        ``coreml.layer``: a value beyond the range of f16.
    """
    name = options.name
    opset = options.opset
    if opset not in OPSETS:
        raise UsageError(f"expected the opset {', '.join(OPSETS)}, found {opset!r}", rule="coreml.layer")
    with open_for_package(options.path, options.out) as package:
        weight, bias = _tensors(package.checkpoint, name)
        spatial = tuple(max(SPATIAL, size) for size in weight.shape[2:])
        layer = Layer(weight.shape, bias is not None, opset, spatial)
        roles = {weight.name: WEIGHT, **({} if bias is None else {bias.name: BIAS})}
        view = with_program(rename(select(package.checkpoint, roles), roles), layer)
        try:
            report = package.write(view, Execution(overwrite=options.overwrite))
        except CodecError as error:
            raise CodecError("coreml.layer", error.message, where=name) from error
    codecs = {item.name: item.codec for item in report.tensors}
    rounded = any(item.error is not None and item.error["rms"] > 0 for item in report.tensors)
    return LayerReport(
        path=Location.parse(options.out).display,
        weight=name,
        bias=bias.name if bias is not None else None,
        codec=codecs[WEIGHT],
        input=layer.input,
        output=layer.output,
        rounded=rounded,
        size=report.size,
    )


def _tensors(source: Checkpoint, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the weight ``name`` and its bias, if any; raise ``tensor.unknown`` or ``coreml.layer``."""
    if name not in source:
        raise source.no_tensor(name)
    weight = source[name]
    stem = name.removesuffix(WEIGHT)
    bias = source.get(stem + BIAS) if stem != name else None
    if not 2 <= len(weight.shape) <= 4 or not weight.size:
        raise _layer_error(f"a weight of 2 to 4 dimensions, found {list(weight.shape)}", name)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _layer_error(f"a bias of shape {list(weight.shape[:1])}, found {list(bias.shape)}", bias.name)
    return weight, bias


def _layer_error(expected: str, name: str) -> UsageError:
    return UsageError(f"expected {expected}", rule="coreml.layer", where=name)
