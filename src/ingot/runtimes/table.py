"""The table of runtime profiles, which plugins extend by entry points in the group ``ingot.runtimes``."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import PurePath
from typing import Any

from ingot.artifacts.modelfile import MODELFILE, modelfile_name
from ingot.core.registry import Registry, did_you_mean
from ingot.errors import UsageError
from ingot.runtimes.profile import DEFAULT, RuntimeProfile, parse_profile

BUILT_IN = (
    "llama.cpp",
    "ollama",
    "vllm",
    "sglang",
    "transformers",
    "mlx",
    "onnxruntime",
    "openvino",
    "mistral.rs",
    "coreml",
)


def builtin_text(name: str) -> str:
    """Return the TOML text of a profile that ships with Ingot."""
    return resources.files("ingot.runtimes").joinpath("profiles", f"{name}.toml").read_text("utf-8")


class Runtimes(Registry[RuntimeProfile]):
    """Runtime profiles by name. An entry is a function that returns a profile's TOML text for its name."""

    def _make(self, name: str, target: Any) -> RuntimeProfile:
        return parse_profile(target(name), f"runtime profile {name}")


RUNTIMES = Runtimes(
    "runtime",
    tuple((name, "ingot.runtimes.table:builtin_text") for name in BUILT_IN),
    group="ingot.runtimes",
    contract=RuntimeProfile,
    identifier="name",
)


def runtime_named(name: str) -> RuntimeProfile:
    """Return the profile of a program by its name or an alias, in upper or lower case.

    Raises ``UsageError`` ``runtime.unknown`` with the nearest name.
    """
    key = name.strip().lower()
    if key in RUNTIMES:
        return RUNTIMES[key]
    aliases = {alias: profile for _, profile in RUNTIMES.available() for alias in profile.aliases}
    if key in aliases:
        return aliases[key]
    hint = did_you_mean(key, [*RUNTIMES, *aliases])
    names = ", ".join(RUNTIMES)
    raise UsageError(f"no runtime profile has the name {name!r:.80}{hint}; there are: {names}", rule="runtime.unknown")


def command_lines(profile: RuntimeProfile, container: str, path: str, file: str) -> list[str]:
    """Return the shell lines that run a result of a container in a program; empty if there are none.

    ``path`` is the result's file or folder, ``file`` its first weight file.
    """
    name = PurePath(path).name.partition(".")[0] or "model"
    modelfile = modelfile_name(path) if path == file else f"{path.rstrip('/')}/{MODELFILE}"
    texts = {"path": path, "file": file, "name": name.lower(), "modelfile": modelfile}
    values = {key: shlex.quote(value) for key, value in texts.items()}
    lines = profile.commands.get(container, profile.commands.get(DEFAULT, ()))
    return [line.format(**values) for line in lines]
