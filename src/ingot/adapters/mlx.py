"""Reader and writer of MLX adapters: ``adapter_config.json`` and ``adapters.safetensors`` of mlx_lm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.adapters.peft import CONFIG_RULE, METHOD_RULE, RANK_RULE, TENSORS_RULE
from ingot.adapters.record import Change, Factor, LowRank, Replacement, finite_number
from ingot.errors import FormatError, UnsupportedError
from ingot.model.checkpoint import Checkpoint

_METHODS = ("lora", "dora", "full")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings")


def read_changes(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, list[Change]]:
    """Return the changes of an MLX adapter, keyed by the base's tensor names.

    Raises
    ------
    UnsupportedError
        ``adapter.method``: the adapter is neither LoRA nor DoRA.
    FormatError
        ``adapter.config``: no valid scale; ``adapter.tensors``: unknown names, a missing factor, or no tensors;
        ``adapter.rank``: two factors have incompatible shapes.
    """
    method = config.get("fine_tune_type", "lora")
    if method not in _METHODS:
        raise UnsupportedError(
            f"expected fine_tune_type {', '.join(_METHODS)}, found {str(method)[:40]!r}",
            rule=METHOD_RULE,
            where=checkpoint.location,
        )
    if method == "full":
        changes: dict[str, list[Change]] = {
            name: [Replacement(Factor.from_tensor(checkpoint[name]))] for name in checkpoint
        }
    else:
        changes = _low_ranks(checkpoint, _scale(config, checkpoint.location), is_dora=method == "dora")
    if not changes:
        raise FormatError(TENSORS_RULE, "the adapter has no tensors", where=checkpoint.location)
    return changes


def _scale(config: Mapping[str, Any], location: str) -> float:
    parameters = config.get("lora_parameters")
    value = parameters.get("scale") if isinstance(parameters, dict) else None
    scale = finite_number(value)
    if scale is None:
        raise FormatError(
            CONFIG_RULE,
            f"expected a number as lora_parameters.scale, found {str(value)[:40]!r}; put adapter_config.json beside "
            "the weights",
            where=location,
        )
    return scale


def _low_ranks(checkpoint: Checkpoint, scale: float, *, is_dora: bool) -> dict[str, list[Change]]:
    parts: dict[str, dict[str, Factor]] = {}
    for name in checkpoint:
        module, _, role = name.rpartition(".")
        if role not in ("lora_a", "lora_b", "m"):
            raise FormatError(TENSORS_RULE, "expected a name that ends in .lora_a, .lora_b or .m", where=name)
        parts.setdefault(module, {})[role] = Factor.from_tensor(checkpoint[name])
    return {f"{module}.weight": [_low_rank(module, item, scale, is_dora=is_dora)] for module, item in parts.items()}


def _low_rank(module: str, factors: Mapping[str, Factor], scale: float, *, is_dora: bool) -> LowRank:
    expected = {"lora_a", "lora_b", "m"} if is_dora else {"lora_a", "lora_b"}
    if set(factors) != expected:
        raise FormatError(
            TENSORS_RULE,
            f"expected {', '.join(sorted(expected))}, found {', '.join(sorted(factors))}",
            where=module,
        )
    a = factors["lora_a"]
    b = factors["lora_b"]
    magnitude = factors.get("m")
    change: LowRank | None
    if len(b.shape) == 3:  # experts: [experts, r, columns] and [experts, rows, r]
        count, _, rank = b.shape
        if len(a.shape) == 2 and a.shape[0] == count * rank:
            shape = (count, rank, a.shape[1])
            a = a.map(lambda values: values.reshape(shape), shape)
        change = LowRank(a, b, scale)
        valid = len(a.shape) == 3 and a.shape[:2] == (count, rank)
    elif module.rpartition(".")[2] in _EMBEDDINGS:
        change = LowRank(b, a, scale, magnitude, embedding=True)
        valid = len(a.shape) == len(b.shape) == 2 and a.shape[1] == b.shape[0]
    else:
        change = LowRank(a.transpose(), b.transpose(), scale, magnitude) if len(a.shape) == len(b.shape) == 2 else None
        valid = change is not None and a.shape[1] == b.shape[0]
    if not valid or change is None or (magnitude is not None and magnitude.shape != change.b.shape[:1]):
        raise FormatError(
            RANK_RULE, f"expected factors of one rank, found shapes {list(a.shape)} and {list(b.shape)}", where=module
        )
    return change


def mlx_tensors(changes: Mapping[str, Sequence[Change]], scale: float) -> Iterator[tuple[str, Factor]]:
    """Yield the tensors of an MLX adapter, with one scale for all modules.

    Raises ``UnsupportedError`` ``adapter.unsupported``: a change that MLX adapters cannot express.
    """
    for name, items in changes.items():
        module = name.removesuffix(".weight")
        for item in items:
            if not isinstance(item, LowRank) or item.transposed:
                raise UnsupportedError(
                    "MLX adapters contain only low-rank matrices; they cannot express new values, biases or transposed "
                    "weights; merge the adapter into its base (ingot merge)",
                    rule="adapter.unsupported",
                    where=name,
                )
            scaled = item.with_scale(scale)
            if len(item.a.shape) == 3:
                yield f"{module}.lora_a", scaled.a
                yield f"{module}.lora_b", scaled.b
            elif item.embedding:
                yield f"{module}.lora_a", scaled.b
                yield f"{module}.lora_b", scaled.a
            else:
                yield f"{module}.lora_a", scaled.a.transpose()
                yield f"{module}.lora_b", scaled.b.transpose()
            if item.magnitude is not None:
                yield f"{module}.m", item.magnitude
