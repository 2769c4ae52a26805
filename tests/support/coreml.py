"""Core ML packages made by hand, well-formed or not: for tests and fuzzing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod

from ingot.core.parsing.wire import bytes_field, map_entry, number_field
from ingot.formats.coreml.blob import METADATA, align, header, metadata
from ingot.formats.coreml.mil import ATTRIBUTES, INPUTS, OUTPUTS, TYPE
from ingot.formats.coreml.types import BY_NAME
from ingot.formats.coreml.values import encode_blob, encode_immediate, encode_text, encode_type

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
FILE = "@model_path/weights/weight.bin"

Shape = tuple[int, ...]


@dataclass
class Package:
    """A program of one function, and its weight file, as they grow."""

    opset: str = "CoreML8"
    weights: bytearray = field(default_factory=lambda: bytearray(header(0)))
    operations: list[bytes] = field(default_factory=list)
    count: int = 0
    file: str = FILE

    def blob(self, kind: str, shape: Shape, data: bytes) -> bytes:
        """Store numbers; return the Value that names them."""
        type = BY_NAME[kind]
        offset = align(len(self.weights))
        self.weights.extend(bytes(offset - len(self.weights)))
        self.weights += metadata(offset, type, prod(shape)) + data
        self.count += 1
        self.weights[:METADATA] = header(self.count)
        return encode_blob(type, shape, self.file, offset)

    def now(self, kind: str, shape: Shape, data: bytes) -> bytes:
        """Return a Value with its numbers in the program."""
        return encode_immediate(BY_NAME[kind], shape, data)

    def add(
        self,
        type: str,
        name: str,
        output: tuple[str, Shape],
        attributes: dict[str, bytes] | None = None,
        inputs: dict[str, bytes | str] | None = None,
        extra: bytes = b"",
    ) -> None:
        """Append an operation; inputs are Values or names. ``extra`` are bytes behind its fields."""
        self.operations.append(operation(type, ((name, *output),), attributes, inputs) + extra)

    def block(self) -> bytes:
        """Return the function's block."""
        return b"".join(bytes_field(3, item) for item in self.operations) + bytes_field(2, "y")

    def function(self) -> bytes:
        """Return the function."""
        given = bytes_field(1, bytes_field(1, "x") + bytes_field(2, encode_type(BY_NAME["fp16"], (1,))))
        return given + bytes_field(2, self.opset) + map_entry(3, self.opset, self.block())

    def program(self) -> bytes:
        """Return the program."""
        return number_field(1, 1) + map_entry(2, "main", self.function())

    def model(self) -> bytes:
        """Return the model."""
        return number_field(1, 9) + bytes_field(502, self.program())

    def files(self, model: bytes | None = None) -> dict[str, bytes]:
        """Return the package."""
        return {
            "Manifest.json": manifest(),
            MODEL: self.model() if model is None else model,
            WEIGHTS: bytes(self.weights),
        }


def operation(
    type: str,
    outputs: tuple[tuple[str, str, Shape], ...],
    attributes: dict[str, bytes] | None = None,
    inputs: dict[str, bytes | str] | None = None,
) -> bytes:
    """Return an Operation message."""
    made = bytes_field(TYPE, type)
    for key, given in (inputs or {}).items():
        binding = bytes_field(1, given) if isinstance(given, str) else bytes_field(2, given)
        made += map_entry(INPUTS, key, bytes_field(1, binding))
    for name, kind, shape in outputs:
        made += bytes_field(OUTPUTS, bytes_field(1, name) + bytes_field(2, encode_type(BY_NAME[kind], shape)))
    named = {"name": encode_text(outputs[0][0]), **(attributes or {})}
    return made + b"".join(map_entry(ATTRIBUTES, key, value) for key, value in named.items())


def manifest(model: str = "com.apple.CoreML/model.mlmodel", weights: str = "com.apple.CoreML/weights") -> bytes:
    """Return a Manifest.json with these two items."""
    items = {"m": {"path": model, "name": "model.mlmodel"}, "w": {"path": weights, "name": "weights"}}
    return json.dumps(
        {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": "m"}, indent=4
    ).encode()


def sample() -> Package:
    """Return a package with a constant of each kind, iOS 18 forms."""
    made = Package()
    shape = (4, 8)
    made.add("const", "w", ("fp16", shape), {"val": made.blob("fp16", shape, bytes(range(64)))})
    data, scale = made.blob("int4", shape, bytes(range(16))), made.blob("fp16", (4, 4), b"\0<" * 16)
    offset = made.blob("int4", (4, 4), b"\x21" * 8)
    inputs: dict[str, bytes | str] = {"data": data, "scale": scale, "offset": offset}
    made.add("constexpr_blockwise_shift_scale", "q", ("fp16", shape), inputs=inputs)
    indices, lut = made.blob("uint3", shape, bytes(range(12))), made.blob("fp16", (2, 1, 8, 1), bytes(range(32)))
    made.add("constexpr_lut_to_dense", "p", ("fp16", shape), inputs={"indices": indices, "lut": lut})
    mask = made.blob("uint1", shape, b"\x0f\x01\x00\xff")
    kept = made.blob("fp16", (13,), bytes(range(26)))
    made.add("constexpr_sparse_to_dense", "s", ("fp16", shape), inputs={"mask": mask, "nonzero_data": kept})
    codes = made.blob("uint4", (13,), bytes(range(6)) + b"\x07")
    table = made.blob("fp16", (1, 1, 16, 1), bytes(range(32)))
    made.operations.append(
        operation(
            "constexpr_lut_to_sparse",
            (("t_0", "uint1", shape), ("t_1", "fp16", (13,))),
            inputs={"indices_mask": mask, "indices_nonzero_data": codes, "lut": table},
        )
    )
    made.add("constexpr_sparse_to_dense", "t", ("fp16", shape), inputs={"mask": "t_0", "nonzero_data": "t_1"})
    made.add("constexpr_cast", "c", ("fp32", (16,)), inputs={"source_val": made.blob("fp16", (16,), bytes(32))})
    _computed(made, shape)
    made.add("const", "b", ("fp16", (4,)), {"val": made.now("fp16", (4,), bytes(range(8)))})
    made.add("const", "u", ("uint4", shape), {"val": made.blob("uint4", shape, bytes(16))})
    made.add("add", "y", ("fp16", shape), inputs={"x": "w", "y": "q"})
    return made


def _computed(made: Package, shape: Shape) -> None:
    """Add palettes that the program scales, one for a tensor and one for two, and entries of eight numbers."""
    indices = made.blob("uint2", shape, bytes(range(8)))
    lut, scale = made.blob("fp16", (1, 8, 4, 1), bytes(range(64))), made.now("fp16", (1, 8, 1, 1), b"\0<" * 8)
    made.add("constexpr_blockwise_shift_scale", "f_0", ("fp16", (1, 8, 4, 1)), inputs={"data": lut, "scale": scale})
    made.add("constexpr_lut_to_dense", "f", ("fp16", shape), inputs={"indices": indices, "lut": "f_0"})
    codes = made.blob("uint4", (1, 1, 4, 1), b"\x21\x43")
    inputs: dict[str, bytes | str] = {"data": codes, "scale": made.now("fp16", (1, 1, 1, 1), b"\0<")}
    made.add("constexpr_blockwise_shift_scale", "g_0", ("fp16", (1, 1, 4, 1)), inputs=inputs)
    for name in ("g", "h"):
        indices = made.blob("uint2", shape, bytes([len(name)]) * 8)
        made.add("constexpr_lut_to_dense", name, ("fp16", shape), inputs={"indices": indices, "lut": "g_0"})
    inputs = {"indices": made.now("uint1", (4, 1), b"\5"), "lut": made.blob("fp16", (1, 1, 2, 8), bytes(range(32)))}
    inputs["vector_axis"] = made.now("int32", (), b"\1\0\0\0")
    made.add("constexpr_lut_to_dense", "v", ("fp16", shape), inputs=inputs)
