"""Properties of .wdelta: random deltas round-trip and decode as plain arithmetic says; changed files never surprise."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingot.codecs.table import CODECS
from ingot.core.runtime import native
from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.wdelta.digest import check_digest
from ingot.formats.wdelta.format import WdeltaFormat
from ingot.formats.wdelta.reader import read_catalog
from ingot.model.artifact import Artifact
from ingot.model.bytesource import MemorySource
from ingot.model.delta import Change, DeltaInfo, Identity
from ingot.model.spec import TensorSpec
from ingot.stores.memory import MemoryTarget
from ingot.testing.codecs import bits, encode_parts, encode_tensor, read_rows
from tests.support.wdelta import PARENT, Made, int4, quantized, sparse, wdelta_file

Values = np.ndarray[Any, np.dtype[np.float32]]
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
OPTIONS = st.one_of(
    st.tuples(st.just("delta_sparse"), st.fixed_dictionaries({"sparsity": st.floats(0, 0.999)})),
    st.tuples(st.just("delta_sign"), st.just({})),
    st.tuples(
        st.just("delta_int4"),
        st.fixed_dictionaries({"outlier_fraction": st.floats(0, 1), "layout": st.sampled_from([1, 2])}),
    ),
)


@st.composite
def differences(draw: st.DrawFn) -> Values:
    """Finite differences that float16 can hold, many of them equal or zero."""
    shape = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "few", "wide", "constant"]))
    values = {
        "normal": rng.normal(0, 0.01, shape),
        "few": rng.integers(-3, 4, shape) / 8,
        "wide": rng.normal(0, 1, shape) * 10.0 ** rng.integers(-8, 4, shape),
        "constant": np.full(shape, draw(st.floats(-100, 100, width=32))),
    }[kind]
    return np.asarray(values).astype(np.float32).reshape(shape)


def int4_reference(values: Values, parts: dict[str, Any], layout: int) -> Values:
    """Decode as the specification says, one value at a time."""
    scale, zero = float(parts["scale"][0]), float(parts["zero_point"][0])
    codes = [code for byte in parts["packed"].tolist() for code in (byte >> 4, byte & 15)]
    apart = dict(zip(parts["outlier_idx"].tolist(), parts["outlier_vals"].tolist(), strict=True))
    out, position = [], 0
    for index in range(values.size):
        code = codes[position] if layout == 2 or index not in apart else 0
        position += layout == 2 or index not in apart
        decoded = np.float32(code) / np.float32(15) * np.float32(scale * 15) + np.float32(zero)
        out.append(apart.get(index, decoded))
    return np.array(out, np.float32).reshape(values.shape)


@given(differences(), OPTIONS, st.lists(st.integers(0, 9), max_size=3))
def test_what_is_decoded_is_what_the_arithmetic_says(
    values: Values, way: tuple[str, dict[str, Any]], cuts: list[int]
) -> None:
    codec, options = way
    tensor = encode_tensor(CODECS[codec], values, options, dtype="f32", cuts=tuple(cuts))
    parts = {role: part.array() for role, part in tensor.parts.items()}
    decoded = tensor.numpy()
    if codec == "delta_sparse":
        expected = np.zeros(values.size, np.float32)
        order = np.argsort(-np.abs(values.reshape(-1)), kind="stable")[: parts["indices"].size]
        expected[order] = values.reshape(-1)[order]
        assert decoded.reshape(-1).tolist() == expected.tolist()
    elif codec == "delta_sign":
        rows = values.reshape(len(values), -1) if values.ndim > 1 and values.size else values.reshape(1, -1)
        if values.size:
            scales = np.mean(np.abs(rows), axis=1).astype(np.float16).astype(np.float32)
            expected = np.where(rows >= 0, scales[:, None], -scales[:, None])
            assert bits(decoded) == bits(expected.astype(np.float32))
    else:
        expected = int4_reference(values, parts, options["layout"])
        assert bits(decoded) == bits(expected)
    assert bits(read_rows(CODECS[codec], tensor, "f32", tuple(cuts))) == bits(decoded)


@given(
    st.integers(1, 300_000), st.integers(0, 2**32), st.sampled_from(["normal", "few", "mostly-zero", "rising", "one"])
)
def test_the_largest_are_selected(size: int, seed: int, kind: str) -> None:
    """Also where the kernel's sample misleads it, and where magnitudes are equal."""
    rng = np.random.default_rng(seed)
    flat = {
        "normal": lambda: rng.normal(0, 1, size),
        "few": lambda: rng.integers(-3, 4, size) / 8,
        "mostly-zero": lambda: rng.normal(0, 1, size) * (rng.random(size) < 0.001),
        "rising": lambda: np.arange(size) * rng.choice([-1, 1], size),
        "one": lambda: np.full(size, -0.5),
    }[kind]().astype(np.float32)
    count = int(rng.integers(1, size + 1)) if rng.random() < 0.5 else 1 + size // 50
    positions, kept = np.empty(count, np.int64), np.empty(count, np.float32)
    assert native.kernels.top_of(flat, None, "f32", positions, kept)[0] == size
    expected = np.sort(np.argsort(-np.abs(flat), kind="stable")[:count])
    assert np.array_equal(positions, expected)
    assert np.array_equal(kept, flat[expected])


@given(st.lists(st.tuples(st.text(max_size=8), differences(), OPTIONS), max_size=4, unique_by=lambda item: item[0]))
def test_files_round_trip(drawn: list[tuple[str, Values, tuple[str, dict[str, Any]]]]) -> None:
    specs, contents = [], []
    for name, values, (codec, options) in drawn:
        encoder = CODECS[codec].encoder(values.shape, "f32", options)
        contents.append({role: array.tobytes() for role, array in encode_parts(CODECS[codec], encoder, values).items()})
        specs.append(TensorSpec(name, values.shape, "f32", codec, encoder.parts, encoder.params))
    info = DeltaInfo(
        1, "auto", Identity(hashes={"wdelta": PARENT}), tensors={s.name: Change("apply", "f16") for s in specs}
    )
    format, target, metadata = WdeltaFormat(), MemoryTarget(), {"delta": info.to_metadata()}
    writer = format.writer(target, "x.wdelta", Artifact(specs, metadata), WriteOptions())
    for spec, parts in zip(specs, contents, strict=True):
        writer.begin(spec)
        for role, data in parts.items():
            writer.write(role, data)
        writer.end()
    writer.finish()
    data = bytes(target.files["x.wdelta"])
    assert format.size(Artifact(specs, metadata), WriteOptions()) == len(data)
    catalog = read_catalog(MemorySource(data), "x")
    assert dict(catalog.metadata) == metadata
    check_digest(MemorySource(data))
    for spec, parts in zip(specs, contents, strict=True):
        tensor = catalog.tensors[spec.name]
        assert (tensor.shape, tensor.codec, dict(tensor.params)) == (spec.shape, spec.codec, dict(spec.params))
        assert {role: bytes(part.stored()) for role, part in tensor.parts.items()} == parts


def attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Call; return what came of it and None, or the rule of Ingot's error. Anything else is raised."""
    try:
        return call(), None
    except IngotError as error:
        return None, error.rule or "no rule"


def three() -> bytes:
    return int4(quantized(sparse(Made(), "s"), "q"), "i").file()


@given(st.lists(st.tuples(st.integers(0, len(three()) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_noticed_and_nothing_else_is_raised(changes: list[tuple[int, int]]) -> None:
    data = bytearray(three())
    for position, value in changes:
        data[position] = value
    if bytes(data) == three():
        return
    catalog, rule = attempt(lambda: read_catalog(MemorySource(bytes(data)), "x"))
    if rule is not None:
        return
    for tensor in catalog.tensors.values():
        if prod(tensor.shape) < 10_000:
            attempt(lambda tensor=tensor: CODECS[tensor.codec].decode(tensor, "f32"))
    assert attempt(lambda: check_digest(MemorySource(bytes(data))))[1] == "wdelta.digest-mismatch"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([sparse, quantized, int4]), st.data())
def test_a_header_of_any_values_opens_or_is_refused_by_rule(add: Any, data: st.DataObject) -> None:
    made = add(Made())
    entry = made.tensors["x"]
    for key in data.draw(st.lists(st.sampled_from([*entry, "int4_layout", "base_dtype"]), min_size=1, max_size=2)):
        entry[key] = data.draw(JSON)
    version = data.draw(st.sampled_from([1, 2]))
    catalog, rule = attempt(lambda: read_catalog(MemorySource(made.file(version)), "x"))
    if rule is None:
        CODECS[catalog.tensors["x"].codec].check(catalog.tensors["x"])
    else:
        assert rule.startswith("wdelta.")


@given(st.binary(max_size=80), st.integers(0, 3))
def test_any_payload_is_refused_by_rule(payload: bytes, version: int) -> None:
    file = wdelta_file(sparse(Made()).header, version=version)[:-32] + payload + bytes(32)
    assert attempt(lambda: read_catalog(MemorySource(file), "x"))[1] is not None
