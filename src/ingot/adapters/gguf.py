"""Reader and writer of GGUF adapters: ``general.type`` is ``adapter``; names end in ``.lora_a`` or ``.lora_b``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.adapters.peft import CONFIG_RULE, METHOD_RULE, RANK_RULE, TENSORS_RULE
from ingot.adapters.record import Change, Factor, LowRank, Replacement, finite_number
from ingot.errors import FormatError, UnsupportedError
from ingot.model.checkpoint import Checkpoint

EMBEDDING = "token_embd.weight"
"""The tensor whose factors llama.cpp indexes by token: lora_a is [tokens, r] and lora_b [columns, r]."""
ALPHA = "adapter.lora.alpha"


def read_changes(checkpoint: Checkpoint) -> dict[str, list[Change]]:
    """Return the changes of a GGUF adapter, keyed by llama.cpp's tensor names.

    Raises
    ------
    UnsupportedError
        ``adapter.method``: the adapter is not LoRA; ``adapter.config``: an aLoRA, or a replaced norm.
    FormatError
        ``adapter.config``: no valid alpha; ``adapter.tensors``: unknown names, a missing factor, or no tensors;
        ``adapter.rank``: two factors have incompatible shapes.
    """
    metadata = checkpoint.metadata
    method = metadata.get("adapter.type")
    if method != "lora":
        raise UnsupportedError(
            f"expected adapter.type lora, found {str(method)[:40]!r}", rule=METHOD_RULE, where=checkpoint.location
        )
    if metadata.get("adapter.alora.invocation_tokens"):
        raise UnsupportedError(
            "the adapter applies only after certain tokens (aLoRA); it cannot be merged",
            rule=CONFIG_RULE,
            where=checkpoint.location,
        )
    alpha = finite_number(metadata.get(ALPHA))
    if alpha is None:
        raise FormatError(
            CONFIG_RULE,
            f"expected a number as {ALPHA}, found {str(metadata.get(ALPHA))[:40]!r}",
            where=checkpoint.location,
        )
    parts: dict[str, dict[str, Factor]] = {}
    changes: dict[str, list[Change]] = {}
    for name in checkpoint:
        weight, _, role = name.rpartition(".")
        if role in ("lora_a", "lora_b"):
            parts.setdefault(weight, {})[role] = Factor.from_tensor(checkpoint[name])
        elif name.endswith("norm.weight"):  # llama.cpp accepts these tensors but does not apply them
            raise UnsupportedError(
                "the adapter replaces a norm, which llama.cpp does not apply", rule=CONFIG_RULE, where=name
            )
        else:
            raise FormatError(TENSORS_RULE, "expected a name that ends in .lora_a or .lora_b", where=name)
    for weight, factors in parts.items():
        changes[weight] = [_low_rank(weight, factors, alpha)]
    if not changes:
        raise FormatError(TENSORS_RULE, "the adapter has no tensors", where=checkpoint.location)
    return changes


def _low_rank(weight: str, factors: Mapping[str, Factor], alpha: float) -> LowRank:
    if len(factors) != 2:
        missing = "lora_a" if "lora_a" not in factors else "lora_b"
        raise FormatError(TENSORS_RULE, f"expected lora_a and lora_b, but {missing} is missing", where=weight)
    a = factors["lora_a"]
    b = factors["lora_b"]
    is_embedding = weight == EMBEDDING
    rank = b.shape[-1] if b.shape else 0
    expected = a.shape[1:] if is_embedding else a.shape[-2:-1]
    if (
        len(a.shape) != len(b.shape)
        or len(a.shape) not in (2, 3)
        or expected != (rank,)
        or a.shape[:-2] != b.shape[:-2]
    ):
        raise FormatError(
            RANK_RULE, f"expected factors of one rank, found shapes {list(a.shape)} and {list(b.shape)}", where=weight
        )
    scale = alpha / rank if alpha and rank else 1.0
    return LowRank(b.transpose(), a, scale, embedding=True) if is_embedding else LowRank(a, b, scale)


def gguf_tensors(changes: Mapping[str, Sequence[Change]], alpha: float) -> Iterator[tuple[str, Factor]]:
    """Yield the tensors of a GGUF adapter for changes keyed by llama.cpp's tensor names.

    The format has one ``alpha`` for all modules. If a module has another scale, the ratio is multiplied into one
    factor.

    Raises ``UnsupportedError`` ``adapter.unsupported``: a change that GGUF adapters cannot express.
    """
    for weight, items in changes.items():
        for item in items:
            if not isinstance(item, LowRank) or item.magnitude is not None:
                title = "new values of a tensor" if isinstance(item, Replacement) else "DoRA or biases"
                raise UnsupportedError(
                    f"GGUF adapters cannot express {title}; merge the adapter into its base (ingot merge)",
                    rule="adapter.unsupported",
                    where=weight,
                )
            scaled = item.with_scale(alpha / item.rank)
            if item.embedding:
                yield f"{weight}.lora_a", scaled.b
                yield f"{weight}.lora_b", scaled.a.transpose()
            else:
                yield f"{weight}.lora_a", scaled.a
                yield f"{weight}.lora_b", scaled.b


def gguf_metadata(arch: str, alpha: float, base: str | None) -> dict[str, Any]:
    """Return the metadata of a GGUF adapter for an architecture; ``base`` is the name of the base, if known."""
    values: dict[str, Any] = {
        "general.architecture": arch,
        "general.type": "adapter",
        "adapter.type": "lora",
        ALPHA: alpha,
    }
    return {**values, "general.base_model.count": 1, "general.base_model.0.name": base} if base else values
