"""Train the wider Llama model that tables of quality are made on beside a small one (``spec/quantizers.md``).

Hidden 512 and intermediate 1536: all columns are multiples of 256, which ggml's K- and I-quants need. Four
layers, 16 million parameters, the vocabulary of the model whose tokenizer is given::

    python tools/train_wide_model.py ../shared/models/base wide --held-out ../shared/models/heldout_prose.txt

Text is what is installed: documentation and source of Python's standard library and of the packages beside it, or
``--text``. A paragraph that shares eight words in a row with a held-out text is left out, and so is one that was there
before. 2,048 tokens take some 1.6 seconds of processor time, all of it an hour; ``--steps 8`` tries it. What was
trained on goes into ``training.json``. The weights are bf16 and stay where they are made: no wheel has them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from train_demo_model import learning_rate, loss_of, paragraphs, shingles

SEED, CONTEXT = 20240608, 512
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
SUFFIXES = (".md", ".rst", ".txt", ".py")
LARGEST = 1 << 20
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def files_of(places: Sequence[Path]) -> list[Path]:
    """Return files of text, in an order that depends on their names alone and mixes packages."""
    found = {
        path
        for place in places
        for path in ([place] if place.is_file() else place.rglob("*"))
        if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= LARGEST
    }
    return sorted(found, key=lambda path: hashlib.sha256(path.name.encode() + bytes(path)).digest())


def documents(files: Sequence[Path], held_out: str, most: int) -> Iterator[str]:
    """Yield texts, without paragraphs that were there before or share words with ``held_out``, up to ``most`` bytes."""
    banned = set().union(*(shingles(part) for part in paragraphs(held_out)), shingles(held_out)) if held_out else set()
    seen: set[bytes] = set()
    for file in files:
        kept = []
        for part in paragraphs(file.read_text(encoding="utf-8", errors="replace")):
            key = hashlib.blake2b(part.encode("utf-8", "replace"), digest_size=12).digest()
            if key not in seen and (not banned or banned.isdisjoint(shingles(part))):
                seen.add(key)
                kept.append(part)
        if kept:
            text = "\n\n".join(kept) + "\n"
            yield text
            most -= len(text.encode("utf-8", "replace"))
        if most <= 0:
            return


def tokens_of(texts: Iterator[str], folder: Path) -> torch.Tensor:
    """Return the tokens of all texts, one after the other: i32."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        found.append(torch.tensor(encoded, dtype=torch.int32))
    return torch.cat(found)


class Logits(torch.nn.Module):
    """A model of transformers as one from tokens to logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map i64 ``[batch, seq]`` to ``[batch, seq, vocabulary]``."""
        logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def train(model: torch.nn.Module, tokens: torch.Tensor, steps: int, batch: int) -> list[float]:
    """Train in place with the schedule of the demo's model at a third of its rate, and return the losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrapped = Logits(model).to(device).train()
    groups = [[p for p in model.parameters() if (p.ndim == 2) is flag] for flag in (True, False)]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(decays, betas=(0.9, 0.95), fused=True)
    sampler = torch.Generator().manual_seed(SEED)
    losses: list[float] = []
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps) / 3
        starts = torch.randint(len(tokens) - CONTEXT, (batch, 1), generator=sampler)
        rows = tokens[starts + torch.arange(CONTEXT + 1)].long().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(wrapped, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the loss of step {step + 1} is no number")
        if (step + 1) % max(1, min(100, steps // 4)) == 0:
            print(f"step {step + 1} of {steps}, {time.monotonic() - began:.0f} s: {losses[-1]:.4f}", flush=True)
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """Gather text, train, write a folder of transformers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="folder of the model whose vocabulary is used")
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, action="append", help="file or folder; several times")
    parser.add_argument("--held-out", type=Path, action="append", default=[], help="text that is not trained on")
    parser.add_argument("--megabytes", type=float, default=64, help="of text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help=f"windows of {CONTEXT} tokens")
    given = parser.parse_args(arguments)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    places = given.text or [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    held_out = "\n\n".join(path.read_text(encoding="utf-8") for path in given.held_out)
    tokens = tokens_of(documents(files_of(places), held_out, int(given.megabytes * 1e6)), given.tokenizer)
    if len(tokens) <= CONTEXT:
        raise SystemExit(f"expected more than {CONTEXT} tokens of text, found {len(tokens)}")
    base = json.loads((given.tokenizer / "config.json").read_text(encoding="utf-8"))
    ends = {name: base.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=base["vocab_size"], rms_norm_eps=1e-5, **SIZES, **ends))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters, {len(tokens):,} tokens, {given.steps * given.batch * CONTEXT:,} to read", flush=True)
    losses = train(model, tokens, given.steps, given.batch)
    model.to("cpu", torch.bfloat16).save_pretrained(given.out)
    for name in TOKENIZER:
        if (given.tokenizer / name).exists():
            shutil.copyfile(given.tokenizer / name, given.out / name)
    record = {
        "tokens": len(tokens),
        "steps": given.steps,
        "batch": given.batch,
        "loss": sum(losses[-100:]) / len(losses[-100:]),
    }
    (given.out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
