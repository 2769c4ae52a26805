"""The cells that profiles claim: program, container and preset; and the record of what a program did with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import msgspec

from ingot.conversion.preset_fit import container_for, presets_of, quantizes
from ingot.recipes.load import load_recipe
from ingot.runtimes.table import runtime_named

RESULTS = Path(__file__).with_name("results.json")
PASSED, FAILED, NOT_RUN, NOT_MADE = "passed", "failed", "not run", "not made"
"""Verdicts: outputs agree; they differ or the program refuses; no kernel here; Ingot refuses to make the result."""


@dataclass(frozen=True, order=True)
class Cell:
    """A preset in a container, for a program, of a model."""

    runtime: str
    container: str
    preset: str
    model: str


@dataclass(frozen=True)
class Result:
    """What a program did with a cell.

    ``kl`` is the mean over positions of KL(decoded values || program), in nats, ``limit`` its limit. ``equal`` is the
    number of leading tokens of greedy text that are equal, out of ``count``; ``gap`` is the difference of the decoded
    model's log-probabilities of the two tokens where the texts part. ``output`` is the digest of the files, ``content``
    that of what a program reads of them, ``tree`` that of Ingot's source.
    """

    runtime: str
    container: str
    preset: str
    model: str
    verdict: str
    version: str
    date: str
    tree: str
    output: str = ""
    content: str = ""
    kl: float | None = None
    limit: float = 0.0
    equal: int | None = None
    count: int = 0
    gap: float | None = None
    note: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.runtime, self.container, self.preset, self.model)


def claimed(runtime: str, models: list[str], *, calibrated: bool) -> Iterator[Cell]:
    """Yield the cells that a program's profile claims, by preset.

    Calibrated presets of which there is a plain form are left out unless ``calibrated``: both have the same layout.
    """
    profile = runtime_named(runtime)
    presets = presets_of(profile)
    for preset in presets:
        plain = preset.removesuffix("-calibrated")
        if not calibrated and plain != preset and plain in presets:
            continue
        recipe = load_recipe(preset)
        if quantizes(recipe):
            narrow = [msgspec.structs.replace(profile, containers=(name,), presets=()) for name in profile.containers]
            containers = [item.containers[0] for item in narrow if container_for(item, recipe) is not None]
        else:
            containers = [name for name in (container_for(profile, recipe),) if name]
        for container in containers:
            for model in models:
                yield Cell(profile.name, container, preset, model)


def read_results(path: Path = RESULTS) -> dict[Cell, Result]:
    """Return the committed results by cell."""
    if not path.exists():
        return {}
    names = {item.name for item in fields(Result)}
    rows = json.loads(path.read_text("utf-8"))["cells"]
    results = [Result(**{key: value for key, value in row.items() if key in names}) for row in rows]
    return {result.cell: result for result in results}


def write_results(results: dict[Cell, Result], path: Path = RESULTS) -> None:
    """Write results, a line for each cell, without fields at their defaults."""
    defaults = {item.name: item.default for item in fields(Result)}
    rows = []
    for _, result in sorted(results.items()):
        row = {key: value for key, value in asdict(result).items() if value != defaults[key]}
        rows.append(json.dumps(row, ensure_ascii=False))
    path.write_text('{"cells": [\n ' + ",\n ".join(rows) + "\n]}\n", "utf-8")
