"""``ingot.compare`` and ``ingot.verify``."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.formats.coreml.format import CoremlFormat
from ingot.inspect import compare as module
from ingot.inspect.findings import Finding


def statuses(a: Path, b: Path) -> dict[str, str]:
    return {item.name: item.status for item in ingot.compare(a, b).tensors}


def test_every_status_worst_first(tmp_path: Path) -> None:
    one = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(10, 100)
    a = {
        "same": one,
        "wider": one.astype(np.float16),
        "off": one,
        "far": one,
        "gone": one,
        "shape": one,
        "int": np.arange(3),
    }
    b = {
        "same": one,
        "wider": one.astype(np.float16).astype(np.float32),
        "off": one + np.float32(1e-3),
        "far": -one,
        "new": one,
        "shape": one.T.copy(),
        "int": np.arange(3) + 1,
    }
    ingot.save(tmp_path / "a.zt", a)
    ingot.save(tmp_path / "b.safetensors", b)
    report = ingot.compare(tmp_path / "a.zt", tmp_path / "b.safetensors")
    assert {item.name: item.status for item in report.tensors} == {
        "same": "identical",
        "wider": "equal",
        "off": "differs",
        "far": "differs",
        "int": "differs",
        "gone": "only in A",
        "new": "only in B",
        "shape": "shape differs",
    }
    assert not report.same
    order = [item.name for item in report.tensors]
    assert set(order[:3]) == {"gone", "new", "shape"}
    assert order.index("far") < order.index("off") < order.index("same")


@pytest.mark.parametrize(
    ("name", "original"),
    [
        ("w_palettized", "w"), ("w_palettized_pcs", "w"), ("w_quantized", "w"), ("w_sparsified", "w"),
        ("w_sparsified_palettized", "w"), ("w", "w"), ("_quantized", "_quantized"), ("quantized_w", "quantized_w"),
    ],
)  # fmt: skip
def test_names_before_a_compression(name: str, original: str) -> None:
    assert CoremlFormat().original_name(name) == original


def test_nothing_compared_is_no_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal tensors beside others that have no counterpart say nothing of how far apart the two are."""
    one = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    ingot.save(tmp_path / "a.zt", {"same": one, "left": one})
    ingot.save(tmp_path / "b.zt", {"same": one, "right": one})
    report = ingot.compare(tmp_path / "a.zt", tmp_path / "b.zt")
    assert (report.scored, report.compared, len(report.tensors)) == (False, 1, 3)
    assert run(["compare", str(tmp_path / "a.zt"), str(tmp_path / "b.zt")]) == 1
    assert "SNR inf" not in capsys.readouterr().out
    ingot.save(tmp_path / "c.zt", {"same": one + 1, "right": one})
    assert run(["compare", str(tmp_path / "a.zt"), str(tmp_path / "c.zt")]) == 1
    assert "over the 1 compared" in capsys.readouterr().out


def test_figures_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 700)
    rng = np.random.default_rng(0)
    one = rng.standard_normal((77, 130), np.float32)
    two = (one + 0.01 * rng.standard_normal((77, 130), np.float32)).astype(ml_dtypes.bfloat16)
    ingot.save(tmp_path / "a.zt", {"x": one})
    ingot.save(tmp_path / "b.zt", {"x": two})
    stats = ingot.compare(tmp_path / "a.zt", tmp_path / "b.zt").tensors[0].stats
    assert stats is not None
    r, x = one.astype(np.float64), two.astype(np.float64)
    assert stats.count == r.size
    assert stats.rms == pytest.approx(np.sqrt(np.mean((r - x) ** 2)))
    assert stats.max_abs == np.abs(r - x).max()
    assert stats.snr_db == pytest.approx(10 * np.log10((r**2).sum() / ((r - x) ** 2).sum()))
    assert stats.cosine == pytest.approx((r * x).sum() / np.sqrt((r**2).sum() * (x**2).sum()))


def test_an_error_too_large_for_a_ratio_is_the_worst(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"x": np.array([1e-160, 1.0])})
    ingot.save(tmp_path / "b.zt", {"x": np.array([1e-160, 1e200])})
    stats = ingot.compare(tmp_path / "a.zt", tmp_path / "b.zt").tensors[0].stats
    assert stats is not None
    assert stats.snr_db == -np.inf


def test_nan_equals_itself_and_nothing_else(tmp_path: Path) -> None:
    a = np.array([1.0, np.nan, np.inf], np.float32)
    b = np.array([1.0, 2.0, np.inf], np.float32)
    ingot.save(tmp_path / "a.zt", {"x": a})
    ingot.save(tmp_path / "b.zt", {"x": b})
    assert statuses(tmp_path / "a.zt", tmp_path / "a.zt") == {"x": "identical"}
    report = ingot.compare(tmp_path / "a.zt", tmp_path / "b.zt")
    assert report.tensors[0].status == "differs"
    assert report.tensors[0].stats is not None
    assert report.tensors[0].stats.odd == 1


def test_minus_zero_is_not_called_identical(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"x": np.array([0.0], np.float32)})
    ingot.save(tmp_path / "b.zt", {"x": np.array([-0.0], np.float32)})
    assert statuses(tmp_path / "a.zt", tmp_path / "b.zt") == {"x": "differs"}


def levels(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(item.level, item.rule) for item in findings}


def test_whole_files_have_no_findings(model: Path, tmp_path: Path) -> None:
    for recipe in (None, "int4", "lossless"):
        ingot.convert(model, tmp_path / "out.zt", recipe, overwrite=True)
        assert ingot.verify(tmp_path / "out.zt", strict=True) == []


def test_safetensors_has_no_digests_and_verify_says_so_once(model: Path) -> None:
    assert levels(ingot.verify(model)) == {("note", "format.no-digests")}
    assert len(ingot.verify(model)) == 1


def test_every_flipped_byte_of_a_part_is_found(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"x": np.arange(40, dtype=np.float32)})
    data = (tmp_path / "a.zt").read_bytes()
    for position in range(64, 64 + 160):
        damaged = bytearray(data)
        damaged[position] ^= 4
        (tmp_path / "b.zt").write_bytes(damaged)
        assert ("error", "part.digest-mismatch") in levels(ingot.verify(tmp_path / "b.zt"))


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"x": np.arange(40, dtype=np.float32)})
    data = (tmp_path / "a.zt").read_bytes()
    for length in range(len(data)):
        (tmp_path / "b.zt").write_bytes(data[:length])
        try:
            findings = ingot.verify(tmp_path / "b.zt")
        except ingot.IngotError:
            continue  # too little left to tell that it was a .zt
        assert any(item.level == "error" for item in findings)
