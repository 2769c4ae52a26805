"""Requests, by obstore: ranges of one version of an object, listings, uploads; and what went wrong in our words.

obstore signs requests, follows redirects (never to another scheme, and without credentials to another host), begins
again after errors of the server and dropped connections, and waits longer each time. What it leaves to its caller is
here: that the bytes are those that were asked for, of the version that was opened first. Its own messages have
addresses and answers in them, and never get into ours.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from http.client import responses
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError

import numpy as np

from ingot.core.extras import require
from ingot.core.parallel import go_on
from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError, UnsupportedError, UsageError
from ingot.model.bytesource import Stamp
from ingot.stores.remote.page import read_page
from ingot.stores.remote.transfer import require_usable

EXTRA = "remote"
STALL = 30.0
"""Seconds without a byte after which a request is made again."""

TRIES = 4
"""How often a range is asked for before it is given up, beside what obstore repeats by itself."""

RETRIES = 6
"""How often obstore repeats a request that the server refused with a status of its own fault, or dropped."""

PART = 8 << 20
"""Bytes of each part of an upload; S3 takes 10,000 of them, so larger files get larger ones."""

_PUTTING = 8
_WHOLE_REQUEST = timedelta(minutes=20)
_PAUSE = 0.1  # seconds before a range is asked for again; twice as long each time
_STATUS = re.compile(r"status code: (\d{3})(?: ([A-Za-z -]+))?")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STREAMED = 1 << 20
R = TypeVar("R")
_AGAIN = ("remote.failed", "remote.stalled", "remote.length")


@dataclass(frozen=True, slots=True)
class Opened:
    """The first bytes of an object, and the state that it is in."""

    head: bytes
    stamp: Stamp


def options(headers: Mapping[str, str] | None = None, *, plain: bool = False) -> dict[str, Any]:
    """Return what every client of obstore is made with; ``plain`` allows http."""
    client: dict[str, Any] = {
        "timeout": _WHOLE_REQUEST,
        "connect_timeout": timedelta(seconds=min(STALL, 10)),
        "read_timeout": timedelta(seconds=STALL),
        "user_agent": "ingot",
    }
    if headers:
        client["default_headers"] = dict(headers)
    if plain:
        client["allow_http"] = True
    backoff = {"init_backoff": timedelta(seconds=_PAUSE), "max_backoff": timedelta(seconds=10), "base": 2}
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=4 * STALL), "backoff": backoff}
    return {"client_options": client, "retry_config": retry}


class Client:
    """The objects of one bucket, or below one folder of a server, by their keys. Thread-safe.

    Parameters
    ----------
    store : obstore store
    location : str
        What messages call it: an address without secrets.
    immutable : bool
        Whether a key always leads to the same bytes, whatever tag and time an answer has.
    """

    def __init__(self, store: Any, location: str, *, immutable: bool = False) -> None:
        self._store, self.location, self.immutable = store, location, immutable
        self._api = require("obstore", EXTRA)

    def open(self, key: str, size: int) -> Opened:
        """Return an object's first ``size`` bytes or all that it has, and its state.

        Raises ``UsageError`` ``store.missing``; ``ResourceError`` ``store.denied``, ``remote.failed``,
        ``remote.stalled``, ``remote.redirect``; ``UnsupportedError`` ``remote.no-ranges``.
        """
        return self._again(key, lambda: self._open(key, size))

    def fetch(self, key: str, start: int, out: memoryview, stamp: Stamp) -> None:
        """Fill ``out`` from byte ``start`` of an object that is in the state ``stamp``.

        A body that ends early is asked for from where it ended. Errors as ``open``; ``IntegrityError``
        ``store.changed`` for another state.
        """
        done, into = 0, np.asarray(out)

        def read() -> None:
            nonlocal done
            wanted: dict[str, Any] = {"range": (start + done, start + out.nbytes)}
            if (
                stamp.etag and not self.immutable and not stamp.etag.startswith("W/")
            ):  # weak ones match nothing (RFC 9110, 13.1.1)
                wanted["if_match"] = stamp.etag
            answer = self._api.get(self._store, key, options=wanted)
            self._require_same(key, answer.meta, stamp)
            for piece in answer.stream(min_chunk_size=_STREAMED):
                go_on()
                data = memoryview(piece)
                if data.nbytes > out.nbytes - done:
                    raise self._wrong_length(key, out.nbytes)
                np.copyto(into[done : done + data.nbytes], np.asarray(data))  # without the GIL
                done += data.nbytes
            if done < out.nbytes:
                raise self._wrong_length(key, out.nbytes)

        if out.nbytes:
            self._again(key, read)

    def state(self, key: str) -> Stamp:
        """Return the state that an object is in now; errors as ``open``."""
        return self._again(key, lambda: stamp_of(self._api.head(self._store, key)))

    def page(self, key: str, url: str, headers: Mapping[str, str], most: int) -> tuple[str, bytes]:
        """Return the page at ``url``, which ``key`` leads to: its media type, and its first ``most`` bytes; errors as
        ``open``."""
        return self._again(key, lambda: read_page(url, headers, most, STALL))

    def list(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the keys of objects, and of folders, directly below a prefix.

        Raises ``FormatError`` ``store.escape`` where a key is none that a file can have; else as ``open``.
        """

        def read() -> tuple[list[str], list[str]]:
            found = self._api.list_with_delimiter(self._store, prefix or None)
            return [item["path"] for item in found["objects"]], list(found["common_prefixes"])

        return self._again(prefix, read)

    def stamps(self, prefix: str) -> dict[str, Stamp]:
        """Return the keys of objects below a prefix, at any depth, and the states that they are in."""

        def read() -> dict[str, Stamp]:
            found = {}
            for page in self._api.list(self._store, f"{prefix}/" if prefix else None):
                go_on()
                found.update({str(item["path"]): stamp_of(item) for item in page})
            return found

        return self._again(prefix, read)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Put a small object under a key."""
        self._again(key, lambda: self._api.put(self._store, key, data))

    def put(self, key: str, path: Path) -> None:
        """Put a file under a key, in parts where it is large; nothing is listed before all of it is there."""
        self._again(
            key, lambda: self._api.put(self._store, key, path, chunk_size=_part(path), max_concurrency=_PUTTING)
        )

    def copy(self, key: str, to: str) -> None:
        """Put an object's bytes under another key too: the store does it. S3 takes up to 5 GiB."""
        self._again(key, lambda: self._api.copy(self._store, key, to))

    def delete(self, key: str) -> None:
        """Remove an object; nothing where there is none."""
        try:
            self._again(key, lambda: self._api.delete(self._store, key))
        except UsageError as error:
            if error.rule != "store.missing":
                raise

    def _open(self, key: str, size: int) -> Opened:
        try:
            answer = self._api.get(self._store, key, options={"range": (0, size)})
            head, stamp = bytes(answer.bytes()), stamp_of(answer.meta)
        except self._api.exceptions.BaseError as error:
            if _status(str(error)) != 416:
                raise
            head, stamp = b"", stamp_of(self._api.head(self._store, key))  # nothing in it, no range of that
        if len(head) != min(size, stamp.size):
            raise self._wrong_length(key, min(size, stamp.size))
        return Opened(head, stamp)

    def _again(self, key: str, request: Callable[[], R]) -> R:
        """Make a request, again where that may help."""
        require_usable(self._where(key))
        errors = (self._api.exceptions.BaseError, OSError, ValueError)
        for attempt in range(1, TRIES + 1):
            go_on()
            try:
                return request()
            except IngotError as error:
                failure = error
            except errors as error:
                failure = self.explain(error, key)
            if attempt == TRIES or failure.rule not in _AGAIN:
                raise failure from None
            time.sleep(_PAUSE * 2 ** (attempt - 1))
        raise AssertionError

    def _require_same(self, key: str, meta: Mapping[str, Any], stamp: Stamp) -> None:
        now = stamp_of(meta)
        tags = now.etag and stamp.etag
        same = (
            now.etag == stamp.etag if tags else now.mtime_ns == stamp.mtime_ns or not (now.mtime_ns and stamp.mtime_ns)
        )
        if now.size != stamp.size or not (same or self.immutable):
            raise changed(self._where(key))

    def _wrong_length(self, key: str, expected: int) -> IntegrityError:
        return IntegrityError(
            "remote.length",
            f"expected {expected} bytes, found another number of them in the server's answer",
            where=self._where(key),
        )

    def _where(self, key: str) -> str:
        return f"{self.location}/{key}" if key else self.location

    def explain(self, error: Exception, key: str) -> IngotError:
        """Return what obstore raised in words that tell no secret."""
        kinds, where, text = self._api.exceptions, self._where(key), str(error)
        if isinstance(error, HTTPError):
            text = f"status code: {error.code} {responses.get(error.code, '')}"
        # obstore has kinds of its own for some statuses, but not for those of listings.
        status = 0 if _SERVICES.search(text) else _status(text)
        if isinstance(error, FileNotFoundError | kinds.NotFoundError) or status in (404, 410):
            return UsageError("expected an existing file, found none", rule="store.missing", where=where)
        if isinstance(error, kinds.PreconditionError):
            return changed(where)
        if isinstance(error, kinds.InvalidPathError):
            return FormatError("store.escape", "expected names that a file can have, found others", where=where)
        # Of object stores it is an error of no kind of its own.
        if isinstance(error, kinds.NotSupportedError) or "non-partial response" in text:
            return UnsupportedError(
                "expected the range that was asked for, found a server that sends whole files or a page of its own: "
                "download the file first",
                rule="remote.no-ranges",
                where=where,
            )
        refused = status in (401, 403, 407) or (status == 400 and _is_denied(text))
        if refused or isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            return ResourceError(_denied(text), rule="store.denied", where=where)
        return _failed(error, text, where)


def changed(where: str) -> IntegrityError:
    """Return the refusal of a file that is another one by now."""
    return IntegrityError(
        "store.changed",
        "expected the file as it was when it was opened first, found another version of it; open it again",
        where=where,
    )


def _part(path: Path) -> int:
    return max(PART, -(-path.stat().st_size // 9000))


def stamp_of(meta: Mapping[str, Any]) -> Stamp:
    """Return the state that an answer states."""
    when = meta.get("last_modified")
    modified = int(when.timestamp()) * 10**9 if isinstance(when, datetime) and when.timestamp() > 0 else 0
    return Stamp(int(meta["size"]), modified, etag=str(meta.get("e_tag") or ""))


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _is_denied(text: str) -> bool:
    """Whether an answer with status 400 is about credentials: S3's to expired ones are. One to HEAD has no code."""
    code = _CODE.search(text)
    return code[1] in _DENIED if code else "performing HEAD" in text


def _denied(text: str) -> str:
    code = _CODE.search(text)
    said = f" ({code[1]})" if code else ""
    return _DENIED.get(code[1] if code else "", _NO_ACCESS).format(said=said)


_NO_ACCESS = "the server gives no access{said}: check the credentials, and whether they or a signed address expired"
_EXPIRED = "the credentials have expired{said}: renew them"
_SKEWED = "the server's clock and this machine's differ too much{said}: set the clock"
# Codes of S3's errors, which come with status 400 or 403:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_DENIED = {
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _NO_ACCESS,
    "RequestTimeTooSkewed": _SKEWED,
    "AuthorizationHeaderMalformed": "the server does not take the signature{said}: check the region (AWS_REGION)",
}
# Where machines and containers of a cloud ask for their credentials: obstore does, where the environment has none.
_SERVICES = re.compile(r"//169\.254\.\d+\.\d+/|//metadata\.google\.internal/")
_NO_CREDENTIALS = "no credentials were found, or the service that gives them did not answer: see spec/remote.md"
# What obstore's message has in it, in this order: rule, message.
_FAILURES: tuple[tuple[str, str, str], ...] = (
    (_SERVICES.pattern, "store.denied", _NO_CREDENTIALS),
    (
        r"status code: 3\d\d|redirect",
        "remote.redirect",
        (
            "expected the file, found a redirect that leads nowhere: to another kind of address, in a circle, or, of a "
            "bucket, to another region (AWS_REGION)"
        ),
    ),
    (r"status code: ", "remote.failed", "the server answered with {status}; try again later"),
    (r"timedout|timed out", "remote.stalled", "the server sent no byte for {stall:g} seconds"),
    (
        r"certificate",
        "remote.certificate",
        (
            "the server's certificate is not one that this machine trusts; check the address and the clock, or name a "
            "file with the certificate of its authority in SSL_CERT_FILE"
        ),
    ),
    (r"credential|token", "store.denied", _NO_CREDENTIALS),
    (
        "",
        "remote.failed",
        "the server cannot be reached, or broke the connection; check the address and the network",
    ),
)


def _failed(error: Exception, text: str, where: str) -> IngotError:
    low = "timed out" if isinstance(error, TimeoutError) else text.lower()
    if "unexpectedrange" in low:
        return IntegrityError("remote.length", "expected the range that was asked for, found another", where=where)
    found = _STATUS.search(text)
    status = f"status {found[1]} {(found[2] or '').strip()}".strip() if found else ""
    rule, message = next(rest for sign, *rest in _FAILURES if re.search(sign, low))
    return ResourceError(message.format(status=status, stall=STALL), rule=rule, where=where)
