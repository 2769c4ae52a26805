"""LocalStore by both ways of reading, its sinks, and what a file system can do to them."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import resource
import socket
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

from ingot.errors import FormatError, IngotError, IntegrityError, ResourceError, UsageError
from ingot.model.bytesource import PrivateSource
from ingot.stores import files, local
from ingot.stores.local import LocalSink, LocalStore, LocalTarget
from ingot.testing.stores import ESCAPES, StoreSuite


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def disturb(folder: Path, how: str) -> None:
    """Make another file of ``a``, with the size and the time of modification of the one that was there."""
    before = (folder / "a").stat()
    if how == "removed":
        (folder / "a").unlink()
    elif how == "replaced":
        os.utime(folder / "b", ns=(before.st_atime_ns, before.st_mtime_ns))
        (folder / "b").replace(folder / "a")
    else:
        time.sleep(0.02)  # the clock of file systems ticks a few hundred times a second
        (folder / "a").write_bytes(bytes(before.st_size))
        os.utime(folder / "a", ns=(before.st_atime_ns, before.st_mtime_ns))


class LocalSuite(StoreSuite):
    io = "auto"

    def make(self, folder, files):
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        return LocalStore(folder, io=self.io)

    def test_a_file_that_shrank_is_refused_before_it_is_touched(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        os.truncate(tmp_path / "a", 100)
        for read in (lambda: source.view(0, 10), lambda: source.readinto(0, memoryview(bytearray(10)))):
            with pytest.raises(IntegrityError) as caught:
                read()
            assert caught.value.rule == "store.shrank"
        source.close()

    def test_a_file_that_grows_stays_as_it_was(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        with (tmp_path / "a").open("ab") as file:
            file.write(b"more")
        assert bytes(source.view(0, source.size)) == self.data
        source.close()

    def test_closed_sources_refuse(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        source.close()
        with pytest.raises(UsageError) as caught:
            source.view(0, 1)
        assert caught.value.rule == "store.closed"

    def test_what_is_written_to_a_private_view_is_seen_nowhere_else(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        first, second = (np.frombuffer(PrivateSource(source).view(5, 9000), np.uint8) for _ in range(2))
        shared = np.frombuffer(source.view(5, 9000), np.uint8)
        assert shared.flags.writeable != source.mapped
        first += 1
        assert second.tobytes() == shared.tobytes() == self.data[5:9005]
        assert bytes(source.view(5, 9000)) == self.data[5:9005]
        assert (tmp_path / "a").read_bytes() == self.data
        source.close()
        assert first[0] == 6

    @pytest.mark.parametrize("copy", [deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
    def test_a_copy_is_a_file_of_its_own(self, tmp_path, copy):
        source = self.make(tmp_path, {"a": self.data, "b": bytes(10240)}).open("a")
        twin = copy(source)
        assert (twin.size, twin.mapped, twin.io, twin.stamp) == (source.size, source.mapped, source.io, source.stamp)
        del twin
        gc.collect()
        others = [LocalStore(tmp_path, io=self.io).open("b") for _ in range(3)]
        assert bytes(source.view(0, 100)) == self.data[:100]
        out = bytearray(100)
        source.readinto(0, memoryview(out))
        assert out == self.data[:100]
        source.close()
        with pytest.raises(UsageError) as caught:
            copy(source)
        assert caught.value.rule == "store.closed"
        del others

    @pytest.mark.parametrize("how", ["replaced", "written", "removed"])
    def test_a_copy_of_what_is_another_file_now_is_refused(self, tmp_path, how):
        source = self.make(tmp_path, {"a": self.data, "b": bytes(10240)}).open("a")
        stored = pickle.dumps(source)
        disturb(tmp_path, how)
        with pytest.raises(IngotError) as caught:
            pickle.loads(stored)
        assert caught.value.rule == ("store.missing" if how == "removed" else "store.changed")
        assert source.changed() == (how == "written")  # what was replaced is still open, and as it was
        source.close()
        assert not source.changed()

    def test_a_forked_child_reads_and_leaves_the_parent_its_files(self, tmp_path):
        store = self.make(tmp_path, {"a": self.data, "b": bytes(10240)})
        source = store.open("a")
        read, write = os.pipe()
        child = os.fork()
        if not child:  # no assertion leaves the child: only its answer does
            good = bytes(source.view(0, 10240)) == self.data
            source.close()
            store.open("b")
            os.write(write, b"good" if good else b"bad")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 10) == b"good"
        assert bytes(source.view(0, 10240)) == self.data
        os.close(read)
        os.close(write)
        source.close()

    def test_more_files_than_may_be_open_are_opened_again(self, tmp_path, monkeypatch):
        monkeypatch.setattr(files, "_most_open", lambda: 3)
        names = [f"f{number}" for number in range(20)]
        store = self.make(tmp_path, {name: name.encode() * 5000 for name in names})
        before = len(descriptors())
        sources = [store.open(name) for name in names]
        assert len(descriptors()) <= before + 3
        views = [source.view(100, 3) for source in sources]
        out = [bytearray(1000) for _ in names]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda index: sources[index].readinto(0, memoryview(out[index])), list(range(20)) * 5))
        assert len(descriptors()) <= before + 3
        for name, view, read in zip(names, views, out, strict=True):
            whole = name.encode() * 5000
            assert (bytes(view), read) == (whole[100:103], whole[:1000])
        assert not any(source.changed() for source in sources)
        for source in sources:
            source.close()
        assert len(descriptors()) <= before

    @pytest.mark.parametrize("how", ["replaced", "written"])
    def test_a_file_that_is_opened_again_has_to_be_the_same(self, tmp_path, monkeypatch, how):
        monkeypatch.setattr(files, "_most_open", lambda: 1)
        store = self.make(tmp_path, {"a": self.data, "b": bytes(10240), "c": b""})
        source = store.open("a")
        disturb(tmp_path, how)
        other = store.open("c")
        assert source.changed()
        with pytest.raises(IntegrityError) as caught:
            source.readinto(0, memoryview(bytearray(1)))
        assert caught.value.rule == "store.changed"
        assert not other.changed()

    def test_a_file_that_was_written_with_its_time_put_back_has_changed(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        assert not source.changed()
        disturb(tmp_path, "written")
        assert source.changed()
        source.close()

    def test_links_are_followed_as_model_caches_use_them(self, tmp_path):
        blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
        blobs.mkdir()
        folder.mkdir()
        (blobs / "0af1").write_bytes(self.data)
        (folder / "model").symlink_to("../blobs/0af1")
        store = LocalStore(folder, io=self.io)
        assert store.names() == ["model"]
        source = store.open("model")
        assert bytes(source.view(0, 5)) == self.data[:5]
        source.close()

    def test_links_that_lead_out_are_told(self, tmp_path):
        inside, outside = tmp_path / "store", tmp_path / "elsewhere"
        for folder in (inside / "sub", outside):
            folder.mkdir(parents=True)
        (outside / "a").write_bytes(b"1")
        (inside / "b").write_bytes(b"2")
        (inside / "out").symlink_to("../elsewhere/a")
        (inside / "in").symlink_to("b")
        (inside / "sub" / "up").symlink_to("../b")
        (inside / "sub" / "out").symlink_to("../../elsewhere/a")
        (inside / "folder").symlink_to("../elsewhere")
        store = LocalStore(inside, io=self.io)
        assert store.outside() == ["folder", "out"]
        assert store.outside("sub") == ["out"]
        assert store.folders() == ["folder", "sub"]

    def test_what_is_no_regular_file_is_refused_without_waiting(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "folder").mkdir()
        (tmp_path / "device").symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "socket"))
        store = LocalStore(tmp_path, io=self.io)
        for name in ("fifo", "folder", "device", "socket"):
            with pytest.raises(FormatError) as caught:
                store.open(name)
            assert caught.value.rule == "store.not-a-file"
        assert store.names() == []

    def test_links_in_a_circle_and_into_nothing(self, tmp_path):
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        (tmp_path / "c").symlink_to("nowhere")
        store = LocalStore(tmp_path, io=self.io)
        assert store.names() == []
        for name in ("a", "c"):
            with pytest.raises(IngotError) as caught:
                store.open(name)
            assert caught.value.rule in ("store.missing", "store.read-failed")

    def test_no_descriptor_is_left(self, tmp_path):
        store = self.make(tmp_path, {"a": self.data})
        gc.collect()
        before = descriptors()
        for _ in range(5):
            source = store.open("a")
            source.view(0, 10)
            source.close()
        dropped = store.open("a")
        del dropped
        gc.collect()
        assert descriptors() == before


class TestLocalMmap(LocalSuite):
    io = "mmap"

    def test_views_are_the_mapping_itself(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        assert source.mapped
        assert source.io == "mmap"
        first = np.frombuffer(source.view(0, 100), np.uint8)
        second = np.frombuffer(source.view(0, 100), np.uint8)
        assert np.shares_memory(first, second)
        source.close()

    def test_a_file_larger_than_memory_maps(self, tmp_path):
        with (tmp_path / "big").open("wb") as file:
            file.truncate(1 << 42)
        source = LocalStore(tmp_path, io="mmap").open("big")
        view = source.private((1 << 42) - 8, 8)
        view[0] = 1
        assert bytes(view) == b"\1" + bytes(7)
        assert bytes(source.view((1 << 42) - 8, 8)) == bytes(8)
        source.close()

    def test_torch_takes_a_view_without_a_warning(self, tmp_path):
        torch = pytest.importorskip("torch")
        source = self.make(tmp_path, {"a": self.data}).open("a")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = torch.frombuffer(source.private(0, 1024), dtype=torch.float32)
            tensor += 1
        source.close()
        assert (tmp_path / "a").read_bytes() == self.data

    def test_a_file_system_that_cannot_map(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise OSError(errno.ENODEV, "No such device")

        self.make(tmp_path, {"a": self.data})
        monkeypatch.setattr(files, "map_file", refuse)
        with pytest.raises(ResourceError) as caught:
            LocalStore(tmp_path, io="mmap").open("a")
        assert caught.value.rule == "store.cannot-map"
        source = LocalStore(tmp_path, io="auto").open("a")
        assert source.io == "pread"
        assert bytes(source.view(0, 4)) == self.data[:4]
        source.close()


class TestLocalPread(LocalSuite):
    io = "pread"

    def test_views_are_copies(self, tmp_path):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        assert not source.mapped
        view = source.view(0, 10)
        view[0] = 99
        assert bytes(source.view(0, 1)) == self.data[:1]
        source.close()

    def test_short_reads_are_continued(self, tmp_path, monkeypatch):
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
        source = self.make(tmp_path, {"a": self.data}).open("a")
        assert bytes(source.view(5, 100)) == self.data[5:105]
        source.close()

    def test_the_end_of_the_file_is_a_short_read(self, tmp_path, monkeypatch):
        source = self.make(tmp_path, {"a": self.data}).open("a")
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
        with pytest.raises(IntegrityError) as caught:
            source.view(0, 10)
        assert caught.value.rule == "store.short-read"
        source.close()

    def test_a_broken_disk_is_named(self, tmp_path, monkeypatch):
        def broken(fd, buffers, offset):
            raise OSError(errno.EIO, "Input/output error")

        source = self.make(tmp_path, {"a": self.data}).open("a")
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(ResourceError) as caught:
            source.view(0, 10)
        assert caught.value.rule == "store.read-failed"
        source.close()


class TestLocalAuto(LocalSuite):
    io = "auto"


def test_a_network_file_system_is_read_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr(local, "is_network", lambda folder: True)
    store = LocalStore(tmp_path)
    assert store.io == "pread"
    source = store.open("a")
    assert source.io == "pread"
    source.close()
    source = LocalStore(tmp_path, io="mmap").open("a")
    assert source.io == "mmap"
    source.close()


@pytest.mark.parametrize(
    ("path", "io", "rule"),
    [("nowhere", "auto", "store.missing"), ("file", "auto", "store.not-a-folder"), (".", "fast", "store.io")],
)
def test_what_is_no_folder_or_no_way_to_read(tmp_path, path, io, rule):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        LocalStore(tmp_path / path, io=io)
    assert caught.value.rule == rule


def test_a_folder_name_with_a_nul():
    with pytest.raises(UsageError) as caught:
        LocalStore("a\0b")
    assert caught.value.rule == "store.path"


def test_hidden_files_are_not_listed(tmp_path):
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "seen").write_bytes(b"")
    assert LocalStore(tmp_path).names() == ["seen"]


class TestSink:
    def test_a_name_with_a_folder_makes_the_folder(self, tmp_path):
        for name in ("sub/a", "sub/b"):
            sink = LocalTarget(tmp_path).create(name)
            sink.write_at(0, name.encode())
            sink.close()
        assert LocalStore(tmp_path).names("sub") == ["a", "b"]

    def test_writes_anywhere_and_keeps_what_is_there(self, tmp_path):
        sink = LocalTarget(tmp_path).create("a")
        sink.write_at(4, b"wxyz")
        sink.write_at(0, np.arange(2, dtype=np.uint8).reshape(1, 2).data)
        sink.write_at(9, memoryview(np.empty((0, 2), np.float32)))
        sink.close()
        again = LocalTarget(tmp_path).create("a")
        again.write_at(1, b"B")
        again.truncate(6)
        again.close()
        again.close()
        assert (tmp_path / "a").read_bytes() == b"\0B\0\0wx"

    @pytest.mark.parametrize("name", ESCAPES)
    def test_escapes_are_refused(self, tmp_path, name):
        with pytest.raises(FormatError) as caught:
            LocalTarget(tmp_path).create(name)
        assert caught.value.rule == "store.escape"

    def test_short_writes_are_continued(self, tmp_path, monkeypatch):
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
        sink = LocalSink(tmp_path / "a")
        sink.write_at(0, bytes(range(100)))
        sink.close()
        assert (tmp_path / "a").read_bytes() == bytes(range(100))

    def test_a_really_full_device(self):
        sink = LocalSink(Path("/dev/full"))
        with pytest.raises(ResourceError) as caught:
            sink.write_at(0, b"x" * 10000)
        assert caught.value.rule == "store.disk-full"
        sink.close()

    @pytest.mark.parametrize(
        ("code", "rule"),
        [
            (errno.ENOSPC, "store.disk-full"),
            (errno.EDQUOT, "store.disk-full"),
            (errno.EROFS, "store.read-only"),
            (errno.EACCES, "store.read-only"),
            (errno.EFBIG, "store.file-too-large"),
            (errno.EIO, "store.write-failed"),
        ],
    )
    def test_refusals_of_the_system_have_rules(self, tmp_path, monkeypatch, code, rule):
        def refuse(*args):
            raise OSError(code, os.strerror(code))

        sink = LocalSink(tmp_path / "a")
        monkeypatch.setattr(os, "pwrite", refuse)
        with pytest.raises(ResourceError) as caught:
            sink.write_at(0, b"x")
        assert caught.value.rule == rule
        sink.close()

    def test_the_limit_on_file_sizes(self, tmp_path):
        code = (
            "import resource, sys\n"
            "from pathlib import Path\n"
            "from ingot.errors import ResourceError\n"
            "from ingot.stores.local import LocalSink\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
            "sink = LocalSink(Path(sys.argv[1]))\n"
            "try:\n    sink.write_at(0, bytes(10000))\n"
            "except ResourceError as error:\n    print(error.rule)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "store.file-too-large"

    def test_a_name_that_is_too_long(self, tmp_path):
        with pytest.raises(UsageError) as caught:
            LocalSink(tmp_path / ("x" * 300))
        assert caught.value.rule == "store.name-too-long"

    def test_a_link_is_not_written_through(self, tmp_path):
        (tmp_path / "real").write_bytes(b"keep")
        (tmp_path / "link").symlink_to("real")
        with pytest.raises(ResourceError):
            LocalTarget(tmp_path).create("link")
        assert (tmp_path / "real").read_bytes() == b"keep"


def test_running_out_of_descriptors_is_one_clear_error(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    store = LocalStore(tmp_path)
    first = store.open("a")  # imports and caches are warm
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others, sources = [], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + 40, hard))
    try:
        sources.extend(store.open("a") for _ in range(100))
        while True:
            try:
                others.append(os.open(tmp_path, os.O_RDONLY))
            except OSError:
                break
        sources.append(store.open("a"))  # takes the place of another that was kept
        assert bytes(first.view(0, 1)) == b"x"
        files._OPEN.clear()
        while True:
            try:
                others.append(os.open(tmp_path, os.O_RDONLY))
            except OSError:
                break
        with pytest.raises(ResourceError) as caught:
            store.open("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in others:
            os.close(descriptor)
    assert caught.value.rule == "store.open-files"


def test_the_tree_names_links_and_devices_and_does_not_follow_them(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "around").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "lost").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    assert [*LocalStore(tmp_path).tree()] == ["empty/", "fifo", "lost", "sub/around"]


def test_a_target_is_cut_to_what_is_named(tmp_path: Path) -> None:
    target = LocalTarget(tmp_path)
    for name in ("a", "b/c", "b/d", "e/f/g", ".h"):
        sink = target.create(name)
        sink.write_at(0, b"12345")
        sink.close()
    (tmp_path / "i").symlink_to(tmp_path / "a")
    target.cut({"a": 3, "b/c": 5})
    assert [*target.store().tree()] == ["a", "b/c"]
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b" / "c").read_bytes()) == (b"123", b"12345")
