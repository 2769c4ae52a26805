"""A decoder layer around its products: every instruction set gives the bits of the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ingot.codecs.affine.codec import AffineCodec
from ingot.codecs.affine.layer import DecoderLayer, Norm, attend
from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.numeric.floats import as_bits
from ingot.testing.codecs import encode_tensor
from tests.support.reference import layer as reference

TYPES = {"f32": np.dtype("f4"), "f16": np.dtype("f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}
HIDDEN, BETWEEN, HEADS, SHARED, WIDTH = 64, 96, 6, 2, 16


def matrix(rows: int, cols: int, seed: int, group: int = 32) -> PackedMatrix:
    values = np.random.default_rng(seed).normal(size=(rows, cols)).astype("f4") / cols**0.5
    options = {"bits": 4, "group": group, "scales": "f16"}
    return PackedMatrix.from_tensor(encode_tensor(AffineCodec(), values, options, dtype="f32"))


def product(weights: PackedMatrix, x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    out = np.empty((len(x), weights.shape[0]), x.dtype)
    weights.int8(x, out, bias)
    return out


def some(dtype: np.dtype, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("f4").astype(dtype)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("heads", "rows", "width", "tokens", "capacity"),
    [(2, 6, 128, 512, 512), (1, 1, 16, 1, 3), (3, 5, 80, 257, 300), (2, 4, 48, 256, 256), (1, 9, 64, 700, 700)],
)
def test_attention(name: str, heads: int, rows: int, width: int, tokens: int, capacity: int) -> None:
    dtype = TYPES[name]
    queries = some(dtype, heads, rows, width)
    keys, values = (some(dtype, heads, capacity, width, seed=seed) for seed in (1, 2))
    keys[:, tokens:] = values[:, tokens:] = 1000  # not to be looked at
    wanted = reference.attend(queries, keys, values, tokens, 0.3)
    for threads in (1, 3):
        out = np.zeros_like(queries)
        attend(as_bits(queries), as_bits(keys), as_bits(values), tokens, as_bits(out), name, 0.3, threads)
        assert out.tobytes() == wanted.tobytes()
    wide = (array.astype("f8") for array in (queries, keys[:, :tokens], values[:, :tokens]))
    q, k, v = wide
    scores = 0.3 * q @ k.transpose(0, 2, 1)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    exact = powers @ v / powers.sum(-1, keepdims=True)
    assert np.abs(out.astype("f8") - exact).max() < {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2}[name]


def test_attention_hides_no_nan() -> None:
    keys = np.zeros((1, 3, 16), np.float32)
    keys[0, 1, 5] = np.nan
    out = np.zeros((1, 1, 16), np.float32)
    attend(np.ones((1, 1, 16), np.float32), keys, np.ones_like(keys), 3, out, "f32", 1.0, 1)
    assert np.isnan(out).all()


@pytest.mark.parametrize(
    ("tokens", "width", "match"), [(0, 16, "tokens"), (4, 16, "tokens"), (2, 24, "sixteens"), (2, 528, "512")]
)
def test_attention_refuses_what_does_not_fit(tokens: int, width: int, match: str) -> None:
    keys = np.zeros((1, 3, width), np.float32)
    with pytest.raises(ValueError, match=match):
        attend(keys[:, :1], keys, keys, tokens, np.zeros((1, 1, width), np.float32), "f32", 1.0, 1)


class Whole:
    """A layer's parts, and what it computes by single operations of the reference."""

    def __init__(self, name: str, *, biased: bool, normed: bool, group: int = 32) -> None:
        self.dtype, self.name = TYPES[name], name
        shapes = [(HEADS * WIDTH, HIDDEN), (SHARED * WIDTH, HIDDEN), (SHARED * WIDTH, HIDDEN), (HIDDEN, HEADS * WIDTH)]
        shapes += [(BETWEEN, HIDDEN), (BETWEEN, HIDDEN), (HIDDEN, BETWEEN)]
        self.matrices = [matrix(*shape, seed, group) for seed, shape in enumerate(shapes)]
        self.biases = [some(self.dtype, rows, seed=9) if biased else None for rows, _ in shapes]
        sizes = [HIDDEN, HIDDEN, WIDTH if normed else 0, WIDTH if normed else 0]
        self.norms = [some(self.dtype, size, seed=at) if size else None for at, size in enumerate(sizes)]

    def layer(self) -> DecoderLayer:
        norms = [None if weight is None else Norm(as_bits(weight), 1e-5) for weight in self.norms]
        biases = [None if bias is None else as_bits(bias) for bias in self.biases]
        return DecoderLayer(self.matrices, biases, norms, WIDTH, self.name)

    def project(self, x: np.ndarray, cosines: np.ndarray, sines: np.ndarray) -> list[np.ndarray]:
        normal = reference.rms_norm(x, self.norms[0], 1e-5)
        states = [product(self.matrices[at], normal, self.biases[at]) for at in range(3)]
        for at in range(2):
            heads = states[at].reshape(len(x), -1, WIDTH)
            if (weight := self.norms[2 + at]) is not None:
                heads = reference.rms_norm(heads, weight, 1e-5)
            states[at] = reference.rotate(heads, cosines[:, None], sines[:, None]).reshape(len(x), -1)
        return states

    def finish(self, attended: np.ndarray, x: np.ndarray) -> np.ndarray:
        x = reference.add(x, product(self.matrices[3], attended, self.biases[3]))
        normal = reference.rms_norm(x, self.norms[1], 1e-5)
        gates, ups = (product(self.matrices[at], normal, self.biases[at]) for at in (4, 5))
        return reference.add(x, product(self.matrices[6], reference.gate(gates, ups), self.biases[6]))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [1, 3, 9, 300])
@pytest.mark.parametrize(("biased", "normed"), [(False, False), (True, True)])
def test_a_layer(name: str, rows: int, biased: bool, normed: bool) -> None:
    whole = Whole(name, biased=biased, normed=normed)
    x, angles = some(whole.dtype, rows, HIDDEN), some(np.dtype("f4"), rows, WIDTH)
    cosines, sines = np.cos(angles).astype(whole.dtype), np.sin(angles).astype(whole.dtype)
    layer, attended = whole.layer(), some(whole.dtype, rows, HEADS * WIDTH, seed=3)
    wanted, finished = whole.project(x, cosines, sines), whole.finish(attended, x)
    for threads in (1, 2):
        states = [np.empty_like(state) for state in wanted]
        layer.project(as_bits(x), as_bits(cosines), as_bits(sines), *map(as_bits, states), threads)
        assert [state.tobytes() for state in states] == [state.tobytes() for state in wanted]
        out = np.empty_like(x)
        layer.finish(as_bits(attended), as_bits(x), as_bits(out), threads)
        assert out.tobytes() == finished.tobytes()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("sequences", "used", "room"), [(1, 0, 1), (1, 300, 400), (3, 5, 6)])
def test_one_more_token(name: str, sequences: int, used: int, room: int) -> None:
    """All of a layer in one call is what it is in three."""
    whole = Whole(name, biased=True, normed=True)
    x, angles = some(whole.dtype, sequences, HIDDEN), some(np.dtype("f4"), sequences, WIDTH)
    cosines, sines = np.cos(angles).astype(whole.dtype), np.sin(angles).astype(whole.dtype)
    before = [some(whole.dtype, sequences, SHARED, room, WIDTH, seed=seed) for seed in (1, 2)]
    queries, *states = whole.project(x, cosines, sines)
    after = [array.copy() for array in before]
    for array, state in zip(after, states, strict=True):
        array[:, :, used] = state.reshape(sequences, SHARED, WIDTH)
    heads = queries.reshape(sequences * SHARED, HEADS // SHARED, WIDTH)
    keys, values = (array.reshape(sequences * SHARED, room, WIDTH) for array in after)
    attended = reference.attend(heads, keys, values, used + 1, 0.3).reshape(sequences, -1)
    wanted, layer = whole.finish(attended, x), whole.layer()
    for threads in (1, 2):
        kept, out = (before[0].copy(), before[1].copy()), np.empty_like(x)
        turns = as_bits(cosines), as_bits(sines)
        layer.step(as_bits(x), turns, (as_bits(kept[0]), as_bits(kept[1])), used, 0.3, as_bits(out), threads)
        assert out.tobytes() == wanted.tobytes()
        assert [array.tobytes() for array in kept] == [array.tobytes() for array in after]


def test_one_more_token_needs_room_of_its_shape() -> None:
    whole = Whole("f32", biased=False, normed=False)
    layer, x, angles = whole.layer(), some(whole.dtype, 2, HIDDEN), some(whole.dtype, 2, WIDTH)
    kept, out = np.zeros((2, SHARED, 4, WIDTH), np.float32), np.empty((2, HIDDEN), np.float32)

    def step(keys: np.ndarray = kept, values: np.ndarray = kept, used: int = 3, rows: int = 2) -> None:
        layer.step(x, (angles[:rows], angles[:rows]), (keys, values), used, 1.0, out, 1)

    step()
    for broken, match in [
        ({"used": 4}, "room"),
        ({"used": 2**63}, "room"),
        ({"keys": kept[:1]}, "sequences"),
        ({"keys": kept[:, :1].copy()}, "sequences"),
        ({"keys": kept[0]}, "sequences"),
        ({"values": kept[:, :, :3].copy()}, "values as keys"),
        ({"values": kept[0]}, "values as keys"),
        ({"values": kept.astype("f8")}, "type"),
        ({"rows": 1}, "angle"),
    ]:
        with pytest.raises(ValueError, match=match):
            step(**broken)


def test_gates_of_every_size_are_near() -> None:
    """What a layer makes of gates from -200 to 200, which the polynomial's ends are for."""
    gates = np.linspace(-200, 200, 4001, dtype=np.float32)
    with np.errstate(over="ignore"):
        exact = gates.astype("f8") / (1 + np.exp(-gates.astype("f8")))
    found = reference.gate(gates, np.ones_like(gates))
    assert np.allclose(found, exact, rtol=3e-7, atol=1e-35)


def test_a_layer_refuses_what_does_not_fit() -> None:
    whole = Whole("f32", biased=True, normed=False)
    x, angles = some(whole.dtype, 2, HIDDEN), some(whole.dtype, 2, WIDTH)
    out = [np.empty((2, rows), np.float32) for rows in (HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH)]
    layer = whole.layer()
    with pytest.raises(ValueError, match="output for each row"):
        layer.project(x, angles, angles, out[0], out[1][:1], out[2], 1)
    with pytest.raises(ValueError, match="angle"):
        layer.project(x, angles[:1], angles, *out, 1)
    with pytest.raises(ValueError, match="columns"):
        layer.finish(out[1], x, np.empty_like(x), 1)
    with pytest.raises(ValueError, match="type"):
        layer.finish(out[0].view("u2")[:, ::2].copy(), x, np.empty_like(x), 1)
    for broken in ([whole.matrices[1]] * 7, whole.matrices[:6]):
        with pytest.raises(ValueError, match="expected"):
            DecoderLayer(
                broken, whole.biases, [Norm(weight, 0.0) for weight in whole.norms[:2]] + [None, None], 16, "f32"
            )
    with pytest.raises(ValueError, match="norms of both halves"):
        DecoderLayer(whole.matrices, whole.biases, [None] * 4, WIDTH, "f32")
