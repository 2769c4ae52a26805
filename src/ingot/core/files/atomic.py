"""Staging: an artifact is written next to its final path, and appears there in one step.

For a target ``x.zt`` the staging folder is ``.x.zt.ingot-partial/`` in the same folder, so that renaming stays within
one file system. It contains ``files/`` with the files to publish, ``journal.jsonl`` for a later run that resumes the
work, and ``lock``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

from ingot.core.files import system
from ingot.core.files.system import exchange, flush, local_path, remove, remove_tree, rename, replace, write_error
from ingot.core.runtime.memory import format_size
from ingot.core.runtime.parallel import ordered
from ingot.errors import IngotError, ResourceError, UsageError

if TYPE_CHECKING:
    from filelock import FileLock


def free_disk(folder: Path) -> int | None:
    """Return the number of free bytes for this user on the disk of ``folder``; None if the file system does not report
    them.
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def require_disk(nbytes: int, folder: Path, location: str) -> None:
    """Raise an error before a write that does not fit on the disk of ``folder``.

    Parameters
    ----------
    nbytes : int
        Minimum bytes that will be written, without existing files.
    folder : Path
        An existing folder.
    location : str
        The target in the message.

    Raises
    ------
    ResourceError
        ``disk.guard``: the disk has less free space.
    """
    room = free_disk(folder)
    if room is not None and nbytes > room:
        raise ResourceError(
            f"expected room for {format_size(nbytes)} ({nbytes} bytes) on this disk, found {format_size(room)}: free "
            "some space or choose another disk",
            rule="disk.guard",
            where=location,
        )


def occupied(folder: Path) -> int:
    """Return the number of bytes that files in ``folder`` occupy on disk."""
    return sum(system.occupied(path.lstat()) for path in folder.rglob("*"))


PUBLISHED: list[str] = []
"""The locations that this process has published, in order; an interrupted command reports them."""
_UNFINISHED: set[Staging] = set()
"""Staging folders that this process has created, and neither discarded nor kept."""
SUFFIX = ".ingot-partial"
LONGEST_NAME = 255
"""The limit of a file name in bytes on common file systems."""
JOURNAL = "journal.jsonl"
_ATTEMPTS = 20
# Files flushed at once: file systems write their journal entries together, which is many times faster.
_FLUSHING = 16


class Staging:
    """A staging folder for an artifact, which appears under its final name; a context manager.

    Leaving the context without ``publish`` or ``keep`` discards the files. After an exception with ``resume`` set, they
    are kept.

    Parameters
    ----------
    dst : path-like
        The final file or folder. A symbolic link is followed: its target is replaced.
    directory : bool
        Whether the artifact is a folder.
    overwrite : bool
        Whether a file or a non-empty folder at ``dst`` may be replaced.
    require_ours : callable, optional
        Called with a folder that would be replaced; raises an error if the folder must not be removed.
    resume : bool
        Whether to keep the files that an earlier run left in the staging folder; also the attribute ``resuming``.

    Attributes
    ----------
    folder, files, scratch, journal : Path
        The staging folder; the folders for files of the artifact, and for files that are needed until it is complete
        (not created here); and the path of the journal, which is not created here.
    resumed : bool
        Whether an earlier run left files, and they were kept.

    Raises
    ------
    UsageError
        ``target.no-parent``, ``target.name``, ``target.exists``, ``target.not-a-file``, ``target.not-a-folder``.
    ResourceError
        ``store.locked`` if another process is writing to the same ``dst``; ``store.link``; those of
        ``core.files.system.write_error``.
    """

    takes_over: ClassVar[bool] = False
    """Whether ``take_over`` can publish files that other processes wrote into the shared folder."""

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
        self.scratch = self.folder / "scratch"
        self.journal = self.folder / JOURNAL
        self._old = self.folder / "replaced"
        self._parts = self.folder / "parts"
        self._open = True
        self._lock: FileLock | None = None
        _UNFINISHED.add(self)
        try:
            self._lock = _claim(self.folder, self.dst)
            self._recover()
            if not resume:
                self._empty()
            self.resumed = self.files.is_dir() and any(self.files.iterdir())
            self.files.mkdir(exist_ok=True)
        except OSError as error:
            _UNFINISHED.discard(self)
            raise write_error(error, str(self.folder)) from error
        except IngotError:
            _UNFINISHED.discard(self)
            raise
        try:
            self._check_target()  # again: _recover may have restored the folder of a killed run
        except BaseException:
            if resume:
                self.keep()
            else:
                self.discard()
            raise

    @property
    def location(self) -> str:
        """The final path as text, for messages."""
        return str(self.dst)

    @property
    def shared_files(self) -> str | None:
        """The absolute path of ``files`` if other processes can write into this folder; None if they cannot.

        If it is None, other processes write into the folder of ``share``, and ``take_over`` registers their files.
        Whether another machine has this path depends on its mounts.
        """
        return str(self.files.absolute())

    def take_over(self, files: Mapping[str, str]) -> None:
        """Register complete files of the shared folder, to be published in addition to those in ``self.files``.

        ``files`` maps the final names to the names in the shared folder. Called only if ``takes_over`` is set.
        """
        raise NotImplementedError

    def share(self) -> str:
        """Return the absolute path or address of the shared folder, into which other processes may write files.

        It is removed together with the staging folder.
        """
        return str(self._parts.absolute())

    def require_room(self, nbytes: int, location: str = "") -> None:
        """Raise ``ResourceError`` ``disk.guard`` if the disk lacks space for an artifact of ``nbytes``.

        Bytes that are staged already are subtracted. ``location`` is the target in the message.
        """
        require_disk(nbytes - occupied(self.files), self.folder.parent, location or self.location)

    def publish(self, names: Sequence[str]) -> Path:
        """Flush the named files to disk, move them to the final path in one step, and remove the staging folder.

        ``names`` are relative to ``files``; for a single file exactly one. All other files in ``files`` are removed,
        for example those of an earlier run. Returns the final path.
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
                for folder in sorted(inner, reverse=True):  # deepest folders first, ``files`` last
                    flush(self.files / folder)
                self._publish_folder()
            else:
                self._check_target()  # another process may have created it meanwhile
                replace(self.files / names[0], self.dst)
        except OSError as error:
            raise write_error(error, str(self.dst)) from error
        self._committed(self.dst.parent)
        return self.dst

    def _committed(self, *folders: Path) -> None:
        """Record that the artifact is published, flush its parent folders, and remove the staging folder.

        Errors are ignored from here on, because the result is complete. Files that cannot be removed stay in the
        staging folder, which the next run for the same target empties.
        """
        PUBLISHED.append(self.location)
        with contextlib.suppress(OSError, IngotError):
            for folder in folders:
                flush(folder)
        with contextlib.suppress(OSError, IngotError):
            self.discard()

    def discard(self) -> None:
        """Remove the staging folder with its content; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        try:
            self._recover()
            self._empty()
            # The lock file is removed last, while the lock is held: a process that opened it before sees it unlinked.
            self._remove_folder()
        except OSError as error:
            raise write_error(error, str(self.folder)) from error
        finally:
            self._release()
        if system.WINDOWS:  # Windows cannot remove the open lock file, so that the first attempt failed
            self._remove_folder()
        _UNFINISHED.discard(self)

    def keep(self) -> None:
        """Leave the files for a later run with ``resume=True``, and release the lock."""
        if self._open:
            self._open = False
            self._release()
            _UNFINISHED.discard(self)

    def clean_up(self) -> None:
        """Finish what an interrupt stopped: remove the staging folder, or keep it with ``resume``.

        The interrupt may have stopped ``__init__`` or ``discard``. Another process may own the folder by now.
        """
        _UNFINISHED.discard(self)
        if self.resuming:
            self._open = True
            self.keep()
            return
        self._release()
        if self.folder.is_dir():
            self._lock = _claim(self.folder, self.dst)
            self._open = True
            self.discard()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release(force=True)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is not None and self.resuming:
            self.keep()
        else:
            self.discard()

    def _staged_in(self) -> Path:
        """Return the folder in which the staging folder is created."""
        return self.dst.parent

    def _flush(self, names: Sequence[str]) -> None:
        """Remove all files that are not in ``names``, and flush the others to disk."""
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
        selected = {self.files / name for name in names}
        for path in sorted(self.files.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):  # the folder contains selected files
                    path.rmdir()
            elif path not in selected:
                remove(path)

    def _check_target(self) -> None:
        _check_target(self.dst, self._directory, self._overwrite)
        if self._directory and self._require_ours is not None and self.dst.is_dir() and any(self.dst.iterdir()):
            self._require_ours(self.dst)

    def _publish_folder(self) -> None:
        """Rename ``files`` to ``dst``; a folder that it replaces becomes ``files`` or ``replaced``.

        If the system can exchange names, this is one step. Otherwise the old folder is renamed first; it is restored if
        the second renaming fails, or by the next run if the process was killed between the two.
        """
        self._check_target()  # another process may have created it meanwhile
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
        """Restore a replaced folder if its successor was not published; remove it otherwise."""
        if not self._old.is_dir():
            return
        if self.dst.exists():
            remove_tree(self._old)
        else:
            rename(self._old, self.dst)

    def _empty(self) -> None:
        for folder in (self.files, self.scratch, self._old, self._parts):
            if folder.exists():
                remove_tree(folder)
        remove(self.journal)

    def _remove_folder(self) -> None:
        with contextlib.suppress(OSError):
            (self.folder / "lock").unlink(missing_ok=True)
            self.folder.rmdir()


def clean_up() -> None:
    """Remove the staging folders that an interrupt left; those of a run with ``resume`` are kept."""
    for staging in list(_UNFINISHED):
        with contextlib.suppress(OSError, IngotError):
            staging.clean_up()


def atomic_write(path: str | os.PathLike[str], data: bytes | bytearray | memoryview, *, overwrite: bool = True) -> None:
    """Write a small file so that ``path`` has either its old content or all of ``data``, also after a power failure.

    Several threads and processes may write the same file; the last one wins. Raises ``UsageError``
    ``target.no-parent``, ``target.not-a-file``, and without ``overwrite`` ``target.exists``; ``ResourceError`` with the
    rules of ``core.files.system.write_error``.
    """
    dst = _final(path)
    _check_target(dst, False, overwrite)
    # The name is unique for each call: other threads may write at once, and a killed process may have left a file.
    temporary = dst.with_name(partial_name(dst.name, f".{os.getpid()}-{secrets.token_hex(4)}"))
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _check_target(dst, False, overwrite)
            replace(temporary, dst)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush(dst.parent)
    except OSError as error:
        raise write_error(error, str(dst)) from error


def partial_name(name: str, tag: str = "") -> str:
    """Return the hidden name under which a file is staged; if that is too long, a digest replaces the file's name."""
    full = f".{name}{tag}{SUFFIX}"
    if len(os.fsencode(full)) <= LONGEST_NAME:
        return full
    return f".{sha256(os.fsencode(name)).hexdigest()[:32]}{tag}{SUFFIX}"


def _final(dst: str | os.PathLike[str]) -> Path:
    path = local_path(dst)
    try:
        if path.is_symlink():
            path = Path(os.path.realpath(path))  # a circular link stays a link, and is refused later
    except OSError as error:
        raise write_error(error, str(path)) from error
    if path.name in ("", ".", ".."):
        raise UsageError("expected the name of a file or folder to write", rule="target.name", where=str(dst))
    return path


def _check_target(dst: Path, directory: bool, overwrite: bool) -> None:
    """Raise an error if the target must not be replaced; called before hours of work as well as after."""
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
    """Create the staging folder and lock it, or raise ``store.locked``.

    If a process that finishes the same target removes the folder or the lock between two steps, try again. A symbolic
    link is refused (``store.link``), because the folder that it leads to must not be emptied.
    """
    from filelock import FileLock, Timeout  # imports asyncio, which readers do not need

    if folder.is_symlink():
        raise ResourceError(
            "the staging folder is a symbolic link; remove it if it is yours", rule="store.link", where=str(folder)
        )
    for attempt in range(_ATTEMPTS):
        lock = FileLock(folder / "lock")
        try:
            folder.mkdir(exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            break
        except (FileNotFoundError, FileExistsError):
            last = attempt == _ATTEMPTS - 1  # no other process interferes: the file system refuses the folder
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
    """Flush a folder with all files and folders in it to disk; links are skipped."""
    try:
        for path in sorted(folder.rglob("*"), reverse=True):  # a folder comes after its content
            if not path.is_symlink():
                flush(path)
        flush(folder)
    except OSError as error:
        raise write_error(error, str(folder)) from error
