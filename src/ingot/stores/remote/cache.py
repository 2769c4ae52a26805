"""A cache of ranges of remote files on a local disk; its size is limited, and processes share it.

``blobs/`` contains bytes named by their BLAKE3 digest, so that equal bytes of two addresses are stored once.
``ranges/`` maps a range of one version of a file to a blob. Each read compares the blob with its digest and ignores a
damaged one. The least recently used blobs are removed first. If the disk causes an error, bytes are read from the
server instead.

Cached bytes may be private (signed addresses, tokens), and ``ranges/`` decides which bytes a reader gets for a file.
Therefore only the user may read or write the folder: files have mode 0600, folders 0700, whatever the umask.
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
_OTHER_USERS = 0o077
_SLACK = 16  # the cache is scanned after each addition of a sixteenth of its size


class RangeCache:
    """A cache folder; safe for use by several threads and processes at once.

    Parameters
    ----------
    folder : Path
        The folder, created if it is missing. Other users lose their permissions for it and its contents.
    max_bytes : int
        The limit of the total size of all blobs. Between two scans of the folder, it may be exceeded by a sixteenth.

    Raises
    ------
    UsageError
        ``remote.cache-folder``: the folder belongs to another user.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        _require_private(folder)
        self._added = max_bytes  # other processes may have filled the cache: the first addition scans it

    def get(self, name: str, out: memoryview) -> bool:
        """Fill ``out`` with a cached range; return False if it is missing or damaged."""
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
        """Add a range, unless it is larger than half the cache."""
        if data.nbytes > self._max_bytes // 2:
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
            due = self._added * _SLACK >= self._max_bytes
            if due:
                self._added = 0
        if due:
            self._shrink()

    def _shrink(self) -> None:
        """Remove the least recently used blobs, and ranges whose blob is missing; one process at a time does this."""
        from filelock import FileLock, Timeout

        with contextlib.suppress(OSError, Timeout), FileLock(self._folder / "lock", mode=_FILE).acquire(timeout=0):
            blobs = []
            for path in (self._folder / "blobs").glob("*/*"):
                with contextlib.suppress(OSError):
                    state = path.stat()
                    blobs.append((state.st_mtime_ns, state.st_size, path))
            total = sum(size for _, size, _ in blobs)
            removed = False
            for _, size, path in sorted(blobs):
                if total <= self._max_bytes:
                    break
                path.unlink(missing_ok=True)
                total = total - size
                removed = True
            if removed:
                digests = {path.name for path in (self._folder / "blobs").glob("*/*")}
                for ref in (self._folder / "ranges").glob("*/*"):
                    with contextlib.suppress(OSError):
                        if ref.read_text("ascii") not in digests:
                            ref.unlink()

    def _write(self, path: Path, data: memoryview) -> None:
        """Write a file that appears in one step, without flushing it, because readers detect damage."""
        for folder in (self._folder, path.parent.parent, path.parent):
            if not folder.is_dir():
                folder.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
                folder.chmod(_FOLDER)  # mkdir applies the umask to its mode
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(temporary, open_flags("O_WRONLY", "O_CREAT", "O_EXCL"), _FILE), "wb") as file:
                file.write(data)
            temporary.chmod(_FILE)
            replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _path(self, subfolder: str, name: str) -> Path:
        if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise ValueError(name)
        return self._folder / subfolder / name[:2] / name


def name_of(url: str, stamp: Stamp, start: int, length: int) -> str:
    """Return the name in ``ranges/`` for a range of a version of a file: a hexadecimal SHA-256."""
    text = "\0".join(map(str, (url, stamp.size, stamp.mtime_ns, stamp.etag, start, length)))
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


_CACHES: dict[tuple[str, int], RangeCache] = {}


def range_cache() -> RangeCache | None:
    """Return the cache that the environment variables configure; None if it is turned off.

    Raises ``UsageError`` ``remote.cache-size``, ``remote.cache-folder``.
    """
    folder = os.environ.get(FOLDER, "")
    if not folder or folder == OFF:
        return None
    text = os.environ.get(SIZE) or DEFAULT_SIZE
    try:
        max_bytes = parse_size(text)
    except UsageError:
        max_bytes = 0
    if max_bytes < 1:
        raise UsageError(f"expected a size such as {DEFAULT_SIZE}, found {text[:40]!r}", rule="remote.cache-size")
    key = (folder, max_bytes)
    if key not in _CACHES:
        _CACHES.setdefault(key, RangeCache(local_path(folder), max_bytes))
    return _CACHES[key]


def _digest(data: memoryview) -> str:
    running = Blake3()
    running.update(data)
    return hex_of(running)


def _require_private(folder: Path) -> None:
    """Remove other users' permissions for a cache, and files that other users added.

    Raises ``UsageError`` ``remote.cache-folder`` for a folder of another user.
    """
    user = user_id()
    try:
        if user is None or not folder.is_dir():
            return
    except OSError:
        return  # not accessible, so nothing will be cached
    try:
        state = folder.stat()
        private = state.st_uid == user
        if private and stat.S_IMODE(state.st_mode) & _OTHER_USERS:
            for path in folder.rglob("*"):
                _make_private(path, user)
            folder.chmod(_FOLDER)  # last, so that after an interruption the next run starts over
    except OSError:
        private = False
    if not private:
        raise UsageError(
            "this folder belongs to another user, who could change the cached bytes: choose another folder "
            f"({FOLDER}, --cache), or remove this one",
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
