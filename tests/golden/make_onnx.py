"""Make the golden corpus of ONNX: tests/golden/onnx/{valid,reject}.

    python -m tests.golden.make_onnx [FOLDER]

The models are put together by hand. The name of a file in ``reject`` is the rule that refuses it, two dashes, and what
is special about it; ``w.bin``, of 8 bytes, lies beside them. What the packages onnx and onnxruntime write is in
``peers`` (``make_onnx_peers.py``).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ingot
from ingot.core.parsing.wire import bytes_field, number_field, varint
from ingot.formats.onnx.graph import INITIALIZERS
from ingot.formats.onnx.types import TYPES
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from tests.support.onnx import Graph, outside, packed, sample, tensor, within

FOLDER = Path(__file__).parent / "onnx"


def with_item(item: bytes) -> bytes:
    return Graph(fields=[bytes_field(INITIALIZERS, item)]).model()


def place(location: str, **entries: str) -> bytes:
    pairs = {"location": location, **entries}
    fields = b"".join(bytes_field(13, bytes_field(1, key) + bytes_field(2, value)) for key, value in pairs.items())
    return with_item(tensor("w", "float", (2,), None, fields + number_field(14, 1)))


def deep(depth: int) -> bytes:
    graph = b""
    for _ in range(depth):
        attribute = bytes_field(1, "body") + bytes_field(6, graph)
        graph = bytes_field(1, bytes_field(4, "Loop") + bytes_field(5, attribute))
    return number_field(1, 10) + bytes_field(7, graph)


def every_type() -> bytes:
    """Return a constant of each element type."""
    graph = Graph()
    for type in TYPES:
        graph.raw(type.name, type.name, (3, 2), bytes(index % 2 for index in range(type.nbytes(6))))
    return graph.model()


def valid() -> dict[str, bytes]:
    """Models that must open."""
    return {
        "every-type": every_type(),
        "sample": sample(16, 8).model(),
        "within": within(8).model(),
        "packed": packed(4, 33, 4, 16, zeros=True).model(),
        "beside": with_item(outside("w", "float", (1,), "w.bin", 4, 4)),
        "empty": Graph().model(),
    }


def reject() -> dict[str, bytes]:
    """Models that must be refused."""
    return {
        "no-graph--nothing": number_field(1, 8),
        "wire--group": sample().model() + b"\x0b",
        "wire--endless-number": b"\x08" + b"\xff" * 11,
        "wire--cut": sample().model()[:-1],
        "wire--length-past-end": varint(7 << 3 | 2) + varint((1 << 63) - 1),
        "wire--graph-that-is-a-number": number_field(7, 1),
        "repeated-field--two-graphs": bytes_field(7, b"") * 2,
        "repeated-field--two-types": with_item(tensor("w", "float", (), bytes(4), number_field(2, 1))),
        "opset--two-opsets": sample().model() + bytes_field(8, number_field(2, 3)),
        "utf8--text": with_item(b"\x42\x01\xff"),
        "depth--deep": deep(70),
        "name--no-name": with_item(tensor("", "float", (), bytes(4))),
        "duplicate-name--twice": Graph(fields=[bytes_field(5, tensor("w", "int8", (), b"1"))] * 2).model(),
        "type--type": with_item(number_field(2, 99) + bytes_field(8, "w")),
        "shape--large": with_item(tensor("w", "float", (1 << 40, 1 << 40), b"")),
        "shape--large-and-zero": with_item(tensor("w", "float", (1 << 40, 1 << 40, 0), b"")),
        "shape--negative": with_item(tensor("w", "float", (-1,), b"")),
        "shape--rank": with_item(tensor("w", "float", (1,) * 65, bytes(4))),
        "data--segment": with_item(tensor("w", "float", (), bytes(4), bytes_field(3, b""))),
        "data--both": with_item(tensor("w", "float", (), bytes(4), bytes_field(4, bytes(4)))),
        "data--other-field": with_item(tensor("w", "float", (), None, bytes_field(7, b"\1"))),
        "data--raw-and-beside": with_item(tensor("w", "float", (), bytes(4), number_field(14, 1))),
        "data-size--short": with_item(tensor("w", "float", (2,), bytes(7))),
        "data-size--none": with_item(tensor("w", "float", (2,), None)),
        "data-size--fewer-numbers": with_item(tensor("w", "int8", (2,), None, bytes_field(5, b"\1"))),
        "external-path--parent": place("../w.bin"),
        "external-path--inner-parent": place("a/../../w.bin"),
        "external-path--absolute": place("/etc/passwd"),
        "external-path--drive": place("C:/w.bin"),
        "external-path--backslash": place("a\\w.bin"),
        "external-path--no-place": place(""),
        "external-path--itself": place("external-path--itself.onnx"),
        "external-missing--missing": place("no.bin"),
        "external-size--past-end": place("w.bin", offset="1", length="8"),
        "external-size--other-length": place("w.bin", length="4"),
        "external-entry--offset": place("w.bin", offset="-1"),
        "external-entry--huge-offset": place("w.bin", offset=str(1 << 63)),
        "external-entry--entry-twice": with_item(
            tensor("w", "float", (), None, bytes_field(13, b"") * 2 + number_field(14, 1))
        ),
    }


def corpus() -> dict[str, bytes]:
    """Every file of the corpus: path under the folder to bytes."""
    files = {f"valid/{name}.onnx": data for name, data in valid().items()}
    files |= {f"reject/{name}.onnx": data for name, data in reject().items()}
    return files | {f"{part}/w.bin": bytes(range(8)) for part in ("valid", "reject")}


WRITTEN: dict[str, dict[str, Any] | None] = {
    "nbits-4": {"bits": 4, "group": 16},
    "nbits-4-zeros": {"bits": 4, "group": 32, "symmetric": False},
    "nbits-8-row": {"bits": 8, "group": "row"},
    "linear-8": {"bits": 8, "group": "tensor"},
    "dense": None,
    "given-nbits-4": None,
    "given-fp8-blocks": None,
}
"""What Ingot makes of the peers' dense model by options of ``affine``; None for what it makes of one with codes."""
GIVEN, BLOCKS = "given-nbits-4", "given-fp8-blocks"


def write(name: str, path: Path) -> None:
    """Write one of ``WRITTEN``."""
    options, peers = WRITTEN[name], FOLDER / "peers"
    if name == GIVEN:  # the integers of another model, through another container
        with tempfile.TemporaryDirectory() as folder:
            ingot.convert(peers / "nbits-4-16-zeros.onnx", Path(folder) / "m.zt")
            ingot.convert(Path(folder) / "m.zt", path, graph=peers / "dense.onnx")
        return
    if name == BLOCKS:  # FP8 in blocks, [outputs, inputs], into a MatMul
        with tempfile.TemporaryDirectory() as folder:
            with ingot.open(peers / "dense.onnx") as checkpoint:
                ingot.save(Path(folder) / "m.zt", {"w": checkpoint["w"].numpy().T})
            rule = Rule(Choice("scaled_codebook", {"table": "f8_e4m3fn", "group": [8, 16]}), match=("w",))
            ingot.convert(Path(folder) / "m.zt", Path(folder) / "q.zt", recipe=Recipe("test", (rule,)))
            ingot.convert(Path(folder) / "q.zt", path, graph=peers / "dense.onnx")
        return
    if options is None:
        ingot.convert(peers / "nbits-4-16-zeros.onnx", path, recipe="decompress")
        return
    rule = Rule(Choice("affine", options), match=("w",))
    ingot.convert(peers / "dense.onnx", path, recipe=Recipe("test", (rule,)))


def main(folder: Path) -> None:
    """Write the corpus anew; what Ingot wrote is checked by ``make_onnx_peers.py``."""
    (folder / "written").mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        path = folder / "written" / f"{name}.onnx"
        path.unlink(missing_ok=True)
        write(name, path)
    for part in ("valid", "reject"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for name, data in corpus().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
