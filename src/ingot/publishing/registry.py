"""Push a model to a registry; files that the repository has are not sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import msgspec

from ingot.core.bytes.checksums import Sha256, digest
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError, UsageError
from ingot.model.store import Store
from ingot.publishing.model import PushedModel, describe, is_document, is_program, is_weights_file
from ingot.publishing.options import PushOptions
from ingot.stores.registry.client import RegistryClient
from ingot.stores.registry.manifest import CODE, CONFIG, DOCUMENT, WEIGHT, WEIGHT_CONFIG, Blob, Manifest
from ingot.stores.registry.store import parse_reference

_CHUNK = 4 << 20


def push_to_registry(model: PushedModel, options: PushOptions) -> tuple[str, int]:
    """Push the files and their manifest; return the manifest's digest, and the number of bytes sent.

    The tag is set last, so a reader gets either the old artifact or the complete new one.

    Raises
    ------
    UsageError
        ``push.address``: a digest, or a file in an artifact; ``target.exists``: the tag names another artifact.
    IntegrityError
        ``store.changed``: a file changed meanwhile; ``registry.digest``, ``registry.size``: the registry has other
        bytes.
    ResourceError
        ``registry.*``, ``store.denied``, ``remote.*``.
    """
    reference = parse_reference(options.dst)
    if reference.digest or reference.path:
        raise UsageError("expected oci://HOST/NAME:TAG, without a digest or file", rule="push.address")
    client = reference.client(writing=True)
    present = _digest_of_tag(client, reference.tag)
    progress = Progress(2 * model.size, options.progress)
    files = {name: _blob(model.store, stored, name, progress) for name, stored in sorted(model.files.items())}
    described = describe(model, options.base)
    described["modelfs"] = {"type": "layers", "diffIds": [blob.digest for blob in files.values()]}
    description = msgspec.json.encode(described)
    config = Blob(digest("sha256", description), len(description), CONFIG)
    manifest = Manifest(files, config).encoded()
    if present == digest("sha256", manifest):
        return present, 0
    if present and not options.overwrite:
        raise UsageError(
            "the tag names another artifact: choose another tag, or pass --overwrite (overwrite=True)",
            rule="target.exists",
            where=reference.public(),
        )
    sent = 0
    pushed: set[str] = set()
    for name, blob in files.items():
        if blob.digest not in pushed and not client.has(blob):
            client.upload(blob, partial(_chunks, model.store, model.files[name], name, progress))
            sent += blob.size
        else:
            progress.advance(blob.size, name)
        pushed.add(blob.digest)
    if not client.has(config):
        client.upload(config, lambda: [description])
    return client.put_manifest(reference.tag, manifest), sent


def _digest_of_tag(client: RegistryClient, tag: str) -> str:
    """Return the digest of the manifest that a tag names; empty if the tag does not exist."""
    try:
        return client.manifest(tag)[1]
    except UsageError as error:
        if error.rule != "store.missing":
            raise
        return ""


def _blob(store: Store, stored: str, name: str, progress: Progress) -> Blob:
    """Read a file; return its digest, size and media type."""
    media_type = WEIGHT_CONFIG
    for matches, candidate in _MEDIA_TYPES:
        if matches(name):
            media_type = candidate
            break
    hasher = Sha256()
    size = 0
    for chunk in _chunks(store, stored, name, progress):
        hasher.update(chunk)
        size += chunk.nbytes
    return Blob(hasher.text(), size, media_type)


def _chunks(store: Store, stored: str, name: str, progress: Progress) -> Iterator[memoryview]:
    """Yield the bytes of a file; raise ``IntegrityError`` ``store.changed`` if it changed meanwhile."""
    with closing(store.open(stored)) as source:
        buffer = memoryview(bytearray(min(_CHUNK, source.size)))
        for start in range(0, source.size, _CHUNK):
            check_cancelled()
            chunk = buffer[: min(_CHUNK, source.size - start)]
            source.readinto(start, chunk)
            yield chunk
            progress.advance(chunk.nbytes, name)
        if source.changed():
            message = "the file changed while it was read; push it again when it is complete"
            raise IntegrityError("store.changed", message, where=source.name)


_MEDIA_TYPES: tuple[tuple[Callable[[str], bool], str], ...] = (
    (is_weights_file, WEIGHT),
    (is_document, DOCUMENT),
    (is_program, CODE),
)
