"""Seals: what is written, what is refused, what is put right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.model.bytesource import MemorySource
from ingot.model.seal import parse_seal, seal_of
from ingot.stores.remote import client
from tests.support.web import Fault, Request, WebServer

WEIGHTS = {
    name: np.random.default_rng(seed).standard_normal((900, 1024)).astype(np.float32) for seed, name in enumerate("ab")
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "m.safetensors", WEIGHTS)
    ingot.seal(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def server(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    pytest.importorskip("obstore")
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    with WebServer({item.name: item.read_bytes() for item in path.parent.iterdir()}) as running:
        yield running


def errors(path: Path) -> set[str]:
    return {item.rule for item in ingot.verify(path) if item.level == "error"}


def test_the_command_names_the_seals(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["seal", str(path)]) == 0
    assert f"{path.name}.ingot.json" in capsys.readouterr().out
    assert run(["seal", str(path), "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["seals"]
    assert made["size"] == path.stat().st_size


def test_a_seal_says_what_the_file_was(path: Path) -> None:
    seal = parse_seal(Path(f"{path}.ingot.json").read_bytes(), "seal")
    with ingot.open(path) as checkpoint:
        assert seal.content_id == content_id(checkpoint)
        assert not checkpoint.companions
    assert {item.rule for item in ingot.verify(path)} == set()  # no note on missing digests
    assert ingot.convert(path.parent, path.parent / "out").companions == []


@pytest.mark.parametrize("place", [8, 1 << 20, -1])
def test_a_changed_byte_is_found_and_put_right(path: Path, tmp_path: Path, place: int) -> None:
    (tmp_path / "right").mkdir()
    right = path.read_bytes()
    (tmp_path / "right" / path.name).write_bytes(right)
    wrong = bytearray(right)
    wrong[place] ^= 1
    for spoilt in (wrong, right[:-5000], right + b"x", None):
        if spoilt is None:
            path.unlink()
        else:
            path.write_bytes(spoilt)
            assert errors(path) & {"seal.digest-mismatch", "seal.size"} or place == 8 or len(spoilt) != len(right)
        if path.exists():
            findings = ingot.verify(path, repair=True, origin=tmp_path / "right" / path.name)
        else:
            findings = ingot.verify(path.parent, repair=True, origin=tmp_path / "right")
        assert [item.rule for item in findings] == ["seal.repaired"]
        assert path.read_bytes() == right


def test_only_bad_chunks_are_fetched(path: Path, server: WebServer) -> None:
    wrong = bytearray(path.read_bytes())
    wrong[3_000_000] ^= 1
    path.write_bytes(wrong)
    server.sent = 0
    assert run(["verify", str(path), "--repair", "--from", f"{server.url}/{path.name}"]) == 0
    assert server.sent < 2_200_000
    assert path.read_bytes() == server.files[path.name]


def test_an_origin_that_is_wrong_too_changes_nothing(path: Path, server: WebServer) -> None:
    wrong = bytearray(path.read_bytes())
    wrong[3_000_000] ^= 1
    path.write_bytes(wrong)
    server.files[path.name] = bytes(wrong)
    with pytest.raises(IngotError) as caught:
        ingot.verify(path, repair=True, origin=f"{server.url}/{path.name}")
    assert caught.value.rule == "seal.digest-mismatch"
    assert path.read_bytes() == wrong
    for options in ({"repair": True}, {"origin": path}):
        with pytest.raises(IngotError) as caught:
            ingot.verify(path, **options)
        assert caught.value.rule == "verify.repair"
    Path(f"{path}.ingot.json").unlink()
    del server.files[f"{path.name}.ingot.json"]
    with pytest.raises(IngotError) as caught:
        ingot.verify(path, repair=True, origin=f"{server.url}/{path.name}")
    assert caught.value.rule == "seal.missing"


def test_a_sealed_file_is_proven_while_it_comes(path: Path, server: WebServer) -> None:
    for place, always in ((3_000_000, False), (3_000_000, True), (100_000, True)):
        left = [1000 if always else 1]

        def flip(request: Request, place: int = place, left: list[int] = left) -> Fault | None:
            first, last = request.range or (0, 0)
            if request.key == path.name and first <= place <= (last or 0) and left[0]:
                left[0] -= 1
                return Fault(flip=place)
            return None

        server.fault = flip
        with ingot.open(f"{server.url}/{path.name}") as checkpoint:
            if always:
                with pytest.raises(IngotError) as caught:
                    checkpoint["a"].numpy()
                assert caught.value.rule == "seal.digest-mismatch"
            else:
                assert np.array_equal(checkpoint["a"].numpy(), WEIGHTS["a"])
                assert np.array_equal(checkpoint["b"][3:5], WEIGHTS["b"][3:5])
                assert np.array_equal(checkpoint["b"].numpy(), WEIGHTS["b"])


def test_a_damaged_header_is_found_with_the_first_data(path: Path, server: WebServer) -> None:
    server.fault = lambda request: Fault(flip=60_000) if request.key == path.name else None
    with ingot.open(f"{server.url}/{path.name}") as checkpoint, pytest.raises(IngotError) as caught:
        checkpoint["b"].numpy()
    assert caught.value.rule == "seal.digest-mismatch"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"size": 7}, "seal.fields"),
        ({"size": "x"}, "seal.fields"),
        ({"chunk_size": 1000}, "seal.fields"),
        ({"chunk_size": 1 << 40}, "seal.fields"),
        ({"chunks": "!"}, "seal.fields"),
        ({"digest": "sha256:0"}, "seal.fields"),
        ({"format": "2"}, "seal.fields"),
    ],
)
def test_seals_that_are_none_are_refused(change: dict[str, object], rule: str) -> None:
    stated = json.loads(seal_of(MemorySource(bytes(3 << 20))).encoded())
    for data in (json.dumps({**stated, **change}).encode(), b"{", b"[]"):
        with pytest.raises(IngotError) as caught:
            parse_seal(data, "seal")
        assert caught.value.rule in (rule, "seal.json")


def test_empty_and_small_files(tmp_path: Path) -> None:
    for data in (b"", b"x", bytes(1 << 20), bytes((1 << 20) + 1)):
        seal = parse_seal(seal_of(MemorySource(data)).encoded(), "seal")
        assert seal.damaged_chunks(MemorySource(data)) == []
        assert seal.damaged_chunks(MemorySource(data[:-1])) == ([] if not data else [(len(data) - 1) >> 20])
