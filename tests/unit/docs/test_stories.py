"""The page of stories, done: what its commands print, by the programs that are installed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ingot.cli.main import run

ROOT = Path(__file__).resolve().parents[3]
BASE = ROOT.parent / "shared" / "models" / "base"
pytestmark = [pytest.mark.slow, pytest.mark.models]

ELSEWHERE = {"write.py": "llama_cpp", "run.py": "onnxruntime"}
"""Scripts that want a package which is not in every environment."""

PYTHONS = {"write.py": os.environ.get("INGOT_LLAMA_PYTHON", sys.executable)}
"""Those of environments of their own: `make interop-llama`."""


def told(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the lines shown under it."""
    for piece in block.split("$ ")[1:]:
        command, *shown = piece.splitlines()
        yield command, shown


def is_here(words: list[str]) -> bool:
    name = next((word for word in words if word in ELSEWHERE), None)
    if name is None or PYTHONS.get(name, sys.executable) != sys.executable:
        return True
    return importlib.util.find_spec(ELSEWHERE[name]) is not None


def printed(words: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> list[str]:
    capfd.readouterr()
    if words[0] == "ingot":
        assert run(words[1:]) == code, words
        return capfd.readouterr().out.splitlines()
    start = {"python": [], "mlx_lm.generate": ["-m", "mlx_lm", "generate"]}[words[0]]
    python = PYTHONS.get(words[-1], sys.executable)
    done = subprocess.run([python, *start, *words[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def require_in_order(shown: list[str], lines: list[str]) -> None:
    """Lines follow each other as they are shown; where an ellipsis stands, others may lie between."""
    at, gap = 0, False
    for line in shown:
        if line.strip() == "...":
            gap = True
            continue
        assert line in lines[at:], (line, lines)
        found = lines.index(line, at)
        assert gap or found == at, (line, lines)
        at, gap = found + 1, False


def test_every_story_goes_as_it_is_told(
    tmp_path: Path, check_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for needed in ("torch", "transformers", "mlx_lm", "gguf"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BASE, "model")
    ran = 0
    for block in check_docs.read(ROOT / "docs" / "stories.md").blocks:
        if block.language in ("toml", "python"):
            Path(block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
        for command, shown in told(block.text) if block.language == "console" else ():
            words, code = shlex.split(command, comments=True), 2 if "exit code 2" in command else 0
            if is_here(words):
                require_in_order(shown, printed(words, code, capfd))
                ran += 1
    assert ran >= 14
