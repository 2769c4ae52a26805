"""Detection of the format of a file or folder, by its first bytes, then by its name.

For files that Ingot does not open, such as other containers and failed downloads, the error names their type. Ingot
does not parse their contents, in particular no pickle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ingot.core.registry import Instances, Registry
from ingot.errors import FormatError, IngotError, IntegrityError, UnsupportedError, UsageError
from ingot.formats.base import Format
from ingot.model.store import CachedStore, Store
from ingot.naming.config import CONFIG

Sign: TypeAlias = str | tuple[int, bytes]
"""A sign of a format: the end of a file name, or an offset in a file and the bytes there.

File names are compared in lower case; a folder's name ends with a slash. A format with signs is imported only if a file
or folder has one of them.
"""

_SAFETENSORS = (".safetensors", ".safetensors.index.json", (8, b"{"))
_DIALECT = (".safetensors", ".safetensors.index.json")
_PACKAGE = ".mlpackage"  # suffix of a folder; its files identify the format
_TORCH = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")

# Each row: a format, its class, and its signs.
_ENTRIES: tuple[tuple[str, str, tuple[Sign, ...]], ...] = (
    ("zt", "ingot.formats.zt.format:ZtFormat", (".zt", (0, b"ZTEN"))),
    ("zt2", "ingot.formats.zt2.format:Zt2Format", (".zt", (0, b"\x89ZT2"))),
    ("safetensors", "ingot.formats.safetensors.format:SafetensorsFormat", _SAFETENSORS),
    ("mlx", "ingot.formats.packed_folders.mlx:MlxFormat", _DIALECT),
    ("gptq", "ingot.formats.packed_folders.gptq:GptqFormat", _DIALECT),
    ("gptq-planes", "ingot.formats.packed_folders.gptq:GptqPlanesFormat", _DIALECT),
    ("awq", "ingot.formats.packed_folders.awq:AwqFormat", _DIALECT),
    ("awq-gemv", "ingot.formats.packed_folders.awq:AwqGemvFormat", _DIALECT),
    ("autoround", "ingot.formats.packed_folders.autoround:AutoRoundFormat", _DIALECT),
    ("compressed-tensors", "ingot.formats.packed_folders.compressed_tensors:CompressedTensorsFormat", _DIALECT),
    ("fp8", "ingot.formats.packed_folders.fp8:Fp8Format", _DIALECT),
    ("mxfp4", "ingot.formats.packed_folders.mxfp4:Mxfp4Format", _DIALECT),
    ("modelopt", "ingot.formats.packed_folders.modelopt:ModelOptFormat", _DIALECT),
    ("bitsandbytes", "ingot.formats.packed_folders.bitsandbytes:BitsandbytesFormat", _DIALECT),
    ("torchao", "ingot.formats.packed_folders.torchao:TorchaoFormat", _DIALECT),
    ("quanto", "ingot.formats.packed_folders.quanto:QuantoFormat", _DIALECT),
    ("hqq", "ingot.formats.packed_folders.hqq:HqqFormat", _DIALECT),
    ("wdelta", "ingot.formats.wdelta.format:WdeltaFormat", (".wdelta", (0, b"wdelta\0"))),
    ("gguf", "ingot.formats.gguf.format:GgufFormat", (".gguf", (0, b"GGUF"))),
    ("onnx", "ingot.formats.onnx.format:OnnxFormat", (".onnx",)),
    ("fsdp-ranks", "ingot.formats.torch.fsdp_ranks:FsdpRanksFormat", (".pt",)),
    ("deepspeed-zero", "ingot.formats.torch.zero_ranks:ZeroRanksFormat", (".pt", "latest")),
    ("torch", "ingot.formats.torch.format:TorchFormat", _TORCH),
    ("torch-distributed", "ingot.formats.torch.distributed:TorchDistributedFormat", (".metadata", ".distcp")),
    ("coreml", "ingot.formats.coreml.format:CoremlFormat", ("manifest.json",)),
)


class Formats(Instances[Format]):
    """The table of formats by name.

    A format may register signs: names or first bytes of its files. It is then imported only if a file or folder has one
    of these signs. Formats of plugins come last: detection of a file reaches them only if no format of Ingot claims the
    file.
    """

    def of_file(self, name: str, head: bytes) -> Iterator[Format]:
        """Yield the formats that may apply to a file with this name and beginning."""
        yield from self._with_sign([name], head)

    def of_folder(self, names: Sequence[str]) -> Iterator[Format]:
        """Yield the formats that may apply to a folder with files of these names."""
        yield from self._with_sign(names, b"")

    def of_plugins(self) -> Iterator[Format]:
        """Yield the formats that plugins registered."""
        yield from (format for _, format in self.available_plugins())

    def endings(self) -> tuple[str, ...]:
        """Return the suffixes, in lower case, of files and folders with weights, except ``.npy``.

        For formats with signs, the signs are used without importing the format. Arrays (``.npy``) are excluded, because
        arrays next to a checkpoint are seldom weights.
        """
        signs = {sign for key in self._targets for sign in _signs_of(key) or () if isinstance(sign, str)}
        added = [self[key] for key in self._targets if _signs_of(key) is None]
        added += self.of_plugins()
        suffixes = {suffix for format in added for suffix in format.suffixes}
        extensions = {sign for sign in signs if sign.startswith(".")}
        return tuple(sorted((extensions | suffixes | {_PACKAGE}) - {".npy"}))

    def _with_sign(self, names: Sequence[str], head: bytes) -> Iterator[Format]:
        lower = [name.lower() for name in names]
        for key in self._targets:
            signs = _signs_of(key)
            if signs is None or any(_is_present(sign, lower, head) for sign in signs):
                yield self[key]
        yield from self.of_plugins()


def _is_present(sign: Sign, names: Sequence[str], head: bytes) -> bool:
    if isinstance(sign, str):
        return any(name.endswith(sign) for name in names)
    return head.startswith(sign[1], sign[0])


def _signs_of(name: str) -> tuple[Sign, ...] | None:
    """Return the signs that a format has registered; None if there are none, so that it is always imported."""
    signs = _SIGNS.get(name)
    return _EXTENSION_SIGNS[name] if signs is None and name in _EXTENSION_SIGNS else signs


FORMATS = Formats(
    "format",
    tuple((name, path) for name, path, _ in _ENTRIES),
    group="ingot.formats",
    contract=Format,
    identifier="name",
)
_SIGNS = {name: signs for name, _, signs in _ENTRIES}
_EXTENSION_SIGNS: Registry[tuple[Sign, ...]] = Registry("sign", group="ingot.format_signs")


# In a folder without a checkpoint, the beginnings of at most this many files are read to name their format.
_MAX_HEADS = 64
# Other containers that folders of Ingot's formats contain; the readers of these formats report their errors.
_CONTAINED_RULES = ("detect.npy", "detect.archive")


def detect_file(name: str, head: bytes) -> Format:
    """Return the format of a file called ``name`` that begins with ``head``: ``HEAD`` bytes, or the complete file.

    Raises
    ------
    FormatError
        ``detect.empty``: the file is empty.
    UnsupportedError
        ``detect.pickle``, ``detect.hdf5``, ...: another container, by its magic. ``detect.unknown``: no known format.
    """
    if not head:
        raise FormatError("detect.empty", f"expected a checkpoint, found an empty file; {TRUNCATED_HINT}", where=name)
    foreign = foreign_file(name, head)
    formats = FORMATS.of_file(name, head) if foreign is None else FORMATS.of_plugins()
    for candidate in formats:
        if candidate.claims(name, head):
            return candidate
    if foreign is not None:
        raise foreign
    raise UnsupportedError(
        f"expected weights in a format that `ingot formats` lists, found a file that begins with {head[:8]!r}; give "
        "the file of the weights, or the folder that it lies in",
        rule="detect.unknown",
        where=name,
    )


def listing(store: Store) -> list[str]:
    """Return the names of a store's files, and of its folders with a slash at the end."""
    store = CachedStore(store)
    return [*store.names(), *(f"{name}/" for name in store.folders())]


def detect_folder(names: Sequence[str], store: Store | None = None) -> tuple[Format, str]:
    """Return the format and the entry file of a folder with these names, which ``listing`` returned.

    ``store`` is the folder. Without it, formats that read files of the folder to recognize it are skipped.

    If the artifact of a format is the complete folder and its sentinel is present (``Format.has_sentinel``), other
    weights in the folder are ignored. Without the sentinel the choice is ambiguous. If the folder contains a
    checkpoint, programs exported from it (``FormatTraits.exported``) and other variants of the same model (``tiers``)
    are ignored. A folder that contains nothing but finalized arrays of Squish has the format of these arrays.

    Raises
    ------
    FormatError
        A file that had to be read to recognize a format is damaged.
    UnsupportedError
        There is no checkpoint, but a file in an unsupported container or a failed download: see ``foreign_file``.
    UsageError
        ``detect.none``: no checkpoint. ``detect.several``: more than one; the caller has to choose.
    """
    claims: list[tuple[Format, str]] = []
    for candidate in FORMATS.of_folder(names):
        entry = candidate.entry(names)
        if entry is None or candidate.traits.last_resort:
            continue
        if candidate.traits.looks_inside:
            if store is None or not candidate.confirms(store):
                continue
            claims = [claim for claim in claims if claim[1] != entry]
        elif any(entry == claim for _, claim in claims):
            continue
        claims.append((candidate, entry))
    claims = _select_claims(claims, store)
    if len(claims) == 1:
        return claims[0]
    if claims:
        files = " and ".join(f"{entry} (format {format.name})" for format, entry in claims)
        raise UsageError(
            f"expected one checkpoint in the folder, found {files}, but nothing shows which one to read: name the "
            "file, or move the other one away",
            rule="detect.several",
        )
    written = (format for _, format in FORMATS.available() if not format.traits.last_resort)
    suffixes = tuple(suffix for format in written for suffix in format.suffixes)
    several = [name for name in names if name.lower().endswith(suffixes)]
    if several:
        listed = ", ".join(several[:4]) + (", ..." if len(several) > 4 else "")
        raise UsageError(f"expected one checkpoint in the folder, found {listed}; name the file", rule="detect.several")
    last = _last_resort(names, store) or _fallback(names, store)
    if last is not None:
        return last
    refuse_orbax(names)
    if store is not None:
        _refuse_foreign(names, store)
    raise UsageError(
        f"expected a folder with a checkpoint ({', '.join(dict.fromkeys(suffixes))}), found {_describe(names)}",
        rule="detect.none",
    )


def _fallback(names: Sequence[str], store: Store | None) -> tuple[Format, str] | None:
    """Return a format and its entry file for a folder that no format claims; None if no format finds weights inside."""
    if store is None:
        return None
    for candidate in FORMATS.of_folder(names):
        entry = candidate.fallback_entry(names, store)
        if entry is not None:
            return candidate, entry
    return None


def _describe(names: Sequence[str]) -> str:
    """Return a description of a folder without a checkpoint, with advice for the user."""
    if not names:
        return "an empty folder; was the download complete?"
    first_names = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if CONFIG in names:
        return f"{first_names}: a model without its weights; were they left out of the download?"
    return f"{first_names}; give the folder of the weights, or their file"


def _select_claims(claims: list[tuple[Format, str]], store: Store | None) -> list[tuple[Format, str]]:
    """Return the formats that claim a folder, without exported programs and without variants of another format's model.

    If then exactly one claim's sentinel is present, return only this claim.
    """
    tiers = {name for format, _ in claims for name in format.traits.tiers}
    claims = [pair for pair in claims if pair[1] not in tiers]
    if len(claims) > 1:
        claims = [pair for pair in claims if not pair[0].traits.exported] or claims
    if len(claims) > 1:
        marked = [pair for pair in claims if store is not None and pair[0].has_sentinel(store)]
        claims = marked if len(marked) == 1 else claims
    return claims


def _last_resort(names: Sequence[str], store: Store | None) -> tuple[Format, str] | None:
    for candidate in FORMATS.of_folder(names):
        entry = candidate.entry(names) if candidate.traits.last_resort else None
        if entry is not None and (store is None or foreign_file(entry, store.head(entry, HEAD)) is None):
            return candidate, entry
    return None


def _refuse_foreign(names: Sequence[str], store: Store) -> None:
    """Raise an error for the first file of the folder that has a known but unsupported format."""
    for name in [name for name in names if name.lower().endswith(WEIGHT_SUFFIXES)][:_MAX_HEADS]:
        reason = foreign_file(name, store.head(name, HEAD))
        if reason is not None:
            raise reason


def explain(error: IngotError, store: Store) -> IngotError:
    """Return a more precise error if the file that a format refused has another format.

    A shard or an array of a checkpoint may be a Git LFS pointer, a web page or another container. Its reader only
    reports an invalid header.
    """
    name = (error.where or "").removeprefix(f"{store.location}/").split(": ")[0]
    if not isinstance(error, FormatError | IntegrityError) or not name:
        return error
    try:
        head = store.head(name, HEAD)
    except IngotError:
        return error
    foreign = foreign_file(name, head)
    return error if foreign is None or foreign.rule in _CONTAINED_RULES else foreign


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
    """Return the error for a file in a container that Ingot does not open, or without weights; None for any other file.

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
