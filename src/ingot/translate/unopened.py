"""Files that their program does not open: GGUF files and MLX folders that were written with ``--keep-names``."""

from __future__ import annotations

from ingot.artifacts.open import Source
from ingot.translate.families import FAMILIES
from ingot.translate.mlx_families import is_opened

_EMBEDDING = "token_embd.weight"


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
