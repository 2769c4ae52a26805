"""Tiers where the disk, the directory or its maker are not what one hopes for."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.ext.squish.tiers.build import build, drop
from ingot.ext.squish.tiers.choose import choose
from ingot.ext.squish.tiers.directory import LOCK
from ingot.ext.squish.tiers.prepare import prepare
from ingot.ext.squish.tiers.status import status

NAMES = {"model.layers.0.mlp.up_proj.weight": (512, 256), "model.norm.weight": (256,)}


@pytest.fixture
def squish(tmp_path):
    rng = np.random.default_rng(2)
    values = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in NAMES.items()}
    ingot.save(tmp_path / "model.safetensors", values)
    ingot.convert(tmp_path / "model.safetensors", tmp_path / "squish", "int8", "npydir")
    return tmp_path / "squish"


def states(folder: Path) -> dict[str, str]:
    return {one.tier: one.state for one in status(folder)}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def decodes(path: Path, squish: Path) -> bool:
    with ingot.open(path) as found, ingot.open(squish) as wanted:
        return all(np.array_equal(found[name].numpy("bf16"), wanted[name].numpy("bf16")) for name in NAMES)


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from ingot.ext.squish.tiers.prepare import prepare
found = prepare(sys.argv[1])
print(found.tier.name, *found.notes)
"""


def test_a_file_that_cannot_grow_leaves_no_tier(squish):
    """The system refuses the tier's file in the middle of writing, as a full disk does."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(squish)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tensors no faster tier was saved")
    assert "store.file-too-large" in done.stdout
    assert states(squish)["bf16"] == "missing"
    assert not [path for path in squish.iterdir() if "partial" in path.name]
    assert prepare(squish).tier.name == "bf16"


def test_a_directory_that_cannot_be_written_to(squish, monkeypatch):
    def denied(*_arguments, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", denied)
    found = prepare(squish)
    assert found.tier.name == "tensors"
    assert any("store.read-only" in note for note in found.notes)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_the_right_to_write(squish):
    build(squish, "finalized")
    before = content(squish)
    squish.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert prepare(squish).tier.name == "finalized"
        assert prepare(squish, "mlx").tier.name == "finalized"
        with pytest.raises(IngotError) as caught:
            build(squish, "bf16")
        assert caught.value.rule == "store.read-only"
    finally:
        squish.chmod(0o755)
    assert content(squish) == before


def test_a_lock_that_was_left_is_free(squish):
    (squish / LOCK).write_text("a process that died")
    assert prepare(squish).tier.name == "bf16"
    assert drop(squish, "bf16")


@pytest.mark.parametrize(
    ("tier", "link"),
    [
        ("bf16", "squish_weights.safetensors"),
        ("bf16", ".squish_ready"),
        ("finalized", "finalized"),
        ("4bit", "squish_4bit"),
        ("3bit", ".squish_3bit_ready"),
    ],
)
@pytest.mark.parametrize("dangling", [True, False])
def test_nothing_is_written_through_a_link(squish, tmp_path, tier, link, dangling):
    """A directory from elsewhere does not choose which files of its user are replaced."""
    victim = tmp_path / "victim"
    folder = not link.startswith(".") and "." not in link
    if not dangling:
        if folder:
            victim.mkdir()
            (victim / "work.txt").write_text("precious")
        else:
            victim.write_text("precious")
    (squish / link).symlink_to(victim)
    with pytest.raises(IngotError) as caught:
        build(squish, tier, ungated=True)
    assert caught.value.rule == "tier.link"
    if dangling:
        assert not victim.exists()
    else:
        assert (victim / "work.txt" if folder else victim).read_text() == "precious"
    if tier == "bf16":
        assert prepare(squish).tier.name == "tensors"
    (squish / link).unlink()
    assert build(squish, tier, ungated=True).built


@pytest.mark.parametrize("name", [LOCK, ".squish_weights.safetensors.ingot-partial"])
def test_nothing_is_staged_or_locked_through_a_link(squish, tmp_path, name):
    victim = tmp_path / "victim"
    if name == LOCK:
        victim.write_text("precious")
    else:
        (victim / "files").mkdir(parents=True)
        (victim / "files" / "work.txt").write_text("precious")
    (squish / name).symlink_to(victim)
    found = prepare(squish)
    assert found.tier.name == "tensors"
    assert found.notes
    assert "precious" in ((victim / "files" / "work.txt") if victim.is_dir() else victim).read_text()


def test_a_tier_behind_a_link_is_read_and_only_the_link_is_dropped(squish, tmp_path):
    """Somebody keeps the tier on another disk."""
    build(squish, "finalized")
    (squish / "finalized").rename(tmp_path / "elsewhere")
    (squish / "finalized").symlink_to(tmp_path / "elsewhere")
    found = choose(squish)
    assert found.tier.name == "finalized"
    assert decodes(found.path, squish)
    drop(squish, "finalized")
    assert not (squish / "finalized").exists()
    assert len(list((tmp_path / "elsewhere").glob("*.npy"))) == len(NAMES)


def test_packed_torch_and_cacheless_loads_build_nothing(squish):
    before = sorted(content(squish))
    assert prepare(squish, keep_packed=True).tier.name == "tensors"
    assert prepare(squish, "mlx", cache=False).tier.name == "tensors"
    assert sorted(content(squish)) == before
    assert prepare(squish, "mlx", keep_packed=True).tier.name == "bf16"
