"""Tests of the NumPy Llama: by hand, against a slow float64 reference, and on the shipped model."""

from __future__ import annotations

import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ingot.demo.llama import (
    Llama,
    LlamaConfig,
    attention,
    perplexity,
    rms_norm,
    rope_tables,
    rotate,
    select_windows,
    silu,
)
from ingot.demo.tokenizer import Tokenizer
from ingot.errors import UnsupportedError, UsageError
from tests.support.paths import DEMO_DATA as DATA

PERPLEXITY = 18.94874
TINY: dict[str, object] = {
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 11,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
}
Weights = dict[str, NDArray[Any]]


def read_safetensors(data: bytes) -> Weights:
    """Read the bfloat16 tensors of a safetensors file; independent of Ingot's own reader."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    spans = {name: (entry["shape"], *entry["data_offsets"]) for name, entry in header.items()}
    flat = {name: data[8 + size + start : 8 + size + end] for name, (_, start, end) in spans.items()}
    return {name: np.frombuffer(flat[name], ml_dtypes.bfloat16).reshape(spans[name][0]) for name in spans}


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    """Return the shipped configuration."""
    return dict(json.loads((DATA / "config.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Return the shipped parameters."""
    return read_safetensors((DATA / "model.safetensors").read_bytes())


@pytest.fixture(scope="module")
def held_out() -> NDArray[np.int64]:
    """Return the encoded held-out text."""
    tokenizer = Tokenizer.from_json((DATA / "tokenizer.json").read_text(encoding="utf-8"))
    return np.array(tokenizer.encode((DATA / "heldout.txt").read_text(encoding="utf-8")))


def tiny_weights(config: dict[str, object], seed: int = 0) -> Weights:
    """Return random float32 parameters, large enough that attention is far from uniform."""
    rng = np.random.default_rng(seed)
    shapes = LlamaConfig.from_mapping(config).shapes()
    return {name: rng.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


# --- parts, by hand ----------------------------------------------------------


def test_rms_norm_by_hand() -> None:
    """The mean square of (3, 4) is 12.5; eps is added to it, and not to the root."""
    x = np.array([[3.0, 4.0]], np.float32)
    gain = np.array([1.0, 2.0], np.float32)
    assert rms_norm(x, gain, 0.0)[0] == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])
    assert rms_norm(x, gain, 12.5)[0] == pytest.approx([3 / 5, 8 / 5])


def test_attention_by_hand() -> None:
    """The second position weighs the two values 1 : 3; the first sees itself only."""
    q = np.array([[[[9.0, 9.0], [math.sqrt(2), 0.0]]]], np.float32)
    k = np.array([[[[0.0, 5.0], [math.log(3), 7.0]]]], np.float32)
    v = np.array([[[[4.0, 0.0], [0.0, 8.0]]]], np.float32)
    assert attention(q, k, v)[0, 0] == pytest.approx(np.array([[4.0, 0.0], [1.0, 6.0]]))


def test_query_heads_share_key_heads_in_order() -> None:
    """Heads 0 and 1 read key head 0, heads 2 and 3 read key head 1."""
    q = np.zeros((1, 4, 3, 2), np.float32)
    k = np.zeros((1, 2, 3, 2), np.float32)
    v = np.stack([np.full((1, 3, 2), 1.0), np.full((1, 3, 2), 2.0)], axis=1).astype(np.float32)
    assert attention(q, k, v)[0, :, 2, 0] == pytest.approx([1, 1, 2, 2])


def test_rotary_positions_turn_halves() -> None:
    """Channel 0 pairs with channel 2 (not 1) and turns one radian a position at the first frequency."""
    cos, sin = rope_tables(3, 4, 100.0)
    x = np.tile(np.array([1.0, 0.0, 0.0, 1.0], np.float32), (3, 1))
    turned = rotate(x, cos, sin)
    assert turned[0] == pytest.approx([1, 0, 0, 1])
    assert turned[2] == pytest.approx([math.cos(2), -math.sin(0.2), math.sin(2), math.cos(0.2)], rel=1e-6)


def test_silu() -> None:
    """Large inputs of either sign neither overflow nor lose their limit."""
    x = np.array([-1000.0, -1.0, 0.0, 1.0, 1000.0], np.float32)
    with np.errstate(all="raise"):
        assert silu(x) == pytest.approx([0, -1 / (1 + math.e), 0, math.e / (1 + math.e), 1000], rel=1e-6)


# --- the whole pass, against float64 loops -------------------------------------


def reference_norm(x: NDArray[np.float64], gain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normalise one vector."""
    return np.asarray(x / math.sqrt(sum(x * x) / len(x) + 1e-5) * gain)


def reference_turn(x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
    """Turn one head's vector, as complex numbers."""
    half = len(x) // 2
    numbers = x[:half] + 1j * x[half:]
    numbers = numbers * [np.exp(1j * position * 100.0 ** (-i / half)) for i in range(half)]
    return np.concatenate((numbers.real, numbers.imag))


def reference_logits(weights: Weights, tokens: list[int]) -> NDArray[np.float64]:
    """Run ``TINY`` one position, one head and one score at a time."""
    w = {name.removesuffix(".weight"): value.astype(np.float64) for name, value in weights.items()}
    stream = [w["model.embed_tokens"][token] for token in tokens]
    for layer in ("model.layers.0", "model.layers.1"):
        normed = [reference_norm(x, w[f"{layer}.input_layernorm"]) for x in stream]
        q, k, v = ([(w[f"{layer}.self_attn.{part}_proj"] @ x).reshape(-1, 4) for x in normed] for part in "qkv")
        for t in range(len(tokens)):
            heads = []
            for head in range(4):
                turned = reference_turn(q[t][head], t)
                scores = [turned @ reference_turn(k[s][head // 2], s) / 2 for s in range(t + 1)]
                shares = np.exp(scores) / np.exp(scores).sum()
                heads.append(sum(share * v[s][head // 2] for s, share in enumerate(shares)))
            stream[t] = stream[t] + w[f"{layer}.self_attn.o_proj"] @ np.concatenate(heads)
            x = reference_norm(stream[t], w[f"{layer}.post_attention_layernorm"])
            gate, up = w[f"{layer}.mlp.gate_proj"] @ x, w[f"{layer}.mlp.up_proj"] @ x
            stream[t] = stream[t] + w[f"{layer}.mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * up)
    return np.array([w["lm_head"] @ reference_norm(x, w["model.norm"]) for x in stream])


@pytest.mark.parametrize("seed", range(3))
def test_logits_match_the_reference(seed: int) -> None:
    """Every part is wired as in Llama, and batch entries do not mix."""
    weights = tiny_weights(TINY, seed)
    tokens = np.random.default_rng(seed).integers(0, 11, (2, 8))
    found = Llama(TINY, weights).logits(tokens)
    assert found.dtype == np.float32
    expected = np.array([reference_logits(weights, row.tolist()) for row in tokens])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_tied_head_is_the_embedding() -> None:
    """With tied embeddings there is no ``lm_head`` to read."""
    weights = tiny_weights(TINY)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    tokens = np.arange(8)[None]
    expected = Llama(TINY, weights).logits(tokens)
    del weights["lm_head.weight"]
    np.testing.assert_array_equal(Llama({**TINY, "tie_word_embeddings": True}, weights).logits(tokens), expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_any_float_dtype(dtype: Any) -> None:
    """Weights are widened, and computed with, in float32."""
    narrow = {name: value.astype(dtype) for name, value in tiny_weights(TINY).items()}
    wide = {name: value.astype(np.float32) for name, value in narrow.items()}
    tokens = np.arange(8)[None]
    found = Llama(TINY, narrow).logits(tokens)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, Llama(TINY, wide).logits(tokens))


# --- refusals --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, UnsupportedError),
        ({"attention_bias": True}, UnsupportedError),
        ({"hidden_act": "gelu"}, UnsupportedError),
        ({"vocab_size": None}, UsageError),
        ({"num_hidden_layers": 0}, UsageError),
        ({"hidden_size": 6.0}, UsageError),
        ({"num_key_value_heads": 3}, UsageError),
        ({"head_dim": 3}, UsageError),
        ({"rms_norm_eps": math.nan}, UsageError),
        ({"rope_theta": "10000"}, UsageError),
        ({"rope_theta": True}, UsageError),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0}}, UnsupportedError),
        ({"rope_parameters": {"rope_theta": "100"}}, UsageError),
    ],
)
def test_bad_configurations_are_refused(change: dict[str, object], error: type[Exception]) -> None:
    """What the pass would get wrong, it refuses."""
    with pytest.raises(error, match="config"):
        Llama({**TINY, **change}, tiny_weights(TINY))


def test_the_base_of_positions_is_read_where_either_release_of_transformers_writes_it() -> None:
    plain = {key: value for key, value in TINY.items() if key != "rope_theta"}
    for config in ({**plain, "rope_theta": 7.0}, {**plain, "rope_parameters": {"rope_theta": 7.0}}):
        assert LlamaConfig.from_mapping(config).rope_theta == 7.0


def test_missing_and_misshapen_weights_are_refused() -> None:
    """The message names the parameter."""
    weights = tiny_weights(TINY)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UsageError, match=name):
        Llama(TINY, {**weights, name: weights[name].T})
    del weights[name]
    with pytest.raises(UsageError, match=name):
        Llama(TINY, weights)


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros(4, np.int64),
        np.zeros((1, 4)),
        np.zeros((1, 0), np.int64),
        np.zeros((1, 9), np.int64),
        np.array([[11]]),
        np.array([[-1]]),
    ],
)
def test_bad_tokens_are_refused(tokens: NDArray[Any]) -> None:
    """Negative ids must not wrap round, nor positions pass the context."""
    with pytest.raises(UsageError):
        Llama(TINY, tiny_weights(TINY)).logits(tokens)


# --- windows and perplexity ------------------------------------------------------


def test_windows_predict_each_token_once() -> None:
    """Windows overlap by the one token that is target of one and input of the next."""
    tokens = np.arange(100, 111)
    assert select_windows(tokens, 3, None).tolist() == [
        [100, 101, 102, 103],
        [103, 104, 105, 106],
        [106, 107, 108, 109],
    ]
    assert select_windows(tokens, 3, 2)[:, 0].tolist() == [100, 103]
    assert select_windows(tokens, 10, 64).shape == (1, 11)
    with pytest.raises(UsageError, match="do not fill"):
        select_windows(tokens, 11, None)
    with pytest.raises(UsageError):
        select_windows(tokens, 3, 0)


def test_perplexity_by_hand() -> None:
    """A head of zeros is uniform; otherwise the loss is the mean over the reference's log-probabilities."""
    weights = tiny_weights(TINY)
    tokens = np.array([1, 5, 2, 10, 0, 7, 3])
    assert perplexity(Llama(TINY, {**weights, "lm_head.weight": np.zeros((11, 6))}), tokens, 3) == pytest.approx(11)
    losses = []
    for row in (tokens[:4], tokens[3:]):
        logits = reference_logits(weights, row[:-1].tolist())
        shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        losses += [-math.log(shares[t, row[t + 1]]) for t in range(3)]
    assert perplexity(Llama(TINY, weights), tokens, 3) == pytest.approx(math.exp(sum(losses) / 6), rel=1e-4)


def test_perplexity_of_broken_weights_is_not_a_crash() -> None:
    """Huge logits give infinity and NaN weights give NaN."""
    weights = tiny_weights(TINY)
    tokens = np.array([1, 5, 2, 10, 0, 7, 3])
    huge = {**weights, "lm_head.weight": weights["lm_head.weight"] * np.float32(1e6)}
    assert perplexity(Llama(TINY, huge), tokens, 3) == math.inf
    broken = {**weights, "model.norm.weight": np.full(6, math.nan)}
    assert math.isnan(perplexity(Llama(TINY, broken), tokens, 3))


# --- the shipped model ------------------------------------------------------------


def test_shipped_file_is_small_and_whole(config: dict[str, object], weights: Weights) -> None:
    """The package stays small, and holds each parameter and no other."""
    assert len((DATA / "model.safetensors").read_bytes()) <= 4_000_000
    assert {name: value.shape for name, value in weights.items()} == LlamaConfig.from_mapping(config).shapes()
    assert config["model_type"] == "llama"


def test_later_tokens_do_not_change_earlier_logits(
    config: dict[str, object], weights: Weights, held_out: NDArray[np.int64]
) -> None:
    """Attention is causal, and reaches back to the first token."""
    model = Llama(config, weights)
    first = held_out[None, :64]
    second = first.copy()
    second[0, 40] = (second[0, 40] + 1) % 1024
    before, after = model.logits(first), model.logits(second)
    np.testing.assert_array_equal(before[0, :40], after[0, :40])
    assert (before[0, 40:] != after[0, 40:]).any(axis=-1).all()


def test_held_out_perplexity(config: dict[str, object], weights: Weights, held_out: NDArray[np.int64]) -> None:
    """The number in the data's README, which the torch model gives too."""
    assert perplexity(Llama(config, weights), held_out) == pytest.approx(PERPLEXITY, rel=1e-4)


def test_shuffled_weights_are_much_worse(
    config: dict[str, object], weights: Weights, held_out: NDArray[np.int64]
) -> None:
    """Perplexity depends on where the values are, not only on what they are."""
    rng = np.random.default_rng(0)
    shuffled = {name: rng.permutation(value.ravel()).reshape(value.shape) for name, value in weights.items()}
    assert perplexity(Llama(config, shuffled), held_out, max_windows=8) > 20 * PERPLEXITY


def rounded(weights: Weights, bits: int) -> Weights:
    """Round matrices to ``2**bits - 1`` levels in groups of 32 along the input, with one scale a group."""
    top = 2 ** (bits - 1) - 1
    result = {}
    for name, value in weights.items():
        if value.ndim == 2:
            groups = value.astype(np.float32).reshape(-1, 32)
            scale = np.maximum(np.abs(groups).max(axis=1, keepdims=True), np.float32(1e-12)) / top
            value = (np.rint(groups / scale) * scale).reshape(value.shape)  # noqa: PLW2901
        result[name] = value
    return result


@pytest.mark.parametrize(("bits", "low", "high"), [(8, 0.999, 1.001), (4, 1.02, 1.06), (3, 1.1, 1.3), (2, 5.0, 100.0)])
def test_rounding_hurts_as_much_as_it_should(
    config: dict[str, object], weights: Weights, held_out: NDArray[np.int64], bits: int, low: float, high: float
) -> None:
    """The demo's point: eight bits are free, four cost a little, and two are far too few for plain rounding."""
    ratio = perplexity(Llama(config, rounded(weights, bits)), held_out) / PERPLEXITY
    assert low < ratio < high
