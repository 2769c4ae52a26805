"""The scripts that draw docstrings and that list executed files do what they claim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]


def output_of(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, str(ROOT / "tools" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_same_seed_draws_the_same_docstrings(tmp_path: Path, sample_docstrings: ModuleType) -> None:
    (tmp_path / "src").mkdir()
    functions = "\n\n".join(f'def f{n}():\n    """Return {n}."""' for n in range(50))
    (tmp_path / "src/a.py").write_text(f'"""A module."""\n\nclass A:\n    """A class."""\n\n\n{functions}\n')
    first, again, other = (sample_docstrings.sample(tmp_path, seed, 30) for seed in (7, 7, 8))
    assert first == again != other
    assert len(dict(first)) == 30
    everything = dict(sample_docstrings.sample(tmp_path, 7, 120))
    assert len(everything) == 52
    assert everything["src/a.py:1 module"] == "A module."
    assert everything["src/a.py:4 A"] == "A class."
    assert everything["src/a.py:8 f0"] == "Return 0."


CODE = """
import threading
from concurrent.futures import ThreadPoolExecutor
from ingot.core.numeric.dtypes import dtype
from ingot.errors import printable

if {run} == 1:
    threading.pool = ThreadPoolExecutor(1)
    threading.pool.submit(printable, "a").result()
else:
    threading.pool.submit(dtype, "f32").result()
"""


def test_the_second_call_is_traced_in_a_thread_that_the_first_call_started() -> None:
    *files, total = output_of("trace_files.py", "-c", CODE)
    assert files == ["core/numeric/dtypes.py"]
    assert total.startswith("1 files, ")
    assert "core/numeric/dtypes.py: dtype" in output_of("trace_files.py", "--functions", "-c", CODE)


def test_a_command_is_traced_and_its_output_is_not_mixed_with_the_list() -> None:
    *files, total = output_of("trace_files.py", "codecs")
    assert "cli/catalog.py" in files
    assert all((ROOT / "src/ingot" / file).is_file() for file in files)
    assert total.startswith(f"{len(files)} files, ")
