"""A builder of new ML programs and their packages; weights have no values yet."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from ingot.core.parsing.wire import bytes_field, map_entry, number_field, varint
from ingot.formats.coreml.blob import header, metadata
from ingot.formats.coreml.layout import FileEnd
from ingot.formats.coreml.mil import ATTRIBUTES, INPUTS, OPERATIONS, OUTPUTS, TYPE
from ingot.formats.coreml.package import MANIFEST, MODEL_PATH
from ingot.formats.coreml.template import Template
from ingot.formats.coreml.types import BOOL, BY_NAME, MilType
from ingot.formats.coreml.values import (
    encode_blob,
    encode_flag,
    encode_flags,
    encode_immediate,
    encode_text,
    encode_type,
)
from ingot.model.bytesource import ByteSource, MemorySource
from ingot.model.part import Part

# Specification version and opset; FLOAT16 arrays as inputs begin with iOS 16.
OPSETS = {"iOS16": (7, "CoreML6"), "iOS17": (8, "CoreML7"), "iOS18": (9, "CoreML8")}
FP16 = BY_NAME["fp16"]
FP32 = BY_NAME["fp32"]
INT32 = BY_NAME["int32"]
_FOLDER = "com.apple.CoreML"
_MODEL = "model.mlmodel"
_WEIGHTS = "weights/weight.bin"
_ARRAY_TYPES = {"fp16": 65552, "int32": 131104}  # ArrayFeatureType.ArrayDataType
_OF_DTYPE = {"float16": FP16, "float32": FP32, "int32": INT32}

Shape = tuple[int, ...]
FlexibleShape = tuple[int | None, ...]
"""A shape; a size of None is determined when the program runs."""


@dataclass(frozen=True, slots=True)
class Feature:
    """An input, output or state of the model; a size of None may be any number from 1 to ``longest``."""

    name: str
    type: MilType
    shape: FlexibleShape
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs, outputs and states of a model, and its metadata for the program that runs it."""

    inputs: Sequence[Feature]
    outputs: Sequence[Feature]
    states: Sequence[Feature] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


class Builder:
    """A builder of a program with one function. Methods that add an operation return the name of its output.

    Parameters
    ----------
    opset : {"iOS16", "iOS17", "iOS18"}
    """

    def __init__(self, opset: str) -> None:
        self.version, self._opset = OPSETS[opset]
        self._operations: list[bytes] = []
        self._end = FileEnd()
        self._blobs = list[tuple[int, bytes]]()

    def weight(self, name: str, shape: Shape) -> str:
        """Add a dense fp16 constant with undefined values in the weight file, which becomes a tensor."""
        offset = self._end.take(FP16.nbytes(prod(shape)))
        self._blobs.append((offset, metadata(offset, FP16, prod(shape))))
        return self._const(name, encode_blob(FP16, shape, MODEL_PATH + _WEIGHTS, offset), encode_type(FP16, shape))

    def constant(self, name: str, values: np.ndarray[Any, Any] | np.generic) -> str:
        """Add f16, f32 or int32 values to the program itself; a recipe cannot change them."""
        array = np.asarray(values)
        type = _OF_DTYPE[array.dtype.name]
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        return self._const(name, encode_immediate(type, array.shape, data), encode_type(type, array.shape))

    def text(self, name: str, text: str) -> str:
        """Add a string constant to the program; return its name."""
        return self._const(name, encode_text(text), bytes_field(1, number_field(1, 2)))

    def flag(self, name: str, value: bool) -> str:
        """Add a bool constant to the program; return its name."""
        return self._const(name, encode_flag(value), encode_type(BOOL, ()))

    def flags(self, name: str, values: Sequence[bool]) -> str:
        """Add a vector of bools to the program; return its name."""
        return self._const(name, encode_flags(values), encode_type(BOOL, (len(values),)))

    def write_state(self, name: str, state: str, value: str) -> None:
        """Add the operation ``name``, which stores a value in a state of the model."""
        self._operations.append(_operation("write_state", [], {}, {"input": state, "data": value}, name))

    def add(
        self,
        operation: str,
        name: str,
        inputs: Mapping[str, str | Sequence[str]],
        shape: FlexibleShape,
        type: MilType = FP16,
    ) -> str:
        """Add an operation with one output; return the output's name."""
        return self.several(operation, [name], inputs, [shape], type)[0]

    def several(
        self,
        operation: str,
        names: Sequence[str],
        inputs: Mapping[str, str | Sequence[str]],
        shapes: Sequence[FlexibleShape],
        type: MilType = FP16,
    ) -> list[str]:
        """Add an operation with the outputs ``names``, and return them; the first one is also the operation's name."""
        outputs = zip(names, (encode_type(type, shape) for shape in shapes), strict=True)
        self._operations.append(_operation(operation, list(outputs), {}, inputs))
        return list(names)

    def _const(self, name: str, value: bytes, type: bytes) -> str:
        self._operations.append(_operation("const", [(name, type)], {"val": value}, {}))
        return name

    def template(self, interface: Interface) -> Template:
        """Return the package; the same program always gives the same bytes."""
        weights = _Blank(self._end.end, [(0, header(self._end.count)), *self._blobs], _WEIGHTS)
        model = (
            number_field(1, self.version)
            + bytes_field(2, _description(interface))
            + bytes_field(502, self._program(interface))
        )
        files = {MANIFEST: _manifest(), f"Data/{_FOLDER}/{_MODEL}": model}
        parts = {path: Part("u8", len(data), MemorySource(data, path)) for path, data in files.items()}
        parts[f"Data/{_FOLDER}/{_WEIGHTS}"] = Part("u8", weights.size, weights)
        return Template(parts)

    def _program(self, interface: Interface) -> bytes:
        block = b"".join(bytes_field(2, item.name) for item in interface.outputs)
        block += b"".join(bytes_field(OPERATIONS, item) for item in self._operations)
        types = [(item.name, encode_type(item.type, item.shape)) for item in interface.inputs]
        types += [
            (item.name, bytes_field(5, bytes_field(1, encode_type(item.type, item.shape)))) for item in interface.states
        ]
        encoded_inputs = b"".join(bytes_field(1, bytes_field(1, name) + bytes_field(2, type)) for name, type in types)
        function = encoded_inputs + bytes_field(2, self._opset) + map_entry(3, self._opset, block)
        return number_field(1, 1) + map_entry(2, "main", function)


def _operation(
    type: str,
    outputs: Sequence[tuple[str, bytes]],
    attributes: Mapping[str, bytes],
    inputs: Mapping[str, str | Sequence[str]],
    name: str = "",
) -> bytes:
    """Return an encoded operation with the name ``name``; by default, its name is that of its first output."""
    bound = b"".join(map_entry(INPUTS, key, _argument(encoded_outputs)) for key, encoded_outputs in inputs.items())
    encoded_outputs = b"".join(
        bytes_field(OUTPUTS, bytes_field(1, name) + bytes_field(2, type)) for name, type in outputs
    )
    named = {"name": encode_text(name or outputs[0][0]), **attributes}
    encoded_attributes = b"".join(map_entry(ATTRIBUTES, key, value) for key, value in named.items())
    return bytes_field(TYPE, type) + bound + encoded_outputs + encoded_attributes


def _argument(names_or_name: str | Sequence[str]) -> bytes:
    names = [names_or_name] if isinstance(names_or_name, str) else names_or_name
    return b"".join(bytes_field(1, bytes_field(1, name)) for name in names)


def _manifest() -> bytes:
    """Return the manifest, which lists the model file and the folder of weights.

    Identifiers depend only on paths, so that equal programs have equal bytes.
    """
    items = {"model.mlmodel": "CoreML Model Specification", "weights": "CoreML Model Weights"}
    names = {name: str(uuid.uuid5(uuid.NAMESPACE_URL, f"{_FOLDER}/{name}")) for name in items}
    entries = {
        names[name]: {"author": _FOLDER, "description": text, "name": name, "path": f"{_FOLDER}/{name}"}
        for name, text in items.items()
    }
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": names[_MODEL]}
    return (json.dumps(manifest, indent=4) + "\n").encode()


def _description(interface: Interface) -> bytes:
    """Return the encoded ModelDescription."""

    def array(item: Feature) -> bytes:
        flexible = None in item.shape
        if flexible and not item.longest:  # an output, whose size follows from the inputs
            return number_field(2, _ARRAY_TYPES[item.type.name])
        sizes = bytes_field(1, b"".join(varint(1 if size is None else size) for size in item.shape))
        ranges = b"".join(
            bytes_field(1, number_field(1, size or 1) + number_field(2, size or item.longest)) for size in item.shape
        )
        described = sizes + number_field(2, _ARRAY_TYPES[item.type.name])
        return described + (bytes_field(31, ranges) if flexible else b"")

    def feature(item: Feature, type: bytes) -> bytes:
        return bytes_field(1, item.name) + bytes_field(3, type)

    encoded = b"".join(bytes_field(1, feature(item, bytes_field(5, array(item)))) for item in interface.inputs)
    encoded += b"".join(bytes_field(10, feature(item, bytes_field(5, array(item)))) for item in interface.outputs)
    states = [feature(item, bytes_field(8, bytes_field(1, array(item)))) for item in interface.states]
    encoded += b"".join(bytes_field(13, item) for item in states)
    metadata = b"".join(map_entry(100, key, value.encode()) for key, value in interface.metadata.items())
    return encoded + (bytes_field(100, metadata) if metadata else b"")


class _Blank:
    """A weight file whose bytes are zeros except in ``segments``; it takes no memory, whatever its size."""

    mapped = False

    def __init__(self, size: int, segments: Sequence[tuple[int, bytes]], name: str) -> None:
        self.size = size
        self.name = name
        self._segments = segments

    def view(self, offset: int, length: int) -> memoryview:
        out = bytearray(length)
        self.readinto(offset, memoryview(out))
        return memoryview(out)

    def readinto(self, offset: int, out: memoryview) -> None:
        out[:] = bytes(out.nbytes)
        for start, data in self._segments:
            first = max(start, offset)
            last = min(start + len(data), offset + out.nbytes)
            if first < last:
                out[first - offset : last - offset] = data[first - start : last - start]

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there is no file."""


_: type[ByteSource] = _Blank
