"""Layers of torch that compute from packed weights: INT4 and INT8 stay what they are in memory.

This module needs torch to be imported (``core.extras.require`` names the extra); nothing else imports it at the top.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch.nn import functional

from ingot.adapters.packed_decode import decode_rows
from ingot.adapters.torch import from_numpy, to_numpy
from ingot.codecs.affine_matmul import BATCH, PackedMatrix, stays_packed
from ingot.codecs.affine_params import AffineParams
from ingot.core.dtypes import dtype as resolve_dtype
from ingot.errors import UsageError
from ingot.model.tensor import Tensor

SCRATCH = 8 << 20
"""Bytes of decoded weights that a larger product holds at a time; never less than a row."""

_scratch = threading.local()
_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_CARRIERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


class PackedWeight(torch.nn.Module):
    """A matrix [rows, cols] that is held as its parts; what the layers have in common.

    Codes, scales and zero points are buffers of integer types, so that they move with the module to a device and
    ``half()`` or ``to(dtype)`` change none of them. They share the memory of ``matrix`` where torch allows.

    Parameters
    ----------
    matrix : PackedMatrix
    dtype : torch.dtype
        Of ``weight``, when somebody asks for it.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.params: AffineParams = matrix.params
        self.shape = matrix.shape
        self.dtype = dtype
        scales = from_numpy(matrix.scales)
        self.scale_dtype: torch.dtype = scales.dtype
        carrier = _CARRIERS[self.scale_dtype]
        self.register_buffer("packed", from_numpy(matrix.packed))
        self.register_buffer("scales", scales.view(carrier))
        zeros = None if matrix.zeros is None else from_numpy(matrix.zeros).view(carrier)
        self.register_buffer("zeros", zeros)
        self._held: PackedMatrix | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The decoded matrix in ``dtype``, made anew each time; it takes no gradient."""
        with torch.no_grad():
            return self.decode(slice(None), self.dtype)

    @property
    def matrix(self) -> PackedMatrix:
        """The parts as arrays over the same memory; on the CPU only."""
        if self._held is None:
            scales = to_numpy(self.scales.view(self.scale_dtype))
            zeros = None if self.zeros is None else to_numpy(self.zeros.view(self.scale_dtype))
            self._held = PackedMatrix(self.params, self.shape, to_numpy(self.packed), scales, zeros)
        return self._held

    def decode(self, rows: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows that ``rows`` (a slice, or a tensor of indices from 0) picks, by torch's operations."""
        packed = _pick(self.packed.view(self.shape[0], self.params.row_bytes(self.shape[1])), rows)
        scales = self._scales_of(self.scales, rows)
        zeros = None if self.zeros is None else self._scales_of(self.zeros, rows)
        values: torch.Tensor = decode_rows(self.params, self.shape[1], packed, scales, zeros).to(dtype)
        return values

    def _scales_of(self, values: torch.Tensor, rows: Any) -> torch.Tensor:
        values = values.view(self.scale_dtype)
        if self.params.granularity == "tensor":
            return values
        count, *per_row = self.params.scale_shape(*self.shape)
        return _pick(values.view(count, per_row[0] if per_row else 1), rows)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._held = None  # the buffers may lie elsewhere afterwards
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}

    def extra_repr(self) -> str:
        kind = f"{self.params.bits} bits per code, a scale per {self.params.group_size or self.params.granularity}"
        return f"{self.shape[1]} to {self.shape[0]}, {kind}"


class PackedLinear(PackedWeight):
    """``torch.nn.Linear`` with packed weights: ``x @ w.T + bias`` for x [..., in_features] in f32, f16 or bf16.

    On the CPU a few rows of x (``BATCH``, by their type) are multiplied with the codes as they lie, summed in f32 in an
    order that does not depend on the number of threads (``torch.get_num_threads()``), and rounded once. Other layouts,
    more rows and other devices decode as many rows of the matrix at a time as fit ``SCRATCH`` and leave the product to
    torch. There is a gradient for x, none for the weights.

    Parameters
    ----------
    matrix : PackedMatrix
    bias : torch.Tensor or Parameter [out_features], optional
        Kept as it is.
    dtype : torch.dtype
    """

    def __init__(self, matrix: PackedMatrix, bias: Any = None, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(matrix, dtype)
        self.out_features, self.in_features = matrix.shape
        self.bias: Any
        if bias is None or isinstance(bias, torch.nn.Parameter):
            self.register_parameter("bias", bias)
        else:
            self.register_parameter("bias", torch.nn.Parameter(bias, requires_grad=False))

    @classmethod
    def of(cls, tensor: Tensor, bias: Any = None, dtype: torch.dtype | None = None) -> PackedLinear:
        """Return a layer over a stored tensor's parts; raises what ``PackedMatrix.of`` raises."""
        return cls(PackedMatrix.of(tensor), bias, dtype or _torch_dtype(tensor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1:] != (self.in_features,):
            raise UsageError(f"expected x [..., {self.in_features}], found {list(x.shape)}", rule="matmul.shape")
        flat = x.reshape(prod(x.shape[:-1]), self.in_features).contiguous()
        if torch.is_grad_enabled() and x.requires_grad:
            out = functional.linear(flat, self.decode(slice(None), x.dtype), self._bias_in(x.dtype))
        elif x.is_cpu and flat.shape[0] <= BATCH.get(_NAMES.get(x.dtype, ""), 0) and self.matrix.direct:
            out = self._from_codes(flat)
        else:
            out = self._in_blocks(flat)
        return out.view(*x.shape[:-1], self.out_features)

    def _from_codes(self, flat: torch.Tensor) -> torch.Tensor:
        out = torch.empty(flat.shape[0], self.out_features, dtype=flat.dtype)
        bias = None if self.bias is None else self.bias.detach()
        if bias is not None and bias.dtype not in _NAMES:
            bias = bias.float()
        types = (_NAMES[flat.dtype], _NAMES[flat.dtype if bias is None else bias.dtype])
        self.matrix.matmul_bits(
            _bits(flat.detach()),
            _bits(out),
            None if bias is None else _bits(bias),
            types,
            torch.get_num_threads(),
        )
        return out

    def _in_blocks(self, flat: torch.Tensor) -> torch.Tensor:
        out = flat.new_empty(flat.shape[0], self.out_features)
        step = max(1, SCRATCH // max(1, self.in_features * flat.element_size()))
        bias = self._bias_in(flat.dtype)
        native = flat.is_cpu and flat.dtype in _NAMES
        for start in range(0, self.out_features, step):
            rows = slice(start, min(start + step, self.out_features))
            weights = self._decoded_here(rows, flat.dtype) if native else self.decode(rows, flat.dtype)
            out[:, rows] = functional.linear(flat, weights, None if bias is None else bias[rows])
        return out

    def _decoded_here(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Decode some rows by the kernels into memory that the next call of this thread overwrites."""
        count = (rows.stop - rows.start) * self.in_features
        held = getattr(_scratch, "bytes", None)
        if held is None or held.numel() < count * dtype.itemsize:
            held = _scratch.bytes = torch.empty(max(SCRATCH, count * dtype.itemsize), dtype=torch.uint8)
        weights = held[: count * dtype.itemsize].view(dtype).view(rows.stop - rows.start, self.in_features)
        self.matrix.decode_into(rows.start, to_numpy(weights), torch.get_num_threads())
        return weights

    def _bias_in(self, dtype: torch.dtype) -> Any:
        return None if self.bias is None else self.bias.to(dtype)


class PackedEmbedding(PackedWeight):
    """``torch.nn.Embedding`` with a packed table: the rows that are asked for are decoded, in ``dtype``."""

    def __init__(
        self, matrix: PackedMatrix, padding_idx: int | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(matrix, dtype)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.padding_idx = padding_idx

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(ids.reshape(-1), self.dtype).view(*ids.shape, self.embedding_dim)


def _pick(values: torch.Tensor, rows: Any) -> torch.Tensor:
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)


def pack_linears(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    """Replace linear layers of ``model`` by ``PackedLinear`` and return the names of their weights.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters may be on device meta; biases stay as they are.
    tensors : mapping
        Stored tensors by the names of the parameters that they are the values of; a checkpoint, where names agree.
        Taken: quantized matrices ``X.weight`` where the model has a plain ``torch.nn.Linear`` X of that shape.

    Notes
    -----
    Layers go to the device of their bias or old weight where that is not meta, else they stay on the CPU. A parameter
    on meta whose tensor cannot stay packed is decoded into an ordinary one.
    """
    packed = []
    for name, module in list(_linears(model)):
        tensor = tensors.get(f"{name}.weight")
        if tensor is None or tensor.codec != "quantized_group" or tensor.shape != tuple(module.weight.shape):
            continue
        device = _device(module)
        if not stays_packed(tensor):
            if module.weight.is_meta:
                values = tensor.torch(resolve_dtype(module.weight.dtype).name, device)
                module.weight = torch.nn.Parameter(values, requires_grad=False)
            continue
        layer = PackedLinear.of(tensor, module.bias, module.weight.dtype)
        layer.train(module.training)
        _put(model, name, layer if device.type == "cpu" else layer.to(device))
        packed.append(f"{name}.weight")
    return packed


def _linears(model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Linear]]:
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name:
            yield name, module


def _put(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def _device(module: torch.nn.Linear) -> torch.device:
    for values in (module.weight, module.bias):
        if values is not None and not values.is_meta:
            return values.device
    return torch.device("cpu")


def _torch_dtype(tensor: Tensor) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(resolve_dtype(tensor.dtype).torch))
    return found


def _bits(values: torch.Tensor) -> Any:
    """Return an array over the same memory, f16 and bf16 as u16; quicker than ``to_numpy``."""
    return values.numpy() if values.dtype == torch.float32 else values.view(torch.uint16).numpy()
