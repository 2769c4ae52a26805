"""The manifest of an artifact in a registry, as OCI 1.1 and the ModelPack specification define it.

Ingot stores each file unchanged as one layer. The media type of the layer ends in ``.raw``, and its annotations contain
the file's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ingot.core.bytes import checksums
from ingot.core.files.archive import NameChecker
from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, IntegrityError, UnsupportedError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ACCEPTED = f"{MANIFEST}, application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.cncf.model.config.v1+json"
WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
DOCUMENT = "application/vnd.cncf.model.doc.v1.raw"
CODE = "application/vnd.cncf.model.code.v1.raw"
MAX_MANIFEST = 4 << 20
"""The largest size of a manifest in bytes. Registries have the same limit."""
MAX_CONFIG = 1 << 20
"""The largest size in bytes of the blob that describes a model."""

_ARTIFACT = "application/vnd.cncf.model.manifest.v1+json"
_FILE_PATH = "org.cncf.model.filepath"
_TITLE = "org.opencontainers.image.title"  # oras reads it
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TARS = {".tar": "", ".tar+gzip": "gzip", ".tar.gzip": "gzip", ".tar+zstd": "zstd", ".tar.zstd": "zstd"}
_ARCHIVES = ("tar", "gzip", "zstd", "zip")
# The oras command gives every file this type; it marks archives of folders.
_ANY_LAYER = "application/vnd.oci.image.layer.v1.tar"
_UNPACK = "io.deis.oras.content.unpack"
_MAX_SIZE = 1 << 62
_RULE = "registry.manifest"
_NAME = "registry.name"


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes in a registry: digest (``sha256:`` and 64 hexadecimal digits), size and media type."""

    digest: str
    size: int
    media_type: str

    def check(self, digest: str, location: str) -> None:
        """Raise ``IntegrityError`` ``registry.digest`` if the bytes have another digest."""
        checksums.check(self.digest, digest, "registry.digest", location, subject="the bytes of the registry")

    def check_size(self, size: int, location: str) -> None:
        """Raise ``IntegrityError`` ``registry.size`` if the bytes have another size."""
        if size != self.size:
            raise IntegrityError(
                "registry.size", f"expected {self.size} bytes in the registry, found {size}", where=location
            )


@dataclass(frozen=True, slots=True)
class Archive:
    """A layer that is a tar archive; ``compression`` is empty, ``gzip`` or ``zstd``."""

    blob: Blob
    compression: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files of an artifact by their names, and the blob that describes the model.

    ``archives`` are layers that contain further files, in their order.
    """

    files: Mapping[str, Blob]
    config: Blob
    archives: Sequence[Archive] = ()

    def encoded(self) -> bytes:
        """Return the manifest as JSON; it depends on nothing but the files and the description."""
        layers = [
            {**_descriptor(blob), "annotations": {_FILE_PATH: name, _TITLE: name}} for name, blob in self.files.items()
        ]
        return msgspec.json.encode(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "artifactType": _ARTIFACT,
                "config": _descriptor(self.config),
                "layers": layers,
            }
        )


def parse_manifest(raw: bytes, location: str) -> Manifest:
    """Parse a manifest, whose layers must be files with names, or tar archives.

    Raises
    ------
    FormatError
        ``registry.manifest``: not a manifest; ``registry.name``: a layer without a name, a name that leads out of the
        folder, or two files of one name.
    UnsupportedError
        ``registry.manifest``: a list of manifests; ``registry.layer``: an archive of another type as a layer.
    """
    fields = strict_json(raw, _RULE, _RULE, location)
    if "manifests" in fields:
        raise UnsupportedError(
            "this is a list of manifests: name one of them by its digest, oci://HOST/NAME@sha256:...",
            rule=_RULE,
            where=location,
        )
    layers = fields.get("layers")
    if not isinstance(layers, list) or not layers:
        raise FormatError(_RULE, "expected a manifest with layers", where=location)
    config = _blob(fields.get("config"), location)
    files: dict[str, Blob] = {}
    archives = []
    checker = NameChecker()
    for layer in layers:
        blob = _blob(layer, location)
        annotations = layer.get("annotations")
        annotations = annotations if isinstance(annotations, dict) else {}
        is_file = blob.media_type == _ANY_LAYER and _TITLE in annotations and _UNPACK not in annotations
        compression = None if is_file else _compression(blob, location)
        if compression is not None:
            archives.append(Archive(blob, compression))
            continue
        name = _file_name(annotations, location)
        try:
            checker.add(name)
        except FormatError as error:
            raise FormatError(_NAME, error.message, where=f"{location}: {name[:200]!r}") from None
        files[name] = blob
    return Manifest(files, config, archives)


def require_digest(text: str, location: str) -> str:
    """Return the digest; raise ``FormatError`` ``registry.manifest`` unless it is a SHA-256."""
    if not _DIGEST.fullmatch(text):
        raise FormatError(_RULE, f"expected sha256: and 64 hexadecimal digits, found {text[:80]!r}", where=location)
    return text


def _descriptor(blob: Blob) -> dict[str, Any]:
    return {"mediaType": blob.media_type, "digest": blob.digest, "size": blob.size}


def _blob(fields: Any, location: str) -> Blob:
    if not isinstance(fields, dict):
        raise FormatError(_RULE, "expected a config and layers with digests", where=location)
    size = fields.get("size")
    media_type = fields.get("mediaType")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < _MAX_SIZE:
        raise FormatError(_RULE, f"expected a size in bytes, found {str(size)[:40]!r}", where=location)
    if not isinstance(media_type, str):
        raise FormatError(_RULE, "expected a media type of each layer", where=location)
    return Blob(require_digest(str(fields.get("digest")), location), size, media_type)


def _compression(blob: Blob, location: str) -> str | None:
    """Return the compression of a layer that is a tar archive (empty if it has none), or None if the layer is a file.

    Raises ``UnsupportedError`` ``registry.layer`` for an archive of another type.
    """
    for ending, compression in _TARS.items():
        if blob.media_type.endswith(ending):
            return compression
    if ".tar" in blob.media_type or blob.media_type.endswith(_ARCHIVES):
        raise UnsupportedError(
            f"a layer is an archive ({blob.media_type[:80]}), and Ingot unpacks tar, tar+gzip and tar+zstd: pull it "
            "with the program that pushed it",
            rule="registry.layer",
            where=location,
        )
    return None


def _file_name(annotations: dict[str, Any], location: str) -> str:
    """Return the name of the file in a layer; raise ``FormatError`` ``registry.name`` if no annotation states it."""
    names = (annotations.get(key) for key in (_FILE_PATH, _TITLE))
    name = next((name for name in names if isinstance(name, str) and name), None)
    if name is None:
        raise FormatError(_NAME, f"expected the file's name in {_FILE_PATH} or {_TITLE} of each layer", where=location)
    return name
