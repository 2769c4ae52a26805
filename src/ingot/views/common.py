"""Building blocks of views: lazily built tensors, and checks of names."""

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

BuildTensor = Callable[[], Tensor]


def view_of(
    checkpoint: Checkpoint,
    entries: Sequence[tuple[str, BuildTensor | None, str]],
    verb: Verb,
    argument: Any,
    description: Any = None,
    origins: Mapping[str, Sequence[str]] | None = None,
    importance: Mapping[str, Array] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Return a view of ``checkpoint`` with the tensors of ``entries``, in this order.

    Parameters
    ----------
    checkpoint : Checkpoint
    entries : sequence of (new name, function or None, old name)
        The function builds the tensor. If it is None, the tensor of the old name is used unchanged.
    verb, argument
        The function that creates the view, and its argument (see ``derive_checkpoint``).
    description
        The argument as JSON values; by default ``argument``.
    origins : mapping, optional
        For each new name, the names of the tensors from which it is computed; by default the old name of the entry.
    importance, aliases : mapping, optional
        Column weights and aliases of new tensors. A tensor that keeps its name and number of columns keeps its weights.
    """
    all_origins = {new: (old,) for new, _, old in entries if new != old} | dict(origins or {})
    description = argument if description is None else description
    tensors = lazy_tensors(entries, checkpoint)
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
        origins=all_origins,
        importance={**unchanged, **(importance or {})},
        aliases={**checkpoint.aliases, **(aliases or {})},
    )


def lazy_tensors(
    entries: Sequence[tuple[str, BuildTensor | None, str]], checkpoint: Checkpoint
) -> Mapping[str, Tensor]:
    """Return tensors by new name: each is built by its function, or is the checkpoint's tensor of the old name.

    Raises ``UsageError`` ``view.delta`` if the checkpoint is a delta, and ``view.name`` if a new name occurs twice.
    """
    if KEY in checkpoint.metadata:
        raise UsageError(
            "expected full weights, found a delta, which only describes differences to its base; apply it first",
            rule="view.delta",
            where=checkpoint.location,
        )
    require_once([new for new, _, _ in entries])
    builders = {new: (make, old) for new, make, old in entries}

    def build(name: str) -> Tensor:
        make, old = builders[name]
        return checkpoint[old] if make is None else make()

    return LazyMap(builders, build)


def require_names(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise ``UsageError`` ``tensor.unknown`` for the first name that is missing in the checkpoint."""
    for name in names:
        if name not in checkpoint:
            raise checkpoint.no_tensor(name)


def require_once(names: Sequence[str]) -> None:
    """Raise ``UsageError`` ``view.name`` if a name occurs twice."""
    name, count = Counter(names).most_common(1)[0] if names else ("", 1)
    if count > 1:
        raise UsageError(f"expected each name once, found {count} tensors of this name", rule="view.name", where=name)
