"""Credentials for registries: where they come from, and to whom they are sent."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import pytest

from ingot.errors import IngotError
from ingot.stores.registry.client import RegistryClient
from ingot.stores.registry.credentials import login_of
from tests.support.registry import PASSWORD, USER, FakeRegistry
from tests.support.web import WebServer


def encoded(login: str) -> dict[str, str]:
    return {"auth": b64encode(login.encode()).decode()}


@pytest.fixture(autouse=True)
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The settings of Docker in an empty home folder."""
    for name in ("DOCKER_AUTH_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".docker").mkdir()
    return tmp_path / ".docker" / "config.json"


def helper(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    program = folder / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_first_source_with_an_entry_counts(docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert login_of("h") == ""
    docker.write_text(json.dumps({"auths": {"https://h/v2/": encoded("a:1"), "other": encoded("b:2")}}))
    assert (login_of("h"), login_of("other"), login_of("none")) == ("a:1", "b:2", "")
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {"h": {"username": "c", "password": "3:x"}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    assert (login_of("h"), login_of("other")) == ("c:3:x", "b:2")
    monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {"h": encoded("d:4")}}))
    assert login_of("h") == "d:4"


def test_docker_hub_has_a_name_of_its_own(docker: Path) -> None:
    docker.write_text(json.dumps({"auths": {"https://index.docker.io/v1/": encoded("a:1")}}))
    assert login_of("docker.io") == "a:1"
    assert RegistryClient("docker.io", "a").location == "https://registry-1.docker.io"


def test_helpers(docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"Username": "me", "Secret": "s:1", "ServerURL": "'
    helper(tmp_path, monkeypatch, "test", f"""read host; printf '%s%s"}}' '{answer}' "$host" """)
    docker.write_text(json.dumps({"auths": {"h": {}}, "credsStore": "test"}))
    assert login_of("h") == "me:s:1"
    docker.write_text(json.dumps({"credHelpers": {"h": "test"}}))
    assert (login_of("h"), login_of("other")) == ("me:s:1", "")
    helper(tmp_path, monkeypatch, "test", "echo credentials not found in native keychain; exit 1")
    assert login_of("h") == ""


@pytest.mark.parametrize(
    "script", ["exit 1", "echo x", "echo '[]'", """echo '{"Username": "<token>", "Secret": "x"}'"""]
)
def test_helpers_that_fail(docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    helper(tmp_path, monkeypatch, "test", script)
    docker.write_text(json.dumps({"credHelpers": {"h": "test"}}))
    with pytest.raises(IngotError) as caught:
        login_of("h")
    assert caught.value.rule == "registry.credentials"


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        json.dumps({"auths": {"h": {"auth": "not base64!"}}}),
        json.dumps({"auths": {"h": {"auth": b64encode(b"no colon").decode()}}}),
        json.dumps({"credHelpers": {"h": "absent-helper"}}),
        json.dumps({"credHelpers": {"h": "../x"}}),
        json.dumps({"credHelpers": {"h": 3}}),
    ],
)
def test_settings_that_are_refused(docker: Path, text: str) -> None:
    docker.write_text(text)
    with pytest.raises(IngotError) as caught:
        login_of("h")
    assert caught.value.rule == "registry.credentials"
    assert "no colon" not in str(caught.value)


def test_a_token_server_without_tls_gets_nothing() -> None:
    with pytest.raises(IngotError) as caught:
        RegistryClient("example.com", "a", "me:pw")._authorization('Bearer realm="http://example.com/token"')
    assert caught.value.rule == "registry.realm"


def test_a_redirect_gets_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a registry redirects to asks for a password."""
    with FakeRegistry("basic") as registry, WebServer() as far:
        asks = {"WWW-Authenticate": 'Basic realm="x"'}
        far.routes[""] = lambda request: (401, asks, b"")
        monkeypatch.setattr(
            "tests.support.registry._Handler._blob",
            lambda self, repository, digest: self._answer(302, Location=f"{far.url}/x"),
        )
        client = RegistryClient(registry.host, "a", f"{USER}:{PASSWORD}")
        with pytest.raises(IngotError) as caught:
            client.open(client.blob_key("sha256:" + "0" * 64), 10)
        assert caught.value.rule == "store.denied"
        assert far.log
        assert not any("authorization" in request.headers for request in far.log)


def test_plain_http_is_for_this_machine_and_named_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_REGISTRY_HTTP", "lab:5000,other")
    schemes = {
        host: RegistryClient(host, "a").location.partition(":")[0]
        for host in ("localhost:1", "127.0.0.2", "[::1]:5000", "lab:5000", "lab", "localhost.example.com", "10.0.0.1")
    }
    assert [host for host, scheme in schemes.items() if scheme == "http"] == [
        "localhost:1",
        "127.0.0.2",
        "[::1]:5000",
        "lab:5000",
    ]
