"""Debian's docker-registry, and what oras and skopeo read of Ingot's artifacts; `make oci` where they are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.stores.location import Location
from ingot.stores.remote import client
from tests.support.proxy import FaultyProxy
from tests.support.registry import PASSWORD, USER, docker_registry

PROGRAM = os.environ.get("INGOT_DOCKER_REGISTRY", "")
ORAS = os.environ.get("INGOT_ORAS_PYTHON", "")
SKOPEO = os.environ.get("INGOT_SKOPEO", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="INGOT_DOCKER_REGISTRY names no program: make oci")
WEIGHTS = {f"{name}.w": np.random.default_rng(7).standard_normal((1500, 1024)).astype(np.float32) for name in "abc"}
PULL = "import oras.client, sys; oras.client.OrasClient(insecure=True).pull(target=sys.argv[1], outdir=sys.argv[2])"
PUSH = (
    "import oras.client, sys; oras.client.OrasClient(insecure=True)"
    ".push(target=sys.argv[1], files=sys.argv[2:], disable_path_validation=True)"
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(PROGRAM, tmp_path_factory.mktemp("registry")) as name:
        yield name


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(client, "_PAUSE", 0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "one.safetensors", WEIGHTS)
    ingot.convert(tmp_path / "one.safetensors", tmp_path / "model", format="safetensors", max_shard=7_000_000)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model" / "1_Pooling").mkdir()
    (tmp_path / "model" / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "model" / "empty.txt").write_bytes(b"")
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_shards_there_and_back(host: str, model: Path, tmp_path: Path) -> None:
    address = f"oci://{host}/org/model:v1"
    pushed = ingot.push(model, address)
    assert pushed.sent == pushed.size
    ingot.pull(address, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)
    with ingot.open(address) as checkpoint:
        assert np.array_equal(checkpoint["b.w"][7:9], WEIGHTS["b.w"][7:9])
    assert ingot.compare(address, model).same
    ingot.seal(model)
    assert ingot.push(model, address, overwrite=True).sent < 100_000  # the seals
    assert not [item for item in ingot.verify(address) if item.level == "error"]


def test_a_fine_tune_sends_what_is_new(host: str, model: Path) -> None:
    first = ingot.push(model, f"oci://{host}/org/tuned:v1")
    name = next(path.name for path in model.iterdir() if path.name.startswith("model-00002"))
    shard = model / name
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\0\0")
    assert ingot.push(model, f"oci://{host}/org/tuned:v2").sent < first.sent / 2


def test_passwords(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = tmp_path / "users"
    subprocess.run(["htpasswd", "-cbB", users, USER, PASSWORD], check=True, capture_output=True)
    (tmp_path / "registry").mkdir()
    with docker_registry(PROGRAM, tmp_path / "registry", users) as host:
        address = f"oci://{host}/org/model:v1"
        with pytest.raises(IngotError) as caught:
            ingot.push(model, address)
        assert caught.value.rule == "store.denied"
        login = b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {host: {"auth": login}}}))
        ingot.push(model, address)
        ingot.pull(address, tmp_path / "back")
        assert contents(tmp_path / "back") == contents(model)
        assert ingot.compare(address, model).same
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {host: {"auth": b64encode(b"me:no").decode()}}}))
        with pytest.raises(IngotError) as caught:
            ingot.open(address)
        assert caught.value.rule == "store.denied"


def test_connections_that_break_off(host: str, model: Path, tmp_path: Path) -> None:
    """Each third connection of the pull passes on 900 KB and then breaks."""
    ingot.push(model, f"oci://{host}/org/broken:v1")
    with FaultyProxy(int(host.rpartition(":")[2]), lambda count: (900_000, 0) if count % 3 < 2 else None) as proxy:
        ingot.pull(f"oci://localhost:{proxy.port}/org/broken:v1", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_push_leaves_no_artifact_and_goes_on(
    host: str, model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    name = f"org/stopped-{int(number)}"
    slow = FaultyProxy(int(host.rpartition(":")[2]), lambda count: (1 << 40, 0.15))
    with slow as proxy:
        command = [sys.executable, "-m", "ingot", "push", str(model), f"oci://localhost:{proxy.port}/{name}:v1"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while proxy.connections < 1 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(1.5)
        process.send_signal(number)
        assert process.wait(30) == (130 if number == signal.SIGINT else -number)
    with pytest.raises(IngotError) as caught:
        Location.parse(f"oci://{host}/{name}:v1").store()
    assert caught.value.rule == "store.missing"
    pushed = ingot.push(model, f"oci://{host}/{name}:v1")
    assert 0 < pushed.sent <= pushed.size
    ingot.pull(f"oci://{host}/{name}:v1", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)


@pytest.mark.skipif(not ORAS, reason="INGOT_ORAS_PYTHON names no Python with oras: make oci")
def test_oras_pulls_what_ingot_pushes_and_the_reverse(host: str, model: Path, tmp_path: Path) -> None:
    ingot.push(model, f"oci://{host}/org/oras:v1")
    subprocess.run([ORAS, "-c", PULL, f"{host}/org/oras:v1", tmp_path / "oras"], check=True, capture_output=True)
    assert contents(tmp_path / "oras") == contents(model)
    files = [tmp_path / "one.safetensors", model / "config.json"]
    reverse = f"{host}/org/reverse:v1"
    subprocess.run(
        [ORAS, "-c", PUSH, reverse, *(file.name for file in files)], check=True, capture_output=True, cwd=_flat(files)
    )
    ingot.pull(f"oci://{reverse}", tmp_path / "reverse")
    assert contents(tmp_path / "reverse") == {file.name: file.read_bytes() for file in files}
    assert ingot.compare(f"oci://{reverse}", model).same


def _flat(files: list[Path]) -> Path:
    """Copy files into a folder of their own; oras keeps the names that it is called with."""
    folder = files[0].parent / "flat"
    folder.mkdir()
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.skipif(not SKOPEO, reason="INGOT_SKOPEO names no skopeo: make oci")
def test_skopeo_copies_an_artifact_with_all_digests(host: str, model: Path, tmp_path: Path) -> None:
    pushed = ingot.push(model, f"oci://{host}/org/skopeo:v1")
    source = f"docker://{host}/org/skopeo:v1"
    plain = ["--src-tls-verify=false", "--dest-tls-verify=false"]
    subprocess.run([SKOPEO, "copy", *plain, source, f"docker://{host}/org/copy:v2"], check=True, capture_output=True)
    assert ingot.pull(f"oci://{host}/org/copy:v2", tmp_path / "back").version == pushed.version
    assert contents(tmp_path / "back") == contents(model)
    subprocess.run([SKOPEO, "copy", *plain, source, f"oci:{tmp_path / 'layout'}:v1"], check=True, capture_output=True)
    layers = {path.name for path in (tmp_path / "layout" / "blobs" / "sha256").iterdir()}
    assert pushed.version.removeprefix("sha256:") in layers
