"""Determine the checkpoint to load for a model path, and the folder with its config and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ingot.artifacts.adapter_files import adapter_in
from ingot.artifacts.companions import companion_config, has_model_metadata
from ingot.artifacts.open import detect, find, open_in_store
from ingot.artifacts.open import open as open_checkpoint
from ingot.errors import IngotError, UnsupportedError
from ingot.model.account import LOST_RULE, list_by_reason, lost_tensors
from ingot.model.checkpoint import Checkpoint
from ingot.model.reading.view import View
from ingot.model.store import Store
from ingot.naming.config import CONFIG
from ingot.runtime.loading.preparers import LoadRequest, preparer_for
from ingot.stores.location import AnyPath, Location
from ingot.translate.families import UNSUPPORTED


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The checkpoint to load, the folder of its companion files, and the reason for choosing this stored variant.

    The checkpoint was opened from ``location``; ``name`` is the name of the model. The folder may be temporary: it is
    then deleted when the checkpoint is closed. ``tier`` names the stored variant that was chosen; it is ``as stored``
    if the path has only one. ``why`` is the reason as text.
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
    """Open the checkpoint at ``path``, in the stored variant that suits the request best.

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
    location = Location.parse(path)
    store, name = find(location)
    model_location = None if model_dir is None else Location.parse(model_dir)
    folder = store if model_location is None else model_folder(model_location)
    preparer = None if name else preparer_for(store)
    if preparer is not None:
        prepared = preparer.prepare(location, LoadRequest(runtime, keep_packed, cache, dtype, model_location))
        opened = open_checkpoint(prepared.location, verify=verify)
        prepared_at = Location.parse(prepared.location)
        return ModelSource(opened, prepared_at, folder, folder.location, prepared.tier, prepared.why)
    checkpoint = open_in_store(store, name, verify=verify)
    why = f"{location} is the only stored variant"
    adapter = adapter_in(checkpoint, location)
    if adapter is not None:
        checkpoint.close()
        raise adapter.refusal(checkpoint.location)
    if not has_model_metadata(checkpoint.format):
        if runtime == "torch":
            checkpoint = _from_mlx_folder(checkpoint)
        return ModelSource(checkpoint, location, folder, folder.location, "as stored", why)
    try:
        translated = _translated(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    if translated is None:
        return ModelSource(checkpoint, location, folder, folder.location, "as stored", why)
    explanation = "; ".join((why, *translated.notes))
    if model_dir is not None:
        return ModelSource(translated.checkpoint, location, folder, folder.location, "as stored", explanation)
    files = _files(translated.checkpoint) or folder
    return ModelSource(translated.checkpoint, location, files, location.display, "as stored", explanation)


def _from_mlx_folder(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that was written for mlx_lm with the tensors that transformers expects.

    Any other checkpoint is returned unchanged.
    """
    if "mlx" not in (checkpoint.format, checkpoint.metadata.get("format")) or CONFIG not in checkpoint.companions:
        return checkpoint
    from ingot.translate.mlx_tensors import from_mlx
    from ingot.translate.split_tensors import experts_for_format

    try:
        config = companion_config(checkpoint.companions, "companions.config")
        return from_mlx(checkpoint, config).then(partial(experts_for_format, format="safetensors")).checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _translated(checkpoint: Checkpoint) -> View | None:
    """Return a GGUF checkpoint with the names of transformers; None if Ingot does not support its family.

    Raises ``UnsupportedError`` ``account.lost`` if transformers has no parameter for some of its tensors.
    """
    from ingot.translate.view import to_model  # imported here because other formats load faster without it

    try:
        translated = to_model(checkpoint, no_tokenizer=True)
    except UnsupportedError as error:
        if error.rule == UNSUPPORTED:
            return None
        raise
    lost = lost_tensors(translated.checkpoint.omissions)
    if lost:
        raise UnsupportedError(
            f"the loaded model would lack tensors of the file: {list_by_reason(lost)}",
            rule=LOST_RULE,
            where=checkpoint.location,
        )
    return translated


def model_folder(location: Location) -> Store:
    """Return the folder of config.json and the tokenizer: the location itself, or the folder of the file."""
    return find(location)[0]


@contextmanager
def companions_folder(location: Location) -> Iterator[Store]:
    """Yield the folder with the config and the tokenizer of a model, while the context lasts.

    It is ``model_folder(location)``, or temporary files written from the metadata of the weights.
    """
    store, name = find(location)
    try:
        format, _ = detect(store, name)
        inside = has_model_metadata(format.name)
    except IngotError:  # the folder has a tokenizer but no weights
        inside = False
    if not inside:
        yield store
        return
    from ingot.translate.view import to_model

    with open_in_store(store, name) as checkpoint:
        try:
            translated = to_model(checkpoint, no_tokenizer=True)
        except UnsupportedError:  # the family is not supported, but the folder may have the files
            yield store
            return
        with translated.checkpoint as view:
            yield _files(view) or store


def _files(view: Checkpoint) -> Store | None:
    return model_folder(Location.parse(view.companions[CONFIG])) if CONFIG in view.companions else None
