"""Rows of tables of bits against quality: a grid and a quantizer, and what a model says with its matrices rounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import ingot
from ingot.recipes.load import parse_recipe
from ingot.runtime.evaluation.scores import Scores
from ingot.runtime.evaluation.windows import read_windows
from ingot.runtime.loading.options import Protocol
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
    """A model, and what it says unchanged of each text."""

    def __init__(self, model: Path, texts: Mapping[str, Path], windows: int = WINDOWS) -> None:
        self.path = model
        self.model = load_model(model, dtype="f32", keep_packed=False)
        named = dict(self.model.named_parameters())
        self.slots, self.all = named, {name: each.detach().numpy().copy() for name, each in named.items()}
        self.matrices = {n: w for n, w in self.all.items() if w.ndim == 2 and any(part in n for part in LAYERS)}
        self.weights = sum(each.size for each in self.all.values())
        self.rest = self.weights - sum(each.size for each in self.matrices.values())
        protocol, tokenizer = Protocol(window=WINDOW, sequences=windows), load_tokenizer(model)
        self.windows = {kind: read_windows(tokenizer, text, protocol).tokens for kind, text in texts.items()}
        self.wanted = {kind: [_logits(self.model, window) for window in some] for kind, some in self.windows.items()}

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
        return {**self.bits(nbytes), **self._said(load_model(target, dtype="f32", keep_packed=False))}

    def of_matrices(self, nbytes: int, matrices: Matrices) -> dict[str, Any]:
        """Return the figures of other matrices in this model, which has its own again afterwards."""
        if missing := self.matrices.keys() - matrices.keys():
            raise SystemExit(f"expected all matrices of the layers, found none for {sorted(missing)[:3]}")
        try:
            self._put(matrices)
            return {**self.bits(nbytes), **self._said(self.model)}
        finally:
            self._put(self.all)

    def _said(self, model: Any) -> dict[str, Any]:
        found = {}
        for kind, windows in self.windows.items():
            scores = Scores(compared=True)
            for window, wanted in zip(windows, self.wanted[kind], strict=True):
                scores.add(_logits(model, window), window[1:], wanted)
            found[kind] = scores.figures()
        return found

    def _put(self, matrices: Matrices) -> None:
        with torch.no_grad():
            for name, values in matrices.items():
                self.slots[name].copy_(torch.from_numpy(np.ascontiguousarray(values, np.float32)))


def _logits(model: Any, window: Any) -> Any:
    with torch.inference_mode():
        return model(input_ids=window[None], use_cache=False).logits[0, :-1].float()
