"""One file of torch's: torch maps it and says which tensors lie in it; their bytes are read when they are wanted."""

from __future__ import annotations

import io
import pickle  # only for the name of the error that torch raises
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from os import fspath
from typing import Any, NamedTuple

from ingot.core.extras import require
from ingot.core.files.archive import ArchiveFile
from ingot.core.numeric.dtypes import dtype as resolve_dtype
from ingot.core.runtime.memory import require_ram
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.shared.foreign import LEGACY_TORCH
from ingot.model.bytesource import ByteSource
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.lazy import Lazy
from ingot.model.reading.ranges import read_bytes
from ingot.model.store import Store
from ingot.model.tensor import Tensor

MAX_PICKLE = 1 << 28
_HOLDERS = ("state_dict", "model_state_dict", "model", "module")
_SAFE = (2, 6)
_STORED = 0


class Contents(NamedTuple):
    """The contents of a file: tensors by name, paths of tensors that are left out, and a remark on all that is."""

    tensors: dict[str, Any]
    unread: list[str]
    note: str


class File(NamedTuple):
    """One opened file: its tensors as torch has them, and what of it is left out."""

    name: str
    source: ByteSource
    header: bytes
    tensors: Mapping[str, Any]
    unread: Sequence[str]
    note: str


def open_file(store: Store, name: str) -> File:
    """Have torch read one file.

    Raises
    ------
    MissingExtraError
        torch is not installed.
    UnsupportedError
        ``torchfile.version``: a torch whose restricted unpickler can be broken; ``torchfile.weights-only``: what that
        unpickler refuses; ``torchfile.tensor``: a tensor that is no dense array; ``torchfile.content``: no state dict.
    FormatError
        ``torchfile.zip``, ``torchfile.damaged``, ``torchfile.pickle-size``.
    ResourceError
        ``ram.guard``: a file of before torch 1.6, which cannot be mapped.
    """
    torch = require("torch", "torch")
    path = store.require_path(name, "reading by torch")
    source = store.open(name)
    try:
        legacy = read_bytes(source, 0, min(len(LEGACY_TORCH), source.size)) == LEGACY_TORCH
        header = LEGACY_TORCH if legacy else _pickle_of(source, name)
        if legacy:
            require_ram(source.size, "a file of torch before 1.6, which cannot be mapped", "convert it elsewhere")
        content = _loaded(torch, fspath(path), name, mapped=not legacy)
        contents = _state(torch, content, name)
        for key, value in contents.tensors.items():
            _require_dense(torch, key, value, name)
    except BaseException:
        source.close()
        raise
    return File(name, source, header, *contents)


def tensors_of(files: Sequence[File]) -> Lazy[Tensor]:
    """Return the tensors of all files, in order; ``FormatError`` ``torchfile.index`` for a name in two of them."""
    entries: dict[str, tuple[File, Any]] = {}
    for file in files:
        for key, value in file.tensors.items():
            if key in entries:
                raise FormatError("torchfile.index", f"expected one {key[:200]!r}, found two", where=file.name)
            entries[key] = (file, value)

    def make(key: str) -> Tensor:
        file, value = entries[key]
        row, where = resolve_dtype(value.dtype), f"{file.name}: {key}: data"
        source = _Values(value, where, file.source)
        part = Part(row.storage, source.size, source, 0, type=None if row.is_storage else row.name, where=where)
        return Tensor(key, tuple(value.shape), row.name, DenseLayout.codec, {DATA: part})

    return Lazy(entries, make)


class _Values:
    """The bytes of one tensor of torch, in row-major order, into which others are put while they are read."""

    mapped = False

    def __init__(self, value: Any, name: str, file: ByteSource) -> None:
        self._value, self._file = value, file
        self._whole: Any = None
        self.name, self.size = name, value.numel() * value.element_size()

    def view(self, offset: int, length: int) -> memoryview:
        out = memoryview(bytearray(length))
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        end = offset + out.nbytes
        if offset < 0 or end > self.size:
            raise FormatError("torchfile.damaged", f"expected {end} bytes, found {self.size}", where=self.name)
        if out.nbytes:
            whole = self._bytes()
            out.cast("B")[:] = whole[offset:end]
        if end == self.size:
            self._whole = None

    def changed(self) -> bool:
        return self._file.changed()

    def close(self) -> None:
        self._whole = None

    def _bytes(self) -> Any:
        """Return the bytes: the mapping itself, or a copy in order that is held until its end has been read."""
        if self._whole is None:
            torch = require("torch", "torch")
            value = self._value.resolve_conj().resolve_neg()  # views that torch evaluates late
            self._whole = value.contiguous().reshape(-1).view(torch.uint8).numpy().data
        return self._whole


def _pickle_of(source: ByteSource, name: str) -> bytes:
    """Return the pickle in the archive, unread, once the archive is as torch writes it: nothing compressed."""
    try:
        with zipfile.ZipFile(io.BufferedReader(ArchiveFile(source.readinto, source.size))) as archive:
            entries = archive.infolist()
            packed = next((entry for entry in entries if entry.compress_type != _STORED), None)
            if packed is not None:
                raise FormatError(
                    "torchfile.zip",
                    f"expected stored entries, found {packed.filename[:80]!r} packed",
                    where=name,
                )
            found = next((entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"), None)
            if found is None:
                raise FormatError(
                    "torchfile.zip", "expected an entry data.pkl, as torch.save has it, found none", where=name
                )
            if found.file_size > MAX_PICKLE:
                raise FormatError(
                    "torchfile.pickle-size",
                    f"expected at most {MAX_PICKLE} bytes of names and shapes, found {found.file_size}",
                    where=name,
                )
            return archive.read(found)
    except IngotError:
        raise
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise FormatError(
            "torchfile.zip", f"expected a zip archive as torch.save has it: {error}", where=name
        ) from error


def _loaded(torch: Any, path: str, name: str, *, mapped: bool) -> Any:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _SAFE:
        raise UnsupportedError(
            f"expected torch from 2.6 on, whose weights_only holds, found {torch.__version__}: pip install -U torch",
            rule="torchfile.version",
            where=name,
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of how old files were made
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            "expected a pickle of tensors and plain containers, found more, which torch.load(weights_only=True) "
            f"refuses: {_line(error)}; whoever trusts the file can load and save it by the program that made it",
            rule="torchfile.weights-only",
            where=name,
        ) from error
    except Exception as error:  # whatever torch raises at a damaged archive
        raise FormatError("torchfile.damaged", f"torch cannot read it: {_line(error)}", where=name) from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."


def _state(torch: Any, content: Any, name: str) -> Contents:
    """Return the tensors of the one state dict, and what else the file holds."""
    if isinstance(content, Mapping):
        held = [key for key in _HOLDERS if _tensors(torch, content.get(key))]
        own = _tensors(torch, content)
        if own and held:
            raise UnsupportedError(
                f"expected one state dict, found tensors beside {held[0]!r}", rule="torchfile.content", where=name
            )
        if own or len(held) == 1:
            values = content if own else content[held[0]]
            found = _tensors(torch, values)
            inner = {key: value for key, value in values.items() if key not in found}
            others = {} if own else {key: value for key, value in content.items() if key != held[0]}
            unread = [*_paths(torch, inner, "" if own else held[0]), *_paths(torch, others, "")]
            keys = [str(key)[:40] for key in (*inner, *others)]
            listed = ", ".join(keys[:6]) + (f" and {len(keys) - 6} more" if len(keys) > 6 else "")
            listed += f"; {len(unread)} tensors are among it" if unread else ""
            return Contents(
                found, unread, f"{name} holds beside its weights what is left out: {listed}" if keys else ""
            )
    raise UnsupportedError(
        f"expected a state dict (names to tensors), or one under {', '.join(_HOLDERS)}, found "
        f"{type(content).__name__} of other things",
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
    waiting, seen = [(path, content)], set[int]()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, stored) or (hasattr(value, "dtype") and hasattr(value, "shape")):
            paths.append(path)
        elif isinstance(value, Mapping | list | tuple | set | frozenset) and id(value) not in seen:
            seen.add(id(value))  # a pickle may hold a container within itself
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            inner = [(f"{path}.{key!s:.80}" if path else f"{key!s:.80}", item) for key, item in items]
            waiting += reversed(inner)
    return paths


def _require_dense(torch: Any, key: str, value: Any, name: str) -> None:
    """Refuse what is no dense array of a type that Ingot has, and arrays that are larger than what they are made of."""
    where = f"{name}: {key[:200]}"
    dense = type(value) is torch.Tensor and value.layout == torch.strided
    if not dense or value.is_quantized or value.is_meta or value.is_nested:
        kind = "a nested one" if value.is_nested else value.dtype if value.layout == torch.strided else value.layout
        raise UnsupportedError(f"expected a dense tensor, found {kind}", rule="torchfile.tensor", where=where)
    try:
        resolve_dtype(value.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, rule="torchfile.tensor", where=where) from None
    held = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > held:
        raise UnsupportedError(
            f"expected stored elements, found {list(value.shape)} repeated from {held} bytes",
            rule="torchfile.tensor",
            where=where,
        )
