"""S3 servers of others for tests, each a process of its own on this machine."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_TRIES = 240

Server = Callable[[str, int, Path], list[str]]
"""What starts a server: of its program, its port and a folder of its own."""


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def moto(program: str, port: int, folder: Path) -> list[str]:
    """moto's server; ``program`` is its ``moto_server``."""
    return [program, "-p", str(port)]


def seaweed(program: str, port: int, folder: Path) -> list[str]:
    """SeaweedFS, ``program`` is its ``weed``: master, volume server, filer and S3 gateway in one, ports its own."""
    identity = {"credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": ["Admin"], "name": "tests"}
    anyone = {"name": "anonymous", "actions": ["Admin"]}  # who makes the bucket
    (folder / "s3.json").write_text(json.dumps({"identities": [identity, anyone]}))
    ports = [f"-{name}.port={free_port()}" for name in ("master", "volume", "filer")]
    ports += [f"-{name}.port.grpc={free_port()}" for name in ("master", "volume", "filer", "s3")]
    plain = ["-ip=127.0.0.1", f"-dir={folder}", "-s3", f"-s3.port={port}", f"-s3.config={folder / 's3.json'}"]
    ports += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    return [program, "-logtostderr=true", "server", *plain, *ports, "-volume.max=10", "-master.volumeSizeLimitMB=64"]


@contextmanager
def bucket(server: Server, program: str, folder: Path) -> Iterator[str]:
    """Start a server with an empty bucket ``bucket``; yield its address.

    Raises ``RuntimeError`` where it makes none.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(server(program, port, folder), stdout=log, stderr=log) as process,
    ):
        try:
            _make_bucket(url, process)
            yield url
        finally:
            process.kill()


def environment(url: str) -> Mapping[str, str]:
    """Return the variables by which clients find the server at an address."""
    names = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1", "ENDPOINT_URL": url}
    return {f"AWS_{name}": value for name, value in names.items()}


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(_TRIES):
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.25)
        else:
            return
    raise RuntimeError(f"expected the server at {url} to make a bucket")
