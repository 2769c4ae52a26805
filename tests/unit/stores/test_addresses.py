"""Checkpoints by address: file: and memory:, with what lies beside the weights."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.draft_head import config_of_draft
from ingot.artifacts.open import open_source
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import UnsupportedError, UsageError
from ingot.ext.squish.tiers.build import build
from ingot.inspect.inspect import inspect
from ingot.model.store import Store
from ingot.runtime.loading.model_source import model_folder, resolve
from ingot.stores.local_scheme import LocalScheme
from ingot.stores.location import Location
from ingot.stores.memory import shared_files
from ingot.stores.scheme import STORES, Scheme
from tests.support.drafts import draft_head

WEIGHTS = {"model.layers.0.mlp.up_proj.weight": np.arange(64, dtype=np.float32).reshape(8, 8)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def in_memory(model: Path) -> str:
    files = shared_files("test_addresses")
    files.clear()
    files.update({path.relative_to(model).as_posix(): bytearray(path.read_bytes()) for path in model.rglob("*.*")})
    return "memory:test_addresses"


def test_a_folder_and_a_file_open_by_address(model: Path, in_memory: str) -> None:
    for address in (model.as_uri(), in_memory, f"{model.as_uri()}/model.safetensors", f"{in_memory}/model.safetensors"):
        with ingot.open(address) as checkpoint:
            (name,) = checkpoint
            assert np.array_equal(checkpoint[name].numpy(), WEIGHTS[name])
            folder = not address.endswith(".safetensors")
            assert set(checkpoint.companions) == ({"config.json", "1_Pooling/config.json"} if folder else set())


def test_a_source_names_its_store_and_its_address(model: Path, in_memory: str) -> None:
    for path in (model, model / "model.safetensors", in_memory, f"{in_memory}/model.safetensors"):
        source = open_source(Location.parse(path))
        again = open_source(Location.parse(source.url))
        assert (again.url, again.name, again.identity()) == (source.url, source.name, source.identity())
        assert again.store.open(again.name or "model.safetensors").size == again.stored()
        again.close()
        source.close()


def test_what_lies_in_memory_is_converted_with_its_companions(in_memory: str, tmp_path: Path) -> None:
    report = ingot.convert(in_memory, tmp_path / "out", "f16", format="safetensors")
    assert set(report.companions) == {"config.json", "1_Pooling/config.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "float16"}
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    assert not [finding for finding in ingot.verify(tmp_path / "out") if finding.level == "error"]
    assert inspect(in_memory).file_size == (tmp_path / "a model" / "model.safetensors").stat().st_size


def test_a_copy_finds_its_files_by_address(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(model.parent)
    with ingot.open(model.name) as checkpoint:
        data = pickle.dumps(checkpoint)
    monkeypatch.chdir(model)
    with pickle.loads(data) as again:
        assert set(again.companions) == {"config.json", "1_Pooling/config.json"}


def test_the_source_is_known_by_its_address(model: Path) -> None:
    for target in (model, model / "model.safetensors", model.parent):
        with pytest.raises(UsageError) as caught:
            ingot.convert(model.as_uri(), target, overwrite=True)
        assert caught.value.rule in ("convert.same-path", "target.foreign")
    assert (model / "model.safetensors").exists()


def test_who_needs_a_local_disk_says_so(model: Path, in_memory: str) -> None:
    for path in (model.as_uri(), model / "model.safetensors"):
        assert model_folder(Location.parse(path)).local_path() == model
    shared_files("test_addresses").update({"manifest.json": bytearray(b"{}"), "tensors/a.npy": bytearray()})
    with pytest.raises(UnsupportedError) as caught:
        build(in_memory, "bf16")
    assert caught.value.rule == "store.not-local"


def test_what_lies_beside_the_weights_is_read_from_their_store(in_memory: str, tmp_path: Path) -> None:
    """A recipe, and the config.json of a draft head."""
    files, head = shared_files("test_addresses"), tmp_path / "head"
    ingot.save(head, draft_head())
    files["half.toml"] = bytearray(b'[[rules]]\ncodec = "dense"\noptions = { dtype = "f16" }\n')
    files["head/config.json"] = bytearray(b'{"norm": "before"}')
    files.update({f"head/{path.name}": bytearray(path.read_bytes()) for path in head.iterdir()})
    report = ingot.convert(
        f"{in_memory}/model.safetensors", tmp_path / "a.squizd", f"{in_memory}/half.toml", draft=f"{in_memory}/head"
    )
    assert report.recipe == "half"
    with ingot.open(tmp_path / "a.squizd") as checkpoint:
        assert config_of_draft(checkpoint) == {"norm": "before"}


@pytest.mark.parametrize(("address", "rule"), [("memory:nobody", "open.missing"), ("ftp://a/b", "open.url")])
def test_addresses_without_a_checkpoint_are_refused(address: str, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.open(address)
    assert caught.value.rule == rule


def test_a_report_names_a_local_destination_by_its_path(model: Path, tmp_path: Path) -> None:
    for target in (tmp_path / "one.zt", tmp_path / "a folder"):
        assert ingot.convert(model, target.as_uri()).destination == str(target)


def test_results_appear_in_memory_whole(model: Path, in_memory: str, tmp_path: Path) -> None:
    files = shared_files("test_addresses")
    for target in (f"{in_memory}/out", f"{in_memory}/one.zt"):
        report = ingot.convert(model, target)
        written = files["one.zt" if target.endswith(".zt") else "out/model.zt"]
        assert (report.destination, report.size) == (target, len(written))
        assert ingot.compare(model, target).same
        with pytest.raises(UsageError) as caught:
            ingot.convert(model, target)
        assert caught.value.rule == "target.exists"
    files["out/stray"] = bytearray(b"x")
    ingot.convert(model, f"{in_memory}/out", "f16", overwrite=True)
    out = sorted(key for key in files if key.startswith("out/"))
    assert out == ["out/1_Pooling/config.json", "out/config.json", "out/model.zt"]
    assert ingot.convert(model, model.as_uri() + "/../other%20one", format="zt").files == ["model.zt"]
    assert ingot.compare(model, tmp_path / "other one").same


def test_a_failed_conversion_leaves_nothing_in_memory(
    model: Path, in_memory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = dict(shared_files("test_addresses"))

    def stop(event: ProgressEvent) -> None:
        raise InterruptedError

    for resume in (False, True):
        with pytest.raises(InterruptedError):
            ingot.convert(model, f"{in_memory}/out", "f16", resume=resume, progress=stop)
        assert shared_files("test_addresses") == before
        assert len([*scratch.iterdir()]) == resume
    ingot.convert(model, f"{in_memory}/out", "f16", resume=True)
    new = shared_files("test_addresses").keys() - before
    assert new == {"out/1_Pooling/config.json", "out/config.json", "out/model.zt"}
    assert not [*scratch.iterdir()]


def test_the_destination_in_memory_is_not_the_source(in_memory: str) -> None:
    for target in (in_memory, f"{in_memory}/model.safetensors"):
        with pytest.raises(UsageError) as caught:
            ingot.convert(in_memory, target, overwrite=True)
        assert caught.value.rule == "convert.same-path"


def test_a_store_that_is_only_read_is_no_destination(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(Scheme):
        def store(self, text: str, io: str) -> Store:
            raise NotImplementedError

        def locate(self, text: str, io: str) -> tuple[Store, str]:
            raise UsageError("nothing there", rule="store.missing")

    monkeypatch.setitem(STORES._loaded, "memory", ReadOnly())
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, "memory:x/out")
    assert caught.value.rule == "store.not-writable"


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_model_is_located_once(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is a request where models lie elsewhere, and may find another version."""
    located: list[str] = []
    locate = LocalScheme.locate

    def counted(self: LocalScheme, text: str, io: str) -> tuple[Store, str]:
        located.append(text)
        return locate(self, text, io)

    monkeypatch.setattr(LocalScheme, "locate", counted)
    source = resolve(model / name)
    with source.checkpoint as checkpoint:
        assert list(checkpoint) == list(WEIGHTS)
    assert located == [str(model / name)]
    assert source.folder.exists("config.json")
