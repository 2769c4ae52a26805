"""What commands and functions may replace, names that they refuse, and disks that are too small."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.core.files import atomic as disk
from ingot.delta.diff import diff
from ingot.delta.patch import patch
from ingot.errors import IngotError, ResourceError, UsageError
from ingot.ext.squish.tiers.directory import LOCK
from ingot.numpy import save_file


def rule_of(call: Callable[[], object]) -> str | None:
    try:
        call()
    except IngotError as error:
        return error.rule
    return None


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def written(model: Path, tmp_path: Path) -> Path:
    ingot.convert(model, tmp_path / "out")
    return tmp_path / "out"


def test_a_file_that_is_there_is_replaced_on_demand_only(model: Path, tmp_path: Path) -> None:
    out, tuned = tmp_path / "out.zt", tmp_path / "tuned.safetensors"
    with ingot.open(model) as base:
        ingot.save(tuned, {name: item.numpy("f32") + np.float32(1) for name, item in base.items()})
    base = tmp_path / "base.safetensors"
    ingot.convert(model, base, "decompress")
    ingot.convert(tuned, tmp_path / "tuned.zt")
    calls: list[Callable[..., object]] = [
        lambda **options: ingot.convert(model, out, **options),
        lambda **options: diff(tuned, tmp_path / "tuned.zt", out, **options),
        lambda **options: patch(tuned, tmp_path / "delta.zt", out, **options),
    ]
    diff(tuned, tmp_path / "tuned.zt", tmp_path / "delta.zt")
    for call in calls:
        out.write_bytes(b"old")
        assert rule_of(call) == "target.exists"
        assert out.read_bytes() == b"old"
        call(overwrite=True)
        assert out.read_bytes() != b"old"


def test_saving_replaces_a_file_as_safetensors_does(tmp_path: Path) -> None:
    for save in (ingot.save, lambda path, tensors: save_file(tensors, path)):
        for value in (1, 2):
            save(tmp_path / "a.safetensors", {"t": np.full(3, value, np.float32)})
        with ingot.open(tmp_path / "a.safetensors") as found:
            assert found["t"].numpy().tolist() == [2, 2, 2]


def test_a_checkpoint_is_replaced(model: Path, written: Path) -> None:
    (written / "1_Pooling").mkdir()
    (written / "1_Pooling" / "config.json").write_text("{}")
    assert rule_of(lambda: ingot.convert(model, written)) == "target.exists"
    ingot.convert(model, written, overwrite=True)
    assert not (written / "1_Pooling").exists()


@pytest.mark.parametrize("format", ["npydir", "npy", "mlx", "safetensors"])
def test_every_kind_of_folder_is_known_again(model: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    recipe = "mlx-4bit" if format == "mlx" else "squish-int8" if format == "npydir" else "f16"
    for overwrite in (False, True):
        ingot.convert(model, out, recipe, format, overwrite=overwrite, allow_requantize=True)
    (out / LOCK).write_bytes(b"")
    ingot.convert(model, out, recipe, format, overwrite=True)


@pytest.mark.parametrize(
    "name", [".git/HEAD", "train.py", "src/main/notes.txt", "pytorch_model.bin", "data.csv", ".env", "empty/"]
)
def test_a_folder_with_anything_else_is_not_replaced(model: Path, written: Path, name: str) -> None:
    place = written / name
    if name.endswith("/"):
        place.mkdir()
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"work of weeks")
    before = files_of(written)
    assert rule_of(lambda: ingot.convert(model, written, overwrite=True)) == "target.foreign"
    assert rule_of(lambda: ingot.save(written, {"t": np.ones(3)}, overwrite=True)) == "target.foreign"
    assert files_of(written) == before
    assert place.exists()


def test_a_program_that_comes_along_may_be_replaced(model: Path, written: Path) -> None:
    for folder in (model, written):
        (folder / "modeling.py").write_text("pass")
    ingot.convert(model, written, overwrite=True)
    assert (written / "modeling.py").exists()


def test_a_folder_of_texts_is_no_checkpoint(model: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "README.md").write_text("mine")
    assert rule_of(lambda: ingot.convert(model, tmp_path / "notes", overwrite=True)) == "target.foreign"
    assert (tmp_path / "notes" / "README.md").exists()


@pytest.mark.parametrize("name", ["o.tflite", "o.xyz", "o.safetensor", "model.bin"])
@pytest.mark.parametrize("format", [None, "zt"])
def test_a_suffix_of_another_program_is_refused(model: Path, tmp_path: Path, name: str, format: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / name, format=format)
    assert caught.value.rule == "save.suffix"
    assert ("'.safetensors'" in str(caught.value)) == (name == "o.safetensor")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-0.5B", "o.tflite/", "plain"])
def test_names_of_folders_are_taken(model: Path, tmp_path: Path, name: str) -> None:
    ingot.convert(model, f"{tmp_path}/{name}")
    assert (tmp_path / name).is_dir()


class TestRoom:
    @pytest.fixture
    def nearly_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "free_disk", lambda folder: 50_000)

    def test_an_artifact_that_does_not_fit_is_not_begun(
        self, model: Path, tmp_path: Path, nearly_full: None, strays: Callable[[], list[str]]
    ) -> None:
        for call in (
            lambda: ingot.convert(model, tmp_path / "a.zt", "int8"),
            lambda: ingot.convert(model, tmp_path / "a.zt", "int8", resume=True),
            lambda: ingot.save(tmp_path / "a.zt", {"t": np.ones(20_000, np.float32)}),
        ):
            with pytest.raises(ResourceError) as caught:
                call()
            assert caught.value.rule == "disk.guard"
            assert not (tmp_path / "a.zt").exists()

    def test_a_patch_that_does_not_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("a", 1), ("b", 2)):
            ingot.save(tmp_path / f"{name}.zt", {"t": np.full((200, 200), value, np.float32)})
        diff(tmp_path / "a.zt", tmp_path / "b.zt", tmp_path / "d.zt")
        monkeypatch.setattr(disk, "free_disk", lambda folder: 50_000)
        assert rule_of(lambda: patch(tmp_path / "a.zt", tmp_path / "d.zt", tmp_path / "c.zt")) == "disk.guard"
        quantized = {"strategy": "int8", "overwrite": True}
        monkeypatch.setattr(disk, "free_disk", lambda folder: 5_000)
        assert (
            rule_of(lambda: diff(tmp_path / "a.zt", tmp_path / "b.zt", tmp_path / "d.zt", **quantized)) == "disk.guard"
        )

    def test_what_is_written_already_is_not_asked_for_again(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan_size = ingot.convert(model, tmp_path / "whole.zt").size

        def stop(event: object) -> None:
            if event.processed > 0.8 * event.total:  # type: ignore[attr-defined]
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            ingot.convert(model, tmp_path / "a.zt", resume=True, progress=stop, threads=1)
        monkeypatch.setattr(disk, "free_disk", lambda folder: plan_size // 2)
        ingot.convert(model, tmp_path / "a.zt", resume=True)
        assert (tmp_path / "a.zt").read_bytes() == (tmp_path / "whole.zt").read_bytes()

    def test_a_disk_is_asked(self, tmp_path: Path) -> None:
        found = os.statvfs(tmp_path)
        assert disk.free_disk(tmp_path) == pytest.approx(found.f_bavail * found.f_frsize, rel=0.5)
        assert disk.free_disk(tmp_path / "missing") is None


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ingot.conversion.run.convert", interrupted)
    arguments = ["convert", str(model), str(tmp_path / "o ut.zt"), "--recipe", "int4", "--resume"]
    assert run(arguments) == 130
    told = " ".join(capsys.readouterr().err.split())
    assert shlex.join(["ingot", *arguments]) in told
    assert run(arguments[:-1]) == 130
    assert "ingot convert" not in capsys.readouterr().err
