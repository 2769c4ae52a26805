"""Windows and prompts begin with the tokens that the tokenizer puts before a text, wherever text is read."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import ingot
from ingot.cli.main import run
from ingot.errors import FormatError, UsageError
from ingot.ext.squish.gate import PerplexityGate
from ingot.model.statistics import Statistics
from ingot.recipes.load import parse_recipe
from ingot.runtime.calibration import calibrate as calibrate_module
from ingot.runtime.evaluation.beginnings import Beginnings, beginnings_of
from ingot.runtime.evaluation.divergence import Divergence
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.evaluation.generate import generate
from ingot.runtime.evaluation.special_tokens import (
    Surrounding,
    named_tokens,
    prompt_tokens,
    surrounding_tokens,
    text_tokens,
)
from ingot.runtime.evaluation.windows import cut_windows, read_windows
from ingot.runtime.loading.options import Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from tests.support.models import make, make_tokenizer
from tests.support.web import WebServer

TEXT = "in the 123 cafe, a thing in the end; then another one. " * 12


def template(single: str, *tokens: tuple[str, int]) -> Any:
    return tokenizers.processors.TemplateProcessing(single=single, special_tokens=list(tokens))


def folder_with(tmp_path: Path, post_processor: Any, **settings: Any) -> Path:
    """A folder with the small tokenizer and another post-processor, and more in its tokenizer_config.json."""
    make_tokenizer(tmp_path, begins=False)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if post_processor is not None:
        backend.post_processor = post_processor
    backend.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return tmp_path


@pytest.mark.parametrize(
    ("post_processor", "settings", "before", "after"),
    [
        (None, {}, (), ()),
        (None, {"add_bos_token": False}, (), ()),
        (None, {"add_bos_token": True}, (1,), ()),  # the post-processor was lost; the settings still state BOS
        (None, {"add_bos_token": True, "bos_token": None}, (), ()),
        (tokenizers.processors.ByteLevel(trim_offsets=False), {"add_bos_token": True}, (1,), ()),
        (template("<s> $A", ("<s>", 1)), {}, (1,), ()),
        (template("<s> $A", ("<s>", 1)), {"add_bos_token": True}, (1,), ()),
        (template("<s> $A", ("<s>", 1)), {"add_bos_token": False}, (1,), ()),  # as transformers 5 has it
        (template("<s> $A </s>", ("<s>", 1), ("</s>", 2)), {}, (1,), (2,)),
        (template("$A </s>", ("</s>", 2)), {}, (), (2,)),
        (template("$A </s>", ("</s>", 2)), {"add_bos_token": True}, (1,), (2,)),
        (template("<pad> <s> $A", ("<pad>", 0), ("<s>", 1)), {}, (0, 1), ()),
        (
            tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), template("<s> $A", ("<s>", 1))]),
            {},
            (1,),
            (),
        ),
        (tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 1)), {}, (1,), (2,)),
    ],
)
def test_what_stands_around_a_text(
    tmp_path: Path, post_processor: Any, settings: dict[str, Any], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, post_processor, **settings))
    assert surrounding_tokens(tokenizer) == Surrounding(before, after)
    assert tokenizer("in the").input_ids == [*before, *text_tokens(tokenizer, "in the"), *after]
    assert prompt_tokens(tokenizer, "in the") == [*before, *text_tokens(tokenizer, "in the")]


def test_classes_of_transformers() -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "\u2581": 4, "\u2581a": 5}
    for add in (True, False):
        llama = transformers.LlamaTokenizer(vocab=vocabulary, merges=[("\u2581", "a")], add_bos_token=add)
        assert surrounding_tokens(llama).before == ((1,) if add else ())
        gemma = transformers.GemmaTokenizer(add_bos_token=add)
        assert surrounding_tokens(gemma).before == ((2,) if add else ())
    alphabet = {text: number for number, text in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    for cls in (transformers.GPT2Tokenizer, transformers.Qwen2Tokenizer):
        assert surrounding_tokens(cls(vocab=alphabet, merges=[])) == Surrounding()


def test_an_unknown_token_that_begins_texts_too() -> None:
    """Every probe is the unknown token: it is still known that one more stands before it."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.post_processor = template("<unk> $A", ("<unk>", 0))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert surrounding_tokens(tokenizer) == Surrounding((0,), ())


def test_a_tokenizer_without_a_common_beginning_is_refused() -> None:
    class Moody:
        def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
            own = [ord(letter) for letter in text]
            return transformers.BatchEncoding({"input_ids": [len(text), *own] if add_special_tokens else own})

    with pytest.raises(FormatError) as caught:
        surrounding_tokens(Moody())
    assert caught.value.rule == "model.tokenizer"


def test_a_prompt_that_has_bos_does_not_get_it_twice(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, template("<s> $A", ("<s>", 1))))
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "in the"}], tokenize=False)
    assert chat == "<s>[in the]"
    assert prompt_tokens(tokenizer, chat) == [1, *text_tokens(tokenizer, "[in the]")]
    assert prompt_tokens(tokenizer, "") == [1]


def test_windows_of_a_text(tmp_path: Path) -> None:
    """The tokens take the place of the first ones: scored are the same tokens as without them."""
    (tmp_path / "text").write_text(TEXT)
    shape = Protocol(window=8, sequences=3)
    plain = load_tokenizer(folder_with(tmp_path / "a", None))
    without = read_windows(plain, tmp_path / "text", shape)
    assert without.tokens.flatten().tolist() == text_tokens(plain, TEXT)[:24]
    assert (without.prefix, without.first_scored) == ((), 1)
    begun = load_tokenizer(folder_with(tmp_path / "b", template("<s> $A </s>", ("<s>", 1), ("</s>", 2))))
    windows = read_windows(begun, tmp_path / "text", shape)
    assert windows.tokens[:, 0].tolist() == [1, 1, 1]
    assert torch.equal(windows.tokens[:, 1:], without.tokens[:, 1:])
    assert (windows.prefix, windows.first_scored) == (named_tokens(begun, [1]), 1)
    two = load_tokenizer(folder_with(tmp_path / "c", template("<pad> <s> $A", ("<pad>", 0), ("<s>", 1))))
    windows = read_windows(two, tmp_path / "text", shape)
    assert windows.tokens[:, :2].tolist() == [[0, 1]] * 3
    assert torch.equal(windows.tokens[:, 2:], without.tokens[:, 2:])
    assert windows.first_scored == 2
    with pytest.raises(UsageError) as caught:
        read_windows(two, tmp_path / "text", Protocol(window=2, sequences=1))
    assert caught.value.rule == "eval.window"


def test_windows_of_an_encoder_lose_no_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path, template("<s> $A </s>", ("<s>", 1), ("</s>", 2))))
    windows = cut_windows(tokenizer, TEXT, (8, 3), "here", Surrounding((1,), (2,)), contiguous=True)
    assert windows[:, 0].tolist() == [1, 1, 1]
    assert windows[:, -1].tolist() == [2, 2, 2]
    assert windows[:, 1:-1].flatten().tolist() == text_tokens(tokenizer, TEXT)[:18]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose tokenizer puts two tokens before a text, to which the model pays attention."""
    path = tmp_path_factory.mktemp("begun")
    make("llama", path, "float32", vocab_size=make_tokenizer(path), initializer_range=0.5)
    return folder_with_model(path)


def folder_with_model(path: Path) -> Path:
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.post_processor = template("<pad> <s> $A", ("<pad>", 0), ("<s>", 1))
    backend.save(str(path / "tokenizer.json"))
    (path / "text").write_text(TEXT)
    return path


def test_eval_scores_the_text_alone(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = begun.parent / "packed"
    ingot.convert(begun, other, "int4", overwrite=True)
    result = evaluate(other, begun / "text", begun, Protocol(window=16, sequences=4), measures=Measures(kl=True))
    windows = read_windows(load_tokenizer(begun), begun / "text", Protocol(window=16, sequences=4)).tokens
    with torch.no_grad():
        ours, theirs = (load_model(path, dtype="f32")(windows).logits.log_softmax(-1) for path in (other, begun))
    losses = -ours[:, 1:-1].gather(-1, windows[:, 2:, None])
    assert result.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)[:, 1:-1]
    assert result.kl == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert run(["eval", str(begun), "--text", str(begun / "text"), "--window", "16", "--sequences", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["window_prefix"] == [{"id": 0, "text": "<pad>"}, {"id": 1, "text": "<s>"}]
    assert run(["eval", str(begun), "--text", str(begun / "text"), "--window", "16", "--sequences", "2"]) == 0
    assert "each window begins with" in (lines := capsys.readouterr().out)
    assert "<pad> (0) <s> (1)" in lines


def test_a_receipt_states_what_windows_begin_with(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "m")
    shape, measures = Protocol(window=16, sequences=2), Measures(receipt=True)
    receipt = evaluate(tmp_path / "m", begun / "text", None, shape, measures=measures).receipt
    assert receipt is not None
    (entry,) = json.loads(Path(receipt).read_text())["entries"]
    assert [token["id"] for token in entry["of"]["window_prefix"]] == [0, 1]


def test_a_receipt_names_a_text_of_a_web_server_without_its_secrets(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "m")
    shape, measures = Protocol(window=16, sequences=2), Measures(receipt=True)
    with WebServer({"texts/a b.txt": (begun / "text").read_bytes()}) as server:
        receipt = evaluate(tmp_path / "m", f"{server.url}/texts/a%20b.txt?sig=SECRET", None, shape, measures=measures)
    assert receipt.receipt is not None
    text = Path(receipt.receipt).read_text()
    assert json.loads(text)["entries"][0]["of"]["text"]["name"] == "a b.txt"
    assert "SECRET" not in text


def test_a_gate_s_record_is_of_its_windows(begun: Path, tmp_path: Path) -> None:
    """A record of a tier that was measured without the tokens is not taken for one with them."""
    plain = folder_with(tmp_path, None)
    texts = [PerplexityGate(path, begun / "text").text for path in (plain, begun)]
    assert texts[1] == f"{texts[0]} after 0 1"


def test_generation_begins_as_the_tokenizer_has_it(begun: Path) -> None:
    result = generate(begun, "in the", 3)
    tokenizer, model = load_tokenizer(begun), load_model(begun, dtype="f32")
    tokens = [0, 1, *text_tokens(tokenizer, "in the")]
    for token in result.tokens:
        assert token == int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)
    assert generate(begun, "<pad><s>in the", 3).tokens == result.tokens


def windows_read(monkeypatch: pytest.MonkeyPatch, **options: Any) -> torch.Tensor:
    """Calibrate, and return the tokens that were read."""
    seen: list[torch.Tensor] = []
    passes = calibrate_module.Passes

    def watched(model: Any, work: Any, tokens: torch.Tensor, *rest: Any) -> Any:
        seen.append(tokens)
        return passes(model, work, tokens, *rest)

    monkeypatch.setattr(calibrate_module, "Passes", watched)
    ingot.calibrate(**{"fisher": False, "samples": 6, "length": 8, "overwrite": True, **options})
    return seen[0]


@pytest.mark.parametrize("text", [False, True])
def test_calibration_begins_as_the_tokenizer_has_it(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bool
) -> None:
    more = {"text": begun / "text"} if text else {}
    tokens = windows_read(monkeypatch, model=begun, out=tmp_path / "s.safetensors", **more)
    assert tokens.shape == (6, 8)
    assert tokens[:, :2].tolist() == [[0, 1]] * 6
    assert len({*tokens[:, 2].tolist()}) > 1
    with Statistics.open(tmp_path / "s.safetensors") as statistics:
        assert json.loads(statistics.metadata["window_prefix"]) == [
            {"id": 0, "text": "<pad>"},
            {"id": 1, "text": "<s>"},
        ]


def test_without_such_tokens_the_first_one_stays_uniform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama", folder_with(tmp_path / "m", None, chat_template=None), "float32", vocab_size=300)
    assert beginnings_of(model) == Beginnings()
    with_files = windows_read(monkeypatch, model=model, out=tmp_path / "s.safetensors")
    with Statistics.open(tmp_path / "s.safetensors") as statistics:
        assert statistics.metadata["source"] == "samples of the model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert beginnings_of(model) is None
    without_files = windows_read(monkeypatch, model=model, out=tmp_path / "s.safetensors")
    assert torch.equal(with_files, without_files)
    assert len({*with_files[:, 0].tolist()}) > 4
    with Statistics.open(tmp_path / "s.safetensors") as statistics:
        assert statistics.metadata["window_prefix"] == "[]"
        assert statistics.metadata["source"] == "samples of the model, beside which no tokenizer lies"


USER = "{% for m in messages %}the {{ m['role'] }}: {{ m['content'] | trim }}{% endfor %}"


def chat_beginning(folder: Path, post_processor: Any, chat_template: str | None) -> list[int] | None:
    beginnings = beginnings_of(folder_with(folder, post_processor, chat_template=chat_template))
    return None if beginnings is None else [token.id for token in beginnings.chat]


def test_a_quarter_of_the_samples_begins_as_a_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path / "m", template("<s> $A", ("<s>", 1)), chat_template="{{ bos_token }}" + USER)
    model = make("llama", folder, "float32", vocab_size=300, max_position_embeddings=64)
    turn = prompt_tokens(load_tokenizer(model), "the user: ")
    assert turn[0] == 1
    assert turn[1] != 1
    out = tmp_path / "s.safetensors"
    tokens = windows_read(monkeypatch, model=model, out=out, samples=8, length=32)
    chats = [row for row in tokens.tolist() if row[: len(turn)] == turn]
    assert len(chats) == 2
    assert len({tuple(row) for row in chats}) == 2
    assert {row[0] for row in tokens.tolist()} == {1}
    with Statistics.open(out) as statistics:
        assert statistics.metadata["chat_windows"] == "2"
    report = ingot.calibrate(model, out, samples=8, length=32, fisher=False, overwrite=True)
    assert report.chat_windows == 2
    short = windows_read(monkeypatch, model=model, out=out, samples=8, length=8)  # the turn takes half of a window
    assert [row[: len(turn)] for row in short.tolist()].count(turn[:8]) == 0


def test_a_chat_begins_with_the_tokens_before_every_text(tmp_path: Path) -> None:
    begin = template("<s> $A", ("<s>", 1))
    plain = chat_beginning(tmp_path / "a", None, USER)
    assert plain is not None
    assert chat_beginning(tmp_path / "b", begin, USER) == [1, *plain]
    assert chat_beginning(tmp_path / "c", begin, "{{ bos_token }}" + USER) == [1, *plain]


def test_a_chat_template_may_mark_what_the_model_writes(tmp_path: Path) -> None:
    marked = USER + "{% if false %}{% generation %}an answer{% endgeneration %}{% endif %}"
    assert chat_beginning(tmp_path / "a", None, marked) == chat_beginning(tmp_path / "b", None, USER)


def test_a_chat_template_that_prints_the_date_prints_the_same_one_each_day(tmp_path: Path) -> None:
    dated = chat_beginning(tmp_path / "a", None, "{{ strftime_now('%d %b %Y') }} " + USER)
    assert dated == chat_beginning(tmp_path / "b", None, "26 Jul 2024 " + USER)


@pytest.mark.parametrize(
    "chat_template",
    [
        None,
        "{{ raise_exception('no user may speak') }}",
        "{% for m in messages %}{{ m.contents.text }}{% endfor %}",
        "{{ messages[0]['content'] }}",
        "a template without the message",
        "{% broken",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10 ** 12 }}" + USER,
    ],
)
def test_without_a_user_turn_no_sample_begins_as_a_chat(tmp_path: Path, chat_template: str | None) -> None:
    assert chat_beginning(tmp_path / "m", None, chat_template) == []


def test_a_tokenizer_of_another_model_is_refused_for_samples(tmp_path: Path) -> None:
    model = make("llama", folder_with(tmp_path / "m", template("</s> $A", ("</s>", 2))), vocab_size=2, eos_token_id=1)
    with pytest.raises(FormatError) as caught:
        ingot.calibrate(model, tmp_path / "s.safetensors", samples=2, length=4)
    assert caught.value.rule == "model.vocabulary"


def test_windows_of_tokens_before_the_text_alone_are_refused(begun: Path, tmp_path: Path) -> None:
    for more in ({}, {"text": begun / "text"}):
        with pytest.raises(UsageError) as caught:
            ingot.calibrate(begun, tmp_path / "s.safetensors", samples=2, length=2, **more)
        assert caught.value.rule == "eval.window"


def test_budgets_are_measured_on_such_windows(begun: Path) -> None:
    for text in (None, begun / "text"):
        divergence = Divergence(begun, text, 4)
        assert divergence._windows.tokens[:, :2].tolist() == [[0, 1]] * 4
        assert divergence.over.endswith("each after <pad> (0) <s> (1)")
        assert divergence(str(begun), alone=False).mean == pytest.approx(0, abs=1e-6)


def test_statistics_that_do_not_state_their_windows_are_named(begun: Path, tmp_path: Path) -> None:
    """As files of earlier releases, whose samples had no BOS."""
    ingot.calibrate(begun, tmp_path / "new.safetensors", samples=4, length=8)
    with ingot.open(tmp_path / "new.safetensors") as found:
        arrays = {name: tensor.numpy() for name, tensor in found.items()}
        metadata = {key: value for key, value in found.metadata.items() if key != "window_prefix"}
    ingot.save(tmp_path / "old.safetensors", arrays, metadata)
    rule = 'label = "r"\nmin_ndim = 2\ncodec = "affine"\noptions = { bits = 4, group = 16 }\nquantizer = "gptq"'
    recipe = parse_recipe(f'name = "n"\ndescription = "n"\n[[rules]]\n{rule}\n', location="test")
    for name, expected in (("new", False), ("old", True)):
        notes = ingot.convert(begun, tmp_path / name, recipe, calibration=tmp_path / f"{name}.safetensors").notes
        assert any("how their windows begin" in note for note in notes) is expected
