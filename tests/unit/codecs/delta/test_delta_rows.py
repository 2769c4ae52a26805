"""The codec delta_rows: shared rows by another codec, added rows as they are, any runs of rows, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.codecs.delta.base import delta_codec
from ingot.codecs.table import CODECS, DELTA_ROWS
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.errors import CodecError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import chunks

CODEC = delta_codec(DELTA_ROWS)
SHAPE, SHARED = (12, 2, 32), 7
OPTIONS = {"rows": SHARED, "inner": "affine", "options": {"bits": 8, "group": "row"}}


def pair(dtype: Any = np.float32) -> tuple[Array, Array]:
    """A base with zeros in place of the rows that it has not, as the engine gives it, and a fine-tune; as matrices."""
    rng = np.random.default_rng(0)
    base = rng.standard_normal(SHAPE).astype(dtype)
    tuned = (base.astype(np.float32) + 0.01 * rng.standard_normal(SHAPE).astype(np.float32)).astype(dtype)
    base[SHARED:] = 0
    tuned[SHARED:].reshape(-1)[:4] = (-0.0, np.nan, np.inf, 1e-30)
    return base.reshape(-1, SHAPE[-1]), tuned.reshape(-1, SHAPE[-1])


def encode(base: Array, tuned: Array, cuts: tuple[int, ...] = (), options: Any = OPTIONS) -> Tensor:
    encoder = CODEC.encoder(SHAPE, resolve_dtype(tuned.dtype).name, options)
    pieces = list(chunks(len(base), cuts))
    for _ in range(encoder.fit_passes):
        for piece in pieces:
            encoder.fit_pass(base[piece], tuned[piece])
    found = [encoder.encode(base[piece], tuned[piece], piece.start) for piece in pieces]
    for piece, parts in zip(pieces, found, strict=True):
        rebuilt = np.empty_like(tuned[piece])
        encoder.rebuild(parts, base[piece], rebuilt)
        assert np.array_equal(
            rebuilt[max(SHARED * 2 - piece.start, 0) :].view(np.uint8), _added(tuned, piece).view(np.uint8)
        )
    specs = {spec.role: spec for spec in encoder.parts}
    stored = {
        role: memory_part(np.concatenate([parts[role].reshape(-1) for parts in found if role in parts]), spec.dtype)
        for role, spec in specs.items()
    }
    for role, spec in specs.items():
        assert stored[role].nbytes == spec.length
    return Tensor("w", SHAPE, "f32", encoder.codec, stored, dict(encoder.params), CODECS[encoder.codec])


def _added(tuned: Array, piece: slice) -> Array:
    rows: Array = tuned[max(SHARED * 2, piece.start) : piece.stop]
    return rows


def apply(tensor: Tensor, base: Array, dtype: Any, cuts: tuple[int, ...] = ()) -> Array:
    out = np.empty(base.shape, dtype)
    applier = CODEC.applier(tensor, resolve_dtype(base.dtype).name)
    for piece in chunks(len(base), cuts):
        applier.apply(base[piece], out[piece])
    applier.finish()
    return out


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("cuts", [(), (4,), (14,), (3, 13, 15, 20)])
def test_shared_rows_are_near_and_added_rows_are_the_same_bits(dtype: Any, cuts: tuple[int, ...]) -> None:
    base, tuned = pair(dtype)
    tensor = encode(base, tuned, cuts)
    CODEC.check(tensor)
    found = apply(tensor, base, dtype, tuple(cut + 1 for cut in cuts))
    shared = 2 * SHARED
    assert np.array_equal(found[shared:].view(np.uint8), tuned[shared:].view(np.uint8))
    inner = delta_codec("affine").encoder((SHARED, *SHAPE[1:]), resolve_dtype(dtype).name, OPTIONS["options"])
    alone = np.empty_like(tuned[:shared])
    inner.rebuild(inner.encode(base[:shared], tuned[:shared]), base[:shared], alone)
    assert np.array_equal(found[:shared], alone)


def test_encoders_that_learn_first_see_the_shared_rows_alone() -> None:
    base, tuned = pair()
    options = {"rows": SHARED, "inner": "palette", "options": {"bits": 4}}
    tensors = [encode(base, tuned, cuts, options) for cuts in ((), (4, 16))]
    assert tensors[0].parts.keys() == tensors[1].parts.keys()
    assert all(bytes(part.view()) == bytes(tensors[1].parts[role].view()) for role, part in tensors[0].parts.items())
    assert np.isfinite(apply(tensors[0], base, np.float32)[: 2 * SHARED]).all()


def test_values_alone_are_refused() -> None:
    tensor = encode(*pair())
    with pytest.raises(UnsupportedError) as caught:
        tensor.numpy()
    assert caught.value.rule == "delta_rows.base"
    stored = list(CODECS[DELTA_ROWS].stored(tensor))  # type: ignore[attr-defined]
    assert sum(len(rows) for rows in stored) == 2 * SHARED


def test_what_does_not_fit_is_refused() -> None:
    tensor = encode(*pair())
    params = dict(tensor.params)
    short = memory_part(np.zeros(3, np.float32), "f32")
    whole_numbers = memory_part(np.zeros((SHAPE[0] - SHARED) * 64, np.int32), "i32")
    cases: list[tuple[str, Tensor]] = [
        ("params", replace(tensor, params={**params, "codec_version": 2})),
        ("params", replace(tensor, params={**params, "rows": 0})),
        ("params", replace(tensor, params={**params, "rows": 12})),
        ("params", replace(tensor, params={**params, "rows": True})),
        ("params", replace(tensor, params={**params, "inner_params": [1]})),
        ("params", replace(tensor, dtype="bf16")),
        ("params", replace(tensor, shape=(768,))),
        ("inner", replace(tensor, params={**params, "inner": DELTA_ROWS})),
        ("inner", replace(tensor, params={**params, "inner": "delta_exact"})),
        ("inner", replace(tensor, params={**params, "inner": 3})),
        ("part-missing", replace(tensor, parts={r: part for r, part in tensor.parts.items() if r != "added_rows"})),
        ("size", replace(tensor, parts={**tensor.parts, "added_rows": short})),
        ("dtype", replace(tensor, parts={**tensor.parts, "added_rows": whole_numbers})),
    ]
    for rule, wrong in cases:
        with pytest.raises(CodecError) as caught:
            CODEC.check(wrong)
        assert caught.value.rule == f"delta_rows.{rule}"
    with pytest.raises(CodecError) as caught:
        apply(tensor, pair()[0], ml_dtypes.bfloat16)
    assert caught.value.rule == "delta_rows.dtype"
    with pytest.raises(CodecError):  # the inner codec's
        CODEC.check(replace(tensor, params={**params, "inner_params": {}}))


def test_options_are_checked() -> None:
    for options in (
        {},
        {**OPTIONS, "rows": 12},
        {**OPTIONS, "inner": "delta_exact"},
        {**OPTIONS, "inner": 4},
        {**OPTIONS, "options": 4},
        {**OPTIONS, "more": 4},
    ):
        with pytest.raises(UsageError) as caught:
            CODEC.encoder(SHAPE, "f32", options)
        assert caught.value.rule == "delta_rows.option"
    with pytest.raises(UnsupportedError) as refused:
        CODEC.encoder(SHAPE, "i32", OPTIONS)
    assert refused.value.rule == "delta_rows.dtype"
