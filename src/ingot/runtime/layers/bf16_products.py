"""Products with weights that bf16 holds exactly, by a processor that multiplies bf16 itself: about twice as fast.

Inputs are rounded to bf16, sums are in f32, and what comes out is rounded to bf16: what transformers does when it runs
such a model in its own type. All between these products stays in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Product = Callable[[Any, Any, Any], Any]
_ROWS = 1 << 22  # elements of a weight that are compared at a time


def bf16_product(torch: Any) -> Product | None:
    """Return ``linear(inputs, weight, bias)`` of f32 without gradients; None where the processor would not gain.

    Weights that bf16 does not hold are multiplied in f32.
    """
    if not _multiplies(torch):
        return None
    linear, known = torch.nn.functional.linear, dict[tuple[int, int], bool]()

    def product(inputs: Any, weight: Any, bias: Any) -> Any:
        at = weight.data_ptr(), weight.numel()
        if inputs.dtype != torch.float32 or weight.dtype != torch.float32:
            return linear(inputs, weight, bias)
        if at not in known:
            known[at] = _holds(torch, weight)
        if not known[at]:
            return linear(inputs, weight, bias)
        out = linear(inputs.bfloat16(), weight.bfloat16()).float()
        return out if bias is None else out.add_(bias)

    return product


def _holds(torch: Any, weight: Any) -> bool:
    """Whether bf16 has all values of a weight."""
    step = max(1, _ROWS // max(1, weight.shape[-1]))
    return all(torch.equal(some.bfloat16().float(), some) for some in weight.split(step))


def _multiplies(torch: Any) -> bool:
    """Whether the processor multiplies bf16, and torch's library for that is there."""
    if not torch.backends.mkldnn.is_available():
        return False
    ways = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, way, lambda: False)() for way in ways)
