"""The digest that a header or manifest contains of itself, which detects any changed byte.

It is the value of the key ``ingot_digest``, at the end of a CBOR map or in a JSON object, in the syntax of digests of
parts. It covers the bytes of the manifest, with the digest's hexadecimal digits replaced by zeros, and further bytes
that the format chooses. Definition: ``spec/operations.md``, "Digests of manifests".
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
    """Return a digest of ``algorithm`` whose digits are zeros: a placeholder of the right length."""
    name, text = checksums.digest(algorithm, b"").partition(":")[::2]
    prefix = "0x" if text.startswith("0x") else ""
    return f"{name}:{prefix}{'0' * (len(text) - len(prefix))}"


def fill_cbor(data: bytes, algorithm: str, also: Sequence[Buffer] = (), before: Sequence[Buffer] = ()) -> bytes:
    """Replace the placeholder at the end of an encoded CBOR map by the map's digest.

    ``before`` are parts of the map before ``data``, and ``also`` further bytes that the digest covers.
    """
    return _fill(data, algorithm, len(data) - len(stand_in(algorithm)), also, before)


def fill_json(data: bytes, algorithm: str, also: Sequence[Buffer] = ()) -> bytes:
    """Replace the placeholder in an encoded JSON object by the object's digest; ``also`` are further covered bytes."""
    return _fill(data, algorithm, _offsets(data, stand_in(algorithm))[-1], also)


def _fill(data: bytes, algorithm: str, start: int, also: Sequence[Buffer], before: Sequence[Buffer] = ()) -> bytes:
    end = start + len(stand_in(algorithm))
    return data[:start] + _digest(algorithm, data, (start, end), also, before).encode() + data[end:]


def _offsets(data: bytes, text: str) -> list[int]:
    """Return the offsets in JSON at which ``text`` is the value of ``KEY``."""
    starts = [match.start(1) for match in _IN_JSON.finditer(data)]
    return [start for start in starts if data.startswith(text.encode() + b'"', start)]


def check_cbor(data: Buffer, declared: str, location: str, also: Sequence[Buffer] = ()) -> None:
    """Check the digest that a decoded CBOR map declares under ``KEY``, which must be the map's last entry.

    Raises ``IntegrityError`` ``manifest.digest``.
    """
    ending = cbor.dumps(KEY) + cbor.dumps(declared)
    if bytes(data[-len(ending) :]) != ending:
        raise _digest_error(f"expected {KEY} as the last entry, found it elsewhere", location)
    _check(data, declared, (len(data) - len(declared), len(data)), location, also)


def check_json(data: bytes, declared: str, location: str, also: Sequence[Buffer] = ()) -> None:
    """Check the digest that a decoded JSON object declares under ``KEY``; raise the errors of ``check_cbor``."""
    offsets = _offsets(data, declared)
    if not offsets:
        raise _digest_error(f"expected {KEY} in the form that Ingot writes, found {declared[:80]!r}", location)
    _check(data, declared, (offsets[-1], offsets[-1] + len(declared)), location, also)


def _check(data: Buffer, declared: str, span: tuple[int, int], location: str, also: Sequence[Buffer]) -> None:
    algorithm = checksums.algorithm_of(declared, RULE, location)
    if algorithm is None:
        raise _digest_error(f"expected {' or '.join(checksums.HASHERS)}, found {declared[:40]!r}", location)
    digest = _digest(algorithm, data, span, also)
    if declared != digest:  # another case of a digit is a changed byte too
        raise _digest_error(
            f"the manifest does not match its digest: expected {declared}, found {digest}; the file is damaged, or was "
            "changed by a program that did not update the digest",
            location,
        )


def _digest(
    algorithm: str, data: Buffer, span: tuple[int, int], also: Sequence[Buffer], before: Sequence[Buffer] = ()
) -> str:
    view = memoryview(data)
    running = checksums.hasher(algorithm)
    for part in before:
        running.update(part)
    running.update(view[: span[0]])
    running.update(stand_in(algorithm).encode())
    running.update(view[span[1] :])
    for part in also:
        running.update(part)
    return running.text()


def _digest_error(message: str, location: str) -> IntegrityError:
    return IntegrityError(RULE, message, where=location)
