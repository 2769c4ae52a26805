"""Makes the golden corpus of .squizd files: python -m tests.golden.make_squizd

``valid`` files open and what they hold is listed in ``expected.json``. ``reject`` files are named by the rule that
refuses them, a variant after ``+``; ``damaged`` ones open, and verifying them finds the rule in the name. Everything is
packed from bytes by ``tests.support.squizd``, which shares nothing with the format; only what a tca_tbe tensor holds is
that codec's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import struct
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from tests.support.squizd import Made, squizd
from tests.support.squizd_items import Array, Item, astc, bitmap, dense, pruned, quantized, tca

packed = squizd

ROOT = Path(__file__).parent / "squizd"
OWN = [name for name in DTYPES if name not in ("f32", "f16", "bf16")]
LAYER = "model.layers.{}."


def codes(rows: int, cols: int, bits: int, seed: int = 0) -> Array:
    """Every code that there is, in an order without pattern."""
    half, index = 1 << bits - 1, np.arange(rows * cols, dtype=np.int64)
    return ((index * 7 + index // 5 + seed) % (2 * half) - half).reshape(rows, cols)


def pairs(count: int, zeros: bool = False) -> list[tuple[float, float]]:
    """Scales, and zero points if asked for, that every type of scale holds."""
    return [((1 + index % 13) / 64, float(index % 5 - 2) if zeros else 0.0) for index in range(count)]


def int4(name: str, rows: int = 4, cols: int = 32, group: int | str = 16, layer: int = 0, **about: Any) -> Item:
    count = {"tensor": 1, "row": rows}.get(str(group)) or rows * -(-cols // int(group))
    return quantized(
        name, codes(rows, cols, 4), 4, pairs(count, about.get("zeros", False)), group, layer=layer, **about
    )


def int2(name: str, rows: int = 4, cols: int = 64, group: int | str = 32, layer: int = 0, **about: Any) -> Item:
    count = {"tensor": 1, "row": rows}.get(str(group)) or rows * -(-cols // int(group))
    return quantized(
        name, codes(rows, cols, 2), 2, pairs(count, about.get("zeros", False)), group, layer=layer, **about
    )


def values(dtype: str, *shape: int) -> bytes:
    """Small numbers for the floats, bytes in turn for the rest."""
    count = int(np.prod(shape))
    if DTYPES[dtype].category == "f" and DTYPES[dtype].bits >= 16:
        return ((np.arange(count) % 29 - 14) / 8).astype(numpy_dtype(dtype)).tobytes()
    size = DTYPES[dtype].nbytes(count)
    return bytes(index % 2 if dtype == "bool" else index % 251 for index in range(size))


def norm(name: str = "model.norm.weight", layer: int = 0, size: int = 8) -> Item:
    return dense(name, "bf16", [size], values("bf16", size), layer)


def triple(name: str, rows: int, cols: int, layer: int = 0) -> Item:
    """A TCA-TBE block with values in and out of the window, -0 and a subnormal."""
    from ingot.codecs.table import CODECS

    weights = np.frombuffer(values("bf16", rows, cols), numpy_dtype("bf16")).reshape(rows, cols).copy()
    weights.view(np.uint16)[0, :2] = (0x8000, 0x0001)
    encoder = CODECS["tca_tbe"].encoder((rows, cols), "bf16", {"start": 121})
    return tca(name, (rows, cols), 121, {role: data.tobytes() for role, data in encoder.encode(weights).items()}, layer)


def sparse_words(rows: int, cols: int) -> Array:
    """bf16 as words of 16 bits: numbers, zeros, -0 and a subnormal; every row ends with a number."""
    index = np.arange(rows * cols).reshape(rows, cols)
    words = np.where(index % 3 == 1, 0, 0x3C00 + index * 37 % 1024).astype(np.uint16)
    words[:, -1] = 0xBF80
    words[0, :2] = (0x8000, 0x0001)
    return words


def picture(name: str, layer: int = 0) -> Item:
    return astc(name, np.array([[0, 65535, 32768], [21845, 43690, 1]]), (7, 10), (0.5, -0.25), layer)


def network(layer: int = 0, kept: tuple[int, ...] = (0, 2)) -> list[Item]:
    """A feed-forward network with 20 channels in blocks of 8, of which the last has 4."""
    prefix, count = LAYER.format(layer) + "mlp.", sum(4 if block == 2 else 8 for block in kept)
    rows = [
        pruned(int4(f"{prefix}{name}.weight", count, 16, 8, layer), 0, 20, 8, kept) for name in ("gate_proj", "up_proj")
    ]
    return [*rows, pruned(int4(f"{prefix}down_proj.weight", 6, count, 4, layer), 1, 20, 8, kept)]


def eight_blocks() -> list[Item]:
    """A network of blocks of 2 of which 5 of 8 are kept: whichever end the mask's bits begin at."""
    prefix = LAYER.format(0) + "mlp."
    kept = (0, 1, 3, 5, 7)
    rows = [pruned(int4(f"{prefix}{name}.weight", 10, 16, 8), 0, 16, 2, kept) for name in ("gate_proj", "up_proj")]
    return [*rows, pruned(int4(f"{prefix}down_proj.weight", 6, 10, 2), 1, 16, 2, kept)]


def full_network(layer: int = 0, kept: tuple[int, ...] = (0, 2), *, filled: bool = False) -> list[Item]:
    """The same in full size, zeros where a block is dropped, unless ``filled``."""
    prefix = LAYER.format(layer) + "mlp."
    stays = np.isin(np.arange(20) // 8, range(3) if filled else kept)
    wide, tall = np.where(stays[:, None], codes(20, 16, 4), 0), np.where(stays, codes(6, 20, 4), 0)
    rows = [
        quantized(f"{prefix}{name}.weight", wide, 4, pairs(40), 8, layer=layer) for name in ("gate_proj", "up_proj")
    ]
    columns = quantized(f"{prefix}down_proj.weight", tall, 4, pairs(30), 4, layer=layer)
    return [pruned(item, int(item is columns), 20, 8, kept, whole=True) for item in (*rows, columns)]


def head(width: int = 4, vocabulary: int = 6) -> list[Item]:
    """An EAGLE-3 draft head as small as can be, two of its matrices quantized."""
    shapes: dict[str, tuple[int, ...]] = {"midlayer.self_attn.v_proj.weight": (width, 2 * width)}
    shapes |= {f"midlayer.{one}.weight": (width, width) for one in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")}
    shapes |= {"midlayer.mlp.down_proj.weight": (width, width)}
    behind = {"fc.weight": (width, 3 * width), "norm.weight": (width,), "lm_head.weight": (3, width)}
    behind |= {"midlayer.hidden_norm.weight": (width,)}
    tokens = np.array([0, 2, 5])
    return [
        *(dense(name, "f16", shape, values("f16", *shape)) for name, shape in shapes.items()),
        *(
            int4(f"midlayer.self_attn.{one}_proj.weight", width, 2 * width, group)
            for one, group in (("q", 4), ("k", "row"))
        ),
        dense("d2t", "i64", [3], (tokens - np.arange(3)).astype("<i8").tobytes()),
        dense("t2d", "bool", [vocabulary], bytes(int(token in tokens) for token in range(vocabulary))),
        *(dense(name, "f16", shape, values("f16", *shape)) for name, shape in behind.items()),
    ]


def zipped(files: dict[str, bytes]) -> bytes:
    """A zip without compression (APPNOTE 4.3), the same bytes under every Python."""
    body, index = b"", b""
    for name, data in files.items():
        about = struct.pack("<HHHHIII", 0x800, 0, 0, 0x21, zlib.crc32(data), len(data), len(data))
        about += struct.pack("<HH", len(name), 0)
        index += struct.pack("<IHH", 0x02014B50, 20, 20) + about
        index += struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + name.encode()
        body += struct.pack("<IH", 0x04034B50, 20) + about + name.encode() + data
    return body + index + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, len(files), len(files), len(index), len(body), 0)


def package(**more: bytes) -> bytes:
    manifest = {"fileFormatVersion": "1.0.0", "rootModelIdentifier": "1"}
    manifest |= {"itemInfoEntries": {"1": {"path": "com.apple.CoreML/model.mlmodel"}}}
    files = {"Data/com.apple.CoreML/model.mlmodel": b"\x08\x07", "Manifest.json": json.dumps(manifest).encode()}
    return zipped(dict(sorted((files | more).items())))


def toy(names: tuple[str, str] | None) -> bytes:
    """The example of Appendix A byte for byte, its blanks filled: two INT4 blocks and a scale table.

    The header is as printed, the CRC that is none of 32 zero bytes included.
    """
    header = bytes.fromhex("53515a44 0100 04000000 0200 0000 5a2b0000 0000000000000000")
    blocks = [int4(name, 8, 16, "tensor", layer) for layer, name in enumerate(names or ("a", "b"))]
    body = [block.head + block.payload for block in blocks]
    tables = 320 + sum(map(len, body))
    index = struct.pack("<IQQQI", 0, 320, len(body[0]), tables, 0)
    index += struct.pack("<IQQQI", 1, 320 + len(body[0]), len(body[1]), tables, 0)
    ids = [block.tensor_id for block in blocks] if names else [0x0123456789ABCDEF, 2]
    entries = struct.pack("<QffQff", ids[0], 0.5, 0.0, ids[1], 0.25, -1.0)
    return header + bytes(102 + 32 + 32 + 64) + index + b"".join(body) + b"SCZT" + struct.pack("<I", 2) + entries


def by_ids() -> dict[str, bytes]:
    """Entries that lie elsewhere in their round than the directory says, or than the order of blocks does."""
    items = [int4("t"), int4("u", group="tensor")]
    twice = [int4("t"), int4("u")]
    places = squizd(items).main.places
    other = squizd(twice).main.places["t"]["second"][0] + 16 * 4
    names = [LAYER.format(layer) + "mlp.up_proj.weight" for layer in range(2)]
    layers = [quantized(name, codes(4, 8, 4), 4, [(2.0**-layer, 0.0)], layer=layer) for layer, name in enumerate(names)]
    swapped: Any = lambda tables: [tables[0][::-1], *tables[1:]]  # noqa: E731
    return {
        "entries-swapped": squizd(items, tables=swapped).data,
        "entries-swapped-nameless": squizd(layers, named=False, tables=swapped).data,
        "entries-bit-63-nameless": squizd([*twice, int4("v", group="row")], named=False, tables=all_bits).data,
        "entries-second-swapped": squizd(twice, tables=lambda both: [both[0], both[1][8:] + both[1][:8]]).data,
        "entries-elsewhere": squizd(items, edit=stated("u", "first", places["t"]["first"])).data,
        "entries-second-elsewhere": squizd(twice, edit=stated("u", "second", [other, 8])).data,
    }


def all_bits(tables: Any) -> Any:
    """Entries under ids of 64 bits, as other writers have them: every other one has bit 63 set."""
    first, second = tables
    marked = {id: id | 1 << 63 for id, *_ in first[::2]}
    return [[(marked.get(id, id), scale, zero) for id, scale, zero in first], second]


def stated(name: str, key: str, value: Any) -> Any:
    """An edit of a directory: a tensor's field is another."""

    def edit(root: Any) -> Any:
        root["tensors"][name][key] = value
        return root

    return edit


def model(layers: int = 2) -> list[Item]:
    """Embedding, layers and head as a small model has them."""
    middle = [
        item
        for layer in range(layers)
        for item in (
            norm(LAYER.format(layer) + "input_layernorm.weight", layer),
            int4(LAYER.format(layer) + "self_attn.q_proj.weight", layer=layer, scales="f16"),
        )
    ]
    embedding = dense("model.embed_tokens.weight", "bf16", [6, 8], values("bf16", 6, 8))
    ends = [norm(layer=layers - 1), dense("lm_head.weight", "bf16", [6, 8], values("bf16", 6, 8), layers - 1)]
    return [embedding, *middle, *ends]


def high_first(items: list[Item]) -> list[Item]:
    """The same with masks whose first block is the highest bit."""
    return [replace(item, mask=bytes(int(f"{byte:08b}"[::-1], 2) for byte in item.mask), parts={}) for item in items]


def noted() -> dict[str, bytes]:
    """Allowed, told by verify, refused by verify --strict: named by the rule."""
    base, sparse = squizd(model()), squizd(network())
    between, inside = bytearray(base.data), bytearray(base.data)
    between[base.main.spans[0][1]] = 7  # before layer 1
    inside[base.main.blocks["model.layers.0.self_attn.q_proj.weight"] - 1] = 7
    return {
        "note-squizd.reserved-flags": base.patch(6, "I", 4 | 1 << 31),
        "note-squizd.reserved+header": base.patch(26, "B", 1),
        "note-squizd.reserved+end": base.patch(255, "B", 1),
        "note-squizd.reserved+index": base.patch(256 + 28, "I", 1),
        "note-squizd.reserved+sparsity": sparse.patch(159, "B", 1),
        "note-squizd.unused-sparsity-crc": base.patch(14, "I", 0x2B5A),
        "note-squizd.unused-sparsity": with_zeroed(base.patch(132, "I", 64), 14, 4),
        "note-squizd.unused-draft-hash": base.patch(18, "Q", 1),
        "note-squizd.unused-draft": with_zeroed(base.patch(180, "I", 64), 18, 8),
        "note-squizd.trailing-bytes": base.data + b"\0",
        "note-squizd.gap": bytes(inside),
        "note-squizd.between": bytes(between),
        "note-squizd.primary-flags": squizd([int4("t")], flags=1 | 2 | 4).data,
        "note-squizd.primary-flags+hybrid": squizd([int2("t"), int4("u")], flags=4 | 32).data,
        "note-squizd.mask-order+nameless": squizd(high_first(full_network()), named=False).data,
    }


def with_zeroed(data: bytes, start: int, size: int) -> bytes:
    return data[:start] + bytes(size) + data[start + size :]


def valid(*, sealed: bool = False) -> dict[str, bytes]:
    """The valid files; ``sealed`` ones as the writer makes them today, with a digest of directory and header."""
    squizd = partial(packed, sealed=sealed, earlier=not sealed)
    usual = tuple(LAYER.format(layer) + "mlp.up_proj.weight" for layer in range(2))
    odd = [int4("t", 3, 15, 5), int4("u", 3, 7, "row", zeros=True), int4("v", 5, 1, "tensor")]
    uneven = [int4("t", 3, 5, 3), int4("u", 3, 20, 8, scales="bf16", zeros=True)]
    mixed = [*model()[:-2], *network(1, kept=(1,)), *model()[-2:]]
    everything: dict[str, Any] = {
        "draft": head(),
        "coreml": package(),
        "metadata": {"format": "pt", "n": {"a": [1, None]}},
    }
    made: dict[str, Made] = {
        "nothing": squizd([]),
        "npcl": squizd([dense(name, name, [2, 3], values(name, 2, 3)) for name in ("f32", "f16", "bf16")]),
        "npcl-nameless": squizd(
            [dense(name, name, [2, 3], values(name, 2, 3)) for name in ("f32", "f16", "bf16")], named=False
        ),
        "npcl-own-codes": squizd([dense(name, name, [3], values(name, 3)) for name in OWN]),
        "npcl-shapes": squizd(
            [dense(str(shape), "f32", shape, values("f32", *shape)) for shape in ((), (0,), (3, 0, 2), (1,) * 8, (5,))]
        ),
        "names": squizd([dense(name, "u8", [1], b"x") for name in ("", "a\nb", "\0", "ä/ö", "../../etc", "x" * 3000)]),
        "model": squizd(model()),
        "layers-without-tensors": squizd([norm("h.0.a"), int4("h.3.b", layer=3)], layers=5),
        "int4-group": squizd([int4("t", scales="f16"), int4("u", 3, 20, 4, scales="bf16", zeros=True)]),
        "int4-row": squizd([int4("t", group="row", dtype="bf16"), int4("u", group="row", zeros=True, scales="f16")]),
        "int4-tensor": squizd([int4("t", group="tensor"), int4("u", group="tensor", zeros=True, dtype="f16")]),
        "int4-odd-columns": squizd(odd),
        "int4-nameless": squizd([int4("t"), norm("n"), int4("u", group="tensor"), int4("v", group="row")], named=False),
        "int4-nameless-odd-columns": squizd([*odd[1:], int4("w", 3, 15, 5)], named=False),
        "int4-empty": squizd([int4("t", 0, 8, 4), int4("u", 4, 0, "tensor")]),
        "int2-group": squizd([int2("t", scales="f16", zeros=True), int2("u", 3, 20, 10)]),
        "entries-of-uneven-int4": squizd(uneven),
        "entries-of-uneven-int2": squizd([int2("t", 3, 20, 16), int2("u", 3, 7, 4)]),
        "int2-hybrid": squizd([int2("t"), int4("s"), int2("u", group="row"), int2("v", group="tensor"), norm()]),
        "int2-nameless": squizd([int2(usual[0]), int4(usual[1], layer=1), int2("u", 3, 5, 4, layer=1)], named=False),
        "astc": squizd([picture("t"), norm()]),
        "astc-nameless": squizd([picture("t"), picture("u", 1)], named=False),
        "tca": squizd([triple("t", 5, 70), norm()]),
        "tca-nameless": squizd([triple("t", 5, 9)], named=False),
        "tca-bitmap": squizd([bitmap("t", sparse_words(5, 70)), bitmap("u", sparse_words(3, 64)), norm()]),
        "tca-bitmap-nameless": squizd([bitmap("t", sparse_words(5, 128))], named=False),
        "sparse": squizd(network()),
        "sparse-full": squizd([*full_network(0), *full_network(1, (1,))]),
        "sparse-full-nameless": squizd([*full_network(0), *full_network(1, (0, 1))], named=False),
        "sparse-compacted-nameless": squizd(network(), named=False),
        "sparse-layers": squizd([*network(0), norm("model.layers.1.n", 1), *network(2, kept=(1,))]),
        "sparse-dense": squizd([pruned(dense("t", "f32", [2, 3], values("f32", 2, 3)), 1, 9, 1, (0, 4, 8))]),
        "sparse-tca": squizd([pruned(triple("t", 4, 8), 0, 6, 2, (0, 2))]),
        "sparse-astc": squizd([pruned(picture("t"), 1, 20, 10, (1,))]),
        "eagle": squizd(model(), draft=head()),
        "eagle-nameless": squizd(model(), draft=[int4("q", group="tensor"), norm("n")], draft_named=False),
        "coreml": squizd(model(), coreml=package()),
        "coreml-nameless": squizd([norm()], named=False, coreml=package()),
        "int4-sparse-eagle-coreml": squizd(mixed, **everything),
        "int2-eagle": squizd([int2("t"), int4("u")], draft=head(), metadata={"format": "pt"}),
        "astc-coreml": squizd([picture("t")], coreml=package()),
        "tca-sparse-eagle": squizd([triple("a", 4, 8), pruned(triple("t", 4, 8), 0, 6, 2, (0, 2))], draft=head()),
        "digests-sha256": squizd(mixed, digest="sha256", **everything),
        "digests-none": squizd(mixed, digest=None, **everything),
        "manifest-digest": squizd(mixed, **everything) if sealed else packed(mixed, sealed=True, **everything),
        "written-today": packed(mixed, sealed=True, earlier=False, **everything),
    }
    plain = squizd(model())
    files = {name: item.data for name, item in made.items()} | noted() | by_ids()
    files["toy"] = toy(None)
    files["toy-usual-names"] = toy((usual[0], usual[1]))
    files["toy-right-crc"] = files["toy"][:14] + struct.pack("<I", 0x190A55AD) + files["toy"][18:]
    files["toy-no-crc"] = files["toy"][:14] + bytes(4) + files["toy"][18:]
    files["crc-of-zeros"] = plain.patch(14, "I", 0x190A55AD)
    files["any-arch-id"] = plain.patch(12, "H", 0xFFFF)
    files["empty-layer-at-the-end"] = made["layers-without-tensors"].patch(256 + 32 * 4 + 4, "Q", 256)
    files["scale-offset-0"] = plain.patch(256 + 20, "Q", 0)
    return files


def expected(data: bytes) -> dict[str, Any]:
    """What reading a valid file gives: each tensor's header, a hash of every part's bytes, notes, attachments."""
    from ingot.ext.squizd.reader import read_catalog
    from ingot.model.bytesource import MemorySource

    def listed(tensors: Any) -> dict[str, Any]:
        return {
            name: {
                "shape": list(found.shape),
                "dtype": found.dtype,
                "codec": found.codec,
                "params": dict(found.params),
                "parts": {role: hashlib.sha256(part.view()).hexdigest()[:16] for role, part in found.parts.items()},
            }
            for name, found in tensors.items()
        }

    catalog = read_catalog(MemorySource(data, "file"))
    draft, coreml = catalog.attachments.draft, catalog.attachments.coreml
    return {
        "tensors": listed(catalog.tensors),
        "metadata": dict(catalog.metadata),
        "notes": sorted({rule for rule, _ in (*catalog.notes, *catalog.remarks)}),
        "draft": None if draft is None else listed(draft),
        "coreml": None if coreml is None else hashlib.sha256(coreml.view()).hexdigest()[:16],
    }


def rejects() -> Any:
    """The module of broken files beside this one."""
    found = importlib.util.spec_from_file_location("squizd_rejects", Path(__file__).parent / "squizd_rejects.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def files() -> dict[str, bytes]:
    """Every file of the corpus by its path under ``squizd``."""
    from types import SimpleNamespace

    good, broken = valid(), rejects()
    tools = SimpleNamespace(**globals())
    made = {f"valid/{name}.squizd": data for name, data in good.items()}
    made |= {f"reject/{name}.squizd": data for name, data in broken.rejected(tools).items()}
    made |= {f"damaged/{name}.squizd": data for name, data in broken.damaged(tools).items()}
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
