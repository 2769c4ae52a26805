"""Which folders a command may replace: those that hold a checkpoint and nothing else."""

from __future__ import annotations

from collections.abc import Container
from pathlib import PurePosixPath

from ingot.errors import UsageError
from ingot.formats.detect import FORMATS
from ingot.model.store import Store

# What Ingot writes beside the suffixes of its formats.
_WEIGHTS = (".npy", ".npy.zst", ".onnx.data", ".onnx_data")
_PACKAGE = ".mlpackage"
_SENTINELS = (".ready", ".manifest_ready", ".ingot-tiers.lock")
_SQUISH = ".squish_"  # what squish's own sentinels begin with
# Configuration, tokenizers, texts: what belongs to a model by its name. Programs (``.py``) may be anybody's.
_COMPANIONS = (".json", ".txt", ".md", ".model", ".jinja", ".tiktoken", ".vocab", ".spm", ".bpe", ".merges")
_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README", "USE_POLICY")


def require_ours(store: Store, also: Container[str] = ()) -> None:
    """Refuse to replace a folder in which anything else lies than weights of a format that Ingot writes and what
    belongs to them.

    Parameters
    ----------
    store : Store
        The folder, not empty.
    also : container of str
        Files, relative with slashes, that the new folder will hold too.

    Raises
    ------
    UsageError
        ``target.foreign``: names what is not known, or says that there are no weights.
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


def _shown(name: str) -> str:
    """Return a name up to the first hidden folder in it, which nothing that belongs to weights lies in."""
    pieces = name.split("/")
    hidden = next((index for index, piece in enumerate(pieces[:-1]) if piece.startswith(".")), None)
    return name if hidden is None else "/".join(pieces[: hidden + 1]) + "/"


def _is_weights(name: str, suffixes: tuple[str, ...], package: bool) -> bool:
    pieces = name.lower().split("/")
    inside = package or any(piece.endswith(_PACKAGE) for piece in pieces[:-1])
    visible = not any(piece.startswith(".") for piece in pieces)
    return visible and (name.lower().endswith(suffixes) or (inside and pieces[-1].endswith((".bin", ".mlmodel"))))


def _belongs(name: PurePosixPath) -> bool:
    """Whether a file is one that belongs to weights, by its name; those of a subfolder too (``1_Pooling``)."""
    if any(piece.startswith(".") for piece in name.parts[:-1]):
        return False
    if name.name.startswith("."):
        return name.name in _SENTINELS or name.name.startswith(_SQUISH)
    named = name.name.upper().startswith(_NAMES) and name.suffix.lower() in ("", *_COMPANIONS)
    return len(name.parts) <= 2 and (named or name.suffix.lower() in _COMPANIONS)


def _foreign(store: Store, found: str) -> UsageError:
    return UsageError(
        f"--overwrite (overwrite=True) replaces a folder with a checkpoint and nothing else; this one {found}: remove "
        "it yourself if you do not need it, or choose another folder",
        rule="target.foreign",
        where=store.location,
    )
