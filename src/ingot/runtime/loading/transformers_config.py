"""The transformers config, model class and generation config of a model folder.

Only classes that ship with transformers are used. Code that comes with a model never runs: ``auto_map`` is ignored, and
``trust_remote_code`` is not offered.
"""

from __future__ import annotations

from typing import Any

from ingot.artifacts.unsupported_packers import packer_of_config
from ingot.core.border import require
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.formats.packed_folders.base import PACKING_KEYS
from ingot.model.store import Store
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config

EXTRA = "transformers"

_GENERATION = "generation_config.json"
# Layers can share tensors, so a small checkpoint may have this many layers (ALBERT has 12 layers in one group).
_SHARED_LAYERS = 256
# Labels of a classifier: transformers creates a name for each before it reads any weight.
_LABELS = 1 << 17
# Implementations that come with torch. Other values name packages, and "owner/name" is code from the internet.
_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "_attn_implementation": ("eager", "sdpa"),
    "_attn_implementation_internal": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
    "_experts_implementation": ("eager", "batched_mm", "grouped_mm"),
    "_experts_implementation_internal": ("eager", "batched_mm", "grouped_mm"),
}
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def read_config(folder: Store, tensors: int, format: str = "") -> Any:
    """Return the config of the model in ``folder`` as an object of transformers.

    Parameters
    ----------
    folder : Store
        The folder with config.json.
    tensors : int
        Number of tensors in the checkpoint, which bounds the number of layers.
    format : str
        Format of the checkpoint. If the format declares its packing in config.json, Ingot decodes it, and the
        declaration is not refused.

    Raises
    ------
    FormatError
        ``model.config-missing``: no config.json; ``model.config``: transformers rejects it.
    UnsupportedError
        ``model.architecture``: the installed transformers lacks this model type; ``model.quantized``: the weights use
        transformers' own quantization.
    """
    location = folder.location_of(CONFIG)
    values = read_json(folder, CONFIG, "model.config", "model.config-missing")
    model_type = values.get("model_type")
    mapping = require("transformers.models.auto.configuration_auto", EXTRA).CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in mapping:
        raise UnsupportedError(
            f"expected a model_type that transformers {version()} has, found {str(model_type)[:80]!r}; a newer release "
            "may have it (code that comes with a model never runs)",
            rule="model.architecture",
            where=location,
        )
    _refuse_layers(values, max(tensors, _SHARED_LAYERS), location)
    packed = None if format in FORMATS and FORMATS[format].traits.config_keys else packer_of_config(values, location)
    if packed is not None:
        raise packed.refusal()
    # These keys describe the packing of the files. Ingot passes decoded weights, so transformers must not look for
    # packed parts.
    plain = _without_code({key: value for key, value in values.items() if key not in PACKING_KEYS})
    try:
        return mapping[model_type].from_dict(plain)
    except Exception as error:  # validators of hundreds of config classes raise various errors
        raise FormatError("model.config", f"transformers refuses it: {one_line(error)}", where=location) from error


def model_class(config: Any, location: str) -> Any:
    """Return the class of transformers that the config names.

    If it names no class, return the causal language model for this type of config, else the bare model.

    Raises
    ------
    UnsupportedError
        ``model.architecture``: transformers has no class of that name for this config.
    """
    named = getattr(config, "architectures", None) or []
    for name in named:
        candidate = _class_named(name, config)
        if candidate is not None:
            return candidate
    auto = require("transformers.models.auto.modeling_auto", EXTRA)
    if not named:
        for table in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING):
            if type(config) in table:
                candidate = table[type(config)]
                return candidate[0] if isinstance(candidate, tuple) else candidate
    raise UnsupportedError(
        f"expected an architecture that transformers {version()} has for model_type {config.model_type!r}, found "
        f"{', '.join(str(name)[:80] for name in named[:4]) or 'none'}",
        rule="model.architecture",
        where=location,
    )


def read_generation_config(folder: Store) -> Any:
    """Return the generation config of the folder; None if it has none.

    Raises ``FormatError`` ``model.generation-config``.
    """
    if not folder.exists(_GENERATION):
        return None
    values = read_json(folder, _GENERATION, "model.generation-config", "model.generation-config")
    try:
        return require("transformers", EXTRA).GenerationConfig.from_dict(values)
    except Exception as error:
        location = folder.location_of(_GENERATION)
        raise FormatError(
            "model.generation-config", f"transformers refuses it: {one_line(error)}", where=location
        ) from error


def read_json(folder: Store, name: str, rule: str, missing: str) -> dict[str, Any]:
    """Return one of the model's JSON files, parsed.

    Raises ``FormatError`` with the rule ``missing`` if there is no such file, with ``rule`` if its content is invalid.
    """
    if not folder.exists(name):
        raise FormatError(missing, f"expected {name} next to the weights; copy it there", where=folder.location)
    return parse_config(folder.read(name, MAX_CONFIG, rule), rule, folder.location_of(name))


def one_line(error: BaseException) -> str:
    """Return an error of another package as one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _class_named(name: Any, config: Any) -> Any:
    transformers = require("transformers", EXTRA)
    base = transformers.PreTrainedModel
    try:
        candidate = getattr(transformers, name) if isinstance(name, str) else None
    except Exception:  # a lazy import of a package that is not installed
        return None
    fits = (
        isinstance(candidate, type)
        and issubclass(candidate, base)
        and getattr(candidate, "config_class", None) is type(config)
    )
    return candidate if fits else None


def _refuse_layers(values: dict[str, Any], max_layers: int, location: str) -> None:
    """Raise if a layer count exceeds what the number of tensors allows, or ``num_labels`` exceeds its limit.

    This runs before transformers builds the layers.
    """
    nested = [value for value in values.values() if isinstance(value, dict)]
    limits = {**dict.fromkeys(_COUNTS, max_layers), "num_labels": _LABELS}
    for section in (values, *nested):
        for key, limit in limits.items():
            count = section.get(key)
            if isinstance(count, int) and count > limit:
                raise FormatError("model.config", f"expected {key} up to {limit}, found {count}", where=location)


def _without_code(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config, nested ones included, without settings for which transformers would fetch or import code."""
    cleaned = {}
    for key, value in values.items():
        if key in _IMPLEMENTATIONS and value not in _IMPLEMENTATIONS[key]:
            continue
        cleaned[key] = _without_code(value) if isinstance(value, dict) else value
    return cleaned


def version() -> str:
    """Return the version of the installed transformers."""
    return str(require("transformers", EXTRA).__version__)
