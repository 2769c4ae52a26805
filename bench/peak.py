"""Run a command and watch its anonymous memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """Wall seconds, peak of RssAnon in bytes (sampled), exit code, standard output and error."""

    seconds: float
    peak_anonymous: int
    code: int
    stdout: str
    stderr: str


def watch(command: Sequence[str], interval: float = 0.002) -> Run:
    """Run ``command``; sample ``RssAnon`` of /proc/PID/status every ``interval`` seconds."""
    started = time.perf_counter()
    # Files, not pipes: nobody reads while the command runs, and a full pipe would stop it.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with subprocess.Popen(command, stdout=out, stderr=err, text=True) as process:
            peak = 0
            while process.poll() is None:
                peak = max(peak, _anonymous(process.pid))
                time.sleep(interval)
        seconds = time.perf_counter() - started
        out.seek(0)
        err.seek(0)
        return Run(seconds, peak, process.returncode, out.read(), err.read())


def _anonymous(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


if __name__ == "__main__":
    result = watch(sys.argv[1:])
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    print(
        f"{result.seconds:.2f} s, peak anonymous {result.peak_anonymous / 2**20:.1f} MiB, exit code {result.code}",
        file=sys.stderr,
    )
