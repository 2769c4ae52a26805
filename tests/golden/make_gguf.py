"""Make the golden corpus of GGUF: tests/golden/gguf/{valid,reject}.

    python -m tests.golden.make_gguf [FOLDER]

No writer makes these files: they are put together byte by byte. The name of a file in ``reject`` is the rule that
refuses it, two dashes, and what is special about it; a folder is a split.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from struct import pack

from ingot.formats.gguf.types import BLOCKED, DENSE
from ingot.model.layouts.ggml import TYPES
from tests.support.gguf import ARRAY, STRING, Item, Value, build, string

FOLDER = Path(__file__).parent / "gguf"
ALIGN = "general.alignment"
F32, Q8_0, I8 = 0, 8, 24
A = Item("a", (3, 2), F32, pack("<6f", *range(6)))
B = A._replace(name="b")
METADATA = {
    "general.architecture": Value(STRING, "llama"),
    **{f"type{number}": Value(number, 1) for number in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)},
    "tokens": Value(ARRAY, ["<s>", "é", ""], STRING),
    "scores": Value(ARRAY, [0.5, -1.0], 6),
}


def numbers(count: int, seed: int) -> bytes:
    """Return bytes without an f16 among them that is NaN or infinite, nor a power of MXFP4 past f32."""
    state, made = seed, bytearray()
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        made.append(state >> 16 & 0xBF)
    return bytes(made)


def every_type() -> list[Item]:
    """Two rows of two blocks of each type, six elements of each dense one."""
    items = [
        Item(type, (TYPES[type].elements * 2, 2), number, numbers(4 * TYPES[type].nbytes, number))
        for number, type in BLOCKED.items()
    ]
    width = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "i8": 1}
    return items + [
        Item(type, (3, 2), number, numbers(6 * width.get(type, 2), number)) for number, type in DENSE.items()
    ]


def split(number: int, count: int = 2, total: int = 2, item: Item = A) -> bytes:
    """Return one file of a split with one tensor."""
    keys = {"split.no": Value(2, number), "split.count": Value(2, count), "split.tensors.count": Value(5, total)}
    return build(keys, [item])


def valid() -> dict[str, bytes]:
    """Files that must open."""
    return {
        "every-type.gguf": build(METADATA, every_type()),
        "version-2.gguf": build(METADATA, [A], version=2),
        "big-endian.gguf": build(METADATA, [Item("a", (3, 2), F32, pack(">6f", *range(6)))], order=">"),
        "empty.gguf": build(),
        "alignment-1.gguf": build({ALIGN: Value(4, 1)}, [A, B], alignment=1),
        "alignment-256.gguf": build({ALIGN: Value(4, 256)}, [A, B], alignment=256),
        "alignment-ignored.gguf": build({ALIGN: Value(4, 256)}, [A, B]),
        "scalar-and-empty.gguf": build({}, [Item("s", (), F32, bytes(4)), Item("e", (0, 2), F32, b"")]),
        "not-utf8.gguf": build({"a": Value(STRING, b"\xff"), "b": Value(ARRAY, [b"x", b"\xe2\x96"], STRING)}, [A]),
        "long-name.gguf": build({}, [A, B._replace(name="n" * 200)]),
        "split/m-00001-of-00002.gguf": split(0),
        "split/m-00002-of-00002.gguf": split(1, item=B),
    }


def reject() -> dict[str, bytes]:
    """Files that must be refused."""
    blocks = bytes(68)
    head = b"GGUF" + pack("<IQQ", 3, 0, 1)
    return {
        "magic": b"GGUX" + bytes(60),
        "version--1": build(version=1),
        "version--4": build(version=4),
        "truncated": build(METADATA)[:14],
        "count--tensors": build(counts=(2**60, 0)),
        "count--pairs": build(counts=(0, 2**63)),
        "string": head + pack("<Q", 2**63) + bytes(64),
        "utf8--key": head + string(b"\xff") + pack("<IB", 0, 1) + bytes(64),
        "key--empty": build({"": Value(0, 1)}),
        "key--twice": build([("a", Value(0, 1)), ("a", Value(0, 1))]),
        "key--ours": build({"ingot.gguf": Value(0, 1)}),
        "value-type": build({"a": Value(13, b"\0")}),
        "value-type--array-of-arrays": build({"a": Value(ARRAY, [], ARRAY)}),
        "array--numbers": head + string("a") + pack("<IIQ", ARRAY, 10, 2**61) + bytes(64),
        "array--strings": head + string("a") + pack("<IIQ", ARRAY, STRING, 2**61) + bytes(64),
        "bool": build({"a": Value(7, b"\2")}),
        "bool--array": build({"a": Value(ARRAY, [b"\2"], 7)}),
        "alignment--48": build({ALIGN: Value(4, 48)}),
        "alignment--zero": build({ALIGN: Value(4, 0)}),
        "alignment--u64": build({ALIGN: Value(10, 32)}),
        "alignment--text": build({ALIGN: Value(STRING, "32")}),
        "utf8--name": build({}, [A._replace(name=b"\xff")]),
        "name--nul": build({}, [A._replace(name="a\0")]),
        "name--twice": build({}, [A, A]),
        "rank": build({}, [Item("a", (1,) * 5, F32, bytes(4))]),
        "shape": build({}, [Item("a", (2**62, 2**62), I8, b"")]),
        "shape--and-zero": build({}, [Item("a", (2**62, 2**62, 0), I8, b"")]),
        "type--removed": build({}, [Item("a", (32,), 4, bytes(18))]),
        "type--unknown": build({}, [Item("a", (32,), 99, bytes(18))]),
        "columns": build({}, [Item("a", (33, 2), Q8_0, blocks)]),
        "columns--scalar": build({}, [Item("a", (), Q8_0, blocks)]),
        "offset--same": build({}, [A, B._replace(offset=0)]),
        "offset--gap": build({}, [B._replace(offset=32)]),
        "offset--past": build({}, [B._replace(offset=2**64 - 32)]),
        "data": build({}, [Item("b", (2**40,), Q8_0, blocks)]),
        "data--one-byte": build({}, [B._replace(data=B.data + bytes(8))])[:-9],
        "split--text": build({"split.count": Value(STRING, "2")}, [A]),
        "split--name": split(0),
        "split-missing/m-00001-of-00002": split(0),
        "split-mixed--number/m-00001-of-00002": split(0),
        "split-mixed--number/m-00002-of-00002": split(0, item=B),
        "split-mixed--total/m-00001-of-00002": split(0, total=3),
        "split-mixed--total/m-00002-of-00002": split(1, total=3, item=B),
        "name--in-two-files/m-00001-of-00002": split(0),
        "name--in-two-files/m-00002-of-00002": split(1),
    }


def corpus() -> dict[str, bytes]:
    """Every file of the corpus: path under the folder to bytes."""
    good = {f"valid/{name}": data for name, data in valid().items()}
    return good | {f"reject/{name}.gguf": data for name, data in reject().items()}


def main(folder: Path) -> None:
    """Write the corpus anew."""
    for part in ("valid", "reject"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for name, data in corpus().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
