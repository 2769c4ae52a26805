"""Ingot's GPTQ folder beside GPTQModel's and llm-compressor's: the same matrices, group size and calibration tokens.

    python bench/gptq.py MODEL TEXT --group 32 --gptqmodel .venv.peers/bin/python --llm-compressor OTHER/bin/python

Windows of 256 tokens from the beginning of TEXT are scored; the windows after them are the calibration tokens of all
rows. ``--model-samples`` adds rows by statistics of the model's own samples, which need no text. KL is to the model
itself. Both programs run on a CPU; llm-compressor needs a Python of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rows import Bench, write_calibration
from standing import Figures, by_peer

import ingot
from ingot.recipes.load import parse_recipe

RULE = """
[[rules]]
roles = ["attention", "mlp"]
min_ndim = 2
codec = "affine"
options = {{ bits = 4, group = {group}, scales = "half" }}
quantizer = "{quantizer}"
"""


def of_folder(bench: Bench, group: int, quantizer: str, statistics: Path, folder: Path) -> Figures:
    """Write Ingot's GPTQ folder, and return the figures of its decoded values."""
    recipe = parse_recipe(RULE.format(group=group, quantizer=quantizer), location="bench")
    ingot.convert(bench.path, folder / "gptq", recipe, format="gptq", calibration=statistics, overwrite=True)
    with ingot.open(folder / "gptq") as checkpoint:
        nbytes = sum(part.nbytes for name in bench.matrices for part in checkpoint[name].parts.values())
        return bench.of_matrices(nbytes, {name: checkpoint[name].numpy("f32") for name in bench.matrices})


def rows_of(bench: Bench, given: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Figures]]:
    text = write_calibration(given.model, given.text, folder, given.sequences, given.samples)
    if given.gptqmodel:
        name = f"gptqmodel 4 bits g{given.group}"
        yield name, by_peer(bench, given.gptqmodel, folder, name)
    if given.llm_compressor:
        name = f"llmcompressor 4 bits g{given.group}"
        yield name, by_peer(bench, given.llm_compressor, folder, name)
    if not given.peers_only:
        statistics = folder / "statistics.safetensors"
        ingot.calibrate(given.model, statistics, text=text, samples=given.samples)
        for quantizer in ("gptq", "two-sided"):
            yield f"Ingot, {quantizer}, the same tokens", of_folder(bench, given.group, quantizer, statistics, folder)
    if given.model_samples:
        label = "Ingot, two-sided, samples of the model"
        yield label, of_folder(bench, given.group, "two-sided", given.model_samples, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--group", type=int, choices=(32, 64), default=64)
    parser.add_argument("--gptqmodel", help="a Python that has gptqmodel")
    parser.add_argument("--llm-compressor", help="a Python that has llmcompressor")
    parser.add_argument("--model-samples", type=Path, help="statistics of samples of the model")
    parser.add_argument("--peers-only", action="store_true", help="no calibration by Ingot on the tokens")
    parser.add_argument("--samples", type=int, default=96, help="windows of calibration (default %(default)s)")
    parser.add_argument("--sequences", type=int, default=24, help="windows that are scored (default %(default)s)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(given.model, {"text": given.text}, given.sequences)
        for label, row in rows_of(bench, given, Path(name)):
            print(f"{label:44} {row['bits']:6.3f} bits  KL {row['text']['kl']:.5f}", flush=True)
            figures[label] = row
            if given.json:
                given.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
