"""Families that Ingot does not translate: what is refused, and what the caller can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.errors import UnsupportedError
from ingot.translate.families import FAMILIES, Family

RULE = "architecture.unknown"
_KEEPS = "writes the tensors under the names that they have, for programs other than llama.cpp"


def require_family(config: Mapping[str, Any] | None, location: str) -> Family:
    """Return the family of a model folder; ``config`` is its ``config.json``, None if there is none.

    Raises ``UnsupportedError`` ``architecture.unknown``.
    """
    if config is None:
        raise UnsupportedError(
            "there is no config.json that says which family of models the tensors are of, and llama.cpp opens no file "
            f"without; convert the model's folder, or pass --keep-names, which {_KEEPS}",
            rule=RULE,
            where=location,
        )
    kind = config.get("model_type")
    family = FAMILIES.get(str(kind))
    if family is None:
        raise UnsupportedError(
            f"{_reason(config, kind)}; known are {', '.join(FAMILIES)}; --keep-names {_KEEPS}, whose own converter may "
            "know the model",
            rule=RULE,
            where=location,
        )
    return family


def unknown_architecture(metadata: Mapping[str, Any], location: str) -> UnsupportedError:
    """Return the error of a GGUF file whose architecture has no names of transformers here."""
    arch = metadata.get("general.architecture")
    reason = (
        "the metadata have no general.architecture, which says what model the tensors are of"
        if arch is None
        else f"no names of transformers are known for the architecture {str(arch)[:80]!r} of llama.cpp"
    )
    architectures = ", ".join(dict.fromkeys(family.arch for family in FAMILIES.values()))
    return UnsupportedError(
        f"{reason}; known are {architectures}; --keep-names writes a folder with the tensors under the names that they "
        "have, which transformers does not load",
        rule=RULE,
        where=location,
    )


def kept_note(target: str) -> str:
    """Return the note of a conversion with ``--keep-names`` into a format that a program reads by names."""
    program = {"gguf": "llama.cpp does not open this file", "mlx": "mlx_lm may not open this folder"}.get(
        target, "transformers does not load this folder"
    )
    return f"names stay as they are, as --keep-names asks: {program}"


def _reason(config: Mapping[str, Any], kind: Any) -> str:
    inner = config.get("text_config")
    inner = inner.get("model_type") if isinstance(inner, Mapping) else None
    if isinstance(inner, str):
        translated = ", whose text model Ingot translates alone" if inner in FAMILIES else ""
        return f"{str(kind)[:80]!r} is a model of several parts around {inner[:80]!r}{translated}, and not translated"
    if kind is None:
        return "config.json states no model_type"
    return f"no names of llama.cpp are known for model_type {str(kind)[:80]!r}"
