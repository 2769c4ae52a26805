"""An HTTP client: it reuses connections, follows redirects, uses proxies, and enforces a minimum rate.

The standard library is used instead of obstore, because obstore sends the referring address to the host of a redirect,
and a signed address contains a secret. This client never sends ``Referer``.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import threading
import weakref
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from ingot.core.runtime.parallel import check_cancelled
from ingot.stores.remote.pace import Pace

MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_MAX_IDLE = 16
_DRAINED = 1 << 16
_FOLLOWED = ("GET", "HEAD")
Body = Callable[[], Iterable[bytes | memoryview]]
"""Returns the body of a request, in chunks; it is called again if the request is repeated."""
PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
"""Characters that are left unchanged in addresses of users and servers; all others are percent-encoded."""


class RedirectError(Exception):
    """A redirect that is circular, has no address, or leads to an address that is not http: or https:."""


class Origin(NamedTuple):
    """The server of an address."""

    scheme: str
    host: str
    port: int


class _PacedReader(io.RawIOBase):
    """A socket's reader that counts arriving bytes, including headers."""

    def __init__(self, raw: Any, pace: Pace) -> None:
        self._raw = raw
        self._pace = pace

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int | None:
        check_cancelled()
        count: int | None = self._raw.readinto(out)
        self._pace.count(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _PacedResponse(HTTPResponse):
    def __init__(self, pace: Pace, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        response: Any = self
        response.fp = io.BufferedReader(_PacedReader(response.fp.detach(), pace))


class Answer:
    """A response whose body the caller reads; as a context manager it releases the connection at the end.

    ``origin`` is the server that sent it, after redirects.
    """

    def __init__(self, connections: Connections, key: Origin, connection: HTTPConnection, response: Any) -> None:
        self._connections = connections
        self.origin = key
        self._connection = connection
        self._response = response
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers

    def readinto(self, out: memoryview) -> int:
        """Fill ``out`` and return its length; return a smaller number at the end of the body."""
        count: int = self._response.readinto(out)
        return count

    def read(self, limit: int) -> bytes:
        """Return the first ``limit`` bytes of the body, or all bytes of a shorter one."""
        data: bytes = self._response.read(limit)
        return data

    def close(self) -> None:
        """Keep the connection for a later request if the body was read to its end; otherwise close it."""
        if self._response.isclosed() and not self._response.will_close:
            self._connections.keep(self.origin, self._connection)
        else:
            self._connection.close()
        self._response.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Connections:
    """A thread-safe pool of connections to web servers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Origin, list[HTTPConnection]] = {}
        weakref.finalize(self, _close_all, self._idle)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        secret: Mapping[str, str],
        timeout: float,
        body: Body | None = None,
    ) -> Answer:
        """Send a request, follow the redirects of GET and HEAD, and return the answer, with any status.

        Parameters
        ----------
        headers : mapping
            Headers for all servers, also after redirects.
        secret : mapping
            Headers that are sent until a redirect leads to another server.
        timeout : float
            The longest time without a byte, in seconds.
        body : callable, optional
            Returns the body in chunks; ``headers`` then contain ``Content-Length``.

        Raises
        ------
        RedirectError, TooSlowError, OSError, http.client.HTTPException
            There was no answer. A silent server raises ``TimeoutError``, which is an ``OSError``.
        ValueError
            The host or port cannot exist.
        """
        first = origin_of(url)
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._send(method, url, {**headers, **secret}, timeout, body)
            if answer.status not in _REDIRECTS or method not in _FOLLOWED:
                return answer
            location = answer.headers.get("Location")
            with answer, contextlib.suppress(HTTPException):
                answer.read(_DRAINED)
            url = _redirected(url, location)
            if origin_of(url) != first:
                secret = {}
        raise RedirectError

    def keep(self, key: Origin, connection: HTTPConnection) -> None:
        """Return a connection to the pool; its last answer must have been read to the end."""
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if len(idle) < _MAX_IDLE:
                idle.append(connection)
                return
        connection.close()

    def _send(self, method: str, url: str, headers: Mapping[str, str], timeout: float, body: Body | None) -> Answer:
        parts = urlsplit(url)
        key = origin_of(url)
        proxy = _proxy_of(parts)
        pace = Pace(timeout)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        sent = {"User-Agent": "ingot", "Accept": "*/*", "Accept-Encoding": "identity", **headers}
        if proxy is not None and key.scheme == "http":
            target = f"http://{parts.netloc}{target}"
            sent.update(_proxy_headers(proxy))
        with self._lock:
            idle = self._idle.get(key)
            connection = idle.pop() if idle else None
        if connection is not None:
            try:
                return self._exchange(connection, key, pace, method, target, sent, body)
            except (TimeoutError, ssl.SSLCertVerificationError):
                raise
            except (OSError, HTTPException):
                pass  # the server closed the idle connection: retry with a new one
        return self._exchange(_connection(key, proxy, timeout), key, pace, method, target, sent, body)

    def _exchange(
        self,
        connection: HTTPConnection,
        key: Origin,
        pace: Pace,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None,
    ) -> Answer:
        settable: Any = connection
        settable.response_class = partial(_PacedResponse, pace)
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(pace.window)
            connection.request(method, target, None if body is None else body(), dict(headers))
            return Answer(self, key, connection, connection.getresponse())
        except BaseException:
            connection.close()
            raise


def origin_of(url: str) -> Origin:
    """Return the server of an http: or https: address; raise ``ValueError`` if it cannot exist."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(url)
    return Origin(parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme])


def _redirected(url: str, location: str | None) -> str:
    """Return the address to which a redirect leads, without user name and password."""
    if not location:
        raise RedirectError
    try:
        target = urljoin(url, quote(location.strip().encode("latin-1"), safe=PRINTABLE))
        parts = urlsplit(target)
        if parts.scheme not in _PORTS:
            raise RedirectError
        origin_of(target)
    except ValueError as error:
        raise RedirectError from error
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()


def _proxy_of(parts: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for an address."""
    proxies = getproxies()
    text = proxies.get(parts.scheme) or proxies.get("all")
    if not text or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urlsplit(text if "://" in text else f"http://{text}")
    if proxy.scheme not in _PORTS or not proxy.hostname:
        raise OSError(f"unsupported proxy scheme {proxy.scheme}")
    return proxy


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    user = proxy.netloc.rpartition("@")[0]
    return {"Proxy-Authorization": f"Basic {b64encode(unquote(user).encode()).decode()}"} if user else {}


def _connection(key: Origin, proxy: SplitResult | None, timeout: float) -> HTTPConnection:
    host, port = (key.host, key.port) if proxy is None else (str(proxy.hostname), proxy.port or _PORTS[proxy.scheme])
    patience = min(timeout, 10)
    if key.scheme == "http":
        return HTTPConnection(host, port, timeout=patience)
    connection = HTTPSConnection(host, port, timeout=patience, context=_tls(*map(os.environ.get, _CERTIFICATES)))
    if proxy is not None:
        connection.set_tunnel(key.host, key.port, _proxy_headers(proxy))
    return connection


@cache
def _tls(*_: str | None) -> ssl.SSLContext:
    """Return the TLS settings, which depend on the values of ``_CERTIFICATES`` in the environment."""
    return ssl.create_default_context()


def _close_all(idle: Mapping[Origin, list[HTTPConnection]]) -> None:
    for connections in idle.values():
        for connection in connections:
            connection.close()
