"""A prompt and the tokens after it: packed layers beside ``transformers`` in bf16 and llama.cpp, one model for all.

    python bench/prompt.py --llama .venv.llama/bin/python --json prompt.json

``make interop-llama`` makes that Python. The model is the one of ``bench/load_model.py`` (Qwen2.5-1.5B's shape, random
weights); ``--layers 4`` makes a small one. "Q4_0" is 4-bit integers in groups of 32 with an embedding, which is the
head too, of 8 bits in groups of 32: the types that llama.cpp's file has. Each way runs in a process of its own:
seconds to the first token of a prompt from the moment that the model is there, the best of ``--repeat``, and seconds a
token after it, the mean of 16, the best of as many. llama.cpp runs with its own defaults; its weights are read once
before the clock starts, as everybody's are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from load_model import RECIPE, make_gguf, make_source

TOKENS = 16
GROUPS = '{ bits = 4, group = 64, scales = "f16" }', '{ bits = 4, group = 32, scales = "f16" }'
HEAD = "{ bits = 8 }", '{ bits = 8, group = 32, scales = "f16" }'
FORMS = {
    "q4_0": RECIPE.replace(*GROUPS).replace(*HEAD),
    "int8": RECIPE.replace(GROUPS[0], "{ bits = 8 }"),
}
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "transformers, bf16": ("transformers", "source", {}),
    "ingot, Q4_0, exact": ("ingot", "q4_0", {"keep_packed": True}),
    "ingot, Q4_0, compute int8": ("ingot", "q4_0", {"compute": "int8"}),
    "ingot, INT8 rows, exact": ("ingot", "int8", {"keep_packed": True}),
    "ingot, INT8 rows, compute int8": ("ingot", "int8", {"compute": "int8"}),
    "llama.cpp, Q4_0": ("llama", "gguf", {}),
}


def make(root: Path, layers: int) -> None:
    """Write what is not there yet of the model and its forms."""
    import ingot

    if not (root / "source").is_dir():
        (root / "source").mkdir(parents=True)
        make_source(root / "source", layers)
    for name, recipe in FORMS.items():
        if not (root / name).is_dir():
            (root / f"{name}.toml").write_text(recipe)
            ingot.convert(root / "source", root / name, root / f"{name}.toml")
    if not (root / "gguf").is_dir():
        make_gguf(root, layers, head="Q8_0")


def best(prompt: Any, token: Any, repeat: int) -> dict[str, float]:
    """Time ``prompt()``, which returns a state, and ``token(state)``, which returns the next."""
    found: dict[str, float] = {}
    for _ in range(repeat):
        began = time.perf_counter()
        state = prompt()
        first = time.perf_counter() - began
        began = time.perf_counter()
        for _ in range(TOKENS):
            state = token(state)
        each = (time.perf_counter() - began) / TOKENS
        found = {"first_s": min(first, found.get("first_s", first)), "token_s": min(each, found.get("token_s", each))}
    return found


def by_transformers(job: dict[str, Any]) -> dict[str, float]:
    """Time a model of transformers', loaded by it or by ``ingot.load_model``."""
    import torch
    import transformers

    import ingot

    torch.set_num_threads(job["threads"])
    peer = job["kind"] == "transformers"
    load: Any = transformers.AutoModelForCausalLM.from_pretrained if peer else ingot.load_model
    model = load(job["folder"], **job["given"])
    tokens = torch.arange(job["prompt"])[None] % 1000 + 1

    def prompt() -> Any:
        return model(tokens, logits_to_keep=1).past_key_values

    def token(cache: Any) -> Any:
        return model(torch.tensor([[7]]), past_key_values=cache).past_key_values

    with torch.inference_mode():
        return best(prompt, token, job["repeat"])


def by_llama(job: dict[str, Any]) -> dict[str, float]:
    """Time llama.cpp's own calls; this runs in the Python that has it."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(Path(job["folder"]) / "model.gguf"), n_ctx=job["prompt"] + TOKENS, n_batch=job["prompt"],
        n_ubatch=job["prompt"], n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False,
    )  # fmt: skip
    tokens = [number % 1000 + 1 for number in range(job["prompt"])]

    def prompt() -> None:
        model.reset()
        model.eval(tokens)

    def token(_: None) -> None:
        model.eval([7])

    return best(prompt, token, job["repeat"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default %(default)s)")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--llama", help="a Python that has llama_cpp")
    parser.add_argument("--only", default="", help="ways whose names contain this")
    parser.add_argument("--folder", type=Path, help="keep the model and its forms here, and use them again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        job = json.loads(options.measure)
        print(json.dumps(by_llama(job) if job["kind"] == "llama" else by_transformers(job)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = options.folder or Path(scratch)
        make(root, options.layers)
        results = [row for threads in options.threads for row in run_all(root, options, threads)]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def run_all(root: Path, options: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    print(f"{threads} thread(s){'':28}{'first token of ' + str(options.prompt):>24}{'a token':>10}")
    found = []
    for name, (kind, form, given) in WAYS.items():
        python = options.llama if kind == "llama" else sys.executable
        if python is None or options.only not in name:
            continue
        job = {"kind": kind, "folder": str(root / form), "given": given, "threads": threads}
        job |= {"prompt": options.prompt, "repeat": options.repeat}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        command = [python, __file__, "--measure", json.dumps(job)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:44}{done.stderr.strip().splitlines()[-1][:80]}")
            continue
        row = {"way": name, "threads": threads, **json.loads(done.stdout.strip().splitlines()[-1])}
        print(f"{name:40}{row['first_s']:24.3f}{row['token_s']:10.4f}", flush=True)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
