"""Protection of folders: a command may replace only folders that contain a checkpoint and nothing else."""

from __future__ import annotations

from collections.abc import Container
from pathlib import PurePosixPath

from ingot.errors import UsageError
from ingot.formats.detect import FORMATS
from ingot.model.store import Store

# Suffixes of further files that Ingot writes.
_WEIGHTS = (".npy", ".npy.zst", ".onnx.data", ".onnx_data")
_PACKAGE = ".mlpackage"
_SENTINELS = (".ready", ".manifest_ready", ".ingot-tiers.lock")
_SQUISH = ".squish_"  # the prefix of squish's sentinels
# Configuration and tokenizers belong to a model by their suffixes. Programs (``.py``) and texts may be the user's.
_COMPANIONS = (".json", ".model", ".jinja", ".tiktoken", ".vocab", ".spm", ".bpe", ".merges")
_TOKENIZERS = ("merges.txt", "vocab.txt", "Modelfile")
# Beginnings of the names of texts that belong to a model.
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY", "MODEL_CARD")
_TEXTS = ("", ".txt", ".md")


def require_ours(store: Store, also: Container[str] = ()) -> None:
    """Refuse to replace a folder that contains other files than weights of Ingot's formats and their companions.

    Parameters
    ----------
    store : Store
        The folder; it is not empty.
    also : container of str
        Names of the files of the new folder, relative and with slashes. They are accepted too.

    Raises
    ------
    UsageError
        ``target.foreign``: the folder contains another file, which the message names, or no weights.
    """
    written = (format for _, format in FORMATS.available() if not format.traits.last_resort)
    suffixes = (*(suffix for format in written for suffix in format.suffixes), *_WEIGHTS)
    package = store.location.lower().endswith(_PACKAGE)
    weights = False
    for name in store.tree():
        if _is_weights(name, suffixes, package):
            weights = True
        elif name not in also and not _belongs(PurePosixPath(name)):
            raise _foreign(store, f"holds {_shown(name)!r}, which is no part of a checkpoint")
    if not weights:
        raise _foreign(store, "holds no weights")


def is_sentinel(name: str) -> bool:
    """Return whether a hidden file has a name that a format of Ingot uses."""
    return name in _SENTINELS or name.startswith(_SQUISH)


def _shown(name: str) -> str:
    """Return ``name`` for a message.

    It ends after the first hidden folder in it, because a hidden folder never belongs to a checkpoint.
    """
    components = name.split("/")
    hidden = next((index for index, component in enumerate(components[:-1]) if component.startswith(".")), None)
    return name if hidden is None else "/".join(components[: hidden + 1]) + "/"


def _is_weights(name: str, suffixes: tuple[str, ...], package: bool) -> bool:
    components = name.lower().split("/")
    inside = package or any(component.endswith(_PACKAGE) for component in components[:-1])
    visible = not any(component.startswith(".") for component in components)
    return visible and (name.lower().endswith(suffixes) or (inside and components[-1].endswith((".bin", ".mlmodel"))))


def _belongs(name: PurePosixPath) -> bool:
    """Return whether a file belongs to a checkpoint according to its name, also in a subfolder (``1_Pooling``)."""
    if any(component.startswith(".") for component in name.parts[:-1]):
        return False
    if name.name.startswith("."):
        return is_sentinel(name.name)
    text = name.name.upper().startswith(_NAMES) and name.suffix.lower() in _TEXTS
    return len(name.parts) <= 2 and (text or name.name in _TOKENIZERS or name.suffix.lower() in _COMPANIONS)


def _foreign(store: Store, reason: str) -> UsageError:
    return UsageError(
        f"--overwrite (overwrite=True) replaces a folder with a checkpoint and nothing else; this one {reason}: remove "
        "it yourself if you do not need it, or choose another folder",
        rule="target.foreign",
        where=store.location,
    )
