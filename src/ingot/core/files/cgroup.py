"""Where the limits of this process's control groups are written (Linux; cgroups(7))."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def limit_files(controller: str) -> Iterator[Path]:
    """Yield the folders that may limit ``controller`` (``cpu``, ``memory``), from this process's group up to the root.

    Version 2 lines read ``0::/path``; version 1 lines ``4:cpu,cpuacct:/path``. In a container the path may name a group
    outside what is mounted: folders that do not exist are left out, and the mount's root is always tried.
    """
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = ROOT / controllers if controllers else ROOT
        if controllers and not base.exists():
            base = ROOT / controller
        group = base / path.lstrip("/")
        chain = [group, *group.parents]
        yield from (folder for folder in chain if folder.is_relative_to(base) and folder.is_dir())
