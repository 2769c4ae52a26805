"""Reader of one file of torch: torch maps it into memory and lists its tensors, whose bytes are read on access."""

from __future__ import annotations

import io
import pickle  # only for the name of the error that torch raises
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from os import fspath
from typing import Any, NamedTuple

from ingot.core.border import require
from ingot.core.files.archive import ArchiveFile
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime.memory import require_ram
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.detect import LEGACY_TORCH
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Store
from ingot.model.tensor import Tensor

MAX_PICKLE = 1 << 28
_HOLDERS = ("state_dict", "model_state_dict", "model", "module")
_SAFE = (2, 6)
_STORED = 0


class Contents(NamedTuple):
    """The contents of a file.

    ``tensors`` are the tensors of the state dict by name. ``unread`` are the paths of all other tensors. ``note``
    describes everything that is omitted, also values that are not tensors.
    """

    tensors: dict[str, Any]
    unread: list[str]
    note: str


class File(NamedTuple):
    """An open file; ``tensors`` are torch objects, ``unread`` and ``note`` are those of ``Contents``."""

    name: str
    source: ByteSource
    header: bytes
    tensors: Mapping[str, Any]
    unread: Sequence[str]
    note: str


def open_file(store: Store, name: str) -> File:
    """Open a file of ``torch.save``, which torch maps into memory.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    UnsupportedError
        ``torchfile.version``: a torch with a vulnerable restricted unpickler; ``torchfile.weights-only``: that
        unpickler refuses the file; ``torchfile.tensor``: a tensor that is not a dense array; ``torchfile.content``: no
        state dict.
    FormatError
        ``torchfile.zip``, ``torchfile.damaged``, ``torchfile.pickle-size``.
    ResourceError
        ``ram.guard``: a file of torch before 1.6, which cannot be mapped.
    """
    torch = require("torch", "torch")
    path = store.require_path(name, "reading by torch")
    source = store.open(name)
    try:
        legacy = read_bytes(source, 0, min(len(LEGACY_TORCH), source.size)) == LEGACY_TORCH
        header = LEGACY_TORCH if legacy else _pickle_of(source, name)
        if legacy:
            require_ram(source.size, "a file of torch before 1.6, which cannot be mapped", "convert it elsewhere")
        content = _load(torch, fspath(path), name, mapped=not legacy)
        contents = _state(torch, content, name)
        for key, value in contents.tensors.items():
            _require_dense(torch, key, value, name)
    except BaseException:
        source.close()
        raise
    return File(name, source, header, *contents)


def tensors_of(files: Sequence[File]) -> LazyMap[Tensor]:
    """Return the tensors of all files, in order; raises ``FormatError`` ``torchfile.index`` for a name in two files."""
    entries: dict[str, tuple[File, Any]] = {}
    for file in files:
        for key, value in file.tensors.items():
            if key in entries:
                raise FormatError("torchfile.index", f"expected one {key[:200]!r}, found two", where=file.name)
            entries[key] = (file, value)

    def build(key: str) -> Tensor:
        file, value = entries[key]
        row = resolve_dtype(value.dtype)
        location = f"{file.name}: {key}: data"
        source = _Values(value, location, file.source)
        part = Part(row.storage, source.size, source, 0, type=None if row.is_storage else row.name, where=location)
        return Tensor(key, tuple(value.shape), row.name, DenseLayout.codec, {DATA: part})

    return LazyMap(entries, build)


class _Values:
    """The bytes of one torch tensor in row-major order; a tensor with other strides is copied on reading."""

    mapped = False

    def __init__(self, value: Any, name: str, file: ByteSource) -> None:
        self._value = value
        self._file = file
        self._contiguous: Any = None
        self.name = name
        self.size = value.numel() * value.element_size()

    def view(self, offset: int, length: int) -> memoryview:
        out = memoryview(bytearray(length))
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        end = offset + out.nbytes
        if offset < 0 or end > self.size:
            raise FormatError("torchfile.damaged", f"expected {end} bytes, found {self.size}", where=self.name)
        if out.nbytes:
            values = self._bytes()
            out.cast("B")[:] = values[offset:end]
        if end == self.size:
            self._contiguous = None

    def changed(self) -> bool:
        return self._file.changed()

    def close(self) -> None:
        self._contiguous = None

    def _bytes(self) -> Any:
        """Return the bytes: the mapping itself, or a contiguous copy that is cached until its end has been read."""
        if self._contiguous is None:
            torch = require("torch", "torch")
            value = self._value.resolve_conj().resolve_neg()  # torch evaluates conjugated and negated views lazily
            self._contiguous = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return self._contiguous


def _pickle_of(source: ByteSource, name: str) -> bytes:
    """Return the archive's pickle, unparsed; raise an error if the archive is compressed, which torch's never are."""
    try:
        with zipfile.ZipFile(io.BufferedReader(ArchiveFile(source.readinto, source.size))) as archive:
            entries = archive.infolist()
            packed = next((entry for entry in entries if entry.compress_type != _STORED), None)
            if packed is not None:
                raise FormatError(
                    "torchfile.zip",
                    f"expected uncompressed entries, found {packed.filename[:80]!r} compressed",
                    where=name,
                )
            entry = next((entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"), None)
            if entry is None:
                raise FormatError(
                    "torchfile.zip",
                    "expected an entry data.pkl, which torch.save writes, but it is missing",
                    where=name,
                )
            if entry.file_size > MAX_PICKLE:
                raise FormatError(
                    "torchfile.pickle-size",
                    f"expected at most {MAX_PICKLE} bytes of names and shapes, found {entry.file_size}",
                    where=name,
                )
            return archive.read(entry)
    except IngotError:
        raise
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError("torchfile.zip", f"expected a zip archive of torch.save: {error}", where=name) from error


def _load(torch: Any, path: str, name: str, *, mapped: bool) -> Any:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _SAFE:
        raise UnsupportedError(
            f"expected torch 2.6 or later, whose weights_only is safe, found {torch.__version__}: pip install -U torch",
            rule="torchfile.version",
            where=name,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about old file versions
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            "expected a pickle of tensors and plain containers, found other objects, which "
            "torch.load(weights_only=True) "
            f"refuses: {_line(error)}; if you trust the file, load it in the program that wrote it and save it again",
            rule="torchfile.weights-only",
            where=name,
        ) from error
    except Exception as error:  # torch raises various errors for a damaged archive
        raise FormatError("torchfile.damaged", f"torch cannot read it: {_line(error)}", where=name) from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."


def _state(torch: Any, content: Any, name: str) -> Contents:
    """Return the tensors of the only state dict, and the other contents of the file."""
    if isinstance(content, Mapping):
        holders = [key for key in _HOLDERS if _tensors(torch, content.get(key))]
        direct = _tensors(torch, content)
        if direct and holders:
            raise UnsupportedError(
                f"expected one state dict, found tensors and also {holders[0]!r}", rule="torchfile.content", where=name
            )
        if direct or len(holders) == 1:
            values = content if direct else content[holders[0]]
            tensors = _tensors(torch, values)
            inner = {key: value for key, value in values.items() if key not in tensors}
            outer = {} if direct else {key: value for key, value in content.items() if key != holders[0]}
            unread = [*_paths(torch, inner, "" if direct else holders[0]), *_paths(torch, outer, "")]
            keys = [str(key)[:40] for key in (*inner, *outer)]
            listed = ", ".join(keys[:6]) + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
            listed += f"; they include {len(unread)} tensors" if unread else ""
            return Contents(
                tensors,
                unread,
                f"{name} contains data other than weights, which is left out: {listed}" if keys else "",
            )
    raise UnsupportedError(
        f"expected a state dict (names to tensors), or a state dict under {', '.join(_HOLDERS)}, found "
        f"{type(content).__name__} of other objects",
        rule="torchfile.content",
        where=name,
    )


def _tensors(torch: Any, content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        return {}
    named = ((key, value) for key, value in content.items() if isinstance(key, str))
    return {key: value.detach() for key, value in named if isinstance(value, torch.Tensor)}


def _paths(torch: Any, content: Any, path: str) -> list[str]:
    """Return the paths of all tensors, arrays and storages in nested containers."""
    stored = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
    paths: list[str] = []
    waiting = [(path, content)]
    seen = set[int]()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, stored) or (hasattr(value, "dtype") and hasattr(value, "shape")):
            paths.append(path)
        elif isinstance(value, Mapping | list | tuple | set | frozenset) and id(value) not in seen:
            seen.add(id(value))  # a pickle may contain a container that contains itself
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inner = [(f"{path}.{key!s:.80}" if path else f"{key!s:.80}", item) for key, item in items]
            waiting += reversed(inner)
    return paths


def _require_dense(torch: Any, key: str, value: Any, name: str) -> None:
    """Raise an error for a tensor that is not dense, has an unsupported type, or is larger than its storage."""
    location = f"{name}: {key[:200]}"
    dense = type(value) is torch.Tensor and value.layout == torch.strided
    if not dense or value.is_quantized or value.is_meta or value.is_nested:
        actual = "a nested one" if value.is_nested else value.dtype if value.layout == torch.strided else value.layout
        raise UnsupportedError(f"expected a dense tensor, found {actual}", rule="torchfile.tensor", where=location)
    try:
        resolve_dtype(value.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, rule="torchfile.tensor", where=location) from None
    storage_bytes = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > storage_bytes:
        raise UnsupportedError(
            f"expected stored elements, found {list(value.shape)} repeated from {storage_bytes} bytes",
            rule="torchfile.tensor",
            where=location,
        )
