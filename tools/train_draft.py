"""Train a small EAGLE-3 draft head for a model, and measure what it is worth: a few minutes on one processor.

    python tools/train_draft.py MODEL OUT [--text FILE] [--steps 300] [--seed 0] [--draft-vocab 2048]

It reads a text, or what the target itself writes (sampled at temperature 0.7 from the beginning of a text). The head
learns the target's likeliest tokens two positions ahead of its features, and, fed with its own states, three: what it
has to do when it proposes. OUT gets ``model.safetensors`` and ``config.json`` in the published layout
(``spec/attachments.md``); ``ingot convert MODEL X.squizd --draft OUT`` and ``ingot generate X.squizd PROMPT --draft``
use it. The same seed, processor and number of threads give the same head.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import ingot
from ingot.errors import IngotError
from ingot.ext.serving.speculate import speculate
from ingot.runtime.evaluation.beginnings import Beginnings, beginnings_of
from ingot.runtime.evaluation.generate import draft_head, greedy
from ingot.runtime.evaluation.windows import read_windows
from ingot.runtime.loading.options import Draft, Protocol
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

LENGTH, BATCH, UNROLLED, TEMPERATURE = 128, 12, 2, 0.7


class Head(torch.nn.Module):
    """The published head, whole sequences at a time."""

    def __init__(self, model: Any, draft_vocab: int) -> None:
        super().__init__()
        config = model.config
        hidden, inner = config.hidden_size, config.intermediate_size // 2
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        widths = {
            "fc": (hidden, 3 * hidden),
            "midlayer.self_attn.q_proj": (self.heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.k_proj": (self.kv_heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.v_proj": (self.kv_heads * self.head_dim, 2 * hidden),
            "midlayer.self_attn.o_proj": (hidden, self.heads * self.head_dim),
            "midlayer.mlp.gate_proj": (inner, hidden),
            "midlayer.mlp.up_proj": (inner, hidden),
            "midlayer.mlp.down_proj": (hidden, inner),
            "lm_head": (draft_vocab, hidden),
        }
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        self.own = torch.nn.ParameterDict(
            {key(name): torch.nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for name, shape in widths.items()}
            | {
                key(name): torch.nn.Parameter(torch.ones(hidden))
                for name in (*(f"midlayer.{n}" for n in norms), "norm")
            }
        )
        self.eps, self.rotary, self.embed = config.rms_norm_eps, model.model.rotary_emb, model.get_input_embeddings()
        with torch.no_grad():  # what the target has is a better beginning than chance
            self.own["fc"][:, : 2 * hidden] *= 0.1
            self.own["fc"][:, 2 * hidden :] = torch.eye(hidden)
            self.own["norm"].copy_(model.model.norm.weight)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                self.own[key(f"midlayer.{name}")] *= 0.3

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        return functional.linear(features, self.own["fc"])

    def step(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next states [b, n, hidden] for tokens [b, n] and states before them."""
        cos, sin = self.rotary(hidden, torch.arange(ids.shape[1])[None])
        taken = torch.cat(
            (self._norm("midlayer.input_layernorm", self.embed(ids)), self._norm("midlayer.hidden_norm", hidden)), -1
        )
        query, key_, value = (
            functional.linear(taken, self.own[key(f"midlayer.self_attn.{name}_proj")])
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)
            for name in "qkv"
        )
        query, key_ = (x * cos[:, None] + turned(x) * sin[:, None] for x in (query, key_))
        mixed = functional.scaled_dot_product_attention(query, key_, value, is_causal=True, enable_gqa=True)
        hidden = hidden + functional.linear(
            mixed.transpose(1, 2).flatten(2), self.own[key("midlayer.self_attn.o_proj")]
        )
        normed = self._norm("midlayer.post_attention_layernorm", hidden)
        gate, up = (functional.linear(normed, self.own[key(f"midlayer.mlp.{name}_proj")]) for name in ("gate", "up"))
        return hidden + functional.linear(functional.silu(gate) * up, self.own[key("midlayer.mlp.down_proj")])

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._norm("norm", hidden), self.own["lm_head"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.own[key(name)], self.eps)


def key(name: str) -> str:
    return name.replace(".", "/")


def turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


@torch.inference_mode()
def written(model: Any, prefix: list[int], count: int, length: int) -> torch.Tensor:
    """Return texts that the target writes by itself after the prefix, [count, length]."""
    ids = torch.tensor([prefix]).repeat(count, 1)
    cache, last = None, ids
    while ids.shape[1] < length:
        output = model(input_ids=last, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        last = torch.multinomial((output.logits[:, -1] / TEMPERATURE).softmax(-1), 1)
        ids = torch.cat((ids, last), 1)
    return ids


def windows(model: Path, text: Path, count: int) -> torch.Tensor:
    """Return the first windows of a text, [count or as many as there are, LENGTH]."""
    tokens: torch.Tensor = read_windows(load_tokenizer(model), text, Protocol(LENGTH, count)).tokens
    return tokens


def train(model: Any, texts: torch.Tensor, tokens: torch.Tensor, steps: int) -> Head:
    """Train a head whose draft vocabulary is ``tokens`` (ascending)."""
    config, layers = model.config, model.config.num_hidden_layers
    chosen = (2, layers // 2, layers - 3)
    head = Head(model, len(tokens))
    with torch.no_grad():
        head.own["lm_head"].copy_(model.lm_head.weight[tokens])
    own = torch.full((config.vocab_size,), -100)
    own[tokens] = torch.arange(len(tokens))
    optimizer = torch.optim.AdamW(head.own.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    began = time.perf_counter()
    for number in range(steps):
        ids = texts[torch.randint(len(texts), (BATCH,))]
        with torch.no_grad():
            output = model(input_ids=ids, output_hidden_states=True)
            features = torch.cat([output.hidden_states[layer] for layer in chosen], -1)
            wanted = own[output.logits.argmax(-1)]
        hidden, loss = head.fused(features), torch.zeros(())
        for ahead in range(1, UNROLLED + 1):
            # Position j has the state of token j and the token j + ahead behind it; it proposes the one after that.
            states = head.step(ids[:, ahead:], hidden[:, : ids.shape[1] - ahead])
            scores = head.scores(states)
            loss = loss + functional.cross_entropy(scores.flatten(0, 1), wanted[:, ahead:].flatten()) * 0.8 ** (
                ahead - 1
            )
            hidden = states
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.own.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % 50 == 0 or number + 1 == steps:
            print(f"step {number}: loss {float(loss.detach()):.3f}, {time.perf_counter() - began:.0f} s", flush=True)
    return head


def save(head: Head, model: Any, tokens: torch.Tensor, out: Path) -> None:
    """Write the head in the published layout, in bf16."""
    tensors = {f"{name.replace('/', '.')}.weight": values.detach().bfloat16() for name, values in head.own.items()}
    mask = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    mask[tokens] = True
    own = torch.arange(len(tokens))
    ingot.save(out / "model.safetensors", {**tensors, "d2t": tokens - own, "t2d": mask})
    kept = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act")
    values = {name: getattr(model.config, name) for name in (*kept, "rope_parameters", "vocab_size")}
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, **values}
    about["draft_vocab_size"] = len(tokens)
    (out / "config.json").write_text(json.dumps(about, indent=2) + "\n")


def measure(path: Path, prefix: list[int], out: Path, count: int) -> None:
    """Compare generation with and without the head, token by token, in the model's own type."""
    model = load_model(path)
    torch.manual_seed(1)
    for prompt in written(model, prefix, 4, 24):
        ids = prompt[None]
        tokens, seconds = greedy(model, ids, count, lambda new: False)
        done = speculate(model, ids, count, lambda new: False, draft_head(out, model), Draft().tokens)
        if done.tokens != tokens:
            raise IngotError("expected the same tokens with and without the head")
        accepted = sum(done.accepted) / max(1, len(done.accepted))
        plain = sum(seconds[1:])
        print(
            f"{count} tokens: {accepted:.2f} of {Draft().tokens} accepted a pass, {plain:.2f} s alone, "
            f"{done.rest_seconds:.2f} s with the head: {plain / done.rest_seconds:.2f} times as fast {done.dropped}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--text", type=Path, help="UTF-8; by default the model writes its own.")
    parser.add_argument("--texts", type=int, default=512, help="How many windows of text to learn from.")
    parser.add_argument("--measured", type=int, default=128, help="Tokens of each text of the comparison.")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    model = load_model(given.model, dtype="f32")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    beginnings = beginnings_of(given.model) or Beginnings()
    prefix = [token.id for token in beginnings.text] or [model.config.bos_token_id or 0]
    if given.text is None:
        texts = written(model, prefix, given.texts, LENGTH)
    else:
        texts = windows(given.model, given.text, given.texts)
    counts = torch.bincount(texts.flatten(), minlength=model.config.vocab_size)
    tokens = counts.argsort(descending=True, stable=True)[: given.draft_vocab].sort().values
    save(train(model, texts.clone(), tokens, given.steps), model, tokens, given.out)
    measure(given.model, prefix, given.out, given.measured)


if __name__ == "__main__":
    main()
