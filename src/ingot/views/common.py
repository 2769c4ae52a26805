"""What views share: names that are there, each once; tensors that are made when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ingot.errors import UsageError
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import KEY
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import Verb, derive_checkpoint
from ingot.model.tensor import Array, Tensor

Make = Callable[[], Tensor]


def view_of(
    checkpoint: Checkpoint,
    entries: Sequence[tuple[str, Make | None, str]],
    verb: Verb,
    argument: Any,
    said: Any = None,
    origins: Mapping[str, Sequence[str]] | None = None,
    importance: Mapping[str, Array] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Return a view. Weights of columns (``importance``) stay with tensors whose names and columns are the same.

    ``said`` is the argument as JSON, if that is not the argument itself. An entry is made of the tensor that it names
    last, unless ``origins`` lists others. ``importance`` and ``aliases`` are those of new tensors.
    """
    made_of = {new: (old,) for new, _, old in entries if new != old} | dict(origins or {})
    description = argument if said is None else said
    tensors = mapping(entries, checkpoint)
    names = [new for new, _, old in entries if new == old and old in checkpoint.importance]
    unchanged = {
        name: checkpoint.importance[name]
        for name in names
        if len(checkpoint.importance[name]) == tensors[name].matrix_shape[1]
    }
    return derive_checkpoint(
        checkpoint,
        tensors,
        verb,
        argument,
        description,
        origins=made_of,
        importance={**unchanged, **(importance or {})},
        aliases={**checkpoint.aliases, **(aliases or {})},
    )


def mapping(entries: Sequence[tuple[str, Make | None, str]], checkpoint: Checkpoint) -> Mapping[str, Tensor]:
    """Return tensors under new names: made by a function, or those of the checkpoint under the old name."""
    if KEY in checkpoint.metadata:
        raise UsageError(
            "expected whole weights, found a delta, which names and describes the tensors of its base; apply it first",
            rule="view.delta",
            where=checkpoint.location,
        )
    require_once([new for new, _, _ in entries])
    makes = {new: (make, old) for new, make, old in entries}

    def made(name: str) -> Tensor:
        make, old = makes[name]
        return checkpoint[old] if make is None else make()

    return LazyMap(makes, made)


def require_known(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Refuse names that are not there: ``tensor.unknown``."""
    for name in names:
        if name not in checkpoint:
            raise checkpoint.no_tensor(name)


def require_once(names: Sequence[str]) -> None:
    """Refuse a name that would be there twice: ``view.name``."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 1)
    if count > 1:
        raise UsageError(f"expected each name once, found {count} tensors of this name", rule="view.name", where=name)
