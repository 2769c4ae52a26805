"""One layer of a checkpoint as a Core ML package of its own (``spec/coreml.md``, "Writing")."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from ingot.core.atomic import Staging
from ingot.core.disk import require_disk
from ingot.errors import CodecError, UsageError
from ingot.formats.base import WriteOptions
from ingot.formats.coreml.format import CoremlFormat
from ingot.formats.coreml.layer import BIAS, OPSETS, WEIGHT, Layer, layer_template
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Tensor
from ingot.ops.open import open as open_checkpoint
from ingot.ops.replaceable import require_ours
from ingot.ops.save import as_tensor, plan_tensors, write_tensors
from ingot.stores.local import LocalTarget

AnyPath = str | PathLike[str]
SPATIAL = 32


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What was made: shapes of input and output, codec of the weight, whether numbers were rounded to f16."""

    path: str
    weight: str
    bias: str | None
    codec: str
    input: tuple[int, ...]
    output: tuple[int, ...]
    rounded: bool
    size: int


def extract_layer(
    path: AnyPath, name: str, out: AnyPath, *, opset: str = "iOS16", overwrite: bool = False
) -> LayerReport:
    """Make a package of the linear or convolution layer whose weight is the tensor ``name``.

    The weight keeps its codec where an operation of the opset says the same, else it is written as f16. The bias is the
    tensor beside it (``.bias`` for ``.weight``), if there is one. Input ``x`` and output ``y`` are f16 arrays with a
    batch of one; a convolution's input has 32 elements along each dimension (its kernel's, if that is more), its stride
    is 1, and nothing is padded.

    Raises
    ------
    UsageError
        ``tensor.unknown``; ``coreml.layer``: the tensor, its bias or the opset makes no layer.
    CodecError
        ``coreml.layer``: a value that f16 cannot hold.
    """
    if opset not in OPSETS:
        raise UsageError(f"expected the opset {', '.join(OPSETS)}, found {opset!r}", rule="coreml.layer")
    with open_checkpoint(path) as source:
        weight, bias = _tensors(source, name)
        spatial = tuple(max(SPATIAL, size) for size in weight.shape[2:])
        layer = Layer(weight.shape, bias is not None, opset, spatial)
        attachments, options = Attachments(program=layer_template(layer)), WriteOptions()
        target = CoremlFormat().fit(attachments)
        tensors, rounded = {}, False
        for role, tensor in ((WEIGHT, weight), (BIAS, bias)):
            if tensor is not None:
                tensors[role], loses = _carried(target, role, tensor)
                rounded |= loses
        planned = plan_tensors(target, tensors)
        artifact = Artifact([spec for _, spec in planned], attachments=attachments)
        size = target.size(artifact, options)
        with Staging(out, directory=True, overwrite=overwrite, require_ours=require_ours) as staging:
            require_disk(size, Path(out).absolute().parent, str(out))
            writer = target.writer(LocalTarget(staging.files), "", artifact, options)
            staging.publish(write_tensors(writer, planned))
        codec = tensors[WEIGHT].codec
    return LayerReport(
        str(out), name, bias.name if bias is not None else None, codec, layer.input, layer.output, rounded, size
    )


def _tensors(source: Checkpoint, name: str) -> tuple[Tensor, Tensor | None]:
    if name not in source:
        raise source.no_tensor(name)
    weight = source[name]
    stem = name.removesuffix(WEIGHT)
    bias = source.get(stem + BIAS) if stem != name else None
    if not 2 <= len(weight.shape) <= 4 or not weight.size:
        raise _no_layer(f"a weight of 2 to 4 dimensions, found {list(weight.shape)}", name)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise _no_layer(f"a bias of shape {list(weight.shape[:1])}, found {list(bias.shape)}", bias.name)
    return weight, bias


def _carried(target: CoremlFormat, role: str, tensor: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor under its name in the program, as it is stored or as f16; and whether that rounds."""
    stays = as_tensor(role, tensor)
    if target.refuses(stays.spec()) is None:
        return stays, False
    values = tensor.numpy("f32") if tensor.dtype != "f16" else tensor.numpy()
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    back = halves.astype(values.dtype)
    if not np.array_equal(np.isfinite(back), np.isfinite(values)):
        raise CodecError(
            "coreml.layer", "expected values that f16 can hold (up to 65504), found larger ones", where=tensor.name
        )
    return as_tensor(role, halves), not np.array_equal(back, values, equal_nan=True)


def _no_layer(expected: str, where: str) -> UsageError:
    return UsageError(f"expected {expected}", rule="coreml.layer", where=where)
