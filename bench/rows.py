"""Rows of tables of bits against quality: a grid and a quantizer, and what a model says with its matrices rounded."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ingot
from ingot.recipes.load import parse_recipe
from ingot.runtime.evaluation.evaluate import score_windows
from ingot.runtime.evaluation.recorded import RecordedLogits
from ingot.runtime.evaluation.windows import read_windows
from ingot.runtime.loading.options import Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

Matrices = Mapping[str, np.ndarray]
WINDOWS, WINDOW = 96, 256
LAYERS = ("self_attn", "mlp")
ASIDE = ", symmetric = false"
RULE = """
[[rules]]
roles = ["attention", "mlp"]
min_ndim = 2
min_size = 4096
cols_multiple_of = {multiple}
codec = "{codec}"
options = {options}
{quantizer}
"""


class Row(NamedTuple):
    """A grid and a quantizer, and their rules: those for columns that 256 divides come first."""

    label: str
    codec: str
    options: str
    quantizer: str = ""
    large: str = ""  # the type of blocks of 256 columns
    turned: str = ""  # what comes before the rules

    def recipe(self) -> str:
        more = f'quantizer = "{self.quantizer}"' if self.quantizer else ""
        rules = [(256, "ggml_blocks", f'{{ type = "{self.large}" }}')] if self.large else []
        rules.append((1, self.codec, self.options))
        return self.turned + "".join(
            RULE.format(multiple=multiple, codec=codec, options=options, quantizer=more)
            for multiple, codec, options in rules
        )


def blocks(kind: str, more: str = "") -> str:
    return f'{{ type = "{kind}"{more} }}'


def integers(bits: int, group: int, more: str = "") -> str:
    return f"{{ bits = {bits}, group = {group}{more} }}"


class Bench:
    """A model, its logits for each text, and its matrices, which can be replaced and measured.

    ``windows`` is the number of windows, of all texts or by the name of a text.
    """

    def __init__(self, model: Path, texts: Mapping[str, Path], windows: int | Mapping[str, int] = WINDOWS) -> None:
        self.path = model
        self.model = load_model(model, dtype="f32", keep_packed=False)
        named = dict(self.model.named_parameters())
        self.slots, self.all = named, {name: each.detach().numpy().copy() for name, each in named.items()}
        self.matrices = {n: w for n, w in self.all.items() if w.ndim == 2 and any(part in n for part in LAYERS)}
        self.weights = sum(each.size for each in self.all.values())
        self.rest = self.weights - sum(each.size for each in self.matrices.values())
        tokenizer, measures = load_tokenizer(model), Measures(resamples=0)
        self.windows, self.recorded = {}, {}
        for name, text in texts.items():
            count = windows if isinstance(windows, int) else windows[name]
            self.windows[name] = read_windows(tokenizer, text, Protocol(window=WINDOW, sequences=count))
            self.recorded[name] = RecordedLogits(tempfile.gettempdir())
            score_windows(torch, self.model, self.windows[name], None, measures, self.recorded[name])

    def bits(self, nbytes: int) -> dict[str, float]:
        """Bits of a weight of the matrices, which take so many bytes, and of all with what stays in 16 bits."""
        weights = self.weights - self.rest
        return {"bits": 8 * nbytes / weights, "file bits": 8 * (nbytes + 2 * self.rest) / self.weights}

    def of_row(self, row: Row, statistics: Path, folder: Path) -> dict[str, Any]:
        """Return the figures of a row of ours: converted, and loaded as anyone would."""
        target = folder / "ours"
        more = {"calibration": statistics} if row.quantizer else {}
        ingot.convert(self.path, target, parse_recipe(row.recipe(), location="bench"), overwrite=True, **more)
        with ingot.open(target) as found:
            nbytes = sum(part.nbytes for name in self.matrices for part in found[name].parts.values())
        return {**self.bits(nbytes), **self._measure(load_model(target, dtype="f32", keep_packed=False))}

    def of_matrices(self, nbytes: int, matrices: Matrices) -> dict[str, Any]:
        """Return the figures of other matrices in this model, which has its own again afterwards."""
        if missing := self.matrices.keys() - matrices.keys():
            raise SystemExit(f"expected all matrices of the layers, found none for {sorted(missing)[:3]}")
        try:
            self._put(matrices)
            return {**self.bits(nbytes), **self._measure(self.model)}
        finally:
            self._put(self.all)

    def _measure(self, model: Any) -> dict[str, Any]:
        figures = {}
        for name, windows in self.windows.items():
            _, scores, _ = score_windows(torch, model, windows, self.recorded[name], Measures(resamples=0))
            figures[name] = scores.figures()
        return figures

    def _put(self, matrices: Matrices) -> None:
        with torch.no_grad():
            for name, values in matrices.items():
                self.slots[name].copy_(torch.from_numpy(np.ascontiguousarray(values, np.float32)))


def write_calibration(model: Path, text: Path, folder: Path, scored: int, count: int) -> Path:
    """Write the text after the scored windows, and its tokens for the other programs."""
    content, tokenizer = text.read_text("utf-8"), load_tokenizer(model)
    offsets = tokenizer(content, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    (folder / "calibration.txt").write_text(content[offsets[scored * WINDOW][0] :], "utf-8")
    windows = read_windows(tokenizer, folder / "calibration.txt", Protocol(window=WINDOW, sequences=count))
    np.save(folder / "calibration.npy", windows.tokens.numpy())
    return folder / "calibration.txt"
