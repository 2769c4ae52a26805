"""Suggest: the fastest form of every weight on chips, within an error, written as a recipe that ``convert`` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import tomli_w

from ingot.artifacts.open import open as open_checkpoint
from ingot.codecs.table import CODECS
from ingot.conversion.candidates import sample_of, trial_snr_db
from ingot.core.options import takes
from ingot.engine.work import encoded_spec
from ingot.errors import IngotError, UsageError
from ingot.ext.ane.assume import Assumptions, parse_assumptions
from ingot.ext.ane.chips.chips import Chip
from ingot.ext.ane.chips.cost import moved_bytes, predict
from ingot.ext.ane.chips.form import SPARSE, Form, form_of
from ingot.ext.ane.chips.gates import decide
from ingot.ext.ane.options import SuggestOptions
from ingot.ext.ane.plan import KERNEL, form_of_tensor, load_chips, use_of
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import AffineLayout
from ingot.model.layouts.palette import PaletteLayout
from ingot.model.layouts.sparse import MaskLayout
from ingot.model.tensor import Tensor
from ingot.recipes.choice import WEIGHT_DTYPES, Choice
from ingot.recipes.recipe import exactly
from ingot.stores.location import Location

# What is tried, by a name for people. A recipe's options; the encoder says which parameters and parts they become.
_WAYS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("palette2", PaletteLayout.codec, {"bits": 2}),
    ("palette3", PaletteLayout.codec, {"bits": 3}),
    ("palette4", PaletteLayout.codec, {"bits": 4}),
    ("palette6", PaletteLayout.codec, {"bits": 6}),
    ("palette8", PaletteLayout.codec, {"bits": 8}),
    ("palette4 per 16 channels", PaletteLayout.codec, {"bits": 4, "group": 16}),
    ("sparse, zeros as they are", MaskLayout.codec, {}),
    ("sparse, half of the weights", MaskLayout.codec, {"sparsity": 0.5}),
    (
        "int8",
        AffineLayout.codec,
        {"bits": 8, "group": "row", "symmetric": True, "scales": "f16", "quantizer": "absmax"},
    ),
)
KEPT = "kept as stored"


@dataclass(frozen=True, slots=True)
class Pick:
    """What was chosen for a weight: the way, its error (RMS over RMS), bytes moved per dispatch before and after."""

    name: str
    way: str
    error: float
    moved_before: int
    moved: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A recipe file and what it is expected to do.

    Bytes moved are those of the first chip.
    """

    path: str
    recipe: str
    chips: tuple[str, ...]
    max_error: float
    picks: tuple[Pick, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Number of weights by way."""
        numbers: dict[str, int] = {}
        for pick in self.picks:
            numbers[pick.way] = numbers.get(pick.way, 0) + 1
        return numbers

    @property
    def moved_before(self) -> int:
        return sum(pick.moved_before for pick in self.picks)

    @property
    def moved(self) -> int:
        return sum(pick.moved for pick in self.picks)

    @property
    def worst(self) -> float:
        return max((pick.error for pick in self.picks), default=0.0)


@takes(SuggestOptions, "suggest")
def suggest(options: SuggestOptions) -> Suggestion:
    """Write a recipe with the least predicted time on the chips, no weight's error above ``max_error``.

    For each kernel the ways are tried from the fastest on: encoded on a sample of the weight (all of it up to about a
    million elements), decoded, compared. The error is the RMS of the difference over the RMS of the weight. With
    several chips a way has to stream on all of them, and their times are added; bytes stand for time where no bandwidth
    is known. For a Core ML package only what its program can have is tried. A file at ``recipe`` is replaced with
    ``overwrite`` only.

    Raises
    ------
    UsageError
        ``ane.suggest``: ``max_error`` is not above 0 or is above 1; those of ``ingot.plan``.
    """
    location, recipe, max_error = Location.parse(options.path), Location.parse(options.recipe), options.max_error
    recipe.require_writable()
    if not 0 < max_error <= 1:
        raise UsageError(
            "expected an error above 0 and at most 1: the RMS of the error over the RMS of the weight, no percentage "
            f"and no decibels (0.1 is 20 dB), found {max_error}",
            rule="ane.suggest",
        )
    chips = load_chips(options.chip)
    assumptions = parse_assumptions(options.assume, [item.name for item in chips])
    known = [assumptions.apply(item) for item in chips]
    with open_checkpoint(location) as checkpoint:
        program = _program(checkpoint)
        picks = [
            _pick(checkpoint[name], known, assumptions, max_error, program)
            for name in checkpoint
            if use_of(checkpoint[name], form_of_tensor(checkpoint[name])) == KERNEL
        ]
    names = tuple(item.name for item in chips)
    text = recipe_text(PurePosixPath(recipe.display).stem, picks, names, max_error)
    recipe.write(text.encode(), overwrite=options.overwrite)
    return Suggestion(location.display, recipe.display, names, max_error, tuple(picks))


def _program(checkpoint: Checkpoint) -> Format | None:
    """Return the format that knows what a checkpoint's own program can have; None where there is no program."""
    if checkpoint.attachments.program is None:
        return None
    format = FORMATS[checkpoint.format]
    return format.for_attachments(checkpoint.attachments) if "program" in format.traits.attachments else None


def _pick(
    tensor: Tensor, chips: Sequence[Chip], assumptions: Assumptions, max_error: float, program: Format | None
) -> Pick:
    present = form_of_tensor(tensor)
    conditions = assumptions.conditions(tensor.name)
    decisions = [decide(present, chip, conditions) for chip in chips]
    before = moved_bytes(present, decisions[0]) or present.dense_bytes
    kept = Pick(tensor.name, KEPT, 0.0, before, before)
    # Quantizing what is quantized already loses more than the error of the second step shows.
    if tensor.dtype not in WEIGHT_DTYPES or tensor.decoder is None or not CODECS[tensor.codec].lossless:
        return kept
    ways: list[tuple[float, int, str, Choice]] = []
    for name, codec, options in _WAYS:
        form = _form(tensor, codec, options, program)
        if form is None:
            continue
        outcomes = [decide(form, chip, conditions) for chip in chips]
        if not all(decision.streams for decision in outcomes):
            continue
        cost = sum(_cost(form, chip, assumptions, tensor.name) for chip in chips)
        ways.append((cost, moved_bytes(form, outcomes[0]), name, Choice(codec, dict(options))))
    now = sum(_cost(present, chip, assumptions, tensor.name) for chip in chips)
    for cost, moved, name, choice in sorted(ways, key=lambda candidate: (candidate[0], -candidate[1])):
        if cost >= now:
            break
        snr = trial_snr_db(tensor, choice)
        error = inf if snr is None else 10 ** (-snr / 20)
        if error <= max_error:
            return Pick(tensor.name, name, error, before, moved)
    return kept


def _form(tensor: Tensor, codec: str, options: Mapping[str, Any], program: Format | None) -> Form | None:
    """Return the form that a way gives a tensor; None where codec, tensor's shape or program do not allow it."""
    if codec not in CODECS:
        return None
    try:
        encoder = CODECS[codec].encoder(tensor.shape, tensor.dtype, options)
    except IngotError:
        return None
    if program is not None and program.why_unsupported(encoded_spec(tensor.name, tensor, encoder, "raw")) is not None:
        return None
    if codec == MaskLayout.codec:  # how many are kept is known after a fit pass
        kept = 1 - options["sparsity"] if "sparsity" in options else _nonzero_share(tensor)
        return Form(SPARSE, tensor.size, nonzeros=round(kept * tensor.size), codec=codec)
    parts = {part.role: part.type or part.dtype for part in encoder.parts}
    return form_of(codec, tensor.shape, tensor.dtype, encoder.params, parts)


def _nonzero_share(tensor: Tensor) -> float:
    """Share of elements with a bit set: a mask of zeros as they are keeps -0."""
    sample = sample_of(tensor)
    bits = sample.view(f"u{sample.itemsize}")
    return float(np.count_nonzero(bits) / bits.size) if bits.size else 1.0


def _cost(form: Form, chip: Chip, assumptions: Assumptions, name: str) -> float:
    conditions = assumptions.conditions(name)
    decision = decide(form, chip, conditions)
    time = predict(form, decision, chip, conditions)
    if time is not None:
        return time.share
    return (moved_bytes(form, decision) or form.dense_bytes) / 1e6


def recipe_text(name: str, picks: Sequence[Pick], chips: Sequence[str], max_error: float) -> str:
    """Return the TOML of a recipe called ``name``: one rule per way, with the names of its weights."""
    about = f"Fastest forms for {', '.join(chips)}, RMS of the error at most {max_error:g} of each weight's own RMS."
    rules = []
    for kind, codec, options in _WAYS:
        picked = [pick for pick in picks if pick.way == kind]
        if picked:
            worst = max(pick.error for pick in picked)
            rules.append(
                {
                    "label": f"{kind}, error up to {worst:.3g}",
                    "match": [exactly(pick.name) for pick in picked],
                    "codec": codec,
                    "options": dict(options),
                }
            )
    return tomli_w.dumps({"name": name, "description": about, "rules": rules})
