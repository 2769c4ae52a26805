"""Folders to archive, and their archives."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ingot.archives.archive import archive
from tests.support.libraries import folder, weights


def unusual_safetensors(path: Path) -> None:
    """Write tensors in another order than their names, with metadata, spaces in the header and unsorted keys."""
    rng = np.random.default_rng(3)
    first = rng.standard_normal(3000).astype(ml_dtypes.bfloat16).tobytes()
    second = rng.integers(0, 7, 5000, np.uint8).tobytes()
    header = {
        "z": {"shape": [3000], "data_offsets": [0, len(first)], "dtype": "BF16"},
        "__metadata__": {"format": "pt", "note": "é"},
        "a": {"data_offsets": [len(first), len(first) + len(second)], "dtype": "U8", "shape": [50, 100]},
    }
    raw = json.dumps(header, indent=3, ensure_ascii=False).encode() + b" " * 13
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + first + second)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with hidden and empty files, folders, and files of other programs."""
    path = folder(tmp_path / "model", weights())
    (path / ".ready").touch()
    (path / "assets").mkdir()
    (path / "assets" / "é.bin").write_bytes(np.random.default_rng(1).bytes(70_000))
    (path / "tokenizer.json").write_text(json.dumps({"text": ["words " * 40] * 50}))
    unusual_safetensors(path / "assets" / "unusual.safetensors")
    return path


@pytest.fixture
def archived(model: Path, tmp_path: Path) -> Path:
    """The archive of ``model``."""
    path = tmp_path / "model.zt"
    archive(model, path)
    return path
