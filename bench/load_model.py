"""From disk to a running model: ``ingot.load_model`` beside ``transformers``, on one model of Qwen2.5-1.5B's shape.

    python bench/load_model.py --json load_model.json

The model has random weights (3.1 GB in bf16) and is made with all its forms in a temporary folder that needs 25 GB;
``--layers 4`` makes a small one. Every way runs in a process of its own, ``--repeat`` times; seconds are the best with
the files in the page cache, memory is that of the first load. ``--cold`` drops the files from the page cache first.
Transformers reads GGUF only with the packages gguf and accelerate; without them that way is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
}
# INT4 in groups of 64 for the layers, INT8 rows for the embedding, which is the head too.
RECIPE = """
name = "int4-all"
description = "4-bit layers, 8-bit embedding"
[[rules]]
label = "embedding"
match = ["*embed_tokens*"]
codec = "affine"
options = { bits = 8 }
[[rules]]
label = "layers"
match = ["*.weight"]
min_ndim = 2
codec = "affine"
options = { bits = 4, group = 64, scales = "f16" }
"""
WAYS = {
    "transformers, safetensors bf16": ("transformers", "source", {}),
    "ingot, safetensors bf16": ("ingot", "source", {}),
    "ingot, .zt bf16": ("ingot", "zt", {}),
    "ingot, .zt bf16, digests not checked": ("ingot", "zt", {"verify": False}),
    "ingot, .squizd bf16": ("ingot", "squizd", {}),
    "ingot, .squizd bf16, digests not checked": ("ingot", "squizd", {"verify": False}),
    "ingot, INT8 decoded": ("ingot", "int8", {}),
    "ingot, INT4 decoded": ("ingot", "int4", {}),
    "ingot, INT8 kept packed": ("ingot", "int8", {"keep_packed": True}),
    "ingot, INT4 kept packed": ("ingot", "int4", {"keep_packed": True}),
    "transformers, GGUF Q4_0 decoded": ("gguf", "gguf", {}),
    "ingot, Squish INT4, first load": ("first", "squish", {}),
    "ingot, Squish INT4, bf16 tier": ("ingot", "squish", {}),
    "ingot, Squish, finalized f16 tier": ("ingot", "squish-f16", {"dtype": "f16"}),
    "mlx_lm, 4 bits": ("mlx_lm", "mlx", {}),
    "ingot.mlx, 4 bits": ("ingot.mlx", "mlx", {}),
}


def make_source(folder: Path, layers: int) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    config = transformers.Qwen2Config(**CONFIG, num_hidden_layers=layers, dtype="bfloat16")
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        skeleton = transformers.Qwen2ForCausalLM(config)
    draw = torch.Generator().manual_seed(0)
    weights = {}
    for name, value in skeleton.state_dict().items():
        if name != "lm_head.weight":
            random = torch.empty(value.shape).normal_(0, 0.02, generator=draw)
            weights[name] = (1 + random if "norm" in name else random).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def make_forms(root: Path) -> None:
    import ingot
    from ingot.ext.squish.tiers.build import build

    (root / "int4.toml").write_text(RECIPE)
    eight = RECIPE.replace('{ bits = 4, group = 64, scales = "f16" }', "{ bits = 8 }")
    (root / "int8.toml").write_text(eight)
    for name, options in {
        "zt": {"format": "zt"},
        "squizd": {"format": "squizd"},
        "int8": {"recipe": root / "int8.toml"},
        "int4": {"recipe": root / "int4.toml"},
    }.items():
        ingot.convert(root / "source", root / name, **options)
    for name in ("squish", "squish-f16"):
        ingot.convert(root / "source", root / name, "squish-int4", "npydir")
    build(root / "squish-f16", "finalized")
    ingot.convert(root / "source", root / "mlx", "mlx-4bit", "mlx")


def make_gguf(root: Path, layers: int, head: str = "Q4_0") -> None:
    import gguf
    import numpy as np

    import ingot

    (root / "gguf").mkdir()
    writer = gguf.GGUFWriter(root / "gguf" / "model.gguf", "qwen2")
    writer.add_block_count(layers)
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_rope_freq_base(CONFIG["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, layers)
    types = gguf.GGMLQuantizationType
    with ingot.open(root / "source") as checkpoint:
        for name, tensor in checkpoint.items():
            values = tensor.numpy("f32")
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if values.ndim < 2:
                writer.add_tensor(target, values)
            else:
                kind = types[head if "embed" in name else "Q4_0"]
                writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def forget(folder: Path) -> None:
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(kind: str, folder: Path, options: dict[str, Any], repeat: int, cold: bool) -> dict[str, float]:
    """Load, take the first token and twelve more; called in a process of its own."""
    import torch
    import transformers
    import transformers.models.qwen2.modeling_qwen2  # both sides begin with what they import in place

    from ingot.core.runtime.memory import anonymous_rss
    from ingot.ext.squish.tiers.build import drop
    from ingot.runtime.loading.transformers import load_model

    ways: dict[str, Any] = {
        "transformers": transformers.AutoModelForCausalLM.from_pretrained,
        "ingot": load_model,
        "first": load_model,
        "gguf": lambda path: transformers.AutoModelForCausalLM.from_pretrained(
            path, gguf_file="model.gguf", dtype=torch.bfloat16
        ),
    }
    transformers.utils.logging.disable_progress_bar()
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    found: dict[str, float] = {}
    for number in range(repeat):
        if kind == "first":
            drop(folder)
        if cold:
            forget(folder)
        before, began, used = anonymous_rss(), time.perf_counter(), time.process_time()
        model = ways[kind](folder, **options)
        loaded, processor = time.perf_counter() - began, time.process_time() - used
        memory = anonymous_rss() - before
        with torch.inference_mode():
            output = model(tokens)
            first = time.perf_counter() - began
            if not number:
                found = {"load_anonymous_mb": memory / 1e6, "anonymous_mb": (anonymous_rss() - before) / 1e6}
            began = time.perf_counter()
            for _ in range(12):
                output = model(torch.tensor([[7]]), past_key_values=output.past_key_values)
            each = (time.perf_counter() - began) / 12
        values = {"load_s": loaded, "load_cpu_s": processor, "first_token_s": first, "token_s": each}
        found |= {name: min(value, found.get(name, value)) for name, value in values.items()}
        decoded = sum(p.numel() * p.element_size() for p in model.parameters())
        found["parameters_gb"] = decoded / 1e9
        del model, output
    return found


def measure_mlx(kind: str, folder: Path, repeat: int, cold: bool) -> dict[str, float]:
    """The same for MLX, which holds the weights in memory of its own; tokenizers, which this model lacks, left out."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    from ingot.core.runtime.memory import anonymous_rss
    from ingot.runtime.loading import mlx_load

    mlx_load._tokenizer = lambda *_: None
    ways: dict[str, Any] = {"mlx_lm": load_model, "ingot.mlx": mlx_load.load_model}
    found: dict[str, float] = {}
    for number in range(repeat):
        if cold:
            forget(folder)
        before, began, used = anonymous_rss(), time.perf_counter(), time.process_time()
        model = ways[kind](folder)[0]
        loaded, processor = time.perf_counter() - began, time.process_time() - used
        if not number:
            found["load_anonymous_mb"] = (anonymous_rss() - before) / 1e6
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[1, 2, 3, 4, 5]]), cache=cache))
        first = time.perf_counter() - began
        if not number:
            found["anonymous_mb"] = (anonymous_rss() - before) / 1e6
        began = time.perf_counter()
        for _ in range(3):
            mx.eval(model(mx.array([[7]]), cache=cache))
        each = (time.perf_counter() - began) / 3
        values = {"load_s": loaded, "load_cpu_s": processor, "first_token_s": first, "token_s": each}
        found |= {name: min(value, found.get(name, value)) for name, value in values.items()}
        del model, cache
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", default="", help="ways whose names contain this")
    parser.add_argument("--folder", type=Path, help="keep the model and its forms here, and use them again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        kind, folder, given = options.measure
        if "mlx" in kind:
            print(json.dumps(measure_mlx(kind, Path(folder), options.repeat, options.cold)))
        else:
            print(json.dumps(measure(kind, Path(folder), json.loads(given), options.repeat, options.cold)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        if not (root / "int4").is_dir():
            (root / "source").mkdir(parents=True)
            make_source(root / "source", options.layers)
            make_forms(root)
        if all(importlib.util.find_spec(name) for name in ("gguf", "accelerate")) and not (root / "gguf").is_dir():
            make_gguf(root, options.layers)
        results = run_all(root, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def run_all(root: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    results = {}
    print(f"{'way':44}{'load s':>8}{'CPU s':>8}{'first s':>9}{'token s':>9}{'anon MB':>9}{'after':>9}")
    for name, (kind, form, given) in WAYS.items():
        if not (root / form).is_dir() or options.only not in name:
            continue
        command = [sys.executable, __file__, "--repeat", str(options.repeat), *(["--cold"] if options.cold else [])]
        command += ["--measure", kind, str(root / form), json.dumps(given)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:44}{done.stderr.strip().splitlines()[-1][:80]}")
            continue
        found = results[name] = json.loads(done.stdout.strip().splitlines()[-1])
        keys = ("load_s", "load_cpu_s", "first_token_s", "token_s")
        print(f"{name:44}{found['load_s']:8.3f}{found['load_cpu_s']:8.3f}", end="")
        print("".join(f"{found[key]:9.3f}" for key in keys[2:]), end="")
        print(f"{found['load_anonymous_mb']:9.1f}{found['anonymous_mb']:9.1f}", flush=True)
    return results


if __name__ == "__main__":
    main()
