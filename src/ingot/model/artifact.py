"""What a format's writer gets: all that one artifact holds, except the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ingot.model.attachments import NOTHING, Attachments
from ingot.model.layouts.base import Described
from ingot.model.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Artifact:
    """What is to be written.

    Parameters
    ----------
    tensors : sequence of TensorSpec
        In the order in which they are written.
    metadata : mapping
        As the format carries it.
    attachments : Attachments
        What lies beside the weights; of the kinds that the format carries.
    config : bytes, optional
        The model's ``config.json`` as it is true of the result, for a format that says in it how tensors are packed:
        its writer writes the file with its own keys in it. Other formats leave it alone: it travels as a companion.
    before : mapping of name to Described
        What tensors were in the source that ``config`` is of, so that a writer knows for which of them it still holds.
    """

    tensors: Sequence[TensorSpec]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    attachments: Attachments = NOTHING
    config: bytes | None = None
    before: Mapping[str, Described] = field(default_factory=dict)
