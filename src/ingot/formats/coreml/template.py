"""A package that was read: its files, its program and its tensors. Writers fill a copy of it."""

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
from ingot.model.store import CachedStore, Store

# the limit of protocol buffer serializers
MAX_MODEL = (1 << 31) - 1
_DEEPEST = 8


class Template(Mapping[str, Part]):
    """The files of a package by path, and their parsed contents.

    Raises
    ------
    FormatError
        ``coreml.manifest``, ``coreml.manifest-path``, ``coreml.missing``, ``coreml.file-size``, ``coreml.weight-path``
        and the errors of ``parse_model``, ``BlobFile`` and ``find_sites``.
    UnsupportedError
        ``coreml.model-kind``.
    """

    def __init__(self, files: Mapping[str, Part]) -> None:
        self._files = files
        self.package = parse_manifest(self._read_file(MANIFEST, MAX_MANIFEST), self._location(MANIFEST))
        self.model = self._read_file(self.package.model, MAX_MODEL)
        self.program = parse_model(self.model, self._location(self.package.model))
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
        """The path in the package of each weight file that the program names."""
        return {name: self.package.weight_file(name, "") for name in self.weights.files}

    @property
    def headers(self) -> dict[str, bytes]:
        """The bytes that describe weights, by file: the manifest, the model, and the headers of the weight files."""
        paths = self.weight_paths
        by_path = {path: bytes(self.weights.files[name].headers) for name, path in paths.items()}
        return {MANIFEST: bytes(self[MANIFEST].view()), self.package.model: self.model, **by_path}

    @property
    def other_files(self) -> list[str]:
        """Paths of the files that are neither manifest, model nor weights."""
        described = {MANIFEST, self.package.model, *self.weight_paths.values()}
        return [path for path in self if path not in described]

    def _weight_file(self, name: str, location: str) -> BlobFile:
        path = self.package.weight_file(name, location)
        if path not in self._files:
            raise FormatError(
                "coreml.missing",
                f"expected the file {path!r}, which the program refers to, but it is missing",
                where=location,
            )
        return BlobFile(self._files[path].source)

    def _check_left(self, value: Value) -> None:
        """Raise an error if the blob of a value, even one that belongs to no tensor, is not inside its file."""
        if value.blob is None:
            return
        if value.type is not None and value.dims is not None:
            self.weights.check(value)
        else:
            self.weights.file(value).blob_of_any_type(value.blob.offset)

    def _read_file(self, path: str, max_bytes: int) -> bytes:
        part = self._files.get(path)
        if part is None:
            raise FormatError("coreml.missing", "expected this file in the package, but it is missing", where=path)
        if part.length > max_bytes:
            raise FormatError(
                "coreml.file-size", f"expected at most {max_bytes} bytes, found {part.length}", where=path
            )
        out = bytearray(part.length)
        part.readinto(0, memoryview(out))
        return bytes(out)

    def _location(self, path: str) -> str:
        return self._files[path].source.name


def open_files(store: Store) -> tuple[dict[str, Part], list[ByteSource]]:
    """Open the manifest of a package and every file of its items; the caller closes the sources.

    Raises ``FormatError`` like ``parse_manifest``; ``coreml.missing`` if an item does not exist; ``coreml.link`` if it
    is a link to a location outside of the package, or is reached through such a link.
    """
    store = CachedStore(store)
    sources: list[ByteSource] = []
    files: dict[str, Part] = {}

    def take(path: str) -> None:
        components = path.split("/")
        if any(name in store.list("/".join(components[:depth])).outside for depth, name in enumerate(components)):
            raise FormatError(
                "coreml.link",
                "expected files in this package, found a link to a location outside of it: copy the package with `cp "
                "-rL`",
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
    """Return the files of an item: the item, or all files in its folder.

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
        raise FormatError("coreml.missing", "expected this item of the package, but it does not exist", where=item)
    return files
