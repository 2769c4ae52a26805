"""Layers as GPTQModel, AutoAWQ and compressed-tensors pack them, and their values, from descriptions alone:
one code at a time, in Python's own integers. Nothing of Ingot is used."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Layer:
    """Codes [outputs, inputs], scales and zero points [outputs, groups], the group of each input."""

    codes: Array
    scales: Array
    points: Array
    order: Array
    bits: int

    @property
    def values(self) -> Array:
        """``(q - z) * s`` in f32, rounded once to the type of the scales."""
        difference = self.codes.astype(np.float32) - self.points.astype(np.float32)[:, self.order]
        product: Array = difference * self.scales.astype(np.float32)[:, self.order]
        return product.astype(self.scales.dtype)


def layer(
    rows: int, cols: int, bits: int, group: int, *, sym: bool = False, order: Array | None = None, low: int = 0
) -> Layer:
    """Random codes; zero points from ``low`` on, all in the middle where ``sym``."""
    rng = np.random.default_rng(rows * cols + bits)
    groups = -(-cols // group)
    points = rng.integers(low, 1 << bits, (rows, groups))
    if sym:
        points[:] = 1 << (bits - 1)
    scales = rng.uniform(0.001, 0.1, (rows, groups)).astype(np.float16)
    codes = rng.integers(0, 1 << bits, (rows, cols))
    return Layer(codes, scales, points, np.arange(cols) // group if order is None else order, bits)


def words(codes: Sequence[int], bits: int) -> list[int]:
    """One stream, low bits first, in words of 32 bits."""
    total = sum(int(code) << bits * index for index, code in enumerate(codes))
    return [total >> 32 * index & 0xFFFFFFFF for index in range(-(-len(codes) * bits // 32))]


def rows_of_words(matrix: Array, bits: int) -> Array:
    return np.array([words(row, bits) for row in matrix.tolist()], np.uint32).view(np.int32)


def gptq(stem: str, of: Layer, *, less: bool = True) -> dict[str, Array]:
    """Codes along the inputs, zero points along the outputs, less by one in v1."""
    points = of.points.T - less
    if points.min() >= 0:
        zeros = rows_of_words(points, of.bits)
    elif 32 % of.bits == 0:  # packed as they are, then one off every field of the word: the borrow runs on
        ones = sum(1 << shift for shift in range(0, 32, of.bits))
        zeros = (rows_of_words(of.points.T, of.bits).view(np.uint32) - np.uint32(ones)).view(np.int32)
    else:
        zeros = rows_of_words(points & (1 << of.bits) - 1, of.bits)
    return {
        f"{stem}.qweight": np.ascontiguousarray(rows_of_words(of.codes, of.bits).T),
        f"{stem}.qzeros": zeros,
        f"{stem}.scales": np.ascontiguousarray(of.scales.T),
        f"{stem}.g_idx": of.order.astype(np.int32),
    }


def interleaved(matrix: Array) -> Array:
    """Rows of codes in AWQ's words: bits 4 i of a word are column ``8 c + AWQ_ORDER[i]``."""
    blocks = matrix.reshape(len(matrix), -1, 8)
    return np.array(
        [[sum(int(block[at]) << 4 * lane for lane, at in enumerate(AWQ_ORDER)) for block in row] for row in blocks],
        np.uint32,
    ).view(np.int32)


def awq(stem: str, of: Layer) -> dict[str, Array]:
    return {
        f"{stem}.qweight": interleaved(np.ascontiguousarray(of.codes.T)),
        f"{stem}.qzeros": interleaved(np.ascontiguousarray(of.points.T)),
        f"{stem}.scales": np.ascontiguousarray(of.scales.T),
    }


def gemv(stem: str, of: Layer, group: int) -> dict[str, Array]:
    """Codes and zero points along the inputs, zero points padded to words by the group's size, scales with them."""
    rows, groups = of.scales.shape
    multiple = {32: 4, 64: 2}.get(group, 1)
    width = (groups + 8 * multiple - 1) // (8 * multiple) * multiple
    points, scales = np.zeros((rows, 8 * width), int), np.zeros((rows, 8 * width), np.float16)
    points[:, :groups], scales[:, :groups] = of.points, of.scales
    zeros = rows_of_words(points, 4)
    return {f"{stem}.qweight": rows_of_words(of.codes, 4), f"{stem}.qzeros": zeros, f"{stem}.scales": scales}


def pack_quantized(stem: str, of: Layer, *, sym: bool, ordered: bool = False) -> dict[str, Array]:
    found = {
        f"{stem}.weight_packed": rows_of_words(of.codes, of.bits),
        f"{stem}.weight_scale": of.scales,
        f"{stem}.weight_shape": np.array(of.codes.shape, np.int64),
    }
    if not sym:
        found[f"{stem}.weight_zero_point"] = np.ascontiguousarray(rows_of_words(of.points.T, of.bits).T)
    if ordered:
        found[f"{stem}.weight_g_idx"] = of.order.astype(np.int32)
    return found


def ct_config(bits: int, group: int | None, *, sym: bool, format: str = "pack-quantized") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, "ignore": ["lm_head"]}


def folder(path: Path, entries: dict[str, Array], quantization: dict[str, Any]) -> Path:
    """Write a model folder."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(entries, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return path
