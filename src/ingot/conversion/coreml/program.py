"""Writing of a checkpoint's tensors into a Core ML program that is generated for them, as a view and its conversion."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from ingot.artifacts.destination import Destination, destination
from ingot.artifacts.open import Source, open_source, weights_of
from ingot.conversion.coreml.decoder import decoder_template
from ingot.conversion.coreml.decoder_config import Decoder
from ingot.conversion.plan import PlanRequest, plan_conversion
from ingot.conversion.prepared import Prepared, refuse_same
from ingot.conversion.report import ConvertReport
from ingot.conversion.run import run
from ingot.core.runtime.progress import Progress, ProgressCallback
from ingot.engine.resources import Resources
from ingot.formats.coreml.format import CoremlFormat
from ingot.formats.coreml.layer import Layer, layer_template
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import derive_checkpoint
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class FullModel:
    """A program for a full model, and the number of tokens that its cache holds."""

    decoder: Decoder
    context: int


ProgramSpec = Layer | FullModel
"""A program that can be generated."""


@dataclass(frozen=True, slots=True)
class Execution:
    """Options for writing a package, with the same meaning as in ``ingot.convert``."""

    max_ram: int | str | None = None
    resume: bool = False
    overwrite: bool = False
    progress: ProgressCallback | None = None


@dataclass(frozen=True, slots=True)
class Package:
    """A package to write: its source, the checkpoint of the source's weights, and the destination."""

    source: Source
    checkpoint: Checkpoint
    target: Destination

    def write(self, view: Checkpoint, execution: Execution) -> ConvertReport:
        """Write the tensors of a view that ``with_program`` returned; raise the errors of ``ingot.convert``.

        A tensor of f16 keeps its codec if the program's opset has an operation for it; all others become f16.
        """
        started = time.perf_counter()
        format = CoremlFormat().for_attachments(view.attachments)
        recipe = _recipe([name for name in view if format.why_unsupported(view[name].spec()) is None])
        plan = plan_conversion(view, CoremlFormat(), PlanRequest(recipe, allow_requantize=True))
        resources = Resources(execution.max_ram, None, Progress(plan.in_bytes, execution.progress))
        prepared = Prepared(self.source, view, plan, self.target, recipe)
        report = run(prepared, resources, overwrite=execution.overwrite, resume=execution.resume)
        return replace(report, seconds=time.perf_counter() - started)


@contextmanager
def open_for_package(path: AnyPath, out: AnyPath) -> Iterator[Package]:
    """Open a checkpoint for writing the package ``out``; raise the errors of ``ingot.open`` and ``destination``."""
    target = destination(Location.parse(out), CoremlFormat.name)
    source = open_source(Location.parse(path), io="pread")
    with weights_of(source) as checkpoint:
        refuse_same(source, target)
        yield Package(source, checkpoint, target)


def with_program(checkpoint: Checkpoint, spec: ProgramSpec) -> Checkpoint:
    """Return the constants of a generated program as a checkpoint, in the order of the program.

    The program is attached; companions are omitted, because a package does not contain them.
    """
    template = layer_template(spec) if isinstance(spec, Layer) else decoder_template(spec.decoder, spec.context)
    names = dict.fromkeys(site.name for site in template.sites if not site.inline)
    attachments = replace(checkpoint.attachments, draft=None, coreml=None, program=template)
    tensors = LazyMap(names, checkpoint.__getitem__)
    return derive_checkpoint(
        checkpoint, tensors, with_program, spec, asdict(spec), attachments=attachments, companions={}
    )


def _recipe(unchanged: Sequence[str]) -> Recipe:
    """Return a recipe that keeps the tensors ``unchanged`` and stores all others as f16."""
    half = Rule(Choice(DenseLayout.codec, {"dtype": "f16"}), "f16")
    keep = (Rule(None, "as stored", match=tuple(unchanged)),) if unchanged else ()
    return Recipe("program", (*keep, half))
