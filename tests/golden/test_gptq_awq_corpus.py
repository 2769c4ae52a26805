"""Layers that GPTQModel packed in planes and AutoAWQ for gemv: their values, and the same bytes written again.

``make_gptq_awq.py`` makes the files.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from tests.support.entries import stored_entries

ROOT = Path(__file__).with_name("gptq_awq")
FOLDERS = sorted(path.name for path in ROOT.iterdir())


def test_the_corpus_is_whole() -> None:
    assert len(FOLDERS) == 8


@pytest.mark.parametrize("name", FOLDERS)
def test_values_and_bytes_are_the_package_s_own(name: str, tmp_path: Path) -> None:
    format, container = ("gptq", "planes") if name.startswith("gptq") else ("awq", "gemv")
    report = ingot.convert(ROOT / name, tmp_path / "m.zt")
    assert set(report.actions) == {"repacked"}
    ingot.convert(tmp_path / "m.zt", tmp_path / "back", format=format, container=container)
    stated = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert (stated.get("checkpoint_format"), stated.get("version")) in (("gptq_p", None), (None, "gemv"))
    assert stored_entries(tmp_path / "back") == stored_entries(ROOT / name)
    with ingot.open(ROOT / name / "expected.safetensors") as expected:
        for path in (ROOT / name, tmp_path / "m.zt", tmp_path / "back"):
            with ingot.open(path) as checkpoint:
                assert set(checkpoint) == set(expected)
                for key, tensor in expected.items():
                    assert np.array_equal(checkpoint[key].numpy().view("u2"), tensor.numpy().view("u2"))
                    assert np.array_equal(checkpoint[key][33:41, 3:40], tensor.numpy()[33:41, 3:40])
