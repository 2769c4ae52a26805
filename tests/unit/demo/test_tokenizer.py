"""Tests of the byte-level BPE tokenizer, by hand-made merges and with the shipped ones."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingot.demo.tokenizer import Tokenizer, split_words
from ingot.errors import UsageError
from tests.support.paths import DEMO_DATA as DATA

SHIPPED = Tokenizer.from_json((DATA / "tokenizer.json").read_text(encoding="utf-8"))
A, B, C = b"abc"


@given(st.text())
@example("")
@example("  two  spaces\n\n\tand a tab ")
@example("naïve café — 日本語 🙂 \U0010ffff \x00 \x85 \u2028 _x__y_ ² Ⅷ ٣")
def test_any_text_comes_back(text: str) -> None:
    """Encoding loses nothing, whatever the alphabet."""
    tokens = SHIPPED.encode(text)
    assert SHIPPED.decode(tokens) == text
    assert all(0 <= token < 1024 for token in tokens)


@given(st.text(alphabet=" \n\tab_1é.-'"))
def test_words_cover_the_text(text: str) -> None:
    """No character falls between two alternatives of the pattern."""
    assert "".join(split_words(text)) == text


@given(st.binary())
def test_single_bytes_decode_to_themselves(data: bytes) -> None:
    """Ids below 256 are bytes."""
    assert SHIPPED.decode_bytes(data) == data


def test_words() -> None:
    """A word takes the one space before it; white space otherwise stays together."""
    assert split_words("def f_1(x):\n    return  x12345") == [
        *("def", " f", "_", "1", "(", "x", "):", "\n   ", " return", " ", " x", "123", "45"),
    ]


def test_merges_apply_in_the_order_learned() -> None:
    """In "abc", the earlier merge wins, even if it is further right."""
    assert Tokenizer([(A, B), (B, C)]).encode("abc") == [256, C]
    assert Tokenizer([(B, C), (A, B)]).encode("abc") == [A, 256]
    assert Tokenizer([(B, C), (A, 256)]).encode("abcab") == [257, A, B]


def test_a_repeated_letter_merges_from_the_left() -> None:
    """Overlapping pairs do not share a byte."""
    tokenizer = Tokenizer([(A, A), (256, 256)])
    assert tokenizer.encode("aaa") == [256, A]
    assert tokenizer.encode("aaaaa") == [257, A]


def test_merges_do_not_cross_words() -> None:
    """A pair with a word boundary in it stays two tokens."""
    assert Tokenizer([(A, ord("."))]).encode("a.") == [A, ord(".")]


def test_half_a_character_decodes_to_a_replacement() -> None:
    """A sequence cut inside a character still gives text."""
    assert Tokenizer([]).decode("é".encode()[:1]) == "\ufffd"


def test_json_round_trip() -> None:
    """The JSON form holds everything, and is what is shipped."""
    text = SHIPPED.to_json()
    again = Tokenizer.from_json(text)
    assert again.to_json() == text == (DATA / "tokenizer.json").read_text(encoding="utf-8")
    assert again.vocab_size == 1024
    assert len(json.loads(text)["model"]["merges"]) == 768
    assert Tokenizer.from_json(Tokenizer([]).to_json()).vocab_size == 256


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", []),
        ("model.merges", [["a"]]),
        ("model.merges", [[1, 2]]),
        ("model.merges", [[[], {}]]),
        ("model.merges", [["a", "bc"]]),
        ("model.merges", [["a", "b"], ["a", "b"]]),
        ("model.merges", 5),
        ("model.vocab", {}),
        ("pre_tokenizer.pretokenizers", [{"pattern": {"Regex": "."}}]),
        ("pre_tokenizer", None),
    ],
)
def test_another_tokenizer_is_refused(path: str, value: object) -> None:
    """Only the demo's own vocabulary, merges and words are read."""
    tokenizer = json.loads(SHIPPED.to_json())
    *parents, name = path.split(".")
    inner = tokenizer
    for parent in parents:
        inner = inner[parent]
    inner[name] = value
    with pytest.raises(UsageError):
        Tokenizer.from_json(json.dumps(tokenizer))


@pytest.mark.parametrize("text", ["", "[]", "{}", "5", "null"])
def test_bad_json_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Tokenizer.from_json(text)


def test_a_token_of_two_merges_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="the same token"):
        Tokenizer([(A, B), (B, C), (256, C), (A, 257)]).to_json()


@pytest.mark.parametrize("token", [-1, 1024])
def test_unknown_tokens_are_refused(token: int) -> None:
    """Negative ids must not wrap round to the end of the vocabulary."""
    with pytest.raises(UsageError, match="outside the vocabulary"):
        SHIPPED.decode([token])


def test_held_out_text_compresses_and_is_quick() -> None:
    """The merges suit English text, and each distinct word is merged once only."""
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    fresh = Tokenizer.from_json(SHIPPED.to_json())
    began = time.perf_counter()
    tokens = fresh.encode(text)
    assert time.perf_counter() - began < 2
    assert fresh.decode(tokens) == text
    assert len(tokens) < len(text.encode()) / 2.4
