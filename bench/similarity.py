"""What packing an encoder does to the similarities of sentences.

    python bench/similarity.py MODEL TEXT PACKED...    a row for each packed file of MODEL

Sentences of 30 to 200 characters of TEXT's first 120 kB, in their order: the first 400 are 200 pairs. A sentence's
embedding is the mean of the last hidden state over its tokens, of length 1; computed in f32.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

PAIRS, TOGETHER = 200, 50


def main() -> None:
    """Print the table."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("model")
    asked.add_argument("text", type=Path)
    asked.add_argument("packed", nargs="+", type=Path)
    given = asked.parse_args()
    words = re.split(r"(?<=[.!?])\s+", given.text.read_text("utf-8")[:120_000])
    sentences = [each for each in words if 30 < len(each) < 200 and each.count("`") < 3][: 2 * PAIRS]
    tokenizer = load_tokenizer(given.model)
    wanted = embeddings(load_model(given.model, dtype="f32", keep_packed=False), tokenizer, sentences)
    print("| packed | bytes | mean | largest | cosine of embeddings |\n| --- | --- | --- | --- | --- |")
    for path in given.packed:
        model = load_model(path, dtype="f32", keep_packed=False, model_dir=given.model)
        found = embeddings(model, tokenizer, sentences)
        change = np.abs(similarities(found) - similarities(wanted))
        same = float((found * wanted).sum(1).mean())
        print(f"| {path.name} | {path.stat().st_size:,} | {change.mean():.4f} | {change.max():.4f} | {same:.4f} |")


def embeddings(model: Any, tokenizer: Any, sentences: list[str]) -> Any:
    """Return an embedding for each sentence: f32 [sentences, width]."""
    found = []
    with torch.no_grad():
        for first in range(0, len(sentences), TOGETHER):
            some = sentences[first : first + TOGETHER]
            tokens = tokenizer(some, padding=True, truncation=True, max_length=128, return_tensors="pt")
            hidden, counts = model(**tokens).last_hidden_state, tokens["attention_mask"][..., None].float()
            found.append(torch.nn.functional.normalize((hidden * counts).sum(1) / counts.sum(1), dim=-1))
    return torch.cat(found)


def similarities(found: Any) -> Any:
    """Return the cosine of each pair."""
    return (found[0::2] * found[1::2]).sum(1).numpy()


if __name__ == "__main__":
    main()
