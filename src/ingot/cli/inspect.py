"""The command ``ingot inspect``."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from ingot.cli.declare import declare
from ingot.cli.output import Json, progress_bar, render
from ingot.core.registry import Instances
from ingot.errors import IngotError
from ingot.inspect.options import InspectOptions
from ingot.model.store import Store
from ingot.stores.location import AnyPath, Location

_HEAD = 16

EPILOG = (
    "Examples:\n\n"
    "  ingot inspect model.zt\n\n"
    "  ingot inspect ./Llama-3-8B --by role\n\n"
    "  ingot inspect model.zt --content-id\n\n"
    "  ingot inspect model.zt --id\n\n"
    "  ingot inspect model.zt --tensor lm_head.weight --json\n\n"
    "  ingot inspect model.squizd --no-tensors"
)


class FileInspector(Protocol):
    """A plugin of ``ingot inspect`` for files that are no checkpoints, or contain more than tensors."""

    def recognizes(self, head: bytes) -> bool:
        """Return whether this inspector handles a file whose first 16 bytes, or fewer, are ``head``."""
        ...

    def show(self, path: AnyPath, details: bool, json: bool) -> None:
        """Print a description of the file, as JSON if ``json``; ``details`` is the option ``--tensors``."""
        ...


INSPECTORS: Instances[FileInspector] = Instances("inspector", group="ingot.inspectors", contract=FileInspector)


@declare("inspect", EPILOG)
def command(options: InspectOptions, json: Json = False) -> None:
    """Show the contents of a checkpoint: tensors, sizes, codecs, totals. Only headers are read.

    A .squizd also shows its features, and which stack would run it on this machine and on named platforms, with
    reasons. A kernel unit (`ingot kernel`) shows sections and records; a compiled program (.hwx) shows sections,
    registers and kernels.
    """
    from ingot.artifacts.open import find
    from ingot.inspect.overview import describe

    store, name = find(Location.parse(options.path), "pread" if options.content_id else "auto")
    inspector = _inspector_for(store, name)
    if inspector is not None:
        inspector.show(options.path, options.tensors, json)
        return
    with progress_bar("hashing", quiet=json or not options.content_id) as progress:
        report = describe(replace(options, progress=progress), store, name)
    render(report, json=json)


def _inspector_for(store: Store, name: str) -> FileInspector | None:
    """Return the inspector of a file; None for checkpoints and folders."""
    try:
        head = store.head(name, _HEAD) if name else b""
    except IngotError:  # opening the checkpoint raises the precise error
        return None
    return next((item for _, item in INSPECTORS.available() if item.recognizes(head)), None) if head else None
