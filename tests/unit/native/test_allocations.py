"""Kernels that are compiled without tables for unwinding allocate nothing: an exception would end the process."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
THROWING = re.compile(r"_Zn[wa]m|_ZSt\d+__throw|__cxa_(allocate_exception|throw)")


def allocating() -> set[str]:
    """The kernels that ``native/CMakeLists.txt`` lists as allocating memory."""
    text = (ROOT / "native" / "CMakeLists.txt").read_text("utf-8")
    return set(re.findall(r"set\(INGOT_ALLOCATING\s+([^)]+)\)", text)[0].split())


def test_the_list_has_sources() -> None:
    names = allocating()
    assert len(names) > 5
    assert not [name for name in names if not (ROOT / "native" / "kernels" / f"{name}.cc").is_file()]


def test_kernels_that_are_not_listed_neither_allocate_nor_throw() -> None:
    objects = list(ROOT.glob("build/*/native/CMakeFiles/ingot_kernels_*.dir/kernels/*.o"))
    if not objects or shutil.which("nm") is None:
        pytest.skip("no objects of a build, or no nm")
    listed = allocating()
    for path in objects:
        if path.name.removesuffix(".cc.o") not in listed:
            undefined = subprocess.run(["nm", "-u", path], check=True, capture_output=True, text=True).stdout
            assert not THROWING.search(undefined), path
