"""The two ends of a model without weights, which are as large as the vocabulary: rows are decoded as they are wanted.

An embedding gets the rows of the tokens at hand. A head multiplies by some rows after others, and so does its gradient:
what is in memory is some rows in f32, and the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from ingot.core.extras import require
from ingot.model.tensor import Tensor
from ingot.runtime.arrays.torch import from_numpy
from ingot.runtime.loading.transformers_packed import Placeholder
from ingot.runtime.loading.transformers_weights import materialize

ROWS = 32 << 20
"""Bytes of rows in f32 that are decoded at a time."""
_FEW = 64  # one of so many rows is read by itself, sooner than all of them


def embed_by_rows(site: Placeholder) -> None:
    """Let an embedding find its rows in the tensor that its weight stands for."""
    module, tensor, torch = site.module, site.tensor, require("torch", "torch")
    own, padding, empty = module.forward, getattr(module, "padding_idx", None), site.parameter

    def forward(tokens: Any, *args: Any, **kwargs: Any) -> Any:
        wanted, places = tokens.unique(return_inverse=True)
        module._parameters[site.attribute] = torch.nn.Parameter(_rows(torch, tensor, wanted), requires_grad=False)
        module.padding_idx = None  # of the whole table; it matters to training alone
        try:
            return own(places, *args, **kwargs)
        finally:
            module._parameters[site.attribute], module.padding_idx = empty, padding

    module.forward = forward


def head_by_rows(site: Placeholder) -> None:
    """Let a head multiply by some rows of its tensor after others."""
    torch = require("torch", "torch")
    product, module = partial(_product(torch).apply, site.tensor), site.module

    def forward(inputs: Any) -> Any:
        logits = product(inputs)
        return logits if module.bias is None else logits + module.bias

    module.forward = forward


def _rows(torch: Any, tensor: Tensor, wanted: Any) -> Any:
    """Return rows in f32: [len(wanted), cols]."""
    out = torch.empty(len(wanted), tensor.shape[1])
    if len(wanted) * _FEW < tensor.shape[0]:
        for place, row in enumerate(wanted.tolist()):
            out[place] = from_numpy(tensor[row]).float()
        return out
    for first, values in _chunks(torch, tensor):
        here = (wanted >= first) & (wanted < first + len(values))
        out[here] = values[wanted[here] - first]
    return out


def _chunks(torch: Any, tensor: Tensor) -> Iterator[tuple[int, Any]]:
    """Yield some rows in f32 after others, with the number of the first."""
    rows, cols = tensor.shape
    step = max(1, ROWS // (4 * cols))
    if step >= rows:
        yield 0, materialize(tensor, torch.float32, torch.device("cpu"))
        return
    for first in range(0, rows, step):
        yield first, from_numpy(tensor[first : min(first + step, rows)]).float()


def _product(torch: Any) -> Any:
    """Return inputs [..., cols] times the transpose of a tensor's rows, [..., rows], as a function of torch's."""

    def forward(context: Any, tensor: Tensor, inputs: Any) -> Any:
        context.tensor = tensor
        out = inputs.new_empty(*inputs.shape[:-1], tensor.shape[0])
        for first, values in _chunks(torch, tensor):
            out[..., first : first + len(values)] = torch.nn.functional.linear(inputs, values)
        return out

    def backward(context: Any, gradient: Any) -> Any:
        total = gradient.new_zeros(*gradient.shape[:-1], context.tensor.shape[1])
        for first, values in _chunks(torch, context.tensor):
            total += gradient[..., first : first + len(values)] @ values
        return None, total

    ways = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("ByRows", (torch.autograd.Function,), ways)
