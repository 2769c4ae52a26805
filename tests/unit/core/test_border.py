"""Errors of the system and of other packages leave Ingot as its own; the caller's own errors pass unchanged."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli import main
from ingot.core.border import bordered, foreign_error
from ingot.errors import IngotError

WEIGHTS = {f"model.layers.{layer}.mlp.up_proj.weight": np.ones((256, 512), np.float32) for layer in range(3)}


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (MemoryError(), "ram.exhausted"),
        (np._core._exceptions._ArrayMemoryError((1,), np.dtype("u1")), "ram.exhausted"),
        (ImportError("libx.so: failed to map segment from shared object"), "ram.exhausted"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "ram.exhausted"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "device.memory"),
        (RuntimeError("can't start new thread"), "os.threads"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "os.threads"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "store.disk-full"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), "store.name-too-long"),
        (OSError(errno.EMFILE, "Too many open files", "x"), "store.open-files"),
        (OSError(errno.EROFS, "Read-only file system", "x"), "store.read-only"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "store.denied"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x"), "store.missing"),
        (OSError(errno.EIO, "Input/output error", "x"), "os.5"),
        (UnicodeEncodeError("utf-8", "a\ud800", 1, 2, "surrogates not allowed"), "text.encoding"),
        (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid start byte"), "text.encoding"),
        (RecursionError("maximum recursion depth exceeded"), "input.nesting"),
    ],
)
def test_an_error_of_the_system_has_a_rule(error: Exception, rule: str, tmp_path: Path) -> None:
    with pytest.raises(IngotError) as caught:
        bordered(raising(error))()
    assert caught.value.rule == rule
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)
    str(caught.value).encode()


def test_an_error_of_another_package_has_its_name() -> None:
    safetensors = pytest.importorskip("safetensors")

    def read() -> None:
        safetensors.deserialize(b"nothing")

    found = foreign_error(caught_by(read), has_caller=False)
    assert found is not None
    assert found.rule == "package.failed"
    assert "safetensors" in str(found)


def test_what_the_callers_own_code_raises_passes(tmp_path: Path) -> None:
    class OwnError(Exception):
        pass

    ingot.save(tmp_path / "a.zt", WEIGHTS)
    for error in (OwnError("stop"), RuntimeError("stop"), OSError("stop"), KeyError("stop")):
        with pytest.raises(type(error)) as caught:
            ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", progress=raising(error))
        assert caught.value is error
    with pytest.raises(KeyError):
        ingot.open(tmp_path / "a.zt")["absent"]


def caught_by(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError


def test_a_system_without_further_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingot.save(tmp_path / "a.safetensors", WEIGHTS)
    ingot.save(tmp_path / "b.safetensors", {name: values * 2 for name, values in WEIGHTS.items()})
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for call in (
        lambda: ingot.convert(a, tmp_path / "c.zt", "int4"),
        lambda: ingot.compare(a, b),
        lambda: ingot.diff(a, b, tmp_path / "d.zt"),
        lambda: ingot.seal(a),
    ):
        with pytest.raises(IngotError) as caught:
            call()
        assert caught.value.rule == "os.threads"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("text", ["a\ud800.zt", "x/\udfff", "y" * 300 + ".zt", "z/" * 3000 + "q.zt", "\0"])
def test_a_path_that_no_file_has(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ingot.save("a.zt", WEIGHTS)
    for call in (
        lambda: ingot.open(text),
        lambda: ingot.save(text, WEIGHTS),
        lambda: ingot.convert("a.zt", text),
        lambda: ingot.convert("a.zt", "b.zt", text),
        lambda: ingot.execute(text),
        lambda: ingot.seal(text),
        lambda: ingot.report("a.zt", out=text),
        lambda: ingot.Library(text).ls(),
        lambda: ingot.Library("lib").add("a.zt", text),
        lambda: ingot.Library("lib").url_of(text),
    ):
        with pytest.raises(IngotError) as caught:
            call()
        str(caught.value).encode()


def test_bytes_that_are_not_utf8_may_be_in_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source, target = (os.fsdecode(name) for name in (b"a\xff.safetensors", b"b\xff.zt"))
    ingot.save(source, WEIGHTS)
    ingot.seal(source)
    ingot.convert(source, target)
    assert ingot.compare(source, target).same
    assert not [finding for finding in ingot.verify(source) if finding.level == "error"]


def test_a_defect_is_one_line_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ingot.save(tmp_path / "a.zt", WEIGHTS)
    for error in (KeyError("x"), BrokenPipeError(errno.EPIPE, "Broken pipe"), AssertionError()):
        monkeypatch.setattr("ingot.inspect.overview.describe", raising(error))
        assert main.run(["inspect", str(tmp_path / "a.zt")]) == 1  # a pipe of a worker's, not standard output
        out = capsys.readouterr()
        assert len(out.err.splitlines()) == 1
        assert "Traceback" not in out.err
    with pytest.raises(AssertionError):
        main.run(["--debug", "inspect", str(tmp_path / "a.zt")])
