"""GGUF files by hand, for tests: valid ones, and any that a reader has to refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import pack
from typing import Any, NamedTuple

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class Value(NamedTuple):
    """A metadata value: its type's number, for arrays the elements' too, and what it is."""

    type: int
    value: Any
    element: int | None = None


class Item(NamedTuple):
    """A tensor: name, sizes with the fastest first, the type's number, its bytes; ``offset`` for a wrong one."""

    name: str | bytes
    sizes: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


def string(text: str | bytes, order: str = "<") -> bytes:
    """Return a string as files have it."""
    data = text if isinstance(text, bytes) else text.encode()
    return pack(order + "Q", len(data)) + data


def single(type: int, value: Any, order: str) -> bytes:
    """Return a number or a string; bytes are taken as they are."""
    if type == STRING:
        return string(value, order)
    return value if isinstance(value, bytes) else pack(order + CODES[type], value)


def pairs_of(metadata: Iterable[tuple[str, Value]], order: str) -> bytes:
    """Return metadata pairs."""
    made = b""
    for key, value in metadata:
        made += string(key, order) + pack(order + "I", value.type)
        if value.type == ARRAY:
            made += pack(order + "IQ", value.element, len(value.value))
            made += b"".join(single(value.element or 0, item, order) for item in value.value)
        else:
            made += single(value.type, value.value, order)
    return made


def build(
    metadata: Mapping[str, Value] | Iterable[tuple[str, Value]] = (),
    tensors: Iterable[Item] = (),
    *,
    order: str = "<",
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file; ``counts`` are the numbers of tensors and pairs where the header is to state others."""
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    items = list(tensors)
    infos, data = b"", b""
    for item in items:
        offset = len(data) if item.offset is None else item.offset
        infos += string(item.name, order) + pack(order + f"I{len(item.sizes)}Q", len(item.sizes), *item.sizes)
        infos += pack(order + "IQ", item.type, offset)
        data += item.data + bytes(-len(item.data) % alignment)
    head = b"GGUF" + pack(order + "I", version) + pack(order + "QQ", *(counts or (len(items), len(pairs))))
    head += pairs_of(pairs, order) + infos
    return head + bytes(-len(head) % alignment) + data
