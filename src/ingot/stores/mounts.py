"""Which file system a folder lies on (Linux: proc_pid_mountinfo(5)); elsewhere every folder counts as local."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
_NETWORK_TYPES = """
9p acfs afs beegfs ceph cifs coda davfs fuse gfs gfs2 glusterfs gpfs lustre mmfs ncpfs nfs nfs4 ocfs2 orangefs panfs
prl_fs pvfs2 smb2 smb3 smbfs vboxsf vmhgfs
"""
NETWORK = frozenset(_NETWORK_TYPES.split())


def is_network(folder: str) -> bool:
    """Whether the resolved absolute path ``folder`` lies on a network file system (any ``fuse.*`` counts as one)."""
    kind = filesystem(folder)
    return kind in NETWORK or kind.startswith("fuse.")


@lru_cache(maxsize=256)
def filesystem(folder: str) -> str:
    """Return the type of the file system that ``folder`` (resolved, absolute) lies on; "" if unknown."""
    try:
        table = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    return _innermost(table, folder)


def _innermost(table: str, folder: str) -> str:
    """Return the type at the longest mount point above ``folder``; of equal ones the last, which hides the others."""
    best, kind = -1, ""
    for line in table.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if not dash or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]).rstrip("/")
        if len(point) >= best and (folder == point or folder.startswith(point + "/")):
            best, kind = len(point), after.split(" ")[0]
    return kind
