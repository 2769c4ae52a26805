"""A tokenizer.json that Ingot writes for a GGUF file has llama.cpp's tokens, for each name of a pre-tokenizer.

Needs the package xllamacpp: ``pip install xllamacpp``, or its folder in PYTHONPATH.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ingot.translate import pretokenizers, tokenizer
from tests.support.llama_vocabularies import PROBE, bpe_metadata, file_tokens, llama_tokens, write_vocabulary

pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="the package xllamacpp is not installed"
)


def names() -> list[str | None]:
    """Return llama.cpp's names; None stands for a file that names no pre-tokenizer."""
    return [*pretokenizers.STEPS, *pretokenizers.ALIASES, None]


def metadata_of(name: str | None) -> dict[str, Any]:
    steps = pretokenizers.steps_of(name or "default")
    assert steps is not None
    return bpe_metadata(name, bytewise=steps.bytewise)


def compare(selected: list[str | None], folder: Path) -> dict[str | None, str]:
    """Return the error message, or the first text with different tokens, for each name; empty if there is none."""
    jobs = []
    for name in selected:
        path = write_vocabulary(folder / f"{name}.gguf", metadata_of(name))
        jobs.append({"path": str(path), "texts": PROBE})
    results: dict[str | None, str] = {}
    for name, answer in zip(selected, llama_tokens(jobs, folder), strict=True):
        files, _ = tokenizer.to_files(metadata_of(name))
        tokens = file_tokens(files["tokenizer.json"], PROBE)
        if answer["error"]:
            results[name] = answer["error"]
            continue
        different = [text for text, *ids in zip(PROBE, answer["ids"], tokens, strict=True) if ids[0] != ids[1]]
        results[name] = repr(different[0]) if different else ""
    return results


def test_tokens_of_some_names_are_those_of_llama_cpp(tmp_path: Path) -> None:
    selected = [None, "default", "gpt-2", "llama-bpe", "gpt-4o", "qwen35", "kimi-k2", "falcon", "gemma4"]
    assert compare(selected, tmp_path) == dict.fromkeys(selected, "")


@pytest.mark.slow
def test_tokens_of_all_names_are_those_of_llama_cpp(tmp_path: Path) -> None:
    assert compare(names(), tmp_path) == dict.fromkeys(names(), "")
