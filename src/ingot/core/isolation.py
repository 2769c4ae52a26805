"""Starts Python processes that import nothing from the current folder, which may contain untrusted data."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGE_FILE = Path(__file__).parent.parent / "__init__.py"
"""The file of the package ``ingot`` in this process."""

# Imports Ingot from the folder that this process imported it from, without adding that folder to the search path.
_START = """
import importlib.util, sys
if "ingot" not in sys.modules:
    spec = importlib.util.spec_from_file_location("ingot", sys.argv[1])
    sys.modules["ingot"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
import {module} as started
started.{function}(*sys.argv[2:])
"""


def isolated_command(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command line of a process that calls a function of Ingot with text arguments.

    ``-P`` keeps the current folder out of the module search path. The flags ``-I``, ``-E`` and ``-s`` of this process
    are passed on.
    """
    flags = {"-I": sys.flags.isolated, "-E": sys.flags.ignore_environment, "-s": sys.flags.no_user_site}
    passed_on = [flag for flag, is_set in flags.items() if is_set]
    code = _START.format(module=module, function=function)
    return [sys.executable, "-P", *passed_on, "-c", code, str(PACKAGE_FILE), *arguments]


def isolated_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an isolated process: ``PYTHONPATH`` without entries that mean the current folder.

    An empty entry means the current folder too. ``PYTHONPATH=$PYTHONPATH:/modules`` has one if the variable was unset.
    """
    entries = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    folders = [entry for entry in entries if Path(entry).is_absolute() or os.path.normpath(entry) != os.curdir]
    return {**variables, "PYTHONPATH": os.pathsep.join(folders)}
