"""What Ingot's decoded values compute in f32, and the distance of a program's logits from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ingot.runtime.loading.transformers import load_model


def decoded(path: Path, model_dir: Path, tokens: list[int], prompt: list[int], count: int) -> tuple[np.ndarray, list]:
    """Return the log-probabilities after each token, f64 [tokens, vocabulary], and greedy tokens after the prompt.

    ``model_dir`` has the config of the source model, in the names of transformers.
    """
    model = load_model(path, dtype="f32", keep_packed=False, cache=False, model_dir=model_dir)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
        text = list(prompt)
        for _ in range(count):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return logits.log_softmax(-1).numpy(), text[len(prompt) :]


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Return the mean KL(reference || program) in nats; both [positions, vocabulary], logits up to a constant."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return float((np.exp(reference) * (reference - found)).sum(-1).mean())


def gap_after(path: Path, model_dir: Path, text: list[int], pair: tuple[int, int]) -> float:
    """Return how much likelier the decoded model finds the first of two tokens after a text, in nats."""
    model = load_model(path, dtype="f32", keep_packed=False, cache=False, model_dir=model_dir)
    with torch.inference_mode():
        row = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].double()
    return float(row[pair[0]] - row[pair[1]])


def tokens_of(model_dir: Path, text: Path, count: int) -> list[int]:
    """Return the first tokens of a text."""
    from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer(text.read_text("utf-8")[: 16 * count], add_special_tokens=False).input_ids[:count]
    if len(ids) < count:
        raise SystemExit(f"{text}: expected at least {count} tokens")
    return [int(token) for token in ids]
