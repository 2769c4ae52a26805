"""Sizes as text, and the memory of this process and this machine."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from ingot.core.files.system import peak_resident
from ingot.core.runtime import native
from ingot.errors import ResourceError, UsageError


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch automatic garbage collection off during the context; afterwards restore its state.

    A manifest of 10,000 tensors creates 100,000 containers, which the collector would scan repeatedly without effect.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def limit_files(controller: str) -> Iterator[Path]:
    """Yield the cgroup folders that may limit ``controller`` (``cpu``, ``memory``), from this process's group up to the
    root.

    A line of ``/proc/self/cgroup`` is ``0::/path`` in version 2, and ``4:cpu,cpuacct:/path`` in version 1. In a
    container the path may name a group outside the mounted tree: folders that do not exist are skipped, and the mount's
    root is always included.
    """
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = ROOT / controllers if controllers else ROOT
        if controllers and not base.exists():
            base = ROOT / controller
        group = base / path.lstrip("/")
        chain = [group, *group.parents]
        yield from (folder for folder in chain if folder.is_relative_to(base) and folder.is_dir())


_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgtp]?)(i?)(b?)\s*\Z", re.IGNORECASE)
_POWERS = "kmgtp"
_STATUS = Path("/proc/self/status")


def parse_size(text: str | int) -> int:
    """Return the number of bytes that ``text`` states, such as ``1.5GiB``.

    ``GiB`` is 2**30, ``GB`` 10**9, and a bare ``G`` 2**30 as in GNU coreutils ("Block size"); no unit means bytes.

    Raises
    ------
    UsageError
        ``size.syntax``: not a size, or negative.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None or (match[3] and not match[2]):
        raise UsageError(
            f"expected a size such as 2GiB, 500MB or 1048576, found {str(text)[:80]!r}", rule="size.syntax"
        )
    number, prefix, binary, unit = match.groups()
    base = 1000 if unit and not binary else 1024
    power = _POWERS.index(prefix.lower()) + 1 if prefix else 0
    return int(Fraction(number) * base**power)


def format_size(count: int) -> str:
    """Return a number of bytes in binary units with three significant digits: ``532 B``, ``1.50 GiB``."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    unit = "B"
    for prefix in _POWERS.upper():
        value = value / 1024
        unit = f"{prefix}iB"
        if value < 999.5:
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def anonymous_rss() -> int:
    """Return this process's resident anonymous bytes: heap, stacks and written copy-on-write pages, not mapped files.

    On Linux this is ``RssAnon`` of proc_pid_status(5): psutil's ``rss`` minus ``shared``. On other systems it is
    psutil's ``uss``, the memory that no other process shares.
    """
    import psutil

    process = psutil.Process()
    used = process.memory_info()
    return int(used.rss - used.shared if hasattr(used, "shared") else process.memory_full_info().uss)


def anonymous_in_use() -> int:
    """Return ``anonymous_rss`` after the C library has returned freed memory to the system.

    The library keeps freed memory for later requests, up to tens of megabytes per thread. Callers that plan the use of
    memory under a limit need the value without it.
    """
    native.kernels.release_freed()
    return anonymous_rss()


def resident() -> int:
    """Return this process's resident set in bytes, including mapped pages of files."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_rss() -> int:
    """Return the highest resident set of this process so far in bytes, including mapped files.

    On Linux this is ``VmHWM``, because ``ru_maxrss`` is inherited from the parent across fork and exec. On other
    systems it is the value of ``core.files.system.peak_resident``.
    """
    high_water = _high_water()
    if high_water is not None:
        return high_water
    return peak_resident()


def available_ram() -> int:
    """Return the number of bytes that can be allocated without swapping.

    This is the machine's available memory by psutil (Linux: ``MemAvailable``), limited by the control groups (v1 or v2)
    of this process, which psutil ignores. Page cache that can be dropped counts as free.
    """
    import psutil

    rooms = [room for room in map(_room, limit_files("memory")) if room is not None]
    return max(0, min([int(psutil.virtual_memory().available), *rooms]))


def require_ram(
    nbytes: int, purpose: str, advice: str, max_ram: int | str | None = None, location: str | None = None
) -> None:
    """Raise an error before an allocation that does not fit into memory.

    Parameters
    ----------
    nbytes : int
        Bytes to allocate.
    purpose, advice : str
        For the message: the use of the memory, and the advice if there is too little.
    max_ram : int or str, optional
        A limit that replaces ``available_ram``.
    location : str, optional
        The file or tensor in the message.

    Raises
    ------
    ResourceError
        ``ram.guard``: less than ``nbytes`` are available.
    """
    room = available_ram() if max_ram is None else parse_size(max_ram)
    if nbytes > room:
        raise ResourceError(
            f"expected room for {format_size(nbytes)} of {purpose}, found {format_size(room)}; {advice}",
            rule="ram.guard",
            where=location,
        )


def _room(folder: Path) -> int | None:
    """Return the number of free bytes of one control group: limit - used + droppable cache; None if it sets no
    limit.
    """
    modern = (folder / "memory.max").exists()
    limit = _number(folder / ("memory.max" if modern else "memory.limit_in_bytes"))
    used = _number(folder / ("memory.current" if modern else "memory.usage_in_bytes"))
    if limit is None or used is None:
        return None
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    key = "inactive_file " if modern else "total_inactive_file "
    cache = next((int(line.removeprefix(key)) for line in lines if line.startswith(key)), 0)
    return limit - used + cache


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _high_water() -> int | None:
    try:
        lines = _STATUS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
