"""What to do next with what a conversion made: the exact commands, quoted for a shell."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from ingot.core.config import CONFIG
from ingot.engine.execute import Executed
from ingot.formats.usage import PROMPT, Made, Runnable, in_python
from ingot.ops.convert.plan import ConvertPlan
from ingot.ops.destination import Destination
from ingot.ops.open import Source

_TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def commands_for(place: Destination, plan: ConvertPlan, executed: Executed, source: Source) -> list[str]:
    """Return the commands that run what was made; one that checks it where nothing is known to."""
    path = _plain(place.location)
    made = Made(
        path,
        path if not place.directory else f"{path.rstrip('/')}/{executed.files[0]}",
        place.directory,
        place.directory and _generates(source, {*executed.companions, *executed.files}),
        plan.metadata,
    )
    found: list[Sequence[str]] = []
    if isinstance(plan.format, Runnable) and place.is_local:
        found += plan.format.commands(made)
    if made.generates:
        found.append(("ingot", "generate", path, PROMPT))
    elif not found and not place.directory and _generates(source, source.companions().files):
        call = "import ingot; print(ingot.load_model({}, model_dir={}))"
        found.append(in_python(call, path, source.location))
    return [shlex.join(words) for words in found or [("ingot", "verify", path)]]


def _plain(path: str) -> str:
    """Return a path that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path


def _generates(source: Source, files: Collection[str]) -> bool:
    """Whether files make weights a model that goes on with a text, as far as its source says what it is."""
    stated = source.config().get("architectures")
    other = isinstance(stated, list) and stated and not any(str(name).endswith(_TEXT) for name in stated)
    return CONFIG in files and not other and any(name.startswith("tokenizer") for name in files)
