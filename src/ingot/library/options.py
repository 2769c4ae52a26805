"""Options of the operations on libraries.

The command line imports this module at its start, so its imports are light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import DROP, OVERWRITE, PROGRESS
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback

_LIBRARY = about("The library: a folder, or an address such as s3://bucket/library.", argument=True, metavar="LIBRARY")
_EXISTING = source("The library: a folder, or an address such as s3://bucket/library.", metavar="LIBRARY")
_NAME = about("The artifact's name in the library; `ingot store ls` lists them.", argument=True)
_WAIT = about("Seconds to wait for other users of the library.", metavar="SECONDS", minimum=0)
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class AddOptions:
    """Options of an addition: the source and the library."""

    library: AnyPath = field(metadata=_LIBRARY)
    src: AnyPath = field(metadata=source("Folder with all of its content, or file, to add; a path or address."))
    name: str | None = field(
        default=None, metadata=about("Name in the library, such as org/model; default: the last name of SRC.", "--name")
    )
    _: KW_ONLY
    base: str = field(
        default=AUTO,
        metadata=about(
            "The artifact that tensors may be stored as differences to; auto: the nearest, none: no differences. For "
            "an adapter: its base.",
            metavar="NAME",
        ),
    )
    overwrite: bool = field(default=False, metadata=about("Replace another artifact of this name."))
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class GetOptions:
    """Options of a retrieval: the artifact and the destination."""

    library: AnyPath = field(metadata=_EXISTING)
    name: str = field(metadata=_NAME)
    dst: AnyPath = field(
        metadata=about("File or folder to write; a path or address.", *OUTPUT, aliases=OUT, argument=True)
    )
    _: KW_ONLY
    format: str | None = field(
        default=None,
        metadata=about("Convert into this format; default: the files that were added, bit for bit."),
    )
    merge: bool = field(default=False, metadata=about("Write the base of an adapter with the adapter merged into it."))
    drop: Sequence[str] = field(default=(), metadata=DROP)
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of listing the artifacts of a library."""

    library: AnyPath = field(metadata=_EXISTING)


@dataclass(frozen=True, slots=True)
class RemoveOptions:
    """Options of removing an artifact from a library."""

    library: AnyPath = field(metadata=_EXISTING)
    name: str = field(metadata=_NAME)
    _: KW_ONLY
    force: bool = field(default=False, metadata=about("Remove the artifact even if adapters in the library need it."))


@dataclass(frozen=True, slots=True)
class CollectOptions:
    """Options of deleting objects that no artifact needs."""

    library: AnyPath = field(metadata=_EXISTING)
    _: KW_ONLY
    dry_run: bool = field(default=False, metadata=about("Show what would be removed, and remove nothing."))
    wait: int = field(default=10, metadata=_WAIT)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Options of checking a library's objects and manifests."""

    library: AnyPath = field(metadata=_EXISTING)
    _: KW_ONLY
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
