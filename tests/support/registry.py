"""A registry of OCI artifacts for tests, which can lie; and Debian's ``docker-registry`` as a process."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.s3 import free_port

USER, PASSWORD = "me", "pass:word"
_PATH = re.compile(r"/v2/(.+)/(blobs|manifests)/(.*)")


class FakeRegistry:
    """Holds blobs and manifests in memory; a context manager.

    Parameters
    ----------
    auth : {"", "basic", "bearer"}
        What the registry asks for.

    Attributes
    ----------
    blobs : dict
        Repository and digest to bytes. A test may put other bytes there than the digest's.
    manifests : dict
        Repository and tag or digest to bytes.
    sizes : dict
        Digest to the size that HEAD states instead of the right one.
    statuses : dict
        Beginning of "METHOD /path" to the status that is answered instead of the right one, each once.
    cut : dict
        Digest to the number of bytes after which answers break off.
    upload_host : str
        The address that uploads are sent to; empty for this registry.
    log : list of str
        "METHOD /path" of each request.
    """

    def __init__(self, auth: str = "") -> None:
        self.auth = auth
        self.blobs: dict[tuple[str, str], bytes] = {}
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.sizes: dict[str, int] = {}
        self.statuses: dict[str, int] = {}
        self.cut: dict[str, int] = {}
        self.upload_host = ""
        self.log: list[str] = []
        outer = self

        class Handler(_Handler):
            registry = outer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.host = f"localhost:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FakeRegistry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def digest_of(self, repository: str, tag: str, name: str) -> str:
        """Return the digest of an artifact's file."""
        layers = json.loads(self.manifests[repository, tag])["layers"]
        return next(str(item["digest"]) for item in layers if item["annotations"]["org.cncf.model.filepath"] == name)

    def change(self, repository: str, tag: str, **fields: Any) -> None:
        """Change fields of the manifest of a tag; those of the first layer under ``layer``."""
        manifest = json.loads(self.manifests[repository, tag])
        manifest["layers"][0].update(fields.pop("layer", {}))
        self.manifests[repository, tag] = json.dumps({**manifest, **fields}).encode()

    def count(self, method: str) -> int:
        return sum(line.startswith(f"{method} ") for line in self.log)


class _Handler(BaseHTTPRequestHandler):
    registry: FakeRegistry
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def _handle(self) -> None:
        registry = self.registry
        line = f"{self.command} {self.path}"
        registry.log.append(line)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = next((start for start in registry.statuses if line.startswith(start)), None)
        if fault is not None:
            error = {"errors": [{"code": "TEST", "message": "secret answer"}]}
            self._answer(registry.statuses.pop(fault), json.dumps(error).encode())
        elif self.path.startswith("/token"):
            self._token()
        elif not self._is_allowed():
            challenge = f'Bearer realm="http://{registry.host}/token",service="fake",scope="repository:x:pull"'
            self._answer(401, WWW_Authenticate='Basic realm="x"' if registry.auth == "basic" else challenge)
        else:
            self._serve(body)

    do_GET = do_HEAD = do_POST = do_PUT = _handle  # noqa: N815

    def _token(self) -> None:
        if self.headers.get("Authorization") is None or not self._is_login():
            self._answer(401)
            return
        scope = parse_qs(urlsplit(self.path).query)["scope"][0]
        self._answer(200, json.dumps({"token": scope.replace(":", "-").replace("/", "-").replace(",", "-")}).encode())

    def _is_login(self) -> bool:
        encoded = (self.headers.get("Authorization") or "").removeprefix("Basic ")
        return b64decode(encoded).decode() == f"{USER}:{PASSWORD}"

    def _is_allowed(self) -> bool:
        if not self.registry.auth:
            return True
        header = self.headers.get("Authorization") or ""
        if self.registry.auth == "basic":
            return header.startswith("Basic ") and self._is_login()
        return header.endswith("-push" if self.command in ("POST", "PUT") else ("-pull", "-push"))

    def _serve(self, body: bytes) -> None:
        path = urlsplit(self.path)
        match = _PATH.fullmatch(path.path)
        assert match is not None, self.path
        repository, kind, reference = match.groups()
        if self.command in ("POST", "PUT"):
            self._store(repository, kind, reference, body, parse_qs(path.query))
        elif kind == "manifests":
            data = self.registry.manifests.get((repository, reference))
            if data is None:
                self._answer(404)
                return
            self._answer(200, data, Docker_Content_Digest=_digest(data))
        else:
            self._blob(repository, reference)

    def _store(self, repository: str, kind: str, reference: str, body: bytes, query: dict[str, list[str]]) -> None:
        registry = self.registry
        if self.command == "POST":
            host = registry.upload_host or ""
            self._answer(202, Location=f"{host}/v2/{repository}/blobs/uploads/1?state=a%2Fb")
        elif kind == "manifests":
            registry.manifests[repository, reference] = registry.manifests[repository, _digest(body)] = body
            self._answer(201)
        elif _digest(body) != query["digest"][0]:
            self._answer(400, b'{"errors": [{"code": "DIGEST_INVALID"}]}')
        else:
            assert query["state"] == ["a/b"]
            registry.blobs[repository, _digest(body)] = body
            self._answer(201)

    def _blob(self, repository: str, digest: str) -> None:
        data = self.registry.blobs.get((repository, digest))
        if data is None:
            self._answer(404)
            return
        if self.command == "HEAD":
            self._answer(200, Content_Length=str(self.registry.sizes.get(digest, len(data))))
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        first, last = map(int, wanted.groups()) if wanted else (0, len(data) - 1)
        last = min(last, len(data) - 1)
        self._answer(
            206,
            data[first : last + 1],
            self.registry.cut.get(digest),
            Content_Range=f"bytes {first}-{last}/{len(data)}",
        )

    def log_message(self, *args: Any) -> None:
        pass


def _digest(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


@contextmanager
def docker_registry(program: str, folder: Path, users: Path | None = None) -> Iterator[str]:
    """Start Debian's ``docker-registry`` with its data in a folder; yield its host and port.

    ``users`` is a file of htpasswd: then the registry asks for name and password.
    """
    port = free_port()
    settings: dict[str, Any] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
        "log": {"level": "error"},
    }
    if users is not None:
        settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(users)}}
    (folder / "config.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = [program, "serve", str(folder / "config.yml")]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/v2/", process)
            yield f"localhost:{port}"
        finally:
            process.kill()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        try:
            urllib.request.urlopen(url).close()
        except urllib.error.HTTPError:
            return  # it asks for a name
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"expected a registry at {url}")
