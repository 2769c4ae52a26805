"""Staging and atomic_write: whole or not at all, and nothing left."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from ingot.core.files import atomic
from ingot.core.files.atomic import Staging, atomic_write
from ingot.errors import IngotError, ResourceError, UsageError


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def put(staging: Staging, **files: bytes) -> list[str]:
    for name, data in files.items():
        (staging.files / name).write_bytes(data)
    return list(files)


class TestSingleFile:
    def test_the_file_appears_only_when_published(self, tmp_path):
        dst = tmp_path / "x.zt"
        with Staging(dst) as staging:
            names = put(staging, model=b"new")
            assert not dst.exists()
            assert staging.publish(names) == dst
        assert dst.read_bytes() == b"new"
        assert listed(tmp_path) == ["x.zt"]

    def test_an_old_file_stays_until_then(self, tmp_path):
        dst = tmp_path / "x.zt"
        dst.write_bytes(b"old")
        with contextlib.suppress(ZeroDivisionError), Staging(dst, overwrite=True) as staging:
            put(staging, model=b"new")
            raise ZeroDivisionError
        assert dst.read_bytes() == b"old"
        assert listed(tmp_path) == ["x.zt"]

    def test_a_file_that_is_there_is_refused_at_once(self, tmp_path):
        (tmp_path / "x").write_bytes(b"old")
        with pytest.raises(UsageError) as caught:
            Staging(tmp_path / "x")
        assert caught.value.rule == "target.exists"
        assert listed(tmp_path) == ["x"]

    def test_a_file_that_appears_meanwhile_is_refused_at_the_end(self, tmp_path):
        with Staging(tmp_path / "x") as staging:
            names = put(staging, model=b"new")
            (tmp_path / "x").write_bytes(b"other")
            with pytest.raises(UsageError) as caught:
                staging.publish(names)
        assert caught.value.rule == "target.exists"
        assert (tmp_path / "x").read_bytes() == b"other"

    def test_strays_are_dropped(self, tmp_path):
        with Staging(tmp_path / "x") as staging:
            put(staging, a=b"1", b=b"2")
            (staging.files / "folder").mkdir()
            staging.journal.write_text("{}")
            staging.publish(["a"])
        assert listed(tmp_path) == ["x"]

    @pytest.mark.parametrize("names", [[], ["a", "b"]])
    def test_exactly_one_file_is_wanted(self, tmp_path, names):
        with Staging(tmp_path / "x") as staging:
            put(staging, a=b"1", b=b"2")
            with pytest.raises(UsageError) as caught:
                staging.publish(names)
            assert caught.value.rule == "target.one-file"
        assert listed(tmp_path) == []

    def test_a_name_that_was_never_written(self, tmp_path):
        with Staging(tmp_path / "x") as staging, pytest.raises(ResourceError) as caught:
            staging.publish(["a"])
        assert caught.value.rule == "store.write-failed"
        assert listed(tmp_path) == []

    def test_a_link_is_followed(self, tmp_path):
        (tmp_path / "disk").mkdir()
        (tmp_path / "disk" / "real").write_bytes(b"old")
        (tmp_path / "x").symlink_to("disk/real")
        with Staging(tmp_path / "x", overwrite=True) as staging:
            staging.publish(put(staging, model=b"new"))
        assert (tmp_path / "x").is_symlink()
        assert (tmp_path / "disk" / "real").read_bytes() == b"new"

    def test_everything_reaches_the_disk_before_the_name(self, tmp_path, monkeypatch):
        events = []
        real_sync, real_replace = os.fsync, Path.replace
        monkeypatch.setattr(
            os, "fsync", lambda fd: events.append(Path(f"/proc/self/fd/{fd}").readlink().name) or real_sync(fd)
        )
        monkeypatch.setattr(
            Path, "replace", lambda self, target: events.append("replace") or real_replace(self, target)
        )
        with Staging(tmp_path / "x") as staging:
            staging.publish(put(staging, model=b"new"))
        assert events == ["model", "replace", tmp_path.name]

    def test_after_publishing_it_is_closed(self, tmp_path):
        staging = Staging(tmp_path / "x")
        staging.publish(put(staging, model=b"new"))
        with pytest.raises(UsageError) as caught:
            staging.publish(["model"])
        assert caught.value.rule == "target.closed"
        staging.discard()
        staging.keep()
        assert listed(tmp_path) == ["x"]


class TestFolder:
    def test_all_files_at_once(self, tmp_path):
        dst = tmp_path / "m"
        with Staging(dst, directory=True) as staging:
            names = put(staging, a=b"1", b=b"2", stray=b"3")[:2]
            (staging.files / "sub").mkdir()
            (staging.files / "sub" / "c").write_bytes(b"4")
            staging.publish([*names, "sub/c"])
        assert sorted(path.name for path in dst.rglob("*")) == ["a", "b", "c", "sub"]
        assert listed(tmp_path) == ["m"]

    def test_an_empty_folder_is_taken(self, tmp_path):
        (tmp_path / "m").mkdir()
        with Staging(tmp_path / "m", directory=True) as staging:
            staging.publish(put(staging, a=b"1"))
        assert listed(tmp_path / "m") == ["a"]

    def test_a_full_folder_is_refused_at_once(self, tmp_path):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "old").write_bytes(b"")
        with pytest.raises(UsageError) as caught:
            Staging(tmp_path / "m", directory=True)
        assert caught.value.rule == "target.exists"
        assert listed(tmp_path) == ["m"]

    def test_a_folder_that_fills_up_meanwhile_is_refused_at_the_end(self, tmp_path):
        with Staging(tmp_path / "m", directory=True) as staging:
            names = put(staging, a=b"1")
            (tmp_path / "m").mkdir()
            (tmp_path / "m" / "other").write_bytes(b"")
            with pytest.raises(UsageError) as caught:
                staging.publish(names)
        assert caught.value.rule == "target.exists"
        assert listed(tmp_path / "m") == ["other"]

    def test_overwriting_replaces_the_folder(self, tmp_path):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "old").write_bytes(b"")
        with Staging(tmp_path / "m", directory=True, overwrite=True) as staging:
            staging.publish(put(staging, new=b"1"))
        assert listed(tmp_path / "m") == ["new"]
        assert listed(tmp_path) == ["m"]

    def test_a_swap_that_fails_halfway_puts_the_old_folder_back(self, tmp_path, monkeypatch):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "old").write_bytes(b"")
        real = Path.rename

        def rename(self, target):
            if self.name == "files":
                raise OSError(errno.EIO, "Input/output error")
            return real(self, target)

        with Staging(tmp_path / "m", directory=True, overwrite=True) as staging:
            names = put(staging, new=b"1")
            monkeypatch.setattr(Path, "rename", rename)
            monkeypatch.setattr(atomic, "exchange", lambda one, other: False)
            with pytest.raises(ResourceError):
                staging.publish(names)
        assert listed(tmp_path / "m") == ["old"]
        assert listed(tmp_path) == ["m"]

    def test_every_folder_in_it_is_flushed_before_the_name(self, tmp_path, monkeypatch):
        flushed, real = [], atomic.flush
        monkeypatch.setattr(atomic, "flush", lambda path: flushed.append(path.name) or real(path))
        with Staging(tmp_path / "m", directory=True) as staging:
            (staging.files / "one" / "two").mkdir(parents=True)
            (staging.files / "one" / "two" / "a").write_bytes(b"1")
            staging.publish(["one/two/a"])
        assert flushed == ["a", "two", "one", "files", tmp_path.name]

    @pytest.mark.parametrize("exchanging", [True, False])
    def test_killed_at_any_step_of_replacing(self, tmp_path, exchanging):
        """The old folder or the new one is there at any time (without an exchange: after the next run), whole; and the
        next run, resumed or not, replaces it."""
        code = (
            "import os, shutil, sys\n"
            "from pathlib import Path\n"
            "from ingot.core.files import atomic\n"
            "def counted(call, left):\n"
            "    def wrapped(*args, **kwargs):\n"
            "        left[0] -= 1\n"
            "        if not left[0]: os._exit(9)\n"
            "        return call(*args, **kwargs)\n"
            "    return wrapped\n"
            "if not int(sys.argv[2]): atomic.exchange = lambda one, other: False\n"
            "for step in range(1, 6):\n"
            "    if os.fork(): continue\n"
            "    dst = Path(sys.argv[1]) / str(step) / 'm'\n"
            "    with atomic.Staging(dst, directory=True, overwrite=True) as staging:\n"
            "        (staging.files / 'new').write_bytes(b'1')\n"
            "        left = [step]\n"
            "        for owner, name in ((Path, 'rename'), (atomic, 'flush'), (shutil, 'rmtree'), (Path, 'unlink')):\n"
            "            setattr(owner, name, counted(getattr(owner, name), left))\n"
            "        staging.publish(['new'])\n"
            "for _ in range(5): assert os.waitstatus_to_exitcode(os.wait()[1]) == 9\n"
        )
        targets = [tmp_path / str(step) / "m" for step in range(1, 6)]
        for dst in targets:
            dst.mkdir(parents=True)
            (dst / "old").write_bytes(b"0")
        subprocess.run([sys.executable, "-c", code, str(tmp_path), str(int(exchanging))], check=True)
        for dst in targets:
            if exchanging:
                assert listed(dst) in (["old"], ["new"])
            with Staging(dst, directory=True, overwrite=True, resume=True) as staging:
                assert listed(dst) in (["old"], ["new"])
                (staging.files / "newer").write_bytes(b"2")
                staging.publish(["newer"])
            assert listed(dst) == ["newer"]
            assert listed(dst.parent) == ["m"]

    def test_only_what_is_ours_is_replaced(self, tmp_path):
        def refuse(folder):
            raise UsageError("foreign", rule="target.foreign")

        (tmp_path / "m").mkdir()
        with Staging(tmp_path / "m", directory=True, overwrite=True, require_ours=refuse) as staging:
            names = put(staging, new=b"1")
            (tmp_path / "m" / "diary").write_bytes(b"0")  # meanwhile
            with pytest.raises(UsageError, match="foreign"):
                staging.publish(names)
        with pytest.raises(UsageError, match="foreign"):
            Staging(tmp_path / "m", directory=True, overwrite=True, require_ours=refuse)
        assert listed(tmp_path / "m") == ["diary"]
        assert listed(tmp_path) == ["m"]

    def test_a_kill_between_the_two_renames_is_repaired_by_the_next_run(self, tmp_path):
        partial = tmp_path / ".m.ingot-partial"
        (partial / "replaced").mkdir(parents=True)
        (partial / "replaced" / "old").write_bytes(b"")
        (partial / "files").mkdir()
        Staging(tmp_path / "m", directory=True, overwrite=True).discard()
        assert listed(tmp_path / "m") == ["old"]
        assert listed(tmp_path) == ["m"]


class TestTargets:
    @pytest.mark.parametrize("directory", [False, True])
    def test_the_parent_must_exist(self, tmp_path, directory):
        with pytest.raises(UsageError) as caught:
            Staging(tmp_path / "no" / "x", directory=directory)
        assert caught.value.rule == "target.no-parent"

    def test_devices_and_folders_are_no_files(self, tmp_path):
        for dst in (Path("/dev/null"), tmp_path):
            with pytest.raises(UsageError) as caught:
                Staging(dst)
            assert caught.value.rule == "target.not-a-file"
        assert Path("/dev/null").is_char_device()

    def test_a_file_is_no_folder(self, tmp_path):
        (tmp_path / "x").write_bytes(b"")
        with pytest.raises(UsageError) as caught:
            Staging(tmp_path / "x", directory=True)
        assert caught.value.rule == "target.not-a-folder"

    @pytest.mark.parametrize("name", ["/", ".."])
    def test_a_name_is_needed(self, name):
        with pytest.raises(UsageError) as caught:
            Staging(name)
        assert caught.value.rule == "target.name"

    @pytest.mark.parametrize("name", ["x" * 241, "x" * 255, "\u00e4" * 127, os.fsdecode(b"\xff" * 255)])
    def test_the_longest_name_has_a_shorter_one_while_it_is_staged(self, tmp_path, name):
        with contextlib.suppress(KeyError), Staging(tmp_path / name, resume=True) as staging:
            put(staging, model=b"half")
            raise KeyError  # interrupted: the same folder is found again
        with Staging(tmp_path / name, resume=True) as staging:
            assert staging.resumed
            staging.publish(["model"])
        atomic_write(tmp_path / f"{name[:-1]}y", b"whole")
        assert sorted((tmp_path / last).read_bytes() for last in listed(tmp_path)) == [b"half", b"whole"]

    @pytest.mark.parametrize("function", ["_recover", "_empty", "_remove_folder"])
    def test_an_interrupt_in_any_step_leaves_nothing_after_the_clean_up(self, tmp_path, monkeypatch, function):
        for interrupted_call in (1, 2):
            calls = iter(range(1, 10))
            original = getattr(Staging, function)

            def stop(staging, original=original, calls=calls, last=interrupted_call):
                if next(calls) == last:
                    raise KeyboardInterrupt
                original(staging)

            with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                patch.setattr(Staging, function, stop)
                with Staging(tmp_path / "x") as staging:
                    put(staging, model=b"half")
            atomic.clean_up()
            assert listed(tmp_path) == []

    def test_the_clean_up_keeps_the_files_of_a_run_that_resumes(self, tmp_path):
        staging = Staging(tmp_path / "x", resume=True)
        put(staging, model=b"half")
        atomic.clean_up()
        with Staging(tmp_path / "x", resume=True) as staging:
            assert staging.resumed

    def test_the_clean_up_spares_the_folder_of_another_process(self, tmp_path):
        with Staging(tmp_path / "x") as staging:
            put(staging, model=b"half")
            with pytest.raises(ResourceError):
                Staging(tmp_path / "x")
            atomic._UNFINISHED.discard(staging)  # as if another process had created it
            atomic.clean_up()
            staging.publish(["model"])
        assert (tmp_path / "x").read_bytes() == b"half"

    def test_a_name_longer_than_the_file_system_has(self, tmp_path):
        for name in ("x" * 256, "\u00e4" * 128):
            for write in (Staging, lambda path: atomic_write(path, b"")):
                with pytest.raises(UsageError) as caught:
                    write(tmp_path / name)
                assert caught.value.rule == "store.name-too-long"
        assert listed(tmp_path) == []

    @pytest.mark.parametrize(
        ("code", "rule"),
        [(errno.EROFS, "store.read-only"), (errno.EACCES, "store.read-only"), (errno.ENOSPC, "store.disk-full")],
    )
    def test_a_folder_that_takes_nothing(self, tmp_path, monkeypatch, code, rule):
        def refuse(*args, **kwargs):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ResourceError) as caught:
            Staging(tmp_path / "x")
        assert caught.value.rule == rule

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_really_read_only_folder(self, tmp_path):
        (tmp_path / "r").mkdir()
        (tmp_path / "r").chmod(0o500)
        with pytest.raises(ResourceError) as caught:
            Staging(tmp_path / "r" / "x")
        assert caught.value.rule == "store.read-only"

    def test_a_kernel_folder_that_nobody_writes_to(self):
        with pytest.raises(ResourceError):
            Staging("/proc/ingot-test")

    def test_a_second_writer_is_told(self, tmp_path):
        with Staging(tmp_path / "x") as staging:
            with pytest.raises(ResourceError) as caught:
                Staging(tmp_path / "x")
            assert caught.value.rule == "store.locked"
            staging.publish(put(staging, model=b"new"))
        Staging(tmp_path / "x", overwrite=True).discard()
        assert (tmp_path / "x").read_bytes() == b"new"

    def test_a_lock_that_was_removed_meanwhile_is_not_taken(self, tmp_path, monkeypatch):
        real = FileLock.acquire

        def acquire(self, *args, **kwargs):
            result = real(self, *args, **kwargs)
            Path(self.lock_file).unlink()
            return result

        monkeypatch.setattr(FileLock, "acquire", acquire)
        with pytest.raises(ResourceError) as caught:
            Staging(tmp_path / "x")
        assert caught.value.rule == "store.locked"

    def test_a_file_where_the_staging_folder_should_be(self, tmp_path):
        (tmp_path / ".x.ingot-partial").write_bytes(b"")
        with pytest.raises(ResourceError) as caught:
            Staging(tmp_path / "x")
        assert caught.value.rule == "store.write-failed"


class TestResume:
    def test_what_was_kept_is_found_again(self, tmp_path):
        first = Staging(tmp_path / "x")
        assert not first.resumed
        put(first, model=b"half")
        first.journal.write_text("line")
        first.keep()
        second = Staging(tmp_path / "x", resume=True)
        assert second.resumed
        assert second.journal.read_text() == "line"
        assert (second.files / "model").read_bytes() == b"half"
        second.publish(["model"])
        assert listed(tmp_path) == ["x"]

    def test_without_resume_it_is_thrown_away(self, tmp_path):
        first = Staging(tmp_path / "x")
        put(first, model=b"half")
        first.journal.write_text("line")
        first.keep()
        second = Staging(tmp_path / "x")
        assert not second.resumed
        assert not second.journal.exists()
        assert listed(second.files) == []
        second.discard()
        assert listed(tmp_path) == []

    def test_nothing_to_resume(self, tmp_path):
        staging = Staging(tmp_path / "x", resume=True)
        assert not staging.resumed
        staging.discard()
        assert listed(tmp_path) == []

    def test_a_killed_process_leaves_no_final_name_and_no_lock(self, tmp_path):
        code = (
            "import sys, time\n"
            "from ingot.core.files.atomic import Staging\n"
            "staging = Staging(sys.argv[1])\n"
            "(staging.files / 'model').write_bytes(b'half')\n"
            "print('ready', flush=True)\n"
            "time.sleep(60)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "x")], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "ready\n"
            with pytest.raises(ResourceError) as caught:
                Staging(tmp_path / "x")
            assert caught.value.rule == "store.locked"
            process.send_signal(signal.SIGKILL)
        assert not (tmp_path / "x").exists()
        with Staging(tmp_path / "x", resume=True) as staging:
            assert staging.resumed
            assert (staging.files / "model").read_bytes() == b"half"
        assert listed(tmp_path) == []


class TestAtomicWrite:
    def test_it_replaces(self, tmp_path):
        atomic_write(tmp_path / "a", b"1")
        atomic_write(tmp_path / "a", memoryview(b"22"))
        assert (tmp_path / "a").read_bytes() == b"22"
        assert listed(tmp_path) == ["a"]

    def test_threads_and_leftovers_are_not_in_the_way(self, tmp_path):
        (tmp_path / f".a.{os.getpid()}.ingot-partial").write_bytes(b"of a killed process with this number")
        failed = []

        def write(number):
            for _ in range(25):
                try:
                    atomic_write(tmp_path / "a", bytes([number]) * 100)
                except IngotError as error:
                    failed.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert len(set((tmp_path / "a").read_bytes())) == 1

    def test_what_is_there_stays_unless_it_may_be_replaced(self, tmp_path):
        atomic_write(tmp_path / "a", b"1", overwrite=False)
        with pytest.raises(UsageError) as caught:
            atomic_write(tmp_path / "a", b"2", overwrite=False)
        assert caught.value.rule == "target.exists"
        assert (tmp_path / "a").read_bytes() == b"1"

    def test_a_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        def full(fd):
            raise OSError(errno.ENOSPC, "No space left on device")

        atomic_write(tmp_path / "a", b"1")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ResourceError) as caught:
            atomic_write(tmp_path / "a", b"22")
        assert caught.value.rule == "store.disk-full"
        assert (tmp_path / "a").read_bytes() == b"1"
        assert listed(tmp_path) == ["a"]

    @pytest.mark.parametrize(("name", "rule"), [("no/a", "target.no-parent"), (".", "target.not-a-file")])
    def test_bad_places(self, tmp_path, name, rule):
        with pytest.raises(IngotError) as caught:
            atomic_write(tmp_path / name, b"1")
        assert caught.value.rule == rule


@pytest.mark.slow
def test_many_writers_of_one_target_never_mix(tmp_path):
    """Each writes two files that carry its own number; whoever gets the lock publishes a folder of one number only."""
    code = (
        "import sys\n"
        "from ingot.core.files.atomic import Staging\n"
        "from ingot.errors import ResourceError\n"
        "for _ in range(60):\n"
        "    try:\n"
        "        with Staging(sys.argv[1], directory=True, overwrite=True) as staging:\n"
        "            for name in ('a', 'b'):\n"
        "                (staging.files / name).write_text(sys.argv[2])\n"
        "            staging.publish(['a', 'b'])\n"
        "    except ResourceError as error:\n"
        "        assert error.rule == 'store.locked', error\n"
    )
    dst = tmp_path / "m"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(dst), str(number)]) for number in range(3)]
    deadline = time.monotonic() + 120
    assert [process.wait(max(1, deadline - time.monotonic())) for process in processes] == [0, 0, 0]
    assert (dst / "a").read_text() == (dst / "b").read_text()
    assert listed(tmp_path) == ["m"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no folders")
def test_a_place_that_takes_no_folders_is_not_called_locked() -> None:
    with pytest.raises(ResourceError) as caught:
        Staging(Path("/proc/x.zt"))
    assert caught.value.rule in ("store.write-failed", "store.read-only")
