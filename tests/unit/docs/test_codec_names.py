"""A codec is named in its family's folder, its layout and the table of codecs; everybody else asks for a layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ingot
from ingot.codecs.table import CODECS
from ingot.model.layouts.base import file_id

ROOT = Path(ingot.__file__).parent
NAMES = {*CODECS, *map(file_id, CODECS)}
# Where a word is no codec's name: forms of the Neural Engine, a preset, an extra, MLX's mode, a word of
# compressed-tensors, fields of a report, storage in a runtime profile.
OTHER_WORDS = {
    "ext/ane/cli/plan.py": {"dense"},
    "formats/packed_folders/compressed_keys.py": {"dense"},
    "formats/packed_folders/compressed_tensors.py": {"dense"},
    "formats/packed_folders/mlx.py": {"affine"},
    "ext/ane/plan.py": {"dense"},
    "inspect/doctor.py": {"astc"},
    "recipes/load.py": {"astc"},
    "runtime/quantize/run.py": {"dense"},
    "runtime/quantize/result.py": {"dense"},
    "conversion/merging/report.py": {"dense"},
    "translate/dense_layers.py": {"dense"},
    "translate/required_modules.py": {"dense"},
    "runtimes/accepts.py": {"dense"},
    "runtimes/profile.py": {"dense", "palette"},
    "runtimes/stored.py": {"dense", "palette"},
    "ext/ane/chips/candidates.py": {"dense", "palette"},
    "ext/ane/chips/chips.py": {"palette"},
    "ext/ane/chips/storage_form.py": {"dense", "palette"},
    "ext/ane/chips/gates.py": {"dense"},
    "ext/ane/chips/kernel_format.py": {"palette"},
    "ext/ane/chips/measured.py": {"dense"},
}


def family(codec: str) -> str:
    """The folder of the family that a codec, by its name or its id in files, belongs to."""
    name = next(name for name in CODECS if codec in (name, file_id(name)))
    return type(CODECS[name]).__module__.split(".")[2]


def named(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            yield node.lineno, node.value


def test_a_codec_is_named_by_its_own_family_alone() -> None:
    families = {name: family(name) for name in NAMES}
    strays = []
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file == "codecs/table.py" or file.startswith(("model/layouts/", "testing/")):
            continue
        strays += [
            f"{file}:{line}: {name}"
            for line, name in named(path)
            if not file.startswith(f"codecs/{families[name]}/") and name not in OTHER_WORDS.get(file, ())
        ]
    assert not strays


def test_formats_take_no_other_family_s_attributes_apart() -> None:
    """A format's folder maps its names and keys to layouts: it never looks into the attributes of a tensor."""
    strays = []
    for path in sorted((ROOT / "formats").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            looked = node.value if isinstance(node, ast.Subscript) else None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                looked = node.func.value
            if isinstance(looked, ast.Attribute) and looked.attr == "params":
                strays.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not strays
