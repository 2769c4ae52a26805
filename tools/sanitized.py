"""Run a script, or a module, with the native core of another build: ``sanitized.py BUILD (SCRIPT | -m MODULE) ...``.

The package itself is the installed one; only the extension module is taken from BUILD.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path


def main() -> None:
    build, *command = sys.argv[1:]
    (path,) = Path(build).rglob("_native*.so")
    spec = importlib.util.spec_from_file_location("ingot._native", path)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    sys.modules["ingot._native"] = native
    spec.loader.exec_module(native)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
