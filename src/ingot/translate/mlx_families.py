"""The model types that mlx_lm 0.32 supports, by a module or by a mapping to a module, and their requirements."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from ingot.errors import UnsupportedError
from ingot.model.account import Omission
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import View, derive_checkpoint
from ingot.naming.config import CONFIG
from ingot.stores.temporary import TemporaryFolder
from ingot.translate import superseded
from ingot.translate.companions import TOKENIZER, parse_file, read_files
from ingot.translate.families import FAMILIES, UNSUPPORTED, Family, has_step
from ingot.translate.mlx_config import config_for_mlx
from ingot.translate.mlx_tensors import rules_of, to_mlx, why_unopened, why_unpackable
from ingot.translate.tokenizer_file import why_unreadable
from ingot.views.names import omit

PROGRAM = "mlx_lm"
_MAX_IGNORED = 1 << 20
_TABLE: Mapping[str, Any] = json.loads(resources.files("ingot.translate").joinpath("mlx_modules.json").read_bytes())
"""The modules of mlx_lm with the keys that their configs need, which ``tools/mlx_table.py`` writes."""
MODULES = frozenset(_TABLE["modules"])
REMAPPED = frozenset(_TABLE["remapped"])
"""Model types that mlx_lm maps to the module of another family."""
VERSION: str = _TABLE["version"]
"""The version of mlx_lm that the table describes."""


def for_mlx(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return a model folder's checkpoint without the tensors that mlx_lm would refuse.

    If Ingot translates the family, the view drops the tensors that no module of the family uses.

    Raises ``UnsupportedError`` ``architecture.unknown``.
    """
    require_mlx_family(config, checkpoint.location)
    if reason := why_unopened(config, checkpoint):
        raise UnsupportedError(
            f"{reason}; --keep-names writes the folder nevertheless", rule=UNSUPPORTED, where=checkpoint.location
        )
    rules = rules_of(config)
    family = FAMILIES.get(str(config.get("model_type")))
    omissions = {}
    for name in checkpoint:
        ignored = None if rules is None else next((end for end in rules.ignored if name.endswith(end)), None)
        if rules is not None and ignored is not None:
            omissions[name] = _ignored(checkpoint, name, rules.ignored[ignored])
            continue
        omission = superseded.activation_scale(checkpoint, name, PROGRAM, for_blocks=False)
        omission = omission or superseded.superseded(checkpoint, name, PROGRAM)
        if omission is None and family is not None and checkpoint.format != "mlx":
            omission = _omission_of(name, family, config)
        if omission is not None:
            omissions[name] = omission
    return omit(checkpoint, omissions)


def as_mlx_folder(checkpoint: Checkpoint, config: Mapping[str, Any], *, no_tokenizer: bool = False) -> View:
    """Return a model folder's checkpoint with the tensors and the ``config.json`` that mlx_lm's module reads.

    If ``no_tokenizer`` is true, a ``tokenizer.json`` that no program reads is accepted.

    Raises ``UnsupportedError`` ``architecture.rows``: a missing expert, or a tensor of another shape;
    ``architecture.config``: a key that the module needs is missing; ``architecture.tokenizer``.
    """
    if not no_tokenizer:
        _require_tokenizer(checkpoint)
    view = to_mlx(checkpoint, config)
    if rules_of(config) is None:
        _require_keys({"text_config": config, **config}, checkpoint.location)  # mlx_lm nests a flat config
        model_type = str(config.get("model_type"))[:80]
        return view.with_notes(
            f"Ingot has not compared the tensors of model_type {model_type!r} with mlx_lm's module: load the folder "
            "before you rely on it"
        )
    changed = config_for_mlx(config)
    _require_keys(changed, checkpoint.location)
    if changed == config:
        return view
    text = json.dumps(changed, indent=2) + "\n"
    return replace(view, checkpoint=with_config_text(view.checkpoint, text))


def _require_tokenizer(checkpoint: Checkpoint) -> None:
    """Raise ``UnsupportedError`` ``architecture.tokenizer`` if the package tokenizers cannot read
    ``tokenizer.json``.
    """
    path = checkpoint.companions.get(TOKENIZER)
    if path is None:
        return
    reason = why_unreadable(parse_file(read_files({TOKENIZER: path}), TOKENIZER))
    if reason:
        raise UnsupportedError(
            f"the package tokenizers, and so mlx_lm, does not read this file: {reason}; add the keys, or pass "
            "--no-tokenizer to copy it as it is",
            rule="architecture.tokenizer",
            where=path,
        )


def _require_keys(config: Mapping[str, Any], location: str) -> None:
    """Raise ``UnsupportedError`` ``architecture.config`` if ``config.json`` lacks keys that mlx_lm's module needs."""
    module = _TABLE["remapped"].get(config.get("model_type"), config.get("model_type"))
    missing = [key for key in _TABLE["modules"].get(module, ()) if key not in config]
    if missing and "model_file" not in config:
        raise UnsupportedError(
            f"config.json lacks {', '.join(missing[:8])}, which mlx_lm's module {module} needs; add the keys, or pass "
            "--keep-names to write the folder nevertheless",
            rule="architecture.config",
            where=location,
        )


def require_packable(config: Mapping[str, Any], names: Collection[str], location: str) -> None:
    """Raise ``UnsupportedError`` ``architecture.unknown`` if mlx_lm's module requires a tensor of ``names`` dense."""
    if names and (reason := why_unpackable(config, names)):
        raise UnsupportedError(
            f"{reason}; write the folder without a recipe, or with one that keeps them, or pass --keep-names",
            rule=UNSUPPORTED,
            where=location,
        )


def with_config_text(checkpoint: Checkpoint, text: str) -> Checkpoint:
    """Return the checkpoint with another ``config.json``."""
    folder = TemporaryFolder({CONFIG: text.encode()})
    tensors = LazyMap(checkpoint, checkpoint.__getitem__)
    companions = {**checkpoint.companions, **folder.paths}
    return derive_checkpoint(
        checkpoint, tensors, with_config_text, text, text, also_close=folder.close, companions=companions
    )


def require_mlx_family(config: Mapping[str, Any], location: str) -> None:
    """Raise ``UnsupportedError`` ``architecture.unknown`` unless mlx_lm supports the family in ``config.json``."""
    if not config:
        raise UnsupportedError(
            "there is no config.json, which mlx_lm needs to open a folder; convert the model's folder, or pass "
            "--keep-names for a folder that mlx_lm does not open",
            rule=UNSUPPORTED,
            where=location,
        )
    if not is_opened(config):
        model_type = config.get("model_type")
        message = (
            "config.json states no model_type" if model_type is None else f"the model_type is {str(model_type)[:80]!r}"
        )
        raise UnsupportedError(
            f"{message}, and mlx_lm 0.32 has no module for it; supported are {', '.join(sorted(MODULES | REMAPPED))}; "
            "--keep-names writes the folder nevertheless",
            rule=UNSUPPORTED,
            where=location,
        )


def module_of(model_type: str) -> str | None:
    """Return the name of mlx_lm's module for a model type; None if there is none."""
    module: str = _TABLE["remapped"].get(model_type, model_type)
    return module if module in MODULES else None


def is_opened(config: Mapping[str, Any]) -> bool:
    """Return whether mlx_lm supports the family in ``config.json``, or the model contains its own ``model_file``."""
    model_type = config.get("model_type")
    return model_type in MODULES or model_type in REMAPPED or "model_file" in config


def _ignored(checkpoint: Checkpoint, name: str, meaning: str) -> Omission:
    """Return the omission of a tensor that mlx_lm drops: superseded if its values are 0, else dropped."""
    is_zero = checkpoint[name].size <= _MAX_IGNORED and not checkpoint[name].numpy("f32").any()
    return Omission(f"{PROGRAM} does not compute {meaning}", superseded=is_zero)


def _omission_of(name: str, family: Family, config: Mapping[str, Any]) -> Omission | None:
    layers = config.get("num_hidden_layers")
    layer = re.fullmatch(rf"{re.escape(family.block)}\.([0-9]{{1,6}})\.(.+)", name)
    if (
        layer is not None
        and type(layers) is int
        and int(layer[1]) >= layers
        and not _is_dropped_layer(layer[1], family)
    ):
        return Omission(f"config.json has {layers} layers; later ones predict further tokens")
    inner = name if layer is None else layer[2]
    module, _, parameter = inner.rpartition(".")
    modules = family.ends if layer is None else family.layer
    if inner in family.names or inner in family.scalars or inner in modules or has_step(family, inner):
        return None
    if parameter in ("weight", "bias") and (
        module in modules or (layer is not None and _belongs_to_expert(module, family))
    ):
        return None
    return Omission(f"{PROGRAM}'s {family.model_type} has no such tensor")


def _is_dropped_layer(layer: str, family: Family) -> bool:
    """Return whether mlx_lm drops this layer because it only predicts further tokens."""
    return family.model_type == "deepseek_v3" and layer == "61"


def _belongs_to_expert(module: str, family: Family) -> bool:
    experts = family.experts
    return (
        experts is not None and module.startswith(f"{experts.prefix}.") and module.rpartition(".")[2] in experts.modules
    )
