"""Options of pushing and pulling. The command line imports this module at startup, so its imports are fast."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import PROGRESS, RESUME
from ingot.core.options import about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback


@dataclass(frozen=True, slots=True)
class PushOptions:
    """Options of pushing: the model, and the address to which it is pushed."""

    src: AnyPath = field(metadata=source("Folder or file to push; a path or address.", metavar="MODEL"))
    dst: str = field(
        metadata=about(
            "oci://HOST/NAME:TAG, or hf://ORG/NAME with @REVISION if it is not main.", argument=True, metavar="ADDRESS"
        )
    )
    _: KW_ONLY
    base: str | None = field(
        default=None,
        metadata=about("Hub id or address of the original model, for the description.", metavar="MODEL"),
    )
    card: bool = field(
        default=False, metadata=about("Push a new model card in place of the README.md that the model has.")
    )
    overwrite: bool = field(default=False, metadata=about("Replace the model that has this address now."))
    dry_run: bool = field(default=False, metadata=about("Show what would be pushed; use no network."))
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Options of pulling: the address and the folder."""

    src: str = field(metadata=about("oci://HOST/NAME:TAG, or a file of it.", argument=True, metavar="ADDRESS"))
    out: AnyPath = field(metadata=about("Folder for the files.", "--out", "-o", metavar="FOLDER"))
    _: KW_ONLY
    overwrite: bool = field(default=False, metadata=about("Replace a folder that holds a checkpoint and nothing else."))
    resume: bool = field(default=False, metadata=RESUME)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
