"""Convert a model folder under a RAM ceiling, with progress, and say what it cost.

python examples/convert_folder.py [SOURCE [TARGET [RECIPE]]]
"""

from __future__ import annotations

import sys
import time

import ingot
from ingot.core.runtime.progress import ProgressEvent


def show(started: float, event: ProgressEvent) -> None:
    """Print one line that is written over: bytes done, and seconds left at the speed so far."""
    if event.processed:
        left = (time.monotonic() - started) * (event.total - event.processed) / event.processed
        print(
            f"\r{event.processed / event.total:4.0%} of {event.total:,} bytes, {left:.0f} s left ",
            end="",
            file=sys.stderr,
        )


def main(source: str = "ingot-demo/original", target: str = "converted", recipe: str = "int4") -> None:
    started = time.monotonic()
    report = ingot.convert(
        source,
        target,
        recipe=recipe,
        max_ram="1GiB",  # of anonymous memory; refused at once if it cannot be kept
        resume=True,  # after a kill, the same call goes on where it was
        progress=lambda event: show(started, event),
    )
    print(file=sys.stderr)
    print(f"{report.source_nbytes:,} -> {report.size:,} bytes, {report.bits_per_weight:.2f} bits per weight")
    print(", ".join(f"{count} {action}" for action, count in report.actions.items()))
    lossy = [(tensor.error["snr_db"], tensor) for tensor in report.tensors if tensor.error]
    for snr, tensor in sorted(lossy, key=lambda item: item[0])[:3]:
        print(f"{tensor.name}: {tensor.rule}, SNR {snr:.1f} dB")


if __name__ == "__main__":
    main(*sys.argv[1:])
