"""The thread that writes: takes what the pipeline's threads made, in order, and gives it to the sinks of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ingot.core.numeric.stats import ErrorStats
from ingot.engine.pipeline import Begin, Chunk, End, Pipeline


class Sink(Protocol):
    """Where one tensor's bytes go."""

    def write(self, parts: Mapping[str, Any]) -> None:
        """Take the next bytes of each part."""
        ...

    def close(self) -> dict[str, Any]:
        """End the tensor; return the writer's record of it."""
        ...


def drive(
    pipeline: Pipeline,
    opened: Callable[[Begin], Sink],
    finished: Callable[[End, dict[str, Any], ErrorStats], None],
    advance: Callable[[int, str], None],
) -> None:
    """Take the pipeline's events in order and write.

    ``opened`` returns the sink of the tensor that begins, ``finished`` gets its end, its record and the sum of its
    errors; ``advance`` is told the bytes that were read. Raises what went wrong in any of the pipeline's threads.
    """
    sink: Sink | None = None
    error = ErrorStats()
    for event in pipeline.events():
        if isinstance(event, Begin):
            sink, error = opened(event), ErrorStats()
            advance(0, event.step.tensor.name)
        elif isinstance(event, Chunk):
            assert sink is not None
            encoded = event.result()
            sink.write(encoded.parts)
            if encoded.commit is not None:
                encoded.commit()
            error = error + (encoded.error or ErrorStats())
            pipeline.done(event)
            advance(event.in_bytes, "")
        elif isinstance(event, End):
            assert sink is not None
            finished(event, sink.close(), error)
