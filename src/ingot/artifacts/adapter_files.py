"""Recognition of adapter files (LoRA and related methods), which contain no full model.

A PEFT folder has ``adapter_config.json`` and ``adapter_model.safetensors``, an MLX folder ``adapters.safetensors``; a
GGUF file states ``general.type = adapter``. A single file is recognized by names such as ``...q_proj.lora_A.weight``.
If it also has the weights of ``q_proj``, it is a model that contains an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ingot.artifacts.open import Source, find
from ingot.errors import IngotError, UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.naming.config import MAX_CONFIG, parse_config
from ingot.stores.location import Location

RULE = "model.adapter"
CONFIG = "adapter_config.json"
HOLDS_ANY = ("safetensors", "zt", "zt2", "npz")
"""Formats that store tensors with arbitrary names and do not state whether they are an adapter."""

_FILES = ("adapter_model.", "adapters.safetensors", "adapters.npz")
_PART = re.compile(
    r"\.(?:lora_[AB]|lora_[ab]$|lora_embedding_[AB]|lora_magnitude_vector|lora_(?:down|up)"
    r"|lora(?:_linear_layer)?\.(?:down|up))(?=\.|$)"
)
_GGUF = "adapter."  # before the names of an adapter's settings
_METHODS = {"LORA": "LoRA", "DORA": "DoRA"}
_SIBLINGS = (".bias", ".alpha", ".dora_scale", ".m")
_MERGE = "merge it into its base (`ingot merge BASE ADAPTER -o OUT`) and use the merged model"
_CONVERT = "`ingot adapter convert` writes it for {}"
_USES = {
    "PEFT": f"{_MERGE}; {_CONVERT.format('llama.cpp (--lora) and for mlx_lm')}",
    "MLX": f"{_MERGE}; {_CONVERT.format('PEFT and for llama.cpp (--lora)')}",
    "GGUF": f"llama.cpp loads it together with its base by --lora; {_MERGE}",
}
_OTHER_METHODS = "merge it with the program that trained it (PEFT: merge_and_unload), and use the merged model"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter: its method (``LORA``, ..., or empty), the tool that wrote it, and its base if the files state it."""

    method: str
    program: str
    base: str | None = None

    def describe(self) -> str:
        """Return a sentence that describes the adapter and its use."""
        of_base = f" of the base {self.base[:200]!r}" if self.base else ""
        advice = _USES[self.program] if self.method in ("", *_METHODS) else _OTHER_METHODS
        title = f"{_METHODS.get(self.method, self.method)} adapter" if self.method else "adapter"
        return f"found an adapter, not a model: {title} ({self.program}){of_base}; {advice}"

    def refusal(self, location: str) -> UnsupportedError:
        """Return the error for an operation that needs a model."""
        return UnsupportedError(self.describe(), rule=RULE, where=location)


def refuse_adapter(source: Source) -> None:
    """Raise ``UnsupportedError`` ``model.adapter`` if an opened source is an adapter."""
    adapter = adapter_of(source)
    if adapter is not None:
        raise adapter.refusal(source.location)


def adapter_of(source: Source) -> Adapter | None:
    """Return the adapter that an opened source contains; None if it is not an adapter."""
    return recognise(source.catalog.tensors, source.catalog.metadata, source.store)


def adapter_in(checkpoint: Checkpoint, location: Location) -> Adapter | None:
    """Return the adapter that a checkpoint contains, which was opened from ``location``; None if it is not one."""
    if recognise(checkpoint, checkpoint.metadata, None) is None:
        return None
    return recognise(checkpoint, checkpoint.metadata, find(location)[0])


def note_on_config(source: Source, *, directory: bool) -> str:
    """Return a note if converting ``source`` loses its config, else an empty text.

    This is so if ``source`` is an adapter's folder and the result is a file, not a folder (``directory``).
    """
    if directory or not source.is_folder or adapter_of(source) is None or not _config(source.store):
        return ""
    return f"{CONFIG} with the adapter's rank and scale is not in the file: keep it, or convert into a folder"


def recognise(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], store: Store | None) -> Adapter | None:
    """Return the adapter that the tensors of a file form, or None if they form a model.

    Reads ``adapter_config.json`` from ``store``, the folder of the file, if there is one.
    """
    if metadata.get("general.type") == "adapter":
        base = metadata.get("general.base_model.0.repo_url") or metadata.get("general.base_model.0.name")
        return Adapter(str(metadata.get(f"{_GGUF}type") or "")[:40].upper(), "GGUF", _text(base))
    if not tensors and store is not None:
        return _adapter_without_tensors(_config(store))
    part = _first_part(tensors)
    has_adapter_names = part is not None and not _has_base(tensors, part)
    if not has_adapter_names and not has_adapter_file_name(tensors):
        return None
    config = {} if store is None else _config(store)
    if "fine_tune_type" in config or (part is not None and part.endswith((".lora_a", ".lora_b"))):
        method = str(config.get("fine_tune_type") or "lora")[:40].upper()
        return Adapter("" if method == "FULL" else method, "MLX", _text(config.get("model")))
    method = str(config.get("peft_type") or ("LORA" if has_adapter_names else ""))[:40]
    return Adapter(method, "PEFT", _text(config.get("base_model_name_or_path")))


def _adapter_without_tensors(config: Mapping[str, Any]) -> Adapter | None:
    """Return the adapter that ``config`` describes, for a weight file without tensors; None if it describes none."""
    if "peft_type" in config or "fine_tune_type" in config:
        return Adapter("", "PEFT" if "peft_type" in config else "MLX")
    return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _first_part(names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that is the name of a tensor of an adapter; None if there is none."""
    return next((name for name in names if "lora" in name and _PART.search(name)), None)


def _has_base(names: Iterable[str], part: str) -> bool:
    """Return whether ``names`` contain the weights to which the adapter tensor ``part`` belongs."""
    match = _PART.search(part)
    assert match is not None
    module = part[: match.start()]
    return any(
        name == module or (name.startswith(f"{module}.") and not _PART.search(name) and not name.endswith(_SIBLINGS))
        for name in names
    )


def has_adapter_file_name(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether the file of the first tensor has the name of an adapter's file."""
    tensor = next(iter(tensors.values()), None)
    part = None if tensor is None else next(iter(tensor.parts.values()), None)
    return part is not None and PurePosixPath(part.source.name).name.startswith(_FILES)


def _config(store: Store) -> dict[str, Any]:
    """Return the ``adapter_config.json`` of a store; empty if it is missing or cannot be read."""
    try:
        return parse_config(store.read(CONFIG, MAX_CONFIG, RULE), RULE, CONFIG)
    except IngotError:
        return {}
