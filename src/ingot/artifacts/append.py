"""Appending of tensors to a ``.zt`` file without rewriting it. Page: spec/zt2.md, "Appending"."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifacts.archive_layout import KEY as ARCHIVE
from ingot.artifacts.save import plan_tensors, write_tensors
from ingot.core.border import bordered
from ingot.core.files import system
from ingot.core.files.atomic import require_disk
from ingot.core.files.locks import lock
from ingot.errors import ResourceError, UnsupportedError, UsageError
from ingot.formats.detect import FORMATS
from ingot.formats.zt2.append import Zt2Appender
from ingot.formats.zt2.layout import MAGIC
from ingot.model.delta import KEY as DELTA
from ingot.model.seal import SUFFIX as SEAL
from ingot.model.store import Store
from ingot.reporting.report import Bytes, Count, Line, Report, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.local import LocalSink
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class Appended(Reportable):
    """The result of appending: the file, the number of new tensors, the bytes they added, and the file's new size."""

    path: str
    tensors: Count
    added: Bytes
    size: Bytes

    def report(self) -> Report:
        """Return the figures as a ``Report``."""
        return Report(figures_of(self), [Line("{path}: {tensors} tensors appended; {added} more, {size} now")])


@bordered
def append(path: AnyPath, tensors: Mapping[str, Any], *, digest: str | None = "crc32c") -> Appended:
    """Add tensors to a ``.zt`` file of container 2, without rewriting the tensors in it.

    The file is valid at every moment: a run that is killed leaves the old tensors. Programs that have the file open see
    the old tensors until they open it again.

    Parameters
    ----------
    path : path
        A local file.
    tensors : mapping of name to array or Tensor
        As for ``ingot.save``; also an open checkpoint. The names must be new.
    digest : {"crc32c", "sha256", None}
        The digest of each part. For ``crc32c``, container 2 stores an XXH3 instead.

    Returns
    -------
    Appended

    Raises
    ------
    UsageError
        ``append.duplicate``: the file has a tensor of this name; ``append.sealed``: a seal states the file's digest;
        ``append.described``: the file is a delta or an archive.
    UnsupportedError
        ``append.container``: the file is not of container 2; ``append.remote``: it is not local; the container cannot
        store a tensor.
    ResourceError
        ``append.busy``: another process appends to the file; disk full.
    FormatError, IntegrityError
        The file is damaged, or a tensor to add is.

    Examples
    --------
    >>> ingot.save("model.zt", {"first": np.ones(4, np.float32)}, format="zt2")
    >>> ingot.append("model.zt", {"second": np.zeros(4, np.float32)}).tensors
    1
    >>> sorted(ingot.open("model.zt"))
    ['first', 'second']
    """
    store, name = Location.parse(path).find_file()
    location = store.location_of(name)
    file = _local_file(store, name)
    planned = plan_tensors(FORMATS["zt2"], tensors)
    with _locked(file, location), closing(store.open(name)) as source:
        size = source.size
        sink = LocalSink(file)
        try:
            specs = [spec for _, spec in planned]
            flush = partial(system.flush, file)
            writer = Zt2Appender(sink, source, specs, digest=digest, name=location, flush=flush)
            _require_undescribed(writer, location)
            require_disk(writer.size - size, file.parent, location)
        except BaseException:
            sink.close()
            raise
        write_tensors(writer, planned)
    return Appended(location, len(planned), writer.size - size, writer.size)


def _local_file(store: Store, name: str) -> Path:
    """Return the path of the file, without links. Raises the errors of ``append`` about the file."""
    location = store.location_of(name)
    path = store.local_path(name)
    if path is None:
        raise UnsupportedError("expected a local file: download it first", rule="append.remote", where=location)
    if store.head(name, len(MAGIC)) != MAGIC:
        raise UnsupportedError(
            "expected a .zt file of container 2, the only one that can be extended; make one with "
            "`ingot convert FILE NEW.zt --container 2`",
            rule="append.container",
            where=location,
        )
    if store.exists(name + SEAL):
        raise UsageError(
            f"the file has a seal, {name + SEAL}, with the digest of its present bytes: delete the seal, append, and "
            "write a new one with `ingot seal`",
            rule="append.sealed",
            where=location,
        )
    return Path(os.path.realpath(path))


def _require_undescribed(writer: Zt2Appender, location: str) -> None:
    """Raise ``UsageError`` ``append.described`` if an attribute of the file describes all its tensors."""
    if {DELTA, ARCHIVE} & {*writer.attributes}:
        raise UsageError(
            "expected a file of tensors, found a delta or an archive, whose description covers all its tensors",
            rule="append.described",
            where=location,
        )


@contextmanager
def _locked(file: Path, location: str) -> Iterator[None]:
    """Hold an exclusive lock on the file. Raises ``ResourceError`` ``append.busy`` if another process has one."""
    try:
        descriptor = os.open(file, system.open_flags("O_RDWR"))
    except OSError as error:
        raise system.write_error(error, location) from error
    try:
        try:
            lock(descriptor, exclusive=True)
        except BlockingIOError:
            message = "another process appends to this file: try again when it is complete"
            raise ResourceError(message, rule="append.busy", where=location) from None
        except OSError:  # the file system has no locks
            pass
        yield
    finally:
        os.close(descriptor)
