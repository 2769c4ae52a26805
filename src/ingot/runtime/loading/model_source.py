"""The checkpoint that a model path stands for, and the folder with its config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal

from ingot.artifacts.adapter_files import adapter_in
from ingot.artifacts.open import detect, find, open_there
from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import IngotError, UnsupportedError
from ingot.model.account import LOST, list_by_reason
from ingot.model.checkpoint import Checkpoint
from ingot.model.store import Store
from ingot.naming.config import CONFIG
from ingot.runtime.loading.preparers import LoadRequest, preparer_for
from ingot.stores.table import locate_model, location_of
from ingot.translate.translated import Translated, holds_a_model
from ingot.translate.unknown import RULE as UNKNOWN

AnyPath = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened checkpoint, the folder of its companion files, and the reason for choosing this checkpoint.

    ``path`` is the path that was opened, ``name`` the name of the model. The folder may be temporary: it is then
    deleted when the checkpoint is closed. ``tier`` names the stored variant that was chosen; it is ``as stored`` if the
    path has only one. ``why`` is the reason as text.
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
    """Open the checkpoint for ``path`` that loads best.

    Parameters
    ----------
    path : path
        Any path that ``ingot.open`` accepts.
    runtime : {"torch", "mlx"}
        The runtime that will compute.
    keep_packed : bool
        Whether quantized weights shall stay as they are stored.
    cache : bool
        Whether other stored variants next to the path may be used and created.
    verify : bool
        Whether to verify digests, as in ``ingot.open``.
    dtype : optional
        Element type of the loaded weights; by default the model's dtype.
    model_dir : path, optional
        The folder of config.json and the tokenizer, if it is not the folder of ``path``.

    Raises
    ------
    UnsupportedError
        ``model.adapter``: an adapter.
    IngotError
        Any error of ``ingot.open``.
    """
    store, name = find(path)
    folder = store if model_dir is None else model_folder(model_dir)
    preparer = None if name else preparer_for(store)
    if preparer is not None:
        prepared = preparer.prepare(path, LoadRequest(runtime, keep_packed, cache, dtype, model_dir))
        opened = open_checkpoint(prepared.location, verify=verify)
        return ModelSource(opened, prepared.location, folder, folder.location, prepared.tier, prepared.why)
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
    explanation = "; ".join(filter(None, (why, translated.done, *translated.notes)))
    if model_dir is not None:
        return ModelSource(translated.checkpoint, path, folder, folder.location, "as stored", explanation)
    files = _files(translated.checkpoint) or folder
    return ModelSource(translated.checkpoint, path, files, location_of(path), "as stored", explanation)


def _translated(checkpoint: Checkpoint) -> Translated | None:
    """Return a GGUF checkpoint with the names of transformers; None if Ingot does not support its family.

    Raises ``UnsupportedError`` ``account.lost`` if transformers has no parameter for some of its tensors.
    """
    from ingot.translate.view import to_model  # imported here because other formats load faster without it

    try:
        translated = to_model(checkpoint, no_tokenizer=True)
    except UnsupportedError as error:
        if error.rule == UNKNOWN:
            return None
        raise
    if translated.lost:
        raise UnsupportedError(
            f"the loaded model would lack tensors of the file: {list_by_reason(translated.lost)}",
            rule=LOST,
            where=checkpoint.location,
        )
    return translated


def model_folder(path: AnyPath) -> Store:
    """Return the folder of config.json and the tokenizer: the path itself, or the folder of the file."""
    return locate_model(path)[0]


@contextmanager
def companions_folder(path: AnyPath) -> Iterator[Store]:
    """Yield the folder with the config and the tokenizer of a model, while the context lasts.

    It is ``model_folder(path)``, or temporary files written from the metadata of the weights.
    """
    store, name = locate_model(path)
    try:
        format, _ = detect(store, name)
        inside = holds_a_model(format.name)
    except IngotError:  # the folder has a tokenizer but no weights
        inside = False
    if not inside:
        yield store
        return
    from ingot.translate.view import to_model

    with open_there(store, name) as checkpoint:
        try:
            translated = to_model(checkpoint, no_tokenizer=True)
        except UnsupportedError:  # the family is not supported, but the folder may have the files
            yield store
            return
        with translated.checkpoint as view:
            yield _files(view) or store


def _files(view: Checkpoint) -> Store | None:
    return model_folder(view.companions[CONFIG]) if CONFIG in view.companions else None
