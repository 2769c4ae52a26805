"""Records of a runtime profile, and the parser of their TOML text (``spec/runtimes.md``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from string import Formatter
from typing import Literal

import msgspec
from msgspec import Struct

from ingot.core.parsing.strictjson import preload
from ingot.errors import UsageError

Outcome = Literal["run", "loads", "config", "documented", "refused"]
Storage = Literal["dense", "integers", "floats", "blocks", "palette"]

OUTCOMES = {
    "run": "ran here; its outputs were compared with the decoded values",
    "loads": "loaded here; outputs were not compared",
    "config": "its parser accepted the configuration here; not run, because a kernel or device is missing",
    "documented": "stated by the program's documents or source; not tried here",
    "refused": "the program refuses it, or reads other values",
}
"""Outcomes of a scheme, with their meanings."""

DEFAULT = "default"
"""The key of the commands for containers that have no commands."""
PROJECTOR = "mmproj"
"""The key of the commands for a file of GGUF's type ``mmproj``, which a program reads together with a model."""

PLACEHOLDERS = ("path", "file", "name", "modelfile")
"""Placeholders in a command line: the result's path, its first weight file, its name without a suffix, and the
Modelfile that belongs to it."""


@preload
class Scheme(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A way of storing tensors, and the program's support for it.

    Parameters
    ----------
    name : str
        Name in messages and on the page.
    containers : tuple of str
        Formats in which the scheme occurs.
    storage : {"dense", "integers", "floats", "blocks", "palette"}
    outcome : {"run", "loads", "config", "documented", "refused"}
    note : str
        The measured figure, or the reason of a refusal.
    types : tuple of str
        Element types of dense tensors, number types of small floats, or types of ggml's blocks. Empty: any.
    packings : tuple of str
        Variants of packed integers (``model.layouts.packed_ints``). Empty: any.
    bits : tuple of int
        Bits of an integer code. Empty: any.
    symmetric : bool, optional
        Whether codes have no stored zero points. None: either.
    groups : tuple of int and str
        Units that share a scale: columns, ``row``, ``tensor``, or ``128x128`` for a block. Empty: any.
    scales : tuple of str
        Element types of the scales. Empty: any.
    activations : bool, optional
        Whether the folder states how inputs of layers are quantized. None: either.
    whole_groups : bool
        Whether groups and flat blocks must divide the columns, and blocks of two sizes the rows and columns.
    kl : float
        Limit of KL(decoded values || program) in nats per token if it is above 1e-3; ``note`` explains it. 0: 1e-3.
    """

    name: str
    containers: tuple[str, ...]
    storage: Storage
    outcome: Outcome
    note: str = ""
    types: tuple[str, ...] = ()
    packings: tuple[str, ...] = ()
    bits: tuple[int, ...] = ()
    symmetric: bool | None = None
    groups: tuple[int | str, ...] = ()
    scales: tuple[str, ...] = ()
    activations: bool | None = None
    whole_groups: bool = False
    kl: float = 0.0


@preload
class Constraints(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rules that involve several tensors, or tensors and other files.

    Parameters
    ----------
    merged_scheme : bool
        q, k, v and gate, up are multiplied as one matrix, so they need one scheme.
    merged_blocks : bool
        The rows of a block must divide the rows of each member of a merged matrix.
    merged_second_scale : bool
        Members of a merged matrix need equal second scales (NVFP4).
    dense_embeddings : bool
        Embeddings and heads may not be packed.
    complete : bool
        The folder must contain every tensor that ``config.json`` implies.
    known_tensors : bool
        A file may contain only tensors that llama.cpp has for the file's architecture, by name.
    derived_heads : bool
        Heads must have as many columns as the embedding has, divided by the number of heads.
    vocabulary : {"any", "fits", "equal"}
        The number of tokens must be at most the rows of the embedding (``fits``), or equal (``equal``). ``equal``
        applies to files that contain the tokens; a folder may have fewer tokens.
    """

    merged_scheme: bool = False
    merged_blocks: bool = False
    merged_second_scale: bool = False
    dense_embeddings: bool = False
    complete: bool = False
    known_tensors: bool = False
    derived_heads: bool = False
    vocabulary: Literal["any", "fits", "equal"] = "any"


@preload
class Requirement(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Keys and files that an artifact needs besides its tensors.

    ``metadata`` are keys of the file, ``config`` keys of ``config.json``; ``{key}`` in a name is replaced by the value
    of that key. ``files`` must all be in the folder, ``any_files`` at least one. The requirement does not apply if
    ``unless`` lists the metadata value of one of its keys.
    """

    containers: tuple[str, ...]
    metadata: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    any_files: tuple[str, ...] = ()
    unless: dict[str, tuple[str, ...]] = {}
    why: str = ""


@preload
class Preset(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The default recipe for a bit width, in the container that it is written to.

    ``calibrated`` is the recipe that uses statistics, or empty.
    """

    bits: int
    container: str
    plain: str = ""
    calibrated: str = ""


@preload
class Installation(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The programs and packages that run a result, and the extras of Ingot that write it.

    One of ``programs``, found by the shell, or one of the Python ``packages`` is enough. ``extras`` are the extras of
    Ingot that are needed to write for the program. ``calibration`` are the extras that are needed to calibrate a model
    first. ``hint`` says how to install the program.
    """

    programs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    calibration: tuple[str, ...] = ()
    hint: str = ""


@preload
class RuntimeProfile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A runtime profile: statements about one version of a program.

    ``version`` is empty if the profile is not about one version. ``machine`` names the machine on which the program
    ran, or is empty. ``commands`` are shell lines that run a result, by container; the lines under ``default`` are for
    all other containers. ``default`` is the bit width without ``--bits``. The first of ``containers`` is the default.
    ``modelfile`` states whether the program reads a GGUF file through a Modelfile, which is then written with the
    result.
    """

    name: str
    title: str
    date: str
    summary: str
    containers: tuple[str, ...]
    commands: dict[str, tuple[str, ...]]
    version: str = ""
    package: str = ""
    machine: str = ""
    aliases: tuple[str, ...] = ()
    default: int = 4
    notes: tuple[str, ...] = ()
    modelfile: bool = False
    installation: Installation = Installation()
    constraints: Constraints = Constraints()
    schemes: tuple[Scheme, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    presets: tuple[Preset, ...] = ()

    @property
    def label(self) -> str:
        """The program and its version, for messages."""
        return f"{self.title} {self.version}".rstrip()


def parse_profile(text: str, location: str) -> RuntimeProfile:
    """Parse a profile from TOML text.

    Raises ``UsageError`` ``runtime.profile`` if the text is no TOML, has an unknown key or a value of the wrong type,
    or contradicts itself. ``location`` is named in messages.
    """
    try:
        profile = msgspec.convert(tomllib.loads(text), RuntimeProfile)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise _profile_error(str(error), location) from error
    for problem in _contradictions(profile):
        raise _profile_error(problem, location)
    return profile


def _contradictions(profile: RuntimeProfile) -> Iterator[str]:
    if not profile.containers or not profile.commands:
        yield "expected at least one container and one command"
    named = [container for scheme in profile.schemes for container in scheme.containers]
    named += [container for requirement in profile.requirements for container in requirement.containers]
    named += [preset.container for preset in profile.presets]
    named += [container for container in profile.commands if container not in (DEFAULT, PROJECTOR)]
    for container in dict.fromkeys(named):
        if container not in profile.containers:
            yield f"container {container!r} is not among the profile's containers"
    bits = [preset.bits for preset in profile.presets]
    if len(set(bits)) < len(bits):
        yield "expected one preset for each bit width"
    if bits and profile.default not in bits:
        yield f"expected a preset for the default of {profile.default} bits"
    for preset in profile.presets:
        if not (preset.plain or preset.calibrated):
            yield f"expected a recipe for {preset.bits} bits"
    for command in (line for lines in profile.commands.values() for line in lines):
        yield from _unknown_placeholders(command)


def _unknown_placeholders(command: str) -> Iterator[str]:
    try:
        names = [name for _, name, _, _ in Formatter().parse(command) if name is not None]
    except ValueError as error:
        yield f"command {command!r}: {error}"
        return
    for name in names:
        if name not in PLACEHOLDERS:
            yield f"command {command!r}: expected {{path}}, {{file}}, {{name}} or {{modelfile}}, found {{{name}}}"


def _profile_error(problem: str, location: str) -> UsageError:
    message = f"not a runtime profile: {' '.join(problem.split())}; spec/runtimes.md lists the keys"
    return UsageError(message, rule="runtime.profile", where=location)
