"""Translation of errors of the system and of other packages into Ingot's errors, with a rule and advice.

Functions of the Python interface are marked ``@bordered``; the command line calls ``foreign_error`` directly. Two types
of errors pass unchanged: defects of Ingot, and errors of the caller's code, such as a progress callback. System errors
of the caller's code are translated too: no memory, a full disk, text that cannot be encoded.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from ingot.core.files.system import read_error, write_error
from ingot.errors import IngotError, MissingExtraError, ResourceError, UsageError


def require(module: str, extra: str) -> Any:
    """Import and return ``module``.

    Raises
    ------
    MissingExtraError
        The package is not installed; the error names the extra that installs it. Errors that an installed package
        raises while it is imported pass unchanged.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(package, extra) from error


P = ParamSpec("P")
R = TypeVar("R")

_LONGEST = 300  # characters of a message of another package
_NO_MEMORY = (errno.ENOMEM,)
_NO_THREADS = ("can't start new thread", "Resource temporarily unavailable", "pthread_create")
_UNMAPPED = ("failed to map segment", "cannot allocate memory", "Cannot allocate memory", "bad allocation", "bad_alloc")
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)
_READING = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE)
# Exceptions that mean a mistake in the calling code.
_DEFECTS = (TypeError, AttributeError, NameError, AssertionError, LookupError)


def bordered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that errors of the system and of other packages become Ingot's errors."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except IngotError:
            raise
        except Exception as error:
            translated = foreign_error(error)
            if translated is None:
                raise
            raise translated from error

    return call


def foreign_error(error: Exception, *, has_caller: bool = True) -> IngotError | None:
    """Return Ingot's error for an error of the system or of another package.

    Returns None if the error is a defect of Ingot. If other code called Ingot (``has_caller``), also returns None for
    errors that this code raised.
    """
    if isinstance(error, IngotError):
        return error
    translated = _resource_error(error) or _input_error(error)
    if translated is not None:
        return translated
    packages = _packages(error.__traceback__)
    if has_caller and any(is_callers for _, is_callers in packages):
        return None
    return _package_error(error, packages[-1][0] if packages else "ingot")


def _resource_error(error: Exception) -> IngotError | None:
    text = str(error)
    if isinstance(error, MemoryError) or any(sign in text for sign in _UNMAPPED):
        return no_memory()
    if isinstance(error, RuntimeError) and "out of memory" in text:
        return ResourceError(
            f"the device has too little free memory: {_first_line(error)}; compute on another device, or on less data "
            "together",
            rule="device.memory",
        )
    if isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _NO_THREADS):
        return no_threads()
    return system_error(error) if isinstance(error, OSError) and error.errno is not None else None


def _input_error(error: Exception) -> IngotError | None:
    if isinstance(error, UnicodeError):
        return encoding_error(error)
    if isinstance(error, RecursionError):
        return ResourceError("the input is nested too deeply", rule="input.nesting")
    return None


def _package_error(error: Exception, inner: str) -> IngotError | None:
    package = _owner(error, inner)
    if not package or (isinstance(error, _DEFECTS) and package in sys.stdlib_module_names):
        return None
    return ResourceError(
        f"{package} failed: {type(error).__name__}: {_first_line(error)}. Check the input, and which version is "
        "installed",
        rule="package.failed",
    )


def system_error(error: OSError) -> IngotError:
    """Return the error for an error of the operating system, from any call."""
    location = "" if error.filename is None else str(error.filename)
    if error.errno in _NO_MEMORY:
        return no_memory()
    if error.errno in _WRITING:
        return write_error(error, location or "input/output")
    if error.errno in _READING:
        return read_error(error, location or "input/output")
    return ResourceError(
        f"the system refused: {error.strerror or _first_line(error)}; check the file, the disk and the network",
        rule=f"os.{error.errno}",
        where=location or "input/output",
    )


def no_memory() -> ResourceError:
    """Return the error for a machine or process that has no memory left."""
    return ResourceError(
        "not enough memory; give --max-ram (max_ram=), or use a machine with more", rule="ram.exhausted"
    )


def no_threads() -> ResourceError:
    """Return the error for a system that refuses to start another thread or process."""
    return ResourceError(
        "the system refuses to start another thread: use fewer threads (--threads, threads=, OMP_NUM_THREADS), or "
        "raise the limit (ulimit -u)",
        rule="os.threads",
    )


def encoding_error(error: UnicodeError) -> UsageError:
    """Return the error for text that cannot be decoded or encoded, such as half of a pair of surrogates."""
    if isinstance(error, UnicodeDecodeError):
        message = f"expected UTF-8 text, found the bytes {error.object[error.start : error.start + 8]!r}"
    elif isinstance(error, UnicodeEncodeError):
        text = error.object[error.start : error.start + 8]
        message = f"expected text that can be written as UTF-8, found {text!r}: change the name or path"
    else:
        message = f"expected a name that can be encoded: {_first_line(error)}"
    return UsageError(message, rule="text.encoding")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:_LONGEST]


def _packages(trace: TracebackType | None) -> list[tuple[str, bool]]:
    """Return the packages that an error passed through, outermost first, and whether each is the caller's code."""
    packages = []
    while trace is not None:
        frame = trace.tb_frame
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        installed = root == "ingot" or root in sys.stdlib_module_names or "-packages" in frame.f_code.co_filename
        packages.append((root, not installed))
        trace = trace.tb_next
    return packages


def _owner(error: Exception, inner: str) -> str:
    """Return the package of an error: the package of its class, else the one that raised it; empty for Ingot itself."""
    root = type(error).__module__.partition(".")[0]
    if root not in ("builtins", "ingot") and root not in sys.stdlib_module_names:
        return root
    if inner != "ingot":
        return inner
    return "a library" if isinstance(error, RuntimeError | SystemError | ImportError) else ""
