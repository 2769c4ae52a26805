"""Options for the Neural Engine. The command line derives from this module, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.core.options import OUT, OUTPUT, about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.ext.ane.chips.activation import ActivationLut

_OVERWRITE = about("Replace an existing file.")


_CHECKPOINT = source("Checkpoint: a file or folder in any format that Ingot reads.")
_CHIPS = about("One or several of m1 to m6, m1-pro, a12 to a20-pro, ...: m1,m4.")
_ASSUME = about("KEY=VALUE, CHIP.KEY=VALUE or PATTERN:CONDITION=VALUE that replaces a value of the tables.")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan: the checkpoint, the chips, the assumptions."""

    path: AnyPath = field(metadata=_CHECKPOINT)
    chip: str | Sequence[str] = field(default="m1", metadata=_CHIPS)
    _: KW_ONLY
    assume: Sequence[str] = field(default=(), metadata=_ASSUME)


@dataclass(frozen=True, slots=True)
class SuggestOptions:
    """Options of a suggestion: the checkpoint, the chips, the recipe to write, the error limit."""

    path: AnyPath = field(metadata=_CHECKPOINT)
    chip: str | Sequence[str] = field(metadata=_CHIPS)
    recipe: AnyPath = field(
        metadata=about("Write a recipe of the fastest forms within --max-error; reads the weights.", "--suggest")
    )
    max_error: float = field(
        default=0.1,
        metadata=about(
            "Largest error of a weight for --suggest: RMS of the error over RMS of the weight, at most 1; 0.1."
        ),
    )
    _: KW_ONLY
    assume: Sequence[str] = field(default=(), metadata=_ASSUME)
    overwrite: bool = field(default=False, metadata=about("Replace an existing file, for --suggest.", "--overwrite"))


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Options of a kernel unit: the tensor, the chip, bias and activation."""

    path: AnyPath = field(metadata=source("Checkpoint."))
    name: str = field(
        metadata=about("Tensor, output channels first; without OUT a folder for all of them.", argument=True)
    )
    out: AnyPath | None = field(
        default=None, metadata=about("File to write, usually .anek.", *OUTPUT, aliases=OUT, argument=True)
    )
    chip: str = field(default="m1", metadata=about("Chip to pack for."))
    _: KW_ONLY
    bias: str | None = field(default=None, metadata=about("Tensor with a bias per output channel."))
    activation: str | ActivationLut | None = field(
        default=None, metadata=about("Function whose table is included; see `ingot lut`.")
    )
    domain: tuple[float, float] | None = field(
        default=None, metadata=about("Interval of the table's knots: LOW,HIGH; as in `ingot lut`.")
    )
    outside: str | None = field(
        default=None, metadata=about("Beyond the knots: clamp, line or best; as in `ingot lut`.")
    )
    assume: Sequence[str] = field(default=(), metadata=about("KEY=VALUE, as in `ingot plan`."))
    overwrite: bool = field(default=False, metadata=_OVERWRITE)


@dataclass(frozen=True, slots=True)
class LutOptions:
    """Options of an activation table: the function and its inputs."""

    name: str = field(metadata=about("sigmoid, tanh, gelu, silu, exp or rsqrt.", argument=True))
    range: tuple[float, float] | None = field(default=None, metadata=about("Inputs that matter: LOW,HIGH.", "--range"))
    domain: tuple[float, float] | None = field(
        default=None, metadata=about("Interval of the 33 knots: LOW,HIGH; fitted by default.")
    )
    outside: str = field(
        default="clamp", metadata=about("Beyond the knots: clamp to the end knots, as published; line; or best.")
    )
