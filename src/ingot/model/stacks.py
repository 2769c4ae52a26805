"""Kernel stacks: the implementations that can run a file's weights, and the choice of one of them.

A file format such as ``.squizd`` declares features, and each feature has a kernel stack. An extension chooses the stack
for a machine and a request; it is registered in the group ``ingot.stack_selectors`` under the format's name.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ingot.core.registry import Instances
from ingot.reporting.report import Table


class Flags(enum.IntFlag):
    """Feature flags of a ``.squizd``: bits 0 to 6 of its header (SQUIZD, section 1). The other bits are reserved."""

    ASTC = 1 << 0
    TCA_TBE = 1 << 1
    INT4 = 1 << 2
    SPARSE = 1 << 3
    EAGLE = 1 << 4
    INT2 = 1 << 5
    ANE_COREML = 1 << 6


DEFINED_BITS = 0x7F
NOT_SET = "flag not set"
"""The reason against a stack whose feature flag is not set in the file."""


@dataclass(frozen=True, slots=True)
class StackRequest:
    """Options of ``load_model`` that affect the choice of a stack.

    Parameters
    ----------
    device : str
        The type of the model's device as torch names it.
    packed : bool or None
        Whether weights stay packed; None leaves this to the stack.
    weights : str
        Why the caller needs a model built from weights instead of a Core ML package; empty if both are possible.
    refused : str
        Why coremltools refused the package; empty if it was not tried.
    """

    device: str = "cpu"
    packed: bool | None = None
    weights: str = ""
    refused: str = ""

    @property
    def from_codes(self) -> bool:
        """Whether matrices are multiplied as packed codes, if kernels for that exist.

        The default is True on the CPU, which has such kernels.
        """
        return self.device == "cpu" if self.packed is None else self.packed


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stack of higher priority that was not chosen, and the reason."""

    stack: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The chosen stack with the reason, and the skipped stacks of higher priority.

    ``adds`` are descriptions of additional features of the file. ``computes`` states whether a stack of Ingot
    multiplies by the stored codes without decoding them.
    """

    platform: str
    stack: str
    reason: str
    skipped: tuple[Skipped, ...]
    adds: tuple[str, ...]
    computes: bool = False

    @property
    def passed_over(self) -> tuple[Skipped, ...]:
        """The skipped stacks whose feature flag is set in the file."""
        return tuple(skipped for skipped in self.skipped if skipped.reason != NOT_SET)

    def describe(self) -> str:
        """Return the choice as text: the stack, its reason, and the reasons against the file's other stacks."""
        skipped = (f"not {item.stack}: {item.reason}" for item in self.passed_over)
        return "; ".join([f"stack {self.stack}: {self.reason}", *skipped])


class StackSelector(Protocol):
    """An object that chooses kernel stacks for the files of one format."""

    def select(self, features: Flags, request: StackRequest) -> Dispatch:
        """Return the stack that Ingot uses on this machine."""
        ...

    def tables(self, features: Flags) -> Sequence[Table]:
        """Return the tables that ``ingot inspect`` shows."""
        ...


STACK_SELECTORS: Instances[StackSelector] = Instances(
    "stack selector", group="ingot.stack_selectors", contract=StackSelector
)
