"""Web servers and object stores as stores, and what goes wrong between them and us."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ingot.core.runtime.parallel import Cancelled, Workers
from ingot.errors import IngotError
from ingot.model.store import Listing, OverwritePolicy
from ingot.stores.location import Location
from ingot.stores.remote import client, pace, source, transfer
from ingot.stores.remote.address import address_of, without_secrets
from ingot.stores.remote.store import RemoteStore
from ingot.testing.stores import StoreSuite
from tests.support.stores import rule_of
from tests.support.web import Fault, Request, WebServer

pytest.importorskip("obstore")
DATA = np.random.default_rng(0).bytes(3 << 20)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "KEYOFTEST",
        "AWS_SECRET_ACCESS_KEY": "SECRETOFTEST",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    monkeypatch.setattr(client, "RETRIES", 2)
    with WebServer({"m/a.bin": DATA, "m/b": b"12"}, bucket="bucket") as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


class TestWebStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, server: WebServer) -> None:
        server.listing = True
        self.server = server

    def make(self, folder, files):
        self.server.files.clear()
        self.server.files.update({f"in {folder.name}#/{name}": data for name, data in files.items()}, other=b"out")
        return Location.parse(f"{self.server.url}/in%20{folder.name}%23/").store()


class TestObjectStore(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, server: WebServer) -> None:
        self.server = server

    def make(self, folder, files):
        self.server.files.clear()
        self.server.files.update({f"in {folder.name}/{name}": data for name, data in files.items()}, other=b"out")
        return Location.parse(f"s3://bucket/in%20{folder.name}").store()


def opened(server: WebServer):
    return Location.parse(f"{server.url}/m").store().open("a.bin")


def failing(fault: Fault, times: int = 1):
    """Return what goes wrong with the next requests for bytes behind the first ones."""
    left, lock = [times], threading.Lock()

    def plan(request: Request) -> Fault | None:
        with lock:
            if request.method == "GET" and left[0] and request.range and request.range[0]:
                left[0] -= 1
                return fault
        return None

    return plan


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault(status=503),
        Fault(status=429),
        Fault(cut=100_000),
        Fault(short=1000),
        Fault(shift=3),
        Fault(cut=1000, stall=0.6),
        Fault(pause=0.6),
    ],
)
def test_what_a_server_does_once_is_overcome(server: WebServer, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STALL", 0.3)
    file = opened(server)
    server.fault = failing(fault)
    assert bytes(file.view(100_000, 2_000_000)) == DATA[100_000:2_100_000]


def test_a_bucket_that_sends_whole_objects_is_refused(server: WebServer) -> None:
    server.fault = failing(Fault(whole=True), 1000)
    assert (
        rule_of_call(lambda: Location.parse("s3://bucket/m").store().open("a.bin").view(100_000, 10))
        == "remote.no-ranges"
    )


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        (Fault(status=500, body=b"SECRET"), "remote.failed"),
        (Fault(status=403, body=b"<Error><Code>ExpiredToken</Code><Key>SECRET</Key></Error>"), "store.denied"),
        (Fault(status=401), "store.denied"),
        (Fault(status=404), "store.missing"),
        (Fault(short=1000), "remote.length"),
        (Fault(shift=3), "remote.length"),
        (Fault(pause=0.3), "remote.stalled"),
        (Fault(whole=True), "remote.no-ranges"),
        (Fault(status=200, headers={"Content-Type": "text/html"}, body=b"<html>log in"), "remote.no-ranges"),
        (Fault(etag='"other"'), "store.changed"),
        (Fault(total=9 << 20), "store.changed"),
        (Fault(status=302, headers={"Location": "file:///etc/passwd"}), "remote.redirect"),
        (Fault(status=302, headers={"Location": "/m/a.bin"}), "remote.redirect"),
    ],
)
def test_what_a_server_does_always_is_one_error_without_secrets(
    server: WebServer, fault: Fault, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALL", 0.1)
    monkeypatch.setattr(client, "TRIES", 2)
    monkeypatch.setattr(client, "RETRIES", 1)
    store, name = Location.parse(f"{server.url.replace('://', '://name:SECRET@')}/m/a.bin?token=SECRET").find()
    file = store.open(name)
    server.fault = failing(fault, 1000)
    with pytest.raises(IngotError) as caught:
        file.view(100_000, 200_000)
    assert caught.value.rule == rule
    told = (
        f"{caught.value} {caught.value!r} {caught.value.__cause__} {store.url} {store.location} {file.name} {store!r}"
    )
    assert "SECRET" not in told
    assert server.log[-1].query == {"token": "SECRET"} or "Location" in fault.headers
    assert server.log[-1].headers["authorization"].startswith("Basic ")


# S3 answers with status 400 to credentials that have expired, with 403 to a clock that is wrong; HEAD is not told why.
@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", "renew"),
        (400, "TokenRefreshRequired", "renew"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "AWS_REGION"),
        (403, "SignatureDoesNotMatch", "credentials"),
    ],
)
def test_a_bucket_that_refuses_the_credentials_is_asked_once_and_the_error_says_what_to_do(
    server: WebServer, status: int, code: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKENOFTEST")
    store = Location.parse("s3://bucket/m").store()
    assert isinstance(store, RemoteStore)
    file, key = store.open("a.bin"), "m/a.bin"
    file.view(1 << 20, 8)  # a seal was looked for
    told = f"<Error><Code>{code}</Code><Message>of TOKENOFTEST</Message><Token-0>TOKENOFTEST</Token-0></Error>".encode()
    server.fault = lambda request: Fault(status=status, body=b"" if request.method == "HEAD" else told)
    for call in (store.list, lambda: store.open("b"), lambda: file.view(2 << 20, 8), lambda: store._client.state(key)):
        server.log.clear()
        with pytest.raises(IngotError) as caught:
            call()
        assert caught.value.rule == "store.denied"
        assert len(server.log) == 1
        assert remedy in str(caught.value) or server.log[0].method == "HEAD"
        assert "OFTEST" not in f"{caught.value} {caught.value!r} {caught.value.__cause__}"


def test_a_bad_request_is_not_taken_for_bad_credentials(server: WebServer) -> None:
    """S3 has ``RequestTimeout`` with status 400, too, after which one tries again."""
    file = Location.parse("s3://bucket/m").store().open("a.bin")
    server.fault = failing(Fault(status=400, body=b"<Error><Code>RequestTimeout</Code></Error>"))
    assert bytes(file.view(1 << 20, 8)) == DATA[1 << 20 :][:8]
    assert rule_of_call(Location.parse("s3://nobucket").store().list) == "store.missing"


def test_a_server_whose_certificate_nobody_vouches_for_is_refused(
    server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    openssl, key, certificate = shutil.which("openssl"), tmp_path / "key.pem", tmp_path / "certificate.pem"
    if openssl is None:
        pytest.skip("needs the program openssl, which makes the certificate")
    make = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    with WebServer({"m/a.bin": DATA}, listing=True, certificate=(certificate, key)) as unknown:
        store = Location.parse(f"{unknown.url.replace('127.0.0.1', 'name:SECRET@localhost')}/m").store()
        for call in (lambda: store.open("a.bin"), store.list):
            with pytest.raises(IngotError) as caught:
                call()
            assert caught.value.rule == "remote.certificate"
            assert "SECRET" not in str(caught.value)
        assert not unknown.log
    secure = server.url.replace("http:", "https:")  # which speaks no TLS at all
    assert rule_of_call(lambda: Location.parse(f"{secure}/m").store().open("a.bin")) == "remote.failed"


@pytest.mark.parametrize("address", ["{url}/m", "s3://bucket/m"])
def test_a_server_that_drips_is_given_up(server: WebServer, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STALL", 0.2)
    monkeypatch.setattr(client, "TRIES", 2)
    store = Location.parse(address.format(url=server.url)).store()
    file = store.open("a.bin")
    server.fault = failing(Fault(drip=0.05), 1000)
    for read in (lambda: file.view(1 << 20, 1 << 20), lambda: file.view(1 << 20, 40)):
        with pytest.raises(IngotError) as caught:
            read()
        assert caught.value.rule == "remote.slow"
        assert pace.VARIABLE in str(caught.value)
    server.fault = lambda request: Fault(drip=0.05)
    assert rule_of_call(lambda: Location.parse(address.format(url=server.url)).store().open("a.bin")) == "remote.slow"
    monkeypatch.setenv(pace.VARIABLE, "off")
    assert bytes(file.view(1 << 20, 8)) == DATA[1 << 20 :][:8]
    monkeypatch.setenv(pace.VARIABLE, "fast")
    assert rule_of_call(lambda: file.view(1 << 20, 8)) == "remote.min-rate"


def test_what_is_interrupted_ends_with_the_next_bytes(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_REQUEST", 1 << 20)
    file, begun = opened(server), threading.Semaphore(0)

    def drip(request: Request) -> Fault | None:
        if request.range and request.range[0] >= 1 << 20:
            begun.release()
            return Fault(drip=0.01)
        return None

    server.fault = drip
    pool = Workers(1)
    future = pool.submit(file.view, 1 << 20, 2 << 20)
    for _ in range(2):
        begun.acquire()
    pool.shutdown(wait=True, cancel_futures=True)  # as Ctrl-C does
    with pytest.raises(Cancelled):
        future.result()


def test_headers_and_pages_that_drip_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "STALL", 0.2)
    monkeypatch.setattr(client, "TRIES", 1)
    answers = [b"HTTP/1.1 206 Partial Content\r\n" + b"X: 1\r\n" * 90, b"HTTP/1.1 200 OK\r\n\r\n<html>" + b"x" * 999]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    for byte in answer:
                        connection.sendall(bytes([byte]))
                        time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        store = Location.parse(f"http://127.0.0.1:{listener.getsockname()[1]}").store()
        assert rule_of_call(lambda: store.open("a")) == "remote.slow"
        assert rule_of_call(store.list) == "remote.slow"


def test_a_signed_address_is_told_to_no_other_server(server: WebServer) -> None:
    """A chain of redirects, of which each address is signed, and which begins only after the file was opened."""
    with WebServer({"m/a.bin": DATA}) as second, WebServer({"m/a.bin": DATA}) as third:
        near = third.url.replace("127.0.0.1", "localhost")
        to_second = Fault(status=302, headers={"Location": f"{second.url}/m/a.bin?sig=SECRET2"})
        to_third = Fault(status=307, headers={"Location": f"{near}/m/a.bin?sig=SECRET3"})
        file = Location.parse(f"{server.url}/m?sig=SECRET1").store().open("a.bin")
        server.fault = lambda request: to_second if request.key == "m/a.bin" else None
        second.fault = lambda request: to_third
        assert bytes(file.view(70_000, 10)) == DATA[70_000:70_010]
        assert second.log
        assert third.log
        for request in (*server.log, *second.log, *third.log):
            assert "referer" not in request.headers
        assert "SECRET1" not in repr((second.log, third.log))
        assert "SECRET2" not in repr(third.log)


def test_connections_are_used_again_and_made_again(server: WebServer) -> None:
    file = opened(server)
    file.view(1 << 20, 8)
    ports = {request.port for request in server.log}
    assert len(ports) == 1
    server.hang_up()
    assert bytes(file.view(1 << 20, 8)) == DATA[1 << 20 :][:8]
    assert {request.port for request in server.log} != ports


def test_the_environments_proxy_is_used(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url.replace("://", "://me:SECRET@"))
    file = Location.parse("http://weights.invalid/m").store().open("a.bin")
    assert bytes(file.view(1 << 20, 8)) == DATA[1 << 20 :][:8]
    assert server.log[-1].headers["host"] == "weights.invalid"
    assert server.log[-1].headers["proxy-authorization"].startswith("Basic ")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert bytes(opened(server).view(1 << 20, 8)) == DATA[1 << 20 :][:8]
    assert "proxy-authorization" not in server.log[-1].headers


def test_a_file_without_bytes_has_no_range(server: WebServer) -> None:
    server.files["m/none"] = b""
    for address in (f"{server.url}/m", "s3://bucket/m"):
        file = Location.parse(address).store().open("none")
        assert (file.size, bytes(file.view(0, 0)), file.changed()) == (0, b"", False)


def test_an_answer_that_is_compressed_is_no_range_of_the_file(server: WebServer) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Range": "bytes 0-9/10"}
    server.fault = lambda request: Fault(status=206, headers=headers, body=b"0123456789")
    assert rule_of_call(lambda: opened(server)) == "remote.no-ranges"


def test_ten_percent_of_requests_failing_are_overcome(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_REQUEST", 1 << 15)
    random, lock = np.random.default_rng(1), threading.Lock()
    faults = [Fault(status=500), Fault(cut=7), Fault(short=1), Fault(status=503)]

    def plan(request: Request) -> Fault | None:
        with lock:
            return faults[int(random.integers(4))] if random.random() < 0.1 else None

    file = opened(server)
    server.fault = plan
    assert bytes(file.view(0, len(DATA))) == DATA
    assert len(server.gets("m/a.bin")) > 90


def test_a_file_that_changes_while_it_is_read_is_refused(server: WebServer) -> None:
    store = Location.parse(f"{server.url}/m").store()
    file = store.open("a.bin")
    data = pickle.dumps(file)
    assert not file.changed()
    server.files["m/a.bin"] = DATA[::-1]
    assert file.changed()
    for read in (
        lambda: file.view(1 << 20, 8),
        lambda: store.open("a.bin").view(1 << 20, 8),
        lambda: pickle.loads(data),
    ):
        with pytest.raises(IngotError) as caught:
            read()
        assert caught.value.rule == "store.changed"
    assert bytes(Location.parse(f"{server.url}/m").store().open("a.bin").view(1 << 20, 8)) == DATA[::-1][1 << 20 :][:8]


def test_few_requests_and_no_byte_twice(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_REQUEST", 1 << 20)
    file = opened(server)
    pickle.loads(pickle.dumps(file)).close()
    server.log.clear()
    server.sent = 0
    file.view(0, source.HEAD)  # came with the opening
    file.view(10, len(DATA) - 10)
    assert server.sent == len(DATA) - source.HEAD
    assert len(server.gets("m/a.bin")) == 3
    assert len(server.log) == 4  # a seal was looked for
    server.log.clear()
    file.ranges([(1 << 20, 5), ((1 << 20) + 100, 5), (2 << 20, 5), (3, 5)])
    assert len(server.log) == 2
    assert all(request.headers["if-match"] for request in server.log)


def test_credentials_do_not_go_to_another_host(server: WebServer) -> None:
    with WebServer({"m/a.bin": DATA}) as other:
        location = f"{other.url.replace('127.0.0.1', 'localhost')}/m/a.bin"
        moved = Fault(status=302, headers={"Location": location})
        server.fault = lambda request: moved if request.key == "m/a.bin" else None
        file = Location.parse(f"{server.url.replace('://', '://name:SECRET@')}/m").store().open("a.bin")
        assert bytes(file.view(70_000, 10)) == DATA[70_000:70_010]
        assert not any("authorization" in request.headers for request in other.log)
    assert all("authorization" in request.headers for request in server.log)


def test_pages_are_looked_for_no_further_than_files(server: WebServer) -> None:
    server.listing, store = True, Location.parse(f"{server.url.replace('://', '://name:SECRET@')}/m").store()
    for location in ("file:///etc/", "/m/", "ftp://127.0.0.1/m/"):
        moved = Fault(status=302, headers={"Location": location})
        server.fault = lambda _, moved=moved: moved
        with pytest.raises(IngotError) as caught:
            store.list()
        assert caught.value.rule == "remote.redirect"
        assert "SECRET" not in f"{caught.value} {caught.value.__cause__}"
    with WebServer({"m/c": b"1"}, listing=True) as other:
        moved = Fault(status=302, headers={"Location": f"{other.url.replace('127.0.0.1', 'localhost')}/m/"})
        server.fault = lambda request: moved
        assert store.list().files == ("c",)
        sent = [{name.lower() for name in request.headers} for request in (server.log[-1], *other.log)]
        assert ["authorization" in names for names in sent] == [True] + [False] * len(other.log)


def test_versions_without_tags_are_told_by_time_and_size(server: WebServer) -> None:
    server.etags = False
    file = opened(server)
    assert bytes(file.view(1 << 20, 4)) == DATA[1 << 20 :][:4]
    server.files["m/a.bin"] = DATA + b"x"
    with pytest.raises(IngotError) as caught:
        file.view(1 << 20, 4)
    assert caught.value.rule == "store.changed"


@pytest.mark.parametrize("key", ["m/../../x", "m//x", "m/./x"])
def test_a_bucket_with_names_that_lead_elsewhere_is_refused(server: WebServer, key: str) -> None:
    server.files[key] = b"x"
    with pytest.raises(IngotError) as caught:
        [
            Location.parse("s3://bucket/m").store().open(name)
            for name in Location.parse("s3://bucket/m").store().list().folders
        ]
    assert caught.value.rule == "store.escape"


def test_pages_link_only_to_what_is_below_them(server: WebServer) -> None:
    links = [
        "a",
        "/m/b",
        "../up",
        "/etc/passwd",
        "//else/m/c",
        "d/e",
        "f/",
        "?sort=1",
        "%2e%2e/",
        "g%2Fh",
        "javascript:x",
    ]
    page = "".join(f'<a href="{link}">x</a>' for link in links).encode()
    server.fault = lambda request: Fault(status=200, headers={"Content-Type": "text/html"}, body=page)
    assert Location.parse(f"{server.url}/m").store().list() == Listing(("a", "b"), ("f",))


def test_a_server_without_pages_says_so(server: WebServer) -> None:
    with pytest.raises(IngotError) as caught:
        Location.parse(f"{server.url}/m/").store().list()
    assert caught.value.rule == "remote.no-listing"
    assert Location.parse(f"{server.url}/m").store().exists("b")
    assert not Location.parse(f"{server.url}/m").store().exists("c")


def test_a_machine_without_credentials_is_told_so(server: WebServer) -> None:
    """Whatever becomes of the request to the cloud's own service for them: the bucket was not even asked."""
    told = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 5 ms - {}"
    store = Location.parse("s3://bucket/m").store()
    assert isinstance(store, RemoteStore)
    for end in ("Server returned non-2xx status code: 403 Forbidden", "operation timed out", "connection refused"):
        assert store._client.explain(ValueError(told.format(end)), "x").rule == "store.denied"


@pytest.mark.parametrize(
    "text", ["https:///x", "https://h/a/../b", "https://h/a//b", "https://h/a%2Fb", "s3://b/x#y", "s3://b/%FF"]
)
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(IngotError) as caught:
        address_of(text)
    assert caught.value.rule == "store.url"


def test_what_is_secret_in_an_address_is_not_shown() -> None:
    for text in ("https://u:SECRET@h/a?x=SECRET", "https://h/a?x=SECRET", "https://u:SECRET@h?SECRET#SECRET"):
        assert "SECRET" not in without_secrets(text)
        assert "SECRET" not in repr(address_of(text.partition("#")[0]))


def test_a_name_with_a_colon_is_a_path(tmp_path, monkeypatch) -> None:
    (tmp_path / "s3:x").write_bytes(b"1")
    monkeypatch.chdir(tmp_path)
    store, name = Location.parse("s3:x").find()
    assert store.head(name, 9) == b"1"


def test_a_forked_process_does_not_wait_forever(server: WebServer) -> None:
    file = opened(server)  # one request is enough: it starts the threads that a child has not
    child = os.fork()
    if child == 0:
        os._exit(0 if rule_of_call(lambda: file.view(1 << 20, 8)) == "remote.forked" else 1)
    assert os.waitpid(child, 0)[1] == 0


def rule_of_call(call) -> str | None:
    try:
        call()
    except BaseException as error:
        return rule_of(error)
    return None


@pytest.fixture
def uploads(server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    server.files.clear()
    return server


def publish(address: str, files: dict[str, bytes], *, overwrite: bool = False, resume: bool = False) -> None:
    directory = address.endswith("/")
    with Location.parse(address).stage(OverwritePolicy(overwrite), directory=directory, resume=resume) as staging:
        for name, data in files.items():
            (staging.files / name).write_bytes(data)
        staging.publish([*files])


def test_files_and_folders_appear_with_the_index_last(uploads: WebServer, tmp_path: Path) -> None:
    publish("s3://bucket/one.zt", {"one.zt": DATA})
    large = bytes(9 << 20)
    shards = {"b-1.safetensors": large, "m.safetensors.index.json": b"{}", "config.json": b"{}", "a.safetensors": b"1"}
    publish("s3://bucket/m/", shards)
    assert uploads.files == {"one.zt": DATA, **{f"m/{name}": data for name, data in shards.items()}}
    put = [request.key.partition("/")[2] for request in uploads.log if request.method == "PUT"]
    order = list(dict.fromkeys(put))
    assert order == ["one.zt", "m/config.json", "m/b-1.safetensors", "m/a.safetensors", "m/m.safetensors.index.json"]
    assert not uploads.objects.uploads
    assert not [*(tmp_path / "cache" / "uploads").iterdir()]


def test_what_is_there_is_replaced_only_when_asked(uploads: WebServer) -> None:
    publish("s3://bucket/m/", {"a.safetensors": b"1", "m.safetensors.index.json": b"old"})
    for address, rule in (
        ("s3://bucket/m/", "target.exists"),
        ("s3://bucket/m/a.safetensors", "target.exists"),
        ("s3://bucket/m/a.safetensors/", "target.not-a-folder"),
        ("s3://bucket/m", "target.not-a-file"),
    ):
        with pytest.raises(IngotError) as caught:
            publish(address, {"a.safetensors": b"2"})
        assert caught.value.rule == rule
    seen = []
    uploads.fault = lambda request: seen.append((request.method, set(uploads.files)))
    publish("s3://bucket/m/", {"b.safetensors": b"2", "m.safetensors.index.json": b"new"}, overwrite=True)
    assert uploads.files == {"m/b.safetensors": b"2", "m/m.safetensors.index.json": b"new"}
    first = next(files for method, files in seen if method == "PUT")
    assert "m/m.safetensors.index.json" not in first


def test_an_upload_that_fails_leaves_nothing_whole_and_is_gone_on_with(uploads: WebServer, tmp_path: Path) -> None:
    files = {"a.safetensors": DATA, "b.safetensors": bytes(9 << 20), "m.safetensors.index.json": b"{}"}
    uploads.fault = lambda request: (
        Fault(status=500) if request.method == "PUT" and "partNumber" in request.query else None
    )
    with pytest.raises(IngotError) as caught:
        publish("s3://bucket/m/", files, resume=True)
    assert caught.value.rule == "remote.failed"
    assert "SECRETOFTEST" not in str(caught.value)
    assert set(uploads.files) == {"m/a.safetensors"}
    assert not uploads.objects.uploads  # obstore has told the server to drop the parts
    uploads.fault = None
    uploads.log.clear()
    with pytest.raises(IngotError) as caught:
        publish("s3://bucket/m/", files)
    assert caught.value.rule == "target.exists"
    publish("s3://bucket/m/", files, resume=True)
    put = {request.key.rpartition("/")[2] for request in uploads.log if request.method == "PUT"}
    assert put == {"b.safetensors", "m.safetensors.index.json"}
    assert {name: uploads.files[f"m/{name}"] for name in files} == files
    assert not [*(tmp_path / "cache" / "uploads").iterdir()]


def test_a_web_server_is_only_read(server: WebServer) -> None:
    for address in (f"{server.url}/new/", "hf://org/name/"):
        with pytest.raises(IngotError) as caught:
            publish(address, {})
        assert caught.value.rule == "store.not-writable"
