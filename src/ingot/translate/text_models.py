"""Find the text model in a checkpoint: remove prefixes of tensor names, and parts and keys of multimodal models."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from importlib import resources
from typing import Any, Literal

from ingot.errors import UnsupportedError
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.naming.config import CONFIG
from ingot.translate import rotary
from ingot.translate.config_numbers import nested_value, number_error
from ingot.translate.families import FAMILIES, Family
from ingot.translate.keys import Typed
from ingot.views.names import rename

RULE = "architecture.names"
Part = Literal["text", "mmproj"]
TEXT: Part = "text"
MMPROJ: Part = "mmproj"
PARTS = (TEXT, MMPROJ)
EMBEDDING = "embed_tokens.weight"
_PREFIXES = re.compile(r"(?:(?:base_model\.model|_orig_mod|module|model|thinker)\.)+")
_OTHER = re.compile(
    r"(?:visual|vision_tower|vision_model|vision_embed_tokens|vision_encoder|vision_embedder|embed_vision|"
    r"multi_modal_projector|connector|mm_projector|image_newline|view_seperator|qformer|query_tokens|"
    r"language_projection|audio_tower|audio_model|audio_encoder|audio_projection|embed_audio|patch_merger)(?:\.|\Z)"
)
"""The first module of tensors outside of the text model, after the prefixes."""
_TEXT = "text_config"
_OUTER = ("base_model.model.", "_orig_mod.", "module.")
"""Prefixes that adapters, compilers and trainers add to all names; a name may have several of them."""
_WRAPPERS = (
    *_OUTER, "model.language_model.", "language_model.", "model.text_model.", "text_model.", "model.", ""
)  # fmt: skip
"""Prefixes of the text model's names in multimodal models, and of a model's names in a trainer's class."""
_CLASS = "model."
"""The prefix of a class around the model, which trainers add. MLX has it instead of the prefixes of some families.
"""
_TIED = "tie_word_embeddings"
_SHARED = (_TIED, "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
"""Keys of ``config.json`` that stand outside of ``text_config`` and describe the text model too."""
_FLAT: Mapping[str, str] = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Model types whose ``config.json`` may hold the text model's keys at its top level, and the text model's type."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads(
    resources.files("ingot.translate").joinpath("text_defaults.json").read_bytes()
)
"""transformers' defaults by model type. A ``text_config`` that transformers 4 wrote omits keys with these values."""
_EXPERT_COUNTS = frozenset(("num_experts", "num_local_experts", "n_routed_experts"))
_MULTIMODAL_KEY = re.compile(r"(?:vision|image|video|audio)_.+")


def without_prefixes(name: str) -> str:
    """Return a tensor's name without the prefixes of adapters, compilers, trainers and classes."""
    match = _PREFIXES.match(name)
    return name if match is None else name[match.end() :]


def is_other_part(name: str) -> bool:
    """Return whether a tensor of a multimodal model, by its name, belongs to a vision, audio or projector part."""
    return _OTHER.match(without_prefixes(name)) is not None


def part_omissions(names: Iterable[str], part: Part) -> dict[str, Omission]:
    """Return an omission for each tensor outside of the requested part.

    The embedding stays, because a projector may need a row of it.
    """
    omission = Omission(f"not in the part {part}", accepted=True)
    if part == TEXT:
        return dict.fromkeys(filter(is_other_part, names), omission)
    return {name: omission for name in names if not is_other_part(name) and not name.endswith(EMBEDDING)}


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``config.json`` of the text model of a multimodal model.

    Returns None for other models, and if Ingot does not translate the text model's family.
    """
    model_type = config.get("model_type")
    text = config.get(_TEXT)
    if model_type in FAMILIES:
        return None
    if text is None and model_type in _FLAT:
        text = {key: value for key, value in config.items() if not _MULTIMODAL_KEY.fullmatch(key)}
        text["model_type"] = _FLAT[str(model_type)]
    if not isinstance(text, Mapping):
        return None
    family = FAMILIES.get(str(text.get("model_type", _FLAT.get(str(model_type)))))
    if family is None:
        return None
    nested = config.get(_TEXT)
    defaults = omitted_keys(nested, family) if isinstance(nested, Mapping) else {}
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None and text.get(key) is None}
    if text.get(_TIED) is False and config.get(_TIED) is True:
        shared[_TIED] = True
    return {**defaults, **text, **shared, "model_type": family.model_type, "architectures": [family.model_class]}


def omitted_keys(text: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys that ``text`` lacks, with transformers' defaults."""
    present = {*text, *(_EXPERT_COUNTS if _EXPERT_COUNTS & set(text) else ())}
    return {key: value for key, value in _DEFAULTS.get(family.model_type, {}).items() if key not in present}


def outer_metadata(config: Mapping[str, Any], family: Family) -> Typed:
    """Return the GGUF metadata that depend on the outer ``config.json`` of a multimodal model (``Family.counted``).

    Raises ``UnsupportedError`` ``architecture.config``: the value of a key is not a list.
    """
    metadata: Typed = {}
    for name, (key, default) in family.counted.items():
        if not isinstance(config.get(key.partition(".")[0]), Mapping):
            continue
        values = nested_value(config, key)
        if values is not None and not isinstance(values, list):
            raise number_error(key, "a list", values)
        metadata[f"{family.arch}.{name}"] = ("u32", default if values is None else len(values))
    return metadata


def as_plain(config: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the ``config.json`` of an equivalent class with a head for text, and notes.

    The config is unchanged if the family has no such class.
    """
    if not family.plain:
        return dict(config), []
    plain = FAMILIES[family.plain]
    ignored = {key for key, values in family.assumed.items() if not values}
    rope = {key: value for key, value in rotary.rope_of(config).items() if key not in rotary.MULTIMODAL_KEYS}
    result = {
        **plain.defaults,
        **{key: value for key, value in config.items() if key != "rope_scaling" and key not in ignored},
        "model_type": plain.model_type,
        "architectures": [plain.model_class],
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
    }
    note = (
        f"transformers has no class with a head for {family.model_type}: the folder is {plain.model_type}, which "
        "computes the same for text but has no positions for images"
    )
    return result, [note]


def with_text_config(
    files: Mapping[str, str], config: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Return the files and the config of a multimodal model's text model, and notes.

    For other models, both are unchanged. ``files`` are texts by name.
    """
    text = text_config(config)
    if text is None:
        return dict(files), dict(config), []
    nested = config.get(_TEXT)
    omitted = omitted_keys(nested, FAMILIES[text["model_type"]]) if isinstance(nested, Mapping) else {}
    values = ", ".join(f"{key} {value}" for key, value in omitted.items())
    notes = [f"text_config omits keys, which have transformers' defaults: {values}"] if omitted else []
    return {**files, CONFIG: json.dumps(text, indent=2) + "\n"}, text, notes


def with_usual_names(checkpoint: Checkpoint, family: Family) -> View:
    """Return the checkpoint with the tensor names of the family's transformers class, and a note if names change.

    Stored names may have another prefix, or lack the prefix of the class (``model.``). Any other name is unchanged.

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
    """Return a model folder's checkpoint with the tensor names of the class in ``config.json``.

    If ``config.json`` names another class than the family's, for example a class without a head, the names stay.

    Raises ``UnsupportedError`` ``architecture.names``.
    """
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or config.get("architectures") != [family.model_class]:
        return View(checkpoint)
    return with_usual_names(checkpoint, family)


def new_names(names: Collection[str], family: Family) -> dict[str, str]:
    """Return a map from each name that changes to its name in the family's transformers class."""
    for outer in _OUTER:
        if names and all(name.startswith(outer) for name in names):
            inner = {name: name.removeprefix(outer) for name in names}
            changed = new_names(list(inner.values()), family)
            return {name: changed.get(text, text) for name, text in inner.items()}
    root, _, stem = family.block.rpartition(".")
    root = f"{root}." if root else ""
    block = f"{family.block}."
    if any(name.startswith((block, family.base + block)) for name in names):
        return {}
    for wrapper in _WRAPPERS:
        if any(name.startswith(wrapper + block) for name in names):
            return {name: name.removeprefix(wrapper) for name in names if wrapper and name.startswith(wrapper)}
        if root and wrapper != _CLASS and any(name.startswith(f"{wrapper}{stem}.") for name in names):
            return _with_root(names, family, wrapper, root)
    return {}


def _with_root(names: Collection[str], family: Family, wrapper: str, root: str) -> dict[str, str]:
    """Return new names for names that lack ``root`` after the prefix ``wrapper``."""
    renamed = {}
    for name in names:
        inner = name.removeprefix(wrapper)
        module = inner.rpartition(".")[0]
        if name.startswith(wrapper) and module in family.ends:
            renamed[name] = inner
        elif name.startswith(wrapper) and (wrapper or _is_of_family(root + inner, family)):
            renamed[name] = root + inner
    return {old: new for old, new in renamed.items() if old != new}


def _is_of_family(name: str, family: Family) -> bool:
    return name.startswith(f"{family.block}.") or name.rpartition(".")[0] in family.ends
