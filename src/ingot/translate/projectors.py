"""The vision model of a multimodal model as an ``mmproj`` file of llama.cpp (``spec/architectures.md``).

``projectors.toml`` has a record per model type: names, transforms, and settings that llama.cpp's graphs assume.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from math import isqrt
from typing import Any

from ingot.artifacts.companions import companion_config
from ingot.errors import UnsupportedError
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.gguf.metadata import to_gguf_metadata, with_values
from ingot.model.account import Omission, list_names
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.view import View
from ingot.naming.config import CONFIG
from ingot.translate import companions, keys
from ingot.translate.config_numbers import integer, is_number, nested_value, number_error, same_value
from ingot.translate.families import Family, Step, make_step
from ingot.translate.formulas import evaluate
from ingot.translate.steps import apply_steps, computed_names
from ingot.translate.text_models import (
    EMBEDDING,
    MMPROJ,
    TEXT,
    is_other_part,
    text_config,
    without_prefixes,
)
from ingot.translate.view import relabel
from ingot.views.dense import Change, change
from ingot.views.names import omit, rename
from ingot.views.rows import take

RULE = "architecture.part"
_ARCH = "clip"
_PROGRAM = "llama.cpp"
_VISION = re.compile(r"(?:vision_tower\.vision_model|vision_tower|vision_model|visual)\.")
_ACTIVATIONS: Mapping[str, str | None] = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "gelu_new"), "use_gelu"),
    "silu": "use_silu",
    "quick_gelu": None,
}
"""llama.cpp's keys for activations; without a key it computes ``quick_gelu``."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_SIZES = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}


@dataclass(frozen=True, slots=True)
class Projector:
    """A vision model with its projector.

    Parameters
    ----------
    projector : str
        llama.cpp's name (``clip.projector_type``).
    block : str
        The name before a layer's index.
    layer, ends : mapping
        llama.cpp's names of modules and parameters, in a layer without ``v.blk.N.``, and outside of layers.
    epsilon : str or float
        The key of ``vision_config`` for the norms' epsilon, or the value in transformers' class.
    steps : tuple of Step
        Transforms before names are translated.
    unused : tuple of str
        Name prefixes of tensors that neither program needs for image tokens.
    aliases : mapping
        Usual keys of ``vision_config``, and the family's names for them.
    defaults : mapping
        transformers' defaults of ``vision_config``.
    products : mapping
        Usual keys that are formulas of other keys.
    requires : mapping
        Values that llama.cpp's graph assumes; keys begin with ``outer.`` or ``text.`` outside of ``vision_config``.
    counts : mapping
        Further keys under ``clip.vision``, with the key of the config and the default.
    break_token : str
        A token whose row of the embedding is stored in the file.
    note : str
        The difference between llama.cpp's and transformers' treatment of images.
    """

    projector: str
    block: str
    layer: Mapping[str, str]
    ends: Mapping[str, str]
    epsilon: str | float
    steps: tuple[Step, ...] = ()
    unused: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    products: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    break_token: str = ""
    note: str = ""


def _read_projectors() -> dict[str, Projector]:
    records: dict[str, dict[str, Any]] = {}
    text = files("ingot.translate").joinpath("projectors.toml").read_text("utf-8")
    for model_type, table in tomllib.loads(text).items():
        record = dict(records.get(table.pop("like", ""), {}))
        for key, value in table.items():
            inherited = record.get(key)
            if isinstance(value, Mapping) and isinstance(inherited, Mapping):
                record[key] = {**inherited, **value}
            elif key in ("steps", "unused"):
                record[key] = [*(inherited or ()), *value]
            else:
                record[key] = value
        records[model_type] = record
    return {name: _make_projector(record) for name, record in records.items() if not name.startswith("_")}


def _make_projector(record: Mapping[str, Any]) -> Projector:
    values = dict(record)
    values["steps"] = tuple(make_step(step) for step in record.get("steps", ()))
    values["unused"] = tuple(record.get("unused", ()))
    for key in ("requires", "counts"):
        values[key] = {name: tuple(value) for name, value in record.get(key, {}).items()}
    return Projector(**values)


PROJECTORS: Mapping[str, Projector] = _read_projectors()
"""Records by ``model_type`` of the multimodal model; some keys also contain the vision model's: ``llava/pixtral``.
"""


def to_mmproj(checkpoint: Checkpoint) -> View:
    """Return the vision model of a model folder with llama.cpp's tensors and metadata.

    Raises
    ------
    UnsupportedError
        ``architecture.part``: llama.cpp has no such projector, or computes it differently; ``architecture.config``,
        ``architecture.rows``.
    FormatError
        ``architecture.companion``.
    """
    texts = companions.read_files(checkpoint.companions)
    config = companions.parse_file(texts, CONFIG)
    record = _require_projector(config, checkpoint.location)
    settings = _settings(config, record)
    _require_values(settings, record)
    processor = _processor(checkpoint)
    metadata = _metadata(config, settings, record, processor)
    named = rename(checkpoint, {name: _canonical(name) for name in checkpoint if _canonical(name) != name})
    family = Family(str(config.get("model_type")), "", _ARCH, block=record.block, steps=record.steps)
    computed = [name for name in computed_names(named, family) if named[name].dtype == "f32"]
    view = apply_steps(named, settings, family)
    if record.break_token:
        view = _with_break_token(view, record, texts)
    layers = integer(settings, "num_hidden_layers")
    names = dict(_names(view, record, settings))
    _require_tensors(names, record, layers, checkpoint.location)
    omissions = {name: _omission(name, record) for name in view if name not in names}
    view = rename(omit(view, omissions), names)
    widened = {
        name: Change("f32")
        for name, tensor in view.items()
        if tensor.dtype != "f32" and tensor.codec == DenseLayout.codec
        and GgufFormat().required_dtype(name, tensor.shape) is not None
    }  # fmt: skip
    original = {key: value for key, value in checkpoint.metadata.items() if key != "format"}
    view = relabel(
        change(view, widened), {"metadata": with_values(to_gguf_metadata(original), metadata), "companions": None}
    )
    notes = [f"{len(names)} tensors have the names of {_PROGRAM}'s projector {record.projector}"]
    if computed:
        notes.append(f"not carried over: the last bits of {list_names(computed)}, which {_PROGRAM} stores plus 1")
    return View(view, [*notes, *([record.note] if record.note else [])])


def _require_projector(config: Mapping[str, Any], location: str) -> Projector:
    model_type = str(config.get("model_type"))
    vision = nested_value(config, "vision_config.model_type")
    record = PROJECTORS.get(f"{model_type}/{vision}") or PROJECTORS.get(model_type)
    if record is not None and "vision_config" in config:
        return record
    reason = "has no vision_config" if record is not None else "has no part that Ingot writes for llama.cpp's --mmproj"
    supported = ", ".join(name for name in PROJECTORS if "/" not in name)
    raise UnsupportedError(
        f"a model of type {model_type[:80]!r} {reason}; expected one of {supported}; llama.cpp's own "
        "convert_hf_to_gguf.py --mmproj may support the model",
        rule=RULE,
        where=location,
    )


def _settings(config: Mapping[str, Any], record: Projector) -> dict[str, Any]:
    """Return ``vision_config`` with usual keys and transformers' defaults.

    The key ``outer`` contains the top level of ``config.json``, and ``text`` the config of the text model.
    """
    vision = config["vision_config"]
    vision = {key: value for key, value in vision.items() if value is not None} if isinstance(vision, Mapping) else {}
    for key, value in record.defaults.items():
        if nested_value(vision, key) is None and "." not in key:
            vision[key] = value
    vision |= {usual: vision[key] for usual, key in record.aliases.items() if key in vision}
    for key in ("image_size", "patch_size"):
        sides = vision.get(key)
        if isinstance(sides, list) and len(set(map(str, sides))) == 1:
            vision[key] = sides[0]
    for key, formula in record.products.items():
        vision[key] = evaluate(formula, vision)
    text = text_config(config) or config.get("text_config")
    return {**vision, "outer": dict(config), "text": text if isinstance(text, Mapping) else dict(config)}


def _require_values(settings: Mapping[str, Any], record: Projector) -> None:
    """Raise ``UnsupportedError`` ``architecture.part`` for a value that llama.cpp's graph does not support."""
    for key, values in record.requires.items():
        value = nested_value(settings, key)
        if value is None and key in record.defaults:
            value = record.defaults[key]
        if value is None and key.startswith("outer."):
            continue  # transformers' default is the required value
        if not any(same_value(value, expected) for expected in values):
            raise UnsupportedError(
                f"llama.cpp's projector {record.projector} computes {key} {values[0]!r} only, found {value!r:.40}; "
                f"--part {TEXT} converts the text model alone",
                rule=RULE,
            )


def _processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the settings of the image processor; raises ``UnsupportedError`` ``architecture.part`` if they are
    missing.
    """
    processor: dict[str, Any] = {}
    for name in _PROCESSORS:
        values = companion_config(checkpoint.companions, companions.RULE, name)
        nested = values.get("image_processor")
        processor |= {**values, **(nested if isinstance(nested, Mapping) else {})}
    for key in ("image_mean", "image_std"):
        numbers = processor.get(key)
        if not isinstance(numbers, list) or len(numbers) != 3 or not all(map(is_number, numbers)):
            raise UnsupportedError(
                f"expected three numbers {key} in {' or '.join(_PROCESSORS)}, found {numbers!r:.40}; add the file of "
                "the original model to the folder",
                rule=RULE,
                where=checkpoint.location,
            )
    return processor


def _metadata(
    config: Mapping[str, Any], settings: Mapping[str, Any], record: Projector, processor: Mapping[str, Any]
) -> keys.Typed:
    epsilon: Any = settings.get(record.epsilon) if isinstance(record.epsilon, str) else record.epsilon
    if not is_number(epsilon):
        raise number_error(str(record.epsilon), "a number", epsilon)
    activation = str(settings.get("hidden_act"))
    if activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"llama.cpp computes {', '.join(_ACTIVATIONS)}, found hidden_act {activation!r:.40}", rule=RULE
        )
    if "image_size" not in settings:
        side = isqrt(integer(settings, "num_position_embeddings"))
        settings = {**settings, "image_size": side * integer(settings, "patch_size")}
    flag = _ACTIVATIONS[activation]
    vision: keys.Typed = {name: ("u32", integer(settings, key)) for key, name in _SIZES.items()}
    vision |= {
        "projection_dim": ("u32", integer(settings["text"], "hidden_size")),
        "attention.layer_norm_epsilon": ("f32", float(epsilon)),
        "image_mean": ("array:f32", [float(value) for value in processor["image_mean"]]),
        "image_std": ("array:f32", [float(value) for value in processor["image_std"]]),
    }
    for name, (key, default) in record.counts.items():
        value = nested_value(settings, key)
        vision[name] = ("u32", default if value is None else integer({key: value}, key))
    special = _SPECIAL.get(record.projector)
    vision |= {} if special is None else special(config, settings, processor)
    return {
        "general.architecture": ("string", _ARCH),
        "general.type": ("string", MMPROJ),
        "clip.has_vision_encoder": ("bool", True),
        "clip.projector_type": ("string", record.projector),
        **({} if flag is None else {f"clip.{flag}": ("bool", True)}),
        **{f"clip.vision.{name}": typed for name, typed in vision.items()},
    }


def _pooling_side(config: Mapping[str, Any], settings: Mapping[str, Any], _: Mapping[str, Any]) -> keys.Typed:
    """Return metadata of Gemma 3: the number of patches in a row over which it averages."""
    tokens = config.get("mm_tokens_per_image", 256)
    patches = integer(settings, "image_size") // integer(settings, "patch_size")
    side = isqrt(integer({"mm_tokens_per_image": tokens}, "mm_tokens_per_image"))
    if side * side != tokens or patches % side:
        raise number_error("mm_tokens_per_image", f"a square that divides {patches} x {patches} patches", tokens)
    return {"projector.scale_factor": ("u32", patches // side)}


def _longest_edge(_: Mapping[str, Any], settings: Mapping[str, Any], processor: Mapping[str, Any]) -> keys.Typed:
    """Return metadata of Idefics 3: the length of an image's longer side after resizing."""
    size = processor.get("size")
    edge = size.get("longest_edge") if isinstance(size, Mapping) else None
    edge = integer(settings, "image_size") if edge is None else edge
    return {"preproc_image_size": ("u32", integer({"longest_edge": edge}, "longest_edge"))}


def _window_period(_: Mapping[str, Any], settings: Mapping[str, Any], __: Mapping[str, Any]) -> keys.Typed:
    """Return metadata of Qwen2.5-VL: the period of layers with full attention.

    Raises ``UnsupportedError`` ``architecture.config`` if the layers have no period.
    """
    layers = settings.get("fullatt_block_indexes")
    if not isinstance(layers, list) or not layers or type(layers[0]) is not int:
        raise number_error("fullatt_block_indexes", "a list of layers", layers)
    period = layers[0] + 1
    if layers != list(range(period - 1, integer(settings, "num_hidden_layers"), period)):
        raise number_error("fullatt_block_indexes", f"each layer before a multiple of {period}", layers)
    return {"n_wa_pattern": ("u32", period)}


def _deep_layers(_: Mapping[str, Any], settings: Mapping[str, Any], __: Mapping[str, Any]) -> keys.Typed:
    """Return metadata of Qwen3-VL: the layers that have their own projector."""
    layers = settings.get("deepstack_visual_indexes")
    count = integer(settings, "num_hidden_layers")
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < count for layer in layers):
        raise number_error("deepstack_visual_indexes", f"a list of layers below {count}", layers)
    return {"is_deepstack_layers": ("array:bool", [layer in layers for layer in range(count)])}


_SPECIAL: Mapping[str, Callable[..., keys.Typed]] = {
    "gemma3": _pooling_side,
    "idefics3": _longest_edge,
    "qwen2.5vl_merger": _window_period,
    "qwen3vl_merger": _deep_layers,
}
"""Further metadata by projector."""


def _canonical(name: str) -> str:
    """Return a name without the prefixes of classes; names of the vision model begin with ``vision``.

    Names of the text model are unchanged.
    """
    if not is_other_part(name):
        return name
    inner = without_prefixes(name)
    match = _VISION.match(inner)
    return inner if match is None else f"vision.{inner[match.end() :]}"


def _names(view: Checkpoint, record: Projector, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and llama.cpp's name of each tensor that the file contains."""
    layer = re.compile(rf"{re.escape(record.block)}\.([0-9]{{1,6}})\.(.+)")
    deep = re.compile(r"vision\.deepstack_merger_list\.([0-9]{1,6})\.(norm|linear_fc1|linear_fc2)(\.weight|\.bias)")
    layers = settings.get("deepstack_visual_indexes")
    for name in view:
        if name == _BREAK:
            yield name, name
        elif match := layer.fullmatch(name):
            if (inner := _lookup(match[2], record.layer)) is not None:
                yield name, f"v.blk.{int(match[1])}.{inner}"
        elif (match := deep.fullmatch(name)) and isinstance(layers, list) and int(match[1]) < len(layers):
            yield name, f"v.deepstack.{layers[int(match[1])]}.{match[2].removeprefix('linear_')}{match[3]}"
        elif (outside := _lookup(name, record.ends)) is not None:
            yield name, outside


def _lookup(name: str, names: Mapping[str, str]) -> str | None:
    """Return the new name of a parameter; the table contains the parameter's or its module's name."""
    module, _, parameter = name.rpartition(".")
    if name in names:
        return names[name]
    return f"{names[module]}.{parameter}" if module in names and parameter in ("weight", "bias") else None


def _omission(name: str, record: Projector) -> Omission:
    if not is_other_part(name) and not name.startswith("vision."):
        return Omission(f"not in the part {MMPROJ}", accepted=True)
    if name.startswith(record.unused or ("\0",)):
        return Omission("not used for the embeddings of images", superseded=True)
    return Omission(f"{_PROGRAM}'s projector {record.projector} has no such tensor")


_BREAK = "v.token_embd.img_break"


def _with_break_token(view: Checkpoint, record: Projector, texts: Mapping[str, str]) -> Checkpoint:
    """Return the view with the embedding reduced to the row of the token that separates the rows of an image.

    Raises ``UnsupportedError`` ``architecture.part``: there is no such token or row.
    """
    tokenizer = companions.parse_file(texts, companions.TOKENIZER)
    added = tokenizer.get("added_tokens")
    settings = companions.parse_file(texts, companions.SETTINGS)
    ids = {token.get("content"): token.get("id") for token in added or () if isinstance(token, Mapping)}
    ids |= {token["content"]: token_id for token_id, token in keys.added_tokens_decoder(settings).items()}
    token_id = ids.get(record.break_token)
    name = next((name for name in view if name.endswith(EMBEDDING)), None)
    if type(token_id) is not int or name is None or not 0 <= token_id < view[name].shape[0]:
        raise UnsupportedError(
            f"expected an embedding with a row for the token {record.break_token}, which llama.cpp needs between rows "
            "of an image; add tokenizer.json and tokenizer_config.json of the original model to the folder",
            rule=RULE,
            where=view.location,
        )
    row = take(view, {name: [token_id]})
    return rename(change(row, {name: Change("f32", shape=view[name].shape[1:])}), {name: _BREAK})


def _require_tensors(names: Mapping[str, str], record: Projector, layers: int, location: str) -> None:
    """Raise ``UnsupportedError`` ``architecture.part`` if a module is missing, or a layer lacks a tensor of other
    layers.
    """
    written = set(names.values())
    inner = {name.split(".", 3)[3] for name in written if name.startswith("v.blk.")}
    expected = [f"v.blk.{layer}.{name}" for layer in range(layers) for name in sorted(inner)]
    missing = [name for name in expected if name not in written]
    missing += [name for name in record.ends.values() if not written & {name, f"{name}.weight"}]
    extra = [name for name in written if name.startswith("v.blk.") and int(name.split(".")[2]) >= layers]
    if missing or not inner or extra:
        problem = f"lacks {list_names(missing or ['layers'])}" if missing or not inner else f"has {list_names(extra)}"
        raise UnsupportedError(
            f"the vision part {problem}, which contradicts its vision_config of {layers} layers; get the complete "
            f"model, or convert the text model alone with --part {TEXT}",
            rule=RULE,
            where=location,
        )
