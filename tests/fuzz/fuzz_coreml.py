"""Fuzzes the reader of Core ML packages: protobuf, blob storage, manifest.

Anything opens, decodes and is written again, or ends in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_coreml -max_total_time=600

The sample of ``tests.support.coreml`` is the seed; findings are written to the current folder as crash-*. A finding is
replayed by ``python -m tests.fuzz.fuzz_coreml crash-...``. By its first byte an input is a model, a weight file, a
manifest, or a series of choices that change bytes of the sample or make operations with parameters of the right kinds.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris

from ingot.artifacts.save import plan_tensors, write_tensors
from ingot.codecs.table import CODECS
from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.coreml.format import CoremlFormat
from ingot.formats.coreml.reader import read_package
from ingot.formats.coreml.types import BY_NAME
from ingot.model.artifact import Artifact
from ingot.stores.memory import MemoryStore, MemoryTarget
from tests.support.coreml import MODEL, WEIGHTS, Package, sample

MAX_DECODED = 1 << 20
NUMBERS = [0, 1, 2, 4, 7, 8, 63, 64, 65, 127, 128, 255]
SIZES = [0, 1, 2, 3, 4, 8, 16, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]
KEYS = ["data", "scale", "offset", "quantized_data", "zero_point", "axis", "indices", "lut", "shape", "vector_axis"]
KEYS += ["nonzero_data", "mask", "indices_mask", "indices_nonzero_data", "data_mask", "val", "source_val"]
KINDS = [
    "const",
    "constexpr_cast",
    "constexpr_affine_dequantize",
    "constexpr_blockwise_shift_scale",
    "constexpr_lut_to_dense",
]
KINDS += ["constexpr_sparse_to_dense", "constexpr_lut_to_sparse", "constexpr_sparse_blockwise_shift_scale", "add"]
GOOD = sample().files()


def read_all(files: dict[str, bytes]) -> None:
    """Open, list, decode every tensor, write the package again; what was kept has to be the same."""
    catalog = read_package(MemoryStore(files))
    catalog.details()
    for tensor in catalog.tensors.values():
        repr(tensor)
        tensor.decoder = CODECS[tensor.codec]
        if tensor.size <= MAX_DECODED:
            attempt(lambda tensor=tensor: CODECS[tensor.codec].decode(tensor, "f32"))
    attempt(lambda: write_again(catalog))


def write_again(catalog: Any) -> None:
    target = MemoryTarget()
    format = CoremlFormat().for_attachments(catalog.attachments)
    planned = plan_tensors(format, catalog.tensors)
    artifact = Artifact([spec for _, spec in planned], attachments=catalog.attachments)
    writer = format.writer(target, "", artifact, WriteOptions())
    write_tensors(writer, planned)
    again = read_package(MemoryStore(target.files))
    for name, tensor in catalog.tensors.items():
        other = again.tensors[name]
        if (tensor.codec, tensor.shape, tensor.params) != (other.codec, other.shape, other.params):
            raise AssertionError(f"{tensor!r} became {other!r}")


def attempt(call: Any) -> None:
    """Call; an error must be one of Ingot's, with a rule, in one line."""
    try:
        call()
    except IngotError as error:
        if not error.rule or "\n" in str(error):
            raise AssertionError(f"an error without a rule, or of several lines: {error!r}") from error


def chosen(data: Any) -> dict[str, bytes]:
    """The sample with a few bytes changed."""
    files = {name: bytearray(body) for name, body in GOOD.items()}
    for _ in range(data.ConsumeIntInRange(1, 6)):
        body = files[data.PickValueInList([MODEL, MODEL, MODEL, WEIGHTS, WEIGHTS, "Manifest.json"])]
        at = data.ConsumeIntInRange(0, len(body) - 1)
        what = data.ConsumeIntInRange(0, 3)
        if what == 0:
            body[at] = data.PickValueInList(NUMBERS)
        elif what == 1:
            body[at] ^= 1 << data.ConsumeIntInRange(0, 7)
        elif what == 2:
            del body[at : at + data.ConsumeIntInRange(1, 8)]
            body += b"\0" * (not body)
        else:
            body[at:at] = data.ConsumeBytes(4)
    return {name: bytes(body) for name, body in files.items()}


def made(data: Any) -> dict[str, bytes]:
    """Operations with parameters of any type and shape, most of them with as many bytes as they should have."""
    package = Package(data.PickValueInList(["CoreML5", "CoreML6", "CoreML8", "other"]))
    names = ["x"]
    for index in range(data.ConsumeIntInRange(1, 4)):
        params: dict[str, Any] = {}
        for _ in range(data.ConsumeIntInRange(0, 5)):
            params[data.PickValueInList(KEYS)] = value(data, package, names)
        inputs = params if data.ConsumeBool() else {}
        attributes = {} if inputs else {key: one for key, one in params.items() if isinstance(one, bytes)}
        output = (data.PickValueInList(list(BY_NAME)), shape(data))
        package.add(data.PickValueInList(KINDS), f"n{index}", output, attributes, inputs)
        names.append(f"n{index}")
    return package.files()


def shape(data: Any) -> tuple[int, ...]:
    return tuple(
        data.PickValueInList(SIZES[: data.PickValueInList([7, 7, 7, 12])]) for _ in range(data.ConsumeIntInRange(0, 4))
    )


def value(data: Any, package: Package, names: list[str]) -> bytes | str:
    what = data.ConsumeIntInRange(0, 5)
    if what == 0:
        return str(data.PickValueInList(names))
    kind, dims = data.PickValueInList(list(BY_NAME)), shape(data)
    count = 1
    for size in dims:
        count *= size
    length = min(BY_NAME[kind].nbytes(count), 4096) + (data.ConsumeIntInRange(-1, 1) if what == 1 else 0)
    body = data.ConsumeBytes(min(max(length, 0), 16)).ljust(max(length, 0), b"\1")
    if what < 3:
        return package.now(kind, dims, body[: len(body) // 4 * 4])
    if count > 1 << 32:
        return b""
    return package.blob(kind, dims, body)


def test_one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    kind, rest = data[:1] or b"\0", data[1:]
    if kind < b"\x30":
        files = {**GOOD, MODEL: rest}
    elif kind < b"\x40":
        files = {**GOOD, WEIGHTS: rest}
    elif kind < b"\x50":
        files = {**GOOD, "Manifest.json": rest}
    elif kind < b"\xa0":
        files = chosen(atheris.FuzzedDataProvider(rest))
    else:
        files = made(atheris.FuzzedDataProvider(rest))
    attempt(lambda: read_all(files))


def instrument() -> None:
    """Let the fuzzer see which branches run; see ``fuzz_zt.instrument``."""
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        if (function.__module__ or "").startswith("ingot."):
            atheris.instrument_func(function)


def seeds(folder: Path) -> None:
    """Write the sample's files, and two series of choices."""
    for first, name in ((b"\0", MODEL), (b"\x30", WEIGHTS), (b"\x40", "Manifest.json")):
        (folder / Path(name).name).write_bytes(first + GOOD[name])
    (folder / "chosen").write_bytes(b"\x50" + bytes(range(256)))
    (folder / "made").write_bytes(b"\xa0" + bytes(range(256)))


def main() -> None:
    instrument()
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), "-max_len=65536"], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
