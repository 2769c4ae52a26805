"""Checks of a quantization's options and paths, which run before heavy imports."""

from __future__ import annotations

import re

from ingot.artifacts.destination import CPU
from ingot.artifacts.open import find
from ingot.core.registry import did_you_mean
from ingot.core.runtime.device import resolve_device
from ingot.errors import IngotError, UsageError
from ingot.runtime.quantize.options import AUTO, MODES, QuantizeOptions, parse_time
from ingot.runtimes.table import runtime_named
from ingot.stores.location import Location

_SHARD = re.compile(r".+-\d{5}-of-(\d{5})\.(?:safetensors|bin|pth?)")
_INDEX = re.compile(r".+\.(?:safetensors|bin)\.index\.json")


def check_options(options: QuantizeOptions) -> None:
    """Raise an error if options contradict each other, the model does not exist, or the target cannot be written.

    Does not open files of the model.

    Raises
    ------
    UsageError
        ``open.missing`` and the errors of ``find``; ``quantize.model``, ``quantize.option``, ``quantize.time``,
        ``quantize.calibration``, ``model.device``; ``runtime.unknown``; ``target.no-parent``, ``target.exists``.
    """
    model = Location.parse(options.model)
    find(model)
    require_full_model(model)
    if options.runtime is not None:
        runtime_named(options.runtime)
    refinements = [("--bits", options.bits), ("--type", options.type), ("--preset", options.preset)]
    names = [name for name, value in refinements if value is not None]
    if len(names) > 1:
        raise UsageError(f"expected one of {' and '.join(names)}, found both", rule="quantize.option")
    _check_calibration(options)
    if options.device != CPU:
        resolve_device(options.device)
    if options.kl is not None:
        Location.parse(options.kl).find_file()
    require_target(Location.parse(options.out), overwrite=options.overwrite)


def require_full_model(model: Location) -> None:
    """Raise an error if the path is a shard or an index of a model's folder, because the folder is the model."""
    shard = _SHARD.fullmatch(model.name)
    if shard is None and _INDEX.fullmatch(model.name) is None:
        return
    subject = "the index of a model's shards" if shard is None else f"one of {int(shard[1])} shards of a model"
    raise UsageError(
        f"this is {subject}; name the folder, {model.parent.display}, which contains the model's other files",
        rule="quantize.model",
        where=model.display,
    )


def single_file_error(model: Location) -> UsageError:
    """Return the error for a single file of a model whose folder is needed."""
    return UsageError(
        f"this is one file of a model; name the folder, {model.parent.display}, which contains its config.json",
        rule="quantize.model",
        where=model.display,
    )


def _check_calibration(options: QuantizeOptions) -> None:
    text = str(options.calibration)
    if text not in MODES:
        _require_statistics(text)
    if options.time is not None and text != AUTO:
        raise UsageError("expected --time with --calibration auto alone", rule="quantize.option")
    if options.time is not None:
        parse_time(options.time)


def _require_statistics(text: str) -> None:
    """Raise an error if a value of ``--calibration`` is neither a mode nor an existing file of statistics."""
    try:
        Location.parse(text).find()
    except UsageError as error:
        raise UsageError(
            f"--calibration {text!r:.60} is no mode ({', '.join(MODES)}) and no existing file"
            f"{did_you_mean(text.lower(), MODES)}; `ingot calibrate` writes a file of statistics",
            rule="quantize.calibration",
        ) from error


def require_target(out: Location, *, overwrite: bool) -> None:
    """Raise an error if the result exists and is no empty folder, or if its parent folder does not exist."""
    if out.url.startswith("file:") and out.siblings() is None:
        raise UsageError(
            "expected an existing folder to write into; create it first",
            rule="target.no-parent",
            where=out.parent.display,
        )
    if not overwrite and _occupied(out):
        raise UsageError(
            "the target exists: choose another, or pass --overwrite (overwrite=True)",
            rule="target.exists",
            where=out.display,
        )


def _occupied(out: Location) -> bool:
    """Return whether a file, or a folder that is not empty, exists at a location."""
    try:
        store, name = out.find()
        if name:
            return True
        listing = store.list()
    except IngotError:
        return False
    return bool(listing.files or listing.folders)
