"""Hand-made ``.zt`` files, well-formed or not: for the golden corpus, hostile tests and fuzz seeds."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from ingot.core.parsing import cbor

MAGIC = b"ZTEN1000"
OMIT: Any = object()


def zt_file(
    manifest: Any,
    blobs: Mapping[int, bytes] | None = None,
    *,
    header: bytes = MAGIC,
    footer: bytes = MAGIC,
    size: int | None = None,
) -> bytes:
    """Return a file with ``blobs`` at their offsets and ``manifest`` (bytes are taken as they are) right behind them.

    ``header``, ``footer`` and ``size`` (the stated size of the manifest) can be wrong on purpose.
    """
    body = bytearray(header)
    for offset, data in (blobs or {}).items():
        body.extend(bytes(max(0, offset + len(data) - len(body))))
        body[offset : offset + len(data)] = data
    encoded = manifest if isinstance(manifest, bytes) else cbor.dumps(manifest)
    return bytes(body) + encoded + struct.pack("<Q", len(encoded) if size is None else size) + footer


def component(dtype: str = "f32", offset: Any = 64, length: Any = 16, **fields: Any) -> dict[str, Any]:
    """Return a component; a field given as ``OMIT`` is left out."""
    entry = {"dtype": dtype, "offset": offset, "length": length, **fields}
    return {key: value for key, value in entry.items() if value is not OMIT}


def tensor(shape: Any = (4,), format: Any = "dense", components: Any = None, **fields: Any) -> dict[str, Any]:
    """Return an object, by default four f32 at byte 64."""
    entry = {"shape": shape, "format": format, "components": components or {"data": component()}, **fields}
    return {key: value for key, value in entry.items() if value is not OMIT}


def manifest(objects: Any = None, version: Any = "1.2.0", **fields: Any) -> dict[str, Any]:
    """Return a manifest, by default with one tensor ``t``."""
    entry = {"version": version, "objects": {"t": tensor()} if objects is None else objects, **fields}
    return {key: value for key, value in entry.items() if value is not OMIT}


def loose_cbor(item: Any, rng: Random) -> bytes:
    """Return the item with tags and indefinite lengths here and there; ``undefined`` in the place of some nulls."""
    if rng.random() < 0.2:  # 2 and 3 are bignums of byte strings
        return rng.choice([b"\xc6", b"\xd8\x63", b"\xd9\xd9\xf7"]) + loose_cbor(item, rng)
    loose = rng.random() < 0.5
    if isinstance(item, dict):
        body = b"".join(loose_cbor(key, rng) + loose_cbor(inner, rng) for key, inner in item.items())
        return b"\xbf" + body + b"\xff" if loose else bytes([0xA0 | len(item)]) + body
    if isinstance(item, list):
        body = b"".join(loose_cbor(inner, rng) for inner in item)
        return b"\x9f" + body + b"\xff" if loose else bytes([0x80 | len(item)]) + body
    if isinstance(item, str | bytes) and loose:
        cut = rng.randrange(len(item) + 1)
        return (
            (b"\x7f" if isinstance(item, str) else b"\x5f") + cbor.dumps(item[:cut]) + cbor.dumps(item[cut:]) + b"\xff"
        )
    if isinstance(item, int) and not isinstance(item, bool) and loose:
        number = (item if item >= 0 else -1 - item).to_bytes(9, "big")
        return (b"\xc2" if item >= 0 else b"\xc3") + cbor.dumps(number)
    return b"\xf7" if item is None and loose else cbor.dumps(item)


def zstd_frame(content: bytes, *, repeat: int = 0) -> bytes:
    """Return one zstd frame (RFC 8878 section 3.1.1) of stored blocks, the same bytes under every zstd library.

    With ``repeat``, ``content`` is one byte and the frame holds it that many times, in RLE blocks of up to 128 KiB.
    """
    total = repeat or len(content)
    blocks: list[tuple[int, int, bytes]] = []  # type, size field, payload
    step = 128 << 10
    for start in range(0, total, step):
        count = min(step, total - start)
        blocks.append((1, count, content) if repeat else (0, count, content[start : start + count]))
    if not blocks:
        blocks.append((0, 0, b""))
    # Single segment, content size in 8 bytes: the window is the content.
    pieces = [b"\x28\xb5\x2f\xfd\xe0", struct.pack("<Q", total)]
    for index, (kind, count, payload) in enumerate(blocks):
        last = index == len(blocks) - 1
        pieces += [struct.pack("<I", count << 3 | kind << 1 | last)[:3], payload]
    return b"".join(pieces)


def nested(depth: int) -> bytes:
    """Return CBOR arrays ``depth`` levels deep."""
    return b"\x81" * depth + b"\x00"


def replace_at(value: Any, path: Sequence[Any], new: Any) -> Any:
    """Return a copy of nested dicts and lists with the item at ``path`` replaced, or removed by ``OMIT``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if len(path) == 1 and new is OMIT:
        del copy[path[0]]
    else:
        copy[path[0]] = replace_at(copy[path[0]], path[1:], new)
    return copy
