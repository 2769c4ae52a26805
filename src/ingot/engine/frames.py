"""Encoders of parts in frames, which threads compress independently, with an index of the frames at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from ingot.core.bytes import encodings, packed
from ingot.model.layouts.records import record_layout
from ingot.model.spec import PartSpec, TensorSpec


class PartEncoder(ABC):
    """An encoder of one part in frames, which are added in order.

    Attributes
    ----------
    content : int
        The number of decoded bytes in every frame except the last.
    """

    content: int = encodings.FRAME

    @abstractmethod
    def encode(self, content: bytes) -> Callable[[], bytes]:
        """Return a function that encodes ``content`` as the next frame; it may be called in another thread."""

    def add(self, frame: bytes) -> bytes:
        """Record an encoded frame for the index, and return the frame."""
        return frame

    def index(self) -> bytes:
        """Return the bytes to write after the last frame: the index of the frames, or nothing."""
        return b""


class _Zstd(PartEncoder):
    def encode(self, content: bytes) -> Callable[[], bytes]:
        return partial(encodings.compress_frame, content)


class _Seekable(PartEncoder):
    def __init__(self) -> None:
        self._contents: list[int] = []
        self._frames: list[tuple[int, int]] = []

    def encode(self, content: bytes) -> Callable[[], bytes]:
        self._contents.append(len(content))
        return partial(encodings.seekable_frame, content)

    def add(self, frame: bytes) -> bytes:
        self._frames.append((len(frame), self._contents[len(self._frames)]))
        return frame

    def index(self) -> bytes:
        return encodings.seek_table(self._frames)


class _Packed(PartEncoder):
    def __init__(self, spec: TensorSpec, part: PartSpec) -> None:
        self._layout = record_layout(spec, part)
        self.content = packed.content_of(self._layout)
        self._digests: list[int] = []
        self._frames: list[tuple[int, int]] = []

    def encode(self, content: bytes) -> Callable[[], bytes]:
        self._digests.append(packed.checksum(content))
        return partial(packed.encode_frame, self._layout, content)

    def add(self, frame: bytes) -> bytes:
        self._frames.append((len(frame), self._digests[len(self._frames)]))
        return frame

    def index(self) -> bytes:
        return packed.index_of(self._layout, self._frames)


def part_encoder(spec: TensorSpec, part: PartSpec) -> PartEncoder:
    """Return the encoder of a part in the encoding that its spec states."""
    if part.encoding == packed.PACKED:
        return _Packed(spec, part)
    return _Seekable() if part.encoding == encodings.SEEKABLE else _Zstd()
