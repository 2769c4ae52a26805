"""Calibration a layer at a time: as of the whole model, whatever is in memory, and however often it was stopped."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP

import ingot
from ingot.core.runtime.memory import parse_size
from ingot.errors import IngotError
from ingot.model.statistics import Statistics
from ingot.runtime.calibration import calibrate as module
from ingot.runtime.calibration import skeleton_ends
from ingot.runtime.calibration.calibrate_work import Work
from ingot.runtime.calibration.calibration import CalibratePlan
from ingot.runtime.loading.transformers import load_model
from tests.support.memory import peak_anonymous
from tests.support.models import KINDS, make, make_tokenizer

Moments = dict[str, np.ndarray[Any, np.dtype[Any]]]

MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**KINDS["llama"][2], "head_dim": 8, "sliding_window": 4}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 16,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def more_kinds() -> Any:
    KINDS.update(MORE)
    yield
    for kind in MORE:
        del KINDS[kind]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no room for the model, nor for keys and values."""
    own = module.plan_memory
    means = lambda *args, **named: replace(own(*args, **named), in_memory=False, spilled=True, batch=2)  # noqa: E731
    monkeypatch.setattr(module, "plan_memory", means)


def taken(model: Path, out: Path, **options: Any) -> Moments:
    ingot.calibrate(model, out, **{"samples": 6, "length": 12, **options})
    with ingot.open(out) as found:
        return {name: tensor.numpy().copy() for name, tensor in found.items()}


def assert_same(found: Moments, wanted: Moments) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(
            found[name], values, rtol=1e-4, atol=1e-5 * float(np.abs(values).max()), err_msg=name
        )


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list that gets the tokens that a calibration reads."""
    seen: list[torch.Tensor] = []
    own = module.Passes

    def passes(model: Any, work: Any, tokens: torch.Tensor, *args: Any) -> Any:
        seen.append(tokens)
        return own(model, work, tokens, *args)

    monkeypatch.setattr(module, "Passes", passes)
    return seen


def plain(model: Any, name: str, tokens: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and G of one linear layer by a pass of the whole model, in batches of 8 as labels are drawn in them."""
    pairs = []

    def hook(_: Any, arguments: Any, output: Any) -> None:
        output.register_hook(
            lambda gradient: pairs.append((arguments[0].detach().flatten(0, 1), gradient.flatten(0, 1)))
        )

    handle = model.get_submodule(name).register_forward_hook(hook)
    torch.manual_seed(seed)
    for first in range(0, len(tokens), 8):
        started = model.get_input_embeddings()(tokens[first : first + 8]).detach().requires_grad_()
        logits = model(inputs_embeds=started).logits.flatten(0, 1)
        labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    handle.remove()
    x, g = (torch.cat(each).double() for each in zip(*pairs, strict=True))
    heavy = g.square().mean(1)
    return (x * heavy[:, None]).T @ x / heavy.sum(), g.T @ g / len(g)


@pytest.mark.parametrize(
    ("kind", "matrix"),
    [
        ("llama", "model.layers.0.mlp.up_proj"),
        ("tied qwen2", "model.layers.1.self_attn.v_proj"),
        ("bloom", "transformer.h.0.self_attention.query_key_value"),
        ("gemma2", "model.layers.1.self_attn.o_proj"),
        ("opt", "model.decoder.project_in"),
    ],
)
@pytest.mark.usefixtures("streamed")
def test_factors_are_those_of_the_whole_model(
    kind: str, matrix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(kind, tmp_path / "m", "float32")
    tokens, whole = drawn(monkeypatch), load_model(tmp_path / "m")
    found = taken(tmp_path / "m", tmp_path / "s.safetensors")
    name = next(name for name in found if name.endswith(f"{matrix.partition('.')[2]}.weight:inputs"))
    a, g = plain(whole, matrix, tokens[0])
    np.testing.assert_allclose(found[name], a, rtol=1e-3, atol=1e-4 * float(a.abs().max()))
    outputs = found[name.replace(":inputs", ":outputs")]
    np.testing.assert_allclose(outputs, g, rtol=1e-3, atol=1e-4 * float(g.abs().max()))


def embedding_moment(model: Any, tokens: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, float]:
    """Return the mean of ``g g^T`` for gradients g of embedding rows, and the mean of the squares at all logits."""
    embedding = model.get_input_embeddings()
    torch.manual_seed(seed)
    started = embedding(tokens).detach().requires_grad_()
    logits = model(inputs_embeds=started).logits.flatten(0, 1)
    logits.retain_grad()
    labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    gradients = started.grad.flatten(0, 1).double() * float(getattr(embedding, "embed_scale", 1))
    return gradients.T @ gradients / len(gradients), float(logits.grad.square().sum(1).mean())


@pytest.mark.parametrize("kind", ["llama", "tied qwen2", "gemma2"])
@pytest.mark.usefixtures("streamed")
def test_an_embedding_has_the_moment_of_its_gradients(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the head is tied, the moment of the head's inputs is added; Gemma multiplies rows by a constant."""
    make(kind, tmp_path / "m", "float32")
    tokens, whole = drawn(monkeypatch), load_model(tmp_path / "m")
    results = taken(tmp_path / "m", tmp_path / "s.safetensors")
    expected, weight = embedding_moment(whole, tokens[0])
    if whole.config.tie_word_embeddings:
        expected = plain(whole, "lm_head", tokens[0])[0] + expected / weight
    stored = results["model.embed_tokens.weight:inputs"]
    np.testing.assert_allclose(stored, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert results["model.embed_tokens.weight:count"] == tokens[0].numel()
    assert "model.embed_tokens.weight:outputs" not in results


def test_without_gradients_only_a_tied_embedding_has_statistics(tmp_path: Path) -> None:
    for kind, expected in (("llama", False), ("tied qwen2", True)):
        make(kind, tmp_path / kind, "float32")
        results = taken(tmp_path / kind, tmp_path / f"{kind}.safetensors", fisher=False)
        assert ("model.embed_tokens.weight:inputs" in results) == expected


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("fisher", [True, False])
def test_a_layer_at_a_time_gives_the_same(kind: str, fisher: bool, tmp_path: Path, request: Any) -> None:
    make(kind, tmp_path / "m")
    wanted = taken(tmp_path / "m", tmp_path / "kept.safetensors", fisher=fisher)
    request.getfixturevalue("streamed")
    assert_same(taken(tmp_path / "m", tmp_path / "streamed.safetensors", fisher=fisher), wanted)


def test_matrices_that_multiply_the_same_share_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is summed and written once; the file says which matrices it is of."""
    make("llama", tmp_path / "m")
    names = [f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkvo"]
    found = taken(tmp_path / "m", tmp_path / "shared.safetensors", fisher=False)
    assert [f"{name}:inputs" in found for name in names] == [True, False, False, True]
    with Statistics.open(tmp_path / "shared.safetensors") as known:
        assert known.metadata[f"{names[1]}:same"] == names[0]
        of = [known.for_matrix(name) for name in names]
        assert np.array_equal(of[0].inputs, of[2].inputs)
        assert not np.allclose(of[0].inputs, of[3].inputs)
    own = LlamaMLP.forward

    def apart(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return own(self, hidden) if len(hidden) > 2 else self.up_proj(hidden.clone()).mean() + own(self, hidden)

    monkeypatch.setattr(LlamaMLP, "forward", apart)  # the last batch of windows is smaller
    other = taken(tmp_path / "m", tmp_path / "apart.safetensors", fisher=False, samples=9)
    gate, up = (f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up"))
    assert int(other[f"{up}:count"][0]) == int(other[f"{gate}:count"][0]) + 12
    assert f"{up}:inputs" in other


@pytest.mark.usefixtures("streamed")
def test_without_gradients_a_text_asks_nothing_of_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path / "m", vocab_size=make_tokenizer(tmp_path / "m"))
    own = skeleton_ends._product
    asked: list[int] = []

    def product(torch: Any) -> Any:
        counted = own(torch)

        def forward(context: Any, tensor: Any, inputs: Any) -> Any:
            asked.append(inputs.shape[:-1].numel())
            return counted.forward(context, tensor, inputs)

        return type("Counted", (counted,), {"forward": staticmethod(forward)})

    monkeypatch.setattr(skeleton_ends, "_product", product)
    found = taken(tmp_path / "m", tmp_path / "s.safetensors", text="default", fisher=False)
    assert max(asked) <= 2  # the few that the layers are found with
    assert int(found["lm_head.weight:count"][0]) == 6 * 12
    taken(tmp_path / "m", tmp_path / "f.safetensors", text="default")
    assert max(asked) > 2


@pytest.mark.usefixtures("streamed")
def test_packed_checkpoints(tmp_path: Path) -> None:
    make("tied qwen2", tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "packed", "int8", format="zt")
    ingot.convert(tmp_path / "packed", tmp_path / "plain", format="safetensors")
    packed = taken(tmp_path / "packed", tmp_path / "a.safetensors")
    assert_same(packed, taken(tmp_path / "plain", tmp_path / "b.safetensors"))


def test_experts_have_statistics_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token goes to two experts of four; gate and up multiply the same, and each has its rows' gradients."""
    make("mixtral", tmp_path / "m", "float32")
    tokens = drawn(monkeypatch)
    found = taken(tmp_path / "m", tmp_path / "s.safetensors")
    start = "model.layers.0.mlp.experts"
    if f"{start}.0.gate_proj.weight:count" not in found:
        start = "model.layers.0.block_sparse_moe.experts"
    gate, up = ("w1", "w3") if "sparse" in start else ("gate_proj", "up_proj")
    counts = [int(found[f"{start}.{number}.{gate}.weight:count"][0]) for number in range(4)]
    assert sum(counts) == 2 * tokens[0].numel()
    model = load_model(tmp_path / "m")
    inputs: list[torch.Tensor] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    sent: list[torch.Tensor] = []
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda _, args: sent.append(args[1]))
    with torch.no_grad():
        model(tokens[0])
    x = inputs[0][(sent[0].reshape(len(inputs[0]), -1) == 2).any(1)].double()
    assert counts[2] == len(x)
    for kind in (gate, up):
        name = f"{start}.2.{kind}.weight"
        np.testing.assert_allclose(found[f"{name}:in_sum2"], x.square().mean(0), rtol=1e-4)
    assert not np.allclose(found[f"{start}.2.{gate}.weight:outputs"], found[f"{start}.2.{up}.weight:outputs"])


def test_experts_that_saw_no_token_are_named(tmp_path: Path) -> None:
    make("mixtral", tmp_path / "m", "float32", num_local_experts=16, hidden_size=64, intermediate_size=64)
    report = ingot.calibrate(tmp_path / "m", tmp_path / "s.safetensors", samples=1, length=2)
    assert report.unseen
    assert all(".experts." in name for name in report.unseen)
    assert any("saw no token" in line.template for line in report.report().lines)
    with ingot.open(tmp_path / "s.safetensors") as found:
        assert f"{report.unseen[0]}:inputs" not in found
    converted = ingot.convert(
        tmp_path / "m",
        tmp_path / "out.gguf",
        "q4_0-calibrated",
        calibration=tmp_path / "s.safetensors",
        keep_names=True,
    )
    assert any("no token was sent there" in note for note in converted.notes)


def test_large_moments_are_left_out_on_request(tmp_path: Path) -> None:
    make("llama", tmp_path / "m")
    found = taken(tmp_path / "m", tmp_path / "s.safetensors", largest=32)
    assert found["model.layers.0.mlp.down_proj.weight:in_sum2"].shape == (48,)
    assert "model.layers.0.mlp.down_proj.weight:inputs" not in found
    assert "model.layers.0.mlp.down_proj.weight:outputs" in found
    assert "model.layers.0.mlp.up_proj.weight:outputs" not in found
    whole = taken(tmp_path / "m", tmp_path / "w.safetensors")
    assert_same(found, {name: whole[name] for name in found})


class Stopped(BaseException):
    pass


@pytest.mark.parametrize("fisher", [True, False])
@pytest.mark.usefixtures("streamed")
def test_it_goes_on_behind_the_last_step(fisher: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after every step in turn; what comes out is what an undisturbed run gives, byte for byte."""
    make("llama", tmp_path / "m")
    options = {"samples": 3, "length": 8, "fisher": fisher}
    ingot.calibrate(tmp_path / "m", tmp_path / "whole.safetensors", **options)
    own: Callable[..., None] = Work.finish

    def finish(*args: Any, **named: Any) -> None:
        own(*args, **named)
        raise Stopped

    out, stops = tmp_path / "s.safetensors", 0
    monkeypatch.setattr(Work, "finish", finish)
    while not out.exists():
        try:
            report = ingot.calibrate(tmp_path / "m", out, resume=True, **options)
        except Stopped:
            stops += 1
            assert not out.exists()
    assert report.resumed == stops == (8 if fisher else 5)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"m", "whole.safetensors", "s.safetensors"}


def stop_after_three(model: Path, out: Path, **options: Any) -> None:
    own: Callable[..., None] = Work.finish
    steps: list[Any] = []

    def finish(*args: Any, **named: Any) -> None:
        own(*args, **named)
        steps.append(args)
        if len(steps) == 3:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "finish", finish)
        with pytest.raises(Stopped):
            ingot.calibrate(model, out, **options)


def test_what_another_run_left_is_refused_and_damage_begins_anew(tmp_path: Path) -> None:
    make("llama", tmp_path / "m")
    options: dict[str, Any] = {"samples": 3, "length": 8, "resume": True}
    out = tmp_path / "s.safetensors"
    stop_after_three(tmp_path / "m", out, **options)
    with pytest.raises(IngotError) as refused:
        ingot.calibrate(tmp_path / "m", out, **{**options, "seed": 1})
    assert refused.value.rule == "resume.changed"
    inputs = next(tmp_path.glob(".s.safetensors*/files/*0001.inputs"))
    data = bytearray(inputs.read_bytes())
    data[5] ^= 1
    inputs.write_bytes(data)
    assert ingot.calibrate(tmp_path / "m", out, **options).resumed == 0


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    make("llama", tmp_path / "m")
    stop_after_three(tmp_path / "m", tmp_path / "s.safetensors", samples=3, length=8)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_it_says_what_it_will_take(tmp_path: Path) -> None:
    make("llama", tmp_path / "m")
    plans: list[CalibratePlan] = []
    report = ingot.calibrate(tmp_path / "m", tmp_path / "s.safetensors", samples=3, length=8, plan=plans.append)
    assert report.size <= plans[0].size * 1.1
    assert plans[0].reads == 1
    assert re.match(r"about \d+ s,", plans[0].describe())


def test_layers_that_do_not_follow_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path / "m")
    own = transformers.LlamaModel.forward

    def twice(self: Any, **named: Any) -> Any:
        own(self, **named)
        return own(self, **named)

    monkeypatch.setattr(transformers.LlamaModel, "forward", twice)
    with pytest.raises(IngotError) as refused:
        ingot.calibrate(tmp_path / "m", tmp_path / "s.safetensors", samples=2, length=4)
    assert refused.value.rule == "calibrate.architecture"


@pytest.mark.slow
def test_memory_stays_under_the_ceiling(tmp_path: Path) -> None:
    """A wide model in 16 bits, larger in f32 than what is allowed beside the program."""
    make("llama", tmp_path / "m", hidden_size=512, intermediate_size=1536, num_hidden_layers=10, vocab_size=60000,
         num_attention_heads=8, max_position_embeddings=128)  # fmt: skip
    run = "import sys, ingot, ingot.runtime.calibration.calibrate, torch, transformers\n"
    run += "from ingot.core.runtime.memory import anonymous_rss"
    base = peak_anonymous([sys.executable, "-c", f"{run}; from transformers import LlamaForCausalLM"])
    allowed = base + parse_size("336MiB")
    options = f"samples=6, length=8, max_ram={allowed}, plan=lambda plan: print(plan, file=sys.stderr)"
    code = f"{run}; print(ingot.calibrate({str(tmp_path / 'm')!r}, {str(tmp_path / 's.safetensors')!r}, {options}))"
    assert sum(4 * p.numel() for p in load_model(tmp_path / "m", keep_packed=False).parameters()) > parse_size("340MiB")
    assert peak_anonymous([sys.executable, "-c", code]) < allowed


def test_an_encoder_is_calibrated_on_the_text_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its windows begin as its tokenizer has texts begin; G is that of v . e for v normal and e the embedding."""
    size = make_tokenizer(tmp_path / "m")
    make("bert", tmp_path / "m", "float32", vocab_size=size)
    tokens, model = drawn(monkeypatch), load_model(tmp_path / "m")
    found = taken(tmp_path / "m", tmp_path / "s.safetensors", samples=100, length=8)
    assert tokens[0][:, 0].unique().tolist() == [1]
    outputs = found["encoder.layer.1.output.dense.weight:outputs"]
    hidden: list[torch.Tensor] = []

    def hook(_: Any, arguments: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        hidden.append(output)

    model.encoder.layer[1].output.dense.register_forward_hook(hook)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    e = torch.nn.functional.normalize(model(input_ids=tokens[0]).last_hidden_state.mean(1), dim=-1)
    total = torch.zeros(32, 32, dtype=torch.float64)
    for axis in range(e.shape[1]):  # the mean over all v, exactly
        hidden[0].grad = None
        e[:, axis].sum().backward(retain_graph=True)
        g = hidden[0].grad.flatten(0, 1).double()
        total += g.T @ g
    wanted = (total / tokens[0].numel()).numpy()
    # v is drawn once for each window: about as much, in about the same directions.
    assert np.trace(outputs) == pytest.approx(np.trace(wanted), rel=0.2)
    assert np.sum(outputs * wanted) > 0.8 * np.linalg.norm(outputs) * np.linalg.norm(wanted)


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    size = make_tokenizer(tmp_path / "m")
    make("llama", tmp_path / "m", vocab_size=size)
    texts = {"empty": b"", "short": b"a b", "binary": b"\x00\x01 text", "latin": b"caf\xe9 " * 100}
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(IngotError) as refused:
            ingot.calibrate(tmp_path / "m", tmp_path / "s.safetensors", tmp_path / name, length=16)
        assert refused.value.rule == "eval.text", name
    assert {path.name for path in tmp_path.iterdir()} == {"m", *texts}
    report = ingot.calibrate(tmp_path / "m", tmp_path / "s.safetensors", "default", length=16, samples=3)
    assert report.source == "text that Ingot ships"
