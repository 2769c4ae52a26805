"""Write ``src/ingot/translate/mlx_modules.json``: the modules of the installed mlx_lm and the config keys they need.

    python tools/mlx_table.py

``tests/interop/test_mlx_lm.py`` compares the table with the package.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import pkgutil
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "src" / "ingot" / "translate" / "mlx_modules.json"
_HAS_MODEL = re.compile(r"^class Model\(|^from .* import .*\bModel\b", re.MULTILINE)


def table() -> dict[str, Any]:
    """Return the modules that have a ``Model``, with the required keys of their configs, and the remapped types."""
    from mlx_lm import models, utils

    folder = Path(models.__path__[0])
    names = sorted(item.name for item in pkgutil.iter_modules(models.__path__))
    modules = {name: _required(name) for name in names if _HAS_MODEL.search((folder / f"{name}.py").read_text())}
    return {"version": version("mlx-lm"), "modules": modules, "remapped": dict(sorted(utils.MODEL_REMAPPING.items()))}


def _required(name: str) -> list[str]:
    """Return the keys that a module's config must have."""
    try:
        args = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
    except (ImportError, SystemExit):  # the module needs a package that is missing
        return _required_by_source(name)
    missing = dataclasses.MISSING
    return sorted(
        field.name
        for field in dataclasses.fields(args)
        if field.init and field.default is missing and field.default_factory is missing
    )


def _required_by_source(name: str) -> list[str]:
    from mlx_lm import models

    tree = ast.parse((Path(models.__path__[0]) / f"{name}.py").read_text())
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelArgs")
    fields = (item for node in classes for item in node.body if isinstance(item, ast.AnnAssign) and item.value is None)
    return sorted(ast.unparse(item.target) for item in fields)


def text(values: dict[str, Any]) -> str:
    """Return the table as JSON with a line for each module."""
    lines = [f"    {json.dumps(name)}: {json.dumps(keys)}" for name, keys in values["modules"].items()]
    head, tail = json.dumps(values["version"]), json.dumps(values["remapped"])
    joined = ",\n".join(lines)
    return f'{{\n  "version": {head},\n  "remapped": {tail},\n  "modules": {{\n{joined}\n  }}\n}}\n'


if __name__ == "__main__":
    TABLE.write_text(text(table()))
