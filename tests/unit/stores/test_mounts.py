"""Finding the file system of a folder in a mount table."""

from __future__ import annotations

import pytest

from ingot.stores import local as mounts

TABLE = """\
22 27 0:21 / / rw,relatime - ext4 /dev/root rw
30 22 0:30 / /mnt/my\\040disk rw shared:1 - nfs4 server:/x rw
31 22 0:31 / /data rw - ext4 /dev/b rw
32 31 0:32 / /data/remote rw - fuse.sshfs a:/ rw
33 22 0:33 / /data2 rw - cifs //a/b rw
34 22 0:34 / /over rw - ext4 /dev/c rw
35 22 0:35 / /over rw master:2 propagate_from:1 - 9p host rw
36 22 0:36 / /lustre rw - lustre x rw
broken line
"""


@pytest.mark.parametrize(
    ("folder", "kind", "network"),
    [
        ("/", "ext4", False),
        ("/home/a", "ext4", False),
        ("/mnt/my disk", "nfs4", True),
        ("/mnt/my disk/x/y", "nfs4", True),
        ("/mnt/my disk2", "ext4", False),
        ("/data/models", "ext4", False),
        ("/data/remote/m", "fuse.sshfs", True),
        ("/data2", "cifs", True),
        ("/over/there", "9p", True),
        ("/lustre", "lustre", True),
    ],
)
def test_the_innermost_and_last_mount_counts(tmp_path, monkeypatch, folder, kind, network):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    monkeypatch.setattr(mounts, "MOUNTINFO", table)
    mounts.filesystem.cache_clear()
    try:
        assert mounts.filesystem(folder) == kind
        assert mounts.is_network(folder) is network
    finally:
        mounts.filesystem.cache_clear()


def test_without_a_table_everything_is_local(tmp_path, monkeypatch):
    monkeypatch.setattr(mounts, "MOUNTINFO", tmp_path / "none")
    mounts.filesystem.cache_clear()
    try:
        assert not mounts.is_network("/mnt")
    finally:
        mounts.filesystem.cache_clear()
