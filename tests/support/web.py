"""A web server for tests: files by ranges, an object store's few requests, and faults on purpose; loopback only.

``python -m tests.support.web FOLDER [PORT]`` serves a folder by hand: as ``/name``, and by S3's requests as
``/bucket/name``.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.bucket import Answer, Bucket, etag

MODIFIED = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """A request. ``key`` is the decoded path without its slash, ``headers`` by lower-case name, ``range`` (first, last
    or None), ``port`` that of the client's connection."""

    method: str
    key: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    range: tuple[int, int | None] | None = None
    port: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one answer.

    ``status`` instead of the right one, with ``headers``, ``body`` or nothing in it; ``cut`` closes the connection
    after so many bytes of the body; ``pause`` waits so many seconds before the body, ``stall`` after ``cut`` bytes;
    ``drip`` sends the body byte by byte with so many seconds after each.
    ``whole`` ignores the range; ``short`` answers it with so many bytes fewer, ``total`` states another size of the
    file, ``shift`` another place of the range; ``etag`` and ``modified`` (seconds) are stated in place of the right
    ones; ``flip`` changes the byte at a place of the file.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut: int | None = None
    pause: float = 0
    stall: float = 0
    drip: float = 0
    whole: bool = False
    short: int = 0
    total: int | None = None
    shift: int = 0
    etag: str | None = None
    modified: int = MODIFIED
    flip: int | None = None


Plan = Callable[[Request], "Fault | None"]


class WebServer:
    """Serves ``files`` (name to bytes) at ``url``; a context manager.

    Parameters
    ----------
    files : mapping of str to bytes
        May be changed while the server runs. Names with slashes lie in folders.
    listing : bool
        Whether folders are answered with a page of links, as web servers do.
    bucket : str
        Objects of this name's bucket are served as S3 does, too: ranges, listing, upload in one or several pieces.
    etags : bool
        Whether answers state a tag of the version.
    port : int
        On the loopback interface; 0 for a free one.
    certificate : pair of paths, optional
        Certificate and key, as PEM: TLS is spoken.

    Attributes
    ----------
    log : list of Request
    bodies : list of (float, float, int)
        When each body began to be sent and ended, by ``time.monotonic``, and the bytes sent, if there is a ``rate``.
    fault : callable, optional
        Gets each request, returns what goes wrong with its answer.
    old : set of str
        Objects that listings give a time long before that of the others.
    rate : float
        Bytes a second of all bodies together; 0 for no limit.
    """

    def __init__(
        self,
        files: dict[str, bytes] | None = None,
        *,
        listing: bool = False,
        bucket: str = "",
        etags: bool = True,
        port: int = 0,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.files = {} if files is None else files
        self.listing, self.bucket, self.etags = listing, bucket, etags
        self.log: list[Request] = []
        self.sent = 0
        self.fault: Plan | None = None
        self.routes: dict[str, Callable[[Request], Answer]] = {}
        self.rate = self.free = 0.0
        self.bodies: list[tuple[float, float, int]] = []
        self.old: set[str] = set()
        self.objects = Bucket(self.files, self.old)
        self.lock = threading.Lock()
        self.connections: list[socket.socket] = []
        outer = self

        class Handler(_Handler):
            server_of = outer

        self._server = _Quiet(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self.port}"
        if certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*certificate)
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def hang_up(self) -> None:
        """Close all connections."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def gets(self, key: str = "") -> list[Request]:
        """Return the requests for bytes, of one file where it is named."""
        return [item for item in self.log if item.method == "GET" and (not key or item.key == key)]

    def requests(self) -> int:
        """Return how many requests there were."""
        return len(self.log)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients leave in the middle on purpose."""


class _Handler(BaseHTTPRequestHandler):
    server_of: WebServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        self.server_of.connections.append(self.request)
        super().setup()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        outer, parts = self.server_of, urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        request = Request(
            self.command,
            unquote(parts.path).lstrip("/"),
            query,
            {name.lower(): value for name, value in self.headers.items()},
            self._range(),
            self.client_address[1],
        )
        with outer.lock:
            outer.log.append(request)
        fault = (outer.fault and outer.fault(request)) or Fault()
        route = next((outer.routes[key] for key in outer.routes if request.key.startswith(key)), None)
        if fault.status:
            self._send(fault.status, dict(fault.headers), fault.body, fault)
        elif route is not None:
            self._send(*route(request), fault)
        elif outer.bucket and request.key.partition("/")[0] == outer.bucket:
            key = request.key.partition("/")[2]
            copied = self.headers.get("x-amz-copy-source", "").lstrip("/").removeprefix(f"{outer.bucket}/")
            if key in outer.files and self.command in ("GET", "HEAD"):
                self._file(request, key, fault)
            elif copied:
                self._send(*outer.objects.copy(key, copied), fault)
            else:
                self._send(*outer.objects.answer(self.command, key, query, body), fault)
        elif request.key in outer.files:
            self._file(request, request.key, fault)
        elif outer.listing and (request.key == "" or request.key.endswith("/")):
            self._send_page(_page(outer.files, request.key))
        elif outer.listing and any(name.startswith(f"{request.key}/") for name in outer.files):
            self._send(301, {"Location": f"/{quote(request.key)}/"}, b"", fault)
        else:
            self._send(404, {}, b"", fault)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _range(self) -> tuple[int, int | None] | None:
        text = self.headers.get("Range", "")
        first, _, last = text.removeprefix("bytes=").partition("-")
        return (int(first), int(last) if last else None) if text.startswith("bytes=") and first else None

    def _file(self, request: Request, key: str, fault: Fault) -> None:
        data = self.server_of.files[key]
        tag = fault.etag if fault.etag is not None else etag(data)
        headers = {"Last-Modified": formatdate(fault.modified, usegmt=True), "Accept-Ranges": "bytes"}
        if self.server_of.etags or fault.etag is not None:
            headers["ETag"] = tag
        wanted = self.headers.get("If-Match")
        if wanted is not None and wanted != tag:
            self._send(412, {}, b"", fault)
            return
        if fault.flip is not None:
            data = data[: fault.flip] + bytes([data[fault.flip] ^ 1]) + data[fault.flip + 1 :]
        if request.range is None or fault.whole:
            self._send(200, headers, data, fault)
            return
        first, last = request.range
        stop = len(data) if last is None else min(last + 1, len(data))
        if first >= len(data):
            self._send(416, {"Content-Range": f"bytes */{len(data)}"}, b"", fault)
            return
        stop -= fault.short
        total = len(data) if fault.total is None else fault.total
        headers["Content-Range"] = f"bytes {first + fault.shift}-{stop - 1 + fault.shift}/{total}"
        self._send(206, headers, data[first:stop], fault)

    def _send(self, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        time.sleep(fault.pause)
        if fault.cut is not None and fault.cut < len(body):
            self.wfile.write(body[: fault.cut])
            self.wfile.flush()
            time.sleep(fault.stall)
            self.close_connection = True
            self.connection.close()
            return
        for index in range(len(body) if fault.drip else 0):
            self.wfile.write(body[index : index + 1])
            time.sleep(fault.drip)
        self._write(b"" if fault.drip else body)

    def _send_page(self, body: bytes) -> None:
        """Answer without stating a length, as nginx does."""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    def _write(self, body: bytes) -> None:
        outer = self.server_of
        with outer.lock:
            outer.sent += len(body)
        if not outer.rate:
            self.wfile.write(body)
            return
        view, began, done = memoryview(body), time.monotonic(), 0
        try:
            while done < len(view):
                piece = view[done : done + max(1 << 16, int(outer.rate) >> 8)]
                with outer.lock:
                    # What was not sent for a twentieth of a second may be sent later: threads wake up late.
                    outer.free = max(outer.free, time.monotonic() - 0.05) + len(piece) / outer.rate
                    wait = outer.free - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                self.wfile.write(piece)
                done += len(piece)
        finally:
            with outer.lock:
                outer.bodies.append((began, time.monotonic(), done))


def _page(files: Mapping[str, bytes], folder: str) -> bytes:
    """Return a folder's page, as nginx makes it."""
    inside = [name.removeprefix(folder) for name in files if name.startswith(folder)]
    entries = sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in inside})
    links = "\n".join(f'<a href="{quote(name)}">{escape(name)}</a>' for name in entries)
    return f'<html><body><h1>Index</h1><pre><a href="../">../</a>\n{links}</pre></body></html>'.encode()


def main() -> None:
    """Serve a folder until interrupted."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with WebServer(files, listing=True, bucket="bucket", port=port) as server:
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
