"""The text model in a checkpoint whose names have other prefixes, or that has several parts (``text_config``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.naming.config import CONFIG
from ingot.translate.families import FAMILIES, Family
from ingot.views.names import rename

RULE = "architecture.names"
_TEXT = "text_config"
_WRAPPERS = (
    *("base_model.model.", "_orig_mod.", "module.", "model.language_model.", "language_model.", "model.text_model."),
    *("text_model.", ""),
)
"""Prefixes that programs put before the names of a model: adapters, compilers, trainers, and models of several parts.
"""
_SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys of ``config.json`` that stand outside of ``text_config`` and describe the text model too."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``config.json`` of the text model in a model of several parts; None for other models.

    None too if Ingot does not translate the text model's family.
    """
    text = config.get(_TEXT)
    if config.get("model_type") in FAMILIES or not isinstance(text, Mapping):
        return None
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None:
        return None
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None and text.get(key) is None}
    return {**shared, **text, "architectures": [family.model_class]}


def with_text_config(files: Mapping[str, str], config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the files and the config of the text model of a model of several parts; those of other models unchanged.

    ``files`` are texts by name.
    """
    text = text_config(config)
    if text is None:
        return dict(files), dict(config)
    return {**files, CONFIG: json.dumps(text, indent=2) + "\n"}, text


def with_usual_names(checkpoint: Checkpoint, family: Family) -> View:
    """Return the checkpoint with the tensor names of the family's class in transformers, and a note if names change.

    Names may have another prefix, or lack the class's own (``model.``). Names that have neither are unchanged.

    Raises ``UnsupportedError`` ``architecture.names``: two tensors would have one name.
    """
    names = new_names(checkpoint, family)
    if len({names.get(name, name) for name in checkpoint}) < len(checkpoint):
        repeated = next(new for old, new in names.items() if new in checkpoint and new not in names)
        raise UnsupportedError(
            f"without their prefix, two tensors have the name {repeated}; rename or leave out one of them (--rename, "
            "--drop)",
            rule=RULE,
            where=checkpoint.location,
        )
    if not names:
        return View(checkpoint)
    first, new = next(iter(names.items()))
    return View(rename(checkpoint, names), [f"{len(names)} names have another prefix: {first} is {new}"])


def with_class_names(checkpoint: Checkpoint, config: Mapping[str, Any]) -> View:
    """Return a model folder's checkpoint with the names of the class that ``config.json`` names.

    Other classes than that of the family, such as those without a head, have other names, which stay as they are.

    Raises ``UnsupportedError`` ``architecture.names``.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or config.get("architectures") != [family.model_class]:
        return View(checkpoint)
    return with_usual_names(checkpoint, family)


def new_names(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """Return the names that change, and their names in the family's class in transformers."""
    root, _, stem = family.block.rpartition(".")
    root = f"{root}." if root else ""
    block = f"{family.block}."
    if any(name.startswith((block, family.base + block)) for name in checkpoint):
        return {}
    for wrapper in _WRAPPERS:
        if any(name.startswith(wrapper + block) for name in checkpoint):
            return {name: name.removeprefix(wrapper) for name in checkpoint if wrapper and name.startswith(wrapper)}
        if root and any(name.startswith(f"{wrapper}{stem}.") for name in checkpoint):
            return _with_root(checkpoint, family, wrapper, root)
    return {}


def _with_root(checkpoint: Checkpoint, family: Family, wrapper: str, root: str) -> dict[str, str]:
    """Return new names for names that lack the part ``root`` after the prefix ``wrapper``."""
    names = {}
    for name in checkpoint:
        inner = name.removeprefix(wrapper)
        module = inner.rpartition(".")[0]
        if name.startswith(wrapper) and module in family.ends:
            names[name] = inner
        elif name.startswith(wrapper) and (wrapper or _is_of_family(root + inner, family)):
            names[name] = root + inner
    return {old: new for old, new in names.items() if old != new}


def _is_of_family(name: str, family: Family) -> bool:
    return name.startswith(f"{family.block}.") or name.rpartition(".")[0] in family.ends
