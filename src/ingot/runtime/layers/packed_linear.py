"""Torch layers that compute from packed weights: INT4, INT8, palettes and trellises stay packed in memory.

Importing this module needs torch (``core.border.require`` names the extra); no module imports it at its top.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.nn import functional

from ingot.codecs.packed import CODECS, Packed, matrix_of, stays_packed
from ingot.core.border import require
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime.parallel import share_openmp
from ingot.errors import UnsupportedError, UsageError
from ingot.model.layouts.affine import AffineLayout
from ingot.model.tensor import Tensor
from ingot.runtime.arrays.torch import from_numpy, to_numpy
from ingot.runtime.layers.decoded_on_use import DecodedOnUse


def decode_rows(params: AffineLayout, cols: int, packed: Any, scales: Any, zeros: Any) -> Any:
    """Return decoded rows [n, cols] in f32.

    Parameters
    ----------
    packed : uint8 tensor, [n, row bytes]
    scales, zeros : float tensors, [n, scales of a row], or [1] for one scale per tensor; ``zeros`` may be None
    """
    q = _integers(_codes(packed, cols, params), params)
    if zeros is None and params.zero_point is not None:
        q = q - float(params.zero_point)
    scale = _broadcast(scales, params, cols)
    if zeros is None:
        return scale * q
    zero = _broadcast(zeros, params, cols)
    return scale * q + zero if params.offset else scale * (q - zero)


def _codes(packed: Any, cols: int, params: AffineLayout) -> Any:
    """Unpack rows of codes: [n, row bytes] to [n, cols], one code per byte."""
    torch = require("torch", "torch")
    if params.bits == 8:
        return packed[:, :cols]
    if params.bits == 4:
        pair = [packed & 15, packed >> 4]
        return torch.stack(pair[::-1] if params.msb else pair, dim=2).flatten(1)[:, :cols]
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    stream = packed.unsqueeze(2) >> (shifts.flip(0) if params.msb else shifts) & 1
    bits = stream.flatten(1)[:, : cols * params.bits].unflatten(1, (cols, params.bits))
    weights = shifts[: params.bits]
    return (bits << (weights.flip(0) if params.msb else weights)).sum(dim=2, dtype=torch.uint8)


def _integers(codes: Any, params: AffineLayout) -> Any:
    """Return the integers that codes stand for, as f32; signed codes are in two's complement."""
    torch = require("torch", "torch")
    if not params.signed:
        return codes.to(torch.float32)
    half = 1 << (params.bits - 1)
    return ((codes ^ half).to(torch.int16) - half).to(torch.float32)


def _broadcast(values: Any, params: AffineLayout, cols: int) -> Any:
    torch = require("torch", "torch")
    wide = values.to(torch.float32)
    if params.group_size is None:
        return wide.reshape(-1, 1)
    return wide.repeat_interleave(min(params.group_columns(cols), cols), dim=1)[:, :cols]


SCRATCH = 8 << 20
"""Maximum number of bytes of decoded weights that a larger product holds at a time; at least one row is decoded."""

KERNELS = frozenset({"cpu"})
"""Types of devices with kernels of Ingot; other devices use torch operations."""

_scratch = threading.local()
_rows = threading.local()
_MAX_SINGLE_ROWS = 64  # maximum rows of the kernel for few rows
_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_CARRIERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@contextmanager
def rows_alone() -> Iterator[None]:
    """Make packed layers on this thread compute up to 64 rows with the kernel for one row.

    Each row of a result then has the same bits as if it were computed alone. Without this context, more than a few rows
    are computed by another kernel, which adds in another order.
    """
    _rows.alone = True
    try:
        yield
    finally:
        _rows.alone = False


def has_kernels(device: torch.device) -> bool:
    """Return whether Ingot has kernels for a device."""
    return device.type in KERNELS


@dataclass(slots=True)
class _Parts:
    """The parts of a packed matrix as torch tensors.

    ``scales`` and ``zeros`` have integer dtypes of the scale's size, so that casts of a module do not change them.
    """

    matrix_cls: Callable[..., Packed]
    params: Any
    shape: tuple[int, int]
    scale_dtype: torch.dtype
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def matrix(self) -> Packed:
        scales = to_numpy(self.scales.view(self.scale_dtype))
        zeros = None if self.zeros is None else to_numpy(self.zeros.view(self.scale_dtype))
        return self.matrix_cls(self.params, self.shape, to_numpy(self.packed), scales, zeros)

    def decode(self, rows: Any, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(self.params, AffineLayout):
            return self._decode_on_cpu(rows, dtype).to(self.packed.device)
        packed = _pick(self.packed.view(self.shape[0], self.params.row_bytes(self.shape[1])), rows)
        scales = self._scales_of(self.scales, rows)
        zeros = None if self.zeros is None else self._scales_of(self.zeros, rows)
        values: torch.Tensor = decode_rows(self.params, self.shape[1], packed, scales, zeros).to(dtype)
        return values

    def _decode_on_cpu(self, rows: Any, dtype: torch.dtype) -> torch.Tensor:
        """Decode with the kernels on the CPU."""
        matrix = replace(self, packed=self.packed.cpu(), scales=self.scales.cpu()).matrix()
        ids = rows.cpu() if not isinstance(rows, slice) else torch.arange(self.shape[0])[rows]
        target = dtype if dtype in _NAMES else torch.float32
        first, last = (int(ids.min()), int(ids.max()) + 1) if ids.numel() else (0, 0)
        out = torch.empty(ids.numel(), self.shape[1], dtype=target)
        if ids.numel() == last - first and bool((ids == torch.arange(first, last)).all()):
            matrix.decode_into(first, to_numpy(out), torch.get_num_threads())
        else:
            for index, row in enumerate(ids.tolist()):
                matrix.decode_into(row, to_numpy(out[index : index + 1]), 1)
        return out.to(dtype)

    def _scales_of(self, values: torch.Tensor, rows: Any) -> torch.Tensor:
        values = values.view(self.scale_dtype)
        if self.params.per_tensor:
            return values
        count, *per_row = self.params.scale_shape(*self.shape)
        return _pick(values.view(count, per_row[0] if per_row else 1), rows)


class _CachedMatrix:
    """A matrix over the buffers of a module, and a check whether the module still has these buffers.

    Other code may replace buffers without notice: ``load_state_dict(assign=True)``, ``torch.func.functional_call``,
    setting ``buffer.data``.
    """

    __slots__ = ("_buffer_addresses", "_packed", "_scales", "_zeros", "matrix")

    def __init__(self, buffers: Mapping[str, Any], matrix: Packed) -> None:
        self.matrix = matrix
        self._packed = buffers["packed"]
        self._scales = buffers["scales"]
        self._zeros = buffers["zeros"]
        self._buffer_addresses = self._addresses()

    def matches(self, buffers: Mapping[str, Any]) -> bool:
        same = (
            self._packed is buffers["packed"] and self._scales is buffers["scales"] and self._zeros is buffers["zeros"]
        )
        return same and self._buffer_addresses == self._addresses()

    def _addresses(self) -> tuple[int, int, int]:
        return self._packed.data_ptr(), self._scales.data_ptr(), 0 if self._zeros is None else self._zeros.data_ptr()


class PackedWeight(torch.nn.Module):
    """A matrix [rows, cols] stored as packed parts; the base class of packed layers.

    Codes, scales and zero points are buffers of integer dtypes: they move with the module to a device, and ``half()``
    or ``to(dtype)`` do not change them. They share the memory of ``matrix`` if torch allows it.

    Parameters
    ----------
    matrix : Packed
    dtype : torch.dtype
        Dtype of ``weight``; ``half()`` or ``to(dtype)`` change it.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, matrix: Packed, dtype: torch.dtype) -> None:
        super().__init__()
        share_openmp()
        self.matrix_cls = type(matrix)
        self.params = matrix.params
        self.shape = matrix.shape
        self.dtype = dtype
        scales = from_numpy(matrix.scales)
        self.scale_dtype: torch.dtype = scales.dtype
        carrier = _CARRIERS[self.scale_dtype]
        self.register_buffer("packed", from_numpy(matrix.packed))
        self.register_buffer("scales", scales.view(carrier))
        zeros = None if matrix.zeros is None else from_numpy(matrix.zeros).view(carrier)
        self.register_buffer("zeros", zeros)
        self._cached_matrix: _CachedMatrix | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The decoded matrix in ``dtype``, decoded when its values are used. It has no gradient."""
        parts, dtype = self._parts(), self.dtype
        return DecodedOnUse(parts.shape, dtype, parts.packed.device, lambda: parts.decode(slice(None), dtype))

    @property
    def matrix(self) -> Packed:
        """The parts as arrays over the same memory. Only on the CPU."""
        cached = self._cached_matrix
        if cached is None or not cached.matches(self._buffers):
            cached = self._cached_matrix = _CachedMatrix(self._buffers, self._parts().matrix())
        return cached.matrix

    def decode(self, rows: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the selected rows (a slice, or a tensor of indices from 0), decoded with torch operations."""
        return self._parts().decode(rows, dtype)

    def _parts(self) -> _Parts:
        return _Parts(self.matrix_cls, self.params, self.shape, self.scale_dtype, self.packed, self.scales, self.zeros)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._cached_matrix = None  # it would keep old buffers in memory
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        apply: Any = super()._apply
        return apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached_matrix": None}

    def extra_repr(self) -> str:
        text = f"{self.params.codec}, {self.params.bits} bits per code"
        if isinstance(self.params, AffineLayout):
            text += f", a scale per {self.params.group_size or self.params.granularity}"
        return f"{self.shape[1]} to {self.shape[0]}, {text}"


class PackedLinear(PackedWeight):
    """``torch.nn.Linear`` with packed weights: ``x @ w.T + bias`` for x [..., in_features] in f32, f16, bf16 or f64.

    On the CPU the kernels multiply x by the codes directly, sum in f32, and round once. The order of summation does not
    depend on the number of threads (``torch.get_num_threads()``). For more than a few rows in f16 and bf16, it differs
    from the order for few rows. For other layouts, more rows in f32 and other devices, blocks of rows of the matrix
    that fit ``SCRATCH`` are decoded and multiplied by torch.

    If ``rounding`` is set (``compute="int8"``), x in these dtypes is rounded to 8 bits in blocks of 32 columns. Layouts
    with ``Packed.rounds`` then use integer products, with the same result for any number of rows.

    x and the bias have gradients, the weights do not; backward decodes the matrix again. Under autocast x and the
    result have autocast's dtype.

    Parameters
    ----------
    matrix : Packed
    bias : torch.Tensor or Parameter [out_features], optional
        The bias; it is used unchanged.
    dtype : torch.dtype
    """

    def __init__(self, matrix: Packed, bias: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(matrix, dtype)
        self.out_features, self.in_features = matrix.shape
        self.rounding = False
        self.bias: Any
        if bias is None or isinstance(bias, torch.nn.Parameter):
            self.register_parameter("bias", bias)
        else:
            self.register_parameter("bias", torch.nn.Parameter(bias, requires_grad=False))

    @classmethod
    def from_tensor(cls, tensor: Tensor, bias: Any = None, dtype: torch.dtype | None = None) -> PackedLinear:
        """Return a layer over the parts of a stored tensor. Raises the errors of ``matrix_of``."""
        return cls(matrix_of(tensor.private()), bias, dtype or _torch_dtype(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out_features] in the dtype of x. Raises ``UsageError`` ``matmul.shape``, ``matmul.dtype``."""
        if not (shape := x.shape) or shape[-1] != self.in_features:
            raise UsageError(f"expected x [..., {self.in_features}], found {list(shape)}", rule="matmul.shape")
        if x.dtype not in _NAMES and x.dtype != torch.float64:
            raise UsageError(f"expected x in f32, f16, bf16 or f64, found {x.dtype}", rule="matmul.dtype")
        flat = _autocast(x) if len(shape) == 2 else _autocast(x).reshape(prod(shape[:-1]), self.in_features)
        recorded: Any = _Product.apply
        graded = torch.is_grad_enabled()
        out: torch.Tensor = recorded(flat, self.bias, self) if graded else self.product(flat, self.bias)
        return out if len(shape) == 2 else out.view(*shape[:-1], self.out_features)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return ``x @ w.T + bias`` for x [rows, in_features] without recording a gradient."""
        x = (x.detach() if x.requires_grad else x).contiguous()
        bias = None if bias is None else bias.detach()
        if x.dtype in _NAMES and has_kernels(x.device):
            if self.rounding and self.matrix.rounds:
                return self._multiply_codes(x, bias, self.matrix.int8_bits)
            alone = x.shape[0] <= _MAX_SINGLE_ROWS and getattr(_rows, "alone", False)
            product = self.matrix.choose_product(_NAMES[x.dtype], 1 if alone else x.shape[0])
            if product is not None:
                return self._multiply_codes(x, bias, product)
        return self._multiply_decoded(x, None if bias is None else bias.to(x.dtype))

    def _multiply_codes(self, x: torch.Tensor, bias: torch.Tensor | None, product: Callable[..., None]) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        if bias is not None and bias.dtype not in _NAMES:
            bias = bias.float()
        types = (_NAMES[x.dtype], _NAMES[x.dtype if bias is None else bias.dtype])
        product(
            _bits(x),
            _bits(out),
            None if bias is None else _bits(bias),
            types,
            torch.get_num_threads(),
        )
        return out

    def _multiply_decoded(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.out_features)
        step = max(1, SCRATCH // max(1, self.in_features * x.element_size()))
        native = x.dtype in _NAMES and has_kernels(x.device)
        for start in range(0, self.out_features, step):
            rows = slice(start, min(start + step, self.out_features))
            weights = self._decode_into_scratch(rows, x.dtype) if native else self.decode(rows, x.dtype)
            out[:, rows] = functional.linear(x, weights, None if bias is None else bias[rows])
        return out

    def _decode_into_scratch(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Decode rows with the kernels into memory that the next call on this thread overwrites."""
        count = (rows.stop - rows.start) * self.in_features
        scratch = getattr(_scratch, "bytes", None)
        if scratch is None or scratch.numel() < count * dtype.itemsize:
            scratch = _scratch.bytes = torch.empty(max(SCRATCH, count * dtype.itemsize), dtype=torch.uint8)
        weights = scratch[: count * dtype.itemsize].view(dtype).view(rows.stop - rows.start, self.in_features)
        self.matrix.decode_into(rows.start, to_numpy(weights), torch.get_num_threads())
        return weights


class _Product(torch.autograd.Function):
    """The product as an autograd function: equal values with and without gradients, and no decoded matrix is stored."""

    @staticmethod
    def forward(x: torch.Tensor, bias: torch.Tensor | None, layer: PackedLinear) -> torch.Tensor:
        return layer.product(x, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, bias, layer = inputs
        ctx.parts, ctx.bias_dtype = layer._parts(), None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        for_x = grad @ ctx.parts.decode(slice(None), grad.dtype) if ctx.needs_input_grad[0] else None
        for_bias = grad.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return for_x, for_bias, None


class PackedEmbedding(PackedWeight):
    """``torch.nn.Embedding`` with a packed table: only the looked-up rows are decoded, in ``dtype``."""

    def __init__(self, matrix: Packed, padding_idx: int | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(matrix, dtype)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.padding_idx = padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(ids.reshape(-1), self.dtype).view(*ids.shape, self.embedding_dim)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Return x in autocast's dtype if autocast is on. Like torch, this does not cast f64."""
    device_type = "cpu" if x.is_cpu else x.device.type
    if not (x.is_cpu or torch.amp.is_autocast_available(device_type)) or not torch.is_autocast_enabled(device_type):
        return x
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(device_type))


def _pick(values: torch.Tensor, rows: Any) -> torch.Tensor:
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)


def pack_linears(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Replace linear layers of ``model`` by ``PackedLinear`` and return the names of their weights.

    Parameters
    ----------
    model : torch.nn.Module
        The model; its parameters may be on device meta. Biases stay unchanged.
    tensors : mapping
        Stored tensors by the names of the model's parameters, such as a checkpoint. Quantized matrices ``X.weight`` are
        used if the model has a plain ``torch.nn.Linear`` X of that shape.

    Notes
    -----
    Layers go to the device of their bias or old weight if that is not meta, else they stay on the CPU. A parameter on
    meta whose tensor cannot stay packed is decoded.
    """
    packed = []
    for name, module in list(_linears(model)):
        tensor = tensors.get(f"{name}.weight")
        if tensor is None or tensor.codec not in CODECS or tensor.shape != tuple(module.weight.shape):
            continue
        device = _device(module)
        if not stays_packed(tensor):
            if module.weight.is_meta:
                values = tensor.torch(resolve_dtype(module.weight.dtype).name, device)
                module.weight = torch.nn.Parameter(values, requires_grad=False)
            continue
        layer = PackedLinear.from_tensor(tensor, module.bias, module.weight.dtype)
        layer.train(module.training)
        put_layer(model, name, layer if device.type == "cpu" else layer.to(device))
        packed.append(f"{name}.weight")
    return packed


def put_layer(model: torch.nn.Module, name: str, layer: PackedWeight) -> None:
    """Replace the module ``name`` of a model, and make ``save_pretrained`` of its parents raise an error.

    ``save_pretrained`` would write the packed parts as weights, which no loader reads.
    """
    *path, child = name.split(".")
    setattr(model.get_submodule(".".join(path)), child, layer)
    for depth in range(len(path) + 1):
        module = model.get_submodule(".".join(path[:depth]))
        if hasattr(type(module), "save_pretrained"):
            vars(module)["save_pretrained"] = _refuse_saving


def _refuse_saving(*args: Any, **options: Any) -> None:
    raise UnsupportedError(
        "cannot save packed layers with save_pretrained, because no loader reads their parts: copy or convert the "
        "checkpoint that they came from, load it without keep_packed and save that, or import ingot.hf and load and "
        "save it by transformers' from_pretrained and save_pretrained",
        rule="model.packed",
    )


def _linears(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name:
            yield name, module


def _device(module: torch.nn.Linear) -> torch.device:
    for values in (module.weight, module.bias):
        if values is not None and not values.is_meta:
            return values.device
    return torch.device("cpu")


def _torch_dtype(tensor: Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(resolve_dtype(tensor.dtype).torch))
    return dtype


def _bits(values: torch.Tensor) -> Any:
    """Return the values as an array over the same memory, without the checks of ``to_numpy``; f16 and bf16 become
    u16.
    """
    return values.numpy() if values.dtype == torch.float32 else values.view(torch.uint16).numpy()
