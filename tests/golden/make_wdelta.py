"""Make the golden corpus of .wdelta: tests/golden/wdelta/{valid,reject,damaged} and expected.json.

    python -m tests.golden.make_wdelta [FOLDER]

Every byte is put together by hand (``tests.support.wdelta``), by no writer of Ingot. The name of a file in ``reject``
and in ``damaged`` is the rule that refuses it and, after a plus, what is special about it: the former do not open, the
latter open and are refused by whoever reads them. ``expected.json`` has the float32 differences of the valid files,
computed as deltatensors 0.2.0 computes them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.wdelta import PARENT, Made, Record, int4, quantized, sparse, wdelta_file

FOLDER = Path(__file__).parent / "wdelta"


def three(made: Made) -> Made:
    """One tensor of each strategy."""
    return int4(quantized(sparse(made, "s"), "q"), "i")


def unsorted(made: Made) -> Made:
    """The same outliers in another order: the positions are turned round, and with them where the values belong."""
    first = made.records[0]
    made.records[0] = replace(first, data=np.frombuffer(first.data, first.dtype)[::-1].tobytes())
    return made


def valid() -> dict[str, tuple[Made, int]]:
    """Files that must open: what is in them, and their version."""
    reversed_records = three(Made())
    reversed_records.records.reverse()
    interleaved = sparse(sparse(Made(), "a"), "b")
    interleaved.records[1], interleaved.records[2] = interleaved.records[2], interleaved.records[1]
    matrices = three(Made())
    shapes = ([3, 1], [1, 3], [3, 1], [1, 2], [1, 1, 2], [2], [], [1, 1], [1, 9])
    matrices.records[:] = [replace(item, shape=shape) for item, shape in zip(matrices.records, shapes, strict=True)]
    extra = sparse(Made())
    extra.tensors["x"] |= {"note": [1, {"a": None}], "base_dtype": "float16"}
    bare = sparse(Made())
    del bare.tensors["x"]["sparsity"]
    awkward = Made()
    for name in ("", " ", "a/b", "..", "é", "重み", "\0", '"'):
        sparse(awkward, name)
    return {
        **{name: (made, 1) for name, made in of_others().items()},
        "nothing": (Made(), 1),
        "nothing-v2": (Made(), 2),
        "sparse": (sparse(Made()), 1),
        "sparse-v2": (sparse(Made()), 2),
        "sparse-all": (sparse(Made(), shape=[3], indices=[0, 1, 2]), 1),
        "sparse-none": (sparse(Made(), indices=[]), 1),
        "sparse-scalar": (sparse(Made(), shape=[], indices=[0]), 1),
        "sparse-unsorted": (sparse(Made(), indices=[5, 11, 0, 3]), 1),
        "sparse-empty": (sparse(Made(), shape=[0, 3], indices=[]), 1),
        "quantized": (quantized(Made()), 1),
        "quantized-v2": (quantized(Made()), 2),
        "quantized-one-row": (quantized(Made(), shape=[11]), 1),
        "quantized-three-dimensions": (quantized(Made(), shape=[2, 3, 5]), 1),
        "int4": (int4(Made()), 1),
        "int4-odd": (int4(Made(), shape=[3, 3]), 1),
        "int4-only-outliers": (int4(Made(), shape=[2]), 1),
        "int4-unsorted": (unsorted(int4(Made())), 1),
        "int4-v2-unsorted": (unsorted(int4(Made(), layout=2, index="int32")), 2),
        "int4-v2": (int4(Made(), layout=2, index="int32"), 2),
        "int4-v2-odd": (int4(Made(), shape=[3, 3], layout=2, index="int32"), 2),
        "int4-v2-wide-indices": (int4(Made(), layout=2), 2),
        "int4-v2-of-layout-1": (int4(Made()), 2),
        "records-in-reverse": (reversed_records, 1),
        "records-interleaved": (interleaved, 1),
        "matrix-records": (matrices, 1),
        "mixed-strategies": (three(Made()), 2),
        "unknown-fields": (extra, 1),
        "no-sparsity": (bare, 1),
        "awkward-names": (awkward, 1),
    }


def of_others() -> dict[str, Made]:
    """What ``deltatensors.read_wdelta`` reads and its own writer does not write."""

    def with_arrays(made: Made, **arrays: Any) -> Made:
        for at, item in enumerate(made.records):
            if item.field in arrays:
                array = np.frombuffer(item.data, item.dtype).astype(arrays[item.field])
                made.records[at] = replace(item, dtype=array.dtype.str, data=array.tobytes())
        return made

    def spelled(made: Made, **names: str) -> Made:
        made.records[:] = [replace(item, dtype=names.get(item.field, item.dtype)) for item in made.records]
        return made

    absent, odd, renamed = (sparse(Made()) for _ in range(3))
    absent.tensors["x"] |= {"indices": None}
    del absent.tensors["x"]["values"]
    odd.tensors["x"] |= {"indices": {"_ref": "indices", "offset": 1}, "values": "values"}
    renamed.tensors["x"]["values"] = {"_ref": "layers.0.values"}
    renamed.records[1] = replace(renamed.records[1], field="layers.0.values")
    elsewhere = sparse(Made())
    elsewhere.tensors["x"]["values"] = {"_ref": "nothing"}  # the record has the field's own name
    rounded = with_arrays(sparse(Made()), values="<f8")
    third = np.array([1 / 3, 1e-9, -2 / 3])
    rounded.records[1] = replace(rounded.records[1], data=third.tobytes())
    half = with_arrays(sparse(Made()), values="<f4")
    half.records[1] = replace(half.records[1], data=third.astype(np.float32).tobytes())
    half.tensors["x"]["dtype"] = "float16"
    signs = quantized(Made())
    signs.tensors["x"]["dtype"] = "float16"
    layout = int4(Made())
    layout.tensors["x"]["int4_layout"] = 1
    wide = with_arrays(int4(Made()), outlier_vals="<f4", scale="<f8", zero_point="<f4", outlier_idx="<u2")
    wide.records[2] = replace(wide.records[2], data=np.array([0.1]).tobytes())
    return {
        "references-absent": absent,
        "references-of-other-forms": odd,
        "references-to-other-names": renamed,
        "references-to-nothing": elsewhere,
        "types-sparse": with_arrays(sparse(Made()), indices="<i4", values="<f2"),
        "types-sparse-big-endian": with_arrays(sparse(Made()), indices=">i8", values=">f4"),
        "types-sparse-rounded": rounded,
        "types-sparse-unsigned": with_arrays(sparse(Made()), indices="u1"),
        "types-spelled": spelled(sparse(Made()), indices="i8", values="single"),
        "types-quantized": with_arrays(quantized(Made()), scales="<f4"),
        "types-quantized-double": with_arrays(quantized(Made()), scales=">f8"),
        "types-int4": wide,
        "types-int4-narrow-indices": int4(Made(), index="int32"),
        "dtype-float16": half,
        "dtype-float16-quantized": signs,
        "int4-layout-1-in-version-1": layout,
    }


def values(made: Made) -> dict[str, Any]:
    """The differences in float32, as deltatensors 0.2.0 computes them."""
    return {name: _decode(entry, arrays_of(made, name)).tobytes().hex() for name, entry in made.tensors.items()}


def arrays_of(made: Made, name: str) -> dict[str, np.ndarray[Any, Any]]:
    entry = made.tensors[name]
    fields = {item["_ref"]: field for field, item in entry.items() if isinstance(item, dict) and "_ref" in item}
    own = (item for item in made.records if item.tensor == name)
    return {fields.get(item.field, item.field): np.frombuffer(item.data, item.dtype) for item in own}


def _decode(entry: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    size = int(np.prod(entry["shape"]))
    flat = np.zeros(size, np.float32)
    if entry["strategy"] == "sparse":
        flat[arrays["indices"]] = arrays["values"]
    elif entry["strategy"] == "quantized":
        signs = np.unpackbits(arrays["packed_signs"])[:size].astype(np.float32) * 2 - 1
        flat = (signs.reshape(-1, entry["n_cols"]) * arrays["scales"].astype(np.float32)[:, None]).reshape(-1)
    else:
        codes = np.stack([arrays["packed"] >> 4, arrays["packed"] & 15], axis=1).reshape(-1).astype(np.float32)
        scale, zero = float(arrays["scale"][0]), float(arrays["zero_point"][0])
        decoded = codes / 15.0 * (scale * 15.0) + zero
        apart = np.zeros(size, bool)
        apart[arrays["outlier_idx"]] = True
        if entry.get("int4_layout") == 2:
            flat[:] = decoded[:size]
        else:
            flat[~apart] = decoded[: size - int(apart.sum())]
        flat[arrays["outlier_idx"]] = arrays["outlier_vals"].astype(np.float32)
    return np.asarray(flat, np.float32).astype(entry["dtype"]).astype(np.float32)


def changed(add: Callable[..., Made], **fields: Any) -> bytes:
    """A file whose one tensor's entry has some fields changed (``...`` removes one)."""
    made = add(Made())
    for key, value in fields.items():
        if value is ...:
            del made.tensors["x"][key]
        else:
            made.tensors["x"][key] = value
    return made.file()


def record(add: Callable[..., Made], index: int, version: int = 1, **fields: Any) -> bytes:
    """A file with one record changed."""
    made = add(Made())
    made.records[index] = replace(made.records[index], **fields)
    return made.file(version)


def reject() -> dict[str, bytes]:
    """Files that do not open, by rule."""
    plain = sparse(Made())
    good = plain.file()
    header_end = 15 + int.from_bytes(good[11:15], "little")
    two = sparse(Made()).header
    return {
        **_reject_prefix(good, two),
        **_reject_header(good, two),
        **_reject_entries(),
        **_reject_records(),
        **{
            f"wdelta.record-out-of-bounds+cut-{name}": good[:cut]
            for name, cut in {
                "after-a-length": header_end + 4 + 32,
                "in-a-name": header_end + 6 + 32,
                "in-a-size": len(good) - 32 - 20,
                "in-the-data": len(good) - 1,
                "half": len(good) - 32,
            }.items()
        },
        "wdelta.record-missing+cut-between-records": record_cut(plain),
    }


def record_cut(made: Made) -> bytes:
    """A file that was cut off where a record ends."""
    whole = made.file()
    return whole[: len(whole) - 32 - len(made.records[-1].pack()) + 32]


def _reject_prefix(good: bytes, header: dict[str, Any]) -> dict[str, bytes]:
    return {
        "wdelta.magic+first": b"x" + good[1:],
        "wdelta.magic+case": b"WDELTA\0" + good[7:],
        "wdelta.magic+short": b"xdel",
        "wdelta.truncated+in-the-magic": b"wdel",
        "wdelta.truncated+magic-alone": b"wdelta\0",
        "wdelta.truncated+no-digest": good[:46],
        "wdelta.version+0": wdelta_file(header, version=0),
        "wdelta.version+3": wdelta_file(header, version=3),
        "wdelta.version+huge": wdelta_file(header, version=2**32 - 1),
        "wdelta.header-length+past-the-end": wdelta_file({}, length=3),
        "wdelta.header-length+huge": wdelta_file({}, length=2**32 - 1),
        "wdelta.header-length+in-the-digest": wdelta_file({}, length=34),
        "wdelta.header-length+cut": good[:100],
    }


def _reject_header(good: bytes, header: dict[str, Any]) -> dict[str, bytes]:
    text = good[15 : 15 + int.from_bytes(good[11:15], "little")]
    rest = sparse(Made()).records

    def spoilt(old: bytes, new: bytes) -> bytes:
        assert old in text
        return wdelta_file(text.replace(old, new, 1), rest)

    empty = {"parent_hash": PARENT, "strategy": "sparse", "tensors": {}}
    small = b'{"strategy":"sparse","shape":[],"dtype":"float32"},'
    return {
        "wdelta.json+cut": wdelta_file(text[:-1], rest),
        "wdelta.json+empty": wdelta_file(b""),
        "wdelta.json+trailing": wdelta_file(text + b"{}", rest),
        "wdelta.json+nan": spoilt(b"0.75", b"NaN"),
        "wdelta.json+minus-zero": spoilt(b"[3,4]", b"[3,4,-0]"),
        "wdelta.json+deep": wdelta_file(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        "wdelta.utf8+header": spoilt(b'"x"', b'"\xff"'),
        "wdelta.fields+list": wdelta_file(b"[]"),
        "wdelta.fields+no-tensors": wdelta_file({"parent_hash": PARENT, "strategy": "sparse"}),
        "wdelta.fields+no-parent-hash": wdelta_file({"strategy": "sparse", "tensors": {}}),
        "wdelta.fields+no-strategy": wdelta_file({"parent_hash": PARENT, "tensors": {}}),
        "wdelta.fields+tensors-list": wdelta_file({**empty, "tensors": []}),
        "wdelta.fields+parent-hash-null": wdelta_file({**empty, "parent_hash": None}),
        "wdelta.fields+tensor-null": wdelta_file({**empty, "tensors": {"x": None}}),
        "wdelta.fields+extension-text": wdelta_file({**empty, "ingot": "x"}),
        "wdelta.fields+extension-with-a-delta": wdelta_file({**empty, "ingot": {"metadata": {"delta": {}}}}),
        "wdelta.duplicate-key+header": spoilt(b'"tensors"', b'"strategy":"sparse","tensors"'),
        "wdelta.duplicate-key+tensor": spoilt(b'"tensors":{', b'"tensors":{"x":' + small),
        "wdelta.duplicate-key+tensor-escaped": spoilt(b'"tensors":{', b'"tensors":{"\\u0078":' + small),
        "wdelta.duplicate-key+field": spoilt(b'"shape":[3,4]', b'"shape":[3,4],"shape":[12]'),
        "wdelta.duplicate-key+unknown": spoilt(b'"shape":[3,4]', b'"shape":[3,4],"z":1,"z":1'),
        "wdelta.parent-hash+short": wdelta_file({**empty, "parent_hash": PARENT[:-1]}),
        "wdelta.parent-hash+no-digits": wdelta_file({**empty, "parent_hash": "g" * 64}),
        "wdelta.parent-hash+newline": wdelta_file({**empty, "parent_hash": PARENT + "\n"}),
        "wdelta.strategy+header": wdelta_file({**empty, "strategy": "dense"}),
        "wdelta.strategy+header-empty": wdelta_file({**empty, "strategy": ""}),
    }  # fmt: skip


def _reject_entries() -> dict[str, bytes]:
    return {
        "wdelta.strategy+tensor": changed(sparse, strategy="dense"),
        "wdelta.fields+no-shape": changed(sparse, shape=...),
        "wdelta.fields+no-dtype": changed(sparse, dtype=...),
        "wdelta.fields+no-tensor-strategy": changed(sparse, strategy=...),
        "wdelta.fields+shape-negative": changed(sparse, shape=[-3, -4]),
        "wdelta.fields+shape-float": changed(sparse, shape=[3.5, 4]),
        "wdelta.fields+shape-bool": changed(sparse, shape=[True, 12]),
        "wdelta.fields+shape-text": changed(sparse, shape="12"),
        "wdelta.fields+sparsity-text": changed(sparse, sparsity="0.9"),
        "wdelta.fields+sparsity-bool": changed(sparse, sparsity=True),
        "wdelta.fields+n-elements-negative": changed(quantized, n_elements=-15),
        "wdelta.fields+n-elements-float": changed(quantized, n_elements=15.5),
        "wdelta.shape+product-past-64-bits": changed(sparse, shape=[2**32, 2**32]),
        "wdelta.shape+zero-of-huge": changed(sparse, shape=[2**62, 2**62, 0]),
        "wdelta.shape+65-dimensions": changed(sparse, shape=[1] * 65),
        "wdelta.dtype+float64": changed(sparse, dtype="float64"),
        "wdelta.dtype+float16-int4": changed(int4, dtype="float16"),
        "wdelta.dtype+float16-and-another": changed(sparse, dtype="float16", base_dtype="bfloat16"),
        "wdelta.dtype+unknown": changed(sparse, dtype="pickle"),
        "wdelta.base-dtype": changed(sparse, base_dtype="float7"),
        "wdelta.ref+to-another-field": changed(sparse, values={"_ref": "indices"}),
        "wdelta.ref+swapped": changed(sparse, values={"_ref": "indices"}, indices={"_ref": "values"}),
        "wdelta.ref+shared": changed(sparse, values={"_ref": "both"}, indices={"_ref": "both"}),
        "wdelta.ref+long": changed(sparse, values={"_ref": "v" * 256}),
        "wdelta.record-foreign+of-another-strategy": changed(sparse, strategy="quantized", n_elements=12, n_cols=4),
        "wdelta.n-elements": changed(quantized, n_elements=14),
        "wdelta.n-elements+int4": changed(int4, n_elements=21),
        "wdelta.n-elements+missing": changed(quantized, n_elements=...),
        "wdelta.n-elements+shape": changed(quantized, shape=[3, 6]),
        "wdelta.n-cols": changed(quantized, n_cols=3),
        "wdelta.n-cols+zero": changed(quantized, n_cols=0),
        "wdelta.n-cols+missing": changed(quantized, n_cols=...),
        "wdelta.n-outliers": changed(int4, n_outliers=21),
        "wdelta.n-outliers+missing": changed(int4, n_outliers=...),
        "wdelta.int4-layout+version-1": int4(Made(), layout=2).file(1),
        "wdelta.int4-layout+unknown": _layout(3),
        "wdelta.int4-layout+zero": _layout(0),
        "wdelta.int4-layout+negative": _layout(-2),
    }


def _layout(layout: int) -> bytes:
    made = int4(Made(), layout=2)
    made.tensors["x"]["int4_layout"] = layout
    return made.file(2)


def _reject_records() -> dict[str, bytes]:
    twice, missing, foreign, other = sparse(Made()), sparse(Made()), sparse(Made()), sparse(Made())
    twice.records.append(twice.records[0])
    missing.records.pop()
    foreign.records.append(Record("y", "values", "float32", bytes(4)))
    other.records.append(Record("x", "scales", "float16", bytes(2)))
    gone = sparse(Made())
    gone.records.clear()
    loose = Made()
    loose.records.append(Record("", "", "uint8", b""))
    trailing = sparse(Made()).file()[:-32] + b"\0\0\0"
    return {
        "wdelta.record-duplicate": twice.file(),
        "wdelta.record-missing": missing.file(),
        "wdelta.record-missing+all": gone.file(),
        "wdelta.record-foreign+tensor": foreign.file(),
        "wdelta.record-foreign+field": other.file(),
        "wdelta.record-foreign+of-nothing": loose.file(),
        "wdelta.record-foreign+long-name": record(sparse, 1, tensor="x" * 500),
        "wdelta.record-foreign+long-field": record(sparse, 1, field="values" * 5),
        "wdelta.utf8+name": record(sparse, 1, tensor="\udcff"),
        "wdelta.record-out-of-bounds+trailing": trailing + bytes(32),
        "wdelta.record-out-of-bounds+length": record(sparse, 1, length=2**64 - 4, shape=[2**62 - 1]),
        "wdelta.record-out-of-bounds+one-more": record(sparse, 1, length=16, shape=[4]),
        "wdelta.record-dtype+float-indices": record(sparse, 0, dtype="float64"),
        "wdelta.record-dtype+signed-codes": record(quantized, 1, dtype="int8"),
        "wdelta.record-dtype+object": record(sparse, 1, dtype="object"),
        "wdelta.record-dtype+text": record(sparse, 1, dtype="<U1"),
        "wdelta.record-dtype+none": record(sparse, 1, dtype="f1"),
        "wdelta.record-dtype+structure": record(sparse, 1, dtype="f2,f2"),
        "wdelta.record-dtype+long": record(sparse, 1, dtype="float32, (1000000000,)"),
        "wdelta.record-shape+two-dimensions": record(quantized, 0, shape=[2, 1], data=bytes(4)),
        "wdelta.record-shape+past-63-bits": record(sparse, 1, shape=[2**32, 2**32]),
        "wdelta.record-shape+none": record(sparse, 1, shape=[], data=bytes(4)),
        "wdelta.record-shape+huge-rank": record(sparse, 1, shape=[0] * 300),
        "wdelta.record-shape+values": record(sparse, 1, data=bytes(8)),
        "wdelta.record-shape+more-than-elements": record(sparse, 0, data=bytes(8 * 13)),
        "wdelta.record-shape+scales": record(quantized, 0, data=bytes(8)),
        "wdelta.record-shape+signs": record(quantized, 1, data=bytes(3)),
        "wdelta.record-shape+outliers": record(int4, 0, data=bytes(24)),
        "wdelta.record-shape+scale": record(int4, 2, data=bytes(4)),
        "wdelta.record-shape+no-zero-point": record(int4, 3, data=b""),
        "wdelta.record-shape+codes": record(int4, 4, data=bytes(10)),
        "wdelta.record-length+less": record(sparse, 1, length=8),
        "wdelta.record-length+not-whole": record(sparse, 1, data=bytes(11), shape=[3]),
        "wdelta.record-length+count-past-64-bits": record(sparse, 1, shape=[2**62 + 3]),
    }


def damaged() -> dict[str, bytes]:
    """Files that open and are refused when they are read, by rule."""
    good = sparse(Made()).file()
    position = np.array([1, 5, 10], np.int64)

    def indices(first: int, second: int, third: int) -> bytes:
        return record(sparse, 0, data=np.array([first, second, third], np.int64).tobytes())

    def outliers(one: int, other: int) -> bytes:
        return record(int4, 0, data=np.array([one, other], np.int64).tobytes())

    half = np.array([np.inf], np.float16).tobytes()
    assert indices(*position.tolist()) == good
    return {
        "wdelta.digest-mismatch+digest": good[:-1] + bytes([good[-1] ^ 1]),
        "wdelta.digest-mismatch+data": good[:-40] + bytes([good[-40] ^ 1]) + good[-39:],
        "wdelta.digest-mismatch+name": good.replace(b'"sparsity":0.75', b'"sparsity":0.74'),
        "delta_sparse.index+past-the-end": indices(1, 5, 12),
        "delta_sparse.index+huge": indices(1, 5, 2**63 - 1),
        "delta_sparse.index+negative": indices(-1, 5, 10),
        "delta_sparse.duplicate+twice": indices(1, 5, 5),
        "delta_int4.index+past-the-end": outliers(1, 20),
        "delta_int4.index+negative": outliers(-2, 19),
        "delta_int4.duplicate+twice": outliers(1, 1),
        "delta_int4.scale+infinite": record(int4, 2, data=half),
        "delta_int4.scale+zero-point": record(int4, 3, data=half),
    }


def corpus() -> dict[str, bytes]:
    """Every file of the corpus: path under the folder to bytes."""
    files = {f"valid/{name}.wdelta": made.file(version) for name, (made, version) in valid().items()}
    files |= {f"reject/{name}.wdelta": data for name, data in reject().items()}
    files |= {f"damaged/{name}.wdelta": data for name, data in damaged().items()}
    expected = {name: values(made) for name, (made, _) in valid().items()}
    files["expected.json"] = (json.dumps(expected, indent=1, sort_keys=True) + "\n").encode()
    return files


def main(folder: Path) -> None:
    """Write the corpus anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in corpus().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
