"""Merging a LoRA adapter into a bf16 checkpoint under a memory limit: ``ingot merge`` beside PEFT's merge_and_unload.

    python bench/adapter_merge.py --gigabytes 2 --rank 16 --max-ram 400MB --json merge.json

The base has random weights and the sizes of a Llama model of 3 billion parameters, with as many layers as the size
needs. It is generated in a temporary folder, which needs three times its size. Each program runs in its own process
with one thread. Seconds are processor time from the files of the base to those of the merged model; memory is the peak
of anonymous memory, and gigabytes are those of the base. PEFT merges in the element type of the base and rounds at each
step, Ingot in f32 and rounds once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from peak import watch

import ingot

HIDDEN, FF, KV, VOCABULARY = 3072, 8192, 1024, 32000
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FF, HIDDEN),
    "mlp.up_proj": (FF, HIDDEN),
    "mlp.down_proj": (HIDDEN, FF),
}
LAYER_BYTES = 2 * sum(rows * cols for rows, cols in LAYER.values())
INGOT = "import ingot, sys; ingot.merge(sys.argv[1], sys.argv[2], sys.argv[3], max_ram=sys.argv[4], threads=1)"
PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(model, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
"""


def config(layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FF,
        "num_hidden_layers": layers,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def generate(folder: Path, gigabytes: float, rank: int) -> int:
    """Write ``base`` and ``adapter``; return the bytes of the base."""
    layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / LAYER_BYTES))
    rng = np.random.default_rng(0)
    pool = (rng.standard_normal(FF * HIDDEN + 4096, np.float32) * 0.02).astype(ml_dtypes.bfloat16)
    base = {}
    adapter = {}
    for layer in range(layers):
        for module, (rows, cols) in LAYER.items():
            name = f"model.layers.{layer}.{module}"
            base[f"{name}.weight"] = pool[layer : layer + rows * cols].reshape(rows, cols)
            factors = rng.standard_normal((rank, rows + cols), np.float32) * 0.01
            adapter[f"base_model.model.{name}.lora_A.weight"] = factors[:, :cols].copy()
            adapter[f"base_model.model.{name}.lora_B.weight"] = factors[:, cols:].T.copy()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            base[f"model.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    base["model.norm.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        base[name] = np.resize(pool, (VOCABULARY, HIDDEN))
    for name, tensors in (("base", base), ("adapter", adapter)):
        (folder / name).mkdir()
        file = "model.safetensors" if name == "base" else "adapter_model.safetensors"
        ingot.save(folder / name / file, tensors)
    (folder / "base" / "config.json").write_text(json.dumps(config(layers)))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*_modules()]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return (folder / "base" / "model.safetensors").stat().st_size


def _modules() -> list[str]:
    return [name.rpartition(".")[2] for name in LAYER]


def measure(program: str, text: str, folder: Path, size: int, *more: str) -> dict[str, Any]:
    """Run a program that merges; return its figures."""
    out = folder / "merged"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = watch([sys.executable, "-c", text, str(folder / "base"), str(folder / "adapter"), str(out), *more])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.code:
        raise SystemExit(f"{program}: {run.stderr[-2000:]}")
    shutil.rmtree(out)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "program": program,
        "processor seconds": round(seconds, 2),
        "user seconds": round(after.ru_utime - before.ru_utime, 2),
        "seconds": round(run.seconds, 2),
        "GB/s of processor time": round(size / 1e9 / seconds, 3),
        "peak MiB": round(run.peak_anonymous / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-ram", default="400MB")
    parser.add_argument("--no-peft", action="store_true", help="measure Ingot alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = generate(folder, arguments.gigabytes, arguments.rank)
        rows.append(measure("ingot merge", INGOT, folder, size, arguments.max_ram))
        if not arguments.no_peft:
            rows.append(measure("peft merge_and_unload", PEFT, folder, size))
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
