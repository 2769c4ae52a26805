"""What becomes of a checkpoint that gets the names and shapes of another program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ingot.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Translated:
    """A checkpoint under other names: what was done, and what else to tell of it.

    Values of the tensors ``rounded`` are equal in their own type, and not all of them in f32.
    """

    checkpoint: Checkpoint
    notes: Sequence[str] = ()
    done: str = ""
    rounded: frozenset[str] = frozenset()

    @property
    def lost(self) -> dict[str, str]:
        """The tensors that have no place on the other side, and that it does not compute itself: names to reasons."""
        omissions = self.checkpoint.omissions
        return {name: omission.reason for name, omission in omissions.items() if not omission.superseded}


def holds_a_model(format: str) -> bool:
    """Whether files of a format hold a model's config and tokenizer beside its weights, under names of their own."""
    return format == "gguf"
