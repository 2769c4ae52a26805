"""The broken files of the .squizd corpus, by the rule that refuses them; ``make_squizd.py`` calls this."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.squizd import Made, squizd
from tests.support.squizd_items import bitmap, id_of
from tests.support.zt import OMIT, replace_at

U32, U64 = 2**32 - 1, 2**64 - 1
Files = dict[str, bytes]


def at(*path: Any) -> Callable[[Any], Callable[[Any], Any]]:
    """An edit that puts a value at a path of the directory."""
    *parents, key = path

    def edit(value: Any, root: Any) -> Any:
        inner = root
        for name in parents:
            inner = inner[name]
        rest = {other: kept for other, kept in inner.items() if other != key}
        return replace_at(root, parents, rest if value is OMIT else {**inner, key: value})

    return lambda value: lambda root: edit(value, root)


def entry(name: str, key: str, value: Any) -> Callable[[Any], Any]:
    return at("tensors", name, key)(value)


def headers(tools: SimpleNamespace) -> Files:
    base, sparse = squizd(tools.model()), squizd(tools.network())
    eagle = squizd(tools.model(), draft=tools.head())

    def wrong_check(made: Made, offset: int, form: str) -> bytes:
        data = bytearray(made.data)
        struct.pack_into("<" + form, data, offset, struct.unpack_from("<" + form, data, offset)[0] ^ 1)
        return bytes(data)

    return {
        "squizd.magic": base.patch(0, "4s", b"SQZE"),
        "squizd.magic+case": base.patch(0, "4s", b"sqzd"),
        "squizd.magic+short": b"SQ",
        "squizd.magic+empty": b"",
        "squizd.truncated": base.data[:255],
        "squizd.truncated+magic-alone": b"SQZD",
        "squizd.truncated+index": base.data[:319],
        "squizd.truncated+layer-count": base.patch(10, "H", 65535),
        "squizd.version+0": base.patch(4, "H", 0),
        "squizd.version+2": base.patch(4, "H", 2),
        "squizd.version+big-endian": base.patch(4, "H", 256),
        "squizd.layer-count": base.patch(10, "H", 0),
        "squizd.sparsity-crc": wrong_check(sparse, 14, "I"),
        "squizd.sparsity-crc+metadata": wrong_check(sparse, 136, "I"),
        "squizd.sparsity-crc+reserved": wrong_check(sparse, 158, "B"),
        "squizd.sparsity-version+0": sparse.patch(128, "I", 0),
        "squizd.sparsity-version+2": sparse.patch(128, "I", 2),
        "squizd.sparsity-meta+block-size": sparse.patch(132, "I", 0),
        "squizd.sparsity-meta+layers": sparse.patch(136, "I", 0),
        "squizd.sparsity-meta+mean-nan": sparse.patch(140, "f", math.nan),
        "squizd.sparsity-meta+mean-infinite": sparse.patch(140, "f", math.inf),
        "squizd.sparsity-meta+mean-negative": sparse.patch(140, "f", -0.25),
        "squizd.sparsity-meta+mean-past-1": sparse.patch(140, "f", 1.5),
        "squizd.draft-hash": wrong_check(eagle, 18, "Q"),
        "squizd.draft-hash+metadata": wrong_check(eagle, 180, "I"),
        "squizd.draft-hash+reserved": wrong_check(eagle, 191, "B"),
        "squizd.draft-missing": eagle.patch(160, "QQ", 0, 0),
        "squizd.draft-missing+length": eagle.patch(168, "Q", 0),
        "squizd.draft-missing+offset": eagle.patch(160, "Q", 0),
    }


def index(tools: SimpleNamespace) -> Files:
    base, sparse = squizd(tools.model()), squizd(tools.network())
    size, (first, second) = len(base.data), base.main.spans
    return {
        "squizd.index-order": base.patch(256, "I", 1),
        "squizd.index-order+twice": base.patch(288, "I", 0),
        "squizd.index-order+huge": base.patch(288, "I", U32),
        "squizd.layer-in-header": base.patch(260, "Q", 0),
        "squizd.layer-in-header+index": base.patch(260, "Q", 319),
        "squizd.layer-out-of-bounds+length": base.patch(300, "Q", size),
        "squizd.layer-out-of-bounds+u64-length": base.patch(300, "Q", U64),
        "squizd.layer-out-of-bounds+offset": base.patch(292, "Q", size + 1),
        "squizd.layer-out-of-bounds+end-past-u64": base.patch(292, "QQ", U64 - 63, 128),
        "squizd.layer-out-of-bounds+empty": squizd([]).patch(260, "Q", U64),
        "squizd.layer-overlap": base.patch(268, "Q", second[1] - first[0]),
        "squizd.layer-overlap+same": base.patch(292, "QQ", *(first[0], first[1] - first[0])),
        "squizd.layer-overlap+order": base.patch(260, "QQQ", second[0], second[1] - second[0], 0)[:292]
        + struct.pack("<QQ", first[0], first[1] - first[0])
        + base.data[308:],
        "squizd.scale-offset": base.patch(276, "Q", 1),
        "squizd.scale-offset+second-layer": base.patch(308, "Q", base.main.tables[0][0] + 8),
        "squizd.scale-offset+past-the-end": base.patch(276, "Q", U64),
        "squizd.scale-offset+inside-a-block": base.patch(276, "Q", first[0]),
        "squizd.scale-offset+second-mask": sparse.patch(276, "Q", (sparse.main.masks[0] or 0) + 1),
        "squizd.scale-offset+directory": base.patch(276, "Q", base.main.directory),
    }


def blocks(tools: SimpleNamespace) -> Files:
    """Each as a file with a directory and, where it is the same rule, without."""
    int4, dense, int2 = squizd([tools.int4("t")]), squizd([tools.norm("t")]), squizd([tools.int2("t")])
    picture, triple = squizd([tools.picture("t")]), squizd([tools.triple("t", 4, 8)])
    nameless = squizd([tools.int4("t"), tools.norm()], named=False)

    def inside(made: Made, offset: int, form: str, *values: Any) -> bytes:
        return made.patch(made.main.blocks["t"] + offset, form, *values)

    cut = squizd([tools.norm("t")], named=False)
    words = tools.sparse_words(3, 64)
    bits = squizd([bitmap("t", words)], named=False)
    return {
        "squizd.tca-bitmap": inside(bits, 12, "B", bits.data[bits.main.blocks["t"] + 12] ^ 1),
        "squizd.tca-bitmap+rows": inside(bits, 4, "I", U32),
        "squizd.tca-bitmap+no-rows": inside(bits, 4, "I", 0),
        "squizd.tca-header+bitmap-word-width": inside(bits, 8, "I", 32),
        "squizd.tca-ambiguous": squizd([bitmap("t", tools.sparse_words(3, 70))], named=False).data,
        "squizd.block-out-of-bounds+bitmap": squizd([bitmap("t", words, nnz=192)]).data,
        "squizd.directory-conflict+bitmap-nnz": squizd([bitmap("t", words, nnz=193)]).data,
        "squizd.directory-conflict+bitmap-alignment": squizd([bitmap("t", words, row_alignment=8)]).data,
        "squizd.block-magic": inside(int4, 0, "4s", b"INT3"),
        "squizd.block-magic+case": inside(dense, 0, "4s", b"npcl"),
        "squizd.block-magic+nameless": inside(nameless, 0, "4s", b"SCZT"),
        "squizd.block-magic+zeros": inside(dense, 0, "4s", bytes(4)),
        "squizd.block-out-of-bounds+rows": inside(int4, 4, "I", 5),
        "squizd.block-out-of-bounds+past-u64": inside(int4, 4, "II", U32, U32),
        "squizd.block-out-of-bounds+int2-past-u64": inside(int2, 4, "II", U32, U32),
        "squizd.block-out-of-bounds+npcl-past-u64": inside(
            squizd([tools.dense("t", "f32", [1, 1, 1], bytes(4))]), 12, "III", U32, U32, U32
        ),
        "squizd.block-out-of-bounds+npcl-to-fit": inside(
            squizd([tools.dense("t", "u8", [1, 1, 1, 1], bytes(4))]), 12, "IIII", 2**31, 2**31, 4, 1
        ),
        "squizd.block-out-of-bounds+astc": inside(picture, 4, "II", U32, U32),
        "squizd.block-out-of-bounds+tca": inside(triple, 4, "I", U32),
        "squizd.block-out-of-bounds+tca-high": inside(triple, 28, "Q", U64),
        "squizd.block-out-of-bounds+tca-fallback": inside(triple, 36, "Q", 2**63),
        "squizd.block-out-of-bounds+nameless": inside(nameless, 8, "I", U32),
        "squizd.block-out-of-bounds+header": cut.patch(256 + 12, "Q", 8),
        "squizd.block-out-of-bounds+magic": cut.patch(256 + 12, "Q", 3),
        "squizd.npcl-dtype": inside(dense, 4, "I", 3),
        "squizd.npcl-dtype+past-ours": inside(dense, 4, "I", 276),
        "squizd.npcl-dtype+huge": inside(dense, 4, "I", U32),
        "squizd.npcl-rank": inside(dense, 8, "I", 65),
        "squizd.npcl-rank+huge": inside(dense, 8, "I", U32),
        "squizd.footprint+2": inside(picture, 12, "I", 2),
        "squizd.footprint+17": inside(picture, 12, "I", 17),
        "squizd.tca-header+word-width": inside(triple, 8, "I", 32),
        "squizd.tca-header+version": inside(triple, 12, "I", 2),
        "squizd.tca-header+reserved": inside(triple, 24, "I", 1),
        "squizd.tca-header+padding": inside(triple, 63, "B", 1),
    }


def scales(tools: SimpleNamespace) -> Files:
    items = [tools.int4("t"), tools.int4("u", group="tensor")]
    base, nameless = squizd(items), squizd(items, named=False)
    table, second = base.main.tables[0][0], base.main.tables[1][0]

    def entries(change: Callable[[Any, Any], Any], named: bool = True, edit: Any = None) -> bytes:
        return squizd(items, named=named, tables=lambda both: change(*both), edit=edit).data

    foreign, own = id_of(0, "foreign"), base.main.places
    places = {name: own[name]["first"] for name in own}
    made = {
        "squizd.scale-table": base.patch(table + 4, "I", U32),
        "squizd.scale-table+second": base.patch(second + 4, "I", 2**28),
        "squizd.scale-table+nameless": nameless.patch(table + 4, "I", U32),
        "squizd.scale-missing+nameless": entries(lambda a, b: [], False),
        "squizd.scale-missing": entries(
            lambda a, b: [], edit=lambda root: replace_at(root, ("tensors",), with_runs(root, base))
        ),
        "squizd.scale-count+one-more": entries(lambda a, b: [[*a, (foreign, 1.0, 0.0)], b]),
        "squizd.scale-count+one-more-nameless": entries(lambda a, b: [[*a, (foreign, 1.0, 0.0)], b], False),
        "squizd.scale-count+one-less": entries(lambda a, b: [a[:1], b]),
        "squizd.scale-count+one-less-nameless": entries(lambda a, b: [a[:1], b], False),
        "squizd.scale-count+many-nameless": entries(lambda a, b: [[(i, 1.0, 0.0) for i in range(99)], b], False),
        "squizd.scale-id": entries(lambda a, b: [[(foreign, 1.0, 0.0), a[1]], b]),
        "squizd.scale-id+second": entries(lambda a, b: [a, [(foreign | 1 << 63, 1.0, 0.0), *b[1:]]]),
        "squizd.scale-id+second-last": entries(lambda a, b: [a, [*b[:-1], (foreign | 1 << 63, 1.0, 0.0)]]),
        "squizd.scale-id+high-bit": entries(
            lambda a, b: [a, [(id, s, z) for id, s, z in [(b[0][0] % 2**63, 1.0, 0.0)] * 8]]
        ),
        "squizd.scale-id+nameless": entries(lambda a, b: [a, [(foreign | 1 << 63, 1.0, 0.0)] * 8], False),
        "squizd.scale-id+nameless-apart": entries(
            lambda a, b: [a, [*b[:4], (a[1][0] | 1 << 63, 1.0, 0.0), *b[4:]]], False
        ),
        "squizd.scale-id+nameless-layer": squizd(
            [tools.int4(f"model.layers.{layer}.mlp.up_proj.weight", group="tensor", layer=layer) for layer in (0, 1)],
            named=False,
            tables=lambda tables: [
                [(id_of(1, f"model.layers.1.mlp.{name}_proj.weight"), 1.0, 0.0) for name in ("up", "gate")]
            ],
        ).data,
        "squizd.scale-rounds": entries(lambda a, b: [[(a[0][0], 2.0, 0.0), a[1]], b]),
        "squizd.scale-rounds+zero": entries(lambda a, b: [[(a[0][0], 1.0, 1.0), a[1]], b]),
        "squizd.scale-rounds+nan": entries(lambda a, b: [[(a[0][0], math.nan, 0.0), a[1]], b]),
        "squizd.scale-rounds+nameless": entries(lambda a, b: [[(a[0][0], 0.5, 0.0), a[1]], b], False),
        "squizd.sub-blocks": entries(lambda a, b: [a, b[:7]], False),
        "squizd.sub-blocks+more": entries(lambda a, b: [a, b * 40], False),
        "squizd.sub-blocks+two-ways": squizd([tools.int2("t", 3, 7, 4)], named=False).data,
        "squizd.sub-blocks+int2": squizd([tools.int2("t")], named=False).patch(nameless_block(tools) + 12, "I", 16),
    }
    for variant, value in {
        "off-the-grid": [places["u"][0] - 8, 1],
        "outside": [table - 8, 1],
        "second-table": [second + 8, 1],
        "past-u63": [2**63 - 1, 1],
    }.items():
        made[f"squizd.scale-entry+{variant}"] = squizd(items, edit=entry("u", "first", value)).data
    run = own["t"]["second"]
    made["squizd.scale-entry+second-outside"] = squizd(items, edit=entry("t", "second", [run[0] + 16, 8])).data
    made["squizd.scale-entry+first-table"] = squizd(items, edit=entry("t", "second", [table + 8, 8])).data
    return made


def nameless_block(tools: SimpleNamespace) -> int:
    return squizd([tools.int2("t")], named=False).main.blocks["t"]


def with_runs(root: Any, like: Made) -> Any:
    return {name: {**about, **like.main.places[name]} for name, about in root["tensors"].items()}


def features(tools: SimpleNamespace) -> Files:
    plain, base, sparse = squizd([tools.norm()]), squizd(tools.model()), squizd(tools.network())
    flags = {"ASTC": 1, "TCA_TBE": 2, "INT4": 4, "INT2": 32}
    carriers = {
        "ASTC": tools.picture("t"),
        "TCA_TBE": tools.triple("t", 4, 8),
        "INT4": tools.int4("t"),
        "INT2": tools.int2("t"),
    }
    ambiguous = squizd(tools.full_network(kept=(0, 1, 2)), named=False)
    made = {f"squizd.flag-empty+{name}": plain.patch(6, "I", flag) for name, flag in flags.items()}
    made |= {f"squizd.flag-missing+{name}": squizd([item], flags=0).data for name, item in carriers.items()}
    made |= {
        "squizd.flag-empty+nameless": squizd([tools.norm()], named=False, flags=4).data,
        "squizd.flag-missing+nameless": squizd([tools.int4("t")], named=False, flags=0).data,
        "squizd.flag-missing+INT2-in-INT4": squizd([tools.int2("t"), tools.int4("u")], flags=4).data,
        "squizd.flag-empty+several": squizd([tools.norm()], flags=32 | 4 | 1).data,
        "squizd.flag-missing+SPARSE": sparse.patch(6, "I", 4),
        "squizd.sparse-layers": sparse.patch(136, "I", 2),
        "squizd.sparse-layers+huge": sparse.patch(136, "I", U32),
        "squizd.sparse-layers+scale-offset": sparse.patch(276, "Q", sparse.main.tables[0][0]),
        "squizd.sparse-without-directory": squizd(tools.network(kept=(0,)), named=False).data,
        "squizd.sparse-ambiguous": Made(ambiguous.data, ambiguous.main).patch(140, "f", 0.75),
        "squizd.sparse-ambiguous+orders": squizd(tools.eight_blocks(), named=False).data,
        "squizd.sparse-conflict": squizd(tools.full_network(filled=True), named=False).data,
        "squizd.sparse-masks": squizd(tools.full_network(), named=False).patch(132, "I", 2),
        "squizd.coreml-missing": plain.patch(6, "I", 64),
        "squizd.coreml-missing+int4": base.patch(6, "I", 4 | 64),
    }
    data = bytearray(base.data)
    data[128:144] = struct.pack("<IIIf", 1, 64, 1, 0.5)
    missing = Made(bytes(data), base.main).patch(128, "I", 1)
    made["squizd.sparse-missing"] = missing[:6] + struct.pack("<I", 4 | 8) + missing[10:]
    mask = [sparse.main.directory, 1]
    name = "model.layers.0.mlp.up_proj.weight"
    made["squizd.mask"] = squizd(tools.network(), edit=entry(name, "mask", mask)).data
    made["squizd.mask+length"] = squizd(tools.network(), edit=entry(name, "mask", [sparse.main.masks[0], 2**62])).data
    made["squizd.block-overlap+masks"] = squizd(
        tools.network(), edit=entry(name, "mask", [sparse.main.masks[0], 1])
    ).data
    return made


def directories(tools: SimpleNamespace) -> Files:
    items = [
        tools.int4("t", scales="f16"),
        tools.norm("n"),
        tools.dense("d", "f32", [2, 3], bytes(24)),
        tools.int2("i"),
    ]
    sparse, base = tools.network(), squizd(items)
    where = base.main.directory
    made = {
        "squizd.directory-too-large": base.patch(where + 4, "Q", 2**30 + 1),
        "squizd.directory-too-large+u64": base.patch(where + 4, "Q", U64),
        "squizd.directory-out-of-bounds": base.patch(where + 4, "Q", len(base.data) - where - 11),
        "squizd.directory-out-of-bounds+cut": base.data[:-1],
        "squizd.block-outside-layer": squizd(items, edit=entry("n", "offset", where)).data,
        "squizd.block-outside-layer+header": squizd(items, edit=entry("n", "offset", 0)).data,
        "squizd.directory-conflict+offset": squizd(items, edit=entry("n", "offset", base.main.blocks["d"])).data,
        "cbor.trailing-bytes": base.patch(where + 4, "Q", len(base.data) - where - 12 + 1) + b"\0",
        "cbor.truncated": squizd([], edit=lambda root: b"").data,
        "cbor.length": squizd([], edit=lambda root: b"\xba\xff\xff\xff\xff").data,
        "cbor.duplicate-key": squizd([], edit=lambda root: b"\xa2\x67version\x01\x67version\x01").data,
        "cbor.depth": squizd([], edit=lambda root: b"\xa1\x61a" + b"\x81" * 64 + b"\0").data,
    }
    # Two tensors that claim the same dense block, and one whose bytes hold another: all that each says is true.
    alias = [tools.norm("a"), tools.norm("b")]
    made["squizd.block-overlap+alias"] = squizd(alias, edit=entry("b", "offset", squizd(alias).main.blocks["a"])).data
    inner = tools.dense("b", "u8", [4], b"four")
    outer = [tools.dense("a", "u8", [20], inner.head + inner.payload), inner]
    offset = squizd(outer).main.blocks["a"] + len(outer[0].head)
    made["squizd.block-overlap+inside"] = squizd(outer, edit=entry("b", "offset", offset)).data
    edits: dict[str, Any] = {
        "directory-version": at("version")(2),
        "directory-schema+list": lambda root: [root],
        "directory-schema+version-missing": at("version")(OMIT),
        "directory-schema+version-text": at("version")("1"),
        "directory-schema+tensors-missing": at("tensors")(OMIT),
        "directory-schema+tensors-list": at("tensors")([]),
        "directory-schema+metadata": at("metadata")([]),
        "directory-schema+draft-digest": at("draft_digest")(1),
        "directory-schema+tensor": at("tensors", "n")(None),
        "directory-layer": entry("n", "layer", 1),
        "directory-layer+last": entry("n", "layer", 65535),
        "digest": entry("n", "digests", {"data": "crc32c:xyz"}),
        "digest+algorithm": entry("n", "digests", {"data": "0011"}),
        "digest+short": entry("n", "digests", {"data": "sha256:00"}),
        "digest+coreml": at("coreml_digest")("sha256:xyz"),
        "directory-conflict+digest-role": entry("n", "digests", {"scales": "crc32c:0x00000000"}),
        "chunk-digests": entry("n", "chunks", {"data": {"size": 4096, "digests": bytes(8)}}),
        "chunk-digests+size": entry("n", "chunks", {"data": {"size": 1, "digests": bytes(4)}}),
        "chunk-digests+role": entry("n", "chunks", {"scales": {"size": 4096, "digests": bytes(4)}}),
        "directory-schema+chunks": entry("n", "chunks", {"data": bytes(4)}),
        "directory-conflict+mask": entry("n", "mask", [base.main.blocks["n"], 1]),
        "directory-conflict+scales": entry("n", "scales", "f32"),
        "directory-conflict+scales-dtype": entry("t", "scales", "i32"),
        "directory-conflict+scales-missing": entry("t", "scales", OMIT),
        "directory-conflict+first-missing": entry("t", "first", OMIT),
        "directory-conflict+second-missing": entry("t", "second", OMIT),
        "directory-conflict+first-count": entry("t", "first", [base.main.tables[0][0] + 8, 2]),
        "directory-conflict+first-of-dense": entry("n", "first", [base.main.tables[0][0] + 8, 1]),
        "directory-conflict+params": entry("t", "params", {}),
        "directory-conflict+bits": at("tensors", "t", "params", "bits")(2),
        "directory-conflict+bits-infinite": at("tensors", "t", "params", "bits")(math.inf),
        "directory-conflict+unsigned": at("tensors", "t", "params", "signed")(False),
        "directory-conflict+packing": at("tensors", "t", "params", "packing")("rows_msb"),
        "directory-conflict+group-size": at("tensors", "i", "params", "group_size")(16),
        "directory-conflict+group-size-negative": at("tensors", "i", "params", "group_size")(-32),
        "directory-conflict+group-size-infinite": at("tensors", "t", "params", "group_size")(math.inf),
        "directory-conflict+group-size-zero": at("tensors", "t", "params", "group_size")(0),
        "directory-conflict+granularity": at("tensors", "t", "params", "granularity")("tensor"),
        "directory-conflict+codec": entry("n", "codec", "astc"),
        "directory-conflict+codec-unknown": entry("n", "codec", "palette"),
        "directory-conflict+sparse": entry("n", "codec", "sparse_blocks"),
    }
    for key in ("shape", "dtype", "codec", "layer", "offset"):
        edits[f"directory-schema+{key}-missing"] = entry("n", key, OMIT)
        edits[f"directory-schema+{key}-null"] = entry("n", key, None)
        edits[f"directory-schema+{key}-list"] = entry("n", key, [[]])
    for key, value in (("layer", -1), ("layer", 65536), ("offset", -1), ("offset", 2**63), ("offset", 1.5)):
        edits[f"directory-schema+{key}-{value}"] = entry("n", key, value)
    for key, value in (
        ("first", [1]),
        ("second", [1, -1]),
        ("mask", 3),
        ("zeros", 1),
        ("params", []),
        ("digests", {"data": 1}),
    ):
        edits[f"directory-schema+{key}"] = entry("t", key, value)
    for name, shape in {"other": [9], "rank": [8, 1], "none": [], "past-u64": [2**62, 2**62], "long": [1] * 65}.items():
        edits[f"directory-conflict+shape-{name}"] = entry("n", "shape", shape)
    edits["directory-conflict+shape-transposed"] = entry("d", "shape", [3, 2])
    for name, dtype in {"other": "f16", "unknown": "f9", "newline": "a\nb"}.items():
        edits[f"directory-conflict+dtype-{name}"] = entry("n", "dtype", dtype)
    edits["directory-schema+shape-negative"] = entry("n", "shape", [-8])
    edits["directory-schema+shape-float"] = entry("n", "shape", [8.0])
    made |= {f"squizd.{name}": squizd(items, edit=edit).data for name, edit in edits.items()}
    name = sparse[0].name
    for key, value in {"kept": 11, "axis": 2, "inner": "astc", "inner_params": None, "mask": OMIT}.items():
        edit = entry(name, key, value) if key == "mask" else at("tensors", name, "params", key)(value)
        made[f"squizd.directory-conflict+sparse-{key}"] = squizd(sparse, edit=edit).data
    return made


def appendices(tools: SimpleNamespace) -> Files:
    both = squizd([tools.norm()], draft=tools.head(), coreml=tools.package())
    alone = squizd([tools.norm()], draft=tools.head())
    assert both.draft is not None
    assert alone.draft is not None
    start, end, size = start_of(alone), alone.draft.tail, len(both.data)
    item = [tools.int4("q", group="tensor")]
    nameless = squizd([tools.norm()], draft=item, draft_named=False, coreml=bytes(64))
    assert nameless.draft is not None
    flipped = bytearray(alone.data)
    flipped[-1] ^= 1
    empty = Made(alone.data, alone.main).patch(168, "Q", 8)[: alone.draft.start]
    return {
        "squizd.draft-out-of-bounds": alone.patch(168, "Q", end),
        "squizd.draft-out-of-bounds+u64": alone.patch(168, "Q", U64),
        "squizd.draft-out-of-bounds+offset": alone.patch(160, "Q", U64 - 7),
        "squizd.draft-out-of-bounds+past-the-end": alone.patch(160, "Q", len(alone.data) + 64),
        "squizd.draft-out-of-bounds+directory": alone.patch(160, "Q", alone.main.directory),
        "squizd.draft-out-of-bounds+header": alone.patch(160, "Q", 128),
        "squizd.draft-out-of-bounds+length-4": alone.patch(168, "Q", 4),
        "squizd.draft-out-of-bounds+tables": nameless.patch(168, "Q", nameless.draft.tables[0][0] - start_of(nameless)),
        "squizd.draft-magic": alone.patch(start, "4s", b"EGDX"),
        "squizd.draft-layers": alone.patch(start + 4, "I", 2),
        "squizd.draft-layers+header": alone.patch(176, "I", U32),
        "squizd.draft-missing+blocks": empty,
        "squizd.draft-digest": bytes(flipped),
        "squizd.block-magic+draft": alone.patch(alone.draft.blocks["norm.weight"], "4s", b"NPCX"),
        "squizd.block-out-of-bounds+draft": alone.patch(alone.draft.blocks["d2t"] + 12, "I", U32),
        "squizd.coreml-missing+magic": both.patch(both.coreml, "4s", b"ANLY"),
        "squizd.coreml-missing+cut": both.data[: both.coreml + 11],
        "squizd.coreml-length+short": both.patch(both.coreml + 4, "Q", size - both.coreml - 13),
        "squizd.coreml-length+long": both.patch(both.coreml + 4, "Q", size - both.coreml - 11),
        "squizd.coreml-length+u64": both.patch(both.coreml + 4, "Q", U64),
        "squizd.coreml-length+trailing": both.data + b"\0",
    }


def start_of(made: Made) -> int:
    assert made.draft is not None
    return made.draft.start - 8


def digests(tools: SimpleNamespace) -> Files:
    """A byte of what the directory's digest covers is another one, or a byte that leads to the directory."""
    made = squizd([tools.norm()], sealed=True)
    at, end = made.main.directory, len(made.data)
    part = made.data.index(b"crc32c:0x") + 9
    return {
        "manifest.digest+flags": made.patch(6, "I", 1 << 20),
        "manifest.digest+reserved": made.patch(40, "B", 1),
        "manifest.digest+arch": made.patch(12, "H", 7),
        "manifest.digest+digest-of-a-part": made.patch(part, "B", made.data[part] ^ 1),
        "manifest.digest+itself": made.patch(end - 1, "B", made.data[end - 1] ^ 1),
        "squizd.directory-lost": made.patch(at, "4s", b"TDIS"),
    }


def rejected(tools: SimpleNamespace) -> Files:
    made: Files = {}
    for some in (headers, index, blocks, scales, features, directories, appendices, digests):
        made |= some(tools)
    return made


def replaced(items: list[Any], item: Any) -> list[Any]:
    return [item if one.name == item.name else one for one in items]


def damaged(tools: SimpleNamespace) -> Files:
    """Files that open, and whose contents verify refuses."""
    item = tools.int4("t", scales="f16")
    base = squizd([item, tools.norm("n")])
    second = base.main.tables[1][0] + 8
    silent = squizd([item], digest=None)
    head, zipped = tools.head(), tools.package()
    wide, other = (tools.dense("d2t", "i64", [3], struct.pack("<3q", *values)) for values in ((0, 1, 9), (0, 1, -2)))
    sparse = squizd(tools.network(), digest=None)
    return {
        "part.digest-mismatch+data": base.patch(base.main.blocks["n"] + 16, "B", 0x55),
        "part.digest-mismatch+packed_weight": base.patch(base.main.blocks["t"] + 12, "B", 0x55),
        "part.digest-mismatch+scales": base.patch(second + 16 + 8, "f", 0.5),
        "part.digest-mismatch+stated": squizd([item], edit=entry("t", "digests", {"scales": "crc32c:0x00000000"})).data,
        "squizd.scale-id+middle": silent.patch(silent.main.tables[1][0] + 8 + 16 * 3, "Q", 1 << 63 | 5),
        "squizd.scale-dtype": silent.patch(silent.main.tables[1][0] + 8 + 16 + 8, "f", 0.1),
        "squizd.scale-dtype+overflow": silent.patch(silent.main.tables[1][0] + 8 + 16 + 8, "f", 1e9),
        "squizd.zero-point": silent.patch(silent.main.tables[1][0] + 8 + 16 + 12, "f", 1.0),
        "sparse_blocks.mask": sparse.patch(sparse.main.masks[0] or 0, "B", 0b11),
        "sparse_blocks.mask+spare-bits": sparse.patch(sparse.main.masks[0] or 0, "B", 0b1101),
        "draft.range": squizd([tools.norm()], draft=replaced(head, wide)).data,
        "draft.order": squizd([tools.norm()], draft=replaced(head, other)).data,
        "draft.missing": squizd([tools.norm()], draft=head[1:]).data,
        "draft.mapping": squizd([tools.norm()], draft=[one for one in head if one.name != "t2d"]).data,
        "archive.nested": squizd([tools.norm()], coreml=tools.package(**{"Data/x": zipped})).data,
        "archive.name": squizd([tools.norm()], coreml=tools.package(**{"../x": b"1"})).data,
        "archive.truncated": squizd([tools.norm()], coreml=b"PK").data,
        "part.digest-mismatch+coreml": squizd(
            [tools.norm()], coreml=zipped, edit=at("coreml_digest")("sha256:" + "0" * 64)
        ).data,
    }
