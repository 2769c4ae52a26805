"""Generation, evaluation and the harness on the model that ships with Ingot."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import ingot
from ingot.cli.main import run
from ingot.core.runtime.bootstrap import interval
from ingot.demo.tokenizer import Tokenizer
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.runtime.evaluation import evaluate as evaluate_module
from ingot.runtime.evaluation.eval_report import check_terms, parse_gate
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.evaluation.generate import generate
from ingot.runtime.evaluation.layer_errors import LayerError, LayerErrors, first_departing, worst_of_layers
from ingot.runtime.loading.options import Loading, Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from tests.support.models import make
from tests.support.paths import DEMO_DATA

SHORT = Protocol(window=64, sequences=3)


@pytest.fixture(scope="module")
def demo() -> Path:
    return DEMO_DATA


@pytest.fixture(scope="module")
def small(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "int4"
    ingot.convert(demo, path, "int4")
    return path


def test_the_tokenizer_is_the_same(demo: Path) -> None:
    text = (demo / "heldout.txt").read_text(encoding="utf-8")[:20_000] + " é 漢字\n\n\t x_y 12345 ½²"
    loaded = load_tokenizer(demo)
    tokens = loaded(text).input_ids
    assert tokens == Tokenizer.load(demo / "tokenizer.json").encode(text)
    assert loaded.decode(tokens) == text


def test_generates_what_transformers_generates(demo: Path) -> None:
    found = generate(demo, "The file", 12)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo)
    tokens = load_tokenizer(demo)("The file", return_tensors="pt").input_ids
    wanted = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=12, pad_token_id=0
    )
    assert list(found.tokens) == wanted[0, tokens.shape[1] :].tolist()
    assert found.text == load_tokenizer(demo).decode(found.tokens)
    assert not found.stopped


def test_generation_ends_where_the_model_ends(demo: Path, tmp_path: Path) -> None:
    second = generate(demo, "The file", 2).tokens[1]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": second}))
    found = generate(tmp_path, "The file", 9)
    assert found.stopped
    assert len(found.tokens) == 2


def test_evaluation_of_a_model_with_itself(demo: Path) -> None:
    found = evaluate(demo, demo / "heldout.txt", demo, SHORT)
    assert found.sequences == 3
    assert found.kl == 0
    assert found.agreement == 1
    assert found.perplexity == found.reference_perplexity
    assert found.peak_memory > 0


def test_evaluation_by_hand(demo: Path, small: Path) -> None:
    found = evaluate(small, demo / "heldout.txt", demo, SHORT, measures=Measures(kl=True, top_k=5))
    text = (demo / "heldout.txt").read_text(encoding="utf-8")
    windows = torch.tensor(load_tokenizer(demo)(text).input_ids[: 3 * 64]).reshape(3, 64)
    with torch.inference_mode():
        scores, wanted = (
            load_model(path, dtype="f32")(windows).logits[:, :-1].double().log_softmax(-1) for path in (small, demo)
        )
    losses = -scores.gather(-1, windows[:, 1:, None]).squeeze(-1)
    assert found.perplexity == pytest.approx(math.exp(losses.mean(1).mean()), rel=1e-5)
    assert found.perplexity_ratio == pytest.approx(found.perplexity / (found.reference_perplexity or 0))
    each = (wanted.exp() * (wanted - scores)).sum(-1)
    assert found.kl == pytest.approx(float(each.mean()), rel=1e-3)
    assert found.kl_median == pytest.approx(float(each.quantile(0.5)), rel=1e-2)
    assert found.kl_p99 == pytest.approx(float(each.quantile(0.99)), rel=1e-2)
    assert found.kl_max == pytest.approx(float(each.max()), rel=1e-2)
    assert found.agreement == pytest.approx(float((scores.argmax(-1) == wanted.argmax(-1)).double().mean()))
    ours, theirs = (values.flatten(0, 1).topk(5).indices.tolist() for values in (scores, wanted))
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(ours, theirs, strict=True)]
    assert found.top_k == pytest.approx(sum(shared) / len(shared))
    for name in ("perplexity", "kl", "agreement", "top_k", "perplexity_ratio"):
        low, high = found.intervals[name]
        assert low <= getattr(found, name) <= high


def test_packed_evaluates_like_decoded(demo: Path, small: Path) -> None:
    decoded = evaluate(small, demo / "heldout.txt", None, SHORT)
    packed = evaluate(small, demo / "heldout.txt", None, Protocol(64, 3, keep_packed=True))
    assert packed.load.packed > 0
    assert packed.perplexity == pytest.approx(decoded.perplexity, rel=1e-4)
    assert packed.kl is None


def test_what_rounding_activations_adds(demo: Path, small: Path) -> None:
    exact = evaluate(small, demo / "heldout.txt", None, Protocol(64, 3, keep_packed=True))
    found = evaluate(small, demo / "heldout.txt", demo, SHORT, Loading(compute="int8"))
    windows = torch.tensor(load_tokenizer(demo)((demo / "heldout.txt").read_text(encoding="utf-8")).input_ids[: 3 * 64])
    with torch.inference_mode():
        ours, theirs = (
            load_model(small, dtype="f32", keep_packed=True, compute=compute)(windows.reshape(3, 64)).logits[:, :-1]
            for compute in ("int8", "exact")
        )
    ours, theirs = (every.double().log_softmax(-1) for every in (ours, theirs))
    assert exact.compute_kl is None
    assert found.compute_kl == pytest.approx(float((theirs.exp() * (theirs - ours)).sum(-1).mean()), rel=1e-2)
    assert 0 < found.compute_kl < (found.kl or 0)
    assert found.intervals["compute_kl"][0] <= found.compute_kl <= found.intervals["compute_kl"][1]
    assert found.perplexity == pytest.approx(exact.perplexity, rel=1e-2)
    assert found.reference_perplexity == evaluate(demo, demo / "heldout.txt", None, SHORT).perplexity


def test_int8_where_nothing_can_compute_so(demo: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_model(demo, compute="int8")
    assert caught.value.rule == "model.compute"
    with pytest.raises(UsageError) as refused:
        load_model(demo, compute="fast")
    assert refused.value.rule == "model.compute"


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "cpu"])
def test_the_clock_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Told to compute, a device goes on while Python does: what it has not done yet would not be counted."""
    told: list[Any] = []

    class Batch:
        device = torch.device(kind, 0)

        def numel(self) -> int:
            return 8

    def model(**inputs: Any) -> SimpleNamespace:
        told.append("model")
        return SimpleNamespace(logits=torch.zeros(2, 4, 3))

    monkeypatch.setattr(evaluate_module.time, "perf_counter", lambda: told.append("clock") or 0.0)
    if kind != "cpu":
        monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda device=None: told.append(device))
    evaluate_module._run_timed(model, Batch(), evaluate_module.Passes())
    waited = [] if kind == "cpu" else [None if kind == "mps" else Batch.device]
    assert told == [*waited, "clock", "model", *waited, "clock"]


@pytest.mark.parametrize(
    ("text", "protocol", "rule"),
    [
        (b"too short", SHORT, "eval.text"),
        (b"\xff\xfe" * 500, SHORT, "eval.text"),
        (b"word " * 500, Protocol(300, 1), "eval.window"),
    ],
)
def test_texts_that_cannot_be_read(demo: Path, tmp_path: Path, text: bytes, protocol: Protocol, rule: str) -> None:
    (tmp_path / "text").write_bytes(text)
    with pytest.raises(IngotError) as caught:
        evaluate(demo, tmp_path / "text", None, protocol)
    assert caught.value.rule == rule


@pytest.mark.filterwarnings("ignore:.*whose tokens differ:UserWarning")
def test_wrong_calls(demo: Path, tmp_path: Path) -> None:
    def refused(call: Any) -> str | None:
        with pytest.raises(IngotError) as caught:
            call()
        return caught.value.rule

    assert refused(lambda: Protocol(1, 1)) == "eval.window"
    assert refused(lambda: generate(demo, "The", 0)) == "generate.max-tokens"
    assert refused(lambda: generate(demo, "", 4)) == "generate.prompt"
    assert refused(lambda: generate(demo, "The", 1000)) == "generate.prompt"
    with pytest.raises(IngotError, match="at most 256 tokens"):
        generate(demo, "The", 1000)
    bert = make("bert", tmp_path / "bert")
    (bert / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    assert refused(lambda: generate(bert, "The", 4)) == "generate.no-head"
    other = make("llama", tmp_path / "llama")
    assert refused(lambda: evaluate(demo, demo / "heldout.txt", other, SHORT)) == "eval.vocabulary"


def test_commands(demo: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(small), "The file", "--max-tokens", "4", "--keep-packed"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("The file")
    assert "tokens/s" in printed.err
    assert run(["generate", str(small), "The file", "--max-tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 4
    options = ["--text", str(demo / "heldout.txt"), "--window", "64", "--sequences", "2"]
    assert run(["eval", str(small), *options, "--reference", str(demo)]) == 0
    figures = capsys.readouterr().out
    assert "top-1 agreement" in figures
    assert figures.splitlines()[2].startswith("perplexity ")
    assert run(["eval", str(small), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 2
    assert run(["eval", str(small / "model.zt"), "--text", "/nowhere/text"]) != 0


# What is measured against a reference --------------------------------------------------------------------------------


def test_layers_by_hand_and_the_first_that_departs(demo: Path, tmp_path: Path) -> None:
    with ingot.open(demo) as checkpoint:
        arrays = {name: tensor.numpy() for name, tensor in checkpoint.items()}
    hurt = next(name for name in arrays if "layers.2." in name and name.endswith("down_proj.weight"))
    arrays[hurt] = -4 * arrays[hurt]
    ingot.save(tmp_path / "hurt" / "", arrays, {"format": "pt"}, format="safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "hurt" / name).write_bytes((demo / name).read_bytes())
    found = evaluate(tmp_path / "hurt", demo / "heldout.txt", demo, SHORT, measures=Measures(per_layer=True))
    errors = {each.layer: each for each in found.layers}
    assert found.departing == "model.layers.2"
    assert [errors[f"model.layers.{index}"].error for index in (0, 1)] == [0, 0]
    assert errors["model.layers.1"].cosine == 1
    windows = torch.tensor(
        load_tokenizer(demo)((demo / "heldout.txt").read_text(encoding="utf-8")).input_ids[: 3 * 64]
    ).reshape(3, 64)
    with torch.inference_mode():
        y, r = (
            load_model(path, dtype="f32")(windows, output_hidden_states=True).hidden_states[3].double()
            for path in (tmp_path / "hurt", demo)
        )
    assert errors["model.layers.2"].error == pytest.approx(float(((y - r).norm(dim=-1) / r.norm(dim=-1)).mean()), 1e-4)
    cosine = float(torch.nn.functional.cosine_similarity(y, r, dim=-1).mean())
    assert errors["model.layers.2"].cosine == pytest.approx(cosine, 1e-4)
    assert [*errors][:: len(errors) - 1] == ["model.embed_tokens", "lm_head"]


def test_a_layer_without_numbers_departs() -> None:
    layers = [LayerError("a", 1.0, 0.0), LayerError("b", math.nan, math.nan)]
    assert first_departing(layers, 0.1) == "b"
    assert not check_terms(parse_gate("layer_error<9"), worst_of_layers(layers), {})[0].met


@pytest.mark.parametrize(
    ("gate", "met"),
    [
        ("kl<0.02", True),
        ("kl<0.01", False),
        (" ppl <= 1.05x , agreement>97%", True),
        ("ppl<1.04x", False),
        ("ppl<21", True),
        ("agreement>=0.99", False),
        ("kl<-1e-3", False),
    ],
)
def test_gates(gate: str, met: bool) -> None:
    figures = {"perplexity": 20.0, "kl": 0.015, "agreement": 0.98}
    assert all(verdict.met for verdict in check_terms(parse_gate(gate), figures, {"perplexity": 1.05})) is met


@pytest.mark.parametrize(
    "gate",
    ["", "kl", "kl<", "kl<0.02,", "kl=0.02", "kl<1.2.3", "kl<nan", "kl<1e999", "loss<2", "kl<2x", "kl<0.1;ppl<2"],
)
def test_gates_that_cannot_be_read(gate: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gate(gate)
    assert caught.value.rule == "eval.gate"


@pytest.mark.parametrize(
    ("measures", "reference", "rule"),
    [
        (Measures(gate="kl<0.1"), False, "eval.gate"),
        (Measures(gate="ppl<1.1x"), False, "eval.gate"),
        (Measures(gate="kl_p99<0.1"), True, "eval.gate"),
        (Measures(gate="layer_error<0.1", kl=True), True, "eval.gate"),
        (Measures(gate="top_k>0.1"), True, "eval.gate"),
        (Measures(kl=True), False, "eval.reference"),
        (Measures(per_layer=True), False, "eval.reference"),
        (Measures(top_k=1_000_000), True, "eval.top-k"),
    ],
)
def test_what_cannot_be_measured(demo: Path, measures: Measures, reference: bool, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        evaluate(demo, demo / "heldout.txt", demo if reference else None, SHORT, measures=measures)
    assert caught.value.rule == rule


def test_a_reference_of_other_layers_is_refused() -> None:
    def stack(count: int) -> Any:
        config = transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=count, num_attention_heads=2
        )
        return transformers.LlamaForCausalLM(config)

    with pytest.raises(UsageError) as caught:
        LayerErrors(stack(1), stack(2))
    assert caught.value.rule == "eval.layers"


# Intervals -----------------------------------------------------------------------------------------------------------


def test_intervals_cover_what_was_drawn_from() -> None:
    """Of 200 means of 40 numbers, about 95 % have the mean that they were drawn from within."""
    random, within = np.random.default_rng(1), 0
    for _ in range(200):
        sums = random.normal(3.0, 1.0, (40, 1))
        found = interval(sums, lambda rows: rows[:, 0] / 40, 200, 7)
        assert found is not None
        within += found[0] <= 3.0 <= found[1]
    assert 175 <= within <= 199


def test_intervals_are_the_same_every_time_and_need_windows() -> None:
    sums = np.arange(1000.0).reshape(500, 2)

    def figure(rows: Any) -> Any:
        return rows[:, 0] / rows[:, 1]

    assert interval(sums, figure, 3000, 5) == interval(sums, figure, 3000, 5)
    assert interval(sums, figure, 3000, 5) != interval(sums, figure, 3000, 6)
    assert interval(sums[:1], figure, 100, 0) is None
    assert interval(sums, figure, 0, 0) is None
    assert interval(np.full((5, 2), np.nan), figure, 9, 0) is None


# Receipts ------------------------------------------------------------------------------------------------------------


def test_a_gate_and_a_receipt_by_command(demo: Path, small: Path, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(small, model)
    with ingot.open(model) as checkpoint:
        before = {name: [p.digest for p in tensor.parts.values()] for name, tensor in checkpoint.items()}
    options = ["--text", str(demo / "heldout.txt"), "--window", "64", "--sequences", "3", "--reference", str(demo)]
    assert run(["eval", str(model), *options, "--gate", "kl<9,ppl<9x", "--receipt", "--kl"]) == 0
    assert "met" in capsys.readouterr().out
    assert run(["eval", str(model), *options, "--gate", "kl<1e-9", "--receipt", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["gate"][0]["met"] is False
    assert run(["eval", str(model), *options, "--gate", "what<1"]) == 2
    capsys.readouterr()
    assert run(["inspect", str(model), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["receipt"]  # the second took the place of the first
    assert entry["figures"]["kl"] == found["kl"]
    assert entry["of"]["reference"]["weights"].startswith("blake3:")
    assert str(tmp_path) not in json.dumps(entry)
    assert ingot.verify(model) == []
    with ingot.open(model) as checkpoint:
        assert before == {name: [p.digest for p in tensor.parts.values()] for name, tensor in checkpoint.items()}
