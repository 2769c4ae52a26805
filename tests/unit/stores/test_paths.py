"""Paths of the local file system are the business of the stores: what is above them uses a store and names in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ingot

PACKAGE = Path(ingot.__file__).parent
PACKAGES = (
    *("model", "codecs", "formats", "recipes", "engine", "quantization", "artifacts", "views", "translate"),
    *("cluster", "conversion", "delta", "inspect", "library", "publishing", "runtime", "ext"),
)
MODULES = sorted([*PACKAGE.glob("*.py"), *(path for name in PACKAGES for path in (PACKAGE / name).rglob("*.py"))])

HANDLING = {"pathlib", "shutil", "tempfile", "glob"}
WRITING = {"ingot.core.files.atomic.atomic_write", "ingot.core.files.system.local_path"}  # Location.write
# Arithmetic on names with slashes, and what says of something that it is a path, touch no file system.
HARMLESS = {"pathlib.PurePosixPath", "os.PathLike", "os.fspath", "os.environ"}
ALLOWED = {
    ("inspect/doctor.py", "shutil.which"),  # a program of --for, which is not started
    ("formats/shared/spool.py", "tempfile.TemporaryFile"),  # for sinks that have no disk of their own
    ("ext/squizd/dispatch.py", "pathlib.Path"),  # device files of this machine
    *(
        ("artifacts/append.py", name) for name in ("os.close", "os.open", "os.path", "pathlib.Path")
    ),  # extended in place
    # Files of a staging folder, which is on this machine's disk.
    ("conversion/round_by_layers.py", "pathlib.Path"),
    ("runtime/calibration/calibrate.py", "pathlib.Path"),
    ("delta/extract_adapter.py", "pathlib.Path"),
    ("runtime/evaluation/recorded.py", "pathlib.Path"),
    ("runtime/evaluation/recorded.py", "tempfile.TemporaryFile"),
    ("runtime/sweep/run.py", "pathlib.Path"),
    # Checkpoints that a trainer on this machine writes.
    ("runtime/training/delta_checkpoint.py", "pathlib.Path"),
    ("runtime/training/step_files.py", "pathlib.Path"),
    ("inspect/signature.py", "pathlib.Path"),  # a package signs and verifies files on this machine
    # Pipes of processes.
    *(("cluster/worker.py", f"os.{name}") for name in ("_exit", "dup", "dup2", "fdopen", "getpid", "getppid")),
    *(("cluster/pool.py", f"os.{name}") for name in ("dup", "fdopen")),
    ("cluster/ray.py", "tempfile.TemporaryDirectory"),  # an empty folder, for Ray's workers
}


def handled(tree: ast.Module) -> set[str]:
    """Return what a module uses to handle paths."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.Import):
            found |= {f"{item.name}." for item in node.names if item.name.startswith("os.")}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    used = {name for name in found if name.rpartition(".")[0] in HANDLING or name.startswith("os.")} | found & WRITING
    return used - HARMLESS


def test_no_module_above_the_stores_handles_paths() -> None:
    assert len(MODULES) > 200
    found = set()
    for module in MODULES:
        name = module.relative_to(PACKAGE).as_posix()
        found |= {(name, used) for used in handled(ast.parse(module.read_text("utf-8")))}
    assert found == ALLOWED


BELOW_THE_EDGE = ("core", "naming", "reporting", "model", "codecs", "formats", "quantization", "engine")
"""Packages whose functions get stores and names in them, never a text that a user wrote."""


def parses_locations(tree: ast.Module) -> bool:
    """Return whether a module turns text into a location."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(
        isinstance(function, ast.Attribute)
        and function.attr in ("parse", "in_store")
        and isinstance(function.value, ast.Name)
        and function.value.id == "Location"
        for function in calls
    )


def test_text_becomes_a_location_at_the_edge_alone() -> None:
    for folder in BELOW_THE_EDGE:
        for module in (PACKAGE / folder).rglob("*.py"):
            text = module.read_text("utf-8")
            assert "Location" not in text or not parses_locations(ast.parse(text)), module
    assert parses_locations(ast.parse((PACKAGE / "artifacts" / "open.py").read_text("utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.path",
        "from pathlib import Path",
        "import os.path",
        "from os import stat",
        "import glob\nglob.glob",
        "from ingot.core.files.atomic import atomic_write",
    ],
)
def test_the_walk_sees_paths(text: str) -> None:
    assert handled(ast.parse(text))
