"""Ranges of remote files on a local disk, for the next time: content-addressed, bounded, shared by processes.

``blobs/`` has bytes under their BLAKE3, so that the same bytes of two addresses lie there once; ``ranges/`` says which
blob a range of a version of a file is. A blob is compared with its name whenever it is read: one that is damaged is as
good as none. What was not read for longest goes first. Nothing here is needed: whatever goes wrong with the disk, bytes
come from afar.

What is cached may be private (a signed address, a token), and ``ranges/`` decides what a reader takes for a file's
bytes. So only this user may read or write the folder: files have mode 0600 and folders 0700, whatever the umask is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from hashlib import sha256
from pathlib import Path

from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.files.system import local_path, open_flags, remove_tree, replace, user_id
from ingot.core.runtime.memory import parse_size
from ingot.errors import UsageError
from ingot.model.bytesource import Stamp

FOLDER = "INGOT_REMOTE_CACHE"
SIZE = "INGOT_REMOTE_CACHE_SIZE"
DEFAULT_SIZE = "20GiB"
OFF = "off"
_FILE = 0o600
_FOLDER = 0o700
_OTHERS = 0o077
_SLACK = 16  # the cache is looked through each time that this part of its size was added


class RangeCache:
    """A folder of ranges. Thread-safe, and for several processes at once.

    Parameters
    ----------
    folder : Path
        Made where there is none. If another user may read or write it or anything in it, that is taken away.
    most : int
        Bytes of all blobs together; passed by what is added between two looks at the folder, a sixteenth.

    Raises
    ------
    UsageError
        ``remote.cache-folder``: a folder of another user.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        _require_private(folder)
        self._added = most  # by others, perhaps: the first addition looks

    def get(self, name: str, out: memoryview) -> bool:
        """Fill ``out`` with a range that is there; False where it is not, or not as it was."""
        ref = self._path("ranges", name)
        try:
            digest = ref.read_text("ascii")
            blob = self._path("blobs", digest)
            with blob.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != out.nbytes or file.readinto(out) != out.nbytes:
                    return False
            if _digest(out) != digest:
                blob.unlink(missing_ok=True)
                return False
            os.utime(blob)
        except (OSError, ValueError):
            return False
        return True

    def put(self, name: str, data: memoryview) -> None:
        """Keep a range."""
        if data.nbytes > self._most // 2:
            return
        digest = _digest(data)
        blob = self._path("blobs", digest)
        with contextlib.suppress(OSError):
            if blob.exists():
                os.utime(blob)
            else:
                self._write(blob, data)
            self._write(self._path("ranges", name), memoryview(digest.encode()))
        with self._lock:
            self._added += data.nbytes
            due = self._added * _SLACK >= self._most
            if due:
                self._added = 0
        if due:
            self._shrink()

    def _shrink(self) -> None:
        """Remove what was not read for longest, and ranges without a blob; one process at a time."""
        from filelock import FileLock, Timeout

        with contextlib.suppress(OSError, Timeout), FileLock(self._folder / "lock", mode=_FILE).acquire(timeout=0):
            blobs = []
            for path in (self._folder / "blobs").glob("*/*"):
                with contextlib.suppress(OSError):
                    state = path.stat()
                    blobs.append((state.st_mtime_ns, state.st_size, path))
            total = sum(size for _, size, _ in blobs)
            gone = False
            for _, size, path in sorted(blobs):
                if total <= self._most:
                    break
                path.unlink(missing_ok=True)
                total = total - size
                gone = True
            if gone:
                there = {path.name for path in (self._folder / "blobs").glob("*/*")}
                for ref in (self._folder / "ranges").glob("*/*"):
                    with contextlib.suppress(OSError):
                        if ref.read_text("ascii") not in there:
                            ref.unlink()

    def _write(self, path: Path, data: memoryview) -> None:
        """Write a file that appears whole; not flushed, as a damaged one is noticed."""
        for folder in (self._folder, path.parent.parent, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
                folder.chmod(_FOLDER)  # mkdir's mode is cut by the umask
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(temporary, open_flags("O_WRONLY", "O_CREAT", "O_EXCL"), _FILE), "wb") as file:
                file.write(data)
            temporary.chmod(_FILE)
            replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _path(self, kind: str, name: str) -> Path:
        if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise ValueError(name)
        return self._folder / kind / name[:2] / name


def name_of(url: str, stamp: Stamp, start: int, length: int) -> str:
    """Return the name of a range of a version of a file."""
    text = "\0".join(map(str, (url, stamp.size, stamp.mtime_ns, stamp.etag, start, length)))
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


_CACHES: dict[tuple[str, int], RangeCache] = {}


def range_cache() -> RangeCache | None:
    """Return the cache that the environment asks for; None for none.

    Raises ``UsageError`` ``remote.cache-size``, ``remote.cache-folder``.
    """
    chosen = os.environ.get(FOLDER, "")
    if not chosen or chosen == OFF:
        return None
    text = os.environ.get(SIZE) or DEFAULT_SIZE
    try:
        most = parse_size(text)
    except UsageError:
        most = 0
    if most < 1:
        raise UsageError(f"expected a size such as {DEFAULT_SIZE}, found {text[:40]!r}", rule="remote.cache-size")
    key = (chosen, most)
    if key not in _CACHES:
        _CACHES.setdefault(key, RangeCache(local_path(chosen), most))
    return _CACHES[key]


def _digest(data: memoryview) -> str:
    running = Blake3()
    running.update(data)
    return hex_of(running)


def _require_private(folder: Path) -> None:
    """Take away what other users may do with a cache, and what they put there; refuse a folder of another user."""
    user = user_id()
    try:
        if user is None or not folder.is_dir():
            return
    except OSError:
        return  # not reachable: nothing is cached
    try:
        state = folder.stat()
        private = state.st_uid == user
        if private and stat.S_IMODE(state.st_mode) & _OTHERS:
            for path in folder.rglob("*"):
                _make_private(path, user)
            folder.chmod(_FOLDER)  # last: what is interrupted begins again
    except OSError:
        private = False
    if not private:
        raise UsageError(
            "expected a folder that only this user may read and write: another user could change what is read from it. "
            f"Choose another folder ({FOLDER}, --cache), or remove this one",
            rule="remote.cache-folder",
            where=str(folder),
        )


def _make_private(path: Path, user: int) -> None:
    state = path.lstat()
    if stat.S_ISDIR(state.st_mode) and state.st_uid == user:
        path.chmod(_FOLDER)
    elif stat.S_ISREG(state.st_mode) and state.st_uid == user:
        path.chmod(_FILE)
    elif stat.S_ISDIR(state.st_mode):
        remove_tree(path)
    else:
        path.unlink()
