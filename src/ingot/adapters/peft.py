"""Reader and writer of PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.adapters.record import Addition, Change, Factor, LowRank, Replacement, finite_number
from ingot.core.regex import Regex, RegexError
from ingot.errors import FormatError, UnsupportedError
from ingot.model.checkpoint import Checkpoint

CONFIG_RULE = "adapter.config"
TENSORS_RULE = "adapter.tensors"
RANK_RULE = "adapter.rank"
METHOD_RULE = "adapter.method"

PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
_PART = re.compile(
    r"(?P<module>.+?)\.(?P<role>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.default)?(?:\.(?P<kind>weight|bias))?\Z"
)
_TOKENS = re.compile(r"(?P<module>.+?)\.(?:token_adapter\.)?trainable_tokens_delta(?:\.default)?\Z")
_EXPERT_PARAMETERS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of fused experts, in the order in which transformers' classes define them and PEFT wraps them."""

# Values of ``init_lora_weights`` with which PEFT modifies the weights of the base before training.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Keys of LoraConfig that change the result and that this reader does not apply.
_REFUSED = {
    "layer_replication": "layers of the base are repeated",
    "alora_invocation_tokens": "the adapter applies only after certain tokens (aLoRA)",
    "use_qalora": "inputs are pooled (QALoRA)",
    "arrow_config": "several adapters are routed (Arrow)",
    "use_bdlora": "the matrices are block-diagonal (BD-LoRA)",
    "monteclora_config": "the factors are random variables (MonteCLoRA)",
}
# Keys of LoraConfig that this reader applies, or that do not change the result.
_SETTINGS = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "fan_in_fan_out",
        "bias",
        "use_rslora",
        "modules_to_save",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "megatron_config",
        "megatron_core",
        "trainable_token_indices",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "use_dora",
        "velora_config",
        "qalora_group_size",
        "runtime_config",
        "lora_bias",
        "target_parameters",
        "ensure_weight_tying",
        "enable_lora",
        "merge_weights",
        "base_model_class",
    }
)


def read_changes(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, list[Change]]:
    """Return the changes of a PEFT adapter, keyed by the base's tensor names.

    Raises
    ------
    UnsupportedError
        ``adapter.method``: a method other than LoRA; ``adapter.config``: a setting that Ingot does not support.
    FormatError
        ``adapter.config``, ``adapter.tensors``, ``adapter.rank``: config and tensors contradict each other.
    """
    settings = _Settings(config, checkpoint.location)
    parts: dict[str, dict[str, Factor]] = {}
    changes: dict[str, list[Change]] = {}
    for name in checkpoint:
        short = _short_name(name)
        factor = Factor.from_tensor(checkpoint[name])
        match = _PART.match(short)
        tokens = _TOKENS.match(short)
        if match is not None:
            role = match["role"] + (".bias" if match["kind"] == "bias" else "")
            parts.setdefault(match["module"], {})[role] = factor
        elif tokens is not None:
            module = tokens["module"]
            rows = settings.token_rows(module, factor.shape)
            changes.setdefault(f"{module}.weight", []).append(Replacement(factor, rows))
        elif "lora_" in short or "_adapter." in short:
            raise FormatError(TENSORS_RULE, "expected a tensor name of PEFT's LoRA, found another", where=name)
        else:
            changes.setdefault(_without_base_layer(short), []).insert(0, Replacement(factor))
    names = _weight_names(parts, settings)
    for module, factors in parts.items():
        _add_module(changes, module, names[module], factors, settings)
    if not changes:
        raise FormatError(TENSORS_RULE, "the adapter has no tensors", where=checkpoint.location)
    return changes


class _Settings:
    """The settings of ``adapter_config.json`` that determine the result."""

    def __init__(self, config: Mapping[str, Any], location: str) -> None:
        self._config = config
        self._location = location
        method = config.get("peft_type")
        if method is None:
            raise self._error("peft_type is missing; put the adapter's adapter_config.json beside the weights")
        if not isinstance(method, str):
            raise self._error(f"expected a name as peft_type, found {method!r:.40}")
        if method != "LORA":
            raise UnsupportedError(
                f"expected a LoRA adapter, found PEFT's {method[:40]}; merge it with PEFT (merge_and_unload)",
                rule=METHOD_RULE,
                where=location,
            )
        self._refuse_settings()
        self.rslora = bool(config.get("use_rslora"))
        self.transposed = bool(config.get("fan_in_fan_out"))
        self._rank = self._number(config.get("r", 8), "r")
        self._alpha = self._number(config.get("lora_alpha", 8), "lora_alpha")
        self._ranks = self._patterns("rank_pattern")
        self._alphas = self._patterns("alpha_pattern")
        self.parameters = self._names("target_parameters")

    def _refuse_settings(self) -> None:
        for key, reason in _REFUSED.items():
            if self._config.get(key):
                raise UnsupportedError(f"{key} is not supported: {reason}", rule=CONFIG_RULE, where=self._location)
        start = self._config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
            raise UnsupportedError(
                f"init_lora_weights {start[:40]!r} changed the weights of the base before training; convert the "
                "adapter with PEFT (save_pretrained with path_initial_model_for_weight_conversion)",
                rule=CONFIG_RULE,
                where=self._location,
            )
        unknown = [key for key, value in self._config.items() if key not in _SETTINGS and key not in _REFUSED and value]
        if unknown:
            raise UnsupportedError(
                f"unknown setting {unknown[0][:60]!r} of a newer PEFT, which may change the result; remove it from "
                "adapter_config.json if it does not",
                rule=CONFIG_RULE,
                where=self._location,
            )

    def _error(self, message: str) -> FormatError:
        return FormatError(CONFIG_RULE, message, where=self._location)

    def _number(self, value: object, key: str) -> float:
        number = finite_number(value)
        if number is not None and number > 0:
            return number
        raise self._error(f"expected a positive number as {key}, found {str(value)[:40]!r}")

    def _names(self, key: str) -> list[str]:
        value = self._config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(f"expected a list of names as {key}")
        return value

    def _patterns(self, key: str) -> list[tuple[Regex, float]]:
        value = self._config.get(key) or {}
        if not isinstance(value, dict):
            raise self._error(f"expected regular expressions with numbers as {key}")
        patterns = []
        for text, number in value.items():
            try:
                patterns.append((Regex(rf"(.*\.)?({text})$"), self._number(number, f"{key} {text[:60]!r}")))
            except RegexError as error:
                raise self._error(f"{key} {text[:60]!r}: {error}") from None
        return patterns

    def scale(self, module: str, rank: int, name: str) -> float:
        """Return the scale of a module; raise ``FormatError`` ``adapter.rank`` if the config declares another rank."""
        declared = self.rank(module)
        if rank != declared:
            raise FormatError(
                RANK_RULE,
                f"expected rank {declared:g} by adapter_config.json, found tensors of rank {rank}",
                where=name,
            )
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.matches(module)), self._alpha)
        return alpha / math.sqrt(declared) if self.rslora else alpha / declared

    def rank(self, module: str) -> int:
        """Return the rank that the config declares for a module, or for the full name of a parameter."""
        rank = next((rank for pattern, rank in self._ranks if pattern.matches(module)), self._rank)
        if rank != int(rank):
            raise self._error(f"expected a whole number as rank, found {rank}")
        return int(rank)

    def token_rows(self, module: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the indices of the rows of an embedding that the adapter replaces."""
        value = self._config.get("trainable_token_indices")
        if isinstance(value, dict):
            value = next((rows for key, rows in value.items() if f".{module}".endswith(f".{key}")), None)
        rows = value if isinstance(value, list) else []
        if (
            len(shape) != 2
            or len(rows) != shape[0]
            or not all(type(row) is int and row >= 0 for row in rows)
            or len({*rows}) != len(rows)
        ):
            raise self._error(
                f"expected different rows of {module[:100]} as trainable_token_indices, one for each row of the tensor "
                f"of shape {list(shape)}"
            )
        return tuple(rows)


def _short_name(name: str) -> str:
    """Return a tensor's name in the base: the stored name without the prefix of PEFT's wrapper."""
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    return name


def _without_base_layer(name: str) -> str:
    return name.replace(f"{_BASE_LAYER}.", ".")


def _weight_names(modules: Mapping[str, Any], settings: _Settings) -> dict[str, str]:
    """Return the name of the tensor that each module changes.

    PEFT wraps a module once for each of its parameters in ``target_parameters``, and each wrapper adds ``.base_layer``
    to the names of the wrappers inside it.
    """
    wrapped: dict[str, list[str]] = {}
    for module in modules:
        wrapped.setdefault(module.replace(_BASE_LAYER, ""), []).append(module)
    names: dict[str, str] = {}
    for plain, members in wrapped.items():
        targets = [target for target in settings.parameters if _is_parameter(plain, target)]
        parameters = sorted({target.rpartition(".")[2] for target in targets}, key=_definition_order)
        innermost_first = sorted(members, key=len, reverse=True)
        if not parameters and len(members) == 1:
            names[members[0]] = f"{plain}.weight"
            continue
        unordered = len(parameters) > 1 and not set(parameters) <= set(_EXPERT_PARAMETERS)
        if len(parameters) != len(members) or unordered:
            raise FormatError(
                TENSORS_RULE,
                f"expected matrices for the parameters {', '.join(parameters) or 'of target_parameters'}, found "
                f"{len(members)} pairs; their order is not known",
                where=plain,
            )
        names |= {module: f"{plain}.{name}" for module, name in zip(innermost_first, parameters, strict=True)}
    return names


def _is_parameter(module: str, target: str) -> bool:
    """Return whether a target of ``target_parameters`` names a parameter of the module."""
    return f".{module}".endswith(f".{target.rpartition('.')[0]}")


def _definition_order(parameter: str) -> tuple[int, str]:
    is_expert = parameter in _EXPERT_PARAMETERS
    return (_EXPERT_PARAMETERS.index(parameter) if is_expert else len(_EXPERT_PARAMETERS), parameter)


def _add_module(
    changes: dict[str, list[Change]], module: str, name: str, factors: Mapping[str, Factor], settings: _Settings
) -> None:
    embedding = "lora_embedding_A" in factors or "lora_embedding_B" in factors
    first, second = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if first not in factors or second not in factors:
        missing = first if first not in factors else second
        raise FormatError(TENSORS_RULE, f"expected {first} and {second}, but {missing} is missing", where=module)
    shapes = [factors[role].shape for role in (first, second)]
    if min(map(len, shapes)) < 2:
        raise FormatError(
            RANK_RULE,
            f"expected factors with two dimensions or more, found shapes {list(shapes[0])} and {list(shapes[1])}",
            where=module,
        )
    a = factors[first].flat()
    b = factors[second].flat()
    magnitude = factors.get("lora_magnitude_vector")
    is_parameter = not name.endswith(".weight") or any(_is_parameter(module, item) for item in settings.parameters)
    pattern_key = name if is_parameter else module
    rank = settings.rank(pattern_key)
    if a.shape[0] != b.shape[1]:
        raise FormatError(
            RANK_RULE,
            f"expected factors of one rank, found shapes {list(a.shape)} and {list(b.shape)}",
            where=module,
        )
    if magnitude is not None and magnitude.shape != (b.shape[0],):
        outputs = (b.shape[0],)
        if math.prod(magnitude.shape) != b.shape[0]:
            raise FormatError(
                TENSORS_RULE, f"expected {outputs[0]} magnitudes, found {list(magnitude.shape)}", where=module
            )
        magnitude = magnitude.map(lambda values: values.reshape(outputs), outputs)
    count = a.shape[0] // rank if is_parameter and a.shape[0] % rank == 0 else 1
    if is_parameter and count > 1:
        scale = settings.scale(pattern_key, a.shape[0] // count, module)
        change = LowRank(_experts_a(a, count), _experts_b(b, count), scale, any_orientation=True)
    else:
        scale = settings.scale(pattern_key, a.shape[0], module)
        change = LowRank(a, b, scale, magnitude)
        if embedding:
            change = LowRank(b.transpose(), a.transpose(), scale, magnitude, embedding=True)
        elif settings.transposed and not is_parameter:
            change = change.transpose()
    changes.setdefault(name, []).append(change)
    bias = factors.get(f"{second}.bias")
    if bias is not None:
        changes.setdefault(f"{name.removesuffix('.weight')}.bias", []).append(Addition(bias, scale))


def _experts_a(a: Factor, count: int) -> Factor:
    shape = (count, a.shape[0] // count, a.shape[1])
    return a.map(lambda values: values.reshape(shape), shape)


def _experts_b(b: Factor, count: int) -> Factor:
    """Return B as [experts, rows, r] from PEFT's [rows, r * experts].

    PEFT's columns are ordered by rank, and for each rank by expert.
    """
    rows = b.shape[0]
    rank = b.shape[1] // count
    return b.map(lambda values: np.moveaxis(values.reshape(rows, rank, count), 2, 0), (count, rows, rank))


def peft_tensors(changes: Mapping[str, Sequence[Change]]) -> Iterator[tuple[str, Factor]]:
    """Yield the names and factors of a PEFT adapter's tensors."""
    for name, items in changes.items():
        module = f"{PREFIX}{name.removesuffix('.weight')}"
        for item in items:
            if isinstance(item, Replacement):
                yield f"{PREFIX}{name}", item.values
            elif isinstance(item, LowRank):
                yield from _peft_module(module, item)
            else:
                yield f"{module.removesuffix('.bias')}.lora_B.bias", item.values


def _peft_module(module: str, item: LowRank) -> Iterator[tuple[str, Factor]]:
    plain = item.plain()
    if plain.embedding:
        yield f"{module}.lora_embedding_A", plain.b.transpose()
        yield f"{module}.lora_embedding_B", plain.a.transpose()
    else:
        yield f"{module}.lora_A.weight", plain.a
        yield f"{module}.lora_B.weight", plain.b
    if plain.magnitude is not None:
        yield f"{module}.lora_magnitude_vector", plain.magnitude


def peft_config(changes: Mapping[str, Sequence[Change]], base: str | None) -> dict[str, Any]:
    """Return the ``adapter_config.json`` for changes keyed by the tensor names of a model folder.

    Raises ``UnsupportedError`` ``adapter.unsupported``: changes that PEFT's LoRA cannot express.
    """
    low_ranks = {name: item for name, items in changes.items() for item in items if isinstance(item, LowRank)}
    _require_expressible(changes, low_ranks)
    ranks = {_module_of(name): item.rank for name, item in low_ranks.items()}
    alphas = {_module_of(name): item.scale * item.rank for name, item in low_ranks.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 8
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 8.0
    replaced = [name for name, items in changes.items() if any(isinstance(item, Replacement) for item in items)]
    saved = sorted({_module_of(name) for name in replaced if name.endswith(".weight")})
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _json_number(alpha),
        "lora_dropout": 0.0,
        "target_modules": [*ranks],
        "rank_pattern": {re.escape(module): value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(module): _json_number(value) for module, value in alphas.items() if value != alpha},
        "use_rslora": False,
        "use_dora": any(item.magnitude is not None for item in low_ranks.values()),
        "fan_in_fan_out": any(item.transposed for item in low_ranks.values()),
        "bias": "all" if any(name.endswith(".bias") for name in replaced) else "none",
        "modules_to_save": saved or None,
        "init_lora_weights": True,
    }


def _require_expressible(changes: Mapping[str, Sequence[Change]], low_ranks: Mapping[str, LowRank]) -> None:
    reason = ""
    name = ""
    for name, items in changes.items():
        if any(isinstance(item, Addition) or (isinstance(item, Replacement) and item.rows) for item in items):
            reason = "Ingot cannot write additions to biases and new rows of embeddings for PEFT"
        elif name in low_ranks and (len(low_ranks[name].a.shape) != 2 or not name.endswith(".weight")):
            reason = "PEFT's layout of factors for experts depends on the classes of transformers"
        if reason:
            break
    if len({item.magnitude is not None for item in low_ranks.values()}) > 1:
        reason = "PEFT has DoRA for all modules or for none"
    if reason:
        raise UnsupportedError(
            f"{reason}; merge the adapter into its base (ingot merge)", rule="adapter.unsupported", where=name
        )


def _module_of(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _json_number(value: float) -> float | int:
    """Return an integer for a whole number, as PEFT writes it."""
    return int(value) if value == int(value) else value
