"""Pull the files of an artifact from a registry, and compare each with its digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from ingot.artifacts.replaceable import require_ours
from ingot.core.bytes.checksums import Sha256
from ingot.core.options import takes
from ingot.core.runtime.parallel import check_cancelled
from ingot.core.runtime.progress import Progress
from ingot.errors import IntegrityError, UsageError
from ingot.model.store import OverwritePolicy
from ingot.publishing.options import PullOptions
from ingot.publishing.unpack import unpack_layers
from ingot.reporting.report import Bytes, Count, Line, Report, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.local import LocalTarget
from ingot.stores.location import Location
from ingot.stores.registry.store import RegistryScheme, RegistryStore
from ingot.stores.scheme import STORES

_WINDOW = 64 << 20  # read by several requests at once


@dataclass(frozen=True, slots=True)
class Pulled(Reportable):
    """The result of pulling: the number of files and their size in bytes; ``version`` is the artifact's digest.

    ``resumed`` is the number of bytes that an interrupted run had already fetched. ``unpacked`` is the number of layers
    that were archives; ``files`` counts the files in these archives.
    """

    source: str
    destination: str
    files: Count
    size: Bytes
    resumed: Bytes
    version: str
    unpacked: Count = 0

    def report(self) -> Report:
        """Return the figures and lines as a ``Report``."""
        lines = [Line("{destination}: {files} files of {size} pulled; each has the SHA-256 that the registry states")]
        if self.unpacked:
            lines = [
                Line("{destination}: {files} files of {size} pulled"),
                Line("{unpacked} layers were archives; each layer has the SHA-256 that the registry states"),
            ]
        if self.resumed:
            lines.append(Line("{resumed} are from an interrupted run"))
        return Report(figures_of(self), [*lines, Line("{version}", "version")])


@takes(PullOptions, "pull")
def pull(options: PullOptions) -> Pulled:
    """Copy the files of an artifact ``oci://HOST/NAME:TAG`` into a folder, which appears when all are complete.

    Returns
    -------
    Pulled

    Raises
    ------
    UsageError
        ``pull.address``; ``store.missing``; ``target.exists``, ``target.foreign``.
    FormatError, UnsupportedError
        ``registry.manifest``, ``registry.name``, ``registry.layer``, ``tar.stream``, ``tar.entry``.
    IntegrityError
        ``registry.digest``, ``registry.size``: the registry sends other bytes than its manifest states.
    ResourceError
        ``store.denied``, ``remote.*``; disk full.

    Examples
    --------
    >>> pushed = ingot.push("model", "oci://localhost:5000/team/llama:1")
    >>> ingot.pull("oci://localhost:5000/team/llama:1", "copy").files == pushed.files
    True
    """
    location = Location.parse(options.src)
    if location.scheme != "oci":
        message = "expected oci://HOST/NAME:TAG; `ingot convert` and other commands read other addresses directly"
        raise UsageError(message, rule="pull.address", where=location.display)
    scheme = STORES[location.scheme]
    assert isinstance(scheme, RegistryScheme)
    store, single = scheme.find(location.text, unpacks=True)
    names = [single] if single else sorted(name for name in store.tree() if not name.endswith("/"))
    sizes = {name: store.blob(name).size for name in names}
    policy = OverwritePolicy(options.overwrite, partial(require_ours, also=frozenset(names)))
    destination = Location.parse(options.out)
    resumed = 0
    with destination.stage(policy, directory=True, resume=options.resume) as staging:
        staging.require_room(sum(sizes.values()))
        target = LocalTarget(staging.files)
        packed = sum(archive.blob.size for archive in store.manifest.archives)
        progress = Progress(sum(sizes.values()) + packed, options.progress)
        for name in names:
            staged = target.store()
            start = min(staged.stat(name).size, sizes[name]) if staging.resumed and staged.exists(name) else 0
            if _fetch(store, name, target, start, progress):
                resumed += start
        pulled = sum(sizes.values())
        sizes |= unpack_layers(store, target, lambda nbytes: staging.require_room(pulled + nbytes), progress)
        staging.publish(sorted(sizes))
    return Pulled(
        source=location.display,
        destination=destination.display,
        files=len(sizes),
        size=sum(sizes.values()),
        resumed=resumed,
        version=store.digest,
        unpacked=len(store.manifest.archives),
    )


def _fetch(store: RegistryStore, name: str, target: LocalTarget, start: int, progress: Progress) -> bool:
    """Write a file whose first ``start`` bytes an earlier run staged; return whether these bytes were used.

    If the digest differs, the file is fetched once more. Raises ``IntegrityError`` ``registry.digest``.
    """
    advance = partial(progress.advance, item=name)
    try:
        _copy(store, name, target, start, advance)
    except IntegrityError as error:
        if error.rule != "registry.digest":
            raise
    else:
        return True
    _copy(store, name, target, 0, lambda count: None)
    return False


def _copy(store: RegistryStore, name: str, target: LocalTarget, start: int, advance: Callable[[int], None]) -> None:
    """Write a file from byte ``start`` on, and compare the digest of the full file."""
    hasher = Sha256()
    blob = store.blob(name)
    with closing(target.create(name)) as sink, closing(store.open(name)) as source:
        buffer = memoryview(bytearray(min(_WINDOW, blob.size)))
        offset = 0
        while offset < blob.size:
            check_cancelled()
            stop = start if offset < start else blob.size
            chunk = buffer[: min(_WINDOW, stop - offset)]
            if offset < start:
                sink.readinto(offset, chunk)
            else:
                source.readinto(offset, chunk)
                sink.write_at(offset, chunk)
            hasher.update(chunk)
            offset += chunk.nbytes
            advance(chunk.nbytes)
        sink.truncate(blob.size)
    blob.check(hasher.text(), store.location_of(name))
