"""Options that several operations share."""

from __future__ import annotations

from os import PathLike
from typing import Literal

from ingot.core.options import about

AnyPath = str | PathLike[str]
Digest = Literal["crc32c", "sha256"]

LIMITS = "Limits and checks"

MAX_RAM = about("Ceiling of anonymous memory, such as 2GiB.")
DIGEST = about(
    "Digest written per part where the format has digests: crc32c, sha256 or none.",
    metavar="NAME",
    panel=LIMITS,
)
MAX_DECOMPRESSED = about(
    "The most bytes that one compressed part of a file may become, such as 2GiB; default: INGOT_MAX_DECOMPRESSED.",
    metavar="SIZE",
    panel=LIMITS,
)
THREADS = about("Threads; default: all processors.", metavar="N", least=1, panel=LIMITS)
OVERWRITE = about("Replace a file, or a folder that holds a checkpoint and nothing else.")
PROGRESS = about(
    "Called with a ProgressEvent: bytes done, bytes in all, what is being worked on.",
    command=False,
)
IO = about(
    "How sources are read: pread (safe from files that shrink meanwhile), mmap or auto.",
    command=False,
)
RESUME = about("Continue a killed run of the same command; keep what is finished if interrupted.")
