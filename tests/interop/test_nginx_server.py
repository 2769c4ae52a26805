"""Ranges of nginx, a web server that others use (Debian: nginx-light); `make nginx` where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.stores.remote import client
from tests.support.proxy import FaultyProxy

PROGRAM = os.environ.get("INGOT_NGINX", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="INGOT_NGINX names no nginx: make nginx")
OPENSSL = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
WEIGHTS = {f"{name}.w": np.random.default_rng(7).standard_normal((1500, 1024)).astype(np.float32) for name in "abc"}
CONFIG = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1;
events {{ }}
http {{
  access_log off; sendfile on; default_type application/octet-stream;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{
    listen 127.0.0.1:{port}; root {folder}/files; autoindex on; etag on;
    location /slow/ {{ alias {folder}/files/; limit_rate 20m; }}
    location /secret/ {{ alias {folder}/files/; auth_basic on; auth_basic_user_file {folder}/users; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
    location /away/ {{ return 302 file:///etc/hostname; }}
  }}
  server {{
    listen 127.0.0.1:{tls} ssl; root {folder}/files;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
  }}
}}
"""


@dataclass(frozen=True)
class Served:
    folder: Path
    port: int
    tls: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("nginx")
    served = Served(folder, free_port(), free_port())
    folder.chmod(0o755)  # nginx's workers are another user's
    (folder / "files" / "m").mkdir(parents=True)
    ingot.save(folder / "files" / "m" / "model.safetensors", WEIGHTS)
    subprocess.run(
        [*OPENSSL, "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True,
        capture_output=True,
    )
    (folder / "users").write_text("me:{PLAIN}pass\n")
    (folder / "nginx.conf").write_text("user root;" * (os.geteuid() == 0) + CONFIG.format(**vars(served)))
    command = [shutil.which(PROGRAM) or PROGRAM, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    server = subprocess.Popen(command)
    try:
        for _ in range(100):
            with socket.socket() as trial:
                if not trial.connect_ex(("127.0.0.1", served.tls)):
                    break
            time.sleep(0.05)
        yield served
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PAUSE", 0.01)
    monkeypatch.setattr(client, "RETRIES", 2)


def refusal(address: str) -> IngotError:
    with pytest.raises(IngotError) as caught, ingot.open(address) as checkpoint:
        checkpoint["c.w"].numpy()
    return caught.value


@pytest.mark.parametrize("where", ["", "slow/", "moved/"])
def test_a_folder_is_read_as_it_lies(nginx: Served, where: str) -> None:
    assert ingot.compare(f"{nginx.url}/{where}m/", nginx.folder / "files" / "m").same
    assert ingot.compare(f"{nginx.url}/{where}m/model.safetensors", nginx.folder / "files" / "m").same


def test_a_file_that_is_replaced_is_refused(nginx: Served) -> None:
    path = nginx.folder / "files" / "x.zt"
    ingot.save(path, WEIGHTS)
    with ingot.open(f"{nginx.url}/x.zt") as checkpoint:
        assert np.array_equal(checkpoint["b.w"][7:9], WEIGHTS["b.w"][7:9])
        ingot.save(path, {name: values + 1 for name, values in WEIGHTS.items()}, overwrite=True)
        os.utime(path, (1_800_000_000, 1_800_000_000))  # nginx's tags are made of seconds and sizes
        with pytest.raises(IngotError) as caught:
            checkpoint["c.w"].numpy()
    assert caught.value.rule == "store.changed"


def test_a_password_is_needed_and_told_to_nobody(nginx: Served) -> None:
    with ingot.open(f"http://me:pass@127.0.0.1:{nginx.port}/secret/m/model.safetensors") as checkpoint:
        assert np.array_equal(checkpoint["a.w"].numpy(), WEIGHTS["a.w"])
        assert "pass" not in checkpoint.location
    error = refusal(f"http://me:SECRET@127.0.0.1:{nginx.port}/secret/m/model.safetensors")
    assert error.rule == "store.denied"
    assert "SECRET" not in str(error)


def test_nobody_is_led_to_files_or_to_a_stranger(nginx: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(f"{nginx.url}/away/model.safetensors").rule == "remote.redirect"
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert refusal(f"https://localhost:{nginx.tls}/m/model.safetensors").rule == "remote.certificate"


def test_connections_that_break_off_now_and_then(nginx: Served) -> None:
    """Every third connection ends in the middle of an answer: what has come is not asked for again."""
    with FaultyProxy(nginx.port, lambda number: (1_000_000, 0.0) if number % 3 == 1 else None) as proxy:
        assert ingot.compare(f"{proxy.url}/m/model.safetensors", nginx.folder / "files" / "m").same
        assert proxy.connections > 1
    with FaultyProxy(nginx.port, lambda _: (70_000, 0.0)) as proxy:
        assert refusal(f"{proxy.url}/m/model.safetensors").rule == "remote.failed"
