"""Conversion of an encoder's pooling between sentence-transformers' modules and GGUF metadata.

Pooling types have the numbers of llama.cpp (``llama.h``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.translate.families import Family
from ingot.translate.keys import Typed

MODULES = "modules.json"
DEFAULT_FOLDER = "1_Pooling"
CONFIG = "config.json"
MEAN, CLS, LAST, RANK = range(1, 5)
KEY, LABELS = "pooling_type", "classifier.output_labels"
"""GGUF's keys without the architecture's name."""
RULE = "architecture.pooling"
_FLAGS: Mapping[str, int | str] = {
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_cls_token": CLS,
    "pooling_mode_lasttoken": LAST,
    "pooling_mode_max_tokens": "the maximum of each column",
    "pooling_mode_mean_sqrt_len_tokens": "the mean over the root of the length",
    "pooling_mode_weightedmean_tokens": "a weighted mean",
}
_MODES = {"mean": MEAN, "cls": CLS, "lasttoken": LAST}
_NAMES = {MEAN: "mean", CLS: "cls", LAST: "lasttoken"}
_TRANSFORMER = "Transformer"
_POOLING = "Pooling"
_NORMALIZE = "Normalize"


class Pooling:
    """The pooling of an encoder, read from a folder's files.

    Parameters
    ----------
    files : mapping
        Texts of the folder's files by name.

    Attributes
    ----------
    pooling_type : int or None
        llama.cpp's pooling type; None if no file declares the pooling.
    missing : dict
        Modules after pooling that llama.cpp lacks, by their folders: they change the vector.
    notes : list of str
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.pooling_type: int | None = None
        self.missing: dict[str, str] = {}
        self.notes: list[str] = []
        modules = _modules(files)
        folder = next((path for path, class_name in modules if class_name == _POOLING), None)
        if not modules and f"{DEFAULT_FOLDER}/{CONFIG}" in files:
            folder = DEFAULT_FOLDER
        if folder is None:
            return
        self.pooling_type = _pooling_type(_parse_object(files, f"{folder}/{CONFIG}"), f"{folder}/{CONFIG}")
        extra_modules = [(path, name) for path, name in modules if name not in (_TRANSFORMER, _POOLING, _NORMALIZE)]
        self.missing = {
            path or name: f"modules.json has the module {name} here, llama.cpp does not" for path, name in extra_modules
        }
        if modules and not any(class_name == _NORMALIZE for _, class_name in modules):
            self.notes.append(
                "modules.json does not normalize the vector; llama.cpp's programs do, except with --embd-normalize -1"
            )


def to_metadata(pooling: Pooling, family: Family, labels: list[str] | None) -> tuple[Typed, list[str]]:
    """Return GGUF metadata of a model's pooling, and notes.

    ``labels`` are the labels of the model's classifier; None if it has no classifier.
    """
    pooling_type = RANK if labels is not None and pooling.pooling_type is None else pooling.pooling_type
    typed: Typed = {} if pooling_type is None else {f"{family.arch}.{KEY}": ("u32", pooling_type)}
    if labels is not None:
        typed[f"{family.arch}.{LABELS}"] = ("array:string", labels)
    notes = list(pooling.notes)
    if pooling_type is None and family.rope is None:
        notes.append(
            "no pooling type: there are no modules.json and 1_Pooling/config.json; llama.cpp's programs need --pooling"
        )
    return typed, notes


def labels_of(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the labels of a classifier with ``count`` outputs: those of ``config.json``, else ``LABEL_n``."""
    labels = config.get("id2label")
    labels = labels if isinstance(labels, Mapping) else {}
    return [text if isinstance(text := labels.get(str(index)), str) else f"LABEL_{index}" for index in range(count)]


def files_of(metadata: Mapping[str, Any], family: Family, hidden: Any) -> dict[str, Any]:
    """Return the sentence-transformers files that describe a GGUF file's pooling, as JSON values by name."""
    mode = _NAMES.get(metadata.get(f"{family.arch}.{KEY}", 0))
    if mode is None:
        return {}
    modules = [(_TRANSFORMER, ""), (_POOLING, DEFAULT_FOLDER)]
    flags = {key: pooling_type == metadata[f"{family.arch}.{KEY}"] for key, pooling_type in _FLAGS.items()}
    return {
        MODULES: [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{class_name}"}
            for index, (class_name, path) in enumerate(modules)
        ],
        f"{DEFAULT_FOLDER}/{CONFIG}": {"word_embedding_dimension": hidden, **flags},
    }


def _modules(files: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the folder and the class name of each module."""
    if MODULES not in files:
        return []
    try:
        modules = json.loads(files[MODULES])
    except (ValueError, RecursionError) as error:
        raise FormatError("architecture.companion", f"not JSON: {error}", where=MODULES) from error
    return [
        (str(module.get("path", "")), str(module.get("type")).rpartition(".")[2])
        for module in (modules if isinstance(modules, list) else [])
        if isinstance(module, Mapping)
    ]


def _parse_object(files: Mapping[str, str], name: str) -> Mapping[str, Any]:
    try:
        parsed = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise FormatError("architecture.companion", f"not JSON: {error}", where=name) from error
    return parsed if isinstance(parsed, Mapping) else {}


def _pooling_type(config: Mapping[str, Any], location: str) -> int:
    """Return llama.cpp's pooling type; raises ``UnsupportedError`` ``architecture.pooling``."""
    chosen: list[int | str] = [pooling_type for key, pooling_type in _FLAGS.items() if config.get(key) is True]
    mode = config.get("pooling_mode")
    if not chosen and isinstance(mode, str):
        chosen = [_MODES.get(mode, f"the mode {mode[:40]!r}")]
    if len(chosen) == 1 and isinstance(chosen[0], int):
        return chosen[0]
    requested = (
        " and ".join(_NAMES[pooling_type] if isinstance(pooling_type, int) else pooling_type for pooling_type in chosen)
        or "nothing"
    )
    raise UnsupportedError(
        f"llama.cpp pools by mean, cls or lasttoken; this file asks for {requested}; change it, or convert without the "
        "folder's modules.json",
        rule=RULE,
        where=location,
    )
