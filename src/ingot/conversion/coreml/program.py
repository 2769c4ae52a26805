"""Tensors of a checkpoint written into a program that is made for them: views, then a conversion like any other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from ingot.artifacts.destination import Destination, destination
from ingot.artifacts.open import Source, open_source, weights_of
from ingot.conversion.plan import PlanRequest, plan_conversion
from ingot.conversion.prepared import Prepared, refuse_same
from ingot.conversion.report import ConvertReport
from ingot.conversion.run import run
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.resources import Resources
from ingot.formats.coreml.format import CoremlFormat
from ingot.formats.coreml.layer import Layer, layer_template
from ingot.formats.coreml.llama import llama_template
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import derive_checkpoint
from ingot.naming.config import LlamaConfig
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The program of a whole Llama: for how many tokens at once, in which opset."""

    config: LlamaConfig
    context: int
    opset: str


Wanted = Layer | WholeModel
"""Programs that can be made."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a package is written: as ``ingot.convert`` takes these."""

    max_ram: int | str | None = None
    resume: bool = False
    overwrite: bool = False
    progress: ProgressCallback | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint to make a package of, and where that is to be."""

    source: Source
    checkpoint: Checkpoint
    place: Destination

    def write(self, view: Checkpoint, execution: Execution) -> ConvertReport:
        """Write the tensors of a view, which ``with_program`` made; errors as ``ingot.convert``.

        A tensor of f16 keeps its codec where an operation of the program's opset says the same; all others become f16.
        """
        started = time.perf_counter()
        format = CoremlFormat().for_attachments(view.attachments)
        recipe = _recipe([name for name in view if format.why_unsupported(view[name].spec()) is None])
        plan = plan_conversion(view, CoremlFormat(), PlanRequest(recipe, allow_requantize=True))
        resources = Resources(execution.max_ram, None, Progress(plan.in_bytes, execution.progress))
        prepared = Prepared(self.source, view, plan, self.place, recipe)
        report = run(prepared, resources, overwrite=execution.overwrite, resume=execution.resume)
        return replace(report, seconds=time.perf_counter() - started)


@contextmanager
def opened(path: AnyPath, out: AnyPath) -> Iterator[Opened]:
    """Open a checkpoint to make the package ``out`` of it; errors as ``ingot.open`` and ``artifacts.destination``."""
    place = destination(Location.parse(out), CoremlFormat.name)
    source = open_source(Location.parse(path), io="pread")
    with weights_of(source) as checkpoint:
        refuse_same(source, place)
        yield Opened(source, checkpoint, place)


def with_program(checkpoint: Checkpoint, wanted: Wanted) -> Checkpoint:
    """Return a checkpoint of the constants of a program that is made for it, in the program's order, whatever theirs.

    Companions are no part of a package.
    """
    if isinstance(wanted, Layer):
        template = layer_template(wanted)
    else:
        template = llama_template(wanted.config, wanted.context, wanted.opset)
    names = dict.fromkeys(site.name for site in template.sites if not site.inline)
    attachments = replace(checkpoint.attachments, draft=None, coreml=None, program=template)
    tensors = LazyMap(names, checkpoint.__getitem__)
    return derive_checkpoint(
        checkpoint, tensors, with_program, wanted, asdict(wanted), attachments=attachments, companions={}
    )


def _recipe(kept: Sequence[str]) -> Recipe:
    half = Rule(Choice(DenseLayout.codec, {"dtype": "f16"}), "f16")
    stays = (Rule(None, "as stored", match=tuple(kept)),) if kept else ()
    return Recipe("program", (*stays, half))
