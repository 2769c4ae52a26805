"""Regular expressions in bounded time: the same answers as ``re``, and none that takes forever."""

from __future__ import annotations

import random
import re

import pytest

from ingot.core.regex import Regex, RegexError

NAME = "model.layers.17.self_attn.q_proj.weight"
ATOMS = [
    "a",
    "b",
    "A",
    ".",
    "\\n",
    "[ab]",
    "[^a]",
    "[a-c_]",
    r"\.",
    r"\w",
    r"\d",
    r"\s",
    r"\W",
    "^",
    "$",
    r"\b",
    r"\B",
    r"\A",
    r"\Z",
]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}"]
GROUPS = ["(?=", "(?!", "(?i:", "(?s:", "(?m:", "(?-s:", "(?a:", "("]


def expression(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(7) if depth else 0
    inner = [expression(rng, depth - 1) for _ in range(2)] if kind else []
    if kind < 2:
        return rng.choice(ATOMS)
    if kind == 2:
        return "".join(inner)
    if kind == 3:
        return f"(?:{inner[0]}|{inner[1]})"
    if kind == 4:
        return f"(?:{inner[0]}){rng.choice(REPEATS)}"
    return f"{rng.choice(GROUPS)}{inner[0]})"


def test_every_answer_is_that_of_re() -> None:
    rng = random.Random(5)
    matched = 0
    for _ in range(1500):
        text = "".join(expression(rng, 3) for _ in range(rng.randrange(1, 4)))
        expected, found = re.compile(text, re.DOTALL), Regex(text, re.DOTALL)
        for _ in range(4):
            subject = "".join(rng.choice("abcAB.\n_ 1\u00e9") for _ in range(rng.randrange(7)))
            assert found.matches(subject) == (expected.match(subject) is not None), (text, subject)
            matched += found.matches(subject)
    assert matched > 600


@pytest.mark.parametrize(
    "text",
    [
        "(.*.*.*.*.*.*.*.*.*.*)*x$",
        "((a*)*)*b",
        "(?:.|.)*(?:.|.)*x",
        "(?:a?){60}a{60}$",
        "(?=(?:.*.*.*.*.*)*y)(?:.*.*.*.*)*x",
        "(?:[a-z_.0-9]+[.]?)+x$",
    ],
)
def test_what_backtracks_forever_ends(text: str) -> None:
    expression = Regex(text, re.DOTALL)
    assert not any(expression.matches(f"{NAME}{'a' * size}!") for size in range(200))


def test_an_expression_with_more_states_than_are_kept_is_still_right() -> None:
    text, rng = r"(?:.*a.{14})+b", random.Random(3)
    expected, found = re.compile(text), Regex(text)
    for _ in range(400):
        subject = "".join(rng.choice("ab") for _ in range(40))
        assert found.matches(subject) == (expected.match(subject) is not None)
    assert len(found._states) <= 1 << 12


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(", "not a regular expression"),
        ("a**", "not a regular expression"),
        ("(" * 5000 + ")" * 5000, "not a regular expression"),
        (r"(a)\1", "a backreference"),
        ("(?<=a)b", "lookbehind"),
        ("(?<!a)b", "lookbehind"),
        ("(a)?(?(1)b|c)", "a condition"),
        ("(?>a*)a", "an atomic group"),
        ("a*+a", "a possessive repeat"),
        ("a{2001}", "at most 2000"),
        ("((a{50}){50}){50}", "at most 2000"),
        ("(){100000000}", "at most 2000"),
        ("x{0,4000000000}", "at most 2000"),
    ],
)
def test_what_is_not_matched_in_bounded_time_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RegexError, match=reason):
        Regex(text)
