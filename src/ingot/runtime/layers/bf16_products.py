"""Multiply by weights that are exact in bf16 with the processor's bf16 products, which are about twice as fast.

Inputs are rounded to bf16, sums are in f32, and results are rounded to bf16, as in transformers when it runs a bf16
model. All computations between these products stay in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Product = Callable[[Any, Any, Any], Any]
_ROWS = 1 << 22  # elements of a weight that are compared in one step


def bf16_product(torch: Any) -> Product | None:
    """Return ``linear(inputs, weight, bias)`` for f32 without gradients; None if the processor has no bf16 products.

    Weights that are not exact in bf16 are multiplied in f32.
    """
    if not _has_bf16_products(torch):
        return None
    linear = torch.nn.functional.linear
    is_exact = dict[tuple[int, int], bool]()

    def product(inputs: Any, weight: Any, bias: Any) -> Any:
        key = weight.data_ptr(), weight.numel()
        if inputs.dtype != torch.float32 or weight.dtype != torch.float32:
            return linear(inputs, weight, bias)
        if key not in is_exact:
            is_exact[key] = _is_exact_in_bf16(torch, weight)
        if not is_exact[key]:
            return linear(inputs, weight, bias)
        out = linear(inputs.bfloat16(), weight.bfloat16()).float()
        return out if bias is None else out.add_(bias)

    return product


def _is_exact_in_bf16(torch: Any, weight: Any) -> bool:
    """Return whether bf16 represents all values of a weight exactly."""
    step = max(1, _ROWS // max(1, weight.shape[-1]))
    return all(torch.equal(rows.bfloat16().float(), rows) for rows in weight.split(step))


def _has_bf16_products(torch: Any) -> bool:
    """Return whether the processor multiplies bf16 and torch has the library for it."""
    if not torch.backends.mkldnn.is_available():
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)
