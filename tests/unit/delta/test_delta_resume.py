"""Diffs and patches that were interrupted go on, and give the same bytes; their sources are proven whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.open import Source
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import IntegrityError, UsageError


class StopHereError(Exception):
    """Raised from the progress callback where a test wants the run to end."""


def stop_at(name: str) -> Callable[[ProgressEvent], None]:
    """Stop where the last tensor begins to be written."""
    seen: list[str] = []

    def callback(event: ProgressEvent) -> None:
        if event.item == name:
            seen.append(name)
            if len(seen) == 1:
                raise StopHereError

    return callback


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    base = {f"layers.{i}.weight": rng.standard_normal((192, 128)).astype(np.float32) for i in range(5)}
    tuned = {name: array + rng.normal(0, 0.01, array.shape).astype(np.float32) for name, array in base.items()}
    ingot.save(tmp_path / "base.safetensors", base)
    ingot.save(tmp_path / "tuned.safetensors", tuned)
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors"


LAST = "layers.4.weight"


@pytest.mark.parametrize(
    ("strategy", "suffix"), [("exact", ".zt"), ("int4", ".zt"), ("int4", ".wdelta"), ("sparse-patch", ".safetensors")]
)
def test_a_resumed_diff_is_byte_for_byte_that_of_one_run(
    pair: tuple[Path, Path], tmp_path: Path, strategy: str, suffix: str
) -> None:
    whole, out = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
    larger = suffix == ".safetensors"  # every element differs
    first = ingot.diff(*pair, whole, strategy, allow_larger=larger)
    with pytest.raises(StopHereError):
        ingot.diff(*pair, out, strategy, resume=True, progress=stop_at(LAST), allow_larger=larger)
    assert not out.exists()
    report = ingot.diff(*pair, out, strategy, resume=True, allow_larger=larger)
    assert report.resumed == 4
    assert out.read_bytes() == whole.read_bytes()
    assert report.tensors == first.tensors
    assert (report.base_id, report.result_id, report.parent_hash) == (
        first.base_id,
        first.result_id,
        first.parent_hash,
    )


@pytest.mark.parametrize("suffix", [".zt", ".wdelta"])
def test_a_resumed_patch_is_byte_for_byte_that_of_one_run(pair: tuple[Path, Path], tmp_path: Path, suffix: str) -> None:
    delta, out = tmp_path / f"d{suffix}", tmp_path / "out.safetensors"
    ingot.diff(*pair, delta, "int4")
    first = ingot.patch(pair[0], delta, tmp_path / "whole.safetensors")
    with pytest.raises(StopHereError):
        ingot.patch(pair[0], delta, out, resume=True, progress=stop_at(LAST))
    report = ingot.patch(pair[0], delta, out, resume=True)
    assert report.resumed == 4
    assert (report.verified_base, report.result_id) == (True, first.result_id)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_a_resumed_patch_still_proves_its_base(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """What an earlier run noted of its tensors is of that run's base: another one is refused."""
    ingot.diff(*pair, tmp_path / "d.zt", "int4")
    with pytest.raises(StopHereError):
        ingot.patch(pair[0], tmp_path / "d.zt", tmp_path / "out.safetensors", resume=True, progress=stop_at(LAST))
    with pytest.raises(UsageError) as caught:
        ingot.patch(pair[1], tmp_path / "d.zt", tmp_path / "out.safetensors", resume=True)
    assert caught.value.rule == "resume.changed"
    with pytest.raises(IntegrityError) as wrong:
        ingot.patch(pair[1], tmp_path / "d.zt", tmp_path / "out.safetensors")
    assert wrong.value.rule == "delta.base"


def test_a_diff_compares_digests_of_whole_files(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No format that a diff reads has such a digest of its own today: one that does is asked."""
    asked: list[str] = []
    monkeypatch.setattr(Source, "require_whole", lambda source: asked.append(source.entry))
    ingot.diff(*pair, tmp_path / "d.zt")
    assert sorted(asked) == ["base.safetensors", "tuned.safetensors"]
