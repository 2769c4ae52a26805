"""Where a model comes from: the checkpoint that a path stands for, and the folder with its config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from ingot.artifacts.adapter_files import adapter_in
from ingot.artifacts.companions import holds_a_model
from ingot.artifacts.open import detect, find, open_there
from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import IngotError, UnsupportedError
from ingot.model.account import LOST, list_by_reason, lost_tensors
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.model.store import Store
from ingot.naming.config import CONFIG
from ingot.runtime.loading.preparers import LoadRequest, preparer_for
from ingot.stores.location import AnyPath, Location
from ingot.translate.unknown import RULE as UNKNOWN


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened checkpoint with the folder that contains its companions, and the reason for its choice.

    The checkpoint was opened from ``location``; messages call the model ``name``. The folder may be a temporary one
    that is removed when the checkpoint is closed. ``tier`` names the stored form that was chosen (``as stored`` where a
    path has only one), ``why`` says in words what decided.
    """

    checkpoint: Checkpoint = field(repr=False)
    location: Location
    folder: Store
    name: str
    tier: str
    why: str


def resolve(
    path: AnyPath,
    runtime: Literal["torch", "mlx"] = "torch",
    keep_packed: bool = False,
    cache: bool = True,
    *,
    verify: bool = True,
    dtype: Any = None,
    model_dir: AnyPath | None = None,
) -> ModelSource:
    """Open the checkpoint that is best loaded for ``path``.

    Parameters
    ----------
    path : path
        Anything that ``ingot.open`` takes.
    runtime : {"torch", "mlx"}
        Who will compute.
    keep_packed : bool
        Whether quantized weights are wanted as they are stored.
    cache : bool
        Whether other stored forms beside the path may be used and made.
    verify : bool
        As for ``ingot.open``.
    dtype : optional
        Element type that the weights are wanted in; by default the model's own.
    model_dir : path, optional
        The folder of config.json and the tokenizer, where it is another than that of ``path``.

    Raises
    ------
    UnsupportedError
        ``model.adapter``: an adapter.
    IngotError
        As ``ingot.open``.
    """
    location = Location.parse(path)
    store, name = find(location)
    other = None if model_dir is None else Location.parse(model_dir)
    folder = store if other is None else model_folder(other)
    preparer = None if name else preparer_for(store)
    if preparer is not None:
        form = preparer.prepare(location, LoadRequest(runtime, keep_packed, cache, dtype, other))
        opened = open_checkpoint(form.location, verify=verify)
        return ModelSource(opened, Location.parse(form.location), folder, folder.location, form.tier, form.why)
    checkpoint, why = open_there(store, name, verify=verify), f"{location} is the only form there is"
    adapter = adapter_in(checkpoint, location)
    if adapter is not None:
        checkpoint.close()
        raise adapter.refusal(checkpoint.location)
    if not holds_a_model(checkpoint.format):
        return ModelSource(checkpoint, location, folder, folder.location, "as stored", why)
    try:
        translated = _translated(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    if translated is None:
        return ModelSource(checkpoint, location, folder, folder.location, "as stored", why)
    notes = "; ".join((why, *translated.notes))
    if model_dir is not None:
        return ModelSource(translated.checkpoint, location, folder, folder.location, "as stored", notes)
    files = _files(translated.checkpoint) or folder
    return ModelSource(translated.checkpoint, location, files, location.display, "as stored", notes)


def _translated(checkpoint: Checkpoint) -> View | None:
    """Return a GGUF file's checkpoint as transformers has it; None if its family is not known.

    Raises ``UnsupportedError`` ``account.lost``: transformers has no place for some of its tensors.
    """
    from ingot.translate.view import to_model  # other weights are there sooner without

    try:
        translated = to_model(checkpoint, no_tokenizer=True)
    except UnsupportedError as error:
        if error.rule == UNKNOWN:
            return None
        raise
    lost = lost_tensors(translated.checkpoint.omissions)
    if lost:
        raise UnsupportedError(
            f"the loaded model would lack tensors of the file: {list_by_reason(lost)}",
            rule=LOST,
            where=checkpoint.location,
        )
    return translated


def model_folder(location: Location) -> Store:
    """Return the folder to search for config.json and the tokenizer: the location itself, or the folder of the file."""
    return location.find_model()[0]


@contextmanager
def companions_folder(location: Location) -> Iterator[Store]:
    """Give the folder with the config and the tokenizer of a model: as ``model_folder``, or files that the weights' own
    metadata hold, for as long as the context lasts."""
    store, name = location.find_model()
    try:
        format, _ = detect(store, name)
        inside = holds_a_model(format.name)
    except IngotError:  # no weights there: just a tokenizer
        inside = False
    if not inside:
        yield store
        return
    from ingot.translate.view import to_model

    with open_there(store, name) as checkpoint:
        try:
            translated = to_model(checkpoint, no_tokenizer=True)
        except UnsupportedError:  # of another family: its folder may have the files
            yield store
            return
        with translated.checkpoint as view:
            yield _files(view) or store


def _files(view: Checkpoint) -> Store | None:
    return model_folder(Location.parse(view.companions[CONFIG])) if CONFIG in view.companions else None
