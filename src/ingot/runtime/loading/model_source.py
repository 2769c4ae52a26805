"""Where a model comes from: the checkpoint that a path stands for, and the folder with its config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
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
from ingot.stores.table import locate_model, location_of
from ingot.translate.unknown import RULE as UNKNOWN

AnyPath = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened checkpoint with the folder that its companions lie in, and why it was taken.

    ``path`` is what the checkpoint was opened by, ``name`` what the model is called by. The folder may be one that goes
    when the checkpoint is closed. ``tier`` names the stored form that was chosen (``as stored`` where a
    path has only one), ``why`` says in words what decided.
    """

    checkpoint: Checkpoint = field(repr=False)
    path: AnyPath
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
    store, name = find(path)
    folder = store if model_dir is None else model_folder(model_dir)
    preparer = None if name else preparer_for(store)
    if preparer is not None:
        form = preparer.prepare(path, LoadRequest(runtime, keep_packed, cache, dtype, model_dir))
        opened = open_checkpoint(form.location, verify=verify)
        return ModelSource(opened, form.location, folder, folder.location, form.tier, form.why)
    checkpoint, why = open_there(store, name, verify=verify), f"{location_of(path)} is the only form there is"
    adapter = adapter_in(checkpoint, path)
    if adapter is not None:
        checkpoint.close()
        raise adapter.refusal(checkpoint.location)
    if not holds_a_model(checkpoint.format):
        return ModelSource(checkpoint, path, folder, folder.location, "as stored", why)
    try:
        translated = _translated(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    if translated is None:
        return ModelSource(checkpoint, path, folder, folder.location, "as stored", why)
    notes = "; ".join((why, *translated.notes))
    if model_dir is not None:
        return ModelSource(translated.checkpoint, path, folder, folder.location, "as stored", notes)
    files = _files(translated.checkpoint) or folder
    return ModelSource(translated.checkpoint, path, files, location_of(path), "as stored", notes)


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


def model_folder(path: AnyPath) -> Store:
    """Return the folder that config.json and the tokenizer are looked for in: the path itself, or the file's folder."""
    return locate_model(path)[0]


@contextmanager
def companions_folder(path: AnyPath) -> Iterator[Store]:
    """Give the folder with the config and the tokenizer of a model: as ``model_folder``, or files that the weights' own
    metadata hold, for as long as the context lasts."""
    store, name = locate_model(path)
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
    return model_folder(view.companions[CONFIG]) if CONFIG in view.companions else None
