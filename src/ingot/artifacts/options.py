"""Options that several operations share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ingot.core.options import About, about
from ingot.errors import UsageError

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
DROP = about(
    "Leave out tensors of these names (a glob, or re:REGEX), and accept it if they are lost. Any number.",
    "--drop",
    metavar="PATTERN",
    panel=LIMITS,
)
RESUME = about("Continue a killed run of the same command; keep what is finished if interrupted.")

_CLUSTER = "Many machines"
_ENGINES = ("local", "processes", "ray")


def about_engine(more: str) -> Mapping[str, About]:
    """Return what is known of an operation's option ``engine``: ``more`` says what else it means there."""
    return about(
        "Who does the work: local (this process), processes (one per processor here) or ray (a cluster that sees the "
        f"same files); {more}",
        panel=_CLUSTER,
    )


ADDRESS = about(
    "Of the Ray cluster; default: RAY_ADDRESS, or that of ray start. Without one, processes of this machine work.",
    panel=_CLUSTER,
)


def is_elsewhere(engine: str, address: str | None) -> bool:
    """Whether others than this process do the work.

    Raises ``UsageError`` ``cluster.engine``: no engine, or an address for one that has none.
    """
    if engine not in _ENGINES:
        raise UsageError(f"expected the engine local, processes or ray, found {engine[:40]!r}", rule="cluster.engine")
    if address is not None and engine != "ray":
        raise UsageError(f"expected an address for the engine ray alone, found {engine}", rule="cluster.engine")
    return engine != "local"
