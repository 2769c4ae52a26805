"""Companion files: what lies beside the weights in a model folder and travels with them (config, tokenizer, README).

What travels is settled in ``spec/operations.md``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ingot.core.config import CONFIG, parse_config
from ingot.core.oserrors import read_error, write_error
from ingot.formats.foreign import WEIGHT_SUFFIXES
from ingot.formats.table import FORMATS

_INDEX_SUFFIX = ".index.json"
_WEIGHTS, _LINK, _MODEL, _DEEP = "weights", "links out of the folder", "folders with weights", "folders in folders"


@dataclass(frozen=True, slots=True)
class Companions:
    """What travels (relative name to path, sorted by name), and what lies there too and does not (kind to names)."""

    files: dict[str, str] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)

    def note(self) -> str:
        """Return one line on what stays behind; empty where nothing does."""
        kinds = [f"{kind}: {_listed(names)}" for kind, names in self.left.items()]
        return f"not carried along: {'; '.join(kinds)}" if kinds else ""


def find_companions(folder: Path, own: Collection[str] = ()) -> Companions:
    """Return a model folder's companions.

    Parameters
    ----------
    folder : path
    own : collection of str
        Relative names of the artifact's own files: no companions, and nothing to tell of.

    Weights of any container, their indexes, hidden files and links out of the folder are none. A subfolder's files
    belong to the model too (sentence-transformers has ``1_Pooling/config.json``), unless weights lie among them: then
    it is a model of its own. One level deep.
    """
    found = Companions()
    within = _Within(folder)
    mine = {name.partition("/")[0] for name in own if "/" in name}
    for path in sorted(folder.iterdir()):
        if path.name in own or path.name in mine or path.name.startswith("."):
            continue
        if path.is_dir():
            _take_subfolder(found, path, within)
        else:
            _take(found, path.name, path, within)
    return found


class _Within:
    """Tells whether a file lies where a model folder's files may: in it, or in the blobs of a Hub cache's snapshot."""

    def __init__(self, folder: Path) -> None:
        root = Path(os.path.realpath(folder))
        blobs = root.parent.parent / "blobs"
        self._roots = (root, blobs) if root.parent.name == "snapshots" else (root,)

    def __call__(self, path: Path) -> bool:
        return not {*Path(os.path.realpath(path)).parents}.isdisjoint(self._roots)


def _take(found: Companions, name: str, path: Path, within: _Within) -> None:
    if is_weights(path.name):
        found.left.setdefault(_WEIGHTS, []).append(name)
    elif not within(path):
        found.left.setdefault(_LINK, []).append(name)
    elif path.is_file():
        found.files[name] = str(path)


def _take_subfolder(found: Companions, folder: Path, within: _Within) -> None:
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:  # lost+found and the like: nobody's model
        return
    if not within(folder):
        found.left.setdefault(_LINK, []).append(f"{folder.name}/")
    elif any(is_weights(path.name) for path in (folder, *paths)):
        found.left.setdefault(_MODEL, []).append(f"{folder.name}/")
    else:
        for path in paths:
            if path.is_dir():
                found.left.setdefault(_DEEP, []).append(f"{folder.name}/{path.name}/")
            else:
                _take(found, f"{folder.name}/{path.name}", path, within)


def is_weights(name: str) -> bool:
    """Whether a file or folder of this name holds weights, or the index of some, in any container."""
    return name.lower().endswith(_suffixes())


@cache
def _suffixes() -> tuple[str, ...]:
    known = (suffix for key in FORMATS for suffix in FORMATS[key].suffixes)
    return (*known, *WEIGHT_SUFFIXES, _INDEX_SUFFIX)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """What a conversion makes untrue in a ``config.json``.

    ``drop`` are keys that described how the source packed its tensors. ``dtypes`` says which element type became which,
    ``dtype`` which most elements have now. ``untie``: the head is no longer the embedding.
    """

    drop: Collection[str] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    untie: bool = False

    def __bool__(self) -> bool:
        return bool(self.drop or self.dtypes or self.untie)

    def applied(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config as it is true of the result; configs within it likewise."""
        kept = {key: value for key, value in config.items() if key not in self.drop}
        for key, value in kept.items():
            if key in ("dtype", "torch_dtype"):
                kept[key] = self._retyped(value)
            elif key == "tie_word_embeddings" and self.untie:
                kept[key] = False
            elif key.endswith("_config") and isinstance(value, dict):
                kept[key] = self.applied(value)
        return kept

    def _retyped(self, value: Any) -> Any:
        plain = value.removeprefix("torch.") if isinstance(value, str) else ""
        was = next((name for name, names in _TYPES.items() if plain in names), None)
        if was is None or not self.dtypes:
            return value
        now = self.dtypes.get(was, was if was in self.dtypes.values() else self.dtype)
        return value if now == was else value.replace(plain, _TYPES[now][0])


_TYPES = {
    "bf16": ("bfloat16", "bf16"),
    "f16": ("float16", "half", "fp16"),
    "f32": ("float32", "float", "fp32"),
    "f64": ("float64", "double"),
}
_NO_CHANGE = ConfigChange()


def copy_companions(companions: Mapping[str, str], folder: Path, change: ConfigChange = _NO_CHANGE) -> list[str]:
    """Copy them into ``folder``; return their names.

    Where a format's writer has made a ``config.json``, its keys are put into the companion's; ``change`` says what is
    no longer true of it.

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
            if name == CONFIG and (change or target.exists()):
                _merge_config(Path(path), target, change)
            else:
                shutil.copyfile(path, target)
        except OSError as error:
            reading = error.filename == path
            raise (read_error(error, path) if reading else write_error(error, str(target))) from error
    return list(companions)


def _merge_config(source: Path, target: Path, change: ConfigChange) -> None:
    """Write ``source`` as ``change`` makes it, with the keys of ``target``; the same bytes where that is no change.

    JSON as transformers and mlx_lm read it: NaN and Infinity are kept.
    """
    raw = source.read_bytes()
    found, own = _parsed(raw, source), _parsed(target.read_bytes(), target) if target.exists() else {}
    merged = {**change.applied(found), **own}
    target.write_bytes(raw if merged == found else (json.dumps(merged, indent=2) + "\n").encode())


def _parsed(raw: bytes, path: Path) -> dict[str, Any]:
    return parse_config(raw, "companions.config", str(path))
