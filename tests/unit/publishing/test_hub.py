"""Pushing to the Hub by huggingface_hub; the Hub is a server of the tests' own."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.inspect.receipt import add_receipt
from ingot.publishing import card
from ingot.publishing.model import parameter_count

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "c" * 40
WEIGHTS = {"model.layers.0.mlp.up_proj.weight": np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)}


class Hub(ThreadingHTTPServer):
    """A model ``org/name`` on the Hub: its files by name; ``status`` is what a commit is answered with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.branches = {"main"}
        self.status = 200
        self.log: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def _answer(self, data: Any, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "RevisionNotFound")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.log.append(self.path)
        path = self.path.partition("?")[0]
        revision = path.rpartition("/")[2]
        if "/tree/" in path:
            self._answer([{"type": "file", "path": name, "size": 1, "oid": "0"} for name in self.server.files])
        elif revision in self.server.branches:
            self._answer({"id": "org/name", "sha": COMMIT, "siblings": []})
        else:
            self._answer({"error": "no such revision"}, 404)

    def do_POST(self) -> None:
        self.server.log.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif "/branch/" in self.path:
            self.server.branches.add(self.path.rpartition("/")[2])
            self._answer({})
        elif "/commit/" in self.path:
            if self.server.status == 200:
                self._commit([json.loads(line) for line in body.splitlines()])
            url = f"http://127.0.0.1:{self.server.server_address[1]}/org/name/commit/{COMMIT}"
            self._answer({"commitOid": COMMIT, "commitUrl": url}, self.server.status)
        else:
            self.server.created.append(json.loads(body))
            self._answer({"url": "http://127.0.0.1/org/name"})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server
        server.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A quantized folder without README.md."""
    ingot.save(tmp_path / "one.safetensors", WEIGHTS)
    ingot.convert(
        tmp_path / "one.safetensors",
        tmp_path / "model",
        recipe="int4",
        format="gptq",
        metadata={"ingot.preset": "int4", "ingot.rounding": "to the nearest"},
    )
    return tmp_path / "model"


def test_one_commit_with_a_card(hub: Hub, model: Path) -> None:
    pushed = ingot.push(model, "hf://org/name", base="org/original")
    names = {path.name for path in model.iterdir()}
    assert set(hub.files) == {*names, "README.md"}
    assert all(hub.files[name] == (model / name).read_bytes() for name in names)
    assert hub.files["README.md"].decode() == pushed.card
    assert pushed.version == COMMIT
    assert hub.created[0]["visibility" if "visibility" in hub.created[0] else "private"] in ("private", True)
    assert not (model / "README.md").exists()


def test_the_card(model: Path) -> None:
    add_receipt(model, {"of": {"kind": "perplexity"}, "figures": {"ppl | x": 7.25}})
    pushed = ingot.push(model, "hf://org/name", base="org/original", dry_run=True)
    front = pushed.card.split("---\n")[1]
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert {name: json.loads(text) for name, text in fields.items()} == {
        "base_model": "org/original",
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["ingot", "safetensors", "quantized", "int4"],
    }
    assert "ingot quantize org/original -o model --preset int4" in pushed.card
    assert "7.25" in pushed.card
    assert r"ppl \| x" in pushed.card
    assert "| Rounding | to the nearest |" in pushed.card


def test_a_dry_run_uses_no_network(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    pushed = ingot.push(model, "hf://org/name", dry_run=True)
    assert len(pushed.listed) == pushed.files
    assert "not stated" in pushed.card
    assert "ingot quantize" not in pushed.card


def test_a_card_of_the_model_or_of_the_hub_stays(hub: Hub, model: Path) -> None:
    hub.files["README.md"] = b"theirs"
    ingot.push(model, "hf://org/name")
    assert hub.files["README.md"] == b"theirs"
    (model / "README.md").write_text("mine")
    assert ingot.push(model, "hf://org/name", overwrite=True).card == ""
    assert hub.files["README.md"] == b"mine"
    replaced = ingot.push(model, "hf://org/name", overwrite=True, card=True)
    assert hub.files["README.md"].decode() == replaced.card != ""
    assert (model / "README.md").read_text() == "mine"


def test_weights_on_the_hub_are_replaced_only_with_permission(hub: Hub, model: Path) -> None:
    hub.files.update({"model-00001-of-00002.safetensors": b"old", "notes.txt": b"x"})
    with pytest.raises(IngotError) as caught:
        ingot.push(model, "hf://org/name")
    assert caught.value.rule == "target.exists"
    assert "model-00001-of-00002.safetensors" in hub.files
    ingot.push(model, "hf://org/name", overwrite=True)
    assert "model-00001-of-00002.safetensors" not in hub.files
    assert hub.files["notes.txt"] == b"x"


def test_a_branch_is_created(hub: Hub, model: Path) -> None:
    ingot.push(model, "hf://org/name@int4")
    assert "int4" in hub.branches
    assert any(line.endswith("/commit/int4") for line in hub.log)


@pytest.mark.parametrize(("status", "rule"), [(403, "store.denied"), (401, "store.denied"), (413, "hub.refused")])
def test_refusals(hub: Hub, model: Path, status: int, rule: str) -> None:
    hub.status = status
    with pytest.raises(IngotError) as caught:
        ingot.push(model, "hf://org/name")
    assert caught.value.rule == rule
    assert "SECRET" not in str(caught.value)


def test_the_hub_offline_and_out_of_reach(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(IngotError) as caught:
        ingot.push(model, "hf://org/name")
    assert caught.value.rule == "hub.refused"
    with pytest.raises(IngotError) as caught:
        ingot.push(model, "hf://org/name/file")
    assert caught.value.rule == "push.address"


def test_texts_of_files_cannot_add_to_the_card(tmp_path: Path) -> None:
    hostile = "x\n---\nlicense: mit\n# [a](b)"
    ingot.save(tmp_path / "m.safetensors", WEIGHTS, metadata={"ingot.preset": hostile, "ingot.rounding": hostile})
    text = ingot.push(tmp_path / "m.safetensors", "hf://org/name", dry_run=True).card
    assert text.count("\n---\n") == 1
    assert "\nlicense" not in text
    assert "[a](b)" not in text.partition("\n---\n")[2]
    assert card._word("a; rm -rf `x`") == "a__rm_-rf__x_"


def test_numbers_of_weights() -> None:
    assert [parameter_count(n) for n in (60_000, 6_738_415_616, 134_515_008, 10**12, 500)] == [
        "60K",
        "6.7B",
        "134.5M",
        "1T",
        "0.5K",
    ]
