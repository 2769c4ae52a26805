"""The text that Ingot ships for calibration: varied from its beginning on, and plain."""

from __future__ import annotations

import unicodedata

from ingot.runtime.calibration.calibrate import default_text

SCRIPTS = {
    "LATIN",
    "CYRILLIC",
    "ARABIC",
    "CJK",
    "HIRAGANA",
    "HANGUL",
    "GREEK",
    "HEBREW",
    "DEVANAGARI",
    "BENGALI",
    "TAMIL",
    "THAI",
}


def scripts_of(text: str) -> set[str]:
    return {unicodedata.name(letter).split()[0] for letter in set(text) if letter.isalpha()}


def test_it_is_about_300_kb_of_passages_that_differ() -> None:
    text = default_text()
    passages = text.strip().split("\n\n")
    assert 290_000 < len(text.encode()) < 310_000
    assert len(passages) > 250
    assert len({passage[:60] for passage in passages}) == len(passages)
    assert not [letter for letter in set(text) if unicodedata.category(letter) == "Cc" and letter not in "\n\t"]


def test_each_fifth_of_it_has_most_scripts_code_and_a_chat() -> None:
    text = default_text()
    assert scripts_of(text) >= SCRIPTS
    for fifth in range(5):
        chunk = text[fifth * len(text) // 5 : (fifth + 1) * len(text) // 5]
        assert len(scripts_of(chunk) & SCRIPTS) >= 8
        assert "User: " in chunk
        assert "return" in chunk
