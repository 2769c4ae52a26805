"""What a source's ``config.json`` says of activations and caches, and its result does not."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ingot.artifacts.destination import Destination
from ingot.artifacts.open import Source
from ingot.codecs.base import GRADES, IN_F32, IN_TYPE, INTEGERS, SCALES
from ingot.conversion.plan import ConvertPlan
from ingot.engine.execute import Executed
from ingot.engine.steps import Repack
from ingot.engine.work import Step
from ingot.formats.base import PROMPT, Format, WrittenArtifact, in_python
from ingot.model.reading.lazy import as_many
from ingot.naming.config import CONFIG
from ingot.reporting.report import Counts, Texts


def unsaid(source: Source, plan: ConvertPlan) -> str:
    """Return a note of what is not carried; empty where nothing is lost."""
    said = source.format.activations(source.config()) if source.format.traits.config_keys else {}
    if not said:
        return ""
    if plan.config is not None:
        lost = plan.format.dropped_settings(plan.artifact, said)
    else:
        lost = [f"{key} ({value})" for key, value in said.items()]
    if not lost:
        return ""
    return f"not carried into {plan.format.name}: what the source's {CONFIG} says of {', '.join(lost)}"


_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a report says of a source, taken before the result is published: nothing may fail afterwards.

    ``size`` and ``nbytes`` are the bytes of its files and of its tensors' parts, ``architectures`` those that its
    ``config.json`` names, ``companions`` the names of the files beside its weights.
    """

    location: str
    size: int
    nbytes: int
    architectures: Sequence[str]
    companions: frozenset[str]

    @classmethod
    def from_source(cls, source: Source) -> SourceFacts:
        """Read the facts; errors as those of the source's store."""
        architectures = source.config().get("architectures")
        return cls(
            source.location,
            source.stored(),
            sum(tensor.nbytes for tensor in as_many(source.catalog.tensors).uncached()),
            [str(name) for name in architectures] if isinstance(architectures, list) else (),
            frozenset(source.companions().files),
        )

    def generates(self, files: Collection[str]) -> bool:
        """Whether files make the weights a model that continues a text, as far as the source says what it is."""
        writes_text = not self.architectures or any(name.endswith(_TEXT) for name in self.architectures)
        return CONFIG in files and writes_text and any(name.startswith("tokenizer") for name in files)


def commands_for(place: Destination, plan: ConvertPlan, executed: Executed, source: SourceFacts) -> list[str]:
    """Return the commands that run what was made; one that checks it where nothing is known to."""
    path = _plain(place.display)
    made = WrittenArtifact(
        path,
        path if not (place.directory and executed.files) else f"{path.rstrip('/')}/{executed.files[0]}",
        place.directory,
        place.directory and source.generates({*executed.companions, *executed.files}),
        plan.metadata,
    )
    found: list[Sequence[str]] = []
    if place.is_local:
        found += plan.format.commands(made)
    if made.generates:
        found.append(("ingot", "generate", path, PROMPT))
    elif not found and not place.directory and source.generates(source.companions):
        call = "import ingot; print(ingot.load_model({}, model_dir={}))"
        found.append(in_python(call, path, source.location))
    return [shlex.join(words) for words in found or [("ingot", "verify", path)]]


def _plain(path: str) -> str:
    """Return a path that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path


_SAID: Mapping[str, str] = {
    INTEGERS: "integers",
    SCALES: "scales",
    IN_F32: "values in f32",
    IN_TYPE: "values in the target's type",
}


def equality(step: Step, format: Format, inexact: Collection[str]) -> Texts | None:
    """Return the grades in which a tensor is equal in ``format``; None for what is not repacked.

    ``inexact`` are tensors of which a view has changed the values in f32.
    """
    if not isinstance(step, Repack):
        return None
    found = step.repack.equal(steps=format.traits.rounds_steps)
    return [grade for grade in found if grade != IN_F32 or step.spec.name not in inexact]


def counted(found: Iterable[Texts | None]) -> Counts:
    """Return how many repacked tensors are equal in each grade."""
    repacked = [grades for grades in found if grades is not None]
    return {grade: sum(grade in grades for grades in repacked) for grade in GRADES}


def said(count: int, grades: Counts) -> str:
    """Return the counts in words, of so many repacked tensors."""
    return f"of {count} repacked: " + ", ".join(f"{_SAID[grade]} of {number}" for grade, number in grades.items())
