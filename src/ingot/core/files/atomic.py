"""Publishing: everything is written beside its final place and appears there whole, or not at all.

For a final ``x.zt`` the work happens in ``.x.zt.ingot-partial/`` in the same folder (so that renaming stays within one
file system): ``files/`` with what will be published, ``journal.jsonl`` for whoever wants to resume, and ``lock``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from ingot.core.files import system
from ingot.core.files.system import exchange, flush, local_path, remove, remove_tree, rename, replace, write_error
from ingot.core.runtime.parallel import ordered
from ingot.errors import IngotError, ResourceError, UsageError

if TYPE_CHECKING:
    from filelock import FileLock


import shutil

from ingot.core.runtime.memory import format_size


def free_disk(folder: Path) -> int | None:
    """Return the bytes that this user may still write into ``folder``; None where the file system does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def require_disk(nbytes: int, folder: Path, where: str) -> None:
    """Refuse what would not fit on the disk of ``folder``, before it is begun.

    Parameters
    ----------
    nbytes : int
        What will be written at the least, beside what is there already.
    folder : Path
        An existing folder.
    where : str
        The target, for the message.

    Raises
    ------
    ResourceError
        ``disk.guard``.
    """
    room = free_disk(folder)
    if room is not None and nbytes > room:
        raise ResourceError(
            f"expected room for {format_size(nbytes)} ({nbytes} bytes) on this disk, found {format_size(room)}: free "
            "some space or choose another disk",
            rule="disk.guard",
            where=where,
        )


def occupied(folder: Path) -> int:
    """Return the bytes that files in ``folder`` take on the disk already."""
    return sum(system.occupied(path.lstat()) for path in folder.rglob("*"))


PUBLISHED: list[str] = []
"""The locations that this process has published, in order: what an interrupted command says of its result."""
SUFFIX = ".ingot-partial"
LONGEST_NAME = 255
"""Bytes of a file's name that the usual file systems allow."""
JOURNAL = "journal.jsonl"
_ATTEMPTS = 20
# Files flushed at once: a file system writes their journal entries together, many times faster than one by one.
_FLUSHING = 16


class Staging:
    """A place to write an artifact before it appears under its final name; a context manager.

    Leaving the ``with`` block without ``publish`` or ``keep`` discards everything, but for an exception with
    ``resume``: then all is kept.

    Parameters
    ----------
    dst : path-like
        Final file or folder. A symbolic link is followed: what it points to is replaced.
    directory : bool
        Whether the artifact is a folder.
    overwrite : bool
        Whether a file or a non-empty folder at ``dst`` may be replaced.
    require_ours : callable, optional
        Gets a folder that would be replaced, and raises if it holds what must not be lost.
    resume : bool
        Keep what an earlier run left in the staging folder; else it is emptied first. Attribute ``resuming``.

    Attributes
    ----------
    folder, files, journal : Path
        The staging folder, the folder to create files in, and the journal's path (not created here).
    resumed : bool
        Whether an earlier run left files there that were kept.

    Raises
    ------
    UsageError
        ``target.no-parent``, ``target.name``, ``target.exists``, ``target.not-a-file``, ``target.not-a-folder``.
    ResourceError
        ``store.locked`` if another process is writing to the same ``dst``; ``store.link``; those of
        ``core.files.system.write_error``.
    """

    takes_over: ClassVar[bool] = False
    """Whether files can be published that other processes put into the shared folder (``take_over``)."""

    def __init__(
        self,
        dst: str | os.PathLike[str],
        *,
        directory: bool = False,
        overwrite: bool = False,
        resume: bool = False,
        require_ours: Callable[[Path], None] | None = None,
    ) -> None:
        self.dst = _final(dst)
        self._directory = directory
        self._overwrite = overwrite
        self._require_ours = require_ours
        self.resuming = resume
        self._check_target()
        self.folder = self._staged_in() / partial_name(self.dst.name)
        self.files = self.folder / "files"
        self.journal = self.folder / JOURNAL
        self._old = self.folder / "replaced"
        self._parts = self.folder / "parts"
        self._open = True
        try:
            self._lock = _claim(self.folder, self.dst)
            self._recover()
            if not resume:
                self._empty()
            self.resumed = self.files.is_dir() and any(self.files.iterdir())
            self.files.mkdir(exist_ok=True)
        except OSError as error:
            raise write_error(error, str(self.folder)) from error
        try:
            self._check_target()  # once more: a killed run's folder may be back
        except BaseException:
            if resume:
                self.keep()
            else:
                self.discard()
            raise

    @property
    def location(self) -> str:
        """What messages call the target."""
        return str(self.dst)

    @property
    def shared_files(self) -> str | None:
        """The whole path of ``files`` where it lies beside the target, so that who sees the one sees the other.

        None if it lies elsewhere; see ``takes_over`` for files that other processes have made.
        """
        return str(self.files.absolute())

    def take_over(self, files: Mapping[str, str]) -> None:
        """Publish full files that other processes put into the shared folder, besides what is in ``files``.

        ``files`` maps names in the shared folder to the names that the files get. Called if ``takes_over`` is set.
        """
        raise NotImplementedError

    def share(self) -> str:
        """Return the whole path or address of a folder beside the target, into which other processes may put files.

        It goes when the staging folder does.
        """
        return str(self._parts.absolute())

    def require_room(self, nbytes: int, where: str = "") -> None:
        """Refuse an artifact of at least so many bytes for which the disk has no room, beside what is staged already.

        ``where`` is what the message calls the target. Raises ``ResourceError`` ``disk.guard``.
        """
        require_disk(nbytes - occupied(self.files), self.folder.parent, where or self.location)

    def publish(self, names: Sequence[str]) -> Path:
        """Flush the named files to disk, put them under the final name in one step, remove the staging folder.

        ``names`` are relative to ``files``; for a single file exactly one. Anything else that lies in ``files`` is
        dropped, so that an earlier run leaves no strays. Returns the final path.
        """
        self._require_open()
        if not self._directory and len(names) != 1:
            raise UsageError(
                f"expected one file to publish, found {len(names)}", rule="target.one-file", where=str(self.dst)
            )
        try:
            self._flush(names)
            if self._directory:
                inner = {parent for name in names for parent in Path(name).parents} | {Path()}
                for folder in sorted(inner, reverse=True):  # the deepest first; the last is ``files`` itself
                    flush(self.files / folder)
                self._publish_folder()
            else:
                self._check_target()  # something may have appeared there meanwhile
                replace(self.files / names[0], self.dst)
        except OSError as error:
            raise write_error(error, str(self.dst)) from error
        self._committed(self.dst.parent)
        return self.dst

    def _committed(self, *folders: Path) -> None:
        """Note that the artifact is published, flush the folders that it appeared in, remove the staging folder.

        Nothing raises from here on: an error would say that there is no result. What cannot be removed stays in the
        staging folder, which the next run for the same target empties.
        """
        PUBLISHED.append(self.location)
        with contextlib.suppress(OSError, IngotError):
            for folder in folders:
                flush(folder)
        with contextlib.suppress(OSError, IngotError):
            self.discard()

    def discard(self) -> None:
        """Remove the staging folder with everything in it; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        try:
            self._recover()
            self._empty()
            # The lock goes last and while it is held: whoever opened it before finds it unlinked and does not get it.
            self._remove_folder()
        except OSError as error:
            raise write_error(error, str(self.folder)) from error
        finally:
            self._lock.release(force=True)
        if system.WINDOWS:  # which removes no file that is open: neither ours before, nor another's now
            self._remove_folder()

    def keep(self) -> None:
        """Leave everything for a later run with ``resume=True``, and release the lock."""
        if self._open:
            self._open = False
            self._lock.release(force=True)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.resuming:
            self.keep()
        else:
            self.discard()

    def _staged_in(self) -> Path:
        """Return the folder that the staging folder lies in."""
        return self.dst.parent

    def _flush(self, names: Sequence[str]) -> None:
        """Drop what is not named, and have the rest on disk."""
        self._keep_only(names)
        threads = min(max(len(names) - 1, 0), _FLUSHING)
        for _ in ordered(lambda name: flush(self.files / name), names, threads):
            pass

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError(
                "this staging was already published, kept or discarded", rule="target.closed", where=str(self.dst)
            )

    def _keep_only(self, names: Sequence[str]) -> None:
        wanted = {self.files / name for name in names}
        for path in sorted(self.files.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # not empty: it holds wanted files
                    path.rmdir()
            elif path not in wanted:
                remove(path)

    def _check_target(self) -> None:
        _check_target(self.dst, self._directory, self._overwrite)
        if self._directory and self._require_ours is not None and self.dst.is_dir() and any(self.dst.iterdir()):
            self._require_ours(self.dst)

    def _publish_folder(self) -> None:
        """Put ``files`` in the place of ``dst``; what was there is in ``files`` or ``replaced`` then.

        In one step where the system can exchange names; elsewhere the old folder steps aside first, comes back if the
        second renaming fails, and is put back by the next run if there was no second one.
        """
        self._check_target()  # something may have appeared there meanwhile
        if not self.dst.exists():
            rename(self.files, self.dst)
            return
        if exchange(self.files, self.dst):
            flush(self.folder)
            return
        rename(self.dst, self._old)
        try:
            rename(self.files, self.dst)
        except BaseException:
            self._recover()
            raise

    def _recover(self) -> None:
        """Put back a folder that stepped aside for a successor that never came; remove it if that did come."""
        if not self._old.is_dir():
            return
        if self.dst.exists():
            remove_tree(self._old)
        else:
            rename(self._old, self.dst)

    def _empty(self) -> None:
        for folder in (self.files, self._old, self._parts):
            if folder.exists():
                remove_tree(folder)
        remove(self.journal)

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()


def atomic_write(path: str | os.PathLike[str], data: bytes | bytearray | memoryview, *, overwrite: bool = True) -> None:
    """Write a small file so that ``path`` has either its old content or all of ``data``, also after a power failure.

    Several threads and processes may write the same file: one of them is the last. Raises ``UsageError``
    ``target.no-parent``, ``target.not-a-file``, without ``overwrite`` ``target.exists``; ``ResourceError`` as
    ``Staging``.
    """
    dst = _final(path)
    _check_target(dst, False, overwrite)
    # A number of its own for every call: a process has threads, and a killed one may have left a file.
    beside = dst.with_name(partial_name(dst.name, f".{os.getpid()}-{secrets.token_hex(4)}"))
    try:
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _check_target(dst, False, overwrite)
            replace(beside, dst)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        flush(dst.parent)
    except OSError as error:
        raise write_error(error, str(dst)) from error


def partial_name(name: str, tag: str = "") -> str:
    """Return the hidden name for what will have a name; of a name that leaves no room for more, a digest."""
    full = f".{name}{tag}{SUFFIX}"
    if len(os.fsencode(full)) <= LONGEST_NAME:
        return full
    return f".{sha256(os.fsencode(name)).hexdigest()[:32]}{tag}{SUFFIX}"


def _final(dst: str | os.PathLike[str]) -> Path:
    path = local_path(dst)
    try:
        if path.is_symlink():
            path = Path(os.path.realpath(path))  # a link in a circle stays one, and is refused as no file
    except OSError as error:
        raise write_error(error, str(path)) from error
    if path.name in ("", ".", ".."):
        raise UsageError("expected the name of a file or folder to write", rule="target.name", where=str(dst))
    return path


def _check_target(dst: Path, directory: bool, overwrite: bool) -> None:
    """Refuse what cannot be replaced, before hours of work and not after."""
    if not dst.parent.is_dir():
        raise UsageError(
            "expected an existing folder to write into; create it first", rule="target.no-parent", where=str(dst.parent)
        )
    try:
        mode = dst.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(error, str(dst)) from error
    if not directory and not stat.S_ISREG(mode):
        raise UsageError(
            "expected a file or nothing at the target; found a folder or a device",
            rule="target.not-a-file",
            where=str(dst),
        )
    if directory and not stat.S_ISDIR(mode):
        raise UsageError(
            "expected a folder or nothing at the target; found a file", rule="target.not-a-folder", where=str(dst)
        )
    if not overwrite and (not directory or any(dst.iterdir())):
        obstacle = "target folder exists and is not empty" if directory else "target exists"
        raise UsageError(
            f"the {obstacle}: choose another, or pass --overwrite (overwrite=True)",
            rule="target.exists",
            where=str(dst),
        )


def _claim(folder: Path, dst: Path) -> FileLock:
    """Make the staging folder and lock it, or raise ``store.locked``.

    A process that is just done with the same target may remove folder or lock between any two steps: then once more. A
    link in its place is refused (``store.link``): what it leads to is not ours to empty.
    """
    from filelock import FileLock, Timeout  # with asyncio behind it, which readers do not need

    if folder.is_symlink():
        raise ResourceError(
            "expected no link where work is staged; remove it if it is yours", rule="store.link", where=str(folder)
        )
    for attempt in range(_ATTEMPTS):
        lock = FileLock(folder / "lock")
        try:
            folder.mkdir(exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            break
        except (FileNotFoundError, FileExistsError):
            last = attempt == _ATTEMPTS - 1  # nobody is in the way: a file system that takes no folders
            if (last and not folder.exists()) or (folder.exists() and not folder.is_dir()):
                raise
            continue
        if (folder / "lock").exists():
            return lock
        lock.release(force=True)
    raise ResourceError(
        "another process is writing to this target: wait for it, or choose another target",
        rule="store.locked",
        where=str(dst),
    )


def flush_tree(folder: Path) -> None:
    """Have all files and folders in ``folder``, and itself, on disk before going on; links are left out."""
    try:
        for path in sorted(folder.rglob("*"), reverse=True):  # a folder comes after what lies in it
            if not path.is_symlink():
                flush(path)
        flush(folder)
    except OSError as error:
        raise write_error(error, str(folder)) from error
