"""``--device`` of ``ingot adapter extract``: the singular vectors of large matrices are computed there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.adapters import low_rank_device
from ingot.adapters.low_rank_fit import Change
from ingot.cli.main import run
from ingot.errors import ResourceError
from tests.support import model_folder
from tests.support.fake_device import NAME, fake_device


def matrix(rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    random = np.random.default_rng(4)
    leading = random.normal(size=(230, rank)) * 4 @ random.normal(size=(rank, 210))
    return (leading + random.normal(size=(230, 210))).astype(np.float32)


@pytest.mark.parametrize("device", ["cpu", NAME])
def test_factors_on_a_device_leave_the_error_of_the_best(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = matrix(8)
    best = np.linalg.svd(values, compute_uv=False)
    expected = np.linalg.norm(best[8:]) / np.linalg.norm(best)
    with fake_device(monkeypatch) as mode:
        factors = Change("w", values, None, torch.device(device)).with_rank(8, "f32")
    assert (mode.operations > 8) == (device == NAME)
    assert factors.error == pytest.approx(expected, rel=1e-3)
    assert factors.error == pytest.approx(np.linalg.norm(values - factors.b @ factors.a) / np.linalg.norm(values))


def test_a_change_of_less_rank_than_requested_keeps_its_rank() -> None:
    random = np.random.default_rng(1)
    values = (random.normal(size=(230, 3)) @ random.normal(size=(3, 210))).astype(np.float32)
    factors = Change("w", values, None, torch.device("cpu")).with_rank(16, "f32")
    assert factors.rank == 3
    assert factors.error < 1e-5


def test_no_memory_on_the_device_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object, device: object) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(torch.linalg, "qr", lambda _: fails(_, None))
    with pytest.raises(ResourceError) as caught:
        low_rank_device.span_on_device(matrix(2), np.ones((210, 4), np.float32), 1, torch.device("cpu"))
    assert caught.value.rule == "device.memory"
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = model_folder.write(tmp_path / "base")
    command = ["adapter", "extract", str(base), str(base), "-o", str(tmp_path / "out"), "--device", "xpu:3"]
    assert run(command) == 2
    assert "[model.device]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
