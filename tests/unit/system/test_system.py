"""What other systems lack or do otherwise: a call is taken away, or fails as it does there."""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.core.files import locks, rename, system
from ingot.core.files.oserrors import write_error
from ingot.core.runtime import memory
from ingot.errors import FormatError, UsageError
from ingot.stores.local_names import address_of, file_name, path_text
from ingot.stores.location import Location


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "WINDOWS", True)
    monkeypatch.setattr(system, "PATIENCE", 60.0)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let modules not be found."""
    real = builtins.__import__

    def find(name: str, *rest: Any, **more: Any) -> Any:
        if name in names:
            raise ModuleNotFoundError(name, name=name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", find)


def refusal(code: int) -> PermissionError:
    error = PermissionError(errno.EACCES, "The process cannot access the file")
    error.winerror = code  # type: ignore[attr-defined]
    return error


def test_a_process_whose_calls_fail_as_they_do_on_windows(tmp_path: Path) -> None:
    """Every module is imported; what is converted, patched, kept in a library, replaced while it is open: see there."""
    script = Path(__file__).with_name("as_windows.py")
    result = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[0] == "imported True"
    assert result.stdout.splitlines()[-2:] == ["left []", "names"]


class TestOffsets:
    @pytest.fixture(autouse=True)
    def _no_offsets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "preadv")
        monkeypatch.delattr(os, "pwrite")

    def test_threads_do_not_move_each_others_position(self, tmp_path: Path) -> None:
        pieces = [bytes([i]) * 4096 for i in range(200)]
        descriptor = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
        try:
            with ThreadPoolExecutor(8) as pool:
                places = range(0, 200 * 4096, 4096)
                assert set(
                    pool.map(lambda piece, at: system.write_at(descriptor, memoryview(piece), at), pieces, places)
                ) == {4096}

                def read(at: int) -> bytes:
                    out = bytearray(4096)
                    assert system.read_at(descriptor, memoryview(out), at) == 4096
                    return bytes(out)

                assert list(pool.map(read, places)) == pieces
            assert system.read_at(descriptor, memoryview(bytearray(9)), 200 * 4096) == 0
            assert os.fstat(descriptor).st_size == 200 * 4096  # still open
        finally:
            os.close(descriptor)

    def test_an_error_is_the_systems(self) -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            system.read_at(10**6, memoryview(bytearray(1)), 0)


class TestFlush:
    def test_windows_flushes_files_that_may_be_written_to_and_no_folder(
        self, tmp_path: Path, windows: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = []
        real = os.open
        monkeypatch.setattr(
            os, "open", lambda path, flags, *rest: opened.append((path, flags)) or real(path, flags, *rest)
        )
        (tmp_path / "x").write_bytes(b"x")
        system.flush(tmp_path / "x")
        system.flush(tmp_path)
        assert [path for path, _ in opened] == [tmp_path / "x"]
        assert opened[0][1] & os.O_ACCMODE == os.O_RDWR

    def test_elsewhere_a_folder_that_cannot_be_opened_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(path: object, flags: int) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError):
            system.flush(tmp_path)


class TestPatience:
    CALLS = (
        ("replace", lambda folder: system.replace(folder / "a", folder / "b")),
        ("rename", lambda folder: system.rename(folder / "a", folder / "b")),
        ("unlink", lambda folder: system.remove(folder / "a")),
        ("rmdir", lambda folder: system.remove_tree(folder / "tree")),
    )

    @pytest.mark.parametrize(("name", "call"), CALLS)
    @pytest.mark.parametrize("code", [5, 32, 33, 1224])
    def test_what_is_open_for_a_moment_is_waited_for(
        self, tmp_path: Path, windows: None, monkeypatch: pytest.MonkeyPatch, name: str, call: Any, code: int
    ) -> None:
        (tmp_path / "a").write_bytes(b"a")
        (tmp_path / "tree").mkdir()
        left, real = [code, code], getattr(os, name)

        def busy(*paths: Any, **more: Any) -> None:
            if left:
                raise refusal(left.pop())
            real(*paths, **more)

        monkeypatch.setattr(os, name, busy)
        call(tmp_path)
        assert not left
        assert not (tmp_path / ("tree" if name == "rmdir" else "a")).exists()

    def test_what_stays_open_is_refused_by_name(
        self, tmp_path: Path, windows: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def busy(*_: Any) -> None:
            raise refusal(32)

        monkeypatch.setattr(os, "replace", busy)
        monkeypatch.setattr(system, "PATIENCE", 0.0)
        with pytest.raises(PermissionError) as caught:
            system.replace(tmp_path / "a", tmp_path / "b")
        assert write_error(caught.value, "b").rule == "store.in-use"
        assert write_error(PermissionError(errno.EACCES, "denied"), "b").rule == "store.read-only"

    def test_another_error_is_not_waited_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        monkeypatch.setattr(
            os, "replace", lambda *_: calls.append(1) or (_ for _ in ()).throw(OSError(errno.EXDEV, "other device"))
        )
        with pytest.raises(OSError, match="other device"):
            system.replace(tmp_path / "a", tmp_path / "b")
        assert calls == [1]


class TestNames:
    REFUSED = (
        "a\\b",
        "..\\x",
        "C:",
        "C:x",
        "x:stream",
        "nul",
        "NUL.zt",
        "con .txt",
        "Aux",
        "com1.json",
        "LPT³",
        "x.",
        "x ",
        "a?b",
        "tab\tb",
    )

    @pytest.mark.parametrize("name", REFUSED)
    def test_windows_has_no_file_of_these(self, name: str, windows: None) -> None:
        for whole in (name, f"folder/{name}", f"{name}/file"):
            with pytest.raises(FormatError) as caught:
                file_name(whole, "here")
            assert caught.value.rule == "store.escape"

    @pytest.mark.parametrize(
        "name", ["model.safetensors", "null", "console.txt", "com.x", "com10", ".hidden", "ä β.zt", "lpt"]
    )
    def test_it_has_of_these(self, name: str, windows: None) -> None:
        assert file_name(name, "here") == name

    @pytest.mark.parametrize("name", REFUSED)
    def test_other_systems_have_them_all(self, name: str) -> None:
        assert file_name(name, "here") == name

    @pytest.mark.parametrize(
        ("path", "address"),
        [
            (PureWindowsPath("C:\\models\\a b#1.zt"), "file:///C:/models/a%20b%231.zt"),
            (PureWindowsPath("\\\\server\\share\\a.zt"), "file://server/share/a.zt"),
            (PurePosixPath("/models/a b#1:2.zt"), "file:///models/a%20b%231%3A2.zt"),
        ],
    )
    def test_addresses_of_paths_and_back(self, path: Any, address: str) -> None:
        assert address_of(path) == address
        windows = isinstance(path, PureWindowsPath)
        assert type(path)(path_text(address.removeprefix("file:"), address, windows=windows)) == path

    @pytest.mark.parametrize(
        "address", ["file:C:/x", "file:///x", "file:///x/C:/y", "file:///C:/x?y", "file://localhost/x"]
    )
    def test_windows_wants_a_drive_or_a_share(self, address: str) -> None:
        with pytest.raises(UsageError) as caught:
            path_text(address.removeprefix("file:"), address, windows=True)
        assert caught.value.rule == "store.url"

    @pytest.mark.parametrize("text", ["C:\\models\\x.zt", "c:/models/x.zt", "C://models/x.zt", "C:x.zt"])
    def test_a_drive_is_no_scheme(self, text: str) -> None:
        assert Location.parse(text).scheme == "file"

    def test_two_letters_are_one(self) -> None:
        with pytest.raises(UsageError) as caught:
            Location.parse("cd://models/x.zt").find()
        assert caught.value.rule == "store.scheme"


class TestLocks:
    def test_of_this_system(self, tmp_path: Path) -> None:
        self.three_descriptors(tmp_path / "lock")

    def test_of_windows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By a kernel32 whose LockFileEx is flock here; what it is given is looked at."""
        import fcntl

        places = []

        def lock_file_ex(handle: int, flags: int, reserved: int, low: int, high: int, place: Any) -> int:
            assert (flags & 1, reserved, low, high) == (1, 0, 1, 0)
            places.append((place._obj.offset, place._obj.offset_high))
            try:
                fcntl.flock(handle - 1000, (fcntl.LOCK_EX if flags & 2 else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            return 1

        class Call:
            argtypes: Any = None

            def __call__(self, *arguments: Any) -> int:
                return lock_file_ex(*arguments)

        monkeypatch.setattr(
            ctypes, "WinDLL", lambda name, use_last_error: SimpleNamespace(LockFileEx=Call()), raising=False
        )
        monkeypatch.setattr(ctypes, "get_last_error", lambda: 33, raising=False)
        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda descriptor: descriptor + 1000))
        without(monkeypatch, "fcntl")
        self.three_descriptors(tmp_path / "lock")
        assert set(places) == {(0, 0x7FFF_FFFF)}

    def test_a_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            ctypes,
            "WinDLL",
            lambda name, use_last_error: SimpleNamespace(LockFileEx=type("Call", (), {"__call__": lambda *_: 0})()),
            raising=False,
        )
        monkeypatch.setattr(ctypes, "get_last_error", lambda: 1, raising=False)
        monkeypatch.setattr(ctypes, "WinError", lambda code: OSError(errno.EINVAL, f"winerror {code}"), raising=False)
        monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(get_osfhandle=lambda descriptor: descriptor))
        without(monkeypatch, "fcntl")
        with pytest.raises(OSError, match="winerror 1"):
            locks.lock(0, exclusive=True)

    @staticmethod
    def three_descriptors(path: Path) -> None:
        one, two, three = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3))
        locks.lock(one, exclusive=False)
        locks.lock(two, exclusive=False)
        with pytest.raises(BlockingIOError):
            locks.lock(three, exclusive=True)
        os.close(one)
        os.close(two)
        locks.lock(three, exclusive=True)
        os.close(three)


class TestFigures:
    def test_without_the_module_resource(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        import psutil

        state = SimpleNamespace(memory_info=lambda: SimpleNamespace(peak_wset=12345))
        without(monkeypatch, "resource")
        monkeypatch.setattr(psutil, "Process", lambda: state)
        monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
        assert memory.peak_rss() == 12345
        assert system.most_open() == 8192

    def test_bytes_on_the_disk(self) -> None:
        state: Any = SimpleNamespace(st_size=1000)
        assert system.occupied(state) == 1000
        state.st_blocks = 1
        assert system.occupied(state) == 512
        state.st_blocks = 8
        assert system.occupied(state) == 1000


def test_names_are_not_swapped_where_no_call_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: object, **__: object) -> None:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")  # as on Windows

    monkeypatch.setattr(rename.sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert not rename.exchange(tmp_path / "a", tmp_path / "b")


def test_processes_that_ctrl_c_does_not_reach(windows: None) -> None:
    assert system.own_group() == {"creationflags": 0x200}


def test_a_reader_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    invalid = OSError(errno.EINVAL, "Invalid argument")
    assert system.is_reader_gone(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert not system.is_reader_gone(invalid)
    monkeypatch.setattr(system, "WINDOWS", True)
    assert system.is_reader_gone(invalid)


def test_where_nothing_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "register_at_fork")
    system.after_fork(threading.Lock)
