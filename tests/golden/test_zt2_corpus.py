"""zTensor's own conformance corpus: valid files read as the package reads them, the others are refused by our rule."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import IngotError
from ingot.formats.zt2.format import Zt2Format
from ingot.formats.zt2.reader import read_manifest
from ingot.formats.zt2.types import types_stored
from ingot.model.bytesource import MemorySource
from ingot.ops.check.verify import examine
from ingot.ops.open import Source
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
            parts[role] = [*types_stored(part.dtype, part.type), content]
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
