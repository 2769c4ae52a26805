"""Makes the golden corpus of .zt files: python -m tests.golden.make_zt

``valid`` files open and their tensors are listed in ``expected.json``. ``reject`` files are named by the rule that
refuses them, a variant after ``+``; ``damaged`` ones open, and reading their tensor ``t`` is refused by the rule in
the name. Everything is made from bytes here: no library's version changes a file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from ingot.core.bytes import checksums
from ingot.core.parsing import cbor
from tests.support.zt import OMIT, component, manifest, nested, replace_at, tensor, zstd_frame, zt_file

ROOT = Path(__file__).parent / "zt"

F32 = struct.pack("<4f", 0.0, 1.0, -2.5, 1e30)
CRC = checksums.digest("crc32c", F32)
SHA = checksums.digest("sha256", F32)
LARGER_CRC = checksums.digest("crc32c", F32 * 512)
CHUNKS = {"size": 4096, "digests": 2 * checksums.raw(checksums.digest("crc32c", F32 * 256))}
ITEM = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1}
ITEM |= {"u64": 8, "u32": 4, "u16": 2, "u8": 1, "bool": 1}
LOGICAL = {"f8_e4m3fn": "u8", "f8_e5m2": "u8", "f8_e4m3fnuz": "u8", "f8_e5m2fnuz": "u8", "f8_e8m0fnu": "u8"}
# What a field at this depth of the manifest belongs to.
LEVEL = {0: "root", 1: "tensors", 2: "tensor", 3: "parts", 4: "part"}
LOGICAL |= {"complex64": "f32", "complex128": "f64"}


def one(**fields: Any) -> bytes:
    """A file with the tensor t, whose component has these fields."""
    return zt_file(manifest({"t": tensor(components={"data": component(**fields)})}), {64: F32})


def packed(objects: dict[str, tuple[dict[str, Any], dict[str, tuple[dict[str, Any], bytes]]]], **fields: Any) -> bytes:
    """A file of objects given as (object fields, {role: (component fields, stored bytes)}), placed in that order."""
    blobs: dict[int, bytes] = {}
    entries, tail = {}, 8
    for name, (about, parts) in objects.items():
        components = {}
        for role, (what, data) in parts.items():
            offset = (tail + 63) // 64 * 64
            components[role] = component(offset=offset, length=len(data), **what)
            blobs[offset] = data
            tail = offset + len(data)
        entries[name] = tensor(components=components, **about)
    return zt_file(manifest(entries, **fields), blobs)


def dense(shape: list[int], dtype: str, data: bytes, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"shape": shape}, {"data": ({"dtype": dtype, **fields}, data)}


def u64(*numbers: int) -> tuple[dict[str, Any], bytes]:
    return {"dtype": "u64"}, struct.pack(f"<{len(numbers)}Q", *numbers)


def valid() -> dict[str, bytes]:
    more = {f"manifest-digest-{kind}": zt_file(sealed(kind), {64: F32}) for kind in ("crc32c", "sha256")}
    ramp = bytes(range(96))
    frame = zstd_frame(F32)
    csr = {
        "values": ({"dtype": "f32", "digest": CRC}, F32),
        "indices": u64(0, 2, 1, 2),
        "indptr": u64(0, 2, 2, 4),
    }
    coo = {"values": ({"dtype": "f32"}, F32), "coords": u64(0, 0, 2, 2, 0, 2, 1, 2)}
    group = {
        "packed_weight": ({"dtype": "i32"}, bytes(range(32))),
        "scales": ({"dtype": "f16"}, bytes(4)),
        "zeros": ({"dtype": "f16"}, bytes(4)),
    }
    quantized = {"shape": [2, 32], "format": "quantized_group"}
    group_attributes = {"bits": 4, "group_size": 32, "packing": "8_per_i32"}
    values: dict[str, Any] = {"int": -1, "float": 0.1, "list": [1, None, True], "map": {"a": {}}, "bytes": b"\0\xff"}
    return {
        **more,
        "empty": zt_file(manifest({})),
        "storage-dtypes": packed({name: dense([3], name, ramp[: 3 * size]) for name, size in ITEM.items()}),
        "logical-types": packed(
            {
                name: dense(
                    [3], storage, ramp[: 3 * ITEM[storage] * (2 if name.startswith("complex") else 1)], type=name
                )
                for name, storage in LOGICAL.items()
            }
        ),
        "packed-types": packed(
            {
                "f4": dense([2, 3], "u8", bytes(3), type="f4_e2m1fn"),
                "f6": dense([4], "u8", bytes(3), type="f6_e3m2fn"),
            }
        ),
        "scalars-and-nothing": packed(
            {
                "scalar": dense([], "f32", F32[:4]),
                "one": dense([1], "f32", F32[:4]),
                "none": dense([0, 3], "f32", b""),
                "none-zstd": dense([0], "f32", zstd_frame(b""), encoding="zstd", uncompressed_length=0),
                "last-none": dense([5, 0], "bool", b""),
            }
        ),
        "names": packed({name: dense([1], "u8", b"x") for name in ("", "a\nb", "\0", "ä/ö", "../../etc", "x" * 3000)}),
        "sparse-csr": packed({"t": ({"shape": [3, 3], "format": "sparse_csr"}, csr)}),
        "sparse-coo": packed({"t": ({"shape": [3, 3], "format": "sparse_coo"}, coo)}),
        "quantized-group": packed({"t": ({**quantized, "attributes": group_attributes}, group)}),
        "zstd": packed({"t": dense([4], "f32", frame, encoding="zstd", uncompressed_length=16)}),
        "zstd-two-frames": packed(
            {
                "t": dense(
                    [8],
                    "f32",
                    frame * 2,
                    encoding="zstd",
                    uncompressed_length=32,
                    digest=checksums.digest("sha256", frame * 2),
                )
            }
        ),
        "zstd-repeat": packed(
            {
                "t": dense(
                    [1 << 20], "u8", zstd_frame(b"\7", repeat=1 << 20), encoding="zstd", uncompressed_length=1 << 20
                )
            }
        ),
        "digests": packed(
            {
                "crc32c": dense([4], "f32", F32, digest=CRC),
                "crc32c-lower": dense([4], "f32", F32, digest=CRC.lower()),
                "sha256": dense([4], "f32", F32, digest=SHA),
                "unknown": dense([4], "f32", F32, digest="xxh3:0011"),
            }
        ),
        "chunks": packed(
            {
                "crc32c": dense([2048], "f32", F32 * 512, digest=LARGER_CRC, ingot_chunks=CHUNKS),
                "coarser": dense(
                    [2048],
                    "f32",
                    F32 * 512,
                    digest=LARGER_CRC,
                    ingot_chunks={**CHUNKS, "size": 1 << 13, "digests": checksums.raw(LARGER_CRC)},
                ),
                "null": dense([2048], "f32", F32 * 512, digest=LARGER_CRC, ingot_chunks=None),
                "unknown": dense([4], "f32", F32, digest="xxh3:0011", ingot_chunks=CHUNKS),
            }
        ),
        "attributes": packed({"t": ({"attributes": values}, {"data": ({"dtype": "f32"}, F32)})}, attributes=values),
        "nulls": zt_file(
            manifest(
                {
                    "t": tensor(
                        components={"data": component(type=None, uncompressed_length=None, digest=None)},
                        attributes=None,
                    )
                },
                attributes=None,
            ),
            {64: F32},
        ),
        "raw-with-uncompressed-length": one(uncompressed_length=16, encoding="raw", type="f32"),
        "unknown-fields": zt_file(
            manifest({"t": tensor(components={"data": component(colour="red")}, colour=1)}, colour=[]), {64: F32}
        ),
        "unknown-type": one(type="posit16"),
        "unknown-format": packed(
            {"t": ({"format": "hyper_sparse", "shape": [9]}, {"blob": ({"dtype": "u8"}, b"abc")})}
        ),
        "unknown-encoding": one(encoding="brotli"),
        "no-components": zt_file(manifest({"t": {"shape": [1], "format": "hollow", "components": {}}})),
        "extra-part": packed({"t": ({}, {"data": ({"dtype": "f32"}, F32), "comment": ({"dtype": "u8"}, b"text")})}),
        "newer-minor-version": zt_file(manifest(version="1.9.0"), {64: F32}),
        "holes-and-any-order": zt_file(
            manifest({"b": tensor(components={"data": component(offset=1024)}), "a": tensor()}), {64: F32, 1024: F32}
        ),
        **of_others(),
        "long-integers": zt_file(bytes.fromhex("b900026776657273696f6e65312e322e30676f626a65637473bb0000000000000000")),
    }


def of_others() -> dict[str, bytes]:
    """What ``ztensor`` 1.2.3 reads and no careful writer writes: indefinite lengths, tags, undefined, shared blobs."""
    part = component()
    entry = b"".join(text(key) + cbor.dumps(value) for key, value in tensor().items() if key != "components")
    inner = b"\xbf" + b"".join(text(key) + cbor.dumps(value) for key, value in part.items()) + b"\xff"
    one = b"\xbf" + entry + text("components") + b"\xbf" + text("data") + inner + b"\xff\xff"
    split = b"\x7f" + text("layers.") + text("0") + b"\xff"
    attributes = b"\xa2" + text("list") + b"\x9f\x01\x82\x02\xf6\xff" + text("raw") + b"\x5f\x41\x01\x42\x02\x03\xff"
    indefinite = b"\xbf" + text("version") + text("1.2.0") + text("attributes") + attributes
    indefinite += text("objects") + b"\xbf" + split + one + b"\xff\xff"
    offset = b"\xc2\x58\x02\x00\x40"  # a bignum of 64
    tagged = b"".join(text(key) + (offset if key == "offset" else cbor.dumps(value)) for key, value in part.items())
    data = b"\xd8\x7b" + bytes([0xA0 | len(part)]) + tagged
    shape = b"\xc4" + cbor.dumps([4])
    obj = b"\xa3" + text("shape") + shape + text("format") + b"\xc1" + text("dense") + text("components")
    root = b"\xd9\xd9\xf7\xa2" + text("version") + text("1.2.0") + text("objects") + b"\xa1\xc5" + text("t") + obj
    undefined = cbor.dumps(manifest({"t": tensor(components={"data": component(digest="absent")})}))
    same = {"data": component()}
    return {
        "foreign-indefinite": zt_file(indefinite, {64: F32}),
        "foreign-tags": zt_file(root + b"\xa1" + text("data") + data, {64: F32}),
        "foreign-undefined": zt_file(undefined.replace(text("absent"), b"\xf7"), {64: F32}),
        "shared-blobs": zt_file(
            manifest(
                {
                    "a": tensor(components=same),
                    "b": tensor(components=same),
                    "c": tensor([2, 2], components={"data": component("i32")}),
                }
            ),
            {64: F32},
        ),
    }


def text(value: str) -> bytes:
    return cbor.dumps(value)


def cbor_rejects() -> dict[str, bytes]:
    head = bytes.fromhex("a2 67") + b"version" + bytes.fromhex("65") + b"1.2.0" + bytes.fromhex("67") + b"objects"
    whole = head + b"\xa0"
    bodies = {
        "cbor.trailing-bytes": whole + b"\0",
        "cbor.truncated": head,
        "cbor.truncated+nothing": b"",
        "cbor.length+map": head + b"\xba\xff\xff\xff\xff",
        "cbor.length+text": head + b"\x7b\xff\xff\xff\xff\xff\xff\xff\xff",
        "cbor.duplicate-key": b"\xa3" + whole[1:] + b"\x67objects\xa0",
        "cbor.duplicate-key+tensor": head + b"\xa2\x61t\xa0\x61t\xa0",
        "cbor.depth": head + nested(64),
        "cbor.indefinite-length": head + b"\xff",
        "cbor.indefinite-length+chunk-of-bytes": head + b"\xbf\x7f\x41t\xff\xa0\xff",
        "cbor.indefinite-length+chunk-of-chunks": head + b"\xbf\x7f\x7f\x61t\xff\xff\xa0\xff",
        "cbor.indefinite-length+key-alone": head + b"\xbf\x61t\xff",
        "cbor.truncated+indefinite": head + b"\xbf",
        "cbor.truncated+tag": b"\xd9\xd9",
        "cbor.length+indefinite": b"\x9f\x9b\xff\xff\xff\xff\xff\xff\xff\xff",
        "cbor.length+chunk": b"\x9f\x7f\x7b\xff\xff\xff\xff\xff\xff\xff\xff",
        "cbor.depth+indefinite": b"\x9f" * 1000,
        "cbor.depth+tagged": head + b"\xc1" + nested(64),
        "cbor.duplicate-key+indefinite": head + b"\xbf\x61t\xa0\x7f\x61t\xff\xa0\xff",
        "cbor.trailing-bytes+indefinite": b"\xbf\xff\x00",
        "cbor.reserved+tag": b"\xdf\x00",
        "cbor.reserved+integer": b"\x9f\x1f\xff",
        "cbor.utf8+chunks": head + b"\xbf\x7f\x61\xc3\x61\x28\xff\xa0\xff",
        "cbor.tag": head + b"\xa1\x61t\xc2\x49\x01" + bytes(8),
        "cbor.key-type": head + b"\xa1\x01\xa0",
        "cbor.utf8": head + b"\xa1\x62\xc3\x28\xa0",
        "cbor.reserved": head + b"\xbc",
        "cbor.simple": head + b"\xe5",
    }
    return {name: zt_file(body) for name, body in bodies.items() if body} | {
        name: zt_file(body, {64: b"x"}) for name, body in bodies.items() if not body
    }


def field_rejects() -> dict[str, bytes]:
    """Every field missing, of a wrong type, or out of range."""
    base = manifest({"t": tensor(attributes={"a": 1})}, attributes={"a": 1})
    root: tuple[Any, ...] = ()
    obj = ("objects", "t")
    part = (*obj, "components", "data")
    required = {
        root: ("version", "objects"),
        obj: ("shape", "format", "components"),
        part: ("dtype", "offset", "length"),
    }
    made = {}
    for path, names in required.items():
        for name in names:
            made[f"zt.field-missing+{LEVEL[len(path)]}-{name}"] = replace_at(base, (*path, name), OMIT)
    wrong: dict[tuple[Any, ...], dict[str, Any]] = {
        ("version",): {"number": 1.2, "null": None},
        ("objects",): {"list": [], "null": None},
        ("attributes",): {"list": [1], "text": "x"},
        obj: {"null": None, "list": []},
        (*obj, "shape"): {
            "number": 4,
            "float": [4.0],
            "text": ["4"],
            "bool": [True],
            "nan": [float("nan")],
            "null": None,
        },
        (*obj, "format"): {"number": 1, "null": None},
        (*obj, "attributes"): {"list": [], "number": 1},
        (*obj, "components"): {"list": [], "null": None},
        part: {"null": None, "text": "data"},
        (*part, "dtype"): {"number": 32, "null": None},
        (*part, "offset"): {"float": 64.0, "nan": float("nan"), "text": "64", "bool": True, "null": None, "list": [64]},
        (*part, "length"): {"float": 16.0, "nan": float("nan"), "text": "16", "null": None},
    }
    for path, variants in wrong.items():
        for variant, value in variants.items():
            made[f"zt.field-type+{LEVEL[len(path) - 1]}-{path[-1]}-{variant}"] = replace_at(base, path, value)
    for name, value in (("type", 1), ("encoding", None), ("encoding", 2), ("digest", 3), ("uncompressed_length", 16.0)):
        made[f"zt.field-type+part-{name}-{type(value).__name__}"] = replace_at(base, part, component(**{name: value}))
    for path in ((*part, "offset"), (*part, "length"), (*obj, "shape")):
        for variant, value in (("negative", -64), ("huge", 2**63), ("u64-max", 2**64 - 1)):
            listed = [value] if path[-1] == "shape" else value
            made[f"zt.field-range+{LEVEL[len(path) - 1]}-{path[-1]}-{variant}"] = replace_at(base, path, listed)
    made["zt.field-type+root-list"] = []
    return {name: zt_file(body, {64: F32}) for name, body in made.items()}


def part_rejects() -> dict[str, bytes]:
    frame = zstd_frame(F32)

    def zstd(**fields: Any) -> bytes:
        about = component(length=len(frame), encoding="zstd", **fields)
        return zt_file(manifest({"t": tensor(components={"data": about})}), {64: frame})

    def shaped(*shape: int, **fields: Any) -> bytes:
        about = tensor(shape=list(shape), components={"data": component(**fields)})
        return zt_file(manifest({"t": about}), {64: F32})

    return {
        "zt.dtype-unknown": one(dtype="f8"),
        "zt.dtype-unknown+upper-case": one(dtype="F32"),
        "zt.type-storage": one(type="f8_e4m3fn"),
        "zt.type-storage+complex": one(type="complex128"),
        "zt.chunk-digests": one(digest=CRC, ingot_chunks=CHUNKS),
        "zt.chunk-digests+none": one(digest=CRC, ingot_chunks={"size": 4096, "digests": b""}),
        "zt.chunk-digests+small": one(digest=CRC, ingot_chunks={"size": 8, "digests": bytes(8)}),
        "zt.chunk-digests+large": one(digest=CRC, ingot_chunks={"size": 1 << 40, "digests": bytes(4)}),
        "zt.chunk-digests+alone": one(ingot_chunks={"size": 4096, "digests": bytes(4)}),
        "zt.field-type+chunks": one(digest=CRC, ingot_chunks=[4096, bytes(4)]),
        "zt.field-missing+chunks": one(digest=CRC, ingot_chunks={"size": 4096}),
        "zt.digest-syntax": one(digest="crc32c:xyz"),
        "zt.digest-syntax+short-sha": one(digest="sha256:00"),
        "zt.digest-syntax+no-algorithm": one(digest="0011"),
        "zt.part-size": one(length=15, type="posit32"),
        "zt.uncompressed-length": one(uncompressed_length=17),
        "zt.uncompressed-length+huge": zstd(uncompressed_length=2**62),
        "zt.uncompressed-length-missing": zstd(),
        "zt.zstd-ratio": zstd(uncompressed_length=len(frame) * 32768 + 4),
        "zt.zstd-ratio+nothing-stored": shaped(0, length=0, encoding="zstd", uncompressed_length=0),
        "zt.dense-size": shaped(5),
        "zt.dense-size+zero": shaped(0),
        "zt.dense-size+complex": shaped(4, type="complex64"),
        "zt.dense-size+zstd": zstd(uncompressed_length=12),
        "zt.shape+overflow": shaped(2**32, 2**32),
        "zt.shape+overflow-to-fit": shaped(2**62, 4, 4),
        "zt.shape+overflow-with-zero": shaped(2**62, 2**62, 0, length=0),
        "zt.shape+rank": shaped(*[1] * 64, 4),
        "zt.part-missing": zt_file(manifest({"t": tensor(components={"dada": component()})}), {64: F32}),
        "zt.part-missing+no-parts": zt_file(manifest({"t": {"shape": [4], "format": "dense", "components": {}}})),
        "zt.part-missing+scales": zt_file(
            manifest({"t": tensor(format="quantized_group", components={"packed_weight": component()})}), {64: F32}
        ),
    }


def sparse_rejects() -> dict[str, bytes]:
    values = ({"dtype": "f32"}, F32)

    def csr(shape: list[int], indices: tuple[dict[str, Any], bytes], indptr: tuple[dict[str, Any], bytes]) -> bytes:
        parts = {"values": values, "indices": indices, "indptr": indptr}
        return packed({"t": ({"shape": shape, "format": "sparse_csr"}, parts)})

    def coo(shape: list[int], **parts: tuple[dict[str, Any], bytes]) -> bytes:
        return packed({"t": ({"shape": shape, "format": "sparse_coo"}, parts)})

    return {
        "zt.index-dtype": csr([2, 4], ({"dtype": "i64"}, bytes(32)), u64(0, 2, 4)),
        "zt.index-dtype+typed": csr([2, 4], ({"dtype": "u64", "type": "posit64"}, bytes(32)), u64(0, 2, 4)),
        "zt.sparse-size+indices": csr([2, 4], u64(0, 1, 2), u64(0, 2, 4)),
        "zt.sparse-size+indptr": csr([2, 4], u64(0, 1, 2, 3), u64(0, 4)),
        "zt.sparse-size+indptr-huge": csr([2**62, 1], u64(0, 1, 2, 3), u64(0, 4)),
        "zt.sparse-size+coords": coo([2, 4], values=values, coords=u64(0, 1, 2, 3)),
        "zt.part-missing+coords": coo([2, 4], values=values),
        "zt.part-size+half-a-complex": coo(
            [1, 1], values=({"dtype": "f32", "type": "complex64"}, bytes(4)), coords=u64()
        ),
    }


def place_rejects() -> dict[str, bytes]:
    def two(first: dict[str, Any], second: dict[str, Any], blobs: dict[int, bytes]) -> bytes:
        return zt_file(
            manifest({"a": tensor(**first), "b": tensor(**second)}),
            blobs,
        )

    def at(offset: int, count: int = 4) -> dict[str, Any]:
        return {"shape": [count], "components": {"data": component(offset=offset, length=4 * count)}}

    long = bytes(4 * 64)
    good = zt_file(manifest(), {64: F32})
    size = len(good) - 16 - 80
    return {
        "zt.blob-misaligned": zt_file(manifest({"t": tensor(**at(68, 3))}), {64: F32}),
        "zt.blob-in-header": zt_file(manifest({"t": tensor(**at(0, 2))}), {64: F32}),
        "zt.blob-out-of-bounds": zt_file(manifest({"t": tensor(**at(64, 400))}), {64: F32}),
        "zt.blob-out-of-bounds+into-manifest": zt_file(manifest({"t": tensor(**at(64, 5))}), {64: F32}),
        "zt.blob-out-of-bounds+offset": zt_file(manifest({"t": tensor(**at(2**62))}), {64: F32}),
        "zt.blob-out-of-bounds+end-past-u64": zt_file(
            manifest({"t": tensor(shape=[2**62 - 16], components={"data": component("u8", 2**63 - 64, 2**62 - 16)})}),
            {64: F32},
        ),
        "zt.blob-out-of-bounds+empty": zt_file(manifest({"t": tensor(**at(1 << 20, 0))}), {64: F32}),
        "zt.blob-overlap": two(at(64, 64), at(128, 4), {64: long}),
        "zt.blob-overlap+beginning": two(at(64, 4), at(64, 1), {64: long}),
        "zt.blob-overlap+shared-and-more": zt_file(
            manifest({"a": tensor(**at(64, 32)), "b": tensor(**at(64, 32)), "c": tensor(**at(128, 4))}), {64: long}
        ),
        "zt.blob-overlap+inside": two(at(128, 1), at(64, 32), {64: long}),
        "zt.header-magic": zt_file(manifest(), {64: F32}, header=b"ZTEN1001"),
        "zt.header-magic+short": b"ZTEN",
        "zt.footer-magic": zt_file(manifest(), {64: F32}, footer=b"ZTEN1001"),
        "zt.footer-magic+cut": good[:-1],
        "zt.truncated": b"ZTEN1000" + bytes(8) + b"ZTEN1000",
        "zt.manifest-too-large": zt_file(manifest(), {64: F32}, size=2**30 + 1),
        "zt.manifest-too-large+u64-max": zt_file(manifest(), {64: F32}, size=2**64 - 1),
        "zt.manifest-out-of-bounds": zt_file(manifest(), {64: F32}, size=size + 81),
        "zt.version-syntax": zt_file(manifest(version="one"), {64: F32}),
        "zt.version-syntax+empty": zt_file(manifest(version=""), {64: F32}),
        "zt.version-major": zt_file(manifest(version="2.0.0"), {64: F32}),
        "zt.version-major+schema": zt_file({"version": "2.0", "tensors": []}, {64: F32}),
        "zt.version-major+zero": zt_file(manifest(version="0.1.0"), {64: F32}),
        "zt.container-v2": b"\x89ZT2\r\n\x1a\n" + bytes(64),
        "zt.container-v0": b"ZTEN0001" + bytes(64),
    }


def damaged() -> dict[str, bytes]:
    frame = zstd_frame(F32)
    bomb = zstd_frame(b"\0", repeat=1 << 20)

    def zstd(data: bytes, length: int) -> bytes:
        return packed({"t": dense([length // 4], "f32", data, encoding="zstd", uncompressed_length=length)})

    return {
        "part.digest-mismatch+crc32c": one(digest="crc32c:0x00000000"),
        "part.digest-mismatch+sha256": one(digest="sha256:" + "0" * 64),
        "part.zstd+not-zstd": zstd(F32, 16),
        "part.zstd+too-long": zstd(frame, 12),
        "part.zstd+too-short": zstd(frame, 20),
        "part.zstd+cut": zstd(frame[:-1], 16),
        "part.zstd+bomb": zstd(bomb, 16),
        "part.zstd+trailing": zstd(frame + b"junk", 16),
        "part.zstd+window": zstd(b"\x28\xb5\x2f\xfd\x00\xff" + frame[-19:], 16),
        "encoding.unknown": one(encoding="brotli"),
    }


def expected(data: bytes) -> dict[str, Any]:
    """What reading a valid file gives: each tensor's header, and a hash of every part's decoded bytes."""
    from ingot.core.bytes.encodings import ENCODINGS
    from ingot.formats.zt.reader import read_catalog
    from ingot.model.bytesource import MemorySource
    from ingot.model.layouts.ids import file_id

    catalog = read_catalog(MemorySource(data, "file"))
    tensors = {}
    for name, found in catalog.tensors.items():
        parts = {
            role: hashlib.sha256(part.view()).hexdigest()[:16] if part.encoding in ENCODINGS else "unreadable"
            for role, part in found.parts.items()
        }
        tensors[name] = {
            "shape": list(found.shape),
            "dtype": found.dtype,
            "codec": file_id(found.codec),
            "parts": parts,
        }
    return {"tensors": tensors, "notes": sorted({rule for rule, _ in (*catalog.notes, *catalog.remarks)})}


def sealed(algorithm: str, **fields: Any) -> dict[str, Any]:
    """A manifest that ends with its digest: computed with the digest's digits as zeros."""
    digits = {"crc32c": "crc32c:0x" + "0" * 8, "sha256": "sha256:" + "0" * 64}[algorithm]
    root = manifest(**fields, ingot_digest=digits)
    return {**root, "ingot_digest": checksums.digest(algorithm, cbor.dumps(root))}


def digest_rejects() -> dict[str, bytes]:
    good, other = sealed("crc32c"), sealed("crc32c", attributes={"k": "v"})
    first = {"ingot_digest": good["ingot_digest"], **manifest()}
    return {
        "manifest.digest": zt_file({**other, "attributes": {"k": "w"}}, {64: F32}),
        "manifest.digest+renamed": zt_file({**good, "objects": {"u": tensor()}}, {64: F32}),
        "manifest.digest+not-last": zt_file(first, {64: F32}),
        "manifest.digest+unknown": zt_file({**good, "ingot_digest": "xxh3:00"}, {64: F32}),
        "manifest.digest+syntax": zt_file({**good, "ingot_digest": "crc32c"}, {64: F32}),
    }


def files() -> dict[str, bytes]:
    """Every file of the corpus by its path under ``zt``."""
    good = valid()
    rejected = cbor_rejects() | field_rejects() | part_rejects() | sparse_rejects() | place_rejects()
    rejected |= digest_rejects()
    made = {f"valid/{name}.zt": data for name, data in good.items()}
    made |= {f"reject/{name}.zt": data for name, data in rejected.items()}
    made |= {f"damaged/{name}.zt": data for name, data in damaged().items()}
    listing = {name: expected(data) for name, data in good.items()}
    made["expected.json"] = (json.dumps(listing, indent=1, sort_keys=True) + "\n").encode()
    return made


def main() -> None:
    for name, data in files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
