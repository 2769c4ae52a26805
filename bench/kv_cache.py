"""Packed KV caches beside the full one and beside transformers' QuantizedCache (quanto, hqq), in the same run.

    python bench/kv_cache.py --model ../shared/models/base --text ../shared/models/heldout_prose.txt --json kv.json

Peers need ``pip install optimum-quanto hqq``, in a venv of their own; ``--skip-peers`` leaves them out. Every cache
gets the same tokens: windows of a text in pieces, the first 4 tokens and then 64 at a time, of ours so many that each
token is predicted from what the cache holds for it alone. ``kl`` is to the same model with the full cache. The needle
is a passage of text that comes again at the end: its second half is predicted behind its first, and ``gain`` is by how
many nats that is better than where the passage had not been there. Caches that evict read all before that half as a
prompt. Times are processor seconds on one thread, of a token behind ``--context`` random ones in a layer of 8 heads of
keys, 32 of queries and 128 channels: best of the turns that all caches take.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from clock import turns

import ingot
from ingot.ext.serving.kv_cache import PackedCache, make_cache, use_kv_cache
from ingot.runtime.evaluation.special_tokens import surrounding_tokens, text_tokens
from ingot.runtime.evaluation.windows import read_windows
from ingot.runtime.loading.kv_options import kv_cache
from ingot.runtime.loading.options import Protocol
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

OURS = ("int8", "int4", "kivi2", "int4,window=16,block=16", "kivi2,window=32")
PEERS = {
    "quanto 4 bits": ("quanto", 4, 0),
    "quanto 2 bits": ("quanto", 2, 0),
    "hqq 8 bits": ("hqq", 8, 1),
    "hqq 4 bits": ("hqq", 4, 1),
    "hqq 2 bits": ("hqq", 2, 1),
}
EVICT = ("int8,evict=256", "int8,evict=128")
FULL = "full"
PIECE, FIRST = 64, 4
PASSAGE, CUE, DEPTH = 24, 12, 0.1
Row = dict[str, Any]


def new_cache(name: str, model: Any) -> Any:
    """An empty cache of the kind that a row is called by."""
    config = model.config.get_text_config(decoder=True)
    if name == FULL:
        return transformers.DynamicCache(config=config)
    if name in PEERS:
        backend, bits, axis = PEERS[name]
        return transformers.QuantizedCache(
            backend=backend, config=config, nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64
        )
    settings = kv_cache(name)
    assert settings is not None
    return make_cache(model, settings)


def nbytes(value: Any) -> int:
    """Bytes of the tensors that something holds, of tensors made of others those of these."""
    if isinstance(value, torch.Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        return value.nbytes if flatten is None else sum(nbytes(getattr(value, name)) for name in flatten()[0])
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, tuple | list) else 0


def held(cache: Any) -> int:
    """Bytes of all keys and values."""
    if isinstance(cache, PackedCache):
        return cache.nbytes
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(nbytes(getattr(layer, name, None)) for layer in cache.layers for name in names)


def read(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logarithms of probabilities behind tokens [windows, tokens], read in pieces."""
    piece = cache.settings.step if isinstance(cache, PackedCache) else PIECE
    stops = [FIRST, *range(FIRST + piece, tokens.shape[1], piece), tokens.shape[1]]
    if isinstance(cache, PackedCache) and cache.settings.evict is not None:
        stops = [tokens.shape[1] - (PASSAGE - CUE), tokens.shape[1]]
    starts = [0, *stops[:-1]]
    with torch.inference_mode():
        parts = [
            model(tokens[:, start:stop], past_key_values=cache, use_cache=True).logits
            for start, stop in zip(starts, stops, strict=True)
        ]
    return torch.cat(parts, dim=1).log_softmax(-1)


def quality(names: list[str], models: dict[str, Any], windows: torch.Tensor) -> list[Row]:
    """Memory, perplexity and KL of each cache over the windows."""
    rows: list[Row] = []
    full = torch.empty(0)
    for name in names:
        cache = new_cache(name, models[name])
        found = read(models[name], cache, windows)[:, :-1]
        full = found if name == FULL else full
        loss = -found.gather(-1, windows[:, 1:, None]).mean()
        kl = (full.exp() * (full - found)).sum(-1).mean()
        size = held(cache) / windows.numel()
        rows.append({"cache": name, "bytes": size, "perplexity": float(loss.exp()), "kl": float(kl)})
        print(rows[-1], flush=True)
    return rows


def needle(
    names: list[str], models: dict[str, Any], tokens: torch.Tensor, before: tuple[int, ...], shape: tuple[int, int]
) -> dict[str, float]:
    """By how many nats a token of the passage is likelier for its having been there, with each cache."""
    count, length = shape
    fill, rest = tokens[: count * length].reshape(count, length), tokens[count * length :]
    fill[:, : len(before)] = torch.tensor(before, dtype=fill.dtype)
    passage = rest[: count * PASSAGE].reshape(count, PASSAGE)
    other = rest[count * PASSAGE : 2 * count * PASSAGE].reshape(count, PASSAGE)
    at = int(DEPTH * length)

    def nats(name: str, inside: torch.Tensor) -> float:
        text = torch.cat([fill[:, :at], inside, fill[:, at:], passage], dim=1)
        found = read(models[name], new_cache(name, models[name]), text)[:, -(PASSAGE - CUE) - 1 : -1]
        return float(found.gather(-1, passage[:, CUE:, None]).mean())

    without = nats(FULL, other)
    gains = {name: nats(name, passage) - without for name in names}
    print(gains, flush=True)
    return gains


def speed(names: list[str], context: int, repeat: int) -> dict[str, float]:
    """Processor seconds of a token behind so many, in one layer."""
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=256, max_position_embeddings=2 * context,
    )  # fmt: skip
    past = torch.randn(2, 1, 8, context, 128)
    models, ways = {}, []
    for name in names:
        torch.manual_seed(0)
        models[name] = transformers.LlamaForCausalLM(config).eval()
        if name in OURS:
            use_kv_cache(models[name], name)
        ways.append(tokens_behind(models[name], name, past))
    return dict(zip(names, turns(repeat, *ways, clock=time.process_time), strict=True))


def tokens_behind(model: Any, name: str, past: torch.Tensor) -> Callable[[], None]:
    """What reads one more token of a sequence whose keys and values are there already."""
    cache = new_cache(name, model)
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        cache.update(past[0], past[1], 0)

    def one() -> None:
        with torch.inference_mode():
            model(token, past_key_values=cache, use_cache=True)

    one()
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--needles", type=int, default=16)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [FULL, *OURS, *([] if args.skip_peers else PEERS)]
    plain = ingot.load_model(args.model, dtype="f32")
    ours = use_kv_cache(ingot.load_model(args.model, dtype="f32"), "int4")
    models = {name: ours if name in (*OURS, *EVICT) else plain for name in (*names, *EVICT)}
    tokenizer = load_tokenizer(args.model)
    windows = read_windows(tokenizer, args.text, Protocol(window=args.window, sequences=args.windows)).tokens
    tokens = torch.tensor(text_tokens(tokenizer, Path(args.text).read_text(encoding="utf-8")[:400_000]))
    took = speed(names, args.context, args.repeat)
    print(took, flush=True)
    rows = quality(names, models, windows)
    tokens, length = tokens[args.windows * args.window :], args.window - 2 * PASSAGE - 8
    before = surrounding_tokens(tokenizer).before
    gains = needle([*names, *EVICT], models, tokens, before, (args.needles, length))
    full = rows[0]
    print(
        "| cache | bytes a token | share | perplexity | KL | gain of the needle | ms a token | times the full cache |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        name = row["cache"]
        row |= {"gain": gains[name], "milliseconds": 1e3 * took[name], "share": row["bytes"] / full["bytes"]}
        print(
            f"| {name} | {row['bytes']:.0f} | {row['share']:.2f} | {row['perplexity']:.2f} | {row['kl']:.5f} | "
            f"{row['gain']:.3f} | {row['milliseconds']:.2f} | {took[name] / took[FULL]:.2f} |"
        )
    for name in EVICT:
        print(f"gain of the needle with {name}, of {args.window - CUE} tokens: {gains[name]:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"context": args.context, "gains": gains, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
