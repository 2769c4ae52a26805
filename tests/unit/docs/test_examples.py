"""The examples run, on the demo's model, and say what they are there to show."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import ingot

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run_example(name: str) -> None:
    """Run it as a user does, and print what it printed.

    One with a ceiling of memory runs in a process of its own: this one holds what all tests left.
    """
    if "max_ram" not in (EXAMPLES / name).read_text("utf-8"):
        with patch.object(sys, "argv", [name]):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return
    done = subprocess.run([sys.executable, "-W", "error", EXAMPLES / name], check=False, capture_output=True, text=True)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    assert done.returncode == 0, done.stderr


@pytest.fixture(autouse=True)
def _in_a_folder_after_the_demo(after_demo: Path) -> None:
    pass


def test_convert_folder(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("convert_folder.py")
    printed = capsys.readouterr()
    assert "100% of" in printed.err
    assert "28 encoded" in printed.out
    assert printed.out.count("SNR") == 3
    assert Path("converted/config.json").is_file()
    assert not [finding for finding in ingot.verify("converted") if finding.level == "error"]


def test_load_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("load_by_layer.py")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[1:]] == [
        "outside the layers",
        *(f"layer {index}" for index in range(4)),
        "outside the layers",
    ]


def test_in_place_of_safetensors(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("in_place_of_safetensors.py")
    assert "the same bits" in capsys.readouterr().out
    assert ingot.compare("ingot-demo/original", "copy.zt").same


def test_write_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("write_a_recipe.py")
    printed = capsys.readouterr().out
    assert "16 tensors by 'attention, 8 bits per row'" in printed
    assert "6 tensors by 'feed-forward of the inner layers, 4 bits'" in printed
    assert not Path("not-written.zt").exists()
    size = int(printed.splitlines()[-1].partition(" ")[0].replace(",", ""))
    report = ingot.convert("ingot-demo/original", "written.zt", recipe="attention-8.toml")
    assert report.size == size


def test_squizd_with_draft_head(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("squizd_with_draft_head.py")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines[1:5]] == [
        *("Ingot on this machine", "this machine", "apple-m1", "apple-m4")
    ]
    assert {line[23:33].strip() for line in lines[1:-1]} <= {"INT4", "NumPy"}
    assert "the same bits" in lines[-1]
    with ingot.open("with-draft.squizd") as ckpt:
        assert len(ckpt.attachments.draft or ()) == 15
    assert not [finding for finding in ingot.verify("with-draft.squizd", strict=True) if finding.level == "error"]


def test_swap_fine_tunes(capsys: pytest.CaptureFixture[str]) -> None:
    run_example("swap_fine_tunes.py")
    printed = capsys.readouterr().out
    assert printed.count("the same bits") == 4
    assert "DIFFERENT" not in printed
    assert Path("coder-delta.zt").stat().st_size < 100_000


def test_squish_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    run_example("squish_tiers.py")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if "bytes mapped" in line] == [
        "tensors",
        "bf16",
        "bf16",
        "tensors",
    ]
    assert "was built" in lines[3]
    assert "was built" not in lines[5]
    assert {"tier bf16: complete", "tier 4bit: missing"} <= set(lines)


def test_every_example_is_listed_and_tested() -> None:
    index = (EXAMPLES / "README.md").read_text("utf-8")
    tested = Path(__file__).read_text("utf-8")
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) == 7
    for name in scripts:
        assert f"({name})" in index
        assert f'run_example("{name}")' in tested
