"""Commands that run a written result in the programs whose profiles accept it."""

from __future__ import annotations

import shlex
from contextlib import suppress

from ingot.artifacts.open import open_source
from ingot.errors import IngotError
from ingot.formats.base import Format, WrittenArtifact
from ingot.runtimes.accepts import accepts, container_name
from ingot.runtimes.profile import PROJECTOR
from ingot.runtimes.table import BUILT_IN, RUNTIMES, command_lines, runtime_named
from ingot.stores.location import Location

_FIRST = ("llama.cpp", "vllm", "mlx", "onnxruntime", "coreml")
"""The programs whose commands come first if the user names none."""
_SELF_CONTAINED = ("gguf", "onnx", "coreml")
"""Containers that programs run without a ``config.json`` and a tokenizer in the folder."""


def run_commands(location: str, format: Format, written: WrittenArtifact, runtime: str | None = None) -> list[str]:
    """Return the shell lines that run a written result; empty if no program accepts it.

    Parameters
    ----------
    location : str
        The result, which is opened for the checks.
    format : Format
        The result's format; if no profile covers it, its own ``Format.commands`` are returned.
    written : WrittenArtifact
    runtime : str, optional
        The program; by default the first one whose profile accepts the result.
    """
    container = container_name(format.name)
    names = dict.fromkeys((*_FIRST, *BUILT_IN))
    profiles = [RUNTIMES[name] for name in names] if runtime is None else [runtime_named(runtime)]
    if not any(container in profile.containers for profile in profiles):
        return [shlex.join(words) for words in format.commands(written)]
    if container not in _SELF_CONTAINED and not written.generates:
        return []
    with suppress(IngotError):
        source = open_source(Location.parse(location))
        try:
            is_projector = source.catalog.metadata.get("general.type") == PROJECTOR
            key = PROJECTOR if is_projector else container
            for profile in profiles:
                if (key in profile.commands or not is_projector) and accepts(profile, source).accepted:
                    return command_lines(profile, key, written.path, written.first)
        finally:
            source.close()
    return []
