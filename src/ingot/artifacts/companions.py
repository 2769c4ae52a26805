"""Companion files: further files of a model folder, such as config, tokenizer and README, which conversions copy.

``spec/operations.md`` defines the files that are copied.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from os import fspath
from typing import Any

from ingot.errors import IngotError
from ingot.formats.detect import FORMATS, WEIGHT_SUFFIXES
from ingot.model.bytesource import Target
from ingot.model.checkpoint import Checkpoint
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
_NESTED = "folders in folders"


def has_model_metadata(format: str) -> bool:
    """Return whether a format stores a model's config and tokenizer as metadata, under names of the format."""
    return format == "gguf"


def is_translated(checkpoint: Checkpoint) -> bool:
    """Return whether the tensors already have llama.cpp's names, because the source is or was a GGUF file."""
    return has_model_metadata(checkpoint.format) or isinstance(checkpoint.metadata.get("general.architecture"), str)


@dataclass(frozen=True, slots=True)
class Companions:
    """The companions of a model folder.

    Parameters
    ----------
    files : mapping of name to path or address
        The companions by their sorted names in the folder.
    skipped : mapping of reason to names
        Further entries of the folder, which are not copied.
    """

    files: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def note(self) -> str:
        """Return one line about skipped entries; empty if there are none."""
        groups = [f"{reason}: {_listed(names)}" for reason, names in self.skipped.items()]
        return f"not carried along: {'; '.join(groups)}" if groups else ""


def find_companions(store: Store, artifact_files: Collection[str] = ()) -> Companions:
    """Return the companions in a model folder, and the entries that are not copied.

    Parameters
    ----------
    store : Store
        The folder.
    artifact_files : collection of str
        Names of the artifact's files, which are neither companions nor skipped entries.

    Weights of any container, their indexes, hidden files and links out of the folder are not companions. Files in
    subfolders are companions (sentence-transformers has ``1_Pooling/config.json``), unless the subfolder contains
    weights: then it is another model. Deeper folders are skipped.
    """
    companions = Companions()
    artifact_folders = {name.partition("/")[0] for name in artifact_files if "/" in name}
    listing = store.list()
    for name in _names(listing):
        if name in artifact_files or name in artifact_folders:
            continue
        if name in listing.folders:
            _add_subfolder(companions, name, listing, store)
        else:
            _add_entry(companions, name, listing, store)
    return companions


def _names(listing: Listing) -> list[str]:
    every = {*listing.files, *listing.folders, *listing.outside}
    return sorted(name for name in every if not name.startswith("."))


def _add_entry(companions: Companions, name: str, listing: Listing, store: Store) -> None:
    last = name.rpartition("/")[2]
    if is_weights(last):
        companions.skipped.setdefault(_WEIGHTS, []).append(name)
    elif last in listing.outside:
        companions.skipped.setdefault(_LINK, []).append(name)
    elif last.endswith((SEALS, RECEIPTS)):
        return  # it belongs to a file that is not copied
    elif last in listing.files:
        path = store.local_path(name)
        companions.files[name] = store.url_of(name) if path is None else fspath(path)


def _add_subfolder(companions: Companions, folder: str, outer: Listing, store: Store) -> None:
    try:
        listing = store.list(folder)
    except IngotError:  # a folder without read permission, such as lost+found
        return
    names = _names(listing)
    if folder in outer.outside:
        companions.skipped.setdefault(_LINK, []).append(f"{folder}/")
    elif any(is_weights(name) for name in (folder, *names)):
        companions.skipped.setdefault(_MODEL, []).append(f"{folder}/")
    else:
        for name in names:
            if name in listing.folders:
                companions.skipped.setdefault(_NESTED, []).append(f"{folder}/{name}/")
            else:
                _add_entry(companions, f"{folder}/{name}", listing, store)


def is_weights(name: str) -> bool:
    """Return whether a file or folder with this name contains weights or an index of weights, in any container."""
    return name.lower().endswith(_suffixes())


@cache
def _suffixes() -> tuple[str, ...]:
    return (*FORMATS.endings(), *WEIGHT_SUFFIXES, _INDEX_SUFFIX)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The changes of a ``config.json`` that a conversion requires.

    ``drop`` contains the keys that describe the packing of the source. ``dtypes`` maps old to new element types.
    ``dtype`` is the new type of most elements. ``untie`` is set if the head is no longer tied to the embedding.
    """

    drop: Collection[str] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    untie: bool = False

    def __bool__(self) -> bool:
        return bool(self.drop or self.dtypes or self.untie)

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``config`` with the changes, which are also applied to configs nested in it."""
        changed = {key: value for key, value in config.items() if key not in self.drop}
        for key, value in changed.items():
            if key in ("dtype", "torch_dtype"):
                changed[key] = self._retyped(value)
            elif key == "tie_word_embeddings" and self.untie:
                changed[key] = False
            elif key.endswith("_config") and isinstance(value, dict):
                changed[key] = self.apply(value)
        return changed

    def _retyped(self, value: Any) -> Any:
        spelling = value.removeprefix("torch.") if isinstance(value, str) else ""
        old = next((dtype for dtype, spellings in _TYPES.items() if spelling in spellings), None)
        if old is None or not self.dtypes:
            return value
        new = self.dtypes.get(old, old if old in self.dtypes.values() else self.dtype)
        return value if new == old else value.replace(spelling, _TYPES[new][0])


_TYPES = {
    "bf16": ("bfloat16", "bf16"),
    "f16": ("float16", "half", "fp16"),
    "f32": ("float32", "float", "fp32"),
    "f64": ("float64", "double"),
}
_NO_CHANGE = ConfigChange()


def updated_config(companions: Mapping[str, str], change: ConfigChange) -> bytes | None:
    """Return the ``config.json`` of ``companions`` with the changes; None if there is none.

    Raises ``FormatError`` ``companions.config``.
    """
    if CONFIG not in companions:
        return None
    store, file = Location.parse(companions[CONFIG]).find(io="pread")
    return _apply_change(store.read(file, MAX_CONFIG, _RULE), change, companions[CONFIG])


def companion_config(companions: Mapping[str, str], rule: str, name: str = CONFIG) -> dict[str, Any]:
    """Return the ``config.json`` of ``companions``, or another JSON file; empty if there is none.

    Raises ``FormatError`` with ``rule`` if it is not a JSON object.
    """
    if name not in companions:
        return {}
    store, file = Location.parse(companions[name]).find(io="pread")
    return parse_config(store.read(file, MAX_CONFIG, rule), rule, companions[name])


def copy_companions(companions: Mapping[str, str], target: Target, change: ConfigChange = _NO_CHANGE) -> list[str]:
    """Copy companions into ``target``; return their names.

    Parameters
    ----------
    companions : mapping of name to path or address
    target : Target
    change : ConfigChange
        The changes of ``config.json``.

    Raises
    ------
    FormatError
        ``companions.config``: a ``config.json`` that has to be changed is not a JSON object.
    ResourceError, UsageError
        A companion cannot be read, or the target cannot be written; the error contains the name.
    """
    for name, address in companions.items():
        store, file = Location.parse(address).find(io="pread")
        sink = target.create(name)
        try:
            if name == CONFIG and change:
                data = _apply_change(store.read(file, MAX_CONFIG, _RULE), change, address)
                sink.write_at(0, data)
                sink.truncate(len(data))
            else:
                copy_file(store, file, sink)
        finally:
            sink.close()
    return list(companions)


def _apply_change(raw: bytes, change: ConfigChange, location: str) -> bytes:
    """Return the bytes of a ``config.json`` with the changes; ``raw`` itself if nothing changes.

    NaN and Infinity are preserved, because transformers and mlx_lm read them.
    """
    config = parse_config(raw, _RULE, location)
    applied = change.apply(config)
    return raw if applied == config else (json.dumps(applied, indent=2) + "\n").encode()
