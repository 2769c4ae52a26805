"""Palettes beside coremltools: the same values from the same indices, and codebooks that are no worse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.codecs.table import CODECS
from ingot.testing.codecs import bits, encode_tensor
from tests.support.reference import palette as reference

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 3, "group": 8},
        {"bits": 2, "group": 4, "axis": 1},
        {"bits": 6, "vector": 2},
        {"bits": 2, "vector": 4, "vector_axis": 1},
        {"bits": 1, "vector": 2, "group": 8},
    ],
    ids=str,
)
def test_values_are_those_of_lut_to_dense(options: dict[str, Any]) -> None:
    ios18 = pytest.importorskip("coremltools.converters.mil.mil.ops.defs.iOS18")
    weights = np.random.default_rng(1).normal(0, 1, (32, 24)).astype(np.float16)
    tensor = encode_tensor(CODECS["palette"], weights, options, dtype="f16")
    size, axis, groups = (tensor.params[key] for key in ("vector_size", "vector_axis", "groups"))
    index = [length // size if size > 1 and at == axis else length for at, length in enumerate(weights.shape)]
    codes = reference.unpack(tensor.parts["indices"].array(), tensor.params["bits"], int(np.prod(index)))
    lut = tensor.parts["codebook"].array().reshape(*groups, -1, size)
    found = ios18.constexpr_lut_to_dense.decompress(codes.reshape(index), lut, axis if size > 1 else None)
    assert bits(np.ascontiguousarray(found)) == bits(tensor.numpy())


@pytest.mark.parametrize(("width", "group"), [(2, None), (4, None), (4, 8), (6, None)])
def test_codebooks_are_no_worse(width: int, group: int | None) -> None:
    pytest.importorskip("sklearn")
    passes = pytest.importorskip("coremltools.optimize.coreml._quantization_passes")
    weights = np.random.default_rng(2).normal(0, 0.02, (32, 48)).astype(np.float16)
    theirs = passes.palettize_weights.blockwise_compress(weights, "KMEANS", width, [group or 0, 0])
    lut = theirs.lut.reshape(-1, 2**width)
    decoded = np.take_along_axis(lut, theirs.indices.reshape(len(lut), -1), axis=1).reshape(weights.shape)
    options = {"bits": width, "group": group or "tensor"}
    ours = encode_tensor(CODECS["palette"], weights, options, dtype="f16").numpy()
    errors = [((weights.astype(np.float64) - one.astype(np.float64)) ** 2).sum() for one in (ours, decoded)]
    assert errors[0] <= errors[1] * (1 + 1e-6)  # entries of both are rounded to f16
