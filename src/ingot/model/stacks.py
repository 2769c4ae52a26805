"""Kernel stacks: which of the ways to run a file's weights is taken, and why.

A file of a format such as ``.squizd`` declares features, and each feature has a kernel stack. An extension chooses the
stack for a machine and a request. It registers in the group ``ingot.stack_selectors`` under the name of the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ingot.core.registry import Instances
from ingot.model.features import Flags
from ingot.reporting.report import Table

NOT_SET = "flag not set"
"""The reason of a stack whose feature the file does not have."""


@dataclass(frozen=True, slots=True)
class StackRequest:
    """Options of ``load_model`` that decide on stacks.

    Parameters
    ----------
    device : str
        The type of the model's device, in torch's words.
    packed : bool or None
        Whether weights stay packed; None leaves this to the stack.
    weights : str
        Why the caller needs a model built from the weights, and no Core ML package; empty if either will do.
    refused : str
        Why coremltools refused the package; empty if it was not tried.
    """

    device: str = "cpu"
    packed: bool | None = None
    weights: str = ""
    refused: str = ""

    @property
    def from_codes(self) -> bool:
        """Whether products use packed codes if there are kernels for it; such kernels run on the CPU."""
        return self.device == "cpu" if self.packed is None else self.packed


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stack of higher priority, and why it is not taken."""

    stack: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The chosen stack, the reason, the stacks of higher priority, and what further features add to it.

    ``computes`` states, of Ingot's own stacks, whether products use the codes as they are stored.
    """

    platform: str
    stack: str
    reason: str
    skipped: tuple[Skipped, ...]
    adds: tuple[str, ...]
    computes: bool = False

    @property
    def passed_over(self) -> tuple[Skipped, ...]:
        """The stacks that the file has and that are not taken."""
        return tuple(skipped for skipped in self.skipped if skipped.reason != NOT_SET)

    def describe(self) -> str:
        """Return the choice as text: the stack, the reason, and the reasons against the file's other stacks."""
        skipped = (f"not {item.stack}: {item.reason}" for item in self.passed_over)
        return "; ".join([f"stack {self.stack}: {self.reason}", *skipped])


class StackSelector(Protocol):
    """Chooses kernel stacks for files of one format."""

    def select(self, features: Flags, request: StackRequest) -> Dispatch:
        """Return the stack that Ingot takes on this machine."""
        ...

    def tables(self, features: Flags) -> Sequence[Table]:
        """Return the tables of ``ingot inspect``."""
        ...


STACK_SELECTORS: Instances[StackSelector] = Instances(
    "stack selector", group="ingot.stack_selectors", contract=StackSelector
)
