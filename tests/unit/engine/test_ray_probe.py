"""Whether a Ray cluster is named, and answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ingot.cluster import ray as ray_probe
from ingot.errors import IngotError


@contextmanager
def answering(data: bytes | None) -> Iterator[str]:
    """A server that answers every connection with these bytes and ends it; None: that says nothing."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1)
                        if data is None:
                            over.wait()
                        else:
                            connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster is named but by the test, and silence ends soon."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_probe, "WAIT", 0.2)


SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1))


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_what_speaks_as_ray_does_is_a_cluster(form: str) -> None:
    with answering(SETTINGS) as place:
        assert ray_probe.require_cluster(form.format(place))


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_what_does_not_is_refused(data: bytes | None) -> None:
    with answering(data) as place, pytest.raises(IngotError) as caught:
        ray_probe.require_cluster(place)
    assert (caught.value.rule, caught.value.where) == ("cluster.address", place)


def gone() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", [None, "auto"])
@pytest.mark.parametrize("by", ["RAY_ADDRESS", "ray_current_cluster"])
def test_an_address_that_ray_finds_by_itself_is_tried_too(
    address: str | None, by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = gone()
    if by == "RAY_ADDRESS":
        monkeypatch.setenv(by, place)
    else:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / by).write_text(place)
    with pytest.raises(IngotError, match=by) as caught:
        ray_probe.require_cluster(address)
    assert (caught.value.rule, caught.value.where) == ("cluster.address", place)


@pytest.mark.parametrize("address", ["anyscale://cluster", "host:port"])
def test_an_address_of_another_scheme_is_left_to_ray(address: str) -> None:
    assert ray_probe.require_cluster(address)


@pytest.mark.parametrize(("address", "variable"), [(None, ""), ("local", ""), ("", ""), (None, "local")])
def test_no_cluster_is_named(address: str | None, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert not ray_probe.require_cluster(address)


def test_auto_needs_a_cluster() -> None:
    with pytest.raises(IngotError, match="found no address") as caught:
        ray_probe.require_cluster("auto")
    assert caught.value.rule == "cluster.address"
