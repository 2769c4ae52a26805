"""Workers and clusters: what comes back of them, and what does not answer."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ingot.engine.cluster import listening
from ingot.engine.cluster.handing import hand_out
from ingot.engine.cluster.notes import Task
from ingot.engine.cluster.pool import Processes
from ingot.errors import IngotError


class Sealed(Exception):  # noqa: N818 - what it does
    """An error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


class Torn(Exception):  # noqa: N818 - what it does
    """An error that can be pickled, and not read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fail(kind: str) -> None:
    raise Sealed("of the work") if kind == "sealed" else Torn("of", "the work")


def unpicklable() -> Callable[[], None]:
    return lambda: None


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    """One process, which finds this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        started = Processes(1)
        yield started
        started.close()


@pytest.mark.parametrize(("kind", "name"), [("sealed", "Sealed: of the work"), ("torn", "Torn: of and the work")])
def test_an_error_that_cannot_cross_is_told_and_not_taken_for_a_lost_worker(
    pool: Processes, kind: str, name: str
) -> None:
    pids = [pool.submit(os.getpid).result()]
    done: list[Any] = []
    with pytest.raises(RuntimeError, match=name):
        hand_out(pool, [Task(0, 1, 1)], lambda task: pool.submit(fail, kind), lambda task, result: done.append(task))
    assert not done
    assert pool.pids == pids


def test_a_result_that_cannot_cross_is_an_error(pool: Processes) -> None:
    pids = [pool.submit(os.getpid).result()]
    with pytest.raises((AttributeError, pickle.PicklingError), match="unpicklable"):
        pool.submit(unpicklable).result()
    assert pool.pids == pids


def test_arguments_that_cannot_cross_are_an_error_and_the_next_call_is_answered(pool: Processes) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        pool.submit(print, threading.Lock()).result()
    assert pool.submit(abs, -3).result() == 3


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
    monkeypatch.setattr(listening, "WAIT", 0.2)


SETTINGS = bytes((0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1))


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_who_speaks_as_ray_does_is_taken(form: str) -> None:
    with answering(SETTINGS) as place:
        listening.require_cluster(form.format(place))


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_who_does_not_is_refused(data: bytes | None) -> None:
    with answering(data) as place, pytest.raises(IngotError) as caught:
        listening.require_cluster(place)
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
        listening.require_cluster(address)
    assert (caught.value.rule, caught.value.where) == ("cluster.address", place)


@pytest.mark.parametrize("address", [None, "local", "auto", "anyscale://cluster", "host:port"])
def test_what_names_no_host_is_left_to_ray(address: str | None) -> None:
    listening.require_cluster(address)
