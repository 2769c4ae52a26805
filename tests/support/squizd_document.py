"""A packer of ``.squizd`` files from the SQUIZD document alone: no directory, no padding, nothing of the format."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Entry = tuple[int, float, float]

TCA_FLAG, INT4_FLAG, SPARSE_FLAG, EAGLE_FLAG, INT2_FLAG, COREML_FLAG = 2, 4, 8, 16, 32, 64


def fnv(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def id_of(layer: int, name: str) -> int:
    """Section 8: a hash of layer and name; which, and the clear top bit, are the page's decision."""
    return fnv(struct.pack("<I", layer) + name.encode()) % 2**63


def int4(codes: Array) -> bytes:
    """Section 5.3."""
    flat = codes.reshape(-1).astype(np.int64) & 15
    flat = np.append(flat, np.zeros(flat.size % 2, np.int64))
    packed = (flat[::2] | flat[1::2] << 4).astype(np.uint8)
    return b"INT4" + struct.pack("<II", *codes.shape) + packed.tobytes()


def int2(matrix: Array, sub_block: int) -> bytes:
    """Section 5.4."""
    flat = np.append(matrix.reshape(-1), np.zeros(-matrix.size % 4, np.int64)).astype(np.int64) & 3
    packed = sum(flat[at::4] << 2 * at for at in range(4))
    return b"INT2" + struct.pack("<III", *matrix.shape, sub_block) + np.asarray(packed, np.uint8).tobytes()


def tcaw(words: Array) -> bytes:
    """Section 5.2 for bf16 as words of 16 bits: a bit where a word is not 0, rows in whole words of 64, then these."""
    rows, cols = words.shape
    bits = [sum(1 << at for at, word in enumerate(row) if word) for row in words.tolist()]
    bitmap = b"".join(row.to_bytes(-(-cols // 64) * 8, "little") for row in bits)
    kept: Array = words[words != 0].astype("<u2")
    return b"TCAW" + struct.pack("<II", rows, 64) + bitmap + kept.tobytes()


def npcl(values: Array) -> bytes:
    """Section 5.5."""
    code = {"float32": 0, "float16": 1}[values.dtype.name]
    return b"NPCL" + struct.pack(f"<II{values.ndim}I", code, values.ndim, *values.shape) + values.tobytes()


def table(entries: Sequence[Entry]) -> bytes:
    """Section 8."""
    return b"SCZT" + struct.pack("<I", len(entries)) + b"".join(struct.pack("<Qff", *entry) for entry in entries)


def document(
    layers: Sequence[Sequence[bytes]],
    flags: int,
    entries: Sequence[Entry] = (),
    *,
    masks: Sequence[bytes] = (),
    sparsity: bytes = bytes(32),
    crc: int | None = None,
    draft: tuple[bytes, int, int] | None = None,
    coreml: bytes | None = None,
) -> bytes:
    """Sections 2 to 4: header, index, blocks with each layer's masks, scale tables, appendices; nothing between."""
    at = start = 256 + 32 * len(layers)
    tables = table(entries) if entries else b""
    behind = start + sum(map(len, (block for blocks in layers for block in blocks))) + sum(map(len, masks))
    index, body = b"", b""
    for layer, blocks in enumerate(layers):
        data = b"".join(blocks)
        mask = masks[layer] if masks else b""
        scales = at + len(data) if mask else behind
        index += struct.pack("<IQQQI", layer, at, len(data + mask), scales, 0)
        body += data + mask
        at += len(data + mask)
    head = bytes(32)
    tail = tables
    if draft is not None:
        payload, count, vocabulary = draft
        head = struct.pack("<QQII8x", behind + len(tables), 8 + len(payload), count, vocabulary)
        tail += b"EGDH" + struct.pack("<I", count) + payload
    if coreml is not None:
        tail += b"ANLX" + struct.pack("<Q", len(coreml)) + coreml
    if crc is None:
        crc = zlib.crc32(sparsity) if flags & SPARSE_FLAG else 0
    fixed = struct.pack("<4sHIHHIQ102x", b"SQZD", 1, flags, len(layers), 0, crc, fnv(head) if any(head) else 0)
    return fixed + sparsity + head + bytes(64) + index + body + tail
