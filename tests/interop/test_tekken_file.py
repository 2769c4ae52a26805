"""A folder with Mistral's tekken.json alone: the tokens of its algorithm, in tokenizer.json and in GGUF metadata."""

from __future__ import annotations

import json
from base64 import b64encode
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.errors import FormatError
from ingot.translate import companions, tekken
from ingot.translate.pretokenizers import byte_characters
from tests.support import model_folder
from tests.support.llama_vocabularies import PROBE, file_tokens, trained_merges

pytest.importorskip("tokenizers")
regex = pytest.importorskip("regex")

SPECIAL = 20
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokens() -> list[bytes]:
    characters = {character: byte for byte, character in enumerate(byte_characters())}
    texts, _ = trained_merges()
    longer = [bytes(characters[character] for character in text) for text in texts if len(text) > 1]
    return [*(bytes([byte]) for byte in range(256)), *longer]


def tekken_file(**changes: Any) -> dict[str, Any]:
    """Return a tekken.json with more tokens than its vocabulary has, as Mistral's have."""
    listed = tokens()
    vocab = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None} for rank, token in enumerate(listed)
    ]
    config = {"pattern": PATTERN, "default_vocab_size": SPECIAL + len(listed) - 50, "num_vocab_tokens": len(listed),
              "default_num_special_tokens": SPECIAL, "version": "v3"}  # fmt: skip
    return {"config": config, "vocab": vocab, **changes}


def reference(text: str) -> list[int]:
    """Return tokens as mistral-common computes them: the pair with the lowest rank is merged first."""
    ranks = {token: rank for rank, token in enumerate(tokens()[:-50])}
    ids = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        if word.encode() in ranks:
            parts = [word.encode()]
        while pairs := [(ranks[a + b], index) for index, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
            _, position = min(pairs)
            parts[position : position + 2] = [parts[position] + parts[position + 1]]
        ids += [SPECIAL + ranks[part] for part in parts]
    return ids


def test_tokens_are_those_of_tekken() -> None:
    texts = [text for text in PROBE if "\x85" not in text]
    assert file_tokens(tekken.expand(tekken_file()), texts) == [reference(text) for text in texts]


def test_special_tokens() -> None:
    listed = [
        {"rank": rank, "token_str": text, "is_control": True}
        for rank, text in enumerate(["<unk>", "<s>", "</s>", "[X]"])
    ]
    files = {"tekken.json": json.dumps(tekken_file(special_tokens=listed))}
    typed, _ = companions.tokenizer_metadata(files, 0)
    assert typed["tokenizer.ggml.tokens"][1][:5] == ["<unk>", "<s>", "</s>", "[X]", "<SPECIAL_4>"]
    assert [typed[f"tokenizer.ggml.{key}"][1] for key in ("pre", "bos_token_id", "eos_token_id")] == ["tekken", 1, 2]
    assert typed["tokenizer.ggml.token_type"][1][:SPECIAL] == [3] * SPECIAL
    assert typed.get("tokenizer.ggml.add_bos_token", ("bool", True))[1] is True


def test_a_folder_with_tekken_alone(tmp_path: Path) -> None:
    rows = SPECIAL + len(tokens()) - 50
    config = {**model_folder.CONFIG, "vocab_size": rows}
    source = model_folder.write(tmp_path / "m", config, model_folder.tensors(rows=rows))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    (source / "tekken.json").write_text(json.dumps(tekken_file()))
    ingot.convert(source, tmp_path / "x.gguf")
    ingot.convert(tmp_path / "x.gguf", tmp_path / "back", format="safetensors")
    assert json.loads((tmp_path / "back" / "tekken.json").read_text()) == tekken_file()
    built = json.loads((tmp_path / "back" / "tokenizer.json").read_text())
    texts = [text for text in PROBE if text.isascii()]
    assert file_tokens(built, texts) == [reference(text) for text in texts]


@pytest.mark.parametrize(
    "change",
    [
        {"config": 5}, {"config": {"pattern": "x"}}, {"vocab": []}, {"vocab": None}, {"vocab": [5] * 5000},
        {"special_tokens": [{"rank": 20, "token_str": "x"}]}, {"special_tokens": [{"rank": 0, "token_str": 5}]},
        {"special_tokens": 5}, {"special_tokens": [{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]},
        {"config": {"pattern": "x", "default_vocab_size": 1 << 40, "default_num_special_tokens": 1}},
        {"vocab": [{"rank": rank, "token_bytes": "YQ=="} for rank in range(5000)]},
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as caught:
        tekken.expand(tekken_file(**change))
    assert caught.value.rule == "architecture.companion"
