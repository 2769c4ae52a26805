"""An evaluator of ML programs in NumPy, with states, for the operations of Ingot's programs.

coremltools loads the package, infers all types and shapes anew. Operations compute in
f32; each result is then rounded to the type that the program states.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_NAMES = {"fp16": np.float16, "fp32": np.float32, "int16": np.int16, "int32": np.int32, "uint16": np.uint16}


def softmax(x: Array, axis: Any) -> Array:
    shifted = np.exp(x - x.max(axis=int(axis), keepdims=True))
    result: Array = shifted / shifted.sum(axis=int(axis), keepdims=True)
    return result


def layer_norm(x: Array, axes: Array, epsilon: Any) -> Array:
    along = tuple(int(axis) for axis in axes)
    mean, spread = x.mean(axis=along, keepdims=True), x.var(axis=along, keepdims=True)
    result: Array = (x - mean) / np.sqrt(spread + np.float32(epsilon))
    return result


def matmul(x: Array, y: Array, transpose_x: Any, transpose_y: Any) -> Array:
    return (x.swapaxes(-1, -2) if transpose_x else x) @ (y.swapaxes(-1, -2) if transpose_y else y)


def linear(x: Array, weight: Array, bias: Any = None) -> Array:
    return x @ weight.T + (0 if bias is None else bias)


def gelu(x: Array, mode: Any) -> Array:
    assert str(mode) == "TANH_APPROXIMATION"
    result: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def window(
    x: Array, begin: Array, end: Array, stride: Any = None, begin_mask: Any = None, end_mask: Any = None,
    squeeze_mask: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the NumPy index of the slice operations of MIL."""
    none = [False] * x.ndim
    steps = [1] * x.ndim if stride is None else [int(step) for step in stride]
    masks = [none if mask is None else list(mask) for mask in (begin_mask, end_mask, squeeze_mask)]
    index: list[Any] = []
    for axis in range(x.ndim):
        first = None if masks[0][axis] else int(begin[axis])
        last = None if masks[1][axis] else int(end[axis])
        assert (first or 0) >= 0
        assert last is None or (first or 0) < last <= x.shape[axis], "a slice that leaves the array"
        index.append((first or 0) if masks[2][axis] else slice(first, last, steps[axis]))
    return tuple(index)


def slice_update(x: Array, update: Array, **where: Any) -> Array:
    result = x.copy()
    index = window(x, **where)
    assert result[index].shape == update.shape
    result[index] = update
    return result


# What each operation of MIL says.
MEANING: dict[str, Callable[..., Any]] = {
    "gather": lambda x, indices, axis, **_: np.take(x, indices, axis=int(axis)),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "greater_equal": lambda x, y: x >= y,
    "select": lambda cond, a, b: np.where(cond, a, b),  # noqa: PLW0108 - called with names
    "tanh": lambda x: np.tanh(x),  # noqa: PLW0108 - called with names
    "cast": lambda x, dtype: x.astype(_NAMES[str(dtype)]),
    "shape": lambda x: np.array(x.shape, np.int32),
    "linear": linear,
    "silu": lambda x: x * (0.5 + 0.5 * np.tanh(0.5 * x)),
    "gelu": gelu,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "matmul": matmul,
    "concat": lambda values, axis, interleave: np.concatenate(values, axis=int(axis)),
    "split": lambda x, num_splits, axis, **_: np.split(x, int(num_splits), axis=int(axis)),
    "reshape": lambda x, shape: x.reshape(shape),
    "expand_dims": lambda x, axes: np.expand_dims(x, tuple(int(axis) for axis in axes)),
    "transpose": lambda x, perm: x.transpose(perm),
    "slice_by_index": lambda x, **where: x[window(x, **where)],
    "slice_update": slice_update,
}


class Program:
    """A package's function ``main``; a call keeps the states for the next one.

    ``rewritten``: as coremltools' passes rewrite it, with dense constants.
    """

    def __init__(self, path: Path, *, rewritten: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import coremltools
            from coremltools.converters.mil.frontend.milproto import load
            from coremltools.converters.mil.mil import types

            model = coremltools.models.MLModel(str(path), skip_model_load=True)
            self.description = model.get_spec().description
            if rewritten:
                model = coremltools.optimize.coreml.decompress_weights(model)
            version = model._spec.specificationVersion
            program = load.load(model._spec, specification_version=version, file_weights_dir=model.weights_dir)
        self.function = program.functions["main"]
        self._dtype = types.nptype_from_builtin
        self.constants = {
            op.outputs[0].name: op.materialized_val_inference() if op.op_type != "const" else op.outputs[0].val
            for op in self.function.operations
            if op.op_type == "const" or op.op_type.startswith("constexpr_")
        }
        """Values of the constants by name, compressed ones included."""
        self.states = dict[str, Array]()
        self.reset()

    def reset(self) -> None:
        """Fill the states with zeros, as ``makeState`` of Core ML does."""
        for state in self.description.state:
            array = state.type.stateType.arrayType
            self.states[state.name] = np.zeros(tuple(array.shape), np.float16)

    def __call__(self, **inputs: Array) -> dict[str, Array]:
        """Run the program and return its outputs; the inputs' sizes must be in their ranges."""
        for item in self.description.input:
            array = item.type.multiArrayType
            limits = [(one.lowerBound, one.upperBound) for one in array.shapeRange.sizeRanges]
            limits = limits or [(size, size) for size in array.shape]
            for size, (low, high) in zip(inputs[item.name].shape, limits, strict=True):
                assert low <= size <= high, item.name
        values: dict[str, Any] = {**self.constants, **inputs}
        for op in self.function.operations:
            if op.outputs[0].name in self.constants:
                continue
            bound = {key: item for key, item in op.inputs.items() if item is not None}
            if op.op_type == "read_state":
                values[op.outputs[0].name] = self.states[bound["input"].name]
            elif op.op_type == "coreml_update_state":
                self.states[bound["state"].name] = values[op.outputs[0].name] = _value(values, bound["value"])
            else:
                self._run(op, {key: _wide(_value(values, item)) for key, item in bound.items()}, values)
        return {output.name: values[output.name] for output in self.function.outputs}

    def _run(self, op: Any, inputs: Mapping[str, Any], values: dict[str, Any]) -> None:
        result = MEANING[op.op_type](**inputs)
        for output, array in zip(op.outputs, result if isinstance(result, list) else [result], strict=True):
            for size, expected in zip(array.shape, output.shape, strict=True):
                assert size == expected or not isinstance(expected, int), (op.name, output.shape, array.shape)
            values[output.name] = array.astype(self._dtype(output.dtype))


def _value(values: Mapping[str, Any], item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return [_value(values, inner) for inner in item]
    return values.get(item.name, item.val)


def _wide(item: Any) -> Any:
    if isinstance(item, list):
        return [_wide(inner) for inner in item]
    is_half = isinstance(item, (np.ndarray, np.generic)) and item.dtype == np.float16
    return item.astype(np.float32) if is_half else item
