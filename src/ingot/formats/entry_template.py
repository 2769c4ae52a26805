"""Encoded entries of manifests, where very many differ in name, place and digest alone."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.core import cbor


class EntryTemplate:
    """An entry in CBOR but for what differs from tensor to tensor.

    Parameters
    ----------
    encoded : bytes
        The entry, less its name.
    numbers : sequence of int
        What it has in place of a tensor's own numbers, in order: each the first in it that is so large.
    digest : str, optional
        What it has in place of the digest, the last text in it that is spelled so. All others are as long.
    """

    __slots__ = ("_before", "_between", "_end")

    def __init__(self, encoded: bytes, numbers: Sequence[int], digest: str | None) -> None:
        self._before, rest = list[bytes](), encoded
        for number in numbers:
            before, _, rest = rest.partition(cbor.dumps(number))
            self._before.append(before)
        self._between, _, self._end = (rest, b"", b"") if digest is None else rest.rpartition(digest.encode())

    def entry(self, name: str, numbers: Sequence[int], digest: str | None) -> bytes:
        """Return the entry of one tensor, its name included."""
        found = [cbor.dumps(name)]
        for before, number in zip(self._before, numbers, strict=True):
            found += before, cbor.dumps(number)
        return b"".join((*found, self._between, b"" if digest is None else digest.encode(), self._end))
