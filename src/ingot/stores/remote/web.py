"""The client of web servers: it reads ranges of one version of a file, and pages that list folders."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException, responses
from typing import Any
from urllib.parse import quote

from ingot.errors import IngotError
from ingot.model.bytesource import Stamp
from ingot.stores.remote import client as settings
from ingot.stores.remote.client import Opened, RangeClient
from ingot.stores.remote.failures import (
    changed,
    denied,
    failed,
    is_denied,
    missing,
    no_ranges,
    wrong_length,
)
from ingot.stores.remote.http import PRINTABLE, Answer, Connections, RedirectError

_STREAMED = 1 << 18
ERROR_BODY = 1 << 12
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)
_RETRIED = (408, 425, 429)


class StatusError(Exception):
    """An error status of a server; ``body`` is the beginning of its answer."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class WebClient(RangeClient):
    """A client for the files below one address of a web server.

    Parameters
    ----------
    base : str
        The address, without secrets and without a final slash.
    headers : mapping
        Headers for this server, not for servers to which it redirects.
    query : str
        The secret part of a signed address; sent with each request.
    immutable : bool
        Whether the bytes of a key never change.
    """

    errors = (StatusError, RedirectError, HTTPException, OSError, ValueError)

    def __init__(self, base: str, headers: Mapping[str, str], *, query: str = "", immutable: bool = False) -> None:
        super().__init__(base, immutable=immutable)
        self._query = query
        self._headers = dict(headers)
        self._connections = Connections()

    def state(self, key: str) -> Stamp:
        """Implement ``RangeClient.state`` by requesting one byte, because an address signed for GET refuses HEAD."""
        return self._with_retries(key, lambda: self._open(key, 1).stamp)

    def page(self, key: str, limit: int) -> tuple[str, bytes]:
        """Return the media type and the first ``limit`` bytes of a folder's page; raise the errors of ``open``."""

        def read() -> tuple[str, bytes]:
            with self._request(f"{key}/" if key else "", {}) as answer:
                if answer.status != 200:
                    raise StatusError(answer.status)
                media_type = answer.headers.get("Content-Type") or ""
                return media_type, answer.read(limit)

        return self._with_retries(key, read)

    def _open(self, key: str, size: int) -> Opened:
        with self._request(key, _range(0, size)) as answer:
            if answer.status == 416 and (answer.headers.get("Content-Range") or "").strip() == "bytes */0":
                return Opened(b"", _stamp(answer, 0))  # an empty file has no first byte
            stamp = self._answered(key, answer, 0, size)
            head = bytearray(min(size, stamp.size))
            if _fill(answer, memoryview(head)) < len(head):
                raise wrong_length(len(head), self._locate(key))
            return Opened(bytes(head), stamp)

    def _fetch(self, key: str, start: int, out: Any, stamp: Stamp, filled: list[int]) -> None:
        headers = _range(start + filled[0], start + out.nbytes)
        if stamp.is_strong and not self.immutable:
            headers["If-Match"] = stamp.etag
        with self._request(key, headers) as answer:
            if answer.status in (412, 416):
                raise changed(self._locate(key))
            self._require_same(key, self._answered(key, answer, start + filled[0], start + out.nbytes), stamp)
            buffer = memoryview(out)
            while filled[0] < out.nbytes:
                count = answer.readinto(buffer[filled[0] : filled[0] + _STREAMED])
                filled[0] += count
                if not count:
                    raise wrong_length(out.nbytes, self._locate(key))

    def _request(self, key: str, headers: Mapping[str, str]) -> Answer:
        url = f"{self.location}/{quote(key)}" + (f"?{quote(self._query, safe=PRINTABLE)}" if self._query else "")
        return self._connections.request("GET", url, headers, self._headers, settings.STALL)

    def _answered(self, key: str, answer: Answer, start: int, stop: int) -> Stamp:
        """Return a file's stamp from an answer's headers; raise an error if the answer lacks the requested range."""
        if answer.status != 206:
            if answer.status == 200:
                raise no_ranges(self._locate(key))
            body = b""
            with suppress(OSError, HTTPException):
                body = answer.read(ERROR_BODY)
            raise StatusError(answer.status, body)
        match = _RANGE.fullmatch((answer.headers.get("Content-Range") or "").strip())
        if match is None or answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise no_ranges(self._locate(key))
        first, last, size = map(int, match.groups())
        if first != start or last + 1 != min(stop, size):
            raise wrong_length(stop - start, self._locate(key))
        return _stamp(answer, size)

    def _tries(self, error: Exception) -> int:
        if isinstance(error, StatusError):
            retried = error.status >= 500 or error.status in _RETRIED
            return settings.TRIES + settings.RETRIES if retried else 1
        return super()._tries(error)

    def explain(self, error: Exception, key: str) -> IngotError:
        location = self._locate(key)
        if isinstance(error, RedirectError):
            return failed(error, "redirect", location, settings.STALL)
        if isinstance(error, ssl.SSLCertVerificationError):
            return failed(error, "certificate", location, settings.STALL)
        if not isinstance(error, StatusError):
            return failed(error, "", location, settings.STALL)
        text = error.body.decode("utf-8", "replace")
        if error.status in (404, 410):
            return missing(location)
        if error.status in (401, 403, 407) or (error.status == 400 and is_denied(text)):
            return denied(text, location)
        return failed(error, f"status code: {error.status} {responses.get(error.status, '')}", location, settings.STALL)


def _range(start: int, stop: int) -> dict[str, str]:
    return {"Range": f"bytes={start}-{stop - 1}"}


def _fill(answer: Answer, out: memoryview) -> int:
    filled = 0
    while filled < out.nbytes:
        count = answer.readinto(out[filled:])
        if not count:
            break
        filled += count
    return filled


def _stamp(answer: Answer, size: int) -> Stamp:
    """Return the stamp of a file from the headers of an answer."""
    modified = 0
    with suppress(TypeError, ValueError, OverflowError):
        modified = max(0, int(parsedate_to_datetime(answer.headers.get("Last-Modified") or "").timestamp())) * 10**9
    return Stamp(size, modified, etag=(answer.headers.get("ETag") or "").strip())
