"""From a model folder's JSON files to a transformers config, model class and generation config.

Only classes that ship with transformers are taken: code that travels with a model is never run, so ``auto_map`` is
ignored and ``trust_remote_code`` is not offered.
"""

from __future__ import annotations

from typing import Any

from ingot.artifacts.unread_dialects import of_config
from ingot.core.border import require
from ingot.errors import FormatError, UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.formats.packed_folders.base import PACKING_KEYS
from ingot.model.store import Store
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config

EXTRA = "transformers"

_GENERATION = "generation_config.json"
# However small a checkpoint is, so many layers may share its tensors (ALBERT has 12 layers in one group).
_SHARED_LAYERS = 256
# A classifier's labels: transformers makes a name for each before it looks at any weight.
_LABELS = 1 << 17
# Ways to compute that come with torch. Others are names of packages, and "owner/name" is code from the internet.
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
        Holds config.json.
    tensors : int
        Number of tensors in the checkpoint, which bounds the number of layers.
    format : str
        Of the checkpoint. One that reads how config.json says layers are packed hands over values.

    Raises
    ------
    FormatError
        ``model.config-missing``, ``model.config``: no config.json, or none that transformers accepts.
    UnsupportedError
        ``model.architecture``: a model type that this transformers does not have; ``model.quantized``: weights in a
        quantization of transformers' own.
    """
    where = folder.location_of(CONFIG)
    values = read_json(folder, CONFIG, "model.config", "model.config-missing")
    kind = values.get("model_type")
    mapping = require("transformers.models.auto.configuration_auto", EXTRA).CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in mapping:
        raise UnsupportedError(
            f"expected a model_type that transformers {version()} has, found {str(kind)[:80]!r}; a newer release may "
            "know it (code that travels with a model is never run)",
            rule="model.architecture",
            where=where,
        )
    _refuse_layers(values, max(tensors, _SHARED_LAYERS), where)
    packed = None if format in FORMATS and FORMATS[format].traits.config_keys else of_config(values, where)
    if packed is not None:
        raise packed.refusal()
    # Dialects describe their packing here; what Ingot hands over is decoded, and transformers must not look for packed
    # parts.
    plain = _without_code({key: value for key, value in values.items() if key not in PACKING_KEYS})
    try:
        return mapping[kind].from_dict(plain)
    except Exception as error:  # whatever a validator of one of hundreds of config classes raises
        raise FormatError("model.config", f"transformers refuses it: {one_line(error)}", where=where) from error


def model_class(config: Any, where: str) -> Any:
    """Return the class of transformers that the config names, else its causal language model, else its bare model.

    Raises
    ------
    UnsupportedError
        ``model.architecture``: no class of transformers has that name and this config.
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
        where=where,
    )


def read_generation_config(folder: Store) -> Any:
    """Return the folder's generation config, None if it has none.

    Raises ``FormatError`` ``model.generation-config``.
    """
    if not folder.exists(_GENERATION):
        return None
    values = read_json(folder, _GENERATION, "model.generation-config", "model.generation-config")
    try:
        return require("transformers", EXTRA).GenerationConfig.from_dict(values)
    except Exception as error:
        where = folder.location_of(_GENERATION)
        raise FormatError(
            "model.generation-config", f"transformers refuses it: {one_line(error)}", where=where
        ) from error


def read_json(folder: Store, name: str, rule: str, missing: str) -> dict[str, Any]:
    """Read one of the model's JSON files.

    Raises ``FormatError`` with ``missing`` where there is no such file and with ``rule`` for what is in it.
    """
    if not folder.exists(name):
        raise FormatError(missing, f"expected {name} beside the weights; copy it there", where=folder.location)
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
    except Exception:  # a lazy import that wants a package which is not here
        return None
    fits = (
        isinstance(candidate, type)
        and issubclass(candidate, base)
        and getattr(candidate, "config_class", None) is type(config)
    )
    return candidate if fits else None


def _refuse_layers(values: dict[str, Any], most: int, where: str) -> None:
    """Refuse layer counts that no checkpoint of so many tensors has, before transformers builds them one by one; and
    more labels than a classifier has."""
    nested = [value for value in values.values() if isinstance(value, dict)]
    limits = {**dict.fromkeys(_COUNTS, most), "num_labels": _LABELS}
    for some in (values, *nested):
        for key, limit in limits.items():
            count = some.get(key)
            if isinstance(count, int) and count > limit:
                raise FormatError("model.config", f"expected {key} up to {limit}, found {count}", where=where)


def _without_code(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out ways to compute that transformers would fetch or import code for, also of the configs within."""
    kept = {}
    for key, value in values.items():
        if key in _IMPLEMENTATIONS and value not in _IMPLEMENTATIONS[key]:
            continue
        kept[key] = _without_code(value) if isinstance(value, dict) else value
    return kept


def version() -> str:
    """Return which transformers is installed."""
    return str(require("transformers", EXTRA).__version__)
