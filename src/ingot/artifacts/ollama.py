"""Find the weights that a file of ollama names: a manifest in ``models/manifests``, or a Modelfile.

A file that also has templates, parameters or adapters is refused, because a result could not contain them. The error
states the path of the weights. Lines that add nothing to the file of the weights are accepted, as in the Modelfiles
that Ingot writes (``artifacts.modelfile``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.artifacts.modelfile import adds_nothing
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.formats.detect import FORMATS
from ingot.model.store import Store
from ingot.stores.location import Location

RULE = "open.ollama"
_MAX_SIZE = 1 << 20
_MANIFEST = re.compile(r"(?P<models>.*[\\/])manifests[\\/](?:[^\\/]+[\\/]){1,4}[^\\/]+")
_MODELFILE = re.compile(r"(?:.*[\\/])?(?:modelfile(?:\..+)?|[^\\/]+\.modelfile)", re.IGNORECASE)
_LAYER = "application/vnd.ollama.image."
_MODEL = f"{_LAYER}model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_NAMES = "from|adapter|template|system|parameter|message|license|renderer|parser|requires"
_DIRECTIVE = re.compile(rf"(?P<name>{_NAMES})\s+(?P<value>.+)", re.IGNORECASE)
_QUOTES = '"""'


def resolve(location: Location, store: Store, name: str) -> Location:
    """Return the location of the weights that a manifest or Modelfile names; any other location is unchanged.

    Raises
    ------
    FormatError
        ``open.ollama``: a manifest that is not JSON, or text that is not UTF-8.
    UnsupportedError
        ``open.ollama``: the file has parts besides the weights, or names a model of ollama's library.
    """
    if not name or location.scheme != "file":
        return location
    manifest = _MANIFEST.fullmatch(location.text)
    if manifest is None and not _MODELFILE.fullmatch(location.text):
        return location
    data = store.read(name, _MAX_SIZE, RULE)
    if manifest is not None:
        path = _of_manifest(data, manifest["models"], location.text) if data.lstrip().startswith(b"{") else None
    else:
        path = _of_modelfile(data, location.text)
    return location if path is None else Location.parse(path)


def _of_manifest(data: bytes, models: str, location: str) -> str | None:
    """Return the path of the weights; None if the file is no manifest of ollama."""
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(RULE, f"the manifest is not JSON: {error}", where=location) from error
    layers = manifest.get("layers") if isinstance(manifest, dict) else None
    layers = [layer for layer in layers if isinstance(layer, Mapping)] if isinstance(layers, list) else []
    types = [str(layer.get("mediaType")) for layer in layers]
    if _MODEL not in types:
        return None
    paths = [_blob(layer, models, location) for layer in layers if layer.get("mediaType") == _MODEL]
    further = [media_type.removeprefix(_LAYER)[:80] for media_type in types if media_type != _MODEL]
    if len(paths) > 1:
        raise UnsupportedError(
            f"expected one model, found {len(paths)}: convert each ({paths[0]})", rule=RULE, where=location
        )
    _require_only_weights(further, paths[0], location)
    return paths[0]


def _blob(layer: Mapping[str, Any], models: str, location: str) -> str:
    digest = _DIGEST.fullmatch(str(layer.get("digest")))
    if digest is None:
        raise FormatError(
            RULE, f"expected sha256 and 64 digits, found {str(layer.get('digest'))[:80]!r}", where=location
        )
    return f"{models}blobs/sha256-{digest[1]}"


def _of_modelfile(data: bytes, location: str) -> str | None:
    """Return the path that ``FROM`` names; None if the file has no such line."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise FormatError(RULE, f"expected UTF-8, found {error.reason}", where=location) from None
    directives = [*_directives(text)]
    models = [value for name, value in directives if name == "from"]
    if not models:
        return None
    if len(models) > 1:
        raise UnsupportedError(f"expected one line FROM, found {len(models)}", rule=RULE, where=location)
    path = models[0].strip("\"'")
    is_absolute = re.match(r"[\\/~]|[A-Za-z]:", path) is not None
    is_path = is_absolute or path.startswith(".") or re.search(r"\.(?:gguf|safetensors|bin)\Z", path) is not None
    if not is_path:
        raise UnsupportedError(
            f"FROM names {path[:80]!r}, a model of ollama's library; give the file of its weights in ollama's folder "
            "models/blobs, which `ollama show --modelfile` names",
            rule=RULE,
            where=location,
        )
    folder = re.sub(r"[^\\/]*\Z", "", location)
    path = path if is_absolute else folder + path.removeprefix("./")
    further = [(name, value) for name, value in directives if name != "from"]
    if further and not adds_nothing(further, _metadata(path)):
        _require_only_weights([name.upper() for name, _ in further], path, location)
    return path


def _metadata(path: str) -> Mapping[str, Any]:
    """Return the metadata of a GGUF file; empty if it cannot be read as one."""
    try:
        store, name = Location.parse(path).find()
        catalog = FORMATS["gguf"].read(store, name)
    except IngotError:
        return {}
    for source in catalog.sources:
        source.close()
    return catalog.metadata


def _directives(text: str) -> Iterator[tuple[str, str]]:
    """Yield the directives of a Modelfile in lower case with the first lines of their values."""
    is_quoted = False
    for line in text.splitlines():
        match = None if is_quoted or line.lstrip().startswith("#") else _DIRECTIVE.match(line.strip())
        if match is not None:
            yield match["name"].lower(), match["value"].strip()
        if line.count(_QUOTES) % 2:
            is_quoted = not is_quoted


def _require_only_weights(parts: list[str], path: str, location: str) -> None:
    if parts:
        names = ", ".join(dict.fromkeys(parts))
        raise UnsupportedError(
            f"the file states {names} besides the weights, which the result would lack; give the file of the weights "
            f"({path}) to go on without",
            rule=RULE,
            where=location,
        )
