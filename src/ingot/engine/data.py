"""Conversion of steps to JSON values and back, so that another process can run them on the same sources."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from ingot.codecs.delta.base import delta_codec
from ingot.codecs.repacked_encoder import prepare_encoder
from ingot.codecs.table import CODECS
from ingot.core.parsing.strictjson import preload
from ingot.engine.diff_step import Diff
from ingot.engine.fit import why_incomparable
from ingot.engine.patch_step import Patch, PatchChain, result_tensor
from ingot.engine.steps import DECODED, ENCODED, Encode, Move, Repack, recode
from ingot.engine.work import Step, difference_spec, encoded_spec
from ingot.errors import FormatError, IngotError
from ingot.formats.base import Format, encoding_variants, layout_variants
from ingot.model.layouts.dense import DenseLayout
from ingot.model.spec import PartSpec, TensorSpec
from ingot.model.tensor import Tensor

_BYTES = "$bytes"
_ARRAY = "$array"
_FLOAT = "$float"


def step_data(step: Step) -> dict[str, Any]:
    """Return a step as JSON values: its type, its input, its output and its options."""
    step = step.planned
    data = {"spec": spec_data(step.spec), "action": step.action, "rule": step.rule, "exact": step.exact}
    match step:
        case Move():
            return {"kind": "move", **data, "source": step.source, "tensor": step.tensor.name}
        case Repack():
            return {"kind": "repack", **data, "source": step.source, "tensor": step.tensor.name}
        case Encode():
            fields = {"kind": "encode", **data, "source": step.source, "tensor": step.tensor.name}
            return fields | {"options": to_json_value(step.options)}
        case Diff():
            named = {"source": 1, "tensor": step.tensor.name}
            return {"kind": "diff", **data, **named, "options": to_json_value(step.options)}
        case Patch():
            route = step.route
            stages = [[layer.stage, layer.dtype] for layer in route.layers]
            named = {"source": route.first_stage, "tensor": route.name, "layers": stages}
            return {"kind": "patch", **data, **named, "options": to_json_value(step.options)}
        case _:
            raise TypeError(f"no data for a step {type(step).__name__}")


def spec_data(spec: TensorSpec) -> dict[str, Any]:
    """Return a spec as JSON values."""
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "codec": spec.codec,
        "parts": [_part_data(part) for part in spec.parts],
        "params": to_json_value(spec.params),
    }


def _part_data(part: PartSpec) -> dict[str, Any]:
    """Return a part's fields as JSON values. Equals ``dataclasses.asdict(part)``, but is ten times as fast."""
    return {
        "role": part.role,
        "dtype": part.dtype,
        "length": part.length,
        "type": part.type,
        "encoding": part.encoding,
        "uncompressed_length": part.uncompressed_length,
        "limit": part.limit,
    }


def parse_spec(data: Mapping[str, Any]) -> TensorSpec:
    """Return the spec for the result of ``spec_data``. Raises ``TypeError``, ``ValueError`` or ``KeyError``."""
    parts = tuple(PartSpec(**part) for part in data["parts"])
    shape = tuple(int(size) for size in data["shape"])
    return TensorSpec(data["name"], shape, data["dtype"], data["codec"], parts, from_json_value(data["params"]))


def to_json_value(value: Any) -> Any:
    """Return a value as JSON values; bytes, arrays, NaN and infinities become objects with a reserved key."""
    match value:
        case Mapping():
            return {str(key): to_json_value(item) for key, item in value.items()}
        case bytes() | bytearray() | memoryview():
            return {_BYTES: b64encode(value).decode()}
        case np.ndarray():
            data = b64encode(np.ascontiguousarray(value).tobytes()).decode()
            return {_ARRAY: [value.dtype.str, list(value.shape), data]}
        case float() if not isfinite(value):
            return {_FLOAT: str(value)}
        case list() | tuple():
            return [to_json_value(item) for item in value]
    return to_json_value(value.item()) if isinstance(value, np.generic) else value


def from_json_value(value: Any) -> Any:
    """Return the value for a result of ``to_json_value``. Raises ``ValueError`` or ``TypeError`` if it is invalid."""
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
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
    return {key: from_json_value(item) for key, item in value.items()}


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


RULE = "plan.step"


@preload
class StepData(Struct, frozen=True, forbid_unknown_fields=True, rename={"step_type": "kind"}):
    """The data of a step, parsed from JSON.

    ``step_type`` has the key ``kind`` in JSON. ``hashed`` contains the points at which values are hashed.
    """

    step_type: Literal["move", "repack", "encode", "diff", "patch"]
    spec: dict[str, Any]
    action: str
    rule: str
    exact: bool
    source: int
    tensor: str
    options: dict[str, Any] = {}
    layers: list[tuple[int, str]] = []
    hashed: list[int] = []


def bind_steps(
    steps: Sequence[StepData],
    sources: Sequence[Mapping[str, Tensor]],
    format: Format,
    routes: Mapping[str, PatchChain] = MappingProxyType({}),
) -> Iterator[Step]:
    """Yield the steps that ``steps`` describe, with the tensors of the open ``sources``, so that they can run.

    The sources of a patch are the base and its deltas, and ``routes`` has the chains of its tensors. The sources of a
    diff are the base and the fine-tune.

    The spec of each step is computed again from the tensor and the step's options, and compared with the data. Data of
    another model, or edited data, is therefore refused and never written.

    Raises
    ------
    FormatError
        ``plan.step``: a step does not match its source or the format.
    """
    for number, data in enumerate(steps):
        try:
            yield _bound(data, sources, format, routes)
        except (ValueError, TypeError, KeyError, OverflowError, IngotError) as error:
            if isinstance(error, FormatError) and error.rule == RULE:
                raise
            message = error.message if isinstance(error, IngotError) else f"{type(error).__name__}: {error}"
            raise _refused(number, data, message) from error


def _bound(
    data: StepData, sources: Sequence[Mapping[str, Tensor]], format: Format, routes: Mapping[str, PatchChain]
) -> Step:
    if not 0 <= data.source < len(sources) or data.tensor not in sources[data.source]:
        raise ValueError("no source has a tensor with this name")
    tensor = sources[data.source][data.tensor]
    if tensor.codec in CODECS:
        CODECS[tensor.codec].check(tensor)
    match data.step_type:
        case "move":
            step: Step = Move(tensor, tensor.spec(), rule=data.rule, source=data.source)
        case "repack":
            step = _repack(data, tensor, format)
        case "encode":
            step = _encode(data, tensor)
        case "diff":
            step = _diff(data, tensor, sources)
        case "patch":
            step = _patch(data, routes)
    if spec_data(step.spec) != data.spec:
        raise ValueError("the spec differs from the one that this step computes for the tensor")
    reason = format.why_unsupported(step.spec)
    if reason is not None:
        raise ValueError(f"{format.name} cannot carry it: {reason}")
    return step


def _repack(data: StepData, tensor: Tensor, format: Format) -> Repack:
    for layout, spec in layout_variants(format, tensor.spec()):
        if spec_data(spec) == data.spec:
            repacked = CODECS[tensor.codec].repack(tensor, layout)
            if repacked.exact:
                return Repack(tensor, spec, rule=data.rule, repack=repacked, source=data.source)
    for spec in encoding_variants(format, tensor.spec()):
        if spec_data(spec) == data.spec:
            return recode(tensor, spec, data.rule, data.source)
    raise ValueError(f"{format.name} does not support this layout of the tensor, or it does not preserve every bit")


def _encode(data: StepData, tensor: Tensor) -> Encode:
    if tensor.decoder is None or data.action not in (DECODED, ENCODED):
        raise ValueError("expected a tensor that can be decoded, and a valid action")
    options = from_json_value(data.options)
    encoder = prepare_encoder(replace(parse_spec(data.spec), shape=tensor.shape), tensor.dtype, options)
    spec: TensorSpec = encoded_spec(tensor.name, tensor, encoder, _encoding(data.spec))
    exact = encoder.lossless  # not taken from the data: errors of inexact steps are measured and reported
    action = data.action if exact else ENCODED
    return Encode(tensor, spec, action, data.rule, exact, encoder=encoder, options=options, source=data.source)


def _diff(data: StepData, tensor: Tensor, sources: Sequence[Mapping[str, Tensor]]) -> Diff:
    base = sources[0][data.tensor]
    if data.source != 1 or why_incomparable(base, tensor) is not None:
        raise ValueError("expected a tensor of the fine-tune, and a tensor of the base that it can be compared with")
    CODECS[base.codec].check(base)
    options = from_json_value(data.options)
    codec = delta_codec(_codec(data.spec))
    dtype = data.spec["dtype"] if codec.exact else tensor.dtype
    if dtype not in (tensor.dtype, base.dtype):
        raise ValueError("expected a difference in the element type of one of the tensors")
    encoder = codec.encoder(tensor.shape, dtype, options)
    spec = difference_spec(tensor, codec, encoder, _encoding(data.spec))
    exact = encoder.lossless
    return Diff(tensor, spec, ENCODED, data.rule, exact, base=base, codec=codec, encoder=encoder, options=options)


def _patch(data: StepData, routes: Mapping[str, PatchChain]) -> Patch:
    route = routes[data.tensor]
    if route.first_stage != data.source or [(layer.stage, layer.dtype) for layer in route.layers] != data.layers:
        raise ValueError("expected the chain of deltas that leads to this tensor, found another chain")
    options = from_json_value(data.options)
    tensor = result_tensor(route)
    encoder = CODECS[DenseLayout.codec].encoder(route.shape, route.dtype, options)
    spec = encoded_spec(route.name, tensor, encoder, "raw")
    return Patch(tensor, spec, rule=data.rule, exact=data.exact, route=route, encoder=encoder, options=options)


def _encoding(spec: Mapping[str, Any]) -> str:
    """Return the encoding of a spec's compressed parts, which is the same for all; ``raw`` if no part is compressed."""
    encodings = {str(part["encoding"]) for part in spec["parts"]}
    return "raw" if encodings <= {"raw"} else max(encodings)


def _codec(spec: Mapping[str, Any]) -> str:
    codec = spec["codec"]
    if not isinstance(codec, str):
        raise TypeError("expected a codec's name")
    return codec


def parse_specs(steps: Sequence[StepData]) -> list[TensorSpec]:
    """Return the specs in the data of steps. Raises ``FormatError`` ``plan.step`` for an invalid spec."""
    specs = []
    for number, step in enumerate(steps):
        try:
            specs.append(parse_spec(step.spec))
        except (ValueError, TypeError, KeyError) as error:
            raise _refused(number, step, f"{type(error).__name__}: {error}") from error
    return specs


def _refused(number: int, data: StepData, message: str) -> FormatError:
    location = f"step {number}: {data.tensor[:200]}"
    return FormatError(RULE, f"expected a step that matches its source: {message[:400]}", where=location)
