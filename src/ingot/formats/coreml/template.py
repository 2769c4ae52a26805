"""A package that was read: its files, its program and the tensors in it; also what a writer starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ingot.errors import FormatError
from ingot.formats.coreml.blob import BlobFile
from ingot.formats.coreml.constants import find_sites
from ingot.formats.coreml.mil import parse_model
from ingot.formats.coreml.package import MANIFEST, MAX_MANIFEST, parse_manifest
from ingot.formats.coreml.values import Value
from ingot.formats.coreml.weights import Weights
from ingot.model.bytesource import ByteSource
from ingot.model.part import Part
from ingot.model.store import Listed, Store

# What a serializer of protocol buffers can write.
MAX_MODEL = (1 << 31) - 1
_DEEPEST = 8


class Template(Mapping[str, Part]):
    """The files of a package by their paths in it, and what they say.

    Raises
    ------
    FormatError
        ``coreml.manifest``, ``coreml.manifest-path``, ``coreml.missing``, ``coreml.file-size``, ``coreml.weight-path``
        and those of ``parse_model``, ``BlobFile`` and ``find_sites``.
    UnsupportedError
        ``coreml.model-kind``.
    """

    def __init__(self, files: Mapping[str, Part]) -> None:
        self._files = files
        self.package = parse_manifest(self._whole(MANIFEST, MAX_MANIFEST), self._where(MANIFEST))
        self.model = self._whole(self.package.model, MAX_MODEL)
        self.program = parse_model(self.model, self._where(self.package.model))
        self.weights = Weights(self._weight_file)
        self.sites, self.unread = find_sites(self.program, self.weights)
        for value in self.program.values():
            self._check_left(value)

    def __getitem__(self, path: str) -> Part:
        return self._files[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def weight_paths(self) -> dict[str, str]:
        """Weight files as the program names them, to their paths in the package."""
        return {name: self.package.weight_file(name, "") for name in self.weights.files}

    @property
    def headers(self) -> dict[str, bytes]:
        """The bytes of every file that describe weights."""
        paths = self.weight_paths
        by_path = {path: bytes(self.weights.files[name].headers) for name, path in paths.items()}
        return {MANIFEST: bytes(self[MANIFEST].view()), self.package.model: self.model, **by_path}

    @property
    def others(self) -> list[str]:
        """Paths of the files that are neither manifest, model nor weights."""
        known = {MANIFEST, self.package.model, *self.weight_paths.values()}
        return [path for path in self if path not in known]

    def _weight_file(self, name: str, where: str) -> BlobFile:
        path = self.package.weight_file(name, where)
        if path not in self._files:
            raise FormatError("coreml.missing", f"expected {path!r}, which the program names, found none", where=where)
        return BlobFile(self._files[path].source)

    def _check_left(self, value: Value) -> None:
        """Validate the place of numbers that are no tensor's, of whatever type they are."""
        if value.blob is None:
            return
        if value.type is not None and value.dims is not None:
            self.weights.check(value)
        else:
            self.weights.file(value).whole(value.blob.offset)

    def _whole(self, path: str, most: int) -> bytes:
        part = self._files.get(path)
        if part is None:
            raise FormatError("coreml.missing", "expected this file in the package, found none", where=path)
        if part.length > most:
            raise FormatError("coreml.file-size", f"expected at most {most} bytes, found {part.length}", where=path)
        out = bytearray(part.length)
        part.readinto(0, memoryview(out))
        return bytes(out)

    def _where(self, path: str) -> str:
        return self._files[path].source.name


def open_files(store: Store) -> tuple[dict[str, Part], list[ByteSource]]:
    """Open the manifest of a package and every file of its items; the sources are to be closed.

    Raises ``FormatError`` as ``parse_manifest``; ``coreml.missing`` where an item is not there; ``coreml.link`` where
    it is a link out of the package, or lies behind one.
    """
    store = Listed(store)
    sources: list[ByteSource] = []
    files: dict[str, Part] = {}

    def take(path: str) -> None:
        pieces = path.split("/")
        if any(name in store.list("/".join(pieces[:depth])).outside for depth, name in enumerate(pieces)):
            raise FormatError(
                "coreml.link",
                "expected files in this package, found a link that leads out of it: copy the package with `cp -rL`",
                where=path,
            )
        source = store.open(path)
        sources.append(source)
        files[path] = Part("u8", source.size, source, where=source.name)

    try:
        take(MANIFEST)
        for item in parse_manifest(_manifest(files[MANIFEST]), files[MANIFEST].where).items:
            for path in _files_of(store, item):
                if path not in files:
                    take(path)
    except BaseException:
        for source in sources:
            source.close()
        raise
    return files, sources


def _manifest(part: Part) -> bytes:
    if part.length > MAX_MANIFEST:
        raise FormatError(
            "coreml.manifest", f"expected at most {MAX_MANIFEST} bytes, found {part.length}", where=part.where
        )
    raw = bytearray(part.length)
    part.readinto(0, memoryview(raw))
    return bytes(raw)


def _files_of(store: Store, item: str, depth: int = 0) -> list[str]:
    """Return the files of an item: itself, or all in the folder.

    Raises ``FormatError`` ``coreml.missing``.
    """
    folder, _, name = item.rpartition("/")
    if not depth and name in store.names(folder):
        return [item]
    files = [f"{item}/{inner}" for inner in store.names(item)]
    folders = store.folders(item)
    if folders and depth >= _DEEPEST:
        raise FormatError("coreml.missing", f"expected folders at most {_DEEPEST} deep", where=item)
    for inner in folders:
        files += _files_of(store, f"{item}/{inner}", depth + 1)
    if not files and not depth and name not in store.folders(folder):
        raise FormatError("coreml.missing", "expected this item of the package, found nothing there", where=item)
    return files
