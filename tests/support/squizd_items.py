"""Hand-made blocks of ``.squizd`` files, with what a directory says of them; packed from ``spec/squizd.md`` alone."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_OWN = (
    "f64", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "f8_e4m3fn", "f8_e5m2", "f8_e4m3fnuz",
    "f8_e5m2fnuz", "f8_e8m0fnu", "f6_e2m3fn", "f6_e3m2fn", "f4_e2m1fn", "complex64", "complex128",
)  # fmt: skip
DTYPE_CODES = {"f32": 0, "f16": 1, "bf16": 2} | {name: code for code, name in enumerate(_OWN, start=256)}
# An ASTC block of one colour, LDR, without extent: luminance 0, 1/3, 2/3 and 1 (Khronos Data Format, 23.21).
_VOID = bytes.fromhex("fcfdffffffffffff")

Array = np.ndarray[Any, np.dtype[Any]]


def fnv(data: bytes) -> int:
    """FNV-1a with 64 bits."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def id_of(layer: int, name: str) -> int:
    return fnv(struct.pack("<I", layer) + name.encode()) % 2**63


@dataclass(frozen=True)
class Item:
    """One tensor: its block's header and payload, scale entries of either round, mask, and what a directory says."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    head: bytes
    payload: bytes
    params: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)
    entries: Sequence[tuple[float, float]] = ()
    second: bool = False
    scales: str | None = None
    zeros: bool = False
    mask: bytes = b""
    layer: int = 0
    id: int | None = None

    @property
    def tensor_id(self) -> int:
        return id_of(self.layer, self.name) if self.id is None else self.id


def dense(name: str, dtype: str, shape: Sequence[int], data: bytes, layer: int = 0) -> Item:
    """A block without compression."""
    head = struct.pack(f"<4sII{len(shape)}I", b"NPCL", DTYPE_CODES[dtype], len(shape), *shape)
    return Item(name, tuple(shape), dtype, "dense", head, data, {}, {"data": data}, layer=layer)


def pack_codes(codes: Array, bits: int) -> bytes:
    """Two's complement codes as one stream of bits, lowest first."""
    flat = codes.reshape(-1).astype(np.int64)
    stream = ((flat[:, None] >> np.arange(bits)) & 1).astype(np.uint8).reshape(-1)
    return np.packbits(stream, bitorder="little").tobytes()


def quantized(
    name: str,
    codes: Array,
    bits: int,
    entries: Sequence[tuple[float, float]],
    group: int | str = "tensor",
    **about: Any,
) -> Item:
    """An ``INT4`` or ``INT2`` block; ``group`` is the number of columns that share a scale, ``row`` or ``tensor``.

    ``about`` are further fields of the item; by default ``dtype`` and ``scales`` are f32, without zero points.
    """
    rows, cols = codes.shape
    about = {"dtype": "f32", "scales": "f32", "zeros": False, **about}
    sub = {"tensor": 0, "row": cols}.get(str(group), group)
    magic = {4: b"INT4", 2: b"INT2"}[bits]
    head = struct.pack("<4sII", magic, rows, cols) + (struct.pack("<I", sub) if bits == 2 else b"")
    params: dict[str, Any] = {"codec_version": 1, "bits": bits}
    params |= {"granularity": group} if isinstance(group, str) else {"granularity": "group", "group_size": group}
    packing = "flat_lsb" if cols * bits % 8 else "rows_lsb"
    params |= {"axis": -1, "packing": packing, "signed": True, "zeros": about["zeros"], "dtype": about["dtype"]}
    packed = pack_codes(codes, bits)
    parts = {"packed_weight": packed, "scales": _column(entries, 0, about["scales"])}
    parts |= {"zeros": _column(entries, 1, about["scales"])} if about["zeros"] else {}
    fixed: dict[str, Any] = {
        "codec": "quantized_group",
        "head": head,
        "payload": packed,
        "params": params,
        "parts": parts,
    }
    return Item(name, (rows, cols), entries=entries, second=group != "tensor", **fixed, **about)


def _column(entries: Sequence[tuple[float, float]], index: int, dtype: str) -> bytes:
    values = np.array([entry[index] for entry in entries], np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"f32": "<f4", "f16": "<f2"}[dtype]).tobytes()


def astc(name: str, levels: Array, shape: tuple[int, int], entry: tuple[float, float], layer: int = 0) -> Item:
    """An ``ASTW`` block of footprint 4x4 whose ASTC blocks have one luminance each: ``levels`` of 65535, as a grid."""
    rows, cols = shape
    head = struct.pack("<4sIII", b"ASTW", cols, rows, 3)
    data = b"".join(_VOID + struct.pack("<4H", level, level, level, 65535) for level in levels.reshape(-1).tolist())
    params = {"codec_version": 1, "footprint": "4x4", "profile": "ldr", "dtype": "f32"}
    parts = {"blocks": data, "scales": _column([entry], 0, "f32"), "zeros": _column([entry], 1, "f32")}
    return Item(name, shape, "f32", "astc", head, data, params, parts, [entry], scales="f32", zeros=True, layer=layer)


def tca(name: str, shape: tuple[int, int], start: int, parts: Mapping[str, bytes], layer: int = 0) -> Item:
    """A ``TCAW`` block of the parts of codec ``tca_tbe``."""
    sizes = (len(parts["high"]), len(parts["fallback"]) // 2)
    head = struct.pack("<4sIIIIiIQQ", b"TCAW", shape[0], 64, 1, shape[1], start, 0, *sizes).ljust(64, b"\0")
    payload = b""
    for data in parts.values():
        payload += bytes(-len(payload) % 64) + data
    params = {"codec_version": 1, "start": start, "dtype": "bf16"}
    return Item(name, shape, "bf16", "tca_tbe", head, payload, params, dict(parts), layer=layer)


def bitmap(name: str, words: Array, layer: int = 0, **about: Any) -> Item:
    """A ``TCAW`` block in the document's own shape: bf16 as words of 16 bits; ``about`` are other parameters."""
    rows, cols = words.shape
    bits = np.zeros((rows, -(-cols // 64) * 64), np.uint8)
    bits[:, :cols] = words != 0
    kept = words[words != 0].astype("<u2")
    parts = {"mask": np.packbits(bits, bitorder="little").tobytes(), "nonzeros": kept.tobytes()}
    params: dict[str, Any] = {"codec_version": 1, "dtype": "bf16", "nnz": kept.size, "row_alignment": 64}
    params |= {"inner": {"codec": "dense", "params": {}}, **about}
    head = struct.pack("<4sII", b"TCAW", rows, 64)
    return Item(name, words.shape, "bf16", "sparse_mask", head, b"".join(parts.values()), params, parts, layer=layer)


def pruned(inner: Item, axis: int, channels: int, block: int, kept: Sequence[int], *, whole: bool = False) -> Item:
    """A tensor of which only the blocks ``kept`` count, stored as ``inner``: alone, or in a ``whole`` matrix."""
    count = -(-channels // block)
    mask = sum(1 << index for index in kept).to_bytes(-(-count // 8), "little")
    shape = (channels, inner.shape[1]) if axis == 0 else (inner.shape[0], channels)
    params = {
        "codec_version": 1,
        "axis": axis,
        "block": block,
        "channels": channels,
        "kept": sum(min(block, channels - block * index) for index in kept),
        "inner": inner.codec,
        "inner_params": dict(inner.params),
        "dtype": inner.dtype,
        **({"stored": "whole"} if whole else {}),
    }
    values = {name: getattr(inner, name) for name in inner.__dataclass_fields__}
    values |= {"shape": shape, "codec": "sparse_blocks", "params": params, "mask": mask}
    return Item(**{**values, "parts": {"mask": mask, **inner.parts}})
