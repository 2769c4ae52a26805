"""Companion files: what lies beside the weights in a model folder and travels with them (config, tokenizer, README)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.core.oserrors import read_error, write_error
from ingot.errors import FormatError

CONFIG = "config.json"

# Files that hold weights in some container; everything else in a model folder is a companion.
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".zt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".npy",
)
_INDEX_SUFFIX = ".index.json"


def find_companions(folder: Path) -> dict[str, str]:
    """Return relative name to path of a model folder's companions, sorted by name.

    Weights, their indexes and hidden files are none. A subfolder's files belong to the model too (sentence-transformers
    has ``1_Pooling/config.json``), unless weights lie among them: then it is a model of its own. One level deep.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found |= {f"{path.name}/{name}": inner for name, inner in _of_subfolder(path).items()}
        elif _is_companion(path):
            found[path.name] = str(path)
    return found


def _of_subfolder(folder: Path) -> dict[str, str]:
    try:
        paths = [] if folder.name.startswith(".") else sorted(folder.iterdir())
    except OSError:  # lost+found and the like: nobody's model
        return {}
    if any(_is_weights(path.name) for path in paths):
        return {}
    return {path.name: str(path) for path in paths if _is_companion(path)}


def _is_companion(path: Path) -> bool:
    return not path.name.startswith(".") and not _is_weights(path.name) and path.is_file()


def _is_weights(name: str) -> bool:
    return name.lower().endswith(_WEIGHT_SUFFIXES) or name.endswith(_INDEX_SUFFIX)


def copy_companions(companions: Mapping[str, str], folder: Path, drop: Sequence[str] = ()) -> list[str]:
    """Copy them into ``folder``; return their names.

    Where a format's writer has made a ``config.json``, its keys are put into the companion's. Keys in ``drop``
    described how the source packed its tensors, and are left out of it.

    Raises
    ------
    FormatError
        ``companions.config``: a ``config.json`` that has to be changed is not one JSON object.
    ResourceError, UsageError
        A companion cannot be read, or the folder not written; the error names which.
    """
    for name, path in companions.items():
        target = folder / name
        try:
            target.parent.mkdir(exist_ok=True)
            if name == CONFIG and (drop or target.exists()):
                _merge_config(Path(path), target, drop)
            else:
                shutil.copyfile(path, target)
        except OSError as error:
            reading = error.filename == path
            raise (read_error(error, path) if reading else write_error(error, str(target))) from error
    return list(companions)


def _merge_config(source: Path, target: Path, drop: Sequence[str]) -> None:
    """Write ``source`` without the keys ``drop`` and with those of ``target``; the same bytes where that is no change.

    JSON as transformers and mlx_lm read it: NaN and Infinity are kept.
    """
    raw = source.read_bytes()
    found, own = _object(raw, source), _object(target.read_bytes(), target) if target.exists() else {}
    merged = {**{key: value for key, value in found.items() if key not in drop}, **own}
    target.write_bytes(raw if merged == found else (json.dumps(merged, indent=2) + "\n").encode())


def read_config(folder: Path) -> dict[str, Any]:
    """Return what a folder's ``config.json`` says; nothing where there is none that can be read as an object."""
    try:
        return _object((folder / CONFIG).read_bytes(), folder / CONFIG)
    except (OSError, FormatError):
        return {}


def _object(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError("companions.config", f"expected JSON, found {error}", where=str(path)) from error
    if not isinstance(found, dict):
        raise FormatError("companions.config", f"expected an object, found {type(found).__name__}", where=str(path))
    return found
