"""The demonstration of Ingot: convert a small real model by the preset recipes and evaluate each result.

The report has the size, speed and error of each result.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np

from ingot.artifacts.open import open as open_checkpoint
from ingot.artifacts.owned_arrays import load_arrays
from ingot.conversion.run import convert
from ingot.core.border import require
from ingot.demo.llama import Llama, perplexity
from ingot.demo.tokenizer import Tokenizer
from ingot.errors import UsageError
from ingot.inspect.compare import compare
from ingot.naming.config import CONFIG, parse_config
from ingot.runtime.quantize.report import QuantizeReport
from ingot.runtime.quantize.run import quantize

RUNS = (
    ("bf16", ".zt"),
    ("lossless", ".zt"),
    ("lossless-max", ".zt"),
    ("tca-tbe", ".squizd"),
    ("int8", ".zt"),
    ("int4", ".zt"),
    ("int4", ".squizd"),
    ("int3", ".zt"),
    ("int2", ".zt"),
    ("int2-hybrid", ".squizd"),
)
MODEL = "model.safetensors"
COMPANIONS = ("config.json", "tokenizer.json", "heldout.txt", "README.md")
PROMPT = "This function returns a list of"
NEW_TOKENS = 24
WINDOW = 256
WINDOWS = 64


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One line of the demo's table.

    Sizes are in bytes, and times in seconds. The error of a tensor is its RMS error divided by its RMS value; the row
    has the worst and the mean of all tensors. ``perplexity`` is exp of the mean next-token loss on held-out text.
    """

    recipe: str
    file: str
    size: int
    bits_per_weight: float
    convert_seconds: float
    load_seconds: float
    worst_error: float
    mean_error: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The results of the demo: the folder of its files, the row of the original model, and a row per recipe."""

    folder: str
    parameters: int
    tokens: int
    rows: Sequence[DemoRow]


def run(folder: Path, tell: Callable[[str], None] = lambda _: None) -> DemoReport:
    """Convert the demo's model by the preset recipes, load each result back, and evaluate it.

    Parameters
    ----------
    folder : Path
        The folder for all files; created if it does not exist. Files of an earlier demo are replaced.
    tell : callable
        A function that is called with a line of text before each step.

    Raises
    ------
    UsageError
        ``folder`` is a file.
    MissingExtraError
        The model is not installed; the extra ``demo`` contains it.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError("expected a folder or nothing there", rule="demo.folder", where=str(folder))
    source = unpack(folder)
    config = parse_config((source / CONFIG).read_bytes(), "model.config", str(source / CONFIG))
    tokenizer = Tokenizer.load(source / "tokenizer.json")
    tokens = np.array(tokenizer.encode((source / "heldout.txt").read_text("utf-8")), np.int64)
    original = source / MODEL
    tell("evaluating the original")
    model = _Model(original, config, tokens)
    rows = [_evaluate("(original)", original, 0.0, model)]
    for recipe, suffix in RUNS:
        tell(f"converting to {suffix} by recipe {recipe}, loading, evaluating")
        target = folder / f"model-{recipe}{suffix}"
        report = convert(original, target, recipe, overwrite=True)
        rows.append(_evaluate(recipe, target, report.seconds, model))
    with open_checkpoint(original) as checkpoint:
        parameters = sum(tensor.size for tensor in checkpoint.values())
    return DemoReport(str(folder), parameters, min(WINDOW * WINDOWS, len(tokens)), rows)


@dataclass(frozen=True, slots=True)
class DemoQuantization:
    """The result of ``ingot quantize`` on the demo's model: the command, its report, and the text that it generates."""

    command: str
    report: QuantizeReport
    prompt: str
    text: str


def quantize_model(folder: Path) -> DemoQuantization:
    """Quantize the demo's model for llama.cpp, and continue a sentence with the decoded result.

    ``folder`` and the errors are as in ``run``.
    """
    source = unpack(folder)
    target = folder / "model-Q4_K_M.gguf"
    report = quantize(source, target, type="Q4_K_M", calibration="none", overwrite=True)
    words = ("ingot", "quantize", str(source), "-o", str(target), "--type", "Q4_K_M", "--calibration", "none")
    config = parse_config((source / CONFIG).read_bytes(), "model.config", str(source / CONFIG))
    tokenizer = Tokenizer.load(source / "tokenizer.json")
    decoded = folder / "decoded"
    # Write a folder, which has the tensor names of transformers that ``Llama`` reads.
    convert(target, decoded, "decompress", format="safetensors", overwrite=True)
    with open_checkpoint(decoded) as checkpoint:
        model = Llama(config, load_arrays(checkpoint))
    tokens = tokenizer.encode(PROMPT)
    for _ in range(NEW_TOKENS):
        tokens.append(int(np.argmax(model.logits(np.array([tokens], np.int64))[0, -1])))
    return DemoQuantization(
        shlex.join((*words, "--overwrite")), report, PROMPT, tokenizer.decode(tokens)[len(PROMPT) :]
    )


def _model_files() -> Traversable:
    """Return the folder with the model, in the source tree or in the distribution ``ingot-demo``."""
    with suppress(ModuleNotFoundError):
        return files("ingot.demo.data")
    return files(require("ingot_demo", "demo"))


def unpack(folder: Path) -> Path:
    """Copy the model and its companions out of the package into ``folder``, and return their folder.

    ``folder`` and the errors are as in ``run``.
    """
    model_files = _model_files()
    source = folder / "original"
    try:
        source.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError("expected a folder or nothing there", rule="demo.folder", where=str(source)) from error
    with as_file(model_files) as data:
        for name in (MODEL, *COMPANIONS):
            shutil.copyfile(data / name, source / name)
    return source


class _Model:
    """The original model and its evaluation; results with bit-identical weights are evaluated only once."""

    def __init__(self, original: Path, config: Any, tokens: Any) -> None:
        self.original = original
        self._config = config
        self._tokens = tokens
        self._exact: float | None = None

    def perplexity(self, weights: Any, exact: bool) -> float:
        if exact and self._exact is not None:
            return self._exact
        value = perplexity(Llama(self._config, weights), self._tokens, window=WINDOW, max_windows=WINDOWS)
        self._exact = value if exact else self._exact
        return value


def _evaluate(recipe: str, path: Path, seconds: float, model: _Model) -> DemoRow:
    started = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        weights = load_arrays(checkpoint)
        elements = sum(tensor.size for tensor in checkpoint.values())
    loaded = time.perf_counter() - started
    comparison = compare(model.original, path)
    errors = [
        tensor.stats.rms / np.sqrt(tensor.stats.squared_reference / tensor.stats.count)
        for tensor in comparison.tensors
        if tensor.stats and tensor.stats.squared_reference
    ]
    size = path.stat().st_size
    return DemoRow(
        recipe=recipe,
        file=path.name,
        size=size,
        bits_per_weight=8 * size / elements,
        convert_seconds=seconds,
        load_seconds=loaded,
        worst_error=float(max(errors, default=0.0)),
        mean_error=float(np.mean(errors)) if errors else 0.0,
        perplexity=model.perplexity(weights, comparison.same),
    )
