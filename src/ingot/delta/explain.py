"""Notes on tensors whose element type or shape differs from the base's, and on tensors stored in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from ingot.codecs.cast import exact_cast
from ingot.core.runtime.memory import format_size
from ingot.engine.fit import why_incomparable
from ingot.model.tensor import Tensor
from ingot.quantization.outcome_text import few


class Explained(Protocol):
    """A tensor in a report; ``note`` is empty if base and fine-tune have the same type and shape."""

    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


def note_of(base: Tensor | None, tuned: Tensor, op: str, difference_dtype: str | None) -> str:
    """Return a note on the storage of a tensor whose type or shape differs from the base's; empty for other tensors.

    The note says how the difference is stored, or why the full tensor is stored instead. ``op`` is the delta's
    operation. ``difference_dtype`` is the element type of an exact difference; None for an approximate difference.
    """
    if op == "same":
        return ""
    if op == "replace":
        return "stored whole, new" if base is None else f"stored whole, {_why_replaced(base, tuned)}"
    assert base is not None
    notes = [_retyped(base.dtype, tuned.dtype, difference_dtype)] if base.dtype != tuned.dtype else []
    if base.shape != tuned.shape:
        notes.append(_resized(base.shape[0], tuned.shape[0]))
    return "; ".join(notes)


def _why_replaced(base: Tensor, tuned: Tensor) -> str:
    if base.dtype != tuned.dtype and why_incomparable(base, tuned) is None:
        return f"element type {base.dtype} -> {tuned.dtype}, smaller than a difference"
    return why_incomparable(base, tuned) or f"values of {tuned.dtype} have no exact difference"


def _retyped(base: str, tuned: str, difference_dtype: str | None) -> str:
    pair = f"base in {base}, fine-tune in {tuned}"
    if difference_dtype is None:
        return f"{pair}: differences in f32"
    if difference_dtype == base:
        return f"{pair}: exact differences in {base}, whose result is cast to {tuned}"
    cast = "cast" if exact_cast(base, tuned) else "rounded"
    return f"{pair}: exact differences to the base {cast} to {tuned}"


def _resized(base: int, tuned: int) -> str:
    shared = min(base, tuned)
    changed = abs(tuned - base)
    rows = f"{changed} row{'' if changed == 1 else 's'}"
    shared_rows = f"rows 0-{shared - 1} as a delta" if shared > 1 else "row 0 as a delta"
    return f"{shared_rows}, {rows} added" if tuned > base else f"{shared_rows}, {rows} removed"


def note_lines(tensors: Iterable[Explained]) -> list[str]:
    """Return a line for each distinct note: the tensors that have it, and their bytes if they are stored in full."""
    groups: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.note:
            groups.setdefault(tensor.note, []).append(tensor.name)
            if tensor.op == "replace":
                sizes[tensor.note] = sizes.get(tensor.note, 0) + tensor.nbytes
    return [f"{note}: {few(names)}{_sized(sizes, note)}" for note, names in groups.items()]


def _sized(sizes: Mapping[str, int], note: str) -> str:
    return f" ({format_size(sizes[note])})" if note in sizes else ""
