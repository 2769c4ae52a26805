"""Makes tests/golden/zt2 with the package ztensor itself; needs ztensor==2.1.2 and NumPy.

    python tests/golden/make_zt2.py CORPUS [FOLDER]

CORPUS is ``conformance/corpus`` of github.com/pie-project/ztensor (MIT license) at py-v2.1.2: it goes into
``conformance.zip`` as it is, and what the package reads of its valid files into ``expected.json``.
``peer.zip`` has files that the package writes: compressed parts of several frames, and a tensor that was appended; and
tensors of the profiles of integers in groups and of small floats with exponents, in all the ways in which they lie.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ztensor

ZEROS = ("none", "implied 3", "implied 30", "packed", "plain u8", "plain i32", "plain f16", "plain f32")
EPOCH = (1980, 1, 1, 0, 0, 0)


def read(path: Path) -> dict[str, Any] | str:
    """Return what the package says of a file: shape, layout, and of each part its types and its bytes' SHA-256."""
    try:
        source = ztensor.open(str(path))
    except (OSError, ValueError) as error:
        return type(error).__name__
    return {name: about(source[name]) for name in source}


def about(tensor: Any) -> dict[str, Any]:
    """Describe a tensor."""
    parts = {role: tensor[role] for role in tensor.parts}
    return {
        "shape": tensor.shape,
        "layout": tensor.layout,
        "parts": {role: [part.dtype, part.logical, content(part)] for role, part in parts.items()},
    }


def content(part: Any) -> str:
    """Return the SHA-256 of a part's bytes, or how the package refuses to read it."""
    try:
        return hashlib.sha256(part.tobytes()).hexdigest()
    except Exception as error:
        return type(error).__name__


def pack(files: dict[str, bytes], path: Path) -> None:
    """Write a zip archive that is the same every time."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)


def random(seed: int, nbytes: int, most: int = 256) -> bytes:
    """Return the same bytes for the same seed, below ``most``."""
    raw = hashlib.shake_256(str(seed).encode()).digest(nbytes)
    return bytes(byte % most for byte in raw)


def halves(seed: int, count: int, kind: str) -> bytes:
    """Return numbers of a type between 0.5 and 2: exponents are those of 0.5 and 1, what is below is anything."""
    width, top = {"f16": (2, (0x38, 0x3C)), "bf16": (2, (0x3F,)), "f32": (4, (0x3F,))}[kind]
    raw = bytearray(random(seed, count * width))
    for at in range(count):
        raw[width * at + width - 1] = top[raw[width * at + width - 1] % len(top)]
    return bytes(raw)


def profiles() -> list[tuple[str, list[int], str, dict[str, Any], dict[str, tuple[str, str | None, bytes]]]]:
    """Return tensors: name, shape, layout, attributes, and parts (type, logical type, bytes)."""
    found = []
    for axis, shape in ((0, [32, 6]), (1, [32, 6]), (1, [2, 32, 3]), (0, [4, 2, 3]), (2, [2, 3, 32])):
        block = 2 if shape == [32, 6] else shape[axis]
        for kind, bits in (("f4_e2m1", 4), ("f8_e4m3fn", 8)):
            count = math.prod(shape)
            parts = {
                "data": ("u8", kind, random(len(found), count * bits // 8, 256 if bits == 4 else 120)),
                "scales": ("u8", "f8_e8m0", bytes(110 + byte % 20 for byte in random(99, count // block))),
            }
            about = {"block_size": block, "axis": axis, "scale_form": "e8m0_exponent"}
            found.append((f"mx {kind} {axis} {shape}", shape, "zt.mx/1", about, parts))
    grids = (([8, 32], 16, 1), ([8, 32], 4, 0), ([8, 32], 0, 0), ([8, 32], 0, 1))
    ways = list(itertools.product((2, 4, 8), ("u8", "u32", "i32", "u16"), ("lsb_first", "msb_first"), ZEROS))
    for number, (bits, word, order, zero) in enumerate(ways):
        scales = ("f16", "f32", "bf16", "e8m0")[number // 3 % 4]
        found.append(grouped((bits, word, order), zero, scales, grids[number // 5 % 4]))
    found.append(grouped((4, "u16", "msb_first"), "packed", "f16", ([4, 9], 3, 1)))
    found.append(grouped((2, "u8", "msb_first"), "packed", "f16", ([2, 4, 5], 2, 1)))
    found.append(grouped((8, "i8", "lsb_first"), "plain i8", "f32", ([8, 32], 32, 1)))
    return found


def grouped(
    codes: tuple[int, str, str], zero: str, scales: str, grid: tuple[list[int], int, int]
) -> tuple[str, list[int], str, dict[str, Any], dict[str, tuple[str, str | None, bytes]]]:
    """Return a tensor of integers in groups."""
    (bits, word, order), (shape, group, axis) = codes, grid
    count, width = math.prod(shape), int(word[1:]) // 8
    each = shape[axis] if not group else count // group
    form, _, more = zero.partition(" ")
    point: dict[str, Any] = {"form": form}
    name = f"{bits} {word} {order} {zero} {scales} {shape} {group} {axis}"
    kind = ("u8", "f8_e8m0", bytes(110 + byte % 20 for byte in random(5, each)))
    parts: dict[str, tuple[str, str | None, bytes]] = {
        "data": (word, None, random(sum(name.encode()), count * bits // 8)),
        "scales": kind if scales == "e8m0" else (scales, None, halves(7, each, scales)),
    }
    if form == "implied":
        point["value"] = int(more)
    elif form == "packed":
        point = {"form": "tensor", "packing": "same_as_data"}
        parts["zeros"] = (word, None, random(11, -(-each * bits // (8 * width)) * width))
    elif form == "plain":
        point = {"form": "tensor", "packing": "plain"}
        small = [byte % 16 for byte in random(13, each)]
        kinds = {"u8": "B", "i8": "b", "i32": "<i", "f32": "<f", "f16": "<e"}
        parts["zeros"] = (more, None, b"".join(struct.pack(kinds[more], number) for number in small))
    about = {
        "bits": bits,
        "group_size": group,
        "axis": axis,
        "packing": {"word": f"u{word[1:]}", "order": order, "per_word": 8 * width // bits},
        "scale_form": "e8m0_exponent" if scales == "e8m0" else "f32_factors",
        "zero_point": point,
    }
    return name, shape, "zt.quant_group/1", about, parts


def written(folder: Path) -> dict[str, bytes]:
    """Return files that the package writes."""
    path = folder / "appended.zt"
    writer = ztensor.Writer(str(path), canonical=False, align=4096)
    for name, data in (("a", bytes(range(251)) * 10_000), ("empty", b"")):
        writer.add(name, data, [len(data)], "u8", encoding="zt.zstd-seekable/1")
    writer.finish()
    writer = ztensor.Writer(str(path), canonical=False, append=True)
    writer.add("later", b"12345678", [2], "u32")
    writer.finish()
    other = folder / "profiles.zt"
    writer = ztensor.Writer(str(other), canonical=False, align=4096)
    for name, shape, layout, attributes, parts in profiles():
        described = {
            role: {"data": data, "dtype": dtype, **({"logical": kind} if kind else {})}
            for role, (dtype, kind, data) in parts.items()
        }
        writer.add_object(name, shape, described, layout, attributes)
    writer.finish()
    return {"appended.zt": path.read_bytes(), "profiles.zt": other.read_bytes()}


def main(corpus: Path, root: Path) -> None:
    """Write all that is in the folder."""
    root.mkdir(parents=True, exist_ok=True)
    found = {path.relative_to(corpus).as_posix(): path for path in corpus.rglob("*.zt")}
    pack({name: path.read_bytes() for name, path in found.items()}, root / "conformance.zip")
    with tempfile.TemporaryDirectory() as folder:
        pack(written(Path(folder)), root / "peer.zip")
    expected = {name: read(path) for name, path in sorted(found.items()) if name.startswith("valid/")}
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "zt2")
