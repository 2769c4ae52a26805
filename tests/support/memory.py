"""Memory of a process, measured from outside."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def peak_anonymous(command: list[str]) -> int:
    """Run ``command`` to its end; return the largest RssAnon seen (bytes)."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                break
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) << 10)
            time.sleep(0.001)
        assert process.stderr is not None
        assert process.wait() == 0, process.stderr.read()
    return peak
