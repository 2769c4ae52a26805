"""Make a model with decoded weights round inputs and results as another program does (option ``arithmetic``).

llama.cpp on a CPU rounds the inputs of linear layers. If the weight is packed, inputs are rounded to blocks of 8-bit
integers. If the weight has 16 bits, inputs are rounded to its type. If it is f32, inputs are not rounded. Products of
integers are exact, and sums are in f32. So only the rounding of inputs differs from a model with decoded weights in
f32, and this module adds it.

MLX rounds weights, inputs and results to one type. This is the type of the scales of packed matrices, or the type of
dense weights if no matrix is packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch

from ingot.errors import UnsupportedError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import ScaledCodebookLayout
from ingot.model.layouts.table import layout_of
from ingot.model.tensor import Tensor

LLAMA_CPP = "llama.cpp"
MLX = "mlx"
_SMALL = 32
_LARGE = 256  # columns of a block of inputs
_LIMIT = 127.0
_SMALL_BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "nvfp4", "q1_0", "q2_0")
"""Types of weights whose inputs llama.cpp rounds in blocks of 32. Inputs of all other packed types are rounded in
blocks of 256.
"""
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def round_small_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return f32 values rounded as Q8_0: 8-bit integers in blocks of 32, times a scale in f16."""
    blocks = values.float().reshape(*values.shape[:-1], -1, _SMALL)
    scale = blocks.abs().amax(-1, keepdim=True) / _LIMIT
    codes = (blocks / scale.where(scale > 0, torch.ones_like(scale))).round()
    return (codes * scale.half().float()).flatten(-2)


def round_large_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return f32 values rounded as Q8_K: 8-bit integers in blocks of 256, times a scale in f32.

    The value of the largest magnitude becomes -127.
    """
    blocks = values.float().reshape(*values.shape[:-1], -1, _LARGE)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = -largest / _LIMIT
    codes = (blocks / scale.where(scale != 0, torch.ones_like(scale))).round().clamp(max=_LIMIT)
    return (codes * scale).flatten(-2)


def use_arithmetic(model: torch.nn.Module, name: str, tensors: Mapping[str, Tensor], format: str) -> torch.nn.Module:
    """Make a decoded f32 model round inputs and results like the program ``name``; return the model.

    Raises
    ------
    UnsupportedError
        ``model.arithmetic``: the program does not read this format or a tensor's codec; for llama.cpp, a packed tensor
        is neither the weight of a linear layer nor an embedding; for MLX, it does not compute in the stored type.
    """
    if name == LLAMA_CPP:
        if format != "gguf":
            raise _unsupported(f"llama.cpp reads GGUF files, and this is {format}: name a GGUF file")
        _round_inputs(model, tensors)
        return model
    return model.to(_compute_dtype(tensors.values()))


def _round_inputs(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Add hooks that round the inputs of linear layers as llama.cpp does for the type of the layer's weight."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    rounds = {id(parameters[name]): _input_rounding(tensor) for name, tensor in tensors.items() if name in parameters}
    handled = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            rounding = rounds.get(id(module.weight))
            handled.add(id(module.weight))
            if rounding is not None:
                module.register_forward_pre_hook(_hook(rounding))
        elif isinstance(module, torch.nn.Embedding):
            handled.add(id(module.weight))
    for name, tensor in tensors.items():
        packed = isinstance(layout_of(tensor), GgmlBlocksLayout)
        if packed and (name not in parameters or id(parameters[name]) not in handled):
            raise _unsupported(
                f"{name} is packed and not the weight of a linear layer, whose inputs alone can be rounded: evaluate "
                "without arithmetic"
            )


def _hook(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., tuple[torch.Tensor]]:
    return lambda module, inputs: (rounding(inputs[0]),)


def _input_rounding(tensor: Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function with which llama.cpp rounds inputs of a matrix; None if llama.cpp does not round them."""
    layout = layout_of(tensor)
    if isinstance(layout, GgmlBlocksLayout):
        return round_small_blocks if layout.type in _SMALL_BLOCKS else round_large_blocks
    dtype = _DTYPES.get(tensor.dtype, torch.float32)
    return None if dtype is torch.float32 else lambda values: values.to(dtype).to(values.dtype)


def _compute_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the type in which MLX computes: the most frequent type of scales of packed matrices.

    If there are no packed matrices, return the most frequent type of dense tensors. Types are counted by elements.
    """
    packed: Counter[str] = Counter()
    dense: Counter[str] = Counter()
    for tensor in tensors:
        layout = layout_of(tensor)
        if isinstance(layout, AffineLayout):
            packed[str(layout.scales)] += tensor.size
        elif isinstance(layout, DenseLayout):
            dense[tensor.dtype] += tensor.size
        elif not isinstance(layout, ScaledCodebookLayout):
            raise _unsupported(f"{tensor.name} has codec {tensor.codec}, which MLX does not read: convert it first")
    counts = packed or dense
    name = max(counts, key=lambda item: counts[item]) if counts else "bf16"
    if name not in _DTYPES:
        raise _unsupported(f"MLX computes in f32, f16 or bf16, not in {name}")
    return _DTYPES[name]


def _unsupported(message: str) -> UnsupportedError:
    return UnsupportedError(message, rule="model.arithmetic")
