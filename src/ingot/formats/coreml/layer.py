"""A package of one linear or convolution layer, without its numbers: what a writer puts a weight into."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ingot.formats.coreml.blob import header, metadata
from ingot.formats.coreml.layout import FileEnd
from ingot.formats.coreml.mil import ATTRIBUTES, INPUTS, OPERATIONS, OUTPUTS, TYPE
from ingot.formats.coreml.package import MANIFEST, MODEL_PATH
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.types import BY_NAME, MilType
from ingot.formats.coreml.values import encode_blob, encode_immediate, encode_text, encode_type
from ingot.formats.coreml.wire import bytes_field, map_entry, number_field, varint
from ingot.model.bytesource import ByteSource, MemorySource
from ingot.model.part import Part

WEIGHT, BIAS = "weight", "bias"
# Specification version and opset; FLOAT16 arrays as inputs begin with iOS 16.
OPSETS = {"iOS16": (7, "CoreML6"), "iOS17": (8, "CoreML7"), "iOS18": (9, "CoreML8")}
_FOLDER = "com.apple.CoreML"
_MODEL, _WEIGHTS = "model.mlmodel", "weights/weight.bin"
_FLOAT16 = 65552  # ArrayFeatureType.ArrayDataType
_FP16, _INT32 = BY_NAME["fp16"], BY_NAME["int32"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer to be made.

    Parameters
    ----------
    shape : tuple of int
        Of the weight: [out, in] for a linear layer, [out, in, size, ...] with one or two sizes for a convolution.
    bias : bool
        Whether a bias of [out] is added.
    opset : {"iOS16", "iOS17", "iOS18"}
    spatial : tuple of int
        Sizes of a convolution's input beside batch (1) and channels.
    """

    shape: tuple[int, ...]
    bias: bool
    opset: str
    spatial: tuple[int, ...] = ()

    @property
    def input(self) -> tuple[int, ...]:
        """Shape of the input ``x``."""
        return (1, self.shape[1], *self.spatial)

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the output ``y``: no padding, stride 1."""
        sizes = (size - kernel + 1 for size, kernel in zip(self.spatial, self.shape[2:], strict=True))
        return (1, self.shape[0], *sizes)


def layer_template(layer: Layer) -> Template:
    """Return the package of a layer whose weight and bias are dense fp16 constants of no particular value."""
    end, blobs = FileEnd(), []
    offsets = {}
    for name, shape in ((WEIGHT, layer.shape), (BIAS, layer.shape[:1]))[: 2 if layer.bias else 1]:
        offset = end.take(_FP16.nbytes(prod(shape)))
        blobs.append((offset, metadata(offset, _FP16, prod(shape))))
        offsets[name] = (offset, shape)
    weights = _Blank(end.end, [(0, header(end.count)), *blobs], _WEIGHTS)
    version, opset = OPSETS[layer.opset]
    model = (
        number_field(1, version)
        + bytes_field(2, _description(layer))
        + bytes_field(502, _program(layer, opset, offsets))
    )
    files = {
        MANIFEST: _manifest(),
        f"Data/{_FOLDER}/{_MODEL}": model,
    }
    parts = {path: Part("u8", len(data), MemorySource(data, path)) for path, data in files.items()}
    parts[f"Data/{_FOLDER}/{_WEIGHTS}"] = Part("u8", weights.size, weights)
    return Template(parts)


def _manifest() -> bytes:
    """Name both items; the identifiers depend on the paths alone, so that a layer is always the same bytes."""
    items = {"model.mlmodel": "CoreML Model Specification", "weights": "CoreML Model Weights"}
    names = {name: str(uuid.uuid5(uuid.NAMESPACE_URL, f"{_FOLDER}/{name}")) for name in items}
    entries = {
        names[name]: {"author": _FOLDER, "description": text, "name": name, "path": f"{_FOLDER}/{name}"}
        for name, text in items.items()
    }
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": names[_MODEL]}
    return (json.dumps(manifest, indent=4) + "\n").encode()


def _description(layer: Layer) -> bytes:
    """Return the ModelDescription: fp16 arrays ``x`` and ``y``."""

    def feature(name: str, shape: Sequence[int]) -> bytes:
        sizes = bytes_field(1, b"".join(varint(size) for size in shape))
        return bytes_field(1, name) + bytes_field(3, bytes_field(5, sizes + number_field(2, _FLOAT16)))

    return bytes_field(1, feature("x", layer.input)) + bytes_field(10, feature("y", layer.output))


def _program(layer: Layer, opset: str, offsets: dict[str, tuple[int, tuple[int, ...]]]) -> bytes:
    operations = [
        _operation("const", name, _FP16, shape, {"val": encode_blob(_FP16, shape, MODEL_PATH + _WEIGHTS, offset)})
        for name, (offset, shape) in offsets.items()
    ]
    inputs = {"x": "x", **{name: name for name in offsets}}
    if len(layer.shape) > 2:
        operations += _settings(layer, inputs)
    kind = "linear" if len(layer.shape) == 2 else "conv"
    operations.append(_operation(kind, "y", _FP16, layer.output, {}, inputs))
    block = bytes_field(2, "y") + b"".join(bytes_field(OPERATIONS, item) for item in operations)
    given = bytes_field(1, bytes_field(1, "x") + bytes_field(2, encode_type(_FP16, layer.input)))
    function = given + bytes_field(2, opset) + map_entry(3, opset, block)
    return number_field(1, 1) + map_entry(2, "main", function)


def _settings(layer: Layer, inputs: dict[str, str]) -> list[bytes]:
    """Return the constants that a convolution needs beside its weight, and bind them."""
    rank = len(layer.spatial)
    numbers = {"strides": [1] * rank, "pad": [0] * (2 * rank), "dilations": [1] * rank}
    made = []
    for key, values in numbers.items():
        data = b"".join(value.to_bytes(4, "little") for value in values)
        value = encode_immediate(_INT32, (len(values),), data)
        made.append(_operation("const", f"y_{key}", _INT32, (len(values),), {"val": value}))
    made.append(_operation("const", "y_groups", _INT32, (), {"val": encode_immediate(_INT32, (), bytes([1, 0, 0, 0]))}))
    text = bytes_field(1, number_field(1, 2))
    outputs = bytes_field(OUTPUTS, bytes_field(1, "y_pad_type") + bytes_field(2, text))
    attributes = map_entry(ATTRIBUTES, "name", encode_text("y_pad_type"))
    attributes += map_entry(ATTRIBUTES, "val", encode_text("valid"))
    made.append(bytes_field(TYPE, "const") + outputs + attributes)
    inputs |= {key: f"y_{key}" for key in (*numbers, "groups", "pad_type")}
    return made


def _operation(
    kind: str,
    name: str,
    type: MilType,
    shape: tuple[int, ...],
    attributes: dict[str, bytes],
    inputs: dict[str, str] | None = None,
) -> bytes:
    bound = b"".join(
        map_entry(INPUTS, key, bytes_field(1, bytes_field(1, given))) for key, given in (inputs or {}).items()
    )
    output = bytes_field(OUTPUTS, bytes_field(1, name) + bytes_field(2, encode_type(type, shape)))
    named = {"name": encode_text(name), **attributes}
    return (
        bytes_field(TYPE, kind)
        + bound
        + output
        + b"".join(map_entry(ATTRIBUTES, key, value) for key, value in named.items())
    )


class _Blank:
    """A byte source of zeros but for a few pieces: a weight file without its numbers, however large."""

    mapped = False

    def __init__(self, size: int, pieces: Sequence[tuple[int, bytes]], name: str) -> None:
        self.size, self.name = size, name
        self._pieces = pieces

    def view(self, offset: int, length: int) -> memoryview:
        out = bytearray(length)
        self.readinto(offset, memoryview(out))
        return memoryview(out)

    def readinto(self, offset: int, out: memoryview) -> None:
        out[:] = bytes(out.nbytes)
        for start, data in self._pieces:
            first, last = max(start, offset), min(start + len(data), offset + out.nbytes)
            if first < last:
                out[first - offset : last - offset] = data[first - start : last - start]

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to do."""


_: type[ByteSource] = _Blank
