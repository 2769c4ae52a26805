"""Models of the Hugging Face Hub, from its cache and from afar; the Hub is a server of the tests' own."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.model.store import Listing
from ingot.stores.local import LocalStore
from ingot.stores.location import Location
from ingot.stores.remote.hub import hub_address, hub_page
from tests.support.web import Fault, Request, WebServer

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "a" * 40
WEIGHTS = {"w": np.arange(30_000, dtype=np.float32).reshape(300, 100)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "x.txt").write_text("x")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """The Hub, which sends on to another host for bytes."""
    names = [path.relative_to(model).as_posix() for path in model.rglob("*") if path.is_file()]
    files = {f"org/name/resolve/{COMMIT}/{name}": (model / name).read_bytes() for name in names}
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)

    def about(request: Request) -> tuple[int, dict[str, str], bytes]:
        if request.key.removeprefix("api/models/org/name/revision/") not in ("main", "v/1", COMMIT):
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        data = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        return 200, {"Content-Type": "application/json"}, json.dumps(data).encode()

    with WebServer(files) as far, WebServer() as near:
        near.routes["api/models/"] = about
        near.routes["org/name/resolve/"] = lambda request: (302, {"Location": f"{far.url}/{request.key}"}, b"")
        near.far = far
        monkeypatch.setattr(constants, "ENDPOINT", near.url.replace("127.0.0.1", "localhost"))
        yield near


@pytest.mark.parametrize(
    "text", ["org/name", "hf://org/name", "hf://org/name@v%2F1", "https://huggingface.co/org/name"]
)
def test_a_model_is_read_by_its_name(hub: WebServer, text: str, tmp_path: Path) -> None:
    with ingot.open(text) as checkpoint:
        assert np.array_equal(checkpoint["w"].numpy(), WEIGHTS["w"])
        assert set(checkpoint.companions) == {"config.json", "onnx/x.txt"}
        copy = pickle.loads(pickle.dumps(checkpoint))
        assert np.array_equal(copy["w"][7:9], WEIGHTS["w"][7:9])
    requests = [request for request in hub.log if request.key.startswith("org/")]
    assert all(request.headers["authorization"] == "Bearer hf_SECRET" for request in requests)
    assert not any("authorization" in request.headers for request in hub.far.log)
    assert not (tmp_path / "cache").exists()


def test_a_file_a_folder_and_what_there_is_not(hub: WebServer) -> None:
    store, name = Location.parse("hf://org/name/onnx/x.txt").find()
    assert (name, store.head(name, 9), store.url) == ("x.txt", b"x", f"hf://org/name@{COMMIT}/onnx")
    folder = Location.parse("hf://org/name").store()
    assert folder.list() == Listing(("config.json", "model.safetensors"), ("onnx",))
    assert Location.parse("hf://org/name/onnx").find()[0].list() == Listing(("x.txt",))
    for text in ("hf://org/name/absent", "hf://org/none", "hf://org/name@v2"):
        with pytest.raises(IngotError) as caught:
            Location.parse(text).find()
        assert caught.value.rule == "store.missing"
        assert "SECRET" not in str(caught.value)
    hub.far.log.clear()
    with pytest.raises(IngotError):
        folder.open("absent")
    assert not hub.far.log


def test_what_lies_in_the_cache_is_not_asked_for(
    hub: WebServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "cache" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((model / "config.json").read_bytes())
    assert not isinstance(Location.parse("org/name").find_model()[0], LocalStore)  # its weights are not there
    hub.log.clear()
    assert isinstance(Location.parse("hf://org/name/config.json").find()[0], LocalStore)
    (snapshot / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with ingot.open("org/name") as checkpoint:
        assert checkpoint.location == str(snapshot)
    assert not hub.log


def test_offline_and_closed_models_say_so(hub: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.fault = lambda request: Fault(status=403, headers={"X-Error-Code": "GatedRepo"}, body=b"{}")
    with pytest.raises(IngotError) as caught:
        ingot.open("org/name")
    assert caught.value.rule == "store.denied"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for text in ("org/name", "hf://org/name/config.json"):
        with pytest.raises(IngotError) as caught:
            ingot.open(text)
        assert caught.value.rule == "hub.offline"


def test_a_path_that_is_none_is_no_model(hub: WebServer, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for text in ("models/absent", tmp_path / "org/name", "./org/name", "org/name/x", "name"):
        with pytest.raises(IngotError) as caught:
            ingot.open(text)
        assert caught.value.rule == "open.missing"
    assert not hub.log


@pytest.mark.parametrize(
    ("page", "address"),
    [
        ("https://huggingface.co/org/name", "hf://org/name"),
        ("https://huggingface.co/org/name/tree/main", "hf://org/name"),
        ("https://hf.co/org/name/blob/refs%2Fpr%2F1/a/b.gguf?x=1", "hf://org/name@refs%2Fpr%2F1/a/b.gguf"),
        ("https://huggingface.co/org/name/resolve/v1/b.gguf", "hf://org/name@v1/b.gguf"),
        ("https://huggingface.co/api/models/x/y", ""),
        ("https://example.org/org/name", ""),
    ],
)
def test_pages_of_the_hub_lead_to_their_models(page: str, address: str) -> None:
    assert hub_page(page) == address


@pytest.mark.parametrize("text", ["hf://org", "hf://org/name/../x", "hf://org/name//x", "hf://../name", "hf://o/n@"])
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(IngotError) as caught:
        hub_address(text)
    assert caught.value.rule == "store.url"
