"""The command ``ingot demo``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

from ingot.cli.declare import declare
from ingot.cli.output import Json, line, print_json, render, table
from ingot.core.about import About
from ingot.core.options import OUT, OUTPUT
from ingot.errors import printable
from ingot.reporting.report import size_text


@declare("demo", "Examples:\n\n  ingot demo\n\n  ingot demo --only-model")
def command(
    out: Annotated[Path, About("Folder for the files; created if absent.", OUTPUT, aliases=OUT)] = Path("ingot-demo"),
    only_model: Annotated[bool, About("Only write the model, into OUT/original.")] = False,
    json: Json = False,
) -> None:
    """Quantize a small real language model, show its size, error and text, and compare the preset recipes."""
    from ingot.demo.run import quantize_model, run, unpack

    if only_model:
        print_json({"model": str(unpack(out))}) if json else line(f"The model is in {printable(str(unpack(out)))}")
        return

    if not json:
        _print_quantization(quantize_model(out))
    report = run(out, lambda line: print(f"{line} ...", file=sys.stderr))
    if json:
        print_json(report)
        return
    _print(report)


def _print_quantization(result: Any) -> None:
    """Print the command ``ingot quantize``, its report, and text that the quantized model generates."""
    line(f"$ {result.command}", wrap=False)
    render(result.report.report(), json=False, quiet=False)
    print(f"\nIt continues {result.prompt!r} with: {printable(repr(result.text))}\n")


def _print(report: Any) -> None:
    print(f"A Llama of {report.parameters:,} parameters; perplexity on {report.tokens:,} tokens of held-out text.\n")
    rows = [
        (
            row.recipe,
            Path(row.file).suffix,
            size_text(row.size),
            f"{row.bits_per_weight:.2f}",
            f"{1000 * row.convert_seconds:.0f} ms" if row.convert_seconds else "-",
            f"{1000 * row.load_seconds:.0f} ms",
            f"{100 * row.worst_error:.2f} %",
            f"{100 * row.mean_error:.2f} %",
            f"{row.perplexity:.3f}",
        )
        for row in report.rows
    ]
    heads = ("recipe", "container", "file", "bits/weight", "convert", "load", "worst error", "mean error", "perplexity")
    table(heads, rows, text_columns=2, optional=("load", "convert", "mean error"))
    for text in (
        "Errors are RMS error over RMS value, per tensor. Rows without error contain the bits of the original.",
        "Bits per weight count the full file: embeddings, head and norms stay bf16, a fifth of so small a model.",
        "int2 and int2-hybrid keep the first and the last of its four layers at 4 bits.",
        "A group's scale takes 2 bytes in .zt and 16 in .squizd.",
    ):
        line(text)
    folder = report.folder
    print(f"\nThe files are in {printable(str(folder))}. Try next:\n")
    program = _program()
    for arguments in (
        f"inspect {folder}/model-int4.zt --by role",
        f"inspect {folder}/model-int2-hybrid.squizd --no-tensors     # and which stack would run it",
        f"compare {folder}/original/model.safetensors {folder}/model-int2.zt",
        f"convert {folder}/original {folder}/packed --recipe int4",
        f"convert {folder}/model-int8.zt {folder}/back.safetensors",
        f"verify {folder}/model-lossless.zt",
        "recipes int4        # a preset as TOML, to start your own",
    ):
        line(f"  {program} {arguments}", wrap=False)


def _program() -> str:
    """Return ``ingot`` if the shell finds that program, else the relative path of the running script."""
    if shutil.which("ingot") or Path(sys.argv[0]).name != "ingot":
        return "ingot"
    return os.path.relpath(sys.argv[0])
