"""``sparse_mask``: the suite's promises, what is kept, sizes to the byte, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.codecs.sparse.mask import MaskCodec
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError, IngotError, UnsupportedError, UsageError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Case, CodecSuite, bits, encode_tensor, read_rows
from tests.support.reference import palette as reference

CODEC = MaskCodec()
INT8 = {"inner": "affine", "options": {"bits": 8}}
ALIGNED = {"row_alignment": 64}
PALETTE = {"inner": "palette", "options": {"bits": 3, "entries": "f32"}}


class TestSparseMask(CodecSuite):
    codec = CODEC
    cases = (
        Case((), "f32"),
        Case((0,), "f16"),
        Case((0, 3), "bf16", {"sparsity": 0.5}),
        Case((3, 0), "f16", {"threshold": 0.1}),
        Case((13,), "f16"),
        Case((5, 7), "f32"),
        Case((5, 7), "f64", {"threshold": 0.0}),
        Case((40, 33), "bf16"),
        Case((3, 4, 5), "f16", {"options": {"dtype": "f32"}}),
        Case((40, 33), "f16", {"sparsity": 0.7}),
        Case((40, 33), "f32", {"sparsity": 0.25}),
        Case((9, 5), "f64", {"sparsity": 1.0}),
        Case((9, 5), "bf16", {"threshold": 0.05}),
        Case((9, 8), "f32", {"n_m": [2, 4]}),
        Case((9, 8), "f16", {**INT8, "sparsity": 0.5}),
        Case((9, 5), "f32", INT8),
        Case((9, 5), "bf16", {"inner": "affine", "options": {"bits": 4, "group": 2, "symmetric": False}}),
        Case((2, 3, 5), "f16", {"inner": "affine", "options": {"bits": 3, "group": "row"}, "n_m": [3, 5]}),
        Case((6, 2, 8), "f32", {"inner": "affine", "options": {"bits": 4, "group": 32, "cut": "flat"}}),
        Case((6, 3, 5), "f16", {"inner": "affine", "options": {"bits": 3, "group": 7, "cut": "axis0"}}),
        Case((6, 2, 8), "f32", {"inner": "affine", "options": {"group": 12, "cut": "flat", "bits": 8}}),
        Case((9, 5), "f32", PALETTE),
        Case((8, 3, 5), "f16", {"inner": "palette", "options": {"bits": 4, "group": 2}, "sparsity": 0.5}),
        Case((6, 7), "bf16", {"inner": "palette", "options": {"bits": 8, "entries": "i8"}, "threshold": 0.05}),
        Case((0, 4), "f16", PALETTE),
        Case((5, 7), "bf16", ALIGNED),
        Case((3, 0), "bf16", ALIGNED),
        Case((), "bf16", ALIGNED),
        Case((3, 3, 65), "f32", {**ALIGNED, "sparsity": 0.5}),
        Case((4, 64), "f16", {**ALIGNED, "threshold": 0.05}),
        Case((9, 5), "bf16", {**ALIGNED, "inner": "affine", "options": {"bits": 4, "group": 2, "symmetric": False}}),
        Case((6, 3, 5), "f16", {**ALIGNED, "inner": "affine", "options": {"bits": 8, "group": 7, "cut": "axis0"}}),
        Case((9, 5), "f32", {**PALETTE, **ALIGNED}),
    )

    def check_loss(self, case: Case, source: Array, decoded: Array) -> None:
        assert not decoded[source == 0].any()
        room = np.abs(source.astype(np.float64)).max(initial=0)
        assert (np.abs(decoded.astype(np.float64) - source) <= room * 1.01).all()


def _weights(shape: tuple[int, ...], dtype: str = "f16", zeros: float = 0.0) -> Array:
    rng = np.random.default_rng(7)
    values = rng.normal(0, 1, shape)
    return np.asarray(np.where(rng.random(shape) < zeros, 0, values)).astype(numpy_dtype(dtype))


def test_bytes_are_those_of_the_formula() -> None:
    """ceil(n / 8) + 2 nnz: 0.43 of dense f16 at 63 % zeros."""
    weights = _weights((250, 400))
    tensor = encode_tensor(CODEC, weights, {"sparsity": 0.63}, dtype="f16")
    kept = int(tensor.params["nnz"])
    assert tensor.nbytes == 100_000 // 8 + 2 * kept
    assert tensor.nbytes / weights.nbytes == pytest.approx(0.4325, abs=0.001)
    coded = encode_tensor(CODEC, weights, {"sparsity": 0.63, "inner": "palette"}, dtype="f16")
    assert coded.params["nnz"] == kept
    assert coded.nbytes == 100_000 // 8 + -(-kept * 4 // 8) + 32


def test_the_mask_has_bit_0_first() -> None:
    weights = np.array([[0, 1, 0, 0, 2, 0, 0, 0, 3, 0]], np.float16)
    tensor = encode_tensor(CODEC, weights, dtype="f16")
    assert bytes(tensor.parts["mask"].view()) == bytes([0b00010010, 0b00000001])
    assert tensor.parts["nonzeros"].array().tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 1.0])
def test_the_smallest_are_dropped(dtype: str, share: float) -> None:
    weights = _weights((31, 17), dtype)
    found = encode_tensor(CODEC, weights, {"sparsity": share}, dtype=dtype).numpy()
    dropped = found == 0
    assert abs(int(dropped.sum()) - share * weights.size) <= 2  # equal magnitudes go together
    if dropped.any() and not dropped.all():
        assert np.abs(weights[dropped]).max() < np.abs(weights[~dropped]).min()
    assert bits(found[~dropped]) == bits(weights[~dropped])


def test_equal_magnitudes_go_together_and_not_past_the_share() -> None:
    weights = np.full((4, 4), -2.0, np.float16)
    for share, kept in ((0.4, 16), (0.5, 16), (0.6, 0)):
        assert encode_tensor(CODEC, weights, {"sparsity": share}, dtype="f16").params["nnz"] == kept


def test_minus_zero_survives_as_a_value_and_is_no_code() -> None:
    weights = np.array([[-0.0, 0.0, 1.0]], np.float16)
    assert bits(encode_tensor(CODEC, weights, dtype="f16").numpy()) == bits(weights)
    assert encode_tensor(CODEC, weights, INT8, dtype="f16").params["nnz"] == 1


def test_thresholds_keep_what_is_above_and_nan() -> None:
    weights = np.array([[0.5, -0.5, 0.50048828125, np.nan, -np.inf]], np.float16)
    found = encode_tensor(CODEC, weights, {"threshold": 0.5}, dtype="f16").numpy()
    assert bits(found) == bits(np.array([[0, 0, 0.50048828125, np.nan, -np.inf]], np.float16))


def test_patterns_drop_the_smallest_of_each_run() -> None:
    weights = np.array([[4, -3, 2, 1, 1, 1, 1, 5]], np.float32)
    found = encode_tensor(CODEC, weights, {"n_m": [2, 4]}, dtype="f32").numpy()
    assert found.tolist() == [[4, -3, 0, 0, 0, 0, 1, 5]]


def test_rows_of_an_aligned_mask_fill_words_of_64_bits() -> None:
    weights = _weights((3, 70), "bf16", 0.5)
    plain, aligned = (encode_tensor(CODEC, weights, options, dtype="bf16") for options in ({}, ALIGNED))
    words = aligned.parts["mask"].array().view("<u8").reshape(3, 2).tolist()
    rows = [sum(1 << at for at, value in enumerate(row) if value) for row in weights.tolist()]
    assert words == [[row % 2**64, row >> 64] for row in rows]
    assert bytes(plain.parts["nonzeros"].view()) == bytes(aligned.parts["nonzeros"].view())
    assert bits(read_rows(CODEC, aligned, "bf16", (1, 2))) == bits(weights)


@pytest.mark.parametrize("inner", [{}, INT8, PALETTE], ids=str)
def test_bits_behind_the_columns_of_an_aligned_mask_are_refused(inner: dict[str, Any]) -> None:
    tensor = encode_tensor(CODEC, _weights((3, 70), "f16", 0.5), {**inner, **ALIGNED}, dtype="f16")
    mask = tensor.parts["mask"].array().copy()
    for row in range(3):
        wrong = mask.copy()
        wrong[16 * row + 8] |= 1 << 6  # column 70
        bad = replace(tensor, parts={**tensor.parts, "mask": memory_part(wrong, "u8")})
        for read in (lambda bad=bad: CODEC.decode(bad, "f16"), lambda bad=bad: read_rows(CODEC, bad, "f16", (2, 1))):
            with pytest.raises(CodecError) as caught:
                read()
            assert caught.value.rule == "sparse_mask.padding"


def test_palettes_within_do_not_see_zeros() -> None:
    weights = np.where(_weights((16, 16)) > 0.3, np.float16(3), np.float16(0))
    weights[0] = 7
    tensor = encode_tensor(CODEC, weights, {"inner": "palette", "options": {"bits": 1}}, dtype="f16")
    assert tensor.parts["codebook"].array().tolist() == [3, 7]
    assert bits(tensor.numpy()) == bits(weights)


@pytest.mark.parametrize("inner", [{"inner": "palette", "options": {"bits": 6, "group": 3}}, INT8], ids=str)
def test_codes_within_are_those_of_the_inner_codec(inner: dict[str, Any]) -> None:
    weights = _weights((9, 7), "f16", 0.4)
    tensor = encode_tensor(CODEC, weights, inner, dtype="f16")
    width = tensor.params["inner"]["params"]["bits"]
    codes = reference.unpack(tensor.parts["nonzeros"].array(), width, tensor.params["nnz"])
    dense = reference.expand(tensor.parts["mask"].array(), codes, weights.size)
    role = "indices" if inner["inner"] == "palette" else "packed_weight"
    parts = {name: part for name, part in tensor.parts.items() if name not in ("mask", "nonzeros")}
    parts[role] = memory_part(reference.pack(dense, width), "u8")
    whole = replace(tensor, codec=inner["inner"], params=tensor.params["inner"]["params"], parts=parts)
    wanted = CODECS[inner["inner"]].decode(whole, "f32")
    wanted[weights == 0] = 0
    assert bits(tensor.numpy("f32")) == bits(wanted)


def test_scales_of_another_matrix_decode() -> None:
    """A convolution's output channels: codes of [O, I, kh, kw] cut as [O, I kh kw]."""
    weights = _weights((3, 2, 2, 3), "f16", 0.5)
    flat = encode_tensor(CODEC, weights.reshape(3, 12), INT8, dtype="f16")
    params = {**flat.params["inner"]["params"], "matrix": [3, 12]}
    tensor = replace(
        flat, shape=weights.shape, params={**flat.params, "inner": {"codec": "quantized_group", "params": params}}
    )
    assert bits(tensor.numpy()) == bits(flat.numpy())
    assert bits(read_rows(CODEC, tensor, "f16", (1, 4))) == bits(flat.numpy())


def _tensor(codec: str = "dense", **changes: Any) -> Tensor:
    options: dict[str, Any] = {"palette": PALETTE, "affine": INT8, "dense": {}}[codec]
    tensor = encode_tensor(CODEC, _weights((5, 5), "f16", 0.5), options, dtype="f16")
    return replace(tensor, params={**tensor.params, **changes})


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("sparse_mask.params", {"codec_version": 2}),
        ("sparse_mask.params", {"dtype": "f32"}),
        ("sparse_mask.params", {"nnz": -1}),
        ("sparse_mask.params", {"nnz": 26}),
        ("sparse_mask.params", {"nnz": True}),
        ("sparse_mask.params", {"nnz": 2**64}),
        ("sparse_mask.params", {"inner": "dense"}),
        ("sparse_mask.params", {"inner": {"codec": "dense"}}),
        ("sparse_mask.inner", {"inner": {"codec": "sparse_mask", "params": {}}}),
        ("sparse_mask.params", {"inner": {"codec": ["dense"], "params": {}}}),
        ("sparse_mask.inner", {"inner": {"codec": "dense", "params": {"x": 1}}}),
        ("sparse_mask.size", {"nnz": 1}),
        ("sparse_mask.size", {"row_alignment": 64}),
        ("sparse_mask.params", {"row_alignment": 32}),
        ("sparse_mask.params", {"row_alignment": True}),
    ],
)
def test_bad_parameters_are_refused(rule: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CodecError) as caught:
        CODEC.check(_tensor(**changes))
    assert caught.value.rule == rule


@pytest.mark.parametrize("inner", ["dense", "palette", "affine"])
def test_masks_that_disagree_are_refused(inner: str) -> None:
    tensor = _tensor(inner)
    mask = tensor.parts["mask"].array()
    more, fewer, beyond = mask.copy(), mask.copy(), mask.copy()
    more[:3], fewer[0], fewer[2] = 255, 0, 0
    beyond[3] |= 128
    for wrong, rule in ((more, "popcount"), (fewer, "popcount"), (beyond, "padding")):
        bad = replace(tensor, parts={**tensor.parts, "mask": memory_part(wrong, "u8")})
        for read in (lambda bad=bad: CODEC.decode(bad, "f16"), lambda bad=bad: read_rows(CODEC, bad, "f16", (2,))):
            with pytest.raises(CodecError) as caught:
                read()
            assert caught.value.rule == f"sparse_mask.{rule}"


def test_bits_behind_the_last_code_are_refused() -> None:
    tensor = _tensor("palette")
    codes = tensor.parts["nonzeros"].array().copy()
    assert tensor.params["nnz"] * 3 % 8
    codes[-1] |= 128
    with pytest.raises(CodecError) as caught:
        CODEC.decode(replace(tensor, parts={**tensor.parts, "nonzeros": memory_part(codes, "u8")}), "f16")
    assert caught.value.rule == "sparse_mask.padding"


def test_inner_vectors_and_orders_are_refused() -> None:
    for inner, change in (("palette", {"vector_size": 2}), ("affine", {"packing": "rows_msb"})):
        tensor = _tensor(inner)
        tensor = replace(tensor, shape=(2, 5) if inner == "palette" else tensor.shape)
        params = {"codec": inner, "params": {**tensor.params["inner"]["params"], **change}}
        with pytest.raises(CodecError):
            CODEC.check(replace(tensor, params={**tensor.params, "inner": params}))


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": -1},
        {"threshold": float("nan")},
        {"threshold": 1, "sparsity": 0.5},
        {"sparsity": 1.5},
        {"sparsity": True},
        {"n_m": [3]},
        {"n_m": [5, 4]},
        {"n_m": [0, 0]},
        {"inner": "astc"},
        {"options": 3},
        {"inner": "palette", "options": {"vector": 2}},
        {"inner": "palette", "options": {"group": 2, "axis": 1}},
        {"inner": "palette", "options": {"importance": [1.0] * 4}},
        {"inner": "affine", "options": {"group": "tensor"}},
        {"inner": "affine", "options": {"bit_order": "msb"}},
        {"row_alignment": 8},
        {"row_alignment": True},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        CODEC.encoder((4, 4), "f16", options)
    assert caught.value.rule == "sparse_mask.option"


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        CODEC.encoder((3, 5), "f16", {"n_m": [2, 4]})
    assert caught.value.rule == "sparse_mask.pattern"
    with pytest.raises(UnsupportedError):
        CODEC.encoder((4, 4), "i8", {})
    with pytest.raises(IngotError):
        CODEC.decode(_tensor("palette"), "i8")


@pytest.mark.parametrize("upper", [False, True])
def test_a_threshold_between_two_floats_parts_them(upper: bool) -> None:
    pair = np.array([[1, np.nextafter(np.float32(1), np.float32(2))]], np.float32)
    gap = float(pair[0, 1]) - 1
    threshold = 1 + gap * (0.9 if upper else 0.1)  # whose nearest float32 is one of the two
    assert encode_tensor(CODEC, pair, {"threshold": threshold}, dtype="f32").numpy().tolist() == [[0, pair[0, 1]]]
