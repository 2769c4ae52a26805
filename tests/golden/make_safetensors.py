"""Make the golden corpus of the safetensors format: tests/golden/safetensors/{valid,reject}.

    python tests/golden/make_safetensors.py [FOLDER]

Every byte is written here by hand, by no reader or writer of Ingot. The name of a file in ``reject`` is the rule that
refuses it, two dashes, and what is special about it; a folder with an index stands for a sharded checkpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "safetensors"
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def raw(header: bytes | str | dict[str, Any], data: bytes = b"", length: int | None = None) -> bytes:
    """Put prefix, header and data together; ``length`` lies about the header's length."""
    text = json.dumps(header, separators=(",", ":")) if isinstance(header, dict) else header
    blob = text.encode() if isinstance(text, str) else text
    return (len(blob) if length is None else length).to_bytes(8, "little") + blob + data


def tensor(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    """One header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = tensor("U8", [2], 0, 2)
F = tensor("F32", [2], 0, 8)


def every_dtype() -> bytes:
    """Eight elements of each type, widest first."""
    header: dict[str, Any] = {}
    position = 0
    for name, bits in reversed(BITS.items()):
        header[name.lower()] = tensor(name, [2, 4], position, position + bits)
        position += bits
    return raw(header, bytes(index % 2 for index in range(position)))


def valid() -> dict[str, bytes]:
    """Files that must open."""
    shards = {
        "model-00001-of-00002.safetensors": raw({"__metadata__": {"format": "pt"}, "a": A}, b"\1\2"),
        "model-00002-of-00002.safetensors": raw({"b": F}, bytes(8)),
    }
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    files = {
        "no-tensors": raw("{}"),
        "no-tensors-padded": raw("{}      "),
        "metadata-only": raw({"__metadata__": {"a": "b", "": "\n"}}),
        "empty-metadata": raw({"__metadata__": {}, "a": A}, b"\1\2"),
        "metadata-with-field-names": raw({"__metadata__": {"shape": "1", "dtype": "x:y"}, "a": A}, b"\1\2"),
        "unpadded": raw({"aa": A}, b"\1\2"),
        "every-dtype": every_dtype(),
        "scalar": raw({"a": tensor("I64", [], 0, 8)}, bytes(8)),
        "zero-size": raw(
            {"a": tensor("F32", [0, 3], 0, 0), "b": tensor("U8", [1], 0, 1), "c": tensor("F16", [0], 1, 1)}, b"x"
        ),
        "unordered-header": raw({"b": tensor("U8", [1], 2, 3), "a": A}, b"\1\2\3"),
        "escaped-names": raw('{"\\u0061\\u003a\\n\\"":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"),
        "whitespace": raw('{ "a" :\t{"dtype" : "U8" ,\n"shape": [ 2 ], "data_offsets": [0,2] } }  ', b"\1\2"),
        "awkward-names": raw(
            {name: tensor("U8", [1], i, i + 1) for i, name in enumerate(["", " ", "a/b", "..", "é", "\0"])}, bytes(6)
        ),
        "nan-and-inf": raw({"a": tensor("F32", [3], 0, 12)}, bytes.fromhex("0000c07f0000807f000080ff")),
        "64-dimensions": raw({"a": tensor("U8", [1] * 64, 0, 1)}, b"x"),
    }
    result = {f"{name}.safetensors": data for name, data in files.items()}
    result |= {f"sharded/{name}": data for name, data in shards.items()}
    result[f"sharded/{INDEX}"] = index({"metadata": {"total_size": 10}, "weight_map": weight_map})
    result |= {f"sharded-unlisted-tensor/{name}": data for name, data in shards.items()}
    only = {"b": weight_map["b"], "a": weight_map["a"]}
    result[f"sharded-unlisted-tensor/{INDEX}"] = index({"weight_map": only})
    result["sharded-unlisted-tensor/model-00001-of-00002.safetensors"] = raw(
        {"a": A, "z": tensor("U8", [1], 2, 3)}, b"\1\2\3"
    )
    return result


def index(content: dict[str, Any]) -> bytes:
    """An index as Hugging Face writes it."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def reject() -> dict[str, bytes]:
    """Files that must be refused: rule and name to bytes."""
    twice = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    escaped_twice = twice.replace('},"a"', '},"\\u0061"')
    field_twice = '{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}'
    files = {
        "too-short--empty": b"",
        "too-short--seven-bytes": b"\2\0\0\0\0\0\0",
        "header-length--past-the-end": raw("{}", length=3),
        "header-length--huge": raw("{}", length=2**64 - 1),
        "header-length--100-mb-and-one": raw("{}", length=100_000_001),
        "header-start--empty": raw(""),
        "header-start--list": raw("[]"),
        "header-start--blank-first": raw(" {}"),
        "header-start--byte-order-mark": raw("\ufeff{}"),
        "utf8--name": raw(b'{"\xff":{}}'),
        "utf8--overlong": raw(b'{"\xc0\x80":{}}'),
        "json--cut": raw('{"a":'),
        "json--trailing": raw("{} {}"),
        "json--nul-padding": raw("{}\0\0"),
        "json--lone-surrogate": raw('{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "json--minus-zero": raw('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        "duplicate-key--tensor": raw(twice, b"x"),
        "duplicate-key--tensor-escaped": raw(escaped_twice, b"x"),
        "duplicate-key--field": raw(field_twice, b"x"),
        "duplicate-key--metadata": raw('{"__metadata__":{"a":"1","a":"2"}}'),
        "duplicate-key--metadata-twice": raw('{"__metadata__":{"a":"1"},"__metadata__":{"b":"2"}}'),
        "metadata--number": raw({"__metadata__": {"a": 1}}),
        "metadata--null": raw({"__metadata__": None}),
        "metadata--nested": raw({"__metadata__": {"a": {"b": "c"}}}),
        "metadata--list": raw({"__metadata__": {"a": ["b"]}}),
        "fields--null": raw({"a": None}),
        "fields--missing-shape": raw({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x"),
        "fields--unknown": raw({"a": {**A, "note": "x"}}, b"\1\2"),
        "fields--unknown-for-missing": raw({"a": {"dtype": "U8", "shape": [1], "offsets": [0, 1]}}, b"x"),
        "fields--float-shape": raw({"a": tensor("U8", [2.0], 0, 2)}, b"\1\2"),
        "fields--negative-shape": raw({"a": tensor("U8", [-1, -2], 0, 2)}, b"\1\2"),
        "fields--bool-shape": raw({"a": tensor("U8", [True], 0, 1)}, b"x"),
        "fields--three-offsets": raw({"a": {**A, "data_offsets": [0, 2, 2]}}, b"\1\2"),
        "fields--negative-offset": raw({"a": tensor("U8", [2], -2, 0)}, b"\1\2"),
        "json--deep": raw('{"a":' + "[" * 5000 + "]" * 5000 + "}"),
        "dtype--unknown": raw({"a": tensor("F128", [1], 0, 16)}, bytes(16)),
        "dtype--lower-case": raw({"a": tensor("u8", [2], 0, 2)}, b"\1\2"),
        "shape--product-past-64-bits": raw({"a": tensor("U8", [2**32, 2**32, 2**32], 0, 1)}, b"x"),
        "shape--zero-size-of-huge": raw({"a": tensor("U8", [2**62, 2**62, 0], 0, 0)}),
        "shape--65-dimensions": raw({"a": tensor("U8", [1] * 65, 0, 1)}, b"x"),
        "partial-byte--f4": raw({"a": tensor("F4", [3], 0, 1)}, b"x"),
        "partial-byte--f6": raw({"a": tensor("F6_E2M3", [2], 0, 1)}, b"x"),
        "offsets--gap-at-the-start": raw({"a": tensor("U8", [2], 1, 3)}, b"\0\1\2"),
        "offsets--gap": raw({"a": A, "b": tensor("U8", [1], 3, 4)}, b"\1\2\0\3"),
        "offsets--overlap": raw({"a": A, "b": tensor("U8", [2], 1, 3)}, b"\1\2\3"),
        "offsets--same-bytes": raw({"a": A, "b": A}, b"\1\2"),
        "size--too-long": raw({"a": tensor("F32", [1], 0, 8)}, bytes(8)),
        "size--too-short": raw({"a": tensor("F32", [2], 0, 4)}, bytes(4)),
        "size--backwards": raw({"a": tensor("U8", [0], 0, 0), "b": tensor("U8", [1], 0, 2)}, b"ab"),
        "data-length--truncated": raw({"a": F}, bytes(7)),
        "data-length--trailing": raw({"a": F}, bytes(9)),
        "data-length--nothing-but-data": raw("{}", b"x"),
    }  # fmt: skip
    return {f"{name}.safetensors": data for name, data in files.items()} | reject_sharded()


def reject_sharded() -> dict[str, bytes]:
    """Folders with an index that must be refused."""
    shard = raw({"a": A}, b"\1\2")
    folders: dict[str, tuple[bytes, dict[str, bytes]]] = {
        "index-json--cut": (b'{"weight_map": {', {}),
        "index-json--nan": (b'{"metadata": {"total_size": NaN}, "weight_map": {}}', {}),
        "index-duplicate-key--tensor": (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', {}),
        "index-fields--no-map": (b'{"metadata": {}}', {}),
        "index-fields--number": (b'{"weight_map": {"a": 1}}', {}),
        "index-escape--parent": (index({"weight_map": {"a": "../x.safetensors"}}), {}),
        "index-escape--absolute": (index({"weight_map": {"a": "/etc/passwd"}}), {}),
        "index-escape--subfolder": (index({"weight_map": {"a": "sub/x.safetensors"}}), {}),
        "index-missing-shard--gone": (index({"weight_map": {"a": "x.safetensors"}}), {}),
        "index-missing-tensor--nowhere": (index({"weight_map": {"b": "x.safetensors"}}), {"x.safetensors": shard}),
        "index-duplicate-tensor--two-shards": (
            index({"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}),
            {"x.safetensors": shard, "y.safetensors": shard},
        ),
        "data-length--in-a-shard": (index({"weight_map": {"a": "x.safetensors"}}), {"x.safetensors": shard[:-1]}),
    }
    result = {}
    for name, (text, shards) in folders.items():
        result[f"{name}/{INDEX}"] = text
        result |= {f"{name}/{file}": data for file, data in shards.items()}
    return result


def corpus() -> dict[str, bytes]:
    """Every file of the corpus: path under the folder to bytes."""
    return {f"valid/{name}": data for name, data in valid().items()} | {
        f"reject/{name}": data for name, data in reject().items()
    }


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
