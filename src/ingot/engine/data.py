"""Steps as JSON takes them, and back: what another process needs to run them on the same sources."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from ingot.engine.diff_step import Diff
from ingot.engine.patch_step import Patch
from ingot.engine.steps import Encode, Move, Repack
from ingot.engine.work import Step
from ingot.model.spec import PartSpec, TensorSpec

_BYTES, _ARRAY, _FLOAT = "$bytes", "$array", "$float"


def step_data(step: Step) -> dict[str, Any]:
    """Return a step as JSON takes it: its kind, what it reads, what it writes, and by which options."""
    step = step.planned
    data = {"spec": spec_data(step.spec), "action": step.action, "rule": step.rule, "exact": step.exact}
    match step:
        case Move():
            return {"kind": "move", **data, "source": step.source, "tensor": step.tensor.name}
        case Repack():
            return {"kind": "repack", **data, "source": step.source, "tensor": step.tensor.name}
        case Encode():
            found = {"kind": "encode", **data, "source": step.source, "tensor": step.tensor.name}
            return found | {"options": plain(step.options)}
        case Diff():
            named = {"source": 1, "tensor": step.tensor.name}
            return {"kind": "diff", **data, **named, "options": plain(step.options)}
        case Patch():
            route = step.route
            stages = [[layer.stage, layer.dtype] for layer in route.layers]
            named = {"source": route.born, "tensor": route.name, "layers": stages}
            return {"kind": "patch", **data, **named, "options": plain(step.options)}
        case _:
            raise TypeError(f"no data for a step {type(step).__name__}")


def spec_data(spec: TensorSpec) -> dict[str, Any]:
    """Return a spec as JSON takes it."""
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "codec": spec.codec,
        "parts": [_part_data(part) for part in spec.parts],
        "params": plain(spec.params),
    }


def _part_data(part: PartSpec) -> dict[str, Any]:
    """As ``dataclasses.asdict``, which takes ten times as long."""
    return {
        "role": part.role,
        "dtype": part.dtype,
        "length": part.length,
        "type": part.type,
        "encoding": part.encoding,
        "uncompressed_length": part.uncompressed_length,
        "limit": part.limit,
    }


def spec_of(data: Mapping[str, Any]) -> TensorSpec:
    """Return the spec that ``spec_data`` was given; ``TypeError``, ``ValueError``, ``KeyError`` for anything else."""
    parts = tuple(PartSpec(**part) for part in data["parts"])
    shape = tuple(int(size) for size in data["shape"])
    return TensorSpec(data["name"], shape, data["dtype"], data["codec"], parts, unplain(data["params"]))


def plain(value: Any) -> Any:
    """Return a value as JSON takes it: bytes, arrays and floats that JSON has no words for become marked objects."""
    match value:
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case bytes() | bytearray() | memoryview():
            return {_BYTES: b64encode(value).decode()}
        case np.ndarray():
            data = b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {_ARRAY: [value.dtype.str, list(value.shape), data]}
        case float() if not isfinite(value):
            return {_FLOAT: str(value)}
        case list() | tuple():
            return [plain(item) for item in value]
    return plain(value.item()) if isinstance(value, np.generic) else value


def unplain(value: Any) -> Any:
    """Return what ``plain`` was given; ``ValueError``, ``TypeError`` for a marked object that it did not make."""
    if isinstance(value, list):
        return [unplain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == _BYTES:
            return b64decode(_text(content), validate=True)
        if mark == _FLOAT:
            return float(_text(content))
        if mark == _ARRAY:
            return _array(content)
    return {key: unplain(item) for key, item in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _array(content: Any) -> Any:
    if not isinstance(content, list) or len(content) != 3 or not isinstance(content[1], list):
        raise ValueError("expected type, shape and values of an array")
    if content[0] not in ("<f8", "<f4", "<i8", "|u1", "|b1"):
        raise ValueError(f"expected an array of plain numbers, found {content[0]!r:.40}")
    values = np.frombuffer(b64decode(_text(content[2]), validate=True), content[0])
    return values.reshape([int(size) for size in content[1]])
