"""Ctrl-C and SIGTERM end a command inside a tensor: what it works on would take it hours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.zt import component, manifest, tensor, zt_file

COMMANDS = {
    "verify": ["verify", "{src}"],
    "compare": ["compare", "{src}", "{src}"],
    "content-id": ["inspect", "--content-id", "{src}"],
    "convert": ["convert", "{src}", "{dst}", "--recipe", "bf16"],
}


def empty_matrix(path: Path, rows: int) -> Path:
    """Write a sparse matrix of ``rows`` x 2**22 zeros, which stores 8 bytes a row."""
    kinds = (("values", "f32", 0), ("indices", "u64", 0), ("indptr", "u64", 8 * (rows + 1)))
    parts = {role: component(dtype=kind, length=length) for role, kind, length in kinds}
    objects = {"t": tensor(shape=[rows, 2**22], format="sparse_csr", components=parts)}
    path.write_bytes(zt_file(manifest(objects), {64: bytes(8 * (rows + 1))}))
    return path


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """4 TiB: hours of work."""
    return empty_matrix(tmp_path / "huge.zt", 2**18)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads")
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [*((command, signal.SIGINT, 130) for command in COMMANDS), ("convert", signal.SIGTERM, 143)],
)
def test_a_signal_ends_the_work_inside_a_tensor(
    huge: Path, tmp_path: Path, command: str, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if command == "convert":  # no more than the disk may have room for
        empty_matrix(huge, 2**10)
    words = [word.format(src=huge, dst=out / "o.zt") for word in COMMANDS[command]]
    quiet = {"OPENBLAS_NUM_THREADS": "1", "INGOT_MAX_DECODED": "1000TiB"}
    command_line = [sys.executable, "-m", "ingot.cli.main", *words]
    with subprocess.Popen(command_line, env={**os.environ, **quiet}, stderr=subprocess.PIPE) as process:
        try:
            while len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1:  # a thread more is the work
                assert process.poll() is None
                time.sleep(0.02)
            time.sleep(0.2)
            process.send_signal(number)
            _, told = process.communicate(timeout=60)  # the work would go on, and exit with 0
        finally:
            process.kill()
    assert process.returncode == code, told
    assert b"interrupted" in told
    assert b"Traceback" not in told
    assert list(out.iterdir()) == []


def test_callers_of_the_api_get_the_exception(huge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``KeyboardInterrupt`` of the calling thread comes through, and no thread is left that goes on."""
    script = (
        "import os, signal, sys, threading, ingot, ingot.inspect.verify\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        f"    ingot.verify({str(huge)!r})\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(7 if threading.active_count() == 1 else 8)\n"
    )
    quiet = {"INGOT_MAX_DECODED": "1000TiB"}
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **quiet}, timeout=60, check=False)
    assert done.returncode == 7
