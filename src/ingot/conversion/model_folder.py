"""The model folder that contains a single weight file; some targets need its ``config.json`` and tokenizer."""

from __future__ import annotations

from dataclasses import replace

from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.destination import Destination
from ingot.artifacts.open import Source, open_source_in_store
from ingot.errors import IngotError, UsageError
from ingot.formats.detect import detect_folder, listing
from ingot.formats.packed_folders.mlx import MlxFormat
from ingot.naming.config import CONFIG

RULE = "convert.part"


def needs_family(target: Destination) -> bool:
    """Return whether the target's runtime opens only certain model families, which it recognizes by ``config.json``."""
    return has_model_metadata(target.format.name) or (target.format.name == MlxFormat.name and target.directory)


def with_model_folder(source: Source, target: Destination, max_decompressed: int | str | None) -> tuple[Source, str]:
    """Return the source with the files of its folder, and a note; the source itself if the target needs no folder.

    A single weight file is opened as its folder if the folder has a ``config.json`` and no other weights. The source
    that was passed is then closed.

    Raises
    ------
    UsageError
        ``convert.part``: the folder has other weight files.
    IngotError
        Errors of opening the folder.
    """
    if source.is_folder or has_model_metadata(source.format.name) or not needs_family(target):
        return source, ""
    if "general.architecture" in source.catalog.metadata or not _has_config(source):
        return source, ""
    try:
        _, entry = detect_folder(listing(source.store), source.store)
    except IngotError as error:
        raise _partial_source(source, error.message) from error
    if entry != source.name:
        raise _partial_source(source, f"its weights are {entry}")
    folder = open_source_in_store(source.store, "", verify=source.verify, max_decompressed=max_decompressed)
    source.close()
    return replace(folder, location=source.location), f"{CONFIG} and the tokenizer beside {source.name} are used"


def _has_config(source: Source) -> bool:
    try:
        return source.store.exists(CONFIG)
    except IngotError:  # a store that cannot list folders
        return False


def _partial_source(source: Source, reason: str) -> UsageError:
    return UsageError(
        f"the file is not all of the weights in its folder ({reason}), so that its {CONFIG} may describe another "
        "model; convert the folder, or pass --keep-names to write the tensors under their present names",
        rule=RULE,
        where=source.location,
    )
