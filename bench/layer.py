"""One layer of a large model: its statistics and GPTQ of its matrices, beside GPTQModel in one run, on one thread.

    python bench/layer.py TOKENIZER TEXT --peers .venv.peers/bin/python --samples 4 --length 2048

A model of Llama 3's shape and random weights is made, of one layer, 4096 wide by default and 14336 between, its
vocabulary that of the tokenizer's folder. Both round seven matrices to 4 bits in groups of 128, by the same tokens.
Figures are of processor time behind imports and loading, and of anonymous memory at its peak (VmHWM less what is mapped
from files, sampled). ``--fisher`` adds a row of ours with gradients and ``two-sided``. At the default width, the last
lines extrapolate to the layers of Llama 3 8B and 70B, and to more tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 128
RULES = """
[[rules]]
roles = ["attention", "mlp"]
min_ndim = 2
codec = "affine"
options = {{ bits = 4, group = {group} }}
quantizer = "{quantizer}"
"""
WANTED = {"gptq": 128 * 2048, "two-sided": 96 * 256}  # tokens of the extrapolation
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}


def make_model(tokenizer: Path, out: Path, width: int, between: int, length: int) -> int:
    """Write the model; return the bytes of its layer in f32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = json.loads((tokenizer / "config.json").read_text("utf-8"))["vocab_size"]
    heads = width // 128
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=between, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), head_dim=128, max_position_embeddings=max(length, 2048),
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out / name)
    return 4 * sum(each.numel() for each in model.model.layers.parameters())


def ours(quantizer: str, model: Path, folder: Path) -> Mapping[str, float]:
    """Calibrate and round; return processor seconds of each, behind imports: theirs are behind theirs."""
    import ingot
    from ingot.recipes.load import parse_recipe

    for name in (
        "transformers.models.llama.modeling_llama",
        "ingot.runtime.calibration.calibrate",
        "ingot.conversion.run",
    ):
        import_module(name)
    asked = json.loads((folder / "asked.json").read_text("utf-8"))
    statistics = folder / f"{quantizer}.safetensors"
    recipe = parse_recipe(RULES.format(group=GROUP, quantizer=quantizer), location="bench/layer.py")
    limit = {"max_ram": asked["max_ram"]} if asked["max_ram"] else {}

    def calibrate() -> None:
        ingot.calibrate(
            model, statistics, text=asked["text"], samples=asked["samples"], length=asked["length"],
            fisher=quantizer == "two-sided", overwrite=True, **limit,
        )  # fmt: skip

    def convert() -> None:
        ingot.convert(model, folder / "ours.zt", recipe, calibration=statistics, overwrite=True)

    return {"statistics": spent(calibrate), "rounding": spent(convert)}


def gptqmodel(model: Path, folder: Path) -> Mapping[str, float]:
    os.chdir(folder)  # it writes a log where it stands
    from gptqmodel import GPTQModel, QuantizeConfig

    windows = np.load(folder / "tokens.npy")
    data = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in windows]
    config = QuantizeConfig(bits=4, group_size=GROUP, desc_act=False, sym=True)
    loaded = GPTQModel.load(str(model), config, device="cpu")
    return {"all": spent(lambda: loaded.quantize(data, batch_size=1))}


def spent(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def child(kind: str, model: Path, folder: Path) -> None:
    os.chdir(folder)  # GPTQModel leaves logs where it runs
    found = gptqmodel(model, folder) if kind == "gptqmodel" else ours(kind, model, folder)
    (folder / "spent.json").write_text(json.dumps(found), "utf-8")


def run(python: str, kind: str, model: Path, folder: Path) -> dict[str, Any]:
    from peak import watch

    done = watch(
        [str(Path(python).absolute()), "-P", str(Path(__file__).absolute()), "--child", kind, str(model), str(folder)],
        0.02,
    )
    if done.code:
        raise SystemExit(f"{kind}: {done.stderr[-3000:]}")
    found = json.loads((folder / "spent.json").read_text("utf-8"))
    total = sum(found.values())
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.items())
    print(f"{kind:12} {total:8.1f} s  {done.peak_anonymous / 2**20:8.0f} MiB  {parts}", flush=True)
    return {"what": kind, "seconds": total, "parts": found, "peak": done.peak_anonymous}


def tokens_of(given: argparse.Namespace) -> np.ndarray:
    from ingot.runtime.evaluation.windows import read_windows
    from ingot.runtime.loading.options import Protocol
    from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

    protocol = Protocol(window=given.length, sequences=given.samples)
    windows: np.ndarray = read_windows(load_tokenizer(given.tokenizer), given.text, protocol).tokens.numpy()
    return windows


def extrapolate(row: dict[str, Any], measured: int) -> None:
    """Print the hours of one core for all layers of two models, from a layer of 4096 x 14336 and ``measured`` tokens.

    Statistics take time for each token and weight. Rounding does for each weight and, because of its products, for the
    width: the rate of wider layers was not measured.
    """
    wanted = WANTED[row["what"]]
    for name, layers, wider in (("8B", 32, 1), ("70B", 80, 2)):
        statistics = row["parts"]["statistics"] * wanted / measured * wider**2
        hours = layers * (statistics + row["parts"]["rounding"] * wider**3) / 3600
        print(f"extrapolated to {name}, {wanted} tokens, one core: {row['what']} {hours:.1f} h", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="a folder with a tokenizer and config.json")
    parser.add_argument("text", type=Path)
    parser.add_argument("--peers", help="a Python that has gptqmodel")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--between", type=int, default=14336)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--max-ram", help="a ceiling for our statistics")
    parser.add_argument("--fisher", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    os.environ.update(ONE_THREAD)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        layer = make_model(given.tokenizer, folder / "model", given.width, given.between, given.length)
        np.save(folder / "tokens.npy", tokens_of(given))
        asked = {
            "text": str(given.text.absolute()),
            "samples": given.samples,
            "length": given.length,
            "max_ram": given.max_ram,
        }
        (folder / "asked.json").write_text(json.dumps(asked), "utf-8")
        print(f"a layer in f32: {layer / 2**20:.0f} MiB; {given.samples} x {given.length} tokens", flush=True)
        kinds = ["gptq", *(["two-sided"] if given.fisher else [])]
        rows = [run(sys.executable, kind, folder / "model", folder) for kind in kinds]
        for row in rows if (given.width, given.between) == (4096, 14336) else ():
            extrapolate(row, given.samples * given.length)
        if given.peers:
            rows.append(run(given.peers, "gptqmodel", folder / "model", folder))
            print(f"ours over theirs: {rows[0]['seconds'] / rows[-1]['seconds']:.2f}")
        if given.json:
            given.json.write_text(
                json.dumps({"layer": layer, "asked": vars(given), "rows": rows}, default=str, indent=1)
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
