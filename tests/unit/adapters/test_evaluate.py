"""Generation, evaluation and the harness on the model that ships with Ingot."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import ingot
from ingot.adapters import evaluate as evaluate_module
from ingot.adapters.evaluate import evaluate
from ingot.adapters.generate import generate
from ingot.adapters.options import Protocol
from ingot.adapters.transformers import load_model
from ingot.adapters.transformers_tokenizer import load_tokenizer
from ingot.cli.main import run
from ingot.demo.tokenizer import Tokenizer
from ingot.errors import IngotError
from ingot.testing.models import make

SHORT = Protocol(window=64, sequences=3)


@pytest.fixture(scope="module")
def demo() -> Path:
    return Path(str(resources.files("ingot.demo") / "data"))


@pytest.fixture(scope="module")
def small(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "int4"
    ingot.convert(demo, path, "int4")
    return path


def test_the_tokenizer_is_the_same(demo: Path) -> None:
    text = (demo / "heldout.txt").read_text(encoding="utf-8")[:20_000] + " é 漢字\n\n\t x_y 12345 ½²"
    merges = json.loads((demo / "tokenizer.json").read_text())["merges"]
    own, found = Tokenizer([tuple(pair) for pair in merges]), load_tokenizer(demo)
    tokens = found(text).input_ids
    assert tokens == list(own.encode(text))
    assert found.decode(tokens) == text


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
    found = evaluate(small, demo / "heldout.txt", demo, SHORT)
    text = (demo / "heldout.txt").read_text(encoding="utf-8")
    windows = torch.tensor(load_tokenizer(demo)(text).input_ids[: 3 * 64]).reshape(3, 64)
    with torch.inference_mode():
        scores, wanted = (
            load_model(path, dtype="f32")(windows).logits[:, :-1].double().log_softmax(-1) for path in (small, demo)
        )
    losses = -scores.gather(-1, windows[:, 1:, None]).squeeze(-1)
    assert found.perplexity == pytest.approx(math.exp(losses.mean(1).mean()), rel=1e-5)
    assert found.kl == pytest.approx(float((wanted.exp() * (wanted - scores)).sum(-1).mean()), rel=1e-3)
    assert found.agreement == pytest.approx(float((scores.argmax(-1) == wanted.argmax(-1)).double().mean()))


def test_packed_evaluates_like_decoded(demo: Path, small: Path) -> None:
    decoded = evaluate(small, demo / "heldout.txt", None, SHORT)
    packed = evaluate(small, demo / "heldout.txt", None, Protocol(64, 3, keep_packed=True))
    assert packed.load.packed > 0
    assert packed.perplexity == pytest.approx(decoded.perplexity, rel=1e-4)
    assert packed.kl is None


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
    evaluate_module._timed(model, Batch(), evaluate_module._Sums())
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
    assert "top-1 agreement" in capsys.readouterr().out
    assert run(["eval", str(small), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 2
    assert run(["eval", str(small / "model.zt"), "--text", "/nowhere/text"]) != 0
