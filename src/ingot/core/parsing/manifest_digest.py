"""The digest that a header or manifest carries of itself, so that no byte of it changes unseen.

It stands under the key ``ingot_digest`` at the end of a CBOR map or in a JSON object, spelled as digests of parts are.
It is computed with its own hexadecimal digits as zeros, over the bytes of the manifest and whatever else is to be
covered with it. Definition: ``spec/operations.md``, "Digests of manifests".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ingot.core.bytes import checksums
from ingot.core.parsing import cbor
from ingot.errors import IntegrityError

KEY = "ingot_digest"
RULE = "manifest.digest"

Buffer = bytes | bytearray | memoryview
_IN_JSON = re.compile(rb'"ingot_digest"\s*:\s*"((?:crc32c:0x|sha256:)[0-9a-fA-F]+)"')


def stand_in(algorithm: str) -> str:
    """Return a digest of zeros, as long as any of ``algorithm``."""
    name, text = checksums.digest(algorithm, b"").partition(":")[::2]
    prefix = "0x" if text.startswith("0x") else ""
    return f"{name}:{prefix}{'0' * (len(text) - len(prefix))}"


def fill_cbor(data: bytes, algorithm: str, also: Sequence[Buffer] = (), before: Sequence[Buffer] = ()) -> bytes:
    """Return a map that ends with a stand-in under ``KEY`` with its digest in the stand-in's place.

    ``before`` are pieces of the map before ``data``.
    """
    return _fill(data, algorithm, len(data) - len(stand_in(algorithm)), also, before)


def fill_json(data: bytes, algorithm: str, also: Sequence[Buffer] = ()) -> bytes:
    """Return an object that holds a stand-in under ``KEY`` with its digest in the stand-in's place."""
    return _fill(data, algorithm, _places(data, stand_in(algorithm))[-1], also)


def _fill(data: bytes, algorithm: str, start: int, also: Sequence[Buffer], before: Sequence[Buffer] = ()) -> bytes:
    end = start + len(stand_in(algorithm))
    return data[:start] + _digest(algorithm, data, (start, end), also, before).encode() + data[end:]


def _places(data: bytes, text: str) -> list[int]:
    """Return where ``text`` stands under ``KEY`` in JSON."""
    starts = [match.start(1) for match in _IN_JSON.finditer(data)]
    return [start for start in starts if data.startswith(text.encode() + b'"', start)]


def check_cbor(data: Buffer, stated: str, where: str, also: Sequence[Buffer] = ()) -> None:
    """Check the digest ``stated`` that a decoded map has under ``KEY``; it must be the map's last entry.

    Raises ``IntegrityError`` ``manifest.digest``.
    """
    ending = cbor.dumps(KEY) + cbor.dumps(stated)
    if bytes(data[-len(ending) :]) != ending:
        raise _refuse(f"expected {KEY} as the last entry, found it elsewhere", where)
    _check(data, stated, (len(data) - len(stated), len(data)), where, also)


def check_json(data: bytes, stated: str, where: str, also: Sequence[Buffer] = ()) -> None:
    """Check the digest ``stated`` that a decoded object has under ``KEY``; errors as ``check_cbor``."""
    places = _places(data, stated)
    if not places:
        raise _refuse(f"expected {KEY} as Ingot writes it, found {stated[:80]!r}", where)
    _check(data, stated, (places[-1], places[-1] + len(stated)), where, also)


def _check(data: Buffer, stated: str, span: tuple[int, int], where: str, also: Sequence[Buffer]) -> None:
    algorithm = checksums.known(stated, RULE, where)
    if algorithm is None:
        raise _refuse(f"expected {' or '.join(checksums.HASHERS)}, found {stated[:40]!r}", where)
    digest = _digest(algorithm, data, span, also)
    if not checksums.same(stated, digest):
        raise _refuse(
            f"the manifest does not match its digest: expected {stated}, found {digest}; the file is damaged, or was "
            "changed by a program that left the digest as it was",
            where,
        )


def _digest(
    algorithm: str, data: Buffer, span: tuple[int, int], also: Sequence[Buffer], before: Sequence[Buffer] = ()
) -> str:
    view = memoryview(data)
    running = checksums.hasher(algorithm)
    for piece in before:
        running.update(piece)
    running.update(view[: span[0]])
    running.update(stand_in(algorithm).encode())
    running.update(view[span[1] :])
    for more in also:
        running.update(more)
    return running.text()


def _refuse(message: str, where: str) -> IntegrityError:
    return IntegrityError(RULE, message, where=where)
