"""zTensor's own conformance corpus: valid files read as the package reads them, the others are refused by our rule."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.artifacts.open import Source
from ingot.codecs.table import CODECS
from ingot.errors import IngotError
from ingot.formats.zt2.format import Zt2Format
from ingot.formats.zt2.manifest import Object
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.types import types_for_file
from ingot.inspect.verify import examine
from ingot.model.bytesource import MemorySource
from ingot.stores.memory import MemoryStore

HERE = Path(__file__).parent / "zt2"
FILES = {
    name: data
    for archive in [zipfile.ZipFile(HERE / "conformance.zip")]
    for name in archive.namelist()
    for data in [archive.read(name)]
}
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
ELSEWHERE = {  # what opens for whoever has the other files too
    "valid/data-shard.zt": "zt2.data-shard",
    "valid/local-and-foreign-parts-together.zt": "zt2.shard-missing",
    "valid/shard-reference-is-a-valid-image.zt": "zt2.shard-missing",
    "valid/shards-table.zt": "zt2.shard-missing",
}
# The corpus names the rules of the package (``error.rs``); these are ours.
RULES = {
    "attribute-key-empty": "zt2.name",
    "attribute-key-not-text": "cbor.key-type",
    "attribute-key-nul": "zt2.name",
    "attributes-not-a-map": "zt2.field-type",
    "blob-array-with-three-elements": "zt2.field-type",
    "blob-misaligned": "zt2.blob-alignment",
    "blob-offset-zero": "zt2.blob-alignment",
    "blob-out-of-bounds": "zt2.blob-bounds",
    "blob-partial-overlap": "zt2.blob-overlap",
    "bool-invalid-byte": "dense.bool",
    "cbor-depth": "cbor.depth",
    "cbor-duplicate-key": "cbor.duplicate-key",
    "cbor-indefinite": "cbor.indefinite-length",
    "cbor-non-shortest": "cbor.not-shortest",
    "cbor-tag": "cbor.tag",
    "cbor-trailing-bytes": "cbor.trailing-bytes",
    "cbor-unsorted-keys": "cbor.key-order",
    "csr-index-out-of-cols": "sparse_csr.index",
    "csr-indptr-count": "zt2.size",
    "csr-indptr-not-zero-based": "sparse_csr.indptr",
    "csr-missing-part": "zt2.layout",
    "csr-row-not-increasing": "sparse_csr.order",
    "csr-signed-indices": "zt2.layout",
    "csr-values-size": "zt2.size",
    "data-shard-nonzero-offset": "zt2.manifest-bounds",
    "dense-extra-part": "zt2.layout",
    "dense-f4-size-mismatch": "zt2.size",
    "dense-size-mismatch": "zt2.size",
    "f4-nonzero-odd-nibble": "dense.spare-bits",
    "file-too-small": "zt2.truncated",
    "footer-magic": "zt2.footer-magic",
    "header-magic": "zt2.header-magic",
    "manifest-hash-mismatch": "zt2.manifest-checksum",
    "manifest-misaligned": "zt2.blob-alignment",
    "manifest-out-of-bounds": "zt2.manifest-bounds",
    "manifest-too-large": "zt2.manifest-too-large",
    "name-empty": "zt2.name",
    "name-nul": "zt2.name",
    "name-too-long": "zt2.name",
    "object-attributes-not-a-map": "zt2.field-type",
    "schema-blob-arity": "zt2.field-type",
    "schema-digest-uppercase-hex": "zt2.digest-syntax",
    "schema-encoding-without-decoded-length": "zt2.encoding",
    "schema-ltype-dtype-mismatch": "zt2.type-storage",
    "schema-missing-objects": "zt2.field-missing",
    "schema-unknown-dtype": "zt2.dtype",
    "shape-product-overflow": "zt2.field-range",
    "shape-rank-65": "zt2.shape",
    "shard-blob-partial-overlap": "zt2.blob-overlap",
    "shard-name-empty": "zt2.shard-name",
    "shard-name-leading-dot": "zt2.shard-name",
    "shard-name-separator": "zt2.shard-name",
    "shard-name-traversal": "zt2.shard-name",
    "shard-ref-not-in-table": "zt2.shard-ref",
    "shard-table-key-not-text": "cbor.key-type",
    "verify-digest-mismatch": "part.digest-mismatch",
    "version-unsupported": "zt2.version",
}


def opened(data: bytes) -> Source:
    format, store = Zt2Format(), MemoryStore({"x.zt": data})
    return Source("x.zt", store, "x.zt", format, "x.zt", format.read(store, "x.zt"), "pread")


def test_the_corpus_is_whole() -> None:
    assert {name.partition("/")[0] for name in FILES} == {"valid", "reject"}
    assert sorted(name for name in FILES if name.startswith("valid/")) == sorted(EXPECTED)
    assert sorted(Path(name).stem for name in FILES if name.startswith("reject/")) == sorted(RULES)
    assert (len(EXPECTED), len(RULES)) == (19, 57)


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(ELSEWHERE)))
def test_valid_files_read_as_the_package_reads_them(name: str) -> None:
    found = {}
    for tensor in opened(FILES[name]).catalog.tensors.values():
        parts = {}
        for role, part in tensor.parts.items():
            try:
                content = hashlib.sha256(part.view()).hexdigest()
            except IngotError:
                content = "ValueError"
            parts[role] = [*types_for_file(part.dtype, part.type), content]
        found[tensor.name] = {"shape": list(tensor.shape), "parts": parts}
    for entry in (expected := EXPECTED[name]).values():
        del entry["layout"]
    assert found == expected


@pytest.mark.parametrize("name", ELSEWHERE)
def test_valid_images_of_which_other_files_are_missing(name: str) -> None:
    with pytest.raises(IngotError) as caught:
        opened(FILES[name])
    assert caught.value.rule == ELSEWHERE[name]
    if EXPECTED[name] == "OSError":  # of the package too; by itself the file is right
        assert read_manifest(MemorySource(FILES[name]))[1].objects


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if EXPECTED[name] == "OSError"])
def test_valid_images_open_beside_the_other_file(name: str) -> None:
    """The corpus has no such file, whose digest is made up: one of the size that is stated goes by its name."""
    shard = bytearray(FILES["valid/data-shard.zt"][:8].ljust(1 << 20, b"\0"))
    shard[-40:] = FILES["valid/data-shard.zt"][-40:]
    shard[4096:4104] = b"elsewere"
    store = MemoryStore({"x.zt": FILES[name], "x-base.zt": bytes(shard)})
    tensors = Zt2Format().read(store, "x.zt").tensors
    found = {key: bytes(tensor.parts["data"].view()) for key, tensor in tensors.items()}
    assert found.pop("here", b"\xab" * 8) == b"\xab" * 8
    assert list(found.values()) == [b"elsewere"]


@pytest.mark.parametrize("name", RULES)
def test_rejected_files_are_refused_by_rule(name: str) -> None:
    try:
        rules = {item.rule for item in examine(opened(FILES[f"reject/{name}.zt"])) if item.level == "error"}
    except IngotError as error:
        rules = {error.rule or ""}
    assert rules == {RULES[name]}


def test_compressed_and_appended_parts_of_the_package() -> None:
    with zipfile.ZipFile(HERE / "peer.zip") as archive:
        data = archive.read("appended.zt")
    catalog = opened(data).catalog
    whole = bytes(range(251)) * 10_000
    part = catalog.tensors["a"].parts["data"]
    piece = memoryview(bytearray(1000))
    part.readinto(2_000_000, piece)  # of the second of three frames
    assert (bytes(part.view()), bytes(piece)) == (whole, whole[2_000_000:2_001_000])
    assert catalog.tensors["empty"].parts["data"].view().nbytes == 0
    assert bytes(catalog.tensors["later"].parts["data"].view()) == b"12345678"
    for back in (1, 10, 20, part.length // 2, part.length - 1):
        damaged = bytearray(data)
        damaged[part.offset + part.length - back] ^= 4
        with pytest.raises(IngotError) as caught:
            opened(bytes(damaged)).catalog.tensors["a"].parts["data"].view()
        assert caught.value.rule == "part.zstd"


with zipfile.ZipFile(HERE / "peer.zip") as _archive:
    PROFILES = _archive.read("profiles.zt")
LEFT_OPEN = {
    "2 i32 {} none",
    "4 i32 {} none",
    "8 i32 {} none",
}  # codes that share a signed word, of which nothing tells


def test_profiles_of_the_package_decode_by_the_words_of_the_document() -> None:
    """Small floats with exponents along any axis; integers however they lie, their zero points and scales."""
    objects, catalog, seen = read_manifest(MemorySource(PROFILES))[1].objects, opened(PROFILES).catalog, 0
    for name, obj in objects.items():
        tensor = replace(catalog.tensors[name], decoder=CODECS.get(catalog.tensors[name].codec))
        words = name.split()
        open_ = " ".join((*words[:2], "{}", words[3])) in LEFT_OPEN
        assert (tensor.codec == obj.layout) == open_, name
        if not open_:
            decode = small_floats if obj.layout == "zt.mx/1" else integers
            np.testing.assert_array_equal(tensor.numpy("f32"), decode(obj), name)
            seen += 1
    assert seen > 150


def test_parts_that_are_made_are_checked_by_the_digests_of_stored_ones() -> None:
    name = "4 u32 msb_first packed bf16 [8, 32] 0 0"
    assert {item.rule for item in examine(opened(PROFILES))} == {"codec.unknown"}
    for role, blob in read_manifest(MemorySource(PROFILES))[1].objects[name].parts.items():
        damaged = bytearray(PROFILES)
        damaged[blob.blob[0]] ^= 1
        found = [item for item in examine(opened(bytes(damaged))) if item.level == "error"]
        assert {item.rule for item in found} == {"part.digest-mismatch"}, role
        assert any(name in item.where for item in found)


def kind_of(dtype: str) -> Any:
    return ml_dtypes.bfloat16 if dtype == "bf16" else f"<{dtype[0]}{int(dtype[1:]) // 8}"


def stored(obj: Object, role: str, dtype: Any) -> np.ndarray[Any, Any]:
    start, length = obj.parts[role].blob
    return np.frombuffer(PROFILES[start : start + length], dtype)


def exponents(obj: Object) -> np.ndarray[Any, Any]:
    return np.ldexp(np.float32(1), stored(obj, "scales", "u1").astype(int) - 127)


def small_floats(obj: Object) -> np.ndarray[Any, Any]:
    """``value(i) = decode(scales[b]) * decode(data[i])``, blocks in the order of the tensor's axes."""
    about, along = dict(obj.attributes), list(obj.shape)
    along[about["axis"]] //= about["block_size"]
    data = stored(obj, "data", "u1")
    if obj.parts["data"].type == "f4_e2m1":
        data = np.stack([data & 15, data >> 4], 1).reshape(-1).view(ml_dtypes.float4_e2m1fn)
    else:
        data = data.view(ml_dtypes.float8_e4m3fn)
    values = data.astype(np.float32).reshape(obj.shape)
    return values * exponents(obj).reshape(along).repeat(about["block_size"], about["axis"])


def integers(obj: Object) -> np.ndarray[Any, Any]:
    """``value = (q - zero) * scale(g)``."""
    about, shape = dict(obj.attributes), tuple(obj.shape)
    bits, axis, group, packing = about["bits"], about["axis"], about["group_size"], about["packing"]

    def codes(role: str, count: int) -> np.ndarray[Any, Any]:
        words = stored(obj, role, kind_of(packing["word"])).astype(np.uint64)
        places = np.arange(0, int(packing["word"][1:]), bits)
        places = places if packing["order"] == "lsb_first" else places[::-1]
        found = (words[:, None] >> places.astype(np.uint64) & np.uint64((1 << bits) - 1)).reshape(-1)[:count]
        signed = obj.parts["data"].dtype == "i8"
        return (found.astype(np.uint8).view(np.int8) if signed else found).astype(np.float32)

    along = [size if at == axis else 1 for at, size in enumerate(shape)]
    if group:
        along = [size // group if at == axis else size for at, size in enumerate(shape)]

    def spread(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        numbers = numbers.reshape(along).astype(np.float32)
        return numbers.repeat(group, axis) if group else np.broadcast_to(numbers, shape)

    kind, point = obj.parts["scales"].dtype, about["zero_point"]
    scales = exponents(obj) if about["scale_form"] == "e8m0_exponent" else stored(obj, "scales", kind_of(kind))
    zero: Any = np.float32(point.get("value", 0))
    if point.get("packing") == "same_as_data":
        zero = spread(codes("zeros", prod(along)))
    elif point["form"] == "tensor":
        kind = obj.parts["zeros"].dtype
        zero = spread(stored(obj, "zeros", kind_of(kind)))
    return (codes("data", prod(shape)).reshape(shape) - zero) * spread(scales)
