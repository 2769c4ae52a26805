"""Ranges of one version of a file on another machine; and buckets, by obstore: listings and uploads too.

obstore signs requests, begins again after errors of the server and dropped connections, and waits longer each time. It
leaves to its caller that the bytes are those of the requested range and of the version that was opened first. Its
messages have addresses and answers in them, and are never repeated.
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
from ingot.core.runtime.parallel import go_on
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
_LONGEST_PAUSE = 10.0
R = TypeVar("R")
_AGAIN = ("remote.failed", "remote.stalled", "remote.slow", "remote.length")


@dataclass(frozen=True, slots=True)
class Opened:
    """The first bytes of an object, and the state that it is in."""

    head: bytes
    stamp: Stamp


def options() -> dict[str, Any]:
    """Return the settings of every obstore client; ``allow_http`` is for endpoints within a local network."""
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
    """Ranges of files on one server, by their keys. Thread-safe.

    Parameters
    ----------
    location : str
        The server in messages: an address without secrets.
    immutable : bool
        Whether a key always leads to the same bytes, whatever tag and time an answer has.
    """

    errors: tuple[type[Exception], ...] = ()
    """What a request may raise besides ``IngotError``; ``explain`` turns it into one."""

    def __init__(self, location: str, *, immutable: bool = False) -> None:
        self.location = location
        self.immutable = immutable

    def open(self, key: str, size: int) -> Opened:
        """Return a file's first ``size`` bytes or all that it has, and its state.

        Raises ``UsageError`` ``store.missing``; ``ResourceError`` ``store.denied``, ``remote.failed``,
        ``remote.stalled``, ``remote.slow``, ``remote.redirect``; ``UnsupportedError`` ``remote.no-ranges``.
        """
        return self._again(key, lambda: self._open(key, size))

    def fetch(self, key: str, start: int, out: memoryview, stamp: Stamp) -> None:
        """Fill ``out`` from byte ``start`` of a file that is in the state ``stamp``.

        A body that ends early is requested again from where it ended. Errors as ``open``; ``IntegrityError``
        ``store.changed`` for another state.
        """
        done, buffer = [0], np.asarray(out)
        if out.nbytes:
            self._again(key, lambda: self._fetch(key, start, buffer, stamp, done))

    @abstractmethod
    def state(self, key: str) -> Stamp:
        """Return the state that a file is in now; errors as ``open``."""

    @abstractmethod
    def explain(self, error: Exception, key: str) -> IngotError:
        """Return the error to raise for one of ``errors``, without secrets."""

    @abstractmethod
    def _open(self, key: str, size: int) -> Opened: ...

    @abstractmethod
    def _fetch(self, key: str, start: int, out: Any, stamp: Stamp, done: list[int]) -> None:
        """Fill ``out`` from ``done[0]`` on, and count what arrives there."""

    def _tries(self, error: Exception) -> int:
        """Return how often a request is made that ends in this error, retries by the library below not counted."""
        return TRIES if isinstance(error, IngotError) and error.rule in _AGAIN else 1

    def _again(self, key: str, request: Callable[[], R]) -> R:
        """Make a request, again where that may help."""
        require_usable(self._where(key))
        for attempt in count(1):
            go_on()
            try:
                return request()
            except IngotError as error:
                failure, tries = error, self._tries(error)
            except TooSlowError:
                failure = too_slow(STALL, self._where(key))
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
            raise changed(self._where(key))

    def _where(self, key: str) -> str:
        return f"{self.location}/{key}" if key else self.location


class Client(RangeClient):
    """The objects of one bucket.

    Parameters
    ----------
    store : obstore store
    location : str
        As of ``RangeClient``.
    """

    def __init__(self, store: Any, location: str) -> None:
        super().__init__(location)
        self._store = store
        self._api = require("obstore", EXTRA)
        self.errors = (self._api.exceptions.BaseError, OSError, ValueError)

    def state(self, key: str) -> Stamp:
        return self._again(key, lambda: stamp_of(self._api.head(self._store, key)))

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
            head, stamp = bytearray(), stamp_of(answer.meta)
            for chunk in self._chunks(answer):
                head += chunk
        except self._api.exceptions.BaseError as error:
            if status_of(str(error)) != 416:
                raise
            head, stamp = bytearray(), stamp_of(self._api.head(self._store, key))  # nothing in it, no range of that
        if len(head) != min(size, stamp.size):
            raise wrong_length(min(size, stamp.size), self._where(key))
        return Opened(bytes(head), stamp)

    def _fetch(self, key: str, start: int, out: Any, stamp: Stamp, done: builtins.list[int]) -> None:
        request: dict[str, Any] = {"range": (start + done[0], start + out.nbytes)}
        if stamp.is_strong:
            request["if_match"] = stamp.etag
        answer = self._api.get(self._store, key, options=request)
        self._require_same(key, stamp_of(answer.meta), stamp)
        for chunk in self._chunks(answer):
            if chunk.nbytes > out.nbytes - done[0]:
                raise wrong_length(out.nbytes, self._where(key))
            np.copyto(out[done[0] : done[0] + chunk.nbytes], np.asarray(chunk))  # without the GIL
            done[0] += chunk.nbytes
        if done[0] < out.nbytes:
            raise wrong_length(out.nbytes, self._where(key))

    def _chunks(self, answer: Any) -> Iterator[memoryview]:
        """Yield the bytes of an answer as they arrive; raise ``TooSlowError``."""
        pace = Pace(STALL)
        for chunk in answer.stream(min_chunk_size=1):
            go_on()
            data = memoryview(chunk)
            pace.count(data.nbytes)
            yield data

    def explain(self, error: Exception, key: str) -> IngotError:
        exceptions = self._api.exceptions
        location = self._where(key)
        text = str(error)
        # obstore has kinds of its own for some statuses, but not for those of listings.
        status = 0 if SERVICES.search(text) else status_of(text)
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError) or status in (404, 410):
            return missing(location)
        if isinstance(error, exceptions.PreconditionError):
            return changed(location)
        if isinstance(error, exceptions.InvalidPathError):
            return FormatError("store.escape", "expected names that a file can have, found others", where=location)
        # Of object stores it is an error of no kind of its own.
        if isinstance(error, exceptions.NotSupportedError) or "non-partial response" in text:
            return no_ranges(location)
        refused = status in (401, 403, 407) or (status == 400 and is_denied(text))
        if refused or isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
            return denied(text, location)
        return failed(error, text, location, STALL)


def _part(path: Path) -> int:
    return max(PART, -(-path.stat().st_size // 9000))


def same_version(now: Stamp, stamp: Stamp) -> bool:
    """Whether two answers are of one version of a file, as far as their headers say.

    Equal strong tags prove it. Equal weak tags do not (RFC 9110, 8.8.1): then the times must be equal too.
    """
    same = now.size == stamp.size and now.etag == stamp.etag
    return same and (now.is_strong or now.mtime_ns == stamp.mtime_ns)


def stamp_of(meta: Mapping[str, Any]) -> Stamp:
    """Return the state that an answer states."""
    when = meta.get("last_modified")
    modified = int(when.timestamp()) * 10**9 if isinstance(when, datetime) and when.timestamp() > 0 else 0
    return Stamp(int(meta["size"]), modified, etag=str(meta.get("e_tag") or ""))
