"""Receipts: in a ``.zt`` of its own or beside the weights, of what was measured, and never in their way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError
from ingot.inspect.inspect import inspect
from ingot.inspect.receipt import add_receipt, require_writable
from ingot.model.receipt import KEY, MAX_ENTRIES, MAX_RECEIPT, SUFFIX, Receipt, parse_receipt, with_entry
from ingot.stores.local import LocalTarget
from tests.support.web import WebServer

ENTRY = {"of": {"kind": "eval", "text": {"name": "prose.txt"}}, "figures": {"kl": 0.0123}, "gate": []}
OTHER = {"of": {"kind": "eval", "text": {"name": "code.txt"}}, "figures": {"kl": 0.5}}


def saved(path: Path, **more: Any) -> Path:
    arrays = {"a.weight": np.arange(4096, dtype=np.float32).reshape(64, 64), "b": np.ones(3, np.float16)}
    ingot.save(path, arrays, {"about": "text"}, **more)
    return path


@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
def test_a_zt_carries_its_receipt_and_every_byte_of_its_tensors_stays(tmp_path: Path, digest: str | None) -> None:
    path = saved(tmp_path / "model.zt", digest=digest)
    before = path.read_bytes()
    add_receipt(path, ENTRY)
    add_receipt(path, OTHER)
    after = path.read_bytes()
    manifest = len(before) - 16 - int.from_bytes(before[-16:-8], "little")
    assert after[:manifest] == before[:manifest]
    assert [file.name for file in tmp_path.iterdir()] == ["model.zt"]
    assert list(inspect(path).receipt) == [ENTRY, OTHER]
    with ingot.open(path) as checkpoint:
        assert dict(checkpoint.metadata) == {"about": "text"}
        assert checkpoint["a.weight"].numpy()[1, 0] == 64
    assert not any(finding.level == "error" for finding in ingot.verify(path))


def test_other_containers_have_it_beside_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors")
    before = path.read_bytes()
    add_receipt(path, ENTRY)
    assert path.read_bytes() == before
    assert (tmp_path / f"model.safetensors{SUFFIX}").exists()
    assert list(inspect(path).receipt) == [ENTRY]


def test_a_sealed_file_keeps_its_bytes(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.zt")
    ingot.seal(path)
    add_receipt(path, ENTRY)
    assert list(inspect(path).receipt) == [ENTRY]
    assert not any(finding.level == "error" for finding in ingot.verify(path))


@pytest.mark.parametrize("name", ["model.zt", "model.safetensors"])
def test_what_is_made_of_it_has_no_receipt(tmp_path: Path, name: str) -> None:
    (tmp_path / "from").mkdir()
    saved(tmp_path / "from" / name)
    add_receipt(tmp_path / "from", ENTRY)
    assert inspect(tmp_path / "from").receipt
    ingot.convert(tmp_path / "from", tmp_path / "to", "int8")
    ingot.convert(tmp_path / "from", tmp_path / "kept.zt")
    assert not inspect(tmp_path / "to").receipt
    assert not inspect(tmp_path / "kept.zt").receipt
    assert [file.name for file in (tmp_path / "to").iterdir()] == ["model.zt"]


def test_one_of_other_weights_is_told_and_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "model.safetensors")
    add_receipt(path, ENTRY)
    assert run(["inspect", str(path), "--content-id", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["receipt_fits"] is True
    ingot.save(path, {"c": np.zeros(2, np.float32)})
    assert run(["inspect", str(path), "--content-id", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["receipt_fits"] is False
    add_receipt(path, OTHER)
    assert list(inspect(path).receipt) == [OTHER]


def test_the_same_measurement_replaces_the_last_and_the_oldest_go() -> None:
    receipt: Receipt | None = None
    for index in range(MAX_ENTRIES + 2):
        receipt = with_entry(receipt, "blake3:1", {"of": {"index": index}})
    receipt = with_entry(receipt, "blake3:1", {"of": {"index": 5}, "again": True})
    assert len(receipt.entries) == MAX_ENTRIES
    assert receipt.entries[0]["of"] == {"index": 2}
    assert receipt.entries[-1] == {"of": {"index": 5}, "again": True}
    assert parse_receipt(receipt.encoded(), "here") == Receipt(receipt.weights, list(receipt.entries))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda raw: raw.replace(b"0.0123", b"0.0023"), "manifest.digest"),
        (lambda raw: raw[:-9], "receipt.json"),
        (lambda raw: b"[1]", "receipt.json"),
        (lambda raw: raw.replace(b'"of"', b'"on"'), "receipt.fields"),
        (lambda raw: raw.replace(b"receipt-1", b"receipt-2"), "receipt.fields"),
        (lambda raw: raw + b" " * MAX_RECEIPT, "receipt.fields"),
    ],
)
def test_one_that_cannot_be_read_is_told_of_and_the_weights_open(tmp_path: Path, change: Any, rule: str) -> None:
    raw = change(Receipt("blake3:0", [ENTRY]).encoded())
    with pytest.raises(IngotError) as caught:
        parse_receipt(raw, "here")
    assert caught.value.rule == rule
    beside = saved(tmp_path / "model.safetensors")
    (tmp_path / f"model.safetensors{SUFFIX}").write_bytes(raw)
    inside = tmp_path / "model.zt"
    ingot.save(inside, {"a": np.ones(2, np.float32)}, {KEY: raw.decode()})
    for path in (beside, inside):
        found = inspect(path)
        assert not found.receipt
        assert any(note.startswith("receipt:") for note in found.notes)
        assert [(item.level, item.rule) for item in ingot.verify(path) if item.rule == rule] == [("note", rule)]
        add_receipt(path, ENTRY)
        assert list(inspect(path).receipt) == [ENTRY]


@pytest.mark.parametrize("value", [None, 3, "x", [1], {"kind": {}, "text": [], "window": None, "sequences": []}])
def test_a_receipt_may_say_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    path = saved(tmp_path / "model.zt")
    add_receipt(path, {"of": {"text": value, "reference": value}, "figures": value, "gate": value})
    assert run(["inspect", str(path)]) == 0
    assert "receipt" in capsys.readouterr().out


def test_a_disk_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "model.zt")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalTarget, "create", fail)
    with pytest.raises(OSError, match="space"):
        add_receipt(path, ENTRY)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.zt"]


def test_where_nothing_can_be_written_is_known_before_it_is_measured(tmp_path: Path) -> None:
    data = saved(tmp_path / "model.safetensors").read_bytes()
    with WebServer({"model.safetensors": data}) as server, pytest.raises(IngotError) as caught:
        require_writable(f"{server.url}/model.safetensors")
    assert caught.value.rule == "store.not-writable"
