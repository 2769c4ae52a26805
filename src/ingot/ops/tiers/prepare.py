"""From a directory to what is loaded: the best complete tier, built first where only the tensors are there."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike

from ingot.core.progress import ProgressCallback
from ingot.errors import ResourceError
from ingot.ops.tiers.build import build
from ingot.ops.tiers.choose import Choice, choose
from ingot.ops.tiers.table import BF16, TENSORS


def prepare(
    path: str | PathLike[str],
    runtime: str = "torch",
    *,
    keep_packed: bool = False,
    cache: bool = True,
    progress: ProgressCallback | None = None,
) -> Choice:
    """Choose a tier; on the first load of dense weights, save the bf16 tier and take that.

    A disk that is full or cannot be written to is no obstacle: the tensors are then decoded into memory, and a note
    says so.

    Parameters
    ----------
    path : path
        A Squish directory.
    runtime, keep_packed
        As for ``choose``.
    cache : bool
        Whether a tier may be built.
    progress : callable, optional

    Raises
    ------
    UsageError, IntegrityError
        Those of ``choose`` and ``build``.
    """
    choice = choose(path, runtime, keep_packed=keep_packed)
    if choice.tier is not TENSORS or keep_packed or not cache:
        return choice
    try:
        done = build(path, BF16.name, progress=progress)
    except ResourceError as error:
        return replace(choice, notes=(*choice.notes, f"no faster tier was saved: {error}"))
    note = f"first load: the bf16 tier was built in {done.seconds:.1f} s" if done.built else "another process built it"
    found = choose(path, runtime, keep_packed=keep_packed)
    return replace(found, notes=(*found.notes, note))
