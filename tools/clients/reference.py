"""What Ingot's decoded values compute in f32, and the distance of a program's logits from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot import open as open_checkpoint
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

_PREFIX = "model."


def decoded(path: Path, model_dir: Path, tokens: list[int], prompt: list[int], count: int) -> tuple[np.ndarray, list]:
    """Return the log-probabilities after each token, f64 [tokens, vocabulary], and greedy tokens after the prompt.

    ``model_dir`` has the config of the source model, in the names of transformers.
    """
    model = decoded_model(path, model_dir)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
        text = list(prompt)
        for _ in range(count):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return logits.log_softmax(-1).numpy(), text[len(prompt) :]


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Return the mean KL(reference || program) in nats; both [positions, vocabulary], logits up to a constant."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    computed = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float((np.exp(reference) * (reference - computed)).sum(-1).mean())


def decoded_model(path: Path, model_dir: Path) -> Any:
    """Return the model of transformers with the decoded values; ONNX constants have an export's prefix."""
    if path.suffix != ".onnx":
        return load_model(path, dtype="f32", keep_packed=False, cache=False, model_dir=model_dir)
    model = load_model(model_dir, dtype="f32", keep_packed=False, cache=False)
    with open_checkpoint(path) as checkpoint:
        names = {f"{_PREFIX}{name}": name for name in model.state_dict()}
        values = {
            names[name]: torch.tensor(tensor.numpy("f32")) for name, tensor in checkpoint.items() if name in names
        }
    missing = set(model.state_dict()) - set(values)
    if missing:
        raise SystemExit(f"{path}: no constant for {', '.join(sorted(missing)[:3])}")
    model.load_state_dict(values)
    return model


def gap_after(path: Path, model_dir: Path, text: list[int], first: int, second: int | None) -> float:
    """Return how much likelier the decoded model finds the first of two tokens after a text, in nats.

    If the second is unknown, it is the likeliest of all further tokens.
    """
    model = decoded_model(path, model_dir)
    with torch.inference_mode():
        row = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].double()
    if second is None:
        second = next(int(token) for token in row.topk(2).indices if token != first)
    return float(row[first] - row[second])


def text_of(model_dir: Path, tokens: list[int]) -> str:
    """Return the text of tokens."""
    return str(load_tokenizer(model_dir).decode(tokens))


def equal_tokens(model_dir: Path, prompt: list[int], greedy: list[int], text: str) -> int:
    """Return how many of the greedy tokens a text begins with."""
    tokenizer = load_tokenizer(model_dir)
    before = len(tokenizer.decode(prompt))
    texts = [tokenizer.decode(prompt + greedy[:count])[before:] for count in range(len(greedy) + 1)]
    return max(count for count, begin in enumerate(texts) if text.startswith(begin))


def tokens_of(model_dir: Path, text: Path, count: int) -> list[int]:
    """Return the first tokens of a text."""
    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer(text.read_text("utf-8")[: 16 * count], add_special_tokens=False).input_ids[:count]
    if len(ids) < count:
        raise SystemExit(f"{text}: expected at least {count} tokens")
    return [int(token) for token in ids]
