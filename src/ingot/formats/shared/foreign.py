"""Files that Ingot does not open as a checkpoint: other containers, and failed downloads instead of weights.

Such files are recognized by their first bytes or their names, and the error states their type. Ingot does not parse the
contents, in particular no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.errors import UnsupportedError

HEAD = 16
"""Number of bytes at the start of a file that identify its type."""


@dataclass(frozen=True, slots=True)
class _UnsupportedType:
    """A type of file that Ingot does not open: magic bytes at an offset, description, advice, and the error's rule.

    ``suffixes`` restricts the type to files with these suffixes, except ``excluded_suffixes``. If ``text`` is set, the
    magic is compared without case and leading white space.
    """

    magic: bytes
    rule: str
    description: str
    advice: str
    offset: int = 0
    suffixes: tuple[str, ...] = ()
    excluded_suffixes: tuple[str, ...] = ()
    text: bool = False

    def is_meant(self, name: str) -> bool:
        """Return whether the type applies to files of this name."""
        return (not self.suffixes or name.endswith(self.suffixes)) and not name.endswith(self.excluded_suffixes)


TRUNCATED_HINT = "was the file cut off? download or copy it again"
"""Advice for a file that ends before the data declared in its header."""

ZIP = b"PK\x03\x04"
LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""The first bytes of a file written by torch before 1.6: its pickled magic number."""
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of torch files, which Ingot reads with torch."""

_CONVERT = "convert it to safetensors with the tool that made it"
_PICKLE = (
    "a pickle can run code when it is loaded, so Ingot opens none; files of torch.save are read if the name "
    "ends in .bin or .pt; save anything else as safetensors in the program that made it"
)
_FLAX = "read them with flax.serialization.msgpack_restore, and save them with safetensors.flax.save_file"
_AGAIN = "the download failed: read the text in the file, and download it again"

# The order matters: of rows with the same magic, the first with suitable suffixes (or none) applies.
_UNSUPPORTED_TYPES = (
    _UnsupportedType(ZIP, "detect.zip", "a Keras archive", _CONVERT, suffixes=(".keras",)),
    _UnsupportedType(
        ZIP,
        "detect.pickle",
        "a zip archive as torch.save writes it, with a pickle inside",
        _PICKLE,
        excluded_suffixes=(".npz", ".distcp", *TORCH_SUFFIXES),
    ),
    _UnsupportedType(b"\x80\x02", "detect.pickle", "a pickle", _PICKLE, excluded_suffixes=(".metadata",)),
    _UnsupportedType(b"\x80\x03", "detect.pickle", "a pickle", _PICKLE, excluded_suffixes=(".metadata",)),
    _UnsupportedType(b"\x80\x04", "detect.pickle", "a pickle", _PICKLE, excluded_suffixes=(".metadata",)),
    _UnsupportedType(b"\x80\x05", "detect.pickle", "a pickle", _PICKLE, excluded_suffixes=(".metadata",)),
    _UnsupportedType(b"\x89HDF\r\n\x1a\n", "detect.hdf5", "an HDF5 file", _CONVERT),
    _UnsupportedType(
        b"\x93NUMPY", "detect.npy", "a NumPy .npy array", "load it with numpy.load and save it with ingot.save"
    ),
    _UnsupportedType(b"TFL3", "detect.tflite", "a TensorFlow Lite model", _CONVERT, offset=4),
    _UnsupportedType(
        b"version https://", "detect.lfs-pointer", "a Git LFS pointer and not the weights", "run `git lfs pull`"
    ),
    _UnsupportedType(b"\x1f\x8b", "detect.archive", "a gzip stream", "decompress it first"),
    _UnsupportedType(b"\x28\xb5\x2f\xfd", "detect.archive", "a zstd stream", "decompress it first"),
    _UnsupportedType(b"\xfd7zXZ\x00", "detect.archive", "an xz stream", "decompress it first"),
    *(
        _UnsupportedType(begin, "detect.html", "a web page (HTML) and not the weights", _AGAIN, text=True)
        for begin in (b"<!doctype html", b"<html", b"<head", b"<!--")
    ),
    *(
        _UnsupportedType(begin, "detect.error-text", "a server's error message and not the weights", _AGAIN, text=True)
        for begin in (
            *(b"<?xml", b"<error", b"entry not found", b"repository not", b"invalid username", b"access to model"),
            *(b"not found", b"404", b"403", b"401", b"forbidden", b"unauthorized", b"access denied", b"bad gateway"),
            *(b'{"error"', b'{"errors"', b'{"message"', b'{"detail"', b'{"status"'),
        )
    ),
)

# suffixes of incomplete downloads of curl, wget, Hugging Face, browsers and aria2
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2")

WEIGHT_SUFFIXES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".ggml", ".h5", ".keras", ".msgpack", ".onnx_data"),
    *(".npz", ".npy", ".tflite", ".pb", ".mlmodel", ".engine"),
    *_UNFINISHED,
)
"""Suffixes of weights in a container that Ingot does not open, and of incomplete downloads."""


def foreign_file(name: str, head: bytes) -> UnsupportedError | None:
    """Return the error for a file of another container or without weights; None if the file is not recognized as one.

    Parameters
    ----------
    name : str
    head : bytes
        The first ``HEAD`` bytes, or the complete file.

    Returns
    -------
    UnsupportedError or None
        ``detect.pickle``, ``detect.hdf5``, ``detect.lfs-pointer``, ``detect.html``, ...; ``detect.unfinished`` by the
        name.
    """
    row = _row(name, head)
    if row is not None:
        return _refusal(row.rule, row.description, row.advice, name)
    if name.lower().endswith(".msgpack"):
        return _refusal("detect.flax", "Flax weights (msgpack)", _FLAX, name)
    if name.lower().endswith(_UNFINISHED):
        return _refusal(
            "detect.unfinished", "a download that is not complete", "let the download finish, or start it again", name
        )
    return None


_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "ocdbt.process_0/")


def refuse_orbax(names: Sequence[str]) -> None:
    """Raise ``UnsupportedError`` ``detect.orbax`` if the names are those of files in a folder of Orbax."""
    sign = next((name for name in _ORBAX if name in names), None)
    if sign is not None:
        raise _refusal(
            "detect.orbax",
            f"an Orbax checkpoint ({sign})",
            "restore it with orbax.checkpoint.StandardCheckpointer().restore, and save the arrays with "
            "safetensors.flax.save_file",
            "",
        )


def _refusal(rule: str, description: str, advice: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected a checkpoint in a format that Ingot reads, found {description}; {advice}", rule=rule, where=name
    )


def _row(name: str, head: bytes) -> _UnsupportedType | None:
    if head[4:9] == b"\0\0\0\0{":  # the header length of safetensors may equal any magic of up to four bytes
        return None
    name = name.lower()
    if head.startswith(LEGACY_TORCH) and name.endswith(TORCH_SUFFIXES):
        return None
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for row in _UNSUPPORTED_TYPES:
        head_part = start if row.text else head[row.offset :]
        if head_part.startswith(row.magic) and row.is_meant(name):
            return row
    return None
