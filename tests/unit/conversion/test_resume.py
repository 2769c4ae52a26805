"""Interruptions: Ctrl-C, kill -9, a full disk, a changed source; and that a resumed run gives the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import ResourceError, UsageError


class StopHereError(Exception):
    """Raised from the progress callback where a test wants the run to end."""


def stop_after(fraction: float, error: type[BaseException] = StopHereError) -> Callable[[ProgressEvent], None]:
    def callback(event: ProgressEvent) -> None:
        if event.processed > fraction * event.total:
            raise error

    return callback


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("recipe", [None, "int4", "lossless"])
def test_resumed_output_is_byte_for_byte_that_of_one_run(
    model: Path, tmp_path: Path, recipe: str | None, fraction: float, strays: Callable[[], list[str]]
) -> None:
    ingot.convert(model, tmp_path / "whole.zt", recipe)
    with pytest.raises(StopHereError):
        ingot.convert(model, tmp_path / "out.zt", recipe, resume=True, progress=stop_after(fraction))
    assert not (tmp_path / "out.zt").exists()
    report = ingot.convert(model, tmp_path / "out.zt", recipe, resume=True)
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "whole.zt").read_bytes()
    assert (report.resumed > 0) == (fraction > 0)
    assert len(report.tensors) == len({item.name for item in report.tensors})
    assert strays() == []


@pytest.mark.parametrize("suffix", [".zt", ".squizd"])
def test_what_scans_learnt_before_the_interruption_is_kept(tmp_path: Path, suffix: str) -> None:
    """The window of exponents of tca_tbe is in the parameters, and only a fit pass tells it."""
    rng = np.random.default_rng(6)
    weights = {f"layer.{i}": rng.normal(0, 4.0**-i, (128, 192)).astype(ml_dtypes.bfloat16) for i in range(6)}
    ingot.save(tmp_path / "source.safetensors", weights)
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    ingot.convert(tmp_path / "source.safetensors", whole, "tca-tbe")
    with pytest.raises(StopHereError):
        ingot.convert(tmp_path / "source.safetensors", out, "tca-tbe", resume=True, progress=stop_after(0.5))
    report = ingot.convert(tmp_path / "source.safetensors", out, "tca-tbe", resume=True)
    assert report.resumed > 0
    assert out.read_bytes() == whole.read_bytes()
    with ingot.open(out) as checkpoint:
        assert len({tensor.params["start"] for tensor in checkpoint.values()}) == 6
        for name, array in weights.items():
            assert checkpoint[name].numpy().tobytes() == array.tobytes()


def test_resumed_shards(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "whole", format="safetensors", max_shard=60_000)
    with pytest.raises(StopHereError):
        ingot.convert(
            model, tmp_path / "out", format="safetensors", max_shard=60_000, resume=True, progress=stop_after(0.6)
        )
    report = ingot.convert(model, tmp_path / "out", format="safetensors", max_shard=60_000, resume=True)
    assert report.resumed > 0
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_interrupt_without_resume_leaves_nothing(model: Path, tmp_path: Path, strays: Callable[[], list[str]]) -> None:
    with pytest.raises(KeyboardInterrupt):
        ingot.convert(model, tmp_path / "out.zt", "int4", progress=stop_after(0.5, KeyboardInterrupt))
    assert not (tmp_path / "out.zt").exists()
    assert strays() == []


def test_damaged_partial_output_is_done_again(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "whole.zt", "int4")
    with pytest.raises(StopHereError):
        ingot.convert(model, tmp_path / "out.zt", "int4", resume=True, progress=stop_after(0.8))
    partial = tmp_path / ".out.zt.ingot-partial" / "files" / "out.zt"
    data = bytearray(partial.read_bytes())
    data[20_000] ^= 1
    partial.write_bytes(data)
    ingot.convert(model, tmp_path / "out.zt", "int4", resume=True)
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "whole.zt").read_bytes()


@pytest.mark.parametrize("change", ["touch", "content", "recipe", "digest"])
def test_a_changed_source_or_recipe_is_refused(model: Path, tmp_path: Path, change: str) -> None:
    with pytest.raises(StopHereError):
        ingot.convert(model, tmp_path / "out.zt", "int4", resume=True, progress=stop_after(0.5))
    recipe, digest, source = "int4", "crc32c", model / "model.safetensors"
    if change == "touch":
        os.utime(source, ns=(1, 1))
    elif change == "content":
        with ingot.open(source) as checkpoint:
            weights = {name: np.array(tensor.numpy()) for name, tensor in checkpoint.items()}
        weights["model.norm.weight"] *= 2
        ingot.save(source, weights)
    elif change == "recipe":
        recipe = "int8"
    else:
        digest = "sha256"
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "out.zt", recipe, resume=True, digest=digest)
    assert caught.value.rule == "resume.changed"
    ingot.convert(model, tmp_path / "out.zt", recipe, digest=digest)


def test_a_recipe_file_that_changed_is_refused_though_no_size_did(model: Path, tmp_path: Path) -> None:
    """Quantizers are not written in the artifact: only the recipe tells absmax from a search."""
    recipe = tmp_path / "mine.toml"
    text = '[[rules]]\nroles = ["attention", "mlp"]\ncodec = "affine"\noptions = {{ quantizer = "{}" }}\n'
    recipe.write_text(text.format("mse"))
    with pytest.raises(StopHereError):
        ingot.convert(model, tmp_path / "out.zt", str(recipe), resume=True, progress=stop_after(0.5))
    recipe.write_text(text.format("absmax"))
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "out.zt", str(recipe), resume=True)
    assert caught.value.rule == "resume.changed"


@pytest.mark.slow
def test_kill_and_resume_from_the_shell(tmp_path: Path, strays: Callable[[], list[str]]) -> None:
    """SIGKILL at several moments; whatever is left, the resumed run ends with the same bytes."""
    rng = np.random.default_rng(1)
    weights = {f"model.layers.{i}.mlp.up_proj.weight": rng.standard_normal((1024, 1024), np.float32) for i in range(24)}
    ingot.save(tmp_path / "source.safetensors", weights)
    ingot.convert(tmp_path / "source.safetensors", tmp_path / "whole.zt", "int4")
    command = [
        sys.executable,
        "-m",
        "ingot.cli.main",
        "convert",
        "source.safetensors",
        "out.zt",
        "--recipe",
        "int4",
        "--threads",
        "1",
    ]
    out, whole = tmp_path / "out.zt", (tmp_path / "whole.zt").read_bytes()
    for delay in (0.4, 0.5, 0.6):
        process = subprocess.Popen([*command, "--resume", "-q"], cwd=tmp_path)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():  # the process had ended before it was killed
            assert out.read_bytes() == whole
            out.unlink()
    subprocess.run([*command, "--resume", "-q"], cwd=tmp_path, check=True)
    assert out.read_bytes() == whole
    assert strays() == []


def test_full_disk_is_one_clear_error(
    model: Path, tmp_path: Path, strays: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.pwrite, 0

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 50_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ResourceError) as caught:
        ingot.convert(model, tmp_path / "out.zt", "int4")
    assert caught.value.rule == "store.disk-full"
    monkeypatch.undo()
    assert not (tmp_path / "out.zt").exists()
    assert strays() == []


def test_two_conversions_to_one_target_do_not_mix(model: Path, tmp_path: Path) -> None:
    def start_another(event: ProgressEvent) -> None:
        if event.processed > event.total / 2:
            ingot.convert(model, tmp_path / "out.zt", "int8")

    with pytest.raises(ResourceError) as caught:
        ingot.convert(model, tmp_path / "out.zt", "int4", progress=start_another)
    assert caught.value.rule == "store.locked"


def test_resuming_after_the_companions_were_copied(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")

    def killed(*_: object) -> None:
        raise StopHereError

    with monkeypatch.context() as patched:
        patched.setattr("ingot.core.files.atomic.Staging.publish", killed)
        with pytest.raises(StopHereError):
            ingot.convert(model, tmp_path / "out", "int8", resume=True)
    report = ingot.convert(model, tmp_path / "out", "int8", resume=True)
    assert report.resumed == len(report.tensors)
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
