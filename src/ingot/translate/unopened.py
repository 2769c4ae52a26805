"""Files that their program does not open: GGUF files and MLX folders that were written with ``--keep-names``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from ingot.artifacts.open import Source
from ingot.translate.families import FAMILIES
from ingot.translate.mlx_families import is_opened

_EMBEDDING = "token_embd.weight"
_PARAMETER = re.compile(r"\.(?:weight|bias|scale|input_scale)\Z")
_BLOCK = re.compile(r"((?:\A|\.)blk\.)[0-9]+(?=\.)")


def unopened_note(source: Source) -> str:
    """Return why the program of a GGUF file or an MLX folder does not open it, from headers; empty if it may."""
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
            return f"mlx_lm does not open this folder: it has no module of model_type {model_type!r}"
    return ""


def unknown_gguf_names(metadata: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names that the file's architecture does not have, in the table of the package gguf.

    Empty if the package is missing or does not know the architecture, and for adapters.
    """
    architecture = metadata.get("general.architecture")
    if metadata.get("general.type") == "adapter":
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
