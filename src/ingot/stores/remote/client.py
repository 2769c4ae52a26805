"""Clients that read ranges of one version of a remote file, and the client of buckets, which also lists and uploads.

obstore signs requests, and retries them with growing pauses after server errors and dropped connections. Code here must
check that the bytes belong to the requested range and to the version that was opened. Messages of obstore are never
shown, because they contain addresses and answers of servers.
"""

from __future__ import annotations

import builtins
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.parallel import check_cancelled
from ingot.errors import FormatError, IngotError, UsageError
from ingot.model.bytesource import Stamp
from ingot.stores.remote.failures import (
    SERVICES,
    changed,
    denied,
    failed,
    is_denied,
    missing,
    no_ranges,
    status_of,
    too_slow,
    wrong_length,
)
from ingot.stores.remote.pace import Pace, TooSlowError
from ingot.stores.remote.transfer import require_usable

EXTRA = "remote"
STALL = 30.0
"""Seconds without a byte after which a request is retried."""

TRIES = 4
"""Attempts of Ingot to request a range; obstore may retry each of them."""

RETRIES = 6
"""Retries of obstore for each request after a server error or a dropped connection."""

PART = 8 << 20
"""Minimum size of a part of an upload, in bytes. S3 accepts at most 10,000 parts, so larger files have larger parts."""

_PUTTING = 8
_WHOLE_REQUEST = timedelta(minutes=20)
_PAUSE = 0.1  # seconds before the first retry; doubled for each further retry
_LONGEST_PAUSE = 10.0
R = TypeVar("R")
_RETRIED_RULES = ("remote.failed", "remote.stalled", "remote.slow", "remote.length")


@dataclass(frozen=True, slots=True)
class Opened:
    """The first bytes of a stored object, and the stamp that identifies its version."""

    head: bytes
    stamp: Stamp


def options() -> dict[str, Any]:
    """Return the settings of all obstore clients: timeouts, retries and ``allow_http``.

    ``allow_http`` is set because endpoints in a local network may lack TLS.
    """
    client: dict[str, Any] = {
        "timeout": _WHOLE_REQUEST,
        "connect_timeout": timedelta(seconds=min(STALL, 10)),
        "read_timeout": timedelta(seconds=STALL),
        "user_agent": "ingot",
        "allow_http": True,
    }
    backoff = {"init_backoff": timedelta(seconds=_PAUSE), "max_backoff": timedelta(seconds=10), "base": 2}
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=4 * STALL), "backoff": backoff}
    return {"client_options": client, "retry_config": retry}


class RangeClient(ABC):
    """A thread-safe reader of ranges of a server's files, which are named by keys.

    Parameters
    ----------
    location : str
        The server's address in messages, without secrets.
    immutable : bool
        Whether the bytes of a key never change; if so, the ETag and time of answers are ignored.
    """

    errors: tuple[type[Exception], ...] = ()
    """Exceptions that a request may raise besides ``IngotError``; ``explain`` converts them."""

    def __init__(self, location: str, *, immutable: bool = False) -> None:
        self.location = location
        self.immutable = immutable

    def open(self, key: str, size: int) -> Opened:
        """Return a file's first ``size`` bytes, or all bytes of a smaller file, and its stamp.

        Raises ``UsageError`` ``store.missing``; ``ResourceError`` ``store.denied``, ``remote.failed``,
        ``remote.stalled``, ``remote.slow``, ``remote.redirect``; ``UnsupportedError`` ``remote.no-ranges``.
        """
        return self._with_retries(key, lambda: self._open(key, size))

    def fetch(self, key: str, start: int, out: memoryview, stamp: Stamp) -> None:
        """Fill ``out`` with bytes from ``start`` on, of the file version that ``stamp`` identifies.

        If a body ends early, the remaining bytes are requested again. Raises the errors of ``open``, and
        ``IntegrityError`` ``store.changed`` if the file has another version.
        """
        filled = [0]
        buffer = np.asarray(out)
        if out.nbytes:
            self._with_retries(key, lambda: self._fetch(key, start, buffer, stamp, filled))

    @abstractmethod
    def state(self, key: str) -> Stamp:
        """Return the current stamp of a file; raise the errors of ``open``."""

    @abstractmethod
    def explain(self, error: Exception, key: str) -> IngotError:
        """Return the ``IngotError`` for one of ``errors``; its message contains no secrets."""

    @abstractmethod
    def _open(self, key: str, size: int) -> Opened: ...

    @abstractmethod
    def _fetch(self, key: str, start: int, out: Any, stamp: Stamp, filled: list[int]) -> None:
        """Fill ``out`` from index ``filled[0]`` on; increase ``filled[0]`` as bytes arrive."""

    def _tries(self, error: Exception) -> int:
        """Return the maximum number of attempts for a request that fails with ``error``.

        Retries in obstore are part of one attempt.
        """
        return TRIES if isinstance(error, IngotError) and error.rule in _RETRIED_RULES else 1

    def _with_retries(self, key: str, request: Callable[[], R]) -> R:
        """Return the result of a request; retry it after errors that may be temporary."""
        require_usable(self._locate(key))
        for attempt in count(1):
            check_cancelled()
            try:
                return request()
            except IngotError as error:
                failure = error
                tries = self._tries(error)
            except TooSlowError:
                failure = too_slow(STALL, self._locate(key))
                tries = self._tries(failure)
            except self.errors as error:
                failure = self.explain(error, key)
                tries = max(self._tries(error), self._tries(failure))
            if attempt >= tries:
                raise failure from None
            time.sleep(min(_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
        raise AssertionError

    def _require_same(self, key: str, now: Stamp, stamp: Stamp) -> None:
        same = now.size == stamp.size if self.immutable else same_version(now, stamp)
        if not same:
            raise changed(self._locate(key))

    def _locate(self, key: str) -> str:
        return f"{self.location}/{key}" if key else self.location


class Client(RangeClient):
    """Reads, lists and writes the objects of one bucket.

    Parameters
    ----------
    store : obstore store
    location : str
        The bucket's address in messages, without secrets.
    """

    def __init__(self, store: Any, location: str) -> None:
        super().__init__(location)
        self._store = store
        self._api = require("obstore", EXTRA)
        self.errors = (self._api.exceptions.BaseError, OSError, ValueError)

    def state(self, key: str) -> Stamp:
        return self._with_retries(key, lambda: stamp_of(self._api.head(self._store, key)))

    def list(self, prefix: str) -> tuple[list[str], list[str]]:
        """Return the keys of objects, and of folders, directly below a prefix.

        Raises ``FormatError`` ``store.escape`` if no file can have the name of a key; and the errors of ``open``.
        """

        def read() -> tuple[list[str], list[str]]:
            listing = self._api.list_with_delimiter(self._store, prefix or None)
            return [item["path"] for item in listing["objects"]], list(listing["common_prefixes"])

        return self._with_retries(prefix, read)

    def stamps(self, prefix: str) -> dict[str, Stamp]:
        """Return the stamps of all objects below a prefix, at any depth, by key."""

        def read() -> dict[str, Stamp]:
            stamps = {}
            for page in self._api.list(self._store, f"{prefix}/" if prefix else None):
                check_cancelled()
                stamps.update({str(item["path"]): stamp_of(item) for item in page})
            return stamps

        return self._with_retries(prefix, read)

    def put_bytes(self, key: str, data: bytes) -> None:
        """Upload ``data`` as the object ``key`` by one request."""
        self._with_retries(key, lambda: self._api.put(self._store, key, data))

    def put(self, key: str, path: Path) -> None:
        """Upload a file, in parts if it is large; the object appears after the last part."""
        self._with_retries(
            key, lambda: self._api.put(self._store, key, path, chunk_size=_part(path), max_concurrency=_PUTTING)
        )

    def copy(self, key: str, to: str) -> None:
        """Copy an object to another key within the bucket, without a download; S3 allows up to 5 GiB."""
        self._with_retries(key, lambda: self._api.copy(self._store, key, to))

    def delete(self, key: str) -> None:
        """Remove an object; ignore a missing one."""
        try:
            self._with_retries(key, lambda: self._api.delete(self._store, key))
        except UsageError as error:
            if error.rule != "store.missing":
                raise

    def _open(self, key: str, size: int) -> Opened:
        try:
            answer = self._api.get(self._store, key, options={"range": (0, size)})
            head = bytearray()
            stamp = stamp_of(answer.meta)
            for chunk in self._chunks(answer):
                head += chunk
        except self._api.exceptions.BaseError as error:
            if status_of(str(error)) != 416:
                raise
            head = bytearray()  # an empty object has no first byte
            stamp = stamp_of(self._api.head(self._store, key))
        if len(head) != min(size, stamp.size):
            raise wrong_length(min(size, stamp.size), self._locate(key))
        return Opened(bytes(head), stamp)

    def _fetch(self, key: str, start: int, out: Any, stamp: Stamp, filled: builtins.list[int]) -> None:
        request: dict[str, Any] = {"range": (start + filled[0], start + out.nbytes)}
        if stamp.is_strong:
            request["if_match"] = stamp.etag
        answer = self._api.get(self._store, key, options=request)
        self._require_same(key, stamp_of(answer.meta), stamp)
        for chunk in self._chunks(answer):
            if chunk.nbytes > out.nbytes - filled[0]:
                raise wrong_length(out.nbytes, self._locate(key))
            np.copyto(out[filled[0] : filled[0] + chunk.nbytes], np.asarray(chunk))  # without the GIL
            filled[0] += chunk.nbytes
        if filled[0] < out.nbytes:
            raise wrong_length(out.nbytes, self._locate(key))

    def _chunks(self, answer: Any) -> Iterator[memoryview]:
        """Yield the bytes of an answer as they arrive; raise ``TooSlowError`` if they are too slow."""
        pace = Pace(STALL)
        for chunk in answer.stream(min_chunk_size=1):
            check_cancelled()
            data = memoryview(chunk)
            pace.count(data.nbytes)
            yield data

    def explain(self, error: Exception, key: str) -> IngotError:
        exceptions = self._api.exceptions
        location = self._locate(key)
        text = str(error)
        # obstore has exceptions for some statuses, but not for those of listings
        status = 0 if SERVICES.search(text) else status_of(text)
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError) or status in (404, 410):
            return missing(location)
        if isinstance(error, exceptions.PreconditionError):
            return changed(location)
        if isinstance(error, exceptions.InvalidPathError):
            return FormatError("store.escape", "an object here has no valid file name; rename it", where=location)
        # obstore has no exception for an object store that ignores a range.
        if isinstance(error, exceptions.NotSupportedError) or "non-partial response" in text:
            return no_ranges(location)
        refused = status in (401, 403, 407) or (status == 400 and is_denied(text))
        if refused or isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            return denied(text, location)
        return failed(error, text, location, STALL)


def _part(path: Path) -> int:
    return max(PART, -(-path.stat().st_size // 9000))


def same_version(now: Stamp, stamp: Stamp) -> bool:
    """Return whether the stamps ``now`` and ``stamp`` belong to one version of a file.

    Equal strong tags prove it. Equal weak tags do not (RFC 9110, 8.8.1), so the times must be equal too.
    """
    same = now.size == stamp.size and now.etag == stamp.etag
    return same and (now.is_strong or now.mtime_ns == stamp.mtime_ns)


def stamp_of(meta: Mapping[str, Any]) -> Stamp:
    """Return the stamp of a file from obstore's metadata."""
    time_stamp = meta.get("last_modified")
    modified = 0
    if isinstance(time_stamp, datetime):
        modified = max(0, int(time_stamp.timestamp())) * 10**9
    return Stamp(int(meta["size"]), modified, etag=str(meta.get("e_tag") or ""))
