"""Embedding and head of a model without weights: their rows are decoded on demand, because both are large.

An embedding decodes the rows of the current tokens. A head, and its gradient, multiply by one block of rows at a time.
Memory holds one block of rows in f32, and the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ingot.core.border import require
from ingot.model.tensor import Tensor
from ingot.runtime.arrays.torch import from_numpy
from ingot.runtime.loading.transformers_packed import Placeholder
from ingot.runtime.loading.transformers_weights import materialize

ROWS = 32 << 20
"""Bytes of f32 rows that are decoded at a time."""
_SINGLE_ROW_RATIO = 64  # below this share of rows, reading single rows is faster than reading all


def embed_by_rows(site: Placeholder) -> None:
    """Change an embedding so that it decodes rows of its placeholder's tensor when tokens need them."""
    module, tensor, torch = site.module, site.tensor, require("torch", "torch")
    original, padding, empty = module.forward, getattr(module, "padding_idx", None), site.parameter

    def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        row_ids, indices = tokens.unique(return_inverse=True)
        rows = read_rows(torch, tensor, row_ids.cpu()).to(tokens.device)
        module._parameters[site.attribute] = torch.nn.Parameter(rows, requires_grad=False)
        module.padding_idx = None  # only training uses this index into the full table
        try:
            return original(indices, *args, **kwargs)
        finally:
            module._parameters[site.attribute], module.padding_idx = empty, padding

    module.forward = forward


def head_by_rows(site: Placeholder) -> None:
    """Change a head so that it decodes its placeholder's tensor and multiplies by it in blocks of rows."""
    torch = require("torch", "torch")
    product, module = partial(_product(torch).apply, site.tensor), site.module

    def forward(inputs: Any) -> Any:
        logits = product(inputs)
        return logits if module.bias is None else logits + module.bias

    module.forward = forward


def read_rows(torch: Any, tensor: Tensor, row_ids: Any) -> Any:
    """Return rows of a tensor in f32: [len(row_ids), cols]."""
    out = torch.empty(len(row_ids), tensor.shape[1])
    if len(row_ids) * _SINGLE_ROW_RATIO < tensor.shape[0]:
        for index, row in enumerate(row_ids.tolist()):
            out[index] = from_numpy(tensor[row]).float()
        return out
    for first, values in _chunks(torch, tensor):
        selected = (row_ids >= first) & (row_ids < first + len(values))
        out[selected] = values[row_ids[selected] - first]
    return out


def _chunks(torch: Any, tensor: Tensor) -> Iterator[tuple[int, Any]]:
    """Yield blocks of rows in f32, each with the index of its first row."""
    rows, cols = tensor.shape
    step = max(1, ROWS // (4 * cols))
    if step >= rows:
        yield 0, materialize(tensor, torch.float32, torch.device("cpu"))
        return
    for first in range(0, rows, step):
        yield first, from_numpy(tensor[first : min(first + step, rows)]).float()


def _product(torch: Any) -> Any:
    """Return a torch function that multiplies inputs [..., cols] by a tensor's transpose: [..., rows]."""

    def forward(context: Any, tensor: Tensor, inputs: Any) -> Any:
        context.tensor = tensor
        out = inputs.new_empty(*inputs.shape[:-1], tensor.shape[0])
        for first, values in _chunks(torch, tensor):
            out[..., first : first + len(values)] = torch.nn.functional.linear(inputs, values.to(inputs.device))
        return out

    def backward(context: Any, gradient: Any) -> Any:
        total = gradient.new_zeros(*gradient.shape[:-1], context.tensor.shape[1])
        for first, values in _chunks(torch, context.tensor):
            total += gradient[..., first : first + len(values)] @ values.to(gradient.device)
        return None, total

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("ByRows", (torch.autograd.Function,), methods)
