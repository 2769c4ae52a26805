"""Open files at the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ingot

# The module's globals are taken away before its last objects go, as at the end of an interpreter.
PROGRAM = """
import sys
import ingot, ingot.stores.files as files
checkpoint = ingot.open(sys.argv[1], io=sys.argv[2])
checkpoint["a"].numpy()
files.os = files._OPEN = None
"""


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_nothing_is_printed_of_files_that_are_open(tmp_path: Path, io: str) -> None:
    ingot.save(tmp_path / "a.safetensors", {"a": np.zeros(3, np.float32)})
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "a.safetensors"), io]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr == ""
