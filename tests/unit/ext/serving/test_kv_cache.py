"""Caches of keys and values in packed blocks: what they hold, what attention makes of it, what transformers asks."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ingot.cli.main import run
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.ext.serving.kv_attention import NAME, attend, covers, tokens_to_keep
from ingot.ext.serving.kv_cache import PackedCache, make_cache, read_in_steps, settings_of, use_kv_cache
from ingot.ext.serving.kv_layer import VIEW, PackedLayer, View
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.evaluation.generate import generate
from ingot.runtime.layers.decoded_on_use import DecodedOnUse
from ingot.runtime.loading.kv_options import KvCache, kv_cache
from ingot.runtime.loading.options import Draft, Loading, LoadOptions, Measures, Protocol
from tests.support.paths import DEMO_DATA

SMALL = KvCache("int4", window=16, block=16, group=16)
TOKENS = torch.randint(2, 90, (2, 100), generator=torch.Generator().manual_seed(0))


def model_of(kind: str = "Llama", **more: Any) -> Any:
    """A random model with two layers, four heads that share two of keys, 16 channels each."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 90}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    named = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
    config = named(**sizes | {"pad_token_id": 0, "eos_token_id": None} | more)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def states(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(keys: torch.Tensor, values: torch.Tensor, cuts: Sequence[int], kind: KvCache = SMALL) -> PackedLayer:
    """A layer that got these tokens in pieces that end at ``cuts``."""
    layer, start = PackedLayer(kind, "layer 0"), 0
    for stop in cuts:
        layer.update(keys[:, :, start:stop], values[:, :, start:stop])
        start = stop
    return layer


def held(layer: PackedLayer) -> bytes:
    """All that a layer holds, as bytes."""
    blocks = b"".join(part.decode("f32").tobytes() for part in layer.blocks or ())
    return blocks + layer.keys.contiguous().numpy().tobytes() + layer.values.contiguous().numpy().tobytes()


def logits_of(model: Any, cache: Any, tokens: torch.Tensor, cuts: Sequence[int], **more: Any) -> torch.Tensor:
    """Logits of tokens that are read in pieces with a cache."""
    found, start = [], 0
    with torch.no_grad():
        for stop in cuts:
            told = {name: value[:, :stop] if name == "attention_mask" else value for name, value in more.items()}
            found.append(model(tokens[:, start:stop], past_key_values=cache, use_cache=True, **told).logits)
            start = stop
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("kind", [SMALL, KvCache("int8", window=0, block=32, sinks=0), KvCache("kivi2", window=5)])
def test_what_a_layer_holds(kind: KvCache) -> None:
    """First and latest tokens as they came; between them keys by channel, values by token, within half a step."""
    keys, values = states(2, 3, 100, 48), states(2, 3, 100, 48, seed=1)
    layer = layer_of(keys, values, [30, 31, 100], kind)
    view = View(layer, layer.keys, layer.values)
    packed, lead = view.packed, kind.sinks
    assert packed == (100 - lead - kind.latest) // kind.tokens * kind.tokens > 0
    levels = 2**kind.bits - 1
    for given_, found, by_channel in ((keys, view.decode(keys=True), True), (values, view.decode(keys=False), False)):
        middle = slice(lead, lead + packed)
        assert torch.equal(found[:, :, :lead], given_[:, :, :lead])
        assert torch.equal(found[:, :, lead + packed :], given_[:, :, lead + packed :])
        exact, near = given_[:, :, middle], found[:, :, middle]
        if by_channel:
            grouped = exact.unflatten(2, (-1, kind.tokens))
            step = (grouped.amax(3) - grouped.amin(3))[:, :, :, None].expand_as(grouped).flatten(2, 3) / levels
        else:
            step = torch.cat(
                [
                    (part.amax(-1) - part.amin(-1))[..., None].expand_as(part) / levels
                    for part in exact.split(kind.group, dim=-1)
                ],
                dim=-1,
            )
        assert ((near - exact).abs() <= 0.505 * step + 0.004).all()
        assert not torch.equal(near, exact)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), st.sampled_from([SMALL, KvCache("kivi2", window=3, sinks=1)])
)
@settings(max_examples=15, deadline=None)
def test_pieces_do_not_matter(sizes: list[int], kind: KvCache) -> None:
    """What is held depends on the tokens, not on how many came at a time."""
    cuts = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    keys, values = states(1, 2, cuts[-1], 16), states(1, 2, cuts[-1], 16, seed=1)
    assert held(layer_of(keys, values, cuts, kind)) == held(layer_of(keys, values, cuts[-1:], kind))


def test_a_block_is_never_packed_again() -> None:
    keys, values = states(1, 2, 200, 16), states(1, 2, 200, 16, seed=1)
    layer = layer_of(keys, values, [40])
    first = layer.blocks[0].decode("f32") if layer.blocks else None
    assert first is not None
    for start in range(40, 200, 7):
        layer.update(keys[:, :, start : start + 7], values[:, :, start : start + 7])
        assert layer.blocks is not None
        assert (layer.blocks[0].decode("f32")[:, :1] == first).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "masked"), [(1, "none"), (1, "bool"), (9, "none"), (9, "bool"), (9, "heads"), (9, "float")]
)
def test_attention_is_that_over_decoded_tokens(dtype: torch.dtype, rows: int, masked: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("ingot.ext.serving.kv_attention._SCORES", 2 * 6 * 90 * 4)  # four rows at a time
    keys, values = states(2, 2, 90, 48, dtype=dtype), states(2, 2, 90, 48, seed=1, dtype=dtype)
    layer = layer_of(keys, values, [90 - rows])
    key, value = layer.update(keys[:, :, -rows:], values[:, :, -rows:])
    assert isinstance(key, DecodedOnUse)
    query = states(2, 6, rows, 48, seed=2, dtype=dtype) * 2
    causal = torch.arange(90)[None, None, None] <= torch.arange(90 - rows, 90)[:, None]
    mask: Any = causal.expand(2, 1, -1, -1).clone()
    if masked == "bool":
        mask[1, :, :, :30] = False
    if masked == "heads":
        mask = mask.repeat(1, 6, 1, 1)
        mask[:, 4:, :, 10:50] = False
    if masked == "float":
        mask = torch.where(mask, states(2, 1, rows, 90, seed=3), -1e9).to(dtype)
    module = type("Module", (), {"num_key_value_groups": 3, "is_causal": True})()
    assert covers(getattr(key, VIEW), query, {"dropout": 0.0})
    with torch.no_grad():
        found, none = attend(module, query, key, value, None if masked == "none" else mask, scaling=0.2)
        dense = [part.float().repeat_interleave(3, dim=1) for part in (key.values_now(), value.values_now())]
        told = mask.float() if masked == "float" else mask
        wanted = functional.scaled_dot_product_attention(query.float(), *dense, attn_mask=told, scale=0.2)
    assert none is None
    assert found.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted.transpose(1, 2), rtol=close, atol=close)


def test_a_row_that_sees_nothing_is_finite() -> None:
    keys, values = states(1, 2, 60, 16), states(1, 2, 60, 16, seed=1)
    key, value = layer_of(keys, values, [60]).update(keys[:, :, :2], values[:, :, :2])
    mask = torch.zeros(1, 1, 2, 62, dtype=torch.bool)
    mask[:, :, 1, :5] = True
    module = type("Module", (), {"num_key_value_groups": 1})()
    with torch.no_grad():
        assert attend(module, states(1, 2, 2, 16), key, value, mask)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Gemma3"])
def test_a_model_reads_blocks_as_it_would_decoded_ones(kind: str) -> None:
    """By the kernels and by torch's own attention over what is decoded, the logits are the same; left padding too."""
    more: dict[str, Any] = {"sliding_window": 64} if kind in {"Mistral", "Gemma3"} else {}
    model = model_of(kind, **more)
    mask = torch.ones_like(TOKENS)
    mask[1, :23] = 0
    cuts = [50, *range(51, 60), 100]
    with torch.no_grad():
        full = model(TOKENS, attention_mask=mask).logits
    decoded = logits_of(model, make_cache(model, SMALL), TOKENS, cuts, attention_mask=mask)
    use_kv_cache(model, SMALL)
    cache = make_cache(model, SMALL)
    found = logits_of(model, cache, TOKENS, cuts, attention_mask=mask)
    assert settings_of(model) == SMALL
    seen = mask.bool()
    torch.testing.assert_close(found[seen], decoded[seen], rtol=1e-4, atol=1e-4)
    assert 0 < (found[seen] - full[seen]).abs().max() < 0.5
    sliding = [layer for layer in cache.layers if layer.is_sliding]
    assert bool(sliding) == bool(more)
    for layer in sliding:
        assert isinstance(layer, PackedLayer)
        assert layer.dropped == 32
        assert layer.get_mask_sizes(3) == (71, 32)


def test_a_window_that_holds_all_is_the_full_cache() -> None:
    """Bit for bit, whatever the pieces, as text too."""
    model, large = model_of(), KvCache("kivi2", window=200)
    cuts = [40, 41, 42, 80, 100]
    full = logits_of(model, transformers.DynamicCache(config=model.config), TOKENS, cuts)
    wanted = model.generate(TOKENS[:, :50], attention_mask=torch.ones(2, 50), max_new_tokens=20, do_sample=False)
    use_kv_cache(model, large)
    assert torch.equal(logits_of(model, make_cache(model, large), TOKENS, cuts), full)
    found = model.generate(TOKENS[:, :50], attention_mask=torch.ones(2, 50), max_new_tokens=20, do_sample=False)
    assert torch.equal(found, wanted)


def test_reading_in_steps_is_reading_one_by_one() -> None:
    tokens = TOKENS[:1, :75]
    for kind in (KvCache("kivi2", window=24, block=16, sinks=1), KvCache("int8", window=0, block=16, sinks=0)):
        model = use_kv_cache(model_of(), kind)
        with torch.no_grad():
            found, cache = read_in_steps(model, tokens)
        alone = logits_of(model, make_cache(model, kind), tokens, range(1, 76))  # of both sequences
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
        assert cache.get_seq_length() == 75


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": True},
        {"num_beams": 3, "do_sample": False},
        {"prompt_lookup_num_tokens": 3, "eos_token_id": 1},
        {"num_return_sequences": 2, "do_sample": True},
    ],
    ids=["greedy", "sample", "beams", "lookup", "several"],
)
def test_generation(how: dict[str, Any]) -> None:
    """A model that makes such caches by itself writes what it writes with torch's attention over decoded blocks."""
    model = model_of()
    prompt = TOKENS[:1, :60] if "prompt_lookup_num_tokens" in how else TOKENS[:, :60]
    asked = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 24, "pad_token_id": 0, **how}
    torch.manual_seed(1)
    wanted = model.generate(prompt, past_key_values=make_cache(model, SMALL), **asked)
    use_kv_cache(model, SMALL)
    torch.manual_seed(1)
    found = model.generate(prompt, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, wanted)
    assert isinstance(found.past_key_values, PackedCache)
    assert found.past_key_values.use().nbytes < found.past_key_values.use().full_nbytes


def test_sequences_of_a_cache() -> None:
    keys, values = states(3, 2, 80, 16), states(3, 2, 80, 16, seed=1)
    layer = layer_of(keys, values, [80])
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    assert held(layer) == held(layer_of(keys[[2, 0, 0]], values[[2, 0, 0]], [80]))
    layer.batch_select_indices(torch.tensor([True, False, True]))
    layer.batch_repeat_interleave(2)
    chosen = [2, 2, 0, 0]
    assert held(layer) == held(layer_of(keys[chosen], values[chosen], [80]))
    assert held(copy.deepcopy(layer)) == held(layer)
    layer.reset()
    assert (layer.get_seq_length(), layer.nbytes, layer.get_mask_sizes(4)) == (0, 0, (4, 0))
    layer.update(keys, values)
    assert held(layer) == held(layer_of(keys, values, [80]))


def test_tokens_taken_back() -> None:
    keys, values = states(1, 2, 80, 16), states(1, 2, 80, 16, seed=1)
    layer = layer_of(keys, values, [60, 80])
    layer.crop(-10)
    layer.crop(68)  # as older callers say it
    layer.crop(0)
    assert layer.get_seq_length() == 68
    layer.update(keys[:, :, 68:], values[:, :, 68:])
    assert held(layer) == held(layer_of(keys, values, [80]))
    with pytest.raises(UnsupportedError) as caught:
        layer.crop(-40)
    assert caught.value.rule == "kv.crop"
    assert held(layer) == held(layer_of(keys, values, [80]))
    layer.crop(-80)
    assert layer.get_seq_length() == 0


def test_the_model_around_a_cache(tmp_path: Path) -> None:
    """Passes without a cache make one; with another, or none, nothing changes; what is saved says nothing of it."""
    model = use_kv_cache(use_kv_cache(model_of(), SMALL), {"kind": "int4", "window": 16, "block": 16, "group": 16})
    with torch.inference_mode():
        first = model(TOKENS[:, :70])
    assert isinstance(first.past_key_values, PackedCache)
    with torch.no_grad():
        assert model(TOKENS[:, 70:71], past_key_values=first.past_key_values).logits.isfinite().all()
        assert model(TOKENS, use_cache=False).past_key_values is None
    other = transformers.DynamicCache(config=model.config)
    assert (
        model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), past_key_values=other, max_new_tokens=2)
        is not None
    )
    assert other.get_seq_length() == 101
    twin = copy.deepcopy(model)
    assert twin._prepare_cache_for_generation.__self__ is twin
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


def test_gradients_go_through_what_is_decoded() -> None:
    model = use_kv_cache(model_of(), SMALL)
    cache = make_cache(model, SMALL)
    logits_of(model, cache, TOKENS, [80])
    model(TOKENS[:, 80:], past_key_values=cache).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_the_tokens_that_are_looked_at_stay() -> None:
    """SnapKV by hand: each head's last queries look at one token; it, its neighbours, the first and the last stay."""
    kind = KvCache("int4", window=16, block=16, group=16, sinks=2, evict=48)
    keys = torch.zeros(1, 2, 200, 16)
    keys[0, 0, 90, 0] = keys[0, 1, 130, 1] = 9
    layer = PackedLayer(kind, "layer 0")
    key, _ = layer.update(keys, states(1, 2, 200, 16))
    query = torch.zeros(1, 4, 200, 16)
    query[..., 0] = query[..., 1] = 9
    kept = tokens_to_keep(getattr(key, VIEW), query, None, 1.0)
    assert kept.shape == (1, 2, 48)
    for head, token in ((0, 90), (1, 130)):
        found = kept[0, head].tolist()
        assert found == sorted(set(found))
        assert {0, 1, *range(token - 3, token + 4), *range(168, 200)} <= set(found)


@pytest.mark.parametrize("padded", [0, 20])
def test_evicted_tokens_are_gone_and_nothing_else(padded: int) -> None:
    """What follows attends to what was kept, as torch's attention would with all else masked."""
    kind = KvCache("int8", window=300, block=16, group=16, evict=40)
    model = use_kv_cache(model_of(num_hidden_layers=1), kind)
    mask = torch.ones_like(TOKENS)
    mask[1, :padded] = 0
    cache = make_cache(model, kind)
    found = logits_of(model, cache, TOKENS, [90, 91, 95, 100], attention_mask=mask)
    layer = cache.layers[0]
    assert cache.get_seq_length() == 100
    assert layer.keys.shape[2] == 50
    assert not layer.positions[1, :, 4:].lt(padded).any()
    plain = model_of(num_hidden_layers=1)
    visible = torch.zeros(2, 4, 10, 100, dtype=torch.bool)
    visible[..., :90].scatter_(3, layer.positions.repeat_interleave(2, 1)[:, :, None].expand(-1, -1, 10, -1), True)
    visible[..., 90:] = torch.ones(10, 10, dtype=torch.bool).tril()
    visible &= mask.bool()[:, None, None]
    full = transformers.DynamicCache(config=plain.config)
    positions = torch.arange(90, 100)[None]
    with torch.no_grad():
        plain(TOKENS[:, :90], attention_mask=mask, past_key_values=full)
        wanted = plain(TOKENS[:, 90:], attention_mask=visible, position_ids=positions, past_key_values=full).logits
    torch.testing.assert_close(found[:, 90:], wanted, rtol=1e-4, atol=1e-4)
    cache.crop(-5)
    with pytest.raises(UnsupportedError, match="can remove at most"):
        cache.crop(-6)


def test_eviction_with_blocks_and_without_our_attention() -> None:
    kind = KvCache("int4", window=16, block=16, group=16, evict=60)
    model = model_of()
    with pytest.raises(UnsupportedError) as caught:
        logits_of(model, make_cache(model, kind), TOKENS, [90, 91])
    assert caught.value.rule == "kv.evict"
    use_kv_cache(model, kind)
    wanted = {"attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 30, "return_dict_in_generate": True}
    found = model.generate(TOKENS, num_beams=2, pad_token_id=0, **wanted)
    assert found.past_key_values.get_seq_length() == 129
    assert found.past_key_values.layers[0].blocks[0].count == 4
    eager = model_of()
    eager.set_attn_implementation("eager")
    with pytest.raises(UnsupportedError) as caught:
        use_kv_cache(eager, kind)
    assert caught.value.rule == "kv.evict"


def test_other_attention_gets_decoded_tokens() -> None:
    """A model that computes attention in its own way runs with the cache, and gives what ours gives."""
    eager = model_of()
    eager.set_attn_implementation("eager")
    use_kv_cache(eager, SMALL)
    assert eager.config._attn_implementation == "eager"
    cuts = [70, 71, 100]
    found = logits_of(eager, make_cache(eager, SMALL), TOKENS, cuts)
    ours = use_kv_cache(model_of(), SMALL)
    torch.testing.assert_close(found, logits_of(ours, make_cache(ours, SMALL), TOKENS, cuts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "bad",
    [
        "int3",
        "",
        "int4,window",
        "int4,window=-1",
        "int4,window=1e3",
        "int4,block=24",
        "int4,block=0",
        "int4,group=8",
        "int4,sinks=5000",
        "int4,evict=36",
        "int4,size=3",
        "int4,window=99999999999999999999",
        4,
        ["int4"],
        {"kind": "int4", "window": 1.5},
        {"kind": "int4", "window": True},
        {"kind": None},
        {"kinds": "int4"},
        {"kind": "int8", "block": 2048},
        {"kind": "int8", "evict": 0},
    ],
)
def test_options_that_are_none(bad: Any) -> None:
    with pytest.raises(UsageError) as caught:
        kv_cache(bad)
    assert caught.value.rule == "kv.option"


def test_options() -> None:
    assert kv_cache("int8") == kv_cache({"kind": "int8"}) == KvCache("int8", 64, 64)
    assert kv_cache("kivi2,window=32,evict=100") == KvCache("kivi2", window=32, evict=100)
    assert kv_cache("kivi2,window=32,evict=100").text() == "kivi2,window=32,evict=100"  # type: ignore[union-attr]
    assert (KvCache("kivi2").tokens, KvCache("kivi2").latest, KvCache("kivi2").bits) == (32, 128, 2)
    assert KvCache("int4", window=48, block=32).step == 16
    assert kv_cache(None) is None


def test_models_that_have_nothing_to_pack() -> None:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=30)
    bert = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30
    )
    for model in (transformers.T5ForConditionalGeneration(config), transformers.BertModel(bert)):
        with pytest.raises(UnsupportedError) as caught:
            use_kv_cache(model, "int4")
        assert caught.value.rule == "kv.model"
    with pytest.raises(UnsupportedError) as caught:
        PackedLayer(SMALL, "layer 7").update(states(1, 1, 4, 16).double(), states(1, 1, 4, 16).double())
    assert caught.value.rule == "kv.model"
    assert caught.value.where == "layer 7"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_states_that_cannot_be_packed(bad: float) -> None:
    """The layer is named, and holds what it held."""
    values = states(1, 2, 80, 16)
    values[0, 1, 30, 3] = bad
    layer = PackedLayer(SMALL, "layer 7")
    with pytest.raises(IngotError) as caught:
        layer.update(states(1, 2, 80, 16), values)
    assert caught.value.rule == "kv.range"
    assert caught.value.where == "layer 7"
    assert layer.keys.shape == layer.values.shape == (1, 2, 80, 16)
    assert all(blocks.count == 0 for blocks in layer.blocks or ())


def test_loading_generating_evaluating(capsys: Any) -> None:
    demo = DEMO_DATA
    asked = ["--kv-cache", "int4,window=0,block=16", "--max-tokens", "40", "--json"]
    assert run(["generate", str(demo), "The file", *asked]) == 0
    told = json.loads(capsys.readouterr().out)["kv_cache"]
    assert told["kind"] == "int4,window=0,block=16"
    assert told["tokens"] == 41
    assert told["nbytes"] == pytest.approx(told["bytes_per_token"] * told["tokens"])
    assert told["nbytes"] < told["full_nbytes"]
    protocol = Protocol(window=96, sequences=1)
    found = evaluate(demo, demo / "heldout.txt", demo, protocol, Loading(kv_cache="kivi2,window=0"))
    assert found.kv_cache is not None
    assert found.kl is not None
    assert found.kl > 1e-3
    assert any(row[0].startswith("KV cache kivi2,window=0") for row in found.report().tables[0].rows)
    for rule, loading, measures in (
        ("kv.layers", Loading(kv_cache="int8"), Measures(per_layer=True)),
        ("kv.evict", Loading(kv_cache="int8,evict=100"), None),
    ):
        with pytest.raises(UsageError) as caught:
            evaluate(demo, demo / "heldout.txt", demo, protocol, loading, measures)
        assert caught.value.rule == rule
    with pytest.raises(UsageError) as caught:
        generate(LoadOptions(demo, kv_cache="int8"), "The file", 3, Draft())
    assert caught.value.rule == "kv.draft"
