"""Files that are no checkpoint for us: other containers, and what lies in the place of weights when a download fails.

They are recognised by their first bytes or their names and named in the error; nothing of them is parsed, least of all
a pickle.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.errors import UnsupportedError

HEAD = 16
"""How many bytes of a file tell what it is."""


@dataclass(frozen=True, slots=True)
class _Foreign:
    """What is not for us: first bytes at an offset, what it is, what to do, and the rule of the refusal.

    With ``suffixes`` only files so named are meant, with ``but`` all but such; ``text`` are compared without case and
    white space in front.
    """

    magic: bytes
    rule: str
    what: str
    advice: str
    offset: int = 0
    suffixes: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    text: bool = False

    def is_meant(self, name: str) -> bool:
        """Whether files of this name are."""
        return (not self.suffixes or name.endswith(self.suffixes)) and not name.endswith(self.but)


CUT_OFF = "was the file cut off? download or copy it again"
"""What formats advise whose file ends before what its header tells of."""

ZIP = b"PK\x03\x04"
LEGACY_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""How a file begins that torch before 1.6 wrote: its magic number, pickled."""
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
"""Files of torch by their names, which torch itself reads for Ingot."""

_CONVERT = "convert it to safetensors with the tool that made it"
_PICKLE = (
    "a pickle can run code when it is loaded, so Ingot opens none; what torch.save wrote it reads under a name that "
    "ends in .bin or .pt; anything else, save as safetensors where it was made"
)
_AGAIN = "the download failed: look at what the file says, and download it again"

# Order matters: of several rows with one magic, the first whose suffixes fit (or that has none) is taken.
_FOREIGN = (
    _Foreign(ZIP, "detect.zip", "a Keras archive", _CONVERT, suffixes=(".keras",)),
    _Foreign(
        ZIP,
        "detect.pickle",
        "a zip archive as torch.save writes it, with a pickle inside",
        _PICKLE,
        but=(".npz", *TORCH_SUFFIXES),
    ),
    _Foreign(b"\x80\x02", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x80\x03", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x80\x04", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x80\x05", "detect.pickle", "a pickle", _PICKLE),
    _Foreign(b"\x89HDF\r\n\x1a\n", "detect.hdf5", "an HDF5 file", _CONVERT),
    _Foreign(b"\x93NUMPY", "detect.npy", "a NumPy .npy array", "load it with numpy.load and save it with ingot.save"),
    _Foreign(b"TFL3", "detect.tflite", "a TensorFlow Lite model", _CONVERT, offset=4),
    _Foreign(b"version https://", "detect.lfs-pointer", "a Git LFS pointer and not the weights", "run `git lfs pull`"),
    _Foreign(b"\x1f\x8b", "detect.archive", "a gzip stream", "decompress it first"),
    _Foreign(b"\x28\xb5\x2f\xfd", "detect.archive", "a zstd stream", "decompress it first"),
    _Foreign(b"\xfd7zXZ\x00", "detect.archive", "an xz stream", "decompress it first"),
    *(
        _Foreign(begin, "detect.html", "a web page (HTML) and not the weights", _AGAIN, text=True)
        for begin in (b"<!doctype html", b"<html", b"<head", b"<!--")
    ),
    *(
        _Foreign(begin, "detect.error-text", "a server's error message and not the weights", _AGAIN, text=True)
        for begin in (
            *(b"<?xml", b"<error", b"entry not found", b"repository not", b"invalid username", b"access to model"),
            *(b"not found", b"404", b"403", b"401", b"forbidden", b"unauthorized", b"access denied", b"bad gateway"),
            *(b'{"error"', b'{"errors"', b'{"message"', b'{"detail"', b'{"status"'),
        )
    ),
)

# What downloads are called until they are complete: curl and wget users, Hugging Face, browsers, aria2.
_UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2")

WEIGHT_SUFFIXES = (
    *(".bin", ".pt", ".pth", ".ckpt", ".pkl", ".ggml", ".h5", ".keras", ".msgpack", ".onnx_data"),
    *(".npz", ".npy", ".tflite", ".pb", ".mlmodel", ".engine"),
    *_UNFINISHED,
)
"""Names of files that hold weights in a container that Ingot does not open by itself, or that are not all there yet."""


def foreign_file(name: str, head: bytes) -> UnsupportedError | None:
    """Return why a file cannot be opened: it is another container, or no weights at all; None if nothing says so.

    Parameters
    ----------
    name : str
    head : bytes
        The first ``HEAD`` bytes, or all there are.

    Returns
    -------
    UnsupportedError or None
        ``detect.pickle``, ``detect.hdf5``, ``detect.lfs-pointer``, ``detect.html``, ...; ``detect.unfinished`` by the
        name.
    """
    row = _row(name, head)
    if row is not None:
        return _refusal(row.rule, row.what, row.advice, name)
    if name.lower().endswith(_UNFINISHED):
        return _refusal(
            "detect.unfinished", "a download that is not complete", "let the download finish, or start it again", name
        )
    return None


def _refusal(rule: str, what: str, advice: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected a checkpoint in a format that Ingot reads, found {what}; {advice}", rule=rule, where=name
    )


def _row(name: str, head: bytes) -> _Foreign | None:
    if head[4:9] == b"\0\0\0\0{":  # a safetensors header length may look like any magic of up to four bytes
        return None
    name = name.lower()
    if head.startswith(LEGACY_TORCH) and name.endswith(TORCH_SUFFIXES):
        return None
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for row in _FOREIGN:
        head_part = start if row.text else head[row.offset :]
        if head_part.startswith(row.magic) and row.is_meant(name):
            return row
    return None
