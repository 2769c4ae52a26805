"""Small vocabularies in GGUF files, and their tokens by llama.cpp (the package xllamacpp, found through PYTHONPATH)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ingot.translate.pretokenizer_probe import TEXTS
from ingot.translate.pretokenizers import byte_characters

PROGRAM = Path(__file__).parents[1] / "interop" / "llama_tokens.py"
PROBE = (*TEXTS, "".join(TEXTS), "", " ", "  \n", "\n\n")
SPACE = "\u2581"
_SIZE = 4000


@cache
def trained_merges(*, bytewise: bool = True) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return tokens and merges of a BPE that is trained on the probe texts across the limits of words.

    Two pre-tokenizers that split a probe text differently have different tokens.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if bytewise:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = byte_characters()
    else:
        tokenizer.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
        alphabet = [SPACE]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_SIZE, initial_alphabet=alphabet, show_progress=False, min_frequency=1, max_token_length=24
    )
    tokenizer.train_from_iterator(["".join(TEXTS)] * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tuple(tokens), tuple((first, second) for first, second in model["merges"])


def bpe_metadata(pre: str | None, *, bytewise: bool = True, model: str = "gpt2") -> dict[str, Any]:
    """Return GGUF metadata of a trained BPE with one of llama.cpp's pre-tokenizers; None for a file without a name."""
    tokens, merges = trained_merges(bytewise=bytewise)
    if not bytewise:
        tokens = (*(f"<0x{byte:02X}>" for byte in range(256)), *tokens)
    values: dict[str, Any] = {
        "model": model,
        "tokens": list(tokens),
        "token_type": [6 if not bytewise and index < 256 else 1 for index in range(len(tokens))],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "add_bos_token": False,
        **({} if pre is None else {"pre": pre}),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write a GGUF file without tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif key.endswith("charsmap"):
            writer.add_key_value(key, bytes(value), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def llama_tokens(jobs: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return llama.cpp's answers to jobs of ``llama_tokens.py``; an error for a job on which the process ends."""
    answers: list[dict[str, Any]] = []
    while len(answers) < len(jobs):
        (folder / "jobs.json").write_text(json.dumps(jobs[len(answers) :]))
        command = [sys.executable, str(PROGRAM), str(folder / "jobs.json")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        answers += [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
        if len(answers) < len(jobs):
            reason = f"llama.cpp ended the process: {result.stderr[-300:]}"
            answers.append({"path": jobs[len(answers)]["path"], "error": reason, "ids": []})
    return answers


def file_tokens(tokenizer: Mapping[str, Any], texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """Return the tokens of texts by the package tokenizers."""
    import tokenizers

    built = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    return [encoding.ids for encoding in built.encode_batch(list(texts), add_special_tokens=special)]
