"""Companion files: what lies beside the weights in a model folder and travels with them (config, tokenizer, README).

What travels is settled in ``spec/operations.md``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from os import fspath
from typing import Any

from ingot.errors import IngotError
from ingot.formats.detect import FORMATS
from ingot.formats.shared.foreign import WEIGHT_SUFFIXES
from ingot.model.bytesource import Target
from ingot.model.receipt import SUFFIX as RECEIPTS
from ingot.model.seal import SUFFIX as SEALS
from ingot.model.store import Listing, Store, copy_file
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config
from ingot.stores.location import Location

_RULE = "companions.config"
_INDEX_SUFFIX = ".index.json"
_WEIGHTS = "weights"
_LINK = "links out of the folder"
_MODEL = "folders with weights"
_DEEP = "folders in folders"


def holds_a_model(format: str) -> bool:
    """Return whether files of a format hold a model's config and tokenizer as metadata, under names of the format."""
    return format == "gguf"


@dataclass(frozen=True, slots=True)
class Companions:
    """What travels (names in the folder's store, sorted, to paths or addresses), and what lies there too and does not
    (kind to names)."""

    files: dict[str, str] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)

    def note(self) -> str:
        """Return one line on what stays behind; empty where nothing does."""
        kinds = [f"{kind}: {_listed(names)}" for kind, names in self.left.items()]
        return f"not carried along: {'; '.join(kinds)}" if kinds else ""


def find_companions(store: Store, own: Collection[str] = ()) -> Companions:
    """Return a model folder's companions.

    Parameters
    ----------
    store : Store
        The folder.
    own : collection of str
        Names of the artifact's own files: no companions, and nothing to tell of.

    Weights of any container, their indexes, hidden files and links out of the folder are none. A subfolder's files
    belong to the model too (sentence-transformers has ``1_Pooling/config.json``), unless weights lie among them: then
    it is a model of its own. One level deep.
    """
    companions = Companions()
    mine = {name.partition("/")[0] for name in own if "/" in name}
    listing = store.list()
    for name in _names(listing):
        if name in own or name in mine:
            continue
        if name in listing.folders:
            _take_subfolder(companions, name, listing, store)
        else:
            _take(companions, name, listing, store)
    return companions


def _names(listing: Listing) -> list[str]:
    every = {*listing.files, *listing.folders, *listing.outside}
    return sorted(name for name in every if not name.startswith("."))


def _take(companions: Companions, name: str, listing: Listing, store: Store) -> None:
    last = name.rpartition("/")[2]
    if is_weights(last):
        companions.left.setdefault(_WEIGHTS, []).append(name)
    elif last in listing.outside:
        companions.left.setdefault(_LINK, []).append(name)
    elif last.endswith((SEALS, RECEIPTS)):
        return  # of a file that stays behind
    elif last in listing.files:
        path = store.local_path(name)
        companions.files[name] = store.url_of(name) if path is None else fspath(path)


def _take_subfolder(companions: Companions, folder: str, outer: Listing, store: Store) -> None:
    try:
        listing = store.list(folder)
    except IngotError:  # lost+found and the like: nobody's model
        return
    names = _names(listing)
    if folder in outer.outside:
        companions.left.setdefault(_LINK, []).append(f"{folder}/")
    elif any(is_weights(name) for name in (folder, *names)):
        companions.left.setdefault(_MODEL, []).append(f"{folder}/")
    else:
        for name in names:
            if name in listing.folders:
                companions.left.setdefault(_DEEP, []).append(f"{folder}/{name}/")
            else:
                _take(companions, f"{folder}/{name}", listing, store)


def is_weights(name: str) -> bool:
    """Whether a file or folder of this name holds weights, or the index of some, in any container."""
    return name.lower().endswith(_suffixes())


@cache
def _suffixes() -> tuple[str, ...]:
    return (*FORMATS.endings(), *WEIGHT_SUFFIXES, _INDEX_SUFFIX)


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


def changed_config(companions: Mapping[str, str], change: ConfigChange) -> bytes | None:
    """Return the ``config.json`` among companions as it is true of the result; None where there is none.

    Raises ``FormatError`` ``companions.config``.
    """
    if CONFIG not in companions:
        return None
    store, file = Location.parse(companions[CONFIG]).find(io="pread")
    return _changed(store.read(file, MAX_CONFIG, _RULE), change, companions[CONFIG])


def companion_config(companions: Mapping[str, str], rule: str) -> dict[str, Any]:
    """Return the ``config.json`` among companions; nothing where there is none.

    Raises ``FormatError`` with ``rule`` for one that is no JSON object.
    """
    if CONFIG not in companions:
        return {}
    store, file = Location.parse(companions[CONFIG]).find(io="pread")
    return parse_config(store.read(file, MAX_CONFIG, rule), rule, companions[CONFIG])


def copy_companions(companions: Mapping[str, str], target: Target, change: ConfigChange = _NO_CHANGE) -> list[str]:
    """Copy them into ``target``; return their names.

    Parameters
    ----------
    companions : mapping of name to path or address
    target : Target
    change : ConfigChange
        What is no longer true of ``config.json``.

    Raises
    ------
    FormatError
        ``companions.config``: a ``config.json`` that has to be changed is not one JSON object.
    ResourceError, UsageError
        A companion cannot be read, or the target not written; the error names which.
    """
    for name, address in companions.items():
        store, file = Location.parse(address).find(io="pread")
        sink = target.create(name)
        try:
            if name == CONFIG and change:
                data = _changed(store.read(file, MAX_CONFIG, _RULE), change, address)
                sink.write_at(0, data)
                sink.truncate(len(data))
            else:
                copy_file(store, file, sink)
        finally:
            sink.close()
    return list(companions)


def _changed(raw: bytes, change: ConfigChange, where: str) -> bytes:
    """Return a companion as ``change`` makes it; the same bytes where that is no change.

    JSON as transformers and mlx_lm read it: NaN and Infinity are kept.
    """
    found = parse_config(raw, _RULE, where)
    applied = change.applied(found)
    return raw if applied == found else (json.dumps(applied, indent=2) + "\n").encode()
