"""Train the small Llama model whose every dimension divides by 256: ``python make_model.py TOKENIZER TEXT OUT``.

Hidden 256, intermediate 512, heads of 128: blocks of 128 x 128 divide every matrix, and every type of ggml fits. It
learns the beginning of a text by heart, with a fixed seed and within a minute or two, so that its next-token
distributions are as sharp as those of a language model. It is an input for programs, not a measure of quality.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch

SEED = 20261129
STEPS = 120
WINDOWS = 4
LENGTH = 256
RATE = 2e-3
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
}


def make(tokenizer: Path, text: Path, out: Path, steps: int = STEPS) -> None:
    """Train the model and write its folder in bf16."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    base = json.loads((tokenizer / "config.json").read_text(encoding="utf-8"))
    ends = {name: base.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=base["vocab_size"], rms_norm_eps=1e-5, **SIZES, **ends))
    beginning = text.read_text(encoding="utf-8")[: 16 * WINDOWS * LENGTH]
    ids = AutoTokenizer.from_pretrained(tokenizer)(beginning, add_special_tokens=False).input_ids
    windows = torch.tensor(ids[: WINDOWS * LENGTH]).reshape(WINDOWS, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for step in range(steps):
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}: {loss.item():.4f}", flush=True)
    partial = out.with_name(f"{out.name}.partial")
    model.to("cpu", torch.bfloat16).save_pretrained(partial)
    for name in FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, partial / name)
    partial.rename(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for argument in ("tokenizer", "text", "out"):
        parser.add_argument(argument, type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    make(arguments.tokenizer, arguments.text, arguments.out, arguments.steps)
