"""Suggest a recipe for ``convert`` that gives every weight its fastest storage form within an error limit."""

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
from ingot.ext.ane.chips.gates import decide
from ingot.ext.ane.chips.storage_form import SPARSE, StorageForm, form_of
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

# Candidates with their names in reports. The options are those of recipes; the encoder turns them into parameters.
_CANDIDATES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
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
UNCHANGED = "kept as stored"


@dataclass(frozen=True, slots=True)
class Pick:
    """The candidate that is suggested for a weight.

    ``error`` is its relative RMS error; ``moved_before`` and ``moved`` are bytes per dispatch before and after.
    """

    name: str
    candidate: str
    error: float
    moved_before: int
    moved: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A recipe file and its expected effect. Moved bytes are computed for the first chip."""

    path: str
    recipe: str
    chips: tuple[str, ...]
    max_error: float
    picks: tuple[Pick, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of weights by candidate."""
        counts: dict[str, int] = {}
        for pick in self.picks:
            counts[pick.candidate] = counts.get(pick.candidate, 0) + 1
        return counts

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
    """Write the recipe with the least predicted time on the chips whose error is at most ``max_error`` for every
    weight.

    For each kernel, candidates are tried from the fastest to the slowest. Each is encoded on a sample of the weight
    (all of it up to about a million elements), decoded and compared. The error is the RMS of the difference over the
    RMS of the weight. With several chips, a candidate must stream on all of them, and their times are added. If no
    bandwidth is published, moved bytes are compared instead of time. For a Core ML package, only forms that its program
    supports are tried. A file at ``recipe`` is replaced only with ``overwrite``.

    Raises
    ------
    UsageError
        ``ane.suggest``: ``max_error`` is not above 0 or is above 1; and the errors of ``ingot.plan``.
    """
    location = Location.parse(options.path)
    recipe = Location.parse(options.recipe)
    max_error = options.max_error
    recipe.require_writable()  # refuses read-only addresses before the work
    if not 0 < max_error <= 1:
        raise UsageError(
            "expected an error above 0 and at most 1: the RMS of the error over the RMS of the weight, no percentage "
            f"and no decibels (0.1 is 20 dB), found {max_error}",
            rule="ane.suggest",
        )
    chips = load_chips(options.chip)
    assumptions = parse_assumptions(options.assume, [item.name for item in chips])
    assumed_chips = [assumptions.apply(item) for item in chips]
    with open_checkpoint(location) as checkpoint:
        program = _program(checkpoint)
        picks = [
            _pick(checkpoint[name], assumed_chips, assumptions, max_error, program)
            for name in checkpoint
            if use_of(checkpoint[name], form_of_tensor(checkpoint[name])) == KERNEL
        ]
    names = tuple(item.name for item in chips)
    text = recipe_text(PurePosixPath(recipe.display).stem, picks, names, max_error)
    recipe.write(text.encode(), overwrite=options.overwrite)
    return Suggestion(location.display, recipe.display, names, max_error, tuple(picks))


def _program(checkpoint: Checkpoint) -> Format | None:
    """Return the format of the program in the checkpoint, such as a Core ML package; None without a program.

    The format checks whether the program supports a storage form.
    """
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
    unchanged = Pick(tensor.name, UNCHANGED, 0.0, before, before)
    # If the weight is quantized already, the measured error would not include the loss of the first quantization.
    if tensor.dtype not in WEIGHT_DTYPES or tensor.decoder is None or not CODECS[tensor.codec].lossless:
        return unchanged
    candidates: list[tuple[float, int, str, Choice]] = []
    for name, codec, options in _CANDIDATES:
        candidate_form = _candidate_form(tensor, codec, options, program)
        if candidate_form is None:
            continue
        outcomes = [decide(candidate_form, chip, conditions) for chip in chips]
        if not all(decision.streams for decision in outcomes):
            continue
        cost = sum(_cost(candidate_form, chip, assumptions, tensor.name) for chip in chips)
        candidates.append((cost, moved_bytes(candidate_form, outcomes[0]), name, Choice(codec, dict(options))))
    now = sum(_cost(present, chip, assumptions, tensor.name) for chip in chips)
    for cost, moved, name, choice in sorted(candidates, key=lambda candidate: (candidate[0], -candidate[1])):
        if cost >= now:
            break
        snr = trial_snr_db(tensor, choice)
        error = inf if snr is None else 10 ** (-snr / 20)
        if error <= max_error:
            return Pick(tensor.name, name, error, before, moved)
    return unchanged


def _candidate_form(
    tensor: Tensor, codec: str, options: Mapping[str, Any], program: Format | None
) -> StorageForm | None:
    """Return the storage form of a weight that ``codec`` with ``options`` encodes.

    Returns None if the codec refuses the tensor, or if the program does not support the result.
    """
    if codec not in CODECS:
        return None
    try:
        encoder = CODECS[codec].encoder(tensor.shape, tensor.dtype, options)
    except IngotError:
        return None
    if program is not None and program.why_unsupported(encoded_spec(tensor.name, tensor, encoder, "raw")) is not None:
        return None
    if codec == MaskLayout.codec:  # the exact number of nonzeros is known only after encoding
        nonzero_share = 1 - options["sparsity"] if "sparsity" in options else _nonzero_share(tensor)
        return StorageForm(SPARSE, tensor.size, nonzeros=round(nonzero_share * tensor.size), codec=codec)
    parts = {part.role: part.type or part.dtype for part in encoder.parts}
    return form_of(codec, tensor.shape, tensor.dtype, encoder.params, parts)


def _nonzero_share(tensor: Tensor) -> float:
    """Return the share of elements that are not +0, in a sample; -0 counts, because a mask that drops zeros keeps
    -0.
    """
    sample = sample_of(tensor)
    bits = sample.view(f"u{sample.itemsize}")
    return float(np.count_nonzero(bits) / bits.size) if bits.size else 1.0


def _cost(storage_form: StorageForm, chip: Chip, assumptions: Assumptions, name: str) -> float:
    conditions = assumptions.conditions(name)
    decision = decide(storage_form, chip, conditions)
    time = predict(storage_form, decision, chip, conditions)
    if time is not None:
        return time.share
    return (moved_bytes(storage_form, decision) or storage_form.dense_bytes) / 1e6


def recipe_text(name: str, picks: Sequence[Pick], chips: Sequence[str], max_error: float) -> str:
    """Return the TOML of a recipe called ``name``: a rule per candidate, with the names of its weights."""
    about = f"Fastest forms for {', '.join(chips)}, RMS of the error at most {max_error:g} of each weight's own RMS."
    rules = []
    for candidate, codec, options in _CANDIDATES:
        picked = [pick for pick in picks if pick.candidate == candidate]
        if picked:
            worst = max(pick.error for pick in picked)
            rules.append(
                {
                    "label": f"{candidate}, error up to {worst:.3g}",
                    "match": [exactly(pick.name) for pick in picked],
                    "codec": codec,
                    "options": dict(options),
                }
            )
    return tomli_w.dumps({"name": name, "description": about, "rules": rules})
