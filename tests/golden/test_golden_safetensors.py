"""The golden corpus of the safetensors format: in step with its script, read or refused as its names say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import safetensors

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.owned_arrays import load_arrays
from ingot.errors import IngotError

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent / "safetensors"
# What the reference implementation lets through although the format's text or plain sense forbids it.
LENIENT = {
    "duplicate-key--metadata", "duplicate-key--tensor", "duplicate-key--tensor-escaped",
    "fields--unknown", "header-start--blank-first", "metadata--null", "shape--65-dimensions",
}  # fmt: skip


def corpus():
    spec = importlib.util.spec_from_file_location("make_safetensors", Path(__file__).parent / "make_safetensors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.corpus()


def cases(part: str) -> list[str]:
    return sorted(path.name for path in (FOLDER / part).iterdir())


def test_the_corpus_is_what_its_script_makes():
    found = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
    assert found == corpus()


def test_there_are_enough():
    assert len(cases("valid")) >= 15
    assert len(cases("reject")) >= 60


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", cases("valid"))
def test_valid_files_open_and_load(name, io):
    with open_checkpoint(FOLDER / "valid" / name, io=io) as checkpoint:
        loadable = [key for key, tensor in checkpoint.items() if not tensor.dtype.startswith(("f4", "f6"))]
        assert len(load_arrays(checkpoint, loadable)) == len(loadable)
        assert all(bytes(tensor.parts["data"].stored()) is not None for tensor in checkpoint.values())


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("name", cases("reject"))
def test_rejected_files_name_their_rule(name, io):
    from ingot.formats.safetensors.format import SafetensorsFormat
    from ingot.stores.local import LocalStore

    rule = "safetensors." + name.partition("--")[0]
    path = FOLDER / "reject" / name
    store, entry = (
        (LocalStore(path, io), "model.safetensors.index.json") if path.is_dir() else (LocalStore(path.parent, io), name)
    )
    with pytest.raises(IngotError) as caught:
        SafetensorsFormat().read(store, entry)
    assert caught.value.rule == rule
    with pytest.raises(IngotError):
        open_checkpoint(path, io=io)


@pytest.mark.parametrize("name", [name for name in cases("valid") if not (FOLDER / "valid" / name).is_dir()])
def test_the_reference_reads_the_valid_files(name):
    safetensors.deserialize((FOLDER / "valid" / name).read_bytes())


@pytest.mark.parametrize("name", [name for name in cases("reject") if not (FOLDER / "reject" / name).is_dir()])
def test_the_reference_refuses_the_others_but_for_known_ones(name):
    data = (FOLDER / "reject" / name).read_bytes()
    if name.removesuffix(".safetensors") in LENIENT:
        safetensors.deserialize(data)
    else:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(data)


def test_every_rule_is_on_the_spec_page_and_has_a_golden_file():
    """Code, page and golden files name the same rules; notes, writer's rules and limits have no file."""
    folder = ROOT / "src" / "ingot" / "formats" / "safetensors"
    used = set(re.findall(r'"(safetensors\.[a-z0-9-]+)"', "".join(path.read_text() for path in folder.glob("*.py"))))
    page = (ROOT / "spec" / "safetensors.md").read_text()
    listed = set(re.findall(r"`(safetensors\.[a-z0-9-]+)`", page))
    assert used == listed
    covered = {"safetensors." + name.partition("--")[0] for name in cases("reject")}
    without_file = set(re.findall(r"`(safetensors\.[a-z0-9-]+)`\s*\|[^|]*\|\s*(?:note|writer|limit)", page))
    assert used - without_file == covered
