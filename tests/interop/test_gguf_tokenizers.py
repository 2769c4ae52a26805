"""Tokenizers to GGUF metadata and back: the package tokenizers makes the same tokens of both."""

from __future__ import annotations

import base64
import json
import re
import string
import sys
from typing import Any

import pytest

from ingot.errors import UnsupportedError
from ingot.runtime.loading.transformers_tokenizer import _PROBE
from ingot.translate import companions, pretokenizers, tokenizer, wordpiece_unigram

tokenizers = pytest.importorskip("tokenizers")

TEXTS = (_PROBE, "the cat's 12345 hats\n\n  (x+y)/2 \u4e2d\u6587 HTTPServer don't DON'T \u00c9t\u00e9", "", "a  b")


def metadata_of(made: dict[str, Any], settings: dict[str, Any], config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return GGUF metadata of a tokenizer as a conversion writes them."""
    files = {"tokenizer.json": json.dumps(made), "tokenizer_config.json": json.dumps(settings)}
    typed, _ = companions.tokenizer_metadata(files | ({} if config is None else {"config.json": json.dumps(config)}), 0)
    return {key: value for key, (_, value) in typed.items()}


def both(made: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return a tokenizer, what came back of it, and the metadata between them."""
    assert not tokenizer.to_metadata(made).dropped
    metadata = metadata_of(made, settings)
    files, _ = tokenizer.to_files(metadata)
    one, other = (tokenizers.Tokenizer.from_str(json.dumps(each)) for each in (made, files["tokenizer.json"]))
    return one, other, metadata


def same(one: Any, other: Any) -> None:
    for text in TEXTS:
        for special in (False, True):
            wanted, found = (each.encode(text, add_special_tokens=special) for each in (one, other))
            assert found.tokens == wanted.tokens
            assert found.ids == wanted.ids
    assert other.encode(TEXTS[1], "a b").ids == one.encode(TEXTS[1], "a b").ids


def bytewise(pre: dict[str, Any], *, whole: bool = False) -> dict[str, Any]:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [["t", "h"], ["th", "e"], ["1", "2"], ["12", "3"], ["\u0120", "a"], ["'", "t"], ["n", "'t"], ["T", "P"]]
    texts = [*alphabet, *("".join(pair) for pair in merges)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": pre, "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True,
        "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": whole,
                  "vocab": {text: number for number, text in enumerate(texts)}, "merges": merges},
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(name for name, steps in pretokenizers.STEPS.items() if steps.bytewise))
def test_pre_tokenizers_keep_their_names_and_words(name: str) -> None:
    steps = pretokenizers.STEPS[name]
    one, other, metadata = both(bytewise(pretokenizers.pre_tokenizer(steps), whole=steps.ignore_merges), {})
    written = metadata["tokenizer.ggml.pre"]
    assert pretokenizers.steps_of(written) == steps
    same(one, other)
    assert json.loads(other.to_str())["model"]["ignore_merges"] == steps.ignore_merges


def published_tekken() -> dict[str, Any]:
    """Return the pre-tokenizer of Mistral's ``tokenizer.json``, as llama.cpp's source quotes it."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{first}{lower}{last}" for first, last in ("*+", "+*"))
    text = words + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return pretokenizers.pre_tokenizer(pretokenizers.Steps((text,)))


def test_an_expression_that_llama_cpp_approximates_has_a_name_and_a_note() -> None:
    converted = tokenizer.to_metadata(bytewise(published_tekken(), whole=True))
    assert converted.typed["tokenizer.ggml.pre"][1] == "tekken"
    (note,) = converted.dropped
    assert "combining marks" in note
    files, differences = tokenizer.to_files({key: value for key, (_, value) in converted.typed.items()})
    assert "combining marks" in differences[0]
    assert files["tokenizer.json"]["pre_tokenizer"] != published_tekken()
    again = tokenizer.to_metadata(files["tokenizer.json"])
    assert (again.typed["tokenizer.ggml.pre"][1], again.dropped) == ("tekken", [])
    assert "ignore_merges False" in tokenizer.to_metadata(bytewise(published_tekken())).dropped


def test_matches_are_removed_and_inverted() -> None:
    """Some files keep the matches and remove the text between them, of which there is none."""
    pre = published_tekken()
    pre["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    assert tokenizer.to_metadata(bytewise(pre, whole=True)).typed["tokenizer.ggml.pre"][1] == "tekken"


def falcon() -> dict[str, Any]:
    """Return the pre-tokenizer of Falcon's ``tokenizer.json``, which splits digits after bytes became characters."""
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated", "invert": False},
    ]}  # fmt: skip


def test_published_steps_of_falcon_have_a_name_and_a_note() -> None:
    converted = tokenizer.to_metadata(bytewise(falcon()))
    assert converted.typed["tokenizer.ggml.pre"][1] == "falcon"
    assert "numbers" in converted.dropped[0]


@pytest.mark.parametrize(
    ("name", "pre"),
    [
        ("gpt-2", {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex":
         r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"}}),
        ("starcoder", {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}),
    ],
)  # fmt: skip
def test_other_spellings_of_an_expression_are_identified_by_their_words(name: str, pre: dict[str, Any]) -> None:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": name != "gpt-2"}
    steps = {"type": "Sequence", "pretokenizers": [pre, level]}
    converted = tokenizer.to_metadata(bytewise(steps))
    assert (converted.typed["tokenizer.ggml.pre"][1], converted.dropped) == (name, [])


def test_other_words_with_the_same_tokens_are_identified_by_them() -> None:
    """Three letters in a word at most, but no token is longer than three letters."""
    split = {"type": "Split", "pattern": {"Regex":
             r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"},
             "behavior": "Isolated", "invert": False}  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {"type": "Sequence", "pretokenizers": [split, level]}
    without_digits = bytewise(steps)
    model = without_digits["model"]
    model["merges"] = [merge for merge in model["merges"] if not merge[0].isdigit()]
    model["vocab"] = {text: number for text, number in model["vocab"].items() if len(text) == 1 or not text.isdigit()}
    converted = tokenizer.to_metadata(without_digits)
    assert converted.typed["tokenizer.ggml.pre"][1] == "gpt-2"
    assert "same tokens" in converted.dropped[0]
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata(bytewise({**steps, "pretokenizers": [
            {**split, "pattern": {"Regex": split["pattern"]["Regex"].replace("{1,3}", "{1,2}")}}, level,
        ]}))  # fmt: skip
    assert caught.value.rule == "architecture.tokenizer"


def test_deepseeks_letters_are_those_of_its_file() -> None:
    """Several end or begin ranges which Unicode's form C would turn round or widen to all signs."""
    steps = pretokenizers.pre_tokenizer(pretokenizers.STEPS["deepseek-llm"])
    made = tokenizers.Tokenizer.from_str(json.dumps(bytewise(steps)))
    words = [text for text, _ in made.pre_tokenizer.pre_tokenize_str("\u00e9\u00e8\u00d7b 12 x!\u4e2d\u6587 ")]
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    wanted = ["\u00e9\u00e8", "\u00d7", "b", " ", "12", " x", "!", "\u4e2d\u6587", " "]
    assert words == [alphabet.pre_tokenize_str(word)[0][0] for word in wanted]


@pytest.mark.parametrize(
    "pre",
    [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Whitespace"},
        {"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 2},
         {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]},
    ],
)  # fmt: skip
def test_a_pre_tokenizer_without_a_name_is_refused(pre: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata(bytewise(pre))
    assert caught.value.rule == "architecture.tokenizer"
    assert "probe texts" in caught.value.message


@pytest.mark.parametrize("text", ["(", r"(?=((.|.|.)*[^\w\W]))."])
def test_an_expression_that_tokenizers_cannot_apply_is_refused(text: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata(bytewise(split))
    assert "does not read its pre-tokenizer" in caught.value.message


def test_an_unlisted_pre_tokenizer_needs_the_package_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tokenizer.to_metadata(bytewise(published_tekken())).typed["tokenizer.ggml.pre"][1] == "tekken"
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata(bytewise({"type": "Whitespace"}))
    assert "pip install tokenizers" in caught.value.message


@pytest.mark.parametrize("key", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_tokens_with_a_prefix_or_suffix_are_refused(key: str) -> None:
    source = bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"]))
    source["model"][key] = "</w>"
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata(source)
    assert key in caught.value.message


def test_normalizers_that_llama_cpp_lacks_are_noted_or_refused() -> None:
    source = bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["qwen2"]))
    source["normalizer"] = {"type": "NFC"}
    assert tokenizer.to_metadata(source).dropped == ["the normalizer NFC"]
    source["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    with pytest.raises(UnsupportedError):
        tokenizer.to_metadata(source)


@pytest.mark.parametrize("name", ["", "default", None])
def test_a_file_without_a_pre_tokenizer_has_llama_cpps_default(name: str | None) -> None:
    """It splits digits in threes, and signs from letters, other than GPT-2."""
    metadata = metadata_of(bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"])), {})
    metadata["tokenizer.ggml.pre"] = name
    files, _ = tokenizer.to_files({key: value for key, value in metadata.items() if value is not None})
    built = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    words = [text for text, _ in built.pre_tokenizer.pre_tokenize_str("x 1234+y")]
    assert words == ["x", "\u0120", "123", "4", "+", "y"]


def test_a_file_with_an_unknown_pre_tokenizer_is_refused() -> None:
    metadata = metadata_of(bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"])), {})
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_files({**metadata, "tokenizer.ggml.pre": "next-year"})
    assert "next-year" in caught.value.message


def test_roberta_s_step_around_a_text() -> None:
    """A token before and one behind, and two between a pair: what llama.cpp calls ``roberta-bpe``."""
    given = bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"]))
    size = len(given["model"]["vocab"])
    marks = ("<s>", "</s>", "<mask>")
    given["model"]["vocab"] |= {text: size + number for number, text in enumerate(marks)}
    given["added_tokens"] = [
        {"id": size + number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for number, text in enumerate(marks)
    ]  # fmt: skip
    given["post_processor"] = {"type": "RobertaProcessing", "sep": ["</s>", size + 1], "cls": ["<s>", size],
                               "trim_offsets": True, "add_prefix_space": False}  # fmt: skip
    settings = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "mask_token": "<mask>"}
    one, other, metadata = both(given, settings)
    same(one, other)
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    assert (found["pre"], found["add_bos_token"], found["add_eos_token"]) == ("roberta-bpe", True, True)
    assert (found["bos_token_id"], found["seperator_token_id"], found["mask_token_id"]) == (size, size + 1, size + 2)


def test_a_token_behind_each_text_is_told_of_any_bpe() -> None:
    given = bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["qwen2"]))
    last = {"SpecialToken": {"id": "the", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    number = given["model"]["vocab"]["the"]
    given["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, last],
        "pair": [text, last, {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "the", "type_id": 1}}],
        "special_tokens": {"the": {"id": "the", "ids": [number], "tokens": ["the"]}},
    }  # fmt: skip
    metadata = metadata_of(given, {"eos_token": "the"})
    assert metadata["tokenizer.ggml.add_eos_token"] is True
    assert metadata["tokenizer.ggml.eos_token_id"] == number
    files, _ = tokenizer.to_files(metadata)
    one, other = (tokenizers.Tokenizer.from_str(json.dumps(each)) for each in (given, files["tokenizer.json"]))
    same(one, other)


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama-bpe", True), ("llama-v3", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_file_that_does_not_state_bos_begins_as_llama_cpp_has_it(pre: str, begins: bool) -> None:
    """``llama-vocab.cpp`` sets ``add_bos`` by the tokenizer's kind and by the pre-tokenizer's name."""
    metadata = metadata_of(bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"])), {})
    metadata["tokenizer.ggml.pre"] = pre
    metadata["tokenizer.ggml.bos_token_id"] = 3
    for stated, expected in ((None, begins), (True, True), (False, False)):
        metadata["tokenizer.ggml.add_bos_token"] = stated
        files, _ = tokenizer.to_files({key: value for key, value in metadata.items() if value is not None})
        made = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
        assert (made.encode("x").ids[0] == 3) is expected


def test_other_kinds_that_do_not_state_what_surrounds_a_text() -> None:
    wordpiece_metadata = metadata_of(wordpiece(), {"cls_token": "[CLS]", "sep_token": "[SEP]"})
    unigram = {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["</s>", 0.0], ["\u2581", -1.0]]}}
    unigram_metadata = metadata_of(unigram, {"eos_token": "</s>"})
    spm = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a"]}
    spm |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.token_type": [2, 3, 3, 1, 1]}
    for stated, first, last in ((wordpiece_metadata, 2, 3), (unigram_metadata, None, 1), (spm, 1, None)):
        metadata = {key: value for key, value in stated.items() if ".add_bos" not in key and ".add_eos" not in key}
        files, _ = tokenizer.to_files(metadata)
        made = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
        whole, own = made.encode("a").ids, made.encode("a", add_special_tokens=False).ids
        assert whole == [*([] if first is None else [first]), *own, *([] if last is None else [last])]


def test_tokens_around_a_text_that_no_key_states_are_named() -> None:
    """llama.cpp puts BOS before a text and EOS after it, and no other tokens."""
    given = bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"]))
    names = ("the", "th", "12")
    before, other, after = ({"SpecialToken": {"id": name, "type_id": 0}} for name in names)
    text = {"Sequence": {"id": "A", "type_id": 0}}

    def surplus(single: list[Any], settings: dict[str, Any]) -> tuple[Any, Any, list[str]]:
        step = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
        files = {"tokenizer.json": {**given, "post_processor": step}, "tokenizer_config.json": settings}
        typed, notes = companions.tokenizer_metadata({name: json.dumps(file) for name, file in files.items()}, 0)
        bos = typed.get("tokenizer.ggml.bos_token_id", ("", None))[1]
        added = typed.get("tokenizer.ggml.add_bos_token", ("", None))[1]
        return added, bos, re.findall(r"the tokens \w+ each text[^;]*", "; ".join(notes))

    vocab = given["model"]["vocab"]
    assert surplus([before, text], {}) == (True, vocab["the"], [])  # the template alone states it
    assert surplus([before, text], {"bos_token": "the"})[::2] == (True, [])
    assert surplus([before, text], {"bos_token": "th"})[::2] == (False, ["the tokens before each text the"])
    assert surplus([before, other, text], {"bos_token": "the"})[::2] == (True, ["the tokens before each text the th"])
    assert surplus([text, after], {"eos_token": "12"})[2] == []


def wordpiece() -> dict[str, Any]:
    inner = [f"##{letter}" for letter in string.ascii_lowercase]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *string.digits, *inner]
    words += ["the", "cat", "hat", "##server", "http", "(", ")", "'", "+", "/"]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    found: dict[str, Any] = json.loads(made.to_str())
    return found


def test_wordpiece_comes_back() -> None:
    one, other, metadata = both(wordpiece(), {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}})
    assert metadata["tokenizer.ggml.model"] == wordpiece_unigram.WPM
    assert {"\u2581the", "server", "[SEP]"} <= set(metadata["tokenizer.ggml.tokens"])
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.seperator_token_id"]) == (2, 3)
    same(one, other)


def test_upper_case_that_llama_cpp_lowers_is_told() -> None:
    made = wordpiece()
    made["normalizer"]["lowercase"] = False
    assert tokenizer.to_metadata(made).dropped


@pytest.mark.parametrize("spaces", [False, True])
def test_unigram_comes_back(spaces: bool) -> None:
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), ("\u2581the", -3.0), ("cat", -4.5)]
    vocab += [(letter, -6.0 - number / 8) for number, letter in enumerate(string.ascii_letters + string.digits)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=2))
    space = tokenizers.pre_tokenizers.Metaspace()
    cut = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, space]) if spaces else space
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    one, other, metadata = both(json.loads(made.to_str()), {"eos_token": "</s>", "pad_token": "<pad>"})
    assert metadata["tokenizer.ggml.model"] == wordpiece_unigram.UGM
    assert metadata["tokenizer.ggml.scores"][4] == -3.0
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 2, 1]
    assert metadata["tokenizer.ggml.add_eos_token"] is True
    same(one, other)


def test_a_table_of_characters_moves_as_its_bytes() -> None:
    table = base64.b64encode(bytes(range(256))).decode()
    made = {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]},
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": table},
            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}}  # fmt: skip
    words = tokenizer.to_metadata(made)
    assert not words.dropped
    assert words.typed["tokenizer.ggml.precompiled_charsmap"] == ("array:u8", list(range(256)))
    files, _ = tokenizer.to_files({key: value for key, (_, value) in words.typed.items()})
    assert files["tokenizer.json"]["normalizer"] == made["normalizer"]


@pytest.mark.parametrize("vocab", [[["a"]], [["a", "b"]], {"a": 1}, "a", [[1, 2.0]]])
def test_a_vocabulary_that_is_none_is_refused(vocab: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata({"model": {"type": "Unigram", "vocab": vocab}})
    assert caught.value.rule == "architecture.tokenizer"


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [5]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": 5}},
        {"added_tokens": [{"id": 1}]},
    ],
)
def test_a_tokenizer_with_other_than_texts_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tokenizer.to_metadata({**bytewise({"type": "ByteLevel"}), **change})
    assert caught.value.rule == "architecture.tokenizer"


@pytest.mark.parametrize("key", ["added_tokens", "post_processor"])
def test_no_lists_are_none(key: str) -> None:
    given = bytewise(pretokenizers.pre_tokenizer(pretokenizers.STEPS["gpt-2"]))
    found = tokenizer.to_metadata({**given, key: {"processors": 5} if key == "post_processor" else 5})
    assert found == tokenizer.to_metadata({**given, key: None})


@pytest.mark.parametrize(("kind", "key"), [("gpt2", "merges"), ("llama", "scores"), ("t5", "scores")])
def test_metadata_of_another_type_are_as_if_left_out(kind: str, key: str) -> None:
    metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["ab", "a", "b"]}
    for wrong in (5, ["x", 1.0, 2.0] if key == "scores" else 7):
        found, _ = tokenizer.to_files({**metadata, f"tokenizer.ggml.{key}": wrong})
        assert found == tokenizer.to_files(metadata)[0]
