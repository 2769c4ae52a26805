"""Hashing the values of many tensors while an operation reads them: content digests, and the parent hash of others."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from ingot.core.checksums import Blake3, Hasher, Sha256
from ingot.model.tensor import Array
from ingot.ops.identity import Lane, file_bytes, hex_of


class Feed:
    """The hash that one tensor's values go into, chunk after chunk in order."""

    def __init__(self, lane: Lane, running: Hasher) -> None:
        self._lane, self._running = lane, running

    def take(self, rows: Array) -> Future[None]:
        """Hash the next rows on the lane; they may not change until the future is done."""
        return self._lane.feed(self._running, file_bytes(rows))

    @property
    def hex(self) -> str:
        """The digest; all futures must be done."""
        return hex_of(self._running)


class Watch(Protocol):
    """Makes the feed of each tensor, in the order in which they are read."""

    def tensor(self, name: str) -> Feed: ...


class ContentWatch:
    """A BLAKE3 for every tensor, as content ids need it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def tensor(self, name: str) -> Feed:
        return Feed(self._lane, Blake3())


class ParentWatch:
    """One SHA-256 over each tensor's name and bytes: the ``parent_hash`` of a ``.wdelta``, tensors sorted by name."""

    def __init__(self, lane: Lane) -> None:
        self._lane, self._running = lane, Sha256()

    def tensor(self, name: str) -> Feed:
        self._lane.feed(self._running, name.encode("utf-8", "surrogatepass"))
        return Feed(self._lane, self._running)

    @property
    def hex(self) -> str:
        """The hash of all that passed."""
        return hex_of(self._running)
