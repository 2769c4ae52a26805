"""Packages that break a rule, one for each; none may crash, hang or open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.core.parsing.wire import bytes_field, map_entry, number_field, varint
from ingot.errors import IngotError
from ingot.formats.coreml.reader import read_package
from ingot.formats.coreml.types import BY_NAME
from ingot.formats.coreml.values import encode_blob
from ingot.stores.local import LocalStore
from ingot.stores.memory import MemoryStore
from tests.support.coreml import FILE, MODEL, WEIGHTS, Package, manifest, operation, sample

Files = dict[str, bytes]
SHAPE = (4, 8)


def one(build: Callable[[Package], None], **options: str) -> Files:
    """A package of what ``build`` adds."""
    made = Package(**options)
    build(made)
    return made.files()


def edited(path: str, at: int, new: bytes) -> Files:
    files = sample().files()
    data = bytearray(files[path])
    data[at : at + len(new)] = new
    return {**files, path: bytes(data)}


def with_manifest(data: bytes) -> Files:
    return {**sample().files(), "Manifest.json": data}


def with_model(data: bytes) -> Files:
    return {**sample().files(), MODEL: data}


def dense(made: Package, kind: str = "fp16", shape: tuple[int, ...] = (16,), size: int = 32) -> None:
    made.add("const", "w", (kind, shape), {"val": made.blob(kind, shape, bytes(size))})


def lut(made: Package, lut_shape: tuple[int, ...], kind: str = "uint4", **extra: bytes | str) -> None:
    indices = made.blob(kind, SHAPE, bytes(32 * int(kind.removeprefix("uint")) // 8))
    size = 2
    for length in lut_shape:
        size *= length
    inputs: dict[str, bytes | str] = {"indices": indices, "lut": made.blob("fp16", lut_shape, bytes(size)), **extra}
    made.add("constexpr_lut_to_dense", "p", ("fp16", SHAPE), inputs=inputs)


def scaled(made: Package, scales: tuple[int, ...], name: str | None = None) -> None:
    size = 2
    for length in scales:
        size *= length
    data: bytes | str = name or made.blob("int8", SHAPE, bytes(32))
    scale = made.blob("fp16", scales, bytes(size))
    made.add("constexpr_blockwise_shift_scale", "q", ("fp16", SHAPE), inputs={"data": data, "scale": scale})


def affine16(made: Package, axis: int, length: int, shape: tuple[int, ...] = SHAPE) -> None:
    attributes = {
        "quantized_data": made.blob("int8", shape, bytes(shape[0] * shape[1])),
        "scale": made.blob("fp16", (length,), bytes(2 * length)),
        "zero_point": made.now("int8", (), b"\0"),
        "axis": made.now("int32", (), axis.to_bytes(4, "little", signed=True)),
    }
    made.add("constexpr_affine_dequantize", "q", ("fp16", shape), attributes)


def lut16(made: Package, entries: int, shape: bytes) -> None:
    attributes = {
        "indices": made.blob("uint8", (16,), bytes(16)),
        "lut": made.blob("fp16", (entries,), bytes(2 * entries)),
        "shape": made.now("uint32", (2,), shape),
    }
    made.add("constexpr_lut_to_dense", "p", ("fp16", SHAPE), attributes)


def circle(made: Package) -> None:
    for name, given in (("a", "b"), ("b", "a")):
        made.add("constexpr_sparse_to_dense", name, ("fp16", SHAPE), inputs={"mask": given, "nonzero_data": given})


def masked(made: Package, kept: int) -> None:
    inputs: dict[str, bytes | str] = {
        "mask": made.blob("uint1", SHAPE, bytes(4)),
        "nonzero_data": made.blob("fp16", (kept,), bytes(2 * kept)),
    }
    made.add("constexpr_sparse_to_dense", "s", ("fp16", SHAPE), inputs=inputs)


def twice(made: Package) -> None:
    dense(made)
    dense(made)


def nested(depth: int) -> bytes:
    inner = operation("const", (("deep", "fp16", (1,)),))
    for _ in range(depth):
        inner = bytes_field(1, "while_loop") + bytes_field(4, bytes_field(3, inner))
    made = Package()
    made.operations.append(inner)
    return made.model()


HUGE = (1 << 40, 1 << 40)
CASES: dict[str, tuple[str, Callable[[], Files]]] = {
    "no-json": ("coreml.manifest", lambda: with_manifest(b"{")),
    "no-root": ("coreml.manifest", lambda: with_manifest(b'{"itemInfoEntries": {}, "rootModelIdentifier": "m"}')),
    "manifest-of-lists": ("coreml.manifest", lambda: with_manifest(b"[" * 100000)),
    "path-up": ("coreml.manifest-path", lambda: with_manifest(manifest("../../etc/passwd"))),
    "path-absolute": ("coreml.manifest-path", lambda: with_manifest(manifest("/etc/passwd"))),
    "path-backslash": ("coreml.manifest-path", lambda: with_manifest(manifest("..\\secret"))),
    "item-missing": ("coreml.missing", lambda: with_manifest(manifest("com.apple.CoreML/other.mlmodel"))),
    "weights-missing": ("coreml.missing", lambda: {k: v for k, v in sample().files().items() if k != WEIGHTS}),
    "neural-network": ("coreml.model-kind", lambda: with_model(number_field(1, 4) + bytes_field(500, b""))),
    "empty-model": ("coreml.model-kind", lambda: with_model(b"")),
    "group": ("coreml.wire", lambda: with_model(b"\x0b\x0c")),
    "endless-number": ("coreml.wire", lambda: with_model(b"\x08" + b"\xff" * 11)),
    "number-past-64-bits": ("coreml.wire", lambda: with_model(b"\x08" + b"\xff" * 9 + b"\x02")),
    "cut": ("coreml.wire", lambda: with_model(sample().model()[:-1])),
    "field-0": ("coreml.wire", lambda: with_model(b"\x00\x00")),
    "length-past-end": ("coreml.wire", lambda: with_model(varint(502 << 3 | 2) + varint((1 << 63) - 1))),
    "no-utf8": (
        "coreml.utf8",
        lambda: with_model(number_field(1, 9) + bytes_field(502, map_entry(2, "m", bytes_field(2, b"\xff")))),
    ),
    "deep": ("coreml.depth", lambda: with_model(nested(200))),
    "program-twice": ("coreml.repeated-field", lambda: with_model(sample().model() * 2)),
    "value-without-shape": (
        "coreml.value",
        lambda: one(
            lambda made: made.add(
                "constexpr_sparse_to_dense", "s", ("fp16", SHAPE), inputs={"mask": b"", "nonzero_data": b""}
            )
        ),
    ),
    "shape-past-2**63": (
        "coreml.value",
        lambda: one(
            lambda made: made.add("const", "w", ("fp16", HUGE), {"val": encode_blob(BY_NAME["fp16"], HUGE, FILE, 64)})
        ),
    ),
    "short-immediate": (
        "coreml.value",
        lambda: one(
            lambda made: made.add(
                "constexpr_blockwise_shift_scale",
                "q",
                ("fp16", SHAPE),
                inputs={"data": made.now("int8", SHAPE, bytes(31)), "scale": made.now("fp16", (1, 1), bytes(2))},
            )
        ),
    ),
    "scales-that-do-not-divide": ("coreml.operation", lambda: one(lambda made: scaled(made, (3, 1)))),
    "scales-of-other-rank": ("coreml.operation", lambda: one(lambda made: scaled(made, (4,)))),
    "axis-out-of-range": ("coreml.operation", lambda: one(lambda made: affine16(made, 2, 8))),
    "affine16-no-scales": ("coreml.operation", lambda: one(lambda made: affine16(made, 0, 0, (0, 8)))),
    "axis-negative": ("coreml.operation", lambda: one(lambda made: affine16(made, -3, 8))),
    "scales-of-other-length": ("coreml.operation", lambda: one(lambda made: affine16(made, 0, 16))),
    "palette-width": ("coreml.operation", lambda: one(lambda made: lut(made, (1, 1, 8, 1)))),
    "palette-groups": ("coreml.operation", lambda: one(lambda made: lut(made, (3, 1, 16, 1)))),
    "vector-without-axis": ("coreml.operation", lambda: one(lambda made: lut(made, (1, 1, 16, 2)))),
    "palette-of-3-bits-in-iOS16": ("coreml.operation", lambda: one(lambda made: lut16(made, 8, b"\4\0\0\0\x08\0\0\0"))),
    "palette-of-12-entries": ("coreml.operation", lambda: one(lambda made: lut16(made, 12, b"\4\0\0\0\x08\0\0\0"))),
    "indices-for-another-shape": ("coreml.operation", lambda: one(lambda made: lut16(made, 16, b"\5\0\0\0\x08\0\0\0"))),
    "stated-shape-past-2**63": (
        "coreml.value",
        lambda: one(lambda made: lut16(made, 16, b"\xff" * 8)),
    ),
    "more-kept-than-there-are": ("coreml.operation", lambda: one(lambda made: masked(made, 33))),
    "name-from-nowhere": ("coreml.reference", lambda: one(lambda made: scaled(made, (1, 1), "nobody"))),
    "circle": ("coreml.reference", lambda: one(circle)),
    "name-twice": ("coreml.duplicate-name", lambda: one(twice)),
    "file-outside": ("coreml.weight-path", lambda: one(dense, file="@model_path/../../secret.bin")),
    "file-absolute": ("coreml.weight-path", lambda: one(dense, file="/etc/passwd")),
    "version-1": ("coreml.blob-header", lambda: edited(WEIGHTS, 4, b"\1")),
    "no-header": ("coreml.blob-header", lambda: {**sample().files(), WEIGHTS: b"\1"}),
    "offset-outside": ("coreml.blob-offset", lambda: {**sample().files(), WEIGHTS: sample().files()[WEIGHTS][:100]}),
    "data-outside": ("coreml.blob-offset", lambda: edited(WEIGHTS, 64 + 16, b"\xff" * 8)),
    "data-cut": ("coreml.blob-offset", lambda: {**sample().files(), WEIGHTS: sample().files()[WEIGHTS][:-1]}),
    "sentinel": ("coreml.blob-sentinel", lambda: edited(WEIGHTS, 64, b"\0")),
    "other-type": ("coreml.blob-dtype", lambda: edited(WEIGHTS, 64 + 4, b"\2")),
    "other-size": ("coreml.blob-size", lambda: edited(WEIGHTS, 64 + 8, b"\x3e")),
    "padding": (
        "coreml.blob-padding",
        lambda: (
            one(lambda made: made.add("const", "w", ("uint1", (9,)), {"val": made.blob("uint1", (9,), b"\1\1")}))
            | {WEIGHTS: padded()}
        ),
    ),
    "padding-bits": (
        "coreml.padding-bits",
        lambda: one(lambda made: dense(made, "uint1", (9,), 0) or made.weights.extend(b"\1\3")),
    ),
}


def padded() -> bytes:
    made = Package()
    made.blob("uint1", (9,), b"\1\1")
    made.weights[64 + 24] = 3
    return bytes(made.weights)


@pytest.mark.parametrize("case", CASES)
def test_a_package_that_breaks_a_rule_is_refused_by_it(case: str) -> None:
    rule, build = CASES[case]
    with pytest.raises(IngotError) as caught:
        read_package(MemoryStore(build()))
    assert caught.value.rule == rule


def test_the_sample_itself_opens() -> None:
    found = read_package(MemoryStore(sample().files()))
    assert {name: tensor.codec for name, tensor in found.tensors.items()} == {
        "w": "dense",
        "q": "affine",
        "p": "palette",
        "s": "sparse_mask",
        "t": "sparse_mask",
        **dict.fromkeys("fgh", "palette"),
        **dict.fromkeys("bcv", "dense"),
    }
    assert list(found.unread) == ["u"]
    assert not found.notes


@pytest.mark.parametrize("path", [MODEL, WEIGHTS, "Manifest.json"])
def test_a_file_cut_anywhere_ends_in_an_error(path: str) -> None:
    files = sample().files()
    for length in range(0, len(files[path]), 1 if path == "Manifest.json" else 7):
        with pytest.raises(IngotError):
            read_package(MemoryStore({**files, path: files[path][:length]}))


@pytest.mark.parametrize("link", [WEIGHTS, WEIGHTS.rpartition("/")[0], "Data"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_link_out_of_the_package_is_refused(tmp_path: Path, link: str, inside: bool) -> None:
    package, elsewhere = tmp_path / "m.mlpackage", tmp_path / "elsewhere"
    for name, data in sample().files().items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(data)
    read_package(LocalStore(package))
    target = package / "kept" if inside else elsewhere
    (package / link).rename(target)
    (package / link).symlink_to(target)
    if inside:  # as good as a file
        assert read_package(LocalStore(package)).tensors
        return
    with pytest.raises(IngotError) as caught:
        read_package(LocalStore(package))
    assert caught.value.rule == "coreml.link"
