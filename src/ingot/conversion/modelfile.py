"""Writing of the Modelfile of a GGUF file, for programs whose profile requires it."""

from __future__ import annotations

from pathlib import PurePosixPath

from ingot.artifacts.modelfile import MODELFILE, modelfile_name, modelfile_text
from ingot.artifacts.open import find, open_source
from ingot.errors import UnsupportedError, UsageError
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config
from ingot.runtimes.profile import RuntimeProfile
from ingot.stores.location import Location
from ingot.translate.companions import GENERATION

_RULE = "model.config"


def require_free(profile: RuntimeProfile, out: Location, *, overwrite: bool) -> None:
    """Raise ``UsageError`` ``target.exists`` if a Modelfile exists next to the planned weight file."""
    name = PurePosixPath(out.display).name
    if not profile.modelfile or overwrite or not name.lower().endswith(".gguf"):
        return
    if modelfile_name(name) in (out.siblings() or ()):
        raise UsageError(
            "the Modelfile beside the target exists: choose another target, or pass --overwrite (overwrite=True)",
            rule="target.exists",
            where=out.parent.child(modelfile_name(name)).display,
        )


def write_modelfile(profile: RuntimeProfile, path: str, model: Location) -> None:
    """Write the Modelfile of a result if the program reads one; ``model`` is the source of the conversion.

    Raises ``UnsupportedError`` ``runtime.refused``: the result has several files, and a Modelfile can only name one.
    """
    if not profile.modelfile:
        return
    location = Location.parse(path)
    source = open_source(location)
    metadata = source.catalog.metadata
    count = len(source.catalog.sources)
    name = PurePosixPath(source.entry).name
    is_folder = source.is_folder
    source.close()
    if count > 1:
        raise UnsupportedError(
            f"{path} was written in {count} files, and a Modelfile of {profile.title} names one: do not divide it",
            rule="runtime.refused",
        )
    target = location.child(MODELFILE) if is_folder else location.parent.child(modelfile_name(name))
    target.write(modelfile_text(name, metadata, _end_ids(model)).encode())


def _end_ids(model: Location) -> list[int]:
    """Return the ids of the end tokens in a model's folder; empty for a single file."""
    store, name = find(model)
    for config in () if name else (GENERATION, CONFIG):
        if store.exists(config):
            data = store.read(config, MAX_CONFIG, _RULE)
            end_ids = parse_config(data, _RULE, store.location_of(config)).get("eos_token_id")
            ids = [item for item in (end_ids if isinstance(end_ids, list) else [end_ids]) if type(item) is int]
            if ids:
                return ids
    return []
