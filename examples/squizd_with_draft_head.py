"""Write a ``.squizd`` with a draft head, show which stack each platform would take, and take the head out again.

    python examples/squizd_with_draft_head.py [SOURCE [DESTINATION]]

The head is made here, of random weights: it has the tensors and shapes of a published EAGLE-3 head for SOURCE and would
draft nonsense. A real one is a file or folder that ``ingot convert --draft`` takes; ``ingot inspect`` and ``ingot
extract --draft`` do what follows.
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

import ingot
import ingot.numpy
from ingot.artifacts.attachments import extract_draft
from ingot.inspect.inspect import inspect


def draft_head(vocab: int, hidden: int) -> dict[str, np.ndarray]:
    """One layer for a target of these sizes; the draft vocabulary is every fourth token of the target's."""
    rng = np.random.default_rng(0)
    tokens = np.arange(0, vocab, 4)
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (hidden,),
        "fc.weight": (hidden, 3 * hidden),  # takes the inputs of three layers of the target
        "lm_head.weight": (len(tokens), hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, hidden),
        "midlayer.mlp.gate_proj.weight": (2 * hidden, hidden),
        "midlayer.mlp.up_proj.weight": (2 * hidden, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, 2 * hidden),
    }
    for name in ("q", "k", "v"):  # the embedding beside the hidden state
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = (hidden, 2 * hidden)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (hidden,)
    weights = {name: rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    offsets = tokens - np.arange(len(tokens))  # draft token i is the target's i + d2t[i]
    return {**weights, "d2t": offsets, "t2d": np.isin(np.arange(vocab), tokens)}


def main(source: str = "ingot-demo/original/model.safetensors", destination: str = "with-draft.squizd") -> None:
    with ingot.open(source) as ckpt:
        vocab, hidden = ckpt["model.embed_tokens.weight"].shape
    ingot.numpy.save_file(draft_head(vocab, hidden), "eagle3.safetensors")

    report = ingot.convert(source, destination, recipe="int4", draft="eagle3.safetensors")
    print(f"{destination}: {report.size:,} bytes, draft head included, of {report.source_size:,}")

    for detail in inspect(destination).details:
        if detail.title == "dispatch":
            for platform, stack, reason, _ in detail.rows:
                print(f"{platform:22} {stack:10} {reason}")

    shape = extract_draft(destination, "eagle3-again.safetensors")
    assert shape is not None  # the file has a draft head
    same = ingot.compare("eagle3.safetensors", "eagle3-again.safetensors").same
    print(
        f"draft head: {shape.layers} layer, vocabulary {shape.draft_vocab} of {shape.vocab}, "
        f"{'the same bits' if same else 'DIFFERENT'} after the way through {destination}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
