"""What ``diff`` can be told beside its sources, its target and a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from ingot.core.progress import ProgressCallback
from ingot.ops.delta.strategy import Way


class DiffOptions(TypedDict, total=False):
    """Further options of ``diff``.

    options : codec options for the strategy's matrices (``bits``, ``group``, ``sparsity``, ...), over its own.
    ways : how single tensors are stored, by name (``ops.delta.strategy.Way``), whatever the strategy says of them.
    target_size : for strategy ``auto``: bytes of the delta, text such as ``"200MiB"``, or a share of the fine-tune
        (up to 1).
    max_error : for strategy ``auto``: the largest error of a tensor's difference, as a share of its norm.
    max_ram : hard ceiling of the process's anonymous memory in bytes, or text such as ``"2GiB"``.
    progress : called with a ``ProgressEvent`` by stored bytes of base and fine-tune.
    digest : written per part where the container has digests: ``crc32c`` (default), ``sha256`` or None.
    threads : encoding threads; all processors this process may use by default.
    io : how the sources are read: ``pread`` (default), ``mmap``, ``auto``.
    verify : check the sources' digests (default True).
    measure : measure the error of what is not exact (default True).
    overwrite : replace a file that exists, or a folder that holds a checkpoint and nothing else.
    """

    options: Mapping[str, Any]
    ways: Mapping[str, Way]
    target_size: float | str | None
    max_error: float | None
    max_ram: int | str | None
    progress: ProgressCallback | None
    digest: str | None
    threads: int | None
    io: str
    verify: bool
    measure: bool
    overwrite: bool
