"""Destinations of results: a single file or a folder with companions, and its format."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Literal

from ingot.artifacts.replaceable import require_ours
from ingot.core.about import About
from ingot.core.files.atomic import Staging
from ingot.core.options import about
from ingot.core.registry import did_you_mean
from ingot.errors import ResourceError, UsageError
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.model.store import OverwritePolicy
from ingot.stores.location import Location

Digest = Literal["crc32c", "sha256"]

LIMITS = "Limits and checks"

MAX_RAM = about("Ceiling of anonymous memory, such as 2GiB.", size=True)
DIGEST = about(
    "Digest written per part where the format has digests: crc32c, sha256 or none.",
    metavar="NAME",
    panel=LIMITS,
)
MAX_DECOMPRESSED = about(
    "The most bytes that one compressed part of a file may become, such as 2GiB; default: INGOT_MAX_DECOMPRESSED.",
    metavar="SIZE",
    panel=LIMITS,
    size=True,
)
CPU = "cpu"
DEVICE = about("Compute on this device of torch: cpu, cuda, cuda:N, mps or xpu.", metavar="DEVICE")
THREADS = about("Threads; default: all processors.", metavar="N", minimum=1, panel=LIMITS)
OVERWRITE = about("Replace a file, or a folder that holds a checkpoint and nothing else.")
PROGRESS = about(
    "Called with a ProgressEvent: bytes done, bytes in all, what is being worked on.",
    command=False,
)
IO = about(
    "How sources are read: pread (safe from files that shrink meanwhile), mmap or auto.",
    command=False,
)
DROP = about(
    "Leave out tensors of these names (a glob, or re:REGEX), and accept it if they are lost. Any number.",
    "--drop",
    metavar="PATTERN",
    panel=LIMITS,
)
PART = about(
    "Into GGUF, convert one part of a model of several: text, or mmproj, the vision model with its projector for "
    "llama.cpp's --mmproj. Tensors of the other part are left out.",
    "--part",
    panel="The target",
)
RESUME = about("Continue a killed run of the same command; keep what is finished if interrupted.")

_CLUSTER = "Many machines"
_ENGINES = ("local", "processes", "ray")


def about_engine(more: str) -> Mapping[str, About]:
    """Return the metadata of an operation's option ``engine``; ``more`` is the end of its help text."""
    return about(
        "The workers: local (this process), processes (one for each processor of this machine) or ray (a cluster with "
        f"access to the same files); {more}",
        panel=_CLUSTER,
    )


ADDRESS = about(
    "Address of the Ray cluster; default: RAY_ADDRESS, or the cluster of ray start. Without a cluster, Ray runs here.",
    panel=_CLUSTER,
)


def is_distributed(engine: str, address: str | None) -> bool:
    """Return whether worker processes do the work: true for every engine but ``local``.

    Raises ``UsageError`` ``cluster.engine`` if the engine is unknown, or if an address is set for another engine than
    ``ray``.
    """
    if engine not in _ENGINES:
        raise UsageError(f"expected the engine local, processes or ray, found {engine[:40]!r}", rule="cluster.engine")
    if address is not None and engine != "ray":
        raise UsageError(f"expected an address for the engine ray alone, found {engine}", rule="cluster.engine")
    return engine != "local"


DEFAULT_FORMAT = "zt"
STEM = "model"


@dataclass(frozen=True, slots=True)
class Destination:
    """A file or folder that an operation writes.

    Attributes
    ----------
    location : Location
    directory : bool
        Whether the result is a folder. Folders of some formats have the suffix of the format.
    format : Format
    name : str
        The weight file to create.
    """

    location: Location
    directory: bool
    format: Format
    name: str

    @property
    def url(self) -> str:
        """The address of the location, also for a path."""
        return self.location.url

    @property
    def display(self) -> str:
        """The location as messages and reports show it."""
        return self.location.display

    @property
    def is_local(self) -> bool:
        """Whether the location is a path on this machine."""
        return self.url.startswith("file:")


def destination(location: Location, format: str | None = None, container: int | str | None = None) -> Destination:
    """Return the destination for a location: file or folder, and the format, according to the suffix.

    The suffix of a format means a single file of that format. No suffix or a slash at the end means a folder.
    ``container`` is the version of the format's container to write.

    Raises
    ------
    UsageError
        ``save.suffix``: ``format`` is unknown or contradicts the suffix, the path is an existing file without a
        format's suffix, or the suffix belongs to another program. ``target.exists``: a file exists at the path of a
        package, which is a folder. ``convert.container``: the format has no such version of its container.
    """
    target = _destination(location, format)
    return target if container is None else replace(target, format=_in_container(target.format, str(container)))


def _in_container(format: Format, version: str) -> Format:
    versions = format.traits.containers
    if version not in versions:
        raise UsageError(
            f"expected a version of {format.name}'s container that is written here "
            f"({' or '.join(versions) or 'it has one only'}), found {version[:40]!r}",
            rule="convert.container",
        )
    return FORMATS[versions[version]]


def _destination(location: Location, format: str | None) -> Destination:
    existing = _existing(location)
    text = location.display
    path = PurePosixPath(text)
    by_suffix = format_of_suffix(path.name)
    chosen = FORMATS.get_or_refuse(format) if format is not None else by_suffix
    is_package = by_suffix is not None and by_suffix.traits.folder
    is_folder = existing == "folder" or location.ends_in_slash
    if (is_folder or by_suffix is None or is_package) and not (is_package and chosen is not by_suffix):
        if is_package and existing == "file":
            raise UsageError(
                "expected a folder, which such a package is, or nothing; found a file of this name: remove it or "
                "choose another destination",
                rule="target.exists",
                where=text,
            )
        files_too = chosen is None or bool(chosen.suffixes)
        if existing == "file" or (files_too and not is_folder and not is_package and _foreign_suffix(path.name)):
            raise _unknown_suffix(text, path.suffix)
        chosen = chosen or FORMATS[DEFAULT_FORMAT]
        return Destination(location, True, chosen, chosen.file_name(STEM))
    if by_suffix is not None and chosen is not None and not path.name.lower().endswith(chosen.suffixes):
        raise UsageError(
            f"expected a file name that fits format {chosen.name} ({', '.join(chosen.suffixes)})",
            rule="save.suffix",
            where=text,
        )
    assert chosen is not None
    return Destination(location, False, chosen, path.name)


def stage(target: Destination, *, overwrite: bool, resume: bool = False, names: Container[str] = ()) -> Staging:
    """Return the staging folder of a result, which is published at ``target`` when it is complete.

    An existing target is replaced only with ``overwrite``. A folder is replaced only if it contains nothing but a
    checkpoint and files called ``names`` (``artifacts.replaceable``). Raises the errors of
    ``core.files.atomic.Staging`` and ``require_ours``.
    """
    ours = partial(require_ours, also=names)
    return target.location.stage(OverwritePolicy(overwrite, ours), directory=target.directory, resume=resume)


def _existing(location: Location) -> str | None:
    """Return ``"file"`` or ``"folder"``, or None if the location does not exist or cannot be examined."""
    try:
        return "file" if location.find()[1] else "folder"
    except UsageError as error:
        if error.rule in ("store.missing", "store.name-too-long"):
            return None
        raise
    except ResourceError:
        return None


def _foreign_suffix(name: str) -> bool:
    """Return whether a name ends in text that looks like a suffix, such as ``.tflite``.

    A suffix begins with a letter: ``.1-8B`` of ``Llama-3.1-8B`` is none.
    """
    return re.fullmatch(r"\.[A-Za-z][A-Za-z0-9_]{0,14}", PurePosixPath(name).suffix) is not None


def _unknown_suffix(location: str, suffix: str) -> UsageError:
    written = (format for _, format in FORMATS.available() if not format.traits.last_resort)
    suffixes = list(dict.fromkeys(suffix for format in written for suffix in format.suffixes))
    near = did_you_mean(suffix.lower(), suffixes) if suffix else ""
    return UsageError(
        f"expected a file name ending in {', '.join(suffixes)}{near}, or a folder, whose name may end in a slash; "
        f"found {suffix or 'a file without suffix'}",
        rule="save.suffix",
        where=location,
    )


def format_of_suffix(name: str) -> Format | None:
    """Return the format whose suffix ``name`` has; None if there is none."""
    for _, format in FORMATS.available():
        if name.lower().endswith(format.suffixes) and not format.traits.last_resort:
            return format
    return None
