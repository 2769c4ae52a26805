"""What to do next with what a conversion made: the exact commands, quoted for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ingot.core.config import CONFIG
from ingot.engine.execute import Executed
from ingot.formats.usage import PROMPT, WrittenArtifact, in_python
from ingot.model.lazy import as_many
from ingot.ops.convert.plan import ConvertPlan
from ingot.ops.destination import Destination
from ingot.ops.open import Source

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
    path = _plain(place.location)
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
