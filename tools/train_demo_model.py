"""Train the small Llama model that Ingot ships as ``ingot.demo`` data.

Run by hand, only to make the data anew, with ``torch==2.13.0`` and Ingot installed::

    python tools/train_demo_model.py --out src/ingot/demo/data

All text comes with the Python that runs the script: the topics of
``pydoc_data`` and the docstrings and comments of the standard library.  Seeds
are fixed and one thread is used, so a run repeats exactly on the same CPU,
Python and torch; another CPU may round differently.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import platform
import re
import struct
import sysconfig
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.demo.llama import select_windows
from ingot.demo.tokenizer import Tokenizer, split_words

SEED, VOCAB = 20240607, 1024
HELD_OUT_TOPICS = ("debugger", "formatstrings", "comparisons", "execmodel", "import")
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 192, 512, 4, 6, 2, 32, 256
EPS, THETA, DROPOUT = 1e-5, 10000.0, 0.1
PEAK_RATE, WARM_UP, BATCH = 3e-3, 150, 16
CONFIG: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
CONFIG |= {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": HEAD_DIM}
CONFIG |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
CONFIG |= {"max_position_embeddings": CONTEXT, "rope_theta": THETA, "rope_scaling": None, "rms_norm_eps": EPS}
CONFIG |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
CONFIG |= {"initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True}
CONFIG |= {"bos_token_id": None, "eos_token_id": None}

# --- text ------------------------------------------------------------------

SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "turtledemo", "lib-dynload"}
# Tables generated from other data, and the topics themselves.
SKIPPED_FOLDERS |= {"encodings", "pydoc_data", "__pycache__"}
# A module with a permission notice of its own is under another licence than
# Python's, so its text is left out.
OTHER_LICENCE = re.compile(r"permission\s+(#\s*)?(is|to\s+use)\b", re.IGNORECASE)
BOILERPLATE = re.compile(r"copyright|licen[sc]e|coding[:=]|^!|all rights", re.IGNORECASE)
SHINGLE = 8  # words; a training paragraph sharing this many in a row with held-out text is dropped


def words_of(text: str) -> list[str]:
    """Return the lower-case words of ``text``, for finding duplicates."""
    return re.findall(r"[a-z0-9]+", text.lower())


def shingles(text: str) -> set[tuple[str, ...]]:
    """Return each run of ``SHINGLE`` words, or all the words if there are fewer."""
    words = words_of(text)
    return {tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}


def paragraphs(text: str) -> list[str]:
    """Split at blank lines, leaving out paragraphs with no word in them."""
    parts = (part.rstrip() for part in re.split(r"\n\s*\n", text.strip("\n")))
    return [part for part in parts if words_of(part)]


def comment_blocks(source: str) -> Iterator[str]:
    """Yield runs of whole-line comments, without their ``#``, of four words or more."""
    lines: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            lines[token.start[0]] = re.sub(r"^#+:? ?", "", token.string)
    block: list[str] = []
    for number, line in lines.items():
        block.append(line)
        if number + 1 not in lines:
            text = "\n".join(block)
            if len(words_of(text)) >= 4 and not BOILERPLATE.search(text):
                yield text
            block = []


def module_texts(source: str) -> Iterator[str]:
    """Yield the docstrings of a module and all in it, then its comments."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text
    yield from comment_blocks(source)


def library_texts() -> Iterator[str]:
    """Yield the prose of the standard library, in the order of file names."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS & set(parts) or parts[0].startswith("config-"):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if not OTHER_LICENCE.search(source):
            yield from module_texts(source)


def build_texts() -> tuple[list[str], str]:
    """Return training documents and the held-out text.

    No training paragraph shares ``SHINGLE`` words in a row with the held-out
    text, and no longer one occurs twice: topics include each other, and
    docstrings repeat them.
    """
    held_out = "\n\n".join(topics[name].strip("\n") for name in HELD_OUT_TOPICS) + "\n"
    banned = set().union(*(shingles(part) for part in paragraphs(held_out)))
    banned |= shingles(held_out)
    seen: set[tuple[str, ...]] = set()
    documents = []
    sources = [text for name, text in sorted(topics.items()) if name not in HELD_OUT_TOPICS]
    for text in (*sources, *library_texts()):
        kept = []
        for part in paragraphs(text):
            key = tuple(words_of(part))
            # Short ones ("For example:") are natural repetition, unless held out.
            repeated = len(key) > 5 and key in seen
            if repeated or not banned.isdisjoint(shingles(part)):
                continue
            seen.add(key)
            kept.append(part)
        if kept:
            documents.append("\n\n".join(kept))
    return documents, held_out


# --- tokenizer -------------------------------------------------------------


def train_bpe(text: str, vocab: int) -> Tokenizer:
    """Learn byte-level merges: the commonest pair first, ties to the lowest ids."""
    counts = Counter(split_words(text))
    words = [list(word.encode("utf-8")) for word in counts]
    weights = list(counts.values())
    pairs: Counter[tuple[int, int]] = Counter()
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += weights[index]
            where[pair].add(index)
    merges: list[tuple[int, int]] = []
    for new in range(256, vocab):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for index in where.pop(best):
            old, word = words[index], merge_pair(words[index], best, new)
            for pair in pairwise(old):
                pairs[pair] -= weights[index]
            for pair in pairwise(word):
                pairs[pair] += weights[index]
                where[pair].add(index)
            words[index] = word
    return Tokenizer(merges)


def merge_pair(word: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Replace ``pair`` in ``word`` by ``new``, from left to right."""
    merged: list[int] = []
    for value in word:
        # A token just merged is ``new``, which no pair being merged contains.
        if merged and (merged[-1], value) == pair:
            merged[-1] = new
        else:
            merged.append(value)
    return merged


# --- model, with the parameter names of Hugging Face's Llama ------------------


def rope_tables() -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each float32 ``[CONTEXT, HEAD_DIM]``, halves repeated."""
    frequency = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angle = torch.outer(torch.arange(CONTEXT, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to ``[..., seq, HEAD_DIM]`` in the "rotate half" layout."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with fewer key and value heads than query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``[batch, seq, HIDDEN]`` to the same shape."""
        batch, seq, _ = x.shape
        parts = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).view(batch, seq, -1, HEAD_DIM).transpose(1, 2) for layer in parts)
        q, k = rotate(q, cos[:seq], sin[:seq]), rotate(k, cos[:seq], sin[:seq])
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return out


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., HIDDEN]`` to the same shape."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm layer of the Llama architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.mlp = MLP()
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``[batch, seq, HIDDEN]`` to the same shape."""
        x = x + self.drop(self.self_attn(self.input_layernorm(x), cos, sin))
        out: Tensor = x + self.drop(self.mlp(self.post_attention_layernorm(x)))
        return out


class LlamaForCausalLM(nn.Module):
    """The whole model; ``state_dict`` has the usual names."""

    def __init__(self) -> None:
        super().__init__()
        inner: dict[str, nn.Module] = {"embed_tokens": nn.Embedding(VOCAB, HIDDEN)}
        inner |= {"layers": nn.ModuleList(Block() for _ in range(LAYERS)), "norm": nn.RMSNorm(HIDDEN, eps=EPS)}
        self.model = nn.ModuleDict(inner)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.cos, self.sin = rope_tables()
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Layers that add to the residual stream start smaller (GPT-2's rule).
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if last else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 ``[batch, seq]`` to logits ``[batch, seq, VOCAB]``."""
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"].children():
            x = block(x, self.cos, self.sin)
        out: Tensor = self.lm_head(self.model["norm"](x))
        return out


# --- training ----------------------------------------------------------------


def learning_rate(step: int, steps: int) -> float:
    """Return the rate at ``step``: a linear start, then a cosine down to 1% of the peak."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean next-token loss over rows ``[batch, seq + 1]``."""
    logits = model(rows[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model: nn.Module, tokens: Tensor, rows: Tensor, steps: int) -> float:
    """Train in place; ``rows`` (held out) are only reported on, never used to choose.

    Returns the mean training loss of the last 100 steps.
    """
    # Weight decay is for matrices; gains of the norms are left alone.
    groups = [[p for p in model.parameters() if (p.ndim == 2) is flag] for flag in (True, False)]
    decays = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(decays, betas=(0.9, 0.95), fused=True)
    sampler = torch.Generator().manual_seed(SEED + 1)
    losses: list[float] = []
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH, 1), generator=sampler)
        batch = tokens[starts + torch.arange(CONTEXT + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            recent = sum(losses[-100:]) / 100
            held = evaluate(model, rows[::4])
            seconds = time.monotonic() - began
            print(f"{step + 1} {seconds:.0f} s: {recent:.4f}, held out {held:.4f}", flush=True)
    return sum(losses[-100:]) / len(losses[-100:])


def evaluate(model: nn.Module, rows: Tensor) -> float:
    """Return the mean loss in float32 without dropout."""
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, rows[i : i + 1]).item() for i in range(len(rows))]
    model.train()
    return math.fsum(losses) / len(losses)


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write bfloat16 tensors: header length, JSON header, then the data in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name in sorted(tensors):
        raw = tensors[name].contiguous().view(torch.int16).numpy().astype("<i2").tobytes()
        shape, span = list(tensors[name].shape), [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": span}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main() -> None:
    """Train, write the data folder, and print the numbers that its README records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    documents, held_out = build_texts()
    text = "\n\n".join(documents) + "\n"
    tokenizer = train_bpe(text, VOCAB)
    tokens = torch.tensor(tokenizer.encode(text))
    held_tokens = np.array(tokenizer.encode(held_out))
    rows = torch.from_numpy(select_windows(held_tokens, CONTEXT, 64))
    model = LlamaForCausalLM()
    began = time.monotonic()
    loss = train(model, tokens, rows, options.steps)
    seconds = round(time.monotonic() - began)
    weights = {name: value.detach().bfloat16() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)  # so that what is measured is what is written
    record: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "training bytes": len(text.encode()),
        "training tokens": len(tokens),
        "held-out bytes": len(held_out.encode()),
        "held-out tokens": len(held_tokens),
        "parameters": sum(value.numel() for value in weights.values()),
        "steps": options.steps,
        "seconds": seconds,
        "final training loss": loss,
        "held-out perplexity": math.exp(evaluate(model, rows)),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    write_safetensors(options.out / "model.safetensors", weights)
    config = json.dumps(CONFIG, indent=2, sort_keys=True) + "\n"
    for name, content in (("tokenizer", tokenizer.to_json()), ("config", config)):
        (options.out / f"{name}.json").write_text(content, encoding="utf-8")
    (options.out / "heldout.txt").write_text(held_out, encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
