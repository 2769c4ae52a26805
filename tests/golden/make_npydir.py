"""Makes the golden corpus of Squish directories: python tests/golden/make_npydir.py

``valid`` directories lie beside this script; they open, and their values are in ``expected.json``. ``reject`` ones are
made when the tests run, named by the rule that refuses them, a variant after ``+``. Every byte is written by hand here
or by NumPy's own writer: nothing of Ingot makes them.
"""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

ROOT = Path(__file__).parent / "npydir"
READY, INT4 = "tensors/.manifest_ready", ".squish_int4_ready"
Files = dict[str, bytes]


def npy(array: Any, dtype: str | None = None) -> bytes:
    """An array as numpy.save writes it."""
    out = io.BytesIO()
    np.save(out, np.asarray(array, dtype), allow_pickle=True)
    return out.getvalue()


def raw(header: str, data: bytes = b"", version: int = 1, pad: int = 64) -> bytes:
    """A file with any header."""
    begin = 10 if version == 1 else 12
    text = header.encode()
    text += b" " * (-(begin + len(text) + 1) % pad) + b"\n"
    return b"\x93NUMPY" + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def key(name: str) -> str:
    return name.replace(".", "__")


def folder(arrays: dict[str, dict[str, bytes]], **files: Any) -> Files:
    """A directory of tensors given as {name: {suffix: file}}; keyword ``manifest`` replaces the manifest."""
    made = {
        f"tensors/{key(name)}__{suffix}.npy": data for name, found in arrays.items() for suffix, data in found.items()
    }
    manifest = files.pop("manifest", {name: key(name) for name in arrays})
    made["manifest.json"] = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    return {**made, READY: b"", **files.pop("more", {})}


RAMP = np.arange(12, dtype=np.float32).reshape(3, 4)
PT = {"pt": npy(RAMP)}
CODES = np.arange(-12, 12, dtype=np.int8).reshape(3, 8)
ROW = np.array([0.5, 1.0, 2.0], np.float32)
SHAPE = npy([3, 8], "<i8")
INT8 = {"q": npy(CODES), "s": npy(ROW), "shape": SHAPE}
NIBBLES = (np.arange(12, dtype=np.uint8).reshape(3, 4) * 19) & 255
GROUPED = (np.arange(6, dtype=np.float32).reshape(3, 2) + 1) / 8
OFFSETS = -GROUPED * 7.5
INT4A = {"q4a": npy(NIBBLES), "s4a": npy(GROUPED), "z4a": npy(OFFSETS), "shape": SHAPE}
LEGACY = {"q4": npy(NIBBLES), "s4": npy(GROUPED), "shape": SHAPE}
THREE = np.arange(48, dtype=np.uint8) * 5
INT3 = {"q3": npy(THREE), "s3": npy([0.5, 0.25], "<f4"), "z3": npy([3, 2.5], "<f4"), "shape": npy([4, 32], "<i8")}


def sidecar(tensors: Any, **fields: Any) -> bytes:
    return json.dumps({"ingot_npydir": 1, "metadata": {}, "tensors": tensors, **fields}).encode()


def valid() -> dict[str, Files]:
    small = {"w": {"pt": npy([1, 2], "<f2")}}
    bf16 = {"a.b": {"dtype": "bf16", "digests": {}}}
    zst = zstandard.ZstdCompressor().compress(INT8["q"])
    return {
        "nothing": folder({}),
        "passthrough": folder(
            {
                "a.f16": {"pt": npy([[1, 2.5]], "<f2")},
                "b.scalar": {"pt": npy(3.0, "<f4")},
                "c.none": {"pt": npy(np.ones((0, 3)))},
            }
        ),
        "int8-row": folder({"l.q": INT8}),
        "int8-groups-no-shape": folder({"l.q": {"q": npy(CODES), "s": npy(GROUPED)}}),
        "int8-matrix": folder({"conv": {**INT8, "shape": npy([3, 2, 2, 2], "<i8")}}),
        "int4-offset": folder({"l.q": INT4A}, more={INT4: b""}),
        "int4-legacy": folder({"l.q": LEGACY}),
        "int3-packed": folder({"l.q": INT3}),
        "both-ready": folder({"l.q": {**INT8, **INT4A}}, more={INT4: b""}),
        "both-not-ready": folder({"l.q": {**INT8, **INT4A}}),
        "unfinished-int4": folder({"l.q": {**INT8, "q4a": b"half a fi"}}),
        "manifest-by-key": folder({"a.b": PT, "c": small["w"]}, manifest={"a__b": "a.b", "c": "c"}),
        "unmarked": {name: data for name, data in folder(small).items() if name != READY},
        "zst": {**{k: v for k, v in folder({"l.q": INT8}).items() if "q__q" not in k}, "tensors/l__q__q.npy.zst": zst},
        "bf16-in-f32": folder({"a.b": PT}, more={"ingot.json": sidecar(bf16, metadata={"k": [1, None]})}),
        "version-2-header": folder(
            {"w": {"pt": raw("{ 'shape': (2,) , 'descr':\"<f4\",'fortran_order':False}", bytes(8), version=2, pad=4)}}
        ),
        "other-form-unused": folder({"w": {**PT, "nf4": b"anything"}}, more={"tensors/readme.txt": b"hello"}),
    }


def _header(**fields: str) -> bytes:
    found = {"descr": "'<f4'", "fortran_order": "False", "shape": "(2,)", **fields}
    return raw("{" + ", ".join(f"{name!r}: {value}" for name, value in found.items()) + "}", bytes(8))


def _one(file: bytes, suffix: str = "pt") -> Files:
    return folder({"w": {suffix: file}})


def _rejected_headers() -> dict[str, Files]:
    whole = npy([1, 2], "<f4")
    return {
        "npydir.npy-magic": _one(b"\x93NUMPX" + whole[6:]),
        "npydir.npy-magic+empty": _one(b""),
        "npydir.npy-truncated+preamble": _one(whole[:9]),
        "npydir.npy-truncated+header": _one(whole[:40]),
        "npydir.npy-truncated+values": _one(whole[:-1]),
        "npydir.npy-truncated+huge": _one(_header(shape="(1152921504606846975,)")),
        "npydir.npy-trailing": _one(whole + b"\0"),
        "npydir.npy-version": _one(whole[:6] + b"\4\0" + whole[8:]),
        "npydir.npy-version+minor": _one(whole[:6] + b"\1\1" + whole[8:]),
        "npydir.npy-header+long": _one(b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 30) + bytes(99)),
        "npydir.npy-header+code": _one(raw("__import__('os').system('true')", bytes(8))),
        "npydir.npy-header+value": _one(_header(shape="(2,) + (1,)")),
        "npydir.npy-header+missing": _one(raw("{'descr': '<f4', 'fortran_order': False}", bytes(8))),
        "npydir.npy-header+twice": _one(
            raw("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(8))
        ),
        "npydir.npy-header+unknown": _one(_header(extra="(1,)")),
        "npydir.npy-header+integer-shape": _one(_header(shape="(2)")),
        "npydir.npy-header+negative": _one(_header(shape="(-2,)")),
        "npydir.npy-header+binary": _one(raw("\0" * 20, bytes(8))),
        "npydir.npy-object": _one(npy(np.array([{}, 1], object))),
        "npydir.npy-dtype+void": _one(_header(descr="'|V4'")),
        "npydir.npy-dtype+text": _one(npy(["a", "b"])),
        "npydir.npy-dtype+struct": _one(npy(np.zeros(2, [("a", "<f4")]))),
        "npydir.npy-dtype+time": _one(npy(np.zeros(2, "<M8[s]"))),
        "npydir.npy-dtype+native": _one(_header(descr="'=f4'")),
        "npydir.npy-byte-order": _one(npy([1, 2], ">f4")),
        "npydir.npy-fortran": _one(npy(np.asfortranarray(RAMP))),
        "npydir.npy-shape+product": _one(_header(shape="(4294967296, 4294967296)")),
        "npydir.npy-shape+rank": _one(_header(shape="(" + "1," * 64 + ")")),
        "npydir.npy-alignment": _one(raw("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(8), pad=1)),
    }


def _rejected_manifests() -> dict[str, Files]:
    listed = sidecar({"w": {"dtype": "f32", "digests": {"q": None}}})
    return {
        "npydir.manifest-json": folder({"w": PT}, manifest=b"{"),
        "npydir.manifest-json+list": folder({"w": PT}, manifest=b"[]"),
        "npydir.manifest-json+bytes": folder({"w": PT}, manifest=b"\xff\xfe"),
        "npydir.manifest-duplicate-key": folder({"w": PT}, manifest=b'{"w": "w", "w": "w"}'),
        "npydir.manifest-fields": folder({"w": PT}, manifest={"w": 1}),
        "npydir.manifest-collision": folder({"a.b": PT}, manifest={"a.b": "a__b", "a__b": "a__b"}),
        "npydir.manifest-collision+turned": folder({"a.b": PT, "c.d": PT}, manifest={"a__b": "a.b", "c__d": "a.b"}),
        "npydir.escape": folder({"w": PT}, manifest={"w": "../tensors/w"}),
        "npydir.escape+absolute": folder({"w": PT}, manifest={"w": "/etc/passwd"}),
        "npydir.escape+dots": folder({"w": PT}, manifest={"w": ".."}),
        "npydir.escape+nul": folder({"w": PT}, manifest={"w": "w\0"}),
        "npydir.missing-file": folder({"w": PT}, manifest={"w": "w", "v": "v"}),
        "npydir.missing-file+scales": folder({"l": {"q": INT8["q"], "shape": SHAPE}}),
        "npydir.missing-file+codes": folder({"l": {"s": INT8["s"], "shape": SHAPE}}),
        "npydir.missing-file+offsets": folder({"l": {"q4a": INT4A["q4a"], "s4a": INT4A["s4a"]}}),
        "npydir.missing-file+three-shape": folder({"l": {name: INT3[name] for name in ("q3", "s3", "z3")}}),
        "npydir.missing-file+listed": folder({"w": PT}, more={"ingot.json": listed}),
        "npydir.extra-file": folder({"w": PT}, more={"tensors/v__pt.npy": PT["pt"]}),
        "npydir.extra-file+suffix": folder({"w": PT}, more={"tensors/w__hello.npy": PT["pt"]}),
        "npydir.extra-file+plain": folder({"w": PT}, more={"tensors/w.npy": PT["pt"]}),
    }


def _rejected_forms() -> dict[str, Files]:
    foreign = ("pt_df11", "aqlm_idx", "vq_idx", "quip_e8", "sqint2_w", "q2", "awq")
    made = {f"npydir.form+{suffix}": folder({"w": {suffix: b"never opened"}}) for suffix in foreign}
    made["npydir.form+br"] = folder({}, manifest={"w": "w"}, more={"tensors/w__pt.npy.br": b"x"})
    made["npydir.missing-file+nf4"] = folder({"w": {"nf4": npy(np.zeros((2, 32), np.uint8))}})
    made["npydir.missing-file+correction"] = folder({"w": {**INT3, "lra": npy(np.zeros((2, 1), "<f4"))}})
    made["npydir.array-shape+correction"] = folder(
        {"w": {**INT3, "lra": npy(np.zeros((2, 1), "<f4")), "lrb": npy(np.zeros((2, 3), "<f4"))}}
    )
    made["npydir.array-dtype+nf4"] = folder(
        {"w": {"nf4": npy(np.zeros((2, 32), np.uint8)), "s_nf4": npy(np.zeros((2, 1), "<f2"))}}
    )
    done = {"completed_shards": ["a.safetensors"], "total_shards": 2, "delete_source": False, "freed_bytes": 0}
    made["npydir.unfinished"] = folder({"w": PT}, more={"_compress_progress.json": json.dumps(done).encode()})
    made["npydir.progress"] = folder({"w": PT}, more={"_compress_progress.json": b"[]"})
    made["npydir.progress+fields"] = folder({"w": PT}, more={"_compress_progress.json": b'{"total_shards": 2}'})
    made["npydir.form+three-as-bytes"] = folder({"w": {**INT3, "q3": npy(np.zeros((2, 64), np.uint8))}})
    wrong: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {
        "npydir.array-dtype+codes": (INT8, {"q": npy(CODES.astype(np.int16))}),
        "npydir.array-dtype+unsigned": (INT8, {"q": npy(CODES.view(np.uint8))}),
        "npydir.array-dtype+scales": (INT8, {"s": npy(ROW.astype(np.float64))}),
        "npydir.array-dtype+offsets": (INT4A, {"z4a": npy(OFFSETS.astype(np.float16))}),
        "npydir.array-dtype+nibbles": (INT4A, {"q4a": npy(NIBBLES.view(np.int8))}),
        "npydir.array-dtype+three": (INT3, {"q3": npy(THREE.view(np.int8))}),
        "npydir.array-shape+vector": (INT8, {"q": npy(CODES.reshape(-1))}),
        "npydir.array-shape+nothing": (INT8, {"q": npy(CODES[:0])}),
        "npydir.array-shape+rows": (INT8, {"s": npy(ROW[:2])}),
        "npydir.array-shape+groups": (INT8, {"s": npy(np.ones((3, 3), np.float32))}),
        "npydir.array-shape+no-groups": (INT8, {"s": npy(np.ones((3, 0), np.float32))}),
        "npydir.array-shape+offsets": (INT4A, {"z4a": npy(OFFSETS.reshape(2, 3))}),
        "npydir.array-shape+three-codes": (INT3, {"q3": npy(THREE[:-3])}),
        "npydir.array-shape+three-scales": (INT3, {"s3": npy([1, 2, 3], "<f4")}),
        "npydir.shape+dtype": (INT8, {"shape": npy([3, 8], "<i4")}),
        "npydir.shape+matrix": (INT8, {"shape": npy([[3, 8]], "<i8")}),
        "npydir.shape+negative": (INT8, {"shape": npy([-3, -8], "<i8")}),
        "npydir.shape+product": (INT8, {"shape": npy([3, 7], "<i8")}),
        "npydir.shape+overflow": (INT8, {"shape": npy([2**62, 2**62], "<i8")}),
        "npydir.shape+rank": (INT8, {"shape": npy([1] * 65, "<i8")}),
        "npydir.array-shape+three": (INT3, {"shape": npy([5, 32], "<i8")}),
    }
    for rule, (sound, change) in wrong.items():
        made[rule] = folder({"w": {**sound, **change}})
    made["npydir.forms-differ"] = folder({"w": {**INT8, "pt": npy(RAMP)}})
    made["npydir.sentinel"] = folder({"w": INT8}, more={INT4: b""})
    made["npydir.sentinel+one-of-two"] = folder({"v": {**INT8, **INT4A}, "w": INT8}, more={INT4: b""})
    return made


def _rejected_sidecars() -> dict[str, Files]:
    sound = {"w": {"dtype": "f32", "digests": {}}}
    documents: dict[str, bytes] = {
        "npydir.sidecar-json": b"{",
        "npydir.sidecar-duplicate-key": b'{"a": 1, "a": 2}',
        "npydir.sidecar-version": sidecar(sound, ingot_npydir=2),
        "npydir.sidecar-version+true": sidecar(sound, ingot_npydir=True),
        "npydir.sidecar-fields+more": sidecar(sound, more=1),
        "npydir.sidecar-fields+tensors": sidecar([]),
        "npydir.sidecar-fields+metadata": sidecar(sound, metadata=1),
        "npydir.sidecar-fields+entry": sidecar({"w": 1}),
        "npydir.sidecar-fields+dtype": sidecar({"w": {"dtype": ["f32"], "digests": {}}}),
        "npydir.sidecar-fields+unknown": sidecar({"w": {"dtype": "f99", "digests": {}}}),
        "npydir.sidecar-fields+digests": sidecar({"w": {"dtype": "f32", "digests": {"pt": 1}}}),
        "npydir.sidecar-tensors": sidecar({}),
        "npydir.sidecar-tensors+more": sidecar({**sound, "v": sound["w"]}),
        "npydir.head-digest": sidecar({"w": {**sound["w"], "heads": {"pt": "crc32c:0x00000000"}}}),
        "npydir.sidecar-dtype": sidecar({"w": {"dtype": "i64", "digests": {}}}),
    }
    made = {rule: folder({"w": PT}, more={"ingot.json": data}) for rule, data in documents.items()}
    integer = sidecar({"w": {"dtype": "i8", "digests": {}}})
    made["npydir.sidecar-dtype+quantized"] = folder({"w": INT8}, more={"ingot.json": integer})
    return made


def rejected() -> dict[str, Files]:
    zst = {k: v for k, v in folder({"w": PT}).items() if not k.endswith("pt.npy")}
    return {
        **_rejected_headers(),
        **_rejected_manifests(),
        **_rejected_forms(),
        **_rejected_sidecars(),
        "npydir.zstd": {**zst, "tensors/w__pt.npy.zst": b"no zstd at all"},
        "npydir.zstd+short": {**zst, "tensors/w__pt.npy.zst": zstandard.ZstdCompressor().compress(PT["pt"][:20])},
    }


def main() -> None:
    for name, files in valid().items():
        for path, data in files.items():
            place = ROOT / "valid" / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)


if __name__ == "__main__":
    main()
