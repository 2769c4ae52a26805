"""Make this process's calls fail as they do on Windows, then use Ingot: ``python as_windows.py FOLDER``.

What Windows lacks is taken away (modules, calls, flags). Folders cannot be opened, what is open for reading alone
cannot be flushed. A file that this process has open or mapped (``/proc/self`` tells) can be neither replaced nor
removed, nor its folder renamed. Prints what was done, a line each; an exception is a fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import io
import os
import pkgutil
import shutil
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# All that others bring is imported as it is here: this is about Ingot's own calls.
import click
import click.shell_completion
import filelock
import ml_dtypes
import msgspec
import numpy as np
import platformdirs
import psutil
import tqdm

# Of the standard library what looks at the system while it is imported.
sysconfig.get_config_vars()
_LOOKING = "asyncio multiprocessing.pool concurrent.futures.process ssl urllib.request uuid zipfile zoneinfo"
for _name in _LOOKING.split():
    importlib.import_module(_name)
OTHERS = (click.shell_completion, filelock, ml_dtypes, msgspec, platformdirs, psutil, tqdm)
MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
# None of these is a core dependency, and some would not be imported as of another system.
EXTRAS = ("torch", "transformers", "mlx", "mlx_lm", "jax", "lm_eval", "coremltools", "ray", "scipy", "obstore", "gguf")
CALLS = (
    *("preadv", "pwrite", "pread", "pwritev", "readv", "writev", "register_at_fork", "sched_getaffinity", "fork"),
    *("geteuid", "getuid", "getgid", "mkfifo", "killpg", "setsid", "getpgid", "chown", "fchmod", "posix_fadvise"),
    *("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_DIRECTORY", "sysconf", "uname", "getloadavg"),
)
_UNNAMED = os.O_TMPFILE & ~os.O_DIRECTORY  # a temporary file, which Windows removes when it is closed
_CHANGED = ("open", "fsync", "replace", "rename", "unlink")
real = types.SimpleNamespace(**{name: getattr(os, name) for name in _CHANGED})
refused: list[str] = []


def refusal(code: int, path: object) -> PermissionError:
    refused.append(str(path))
    error = PermissionError(errno.EACCES, "The process cannot access the file", str(path))
    error.winerror = code  # type: ignore[attr-defined]
    return error


def held() -> set[str]:
    """Paths of the files that this process has open or mapped."""
    paths = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.add(str(link.readlink()))
    for line in Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines():
        paths.add(line.split(maxsplit=5)[-1])
    return paths


def require_closed(path: os.PathLike[str] | str, code: int) -> None:
    whole = os.path.realpath(path)
    if any(other == whole or other.startswith(f"{whole}/") for other in held()):
        raise refusal(code, path)


def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if not flags & _UNNAMED and Path(path).is_dir():
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return real.open(path, flags, mode, dir_fd=dir_fd)


def flushed(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    real.fsync(descriptor)


def replaced(source: Any, target: Any, **_: Any) -> None:
    require_closed(source, 32)
    if Path(target).is_dir():
        raise refusal(5, target)
    if Path(target).exists():
        require_closed(target, 5)
    real.replace(source, target)


def renamed(source: Any, target: Any, **_: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
    require_closed(source, 5)
    real.rename(source, target)


def removed(path: Any, *, dir_fd: int | None = None) -> None:
    require_closed(path, 32)
    real.unlink(path, dir_fd=dir_fd)


class Library:
    """kernel32 with LockFileEx, by the locks that are here."""

    class LockFileEx:
        argtypes: Any = None

        def __call__(self, handle: int, flags: int, *_: Any) -> bool:
            try:
                fcntl.flock(handle, (fcntl.LOCK_EX if flags & 2 else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def __init__(self, name: str, use_last_error: bool) -> None:
        assert name == "kernel32"
        assert use_last_error
        self.LockFileEx = Library.LockFileEx()  # type: ignore[misc]


def leave_others_alone() -> None:
    """Give the packages that have a branch of their own for Windows, and chose another already, calls as they were."""
    kept = types.ModuleType("os")
    vars(kept).update(vars(os))
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ("filelock", "psutil") and hasattr(module, "os"):
            module.os = kept


def become_windows() -> None:
    leave_others_alone()
    tempfile.gettempdir()
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    for name in CALLS:
        if hasattr(os, name):
            delattr(os, name)
    for name in (*MODULES, *EXTRAS):
        sys.modules[name] = None  # type: ignore[assignment]
    changed: dict[str, Callable[..., Any]] = {"open": opened, "fsync": flushed, "replace": replaced, "rename": renamed}
    for name, call in {**changed, "unlink": removed, "remove": removed}.items():
        setattr(os, name, call)
    sys.modules["msvcrt"] = types.SimpleNamespace(get_osfhandle=lambda descriptor: descriptor)  # type: ignore[assignment]
    ctypes.WinDLL, ctypes.get_last_error = Library, lambda: 33  # type: ignore[attr-defined]
    sys.platform = "win32"


def modules() -> Iterator[str]:
    import ingot

    for module in pkgutil.walk_packages(ingot.__path__, "ingot."):
        if not module.name.startswith("ingot.testing") and not module.name.endswith("__main__"):
            yield module.name


def import_all() -> None:
    count = 0
    for name in modules():
        try:
            importlib.import_module(name)
        except ImportError as error:  # an extra that is not here; ours to say that of is MissingExtraError
            missing = (getattr(error, "name", None) or "").partition(".")[0]
            if type(error).__name__ != "MissingExtraError" and missing not in EXTRAS:
                raise AssertionError(name) from error
        count += 1
    print("imported", count > 500)


def command(*words: object) -> str:
    from ingot.cli.main import run

    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        code = run([str(word) for word in words])
    return f"{code} {written.getvalue()}"


def done(*words: object) -> None:
    result = command(*words)
    assert result.startswith("0 "), (words, result)
    print(words[0])


def use(folder: Path) -> None:
    import ingot
    from ingot.core.files import system
    from ingot.errors import FormatError
    from ingot.stores.local import LocalStore

    assert system.WINDOWS
    rng = np.random.default_rng(0)
    arrays = {f"model.layers.{i}.mlp.up_proj.weight": rng.normal(size=(64, 128)).astype(np.float32) for i in range(3)}
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    ingot.save(a, arrays)
    ingot.save(b, {name: value + np.float32(0.5) * (value > 2) for name, value in arrays.items()})
    done("convert", a, folder / "a.zt", "--recipe", "int4")
    done("verify", folder / "a.zt")
    done("diff", a, b, "-o", folder / "b.zt")
    done("patch", a, folder / "b.zt", "-o", folder / "again.safetensors")
    done("compare", b, folder / "again.safetensors")
    for _ in range(2):  # a folder, which steps aside for the second
        done("convert", a, folder / "npy", "--format", "npydir", "--overwrite")
    done("convert", folder.joinpath("npy").as_uri(), folder / "back.zt")
    done("store", "add", folder / "lib", a, "--name", "one")
    done("store", "add", folder / "lib", b, "--name", "two")
    done("store", "rm", folder / "lib", "one")
    done("store", "gc", folder / "lib")
    system.PATIENCE = 0.1
    with ingot.open(a) as held_open:
        result = command("convert", b, a, "--overwrite")
        assert "store.in-use" in result, result
        assert len(held_open) == 3
    assert refused
    done("convert", b, a, "--overwrite")
    left = sorted(path.name for path in folder.iterdir() if path.name.endswith(".ingot-partial"))
    print("left", left)
    for name in ("..\\a.zt", "C:a.zt", "NUL", "aux.txt", "a.zt.", "a/com1.x/b"):
        with contextlib.suppress(FormatError):
            LocalStore(folder).open(name)
            raise AssertionError(name)
    print("names")


if __name__ == "__main__":
    become_windows()
    import_all()
    use(Path(sys.argv[1]))
