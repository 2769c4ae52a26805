"""Writers of an artifact that several processes write: each some of its tensors, or some of its files."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ingot.formats.base import FormatWriter


@runtime_checkable
class Skips(FormatWriter, Protocol):
    """A writer in which a tensor's place follows from the specs, so that several processes write one artifact.

    Each writes some of the tensors into the same files and skips the others. One ``restore``s all, and finishes.
    """

    def skip(self, name: str) -> None:
        """Pass over the next tensor, which another process writes. All lengths of its parts are known."""
        ...


@runtime_checkable
class WholeFiles(Skips, Protocol):
    """One of which each file is complete with the last of its tensors, so that it can be made elsewhere as a whole."""

    def file_of(self, name: str) -> str | None:
        """Return the file that a tensor of the specs lies in; None where it is not complete before the end."""
        ...
