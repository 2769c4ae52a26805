"""Digests of stored bytes, in zTensor 1.2's spelling ``algorithm:hex`` (section 1, component ``digest``).

``crc32c`` is written as ``crc32c:0x%08X``, like the package ``ztensor`` does, and read with and without ``0x``.
``blake3`` is used for content ids (``artifacts.identity``); no container stores it per part. zTensor's container
version 2 stores ``xxh3``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Protocol

import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from ingot.core.runtime import native
from ingot.errors import FormatError, IntegrityError

Buffer = bytes | bytearray | memoryview
Array = NDArray[Any]

_SYNTAX = {
    "crc32c": re.compile(r"crc32c:(?:0x)?([0-9a-fA-F]{1,8})\Z"),
    "sha256": re.compile(r"sha256:([0-9a-fA-F]{64})\Z"),
    "xxh3": re.compile(r"xxh3:([0-9a-fA-F]{16})\Z"),
}


class Hasher(Protocol):
    """A digest of the bytes passed to ``update`` so far; ``text`` returns it as ``algorithm:hex``."""

    def update(self, data: Buffer, /) -> None: ...

    def text(self) -> str: ...


class Crc32c:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4)."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Buffer, /) -> None:
        self._value = native.crc32c(data, self._value)

    def text(self) -> str:
        return f"crc32c:0x{self._value:08X}"


class Sha256:
    """SHA-256 (FIPS 180-4)."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def update(self, data: Buffer, /) -> None:
        self._hash.update(data)

    def text(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


class Blake3:
    """BLAKE3 with 256 bits, on the calling thread; large updates release the GIL."""

    def __init__(self) -> None:
        self._hash = blake3(max_threads=1)

    def update(self, data: Buffer, /) -> None:
        self._hash.update(data)

    def text(self) -> str:
        return f"blake3:{self._hash.hexdigest()}"


class Xxh3:
    """XXH3 with 64 bits, seed 0 (xxHash 0.8)."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def update(self, data: Buffer, /) -> None:
        self._hash.update(data)

    def value(self) -> int:
        return self._hash.intdigest()

    def text(self) -> str:
        return f"xxh3:{self.value():016x}"


def hex_of(running: Hasher) -> str:
    """Return the hexadecimal digits of a digest."""
    return running.text().partition(":")[2]


def xxh3(data: Buffer) -> int:
    """Return the XXH3 with 64 bits of a buffer."""
    return xxhash.xxh3_64_intdigest(data)


def fnv1a64(data: Buffer) -> int:
    """Return the 64-bit FNV-1a hash (offset basis 0xCBF29CE484222325, prime 0x100000001B3), for short keys only."""
    return native.fnv1a64(data)


HASHERS: dict[str, Callable[[], Hasher]] = {"crc32c": Crc32c, "sha256": Sha256}
"""The algorithms that users may choose for writing."""
_ALL_HASHERS: dict[str, Callable[[], Hasher]] = {**HASHERS, "xxh3": Xxh3}
WIDTHS = {"crc32c": 4, "sha256": 32, "xxh3": 8}
"""The algorithms that parts of a container may have, and the bytes of their digests."""


def hasher(algorithm: str) -> Hasher:
    """Return a new running digest; ``algorithm`` is ``crc32c``, ``sha256`` or ``xxh3``."""
    return _ALL_HASHERS[algorithm]()


def digest(algorithm: str, data: Buffer) -> str:
    """Return the digest of ``data`` as text ``algorithm:hex``."""
    running = hasher(algorithm)
    running.update(data)
    return running.text()


def algorithm_of(text: str, rule: str, location: str) -> str | None:
    """Return the algorithm of a digest string; None if Ingot does not support the algorithm.

    Raises
    ------
    FormatError
        The text is not ``algorithm:hex``, or the algorithm is supported and the digits are invalid.
    """
    algorithm, colon, value = text.partition(":")
    if not colon or not algorithm or not value:
        raise FormatError(rule, f"expected a digest 'algorithm:hex', found {text[:80]!r}", where=location)
    if supported_algorithm(text) is None:
        return None
    if not _SYNTAX[algorithm].match(text):
        raise FormatError(rule, f"expected {algorithm}'s hexadecimal digits, found {text[:80]!r}", where=location)
    return algorithm


def supported_algorithm(text: str) -> str | None:
    """Return the algorithm of a well-formed digest; None if Ingot does not support it."""
    algorithm, _, value = text.partition(":")
    # XXH3 with 128 bits is not supported.
    return None if algorithm not in _SYNTAX or (algorithm == "xxh3" and len(value) != 16) else algorithm


def proves(text: str, data: Buffer) -> bool:
    """Return True if ``data`` has the digest ``text`` and the text is in the form that Ingot writes.

    False does not mean that ``data`` is damaged: the text may be in another valid form. ``algorithm_of`` and ``check``
    then decide.
    """
    prefix, _, value = text.partition(":")
    if prefix == "crc32c":
        value = value[2:] if value.startswith("0x") else ""
    if prefix not in _SYNTAX or len(value) != 2 * WIDTHS[prefix] or not _SYNTAX[prefix].match(text):
        return False
    expected = int(value, 16)
    if prefix == "crc32c":
        return expected == native.crc32c(data, 0)
    return expected == (xxh3(data) if prefix == "xxh3" else int.from_bytes(hashlib.sha256(data).digest(), "big"))


def same(expected: str, actual: str) -> bool:
    """Return whether two digest texts of one algorithm name the same number; case, ``0x`` and leading zeros do not
    count.
    """
    return _number(expected) == _number(actual)


def _number(text: str) -> int:
    return int(text.partition(":")[2], 16)


def raw(text: str) -> bytes:
    """Return a digest of a supported algorithm as big-endian bytes."""
    return _number(text).to_bytes(WIDTHS[text.partition(":")[0]], "big")


def text_of(algorithm: str, value: bytes) -> str:
    """Return the text ``algorithm:hex`` of the big-endian digest ``value``; the reverse of ``raw``."""
    return f"crc32c:0x{value.hex().upper()}" if algorithm == "crc32c" else f"{algorithm}:{value.hex()}"


def check(expected: str, actual: str, rule: str, location: str, *, subject: str = "the stored bytes") -> None:
    """Raise ``IntegrityError`` if two digests differ; ``subject`` names their bytes in the message."""
    if not same(expected, actual):
        raise IntegrityError(
            rule,
            f"{subject} do not match their digest: expected {expected}, found {actual}; the file is damaged",
            where=location,
        )
