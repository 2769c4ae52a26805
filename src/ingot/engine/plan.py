"""A plan: what is written, tensor by tensor in output order, into which format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ingot.engine.specs import least_size
from ingot.engine.work import Step
from ingot.formats.accepts import knows_size
from ingot.formats.base import Format, WriteOptions
from ingot.model.artifact import Artifact
from ingot.model.attachments import NOTHING, Attachments
from ingot.model.spec import TensorSpec


@dataclass(frozen=True)
class Plan:
    """All steps in output order, and what else determines the bytes of the weight files.

    Parameters
    ----------
    steps : sequence of Step
    format : Format
    metadata : mapping
        As the format carries it.
    options : WriteOptions
    measured : bool
        Whether the error of what is not exact is measured while it is written.
    attachments, config
        As of ``Artifact``.
    """

    steps: Sequence[Step]
    format: Format
    metadata: Mapping[str, Any]
    options: WriteOptions
    measured: bool = True
    attachments: Attachments = NOTHING
    config: bytes | None = None

    @cached_property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors to write, in order."""
        return [step.spec for step in self.steps]

    @property
    def artifact(self) -> Artifact:
        """What is written, as far as it is known before."""
        before = {} if self.config is None else {step.spec.name: step.tensor for step in self.steps}
        return Artifact(self.specs, self.metadata, self.attachments, self.config, before)

    @property
    def in_bytes(self) -> int:
        """Stored bytes that are read."""
        return sum(step.in_bytes for step in self.steps)

    @cached_property
    def size(self) -> int:
        """Bytes of the weight files, headers and padding included.

        Where ``size_exact`` is False (zstd, sparse, parts that may be equal in a format that stores such once) it is an
        upper bound: nothing shrinks, no value is zero, no two parts are equal.
        """
        return self.format.size(self.artifact, self.options)

    @property
    def size_exact(self) -> bool:
        """Whether ``size`` is what is written, to the byte."""
        return knows_size(self.format, self.specs)

    @property
    def least(self) -> int:
        """The bytes that the weight files take if no two parts are equal, less what only the bytes themselves tell."""
        return least_size(self.specs, self.size)
