"""Errors and notes on families that Ingot does not translate, and on files that their runtime cannot open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from ingot.artifacts.open import Source
from ingot.errors import UnsupportedError
from ingot.translate.families import FAMILIES, UNSUPPORTED, Family, refusal_reasons
from ingot.translate.mlx_families import is_opened
from ingot.translate.text_models import MMPROJ

_EMBEDDING = "token_embd.weight"
_PARAMETER = re.compile(r"\.(?:weight|bias|scale|input_scale)\Z")
_BLOCK = re.compile(r"((?:\A|\.)blk\.)[0-9]+(?=\.)")
_KEEPS = "writes the tensors under their present names, for programs other than llama.cpp"


def require_family(config: Mapping[str, Any] | None, location: str) -> Family:
    """Return the family of a model folder; ``config`` is its ``config.json``, None if there is none.

    Raises ``UnsupportedError`` ``architecture.unknown``.
    """
    if config is None:
        raise UnsupportedError(
            "there is no config.json, which states the tensors' family of models, and llama.cpp opens no file "
            f"without it; convert the model's folder, or pass --keep-names, which {_KEEPS}",
            rule=UNSUPPORTED,
            where=location,
        )
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        text, reason = _refusal(config, model_type)
        expected = f", because {reason}" if reason else f"; supported are {', '.join(FAMILIES)}"
        raise UnsupportedError(
            f"{text}{expected}; --keep-names {_KEEPS}, whose converter may support the model",
            rule=UNSUPPORTED,
            where=location,
        )
    return family


def unknown_architecture(metadata: Mapping[str, Any], location: str) -> UnsupportedError:
    """Return the error for a GGUF file whose architecture Ingot cannot translate to transformers' names."""
    arch = metadata.get("general.architecture")
    reason = (
        "the metadata have no general.architecture, which states the tensors' family of models"
        if arch is None
        else f"Ingot has no transformers names for llama.cpp's architecture {str(arch)[:80]!r}"
    )
    architectures = ", ".join(dict.fromkeys(family.arch for family in FAMILIES.values()))
    return UnsupportedError(
        f"{reason}; supported are {architectures}; --keep-names writes a folder with the tensors under their present "
        "names, which transformers does not load",
        rule=UNSUPPORTED,
        where=location,
    )


def missing_config(family: Family, location: str) -> UnsupportedError:
    """Return the error for a GGUF file without ``config.json``, if its metadata do not determine the config."""
    return UnsupportedError(
        f"the metadata of llama.cpp's {family.arch} do not state all that transformers' config.json needs, and the "
        "file has no config.json in it; convert the model's folder instead, or pass --keep-names",
        rule=UNSUPPORTED,
        where=location,
    )


def keep_names_note(target: str) -> str:
    """Return the note for a conversion with ``--keep-names`` to a format whose runtime requires other names."""
    program = {"gguf": "llama.cpp does not open this file", "mlx": "mlx_lm may not open this folder"}.get(
        target, "transformers does not load this folder"
    )
    return f"names are unchanged, as --keep-names requires: {program}"


def unopened_note(source: Source) -> str:
    """Return why llama.cpp or mlx_lm cannot open a GGUF file or MLX folder, by its headers; empty if there is no
    reason.
    """
    metadata = source.catalog.metadata
    if source.format.name == "gguf":
        arch = metadata.get("general.architecture")
        if arch is None:
            return "llama.cpp does not open this file: the metadata have no general.architecture"
        is_model = metadata.get("general.type") != "adapter" and arch in {family.arch for family in FAMILIES.values()}
        if is_model and _EMBEDDING not in source.catalog.tensors:
            return f"llama.cpp does not open this file: its tensors do not have llama.cpp's names (no {_EMBEDDING})"
    if source.format.name == "mlx" and source.is_folder:
        config = source.config()
        if not is_opened(config):
            model_type = str(config.get("model_type"))[:80]
            return f"mlx_lm does not open this folder: it has no module for model_type {model_type!r}"
    return ""


def unknown_gguf_names(metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names that gguf's table does not list for the file's architecture.

    The result is empty for adapters and projectors, and if the package gguf is missing or does not support the
    architecture.
    """
    architecture = metadata.get("general.architecture")
    if metadata.get("general.type") in ("adapter", MMPROJ):
        return []
    try:
        gguf: Any = import_module("gguf")
    except ImportError:
        return []
    arch = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if arch is None:
        return []
    templates = {gguf.TENSOR_NAMES[tensor].replace("{bid}", "*") for tensor in gguf.MODEL_TENSORS[arch]}
    return [name for name in names if _BLOCK.sub(r"\1*", _PARAMETER.sub("", name)) not in templates]


def _refusal(config: Mapping[str, Any], model_type: Any) -> tuple[str, str]:
    """Return the statement that a model's family is not translated, and the reason if it is known, else an empty text.

    For a multimodal model, the reason is that of its text model.
    """
    text_model = config.get("text_config")
    text_model = text_model.get("model_type") if isinstance(text_model, Mapping) else None
    reasons = refusal_reasons()
    reason = reasons.get(str(model_type)) or reasons.get(str(text_model)) or ""
    name = f"{str(model_type)[:80]!r}"
    if isinstance(text_model, str):
        return f"{name} is a model of several parts around {text_model[:80]!r}, and not translated", reason
    if model_type is None:
        return "config.json states no model_type", ""
    if reason:
        return f"model_type {name} is not translated", reason
    return f"Ingot has no llama.cpp names for model_type {name}", ""
