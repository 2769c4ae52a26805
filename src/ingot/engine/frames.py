"""Writing a tensor's parts as they come out of the pipeline, compressing where the spec says so.

Compression cuts each part at fixed offsets (``encodings.FRAME`` input bytes), whatever chunks the bytes came in, and
frames are compressed on the pipeline's threads. So the result is the same for any chunk and any number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from ingot.core.bytes import encodings
from ingot.core.numeric.dtypes import file_bytes
from ingot.model.bytesource import Buffer
from ingot.model.spec import TensorSpec


class TensorWriter(Protocol):
    """What takes a tensor's bytes; a ``FormatWriter`` is one."""

    def begin(self, spec: TensorSpec) -> None: ...

    def write(self, role: str, data: Buffer) -> None: ...

    def end(self) -> dict[str, Any]: ...


class TensorSink:
    """Hands one tensor's bytes to a writer.

    Parameters
    ----------
    writer : TensorWriter
        ``begin`` is called here, ``end`` by ``close``.
    spec : TensorSpec
    compress : bool
        Whether the bytes still have to be encoded as the spec says; False for parts moved as stored.
    pool : Executor
    pending : int
        Frames in flight at most.
    """

    def __init__(self, writer: TensorWriter, spec: TensorSpec, *, compress: bool, pool: Executor, pending: int) -> None:
        self._writer = writer
        self._pool = pool
        self._limit = pending
        self._frames: deque[tuple[str, Future[bytes], int]] = deque()
        encoded = {part.role: part.encoding for part in spec.parts if part.encoding != "raw"} if compress else {}
        self._cutters = {role: bytearray() for role in encoded}
        self._tables: dict[str, list[tuple[int, int]]] = {
            role: [] for role, encoding in encoded.items() if encoding == encodings.SEEKABLE
        }
        writer.begin(spec)

    def write(self, parts: Mapping[str, Any]) -> None:
        """Take the next bytes of each part."""
        for role, array in parts.items():
            data = array if isinstance(array, memoryview) else file_bytes(array)
            if role in self._cutters:
                self._cut(role, data)
            elif data.nbytes:
                self._writer.write(role, data)

    def close(self) -> dict[str, Any]:
        """Write what is left and end the tensor; returns the writer's record of it."""
        for role, rest in self._cutters.items():
            if rest:
                self._submit(role, bytes(rest))
        self._drain(0)
        for role, frames in self._tables.items():
            self._writer.write(role, encodings.seek_table(frames))
        return self._writer.end()

    def _cut(self, role: str, data: memoryview) -> None:
        rest = self._cutters[role]
        position = 0
        while len(rest) + data.nbytes - position >= encodings.FRAME:
            stop = position + encodings.FRAME - len(rest)
            self._submit(role, bytes(rest) + bytes(data[position:stop]) if rest else bytes(data[position:stop]))
            rest.clear()
            position = stop
        rest += data[position:]

    def _submit(self, role: str, frame: bytes) -> None:
        self._drain(self._limit - 1)
        compress = encodings.seekable_frame if role in self._tables else encodings.compress_frame
        self._frames.append((role, self._pool.submit(compress, frame), len(frame)))

    def _drain(self, keep: int) -> None:
        while len(self._frames) > keep:
            role, made, size = self._frames.popleft()
            frame = made.result()
            if role in self._tables:
                self._tables[role].append((len(frame), size))
            self._writer.write(role, frame)
