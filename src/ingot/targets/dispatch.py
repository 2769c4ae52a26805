"""Which kernel stack a SQUIZD file would run on: a pure function of its flags and of a machine (document, section 3.3).

The document's stacks belong to a runtime. What Ingot itself does with a file is to decode its blocks to dense arrays on
the CPU; the reasons say which of the two is meant, and nothing here has been run on a GPU or a Neural Engine.
"""

from __future__ import annotations

import platform as _machine
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ingot.core.isa import isa
from ingot.model.features import Flags
from ingot.model.report import Column, Table

FALLBACK = "NumPy"


@dataclass(frozen=True, slots=True)
class Platform:
    """A machine, as far as dispatch asks.

    Parameters
    ----------
    name : str
    system, machine : str
        As Python's ``platform`` spells them: ``Darwin``, ``arm64``.
    ane, apple_gpu, cuda : bool
        A Neural Engine, an Apple GPU, an NVIDIA driver is there.
    coremltools : bool
        The package that loads a Core ML package is installed.
    native : str
        Instruction set of Ingot's kernels; "" where they are not built.
    """

    name: str
    system: str
    machine: str
    ane: bool = False
    apple_gpu: bool = False
    cuda: bool = False
    coremltools: bool = False
    native: str = ""


PLATFORMS: tuple[Platform, ...] = (
    Platform("apple-m1", "Darwin", "arm64", ane=True, apple_gpu=True, coremltools=True, native="baseline"),
    Platform("apple-m4", "Darwin", "arm64", ane=True, apple_gpu=True, coremltools=True, native="baseline"),
    Platform("apple-no-coremltools", "Darwin", "arm64", ane=True, apple_gpu=True, native="baseline"),
    Platform("linux-cuda", "Linux", "x86_64", cuda=True, native="x86-64-v4"),
    Platform("linux-cpu", "Linux", "x86_64", native="x86-64-v3"),
    Platform("windows-cpu", "Windows", "AMD64"),
)
"""Named machines to ask about from anywhere. The document makes no difference between generations of Apple's chips."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stack before the chosen one, and why it is not taken."""

    stack: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The answer: the stack, why, what came before it in priority, and what SPARSE and EAGLE add to it."""

    platform: str
    stack: str
    reason: str
    skipped: tuple[Skipped, ...]
    adds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stack:
    """One row of the document's priority list. ``judge`` says whether a machine can run it, and why (not)."""

    flag: Flags
    judge: Callable[[Platform], tuple[bool, str]]


def dispatch(flags: int, platform: Platform) -> Dispatch:
    """Choose the first stack, in the document's order, that the file holds and the machine can run.

    The NumPy fallback is always there, so there is always an answer. Reserved bits are no features and are passed over.
    """
    skipped: list[Skipped] = []
    for stack in PRIORITY:
        name = str(stack.flag.name)
        if not flags & stack.flag:
            skipped.append(Skipped(name, "flag not set"))
            continue
        able, reason = stack.judge(platform)
        if able:
            return Dispatch(platform.name, name, reason, tuple(skipped), _adds(flags))
        skipped.append(Skipped(name, reason))
    return Dispatch(platform.name, FALLBACK, _fallback(flags), tuple(skipped), _adds(flags))


def here() -> Platform:
    """Describe this machine; imports no framework and asks no driver more than whether it is there."""
    system, machine = _machine.system(), _machine.machine()
    apple = system == "Darwin" and machine == "arm64"
    cuda = any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0"))
    return Platform(
        "this machine",
        system,
        machine,
        ane=apple,
        apple_gpu=apple,
        cuda=cuda,
        coremltools=find_spec("coremltools") is not None,
        native=isa(),
    )


_DISPATCH = tuple(Column("", head=head) for head in ("platform", "stack", "why", "passed over"))


def details(flags: int) -> list[Table]:
    """Return the tables for ``ingot inspect``: what a runtime would choose here and on the named platforms."""
    choices = [dispatch(flags, platform) for platform in (here(), *PLATFORMS)]
    tables = [Table("", _DISPATCH, [_row(choice) for choice in choices], "dispatch")]
    if choices[0].adds:
        tables.append(
            Table("", (Column("", head="to every stack"),), [(add,) for add in choices[0].adds], "dispatch adds")
        )
    return tables


def _row(choice: Dispatch) -> tuple[str, ...]:
    told = [skipped for skipped in choice.skipped if skipped.reason != "flag not set"]
    return (
        choice.platform,
        choice.stack,
        choice.reason,
        "; ".join(f"{each.stack}: {each.reason}" for each in told) or "-",
    )


def _adds(flags: int) -> tuple[str, ...]:
    adds = []
    if flags & Flags.SPARSE:
        adds.append("SPARSE: only kept blocks of feed-forward channels are stored; Ingot decodes the others to zeros")
    if flags & Flags.EAGLE:
        adds.append(
            "EAGLE: a draft head for speculative decoding; Ingot hands its tensors on and does not decode with it"
        )
    return tuple(adds)


def _judge_ane(platform: Platform) -> tuple[bool, str]:
    if not platform.ane:
        return False, "needs a Neural Engine"
    if not platform.coremltools:
        return False, "needs coremltools to load the package"
    return True, "a runtime hands inference to the Core ML package that Ingot extracts; not run by Ingot"


def _judge_astc(platform: Platform) -> tuple[bool, str]:
    if not platform.apple_gpu:
        return False, "needs the texture units of an Apple GPU"
    return True, "a runtime's textures decode in hardware; not run by Ingot, which decodes on the CPU (extra astc)"


def _judge_tca(platform: Platform) -> tuple[bool, str]:
    if platform.cuda:
        return True, "a runtime's CUDA kernels decode while multiplying; not run by Ingot, which decodes on the CPU"
    return _on_cpu(platform, "bitmaps")


def _judge_int(platform: Platform) -> tuple[bool, str]:
    if platform.apple_gpu:
        return True, "a runtime's Metal kernels multiply packed codes; not run by Ingot, which decodes on the CPU"
    return _on_cpu(platform, "packed codes")


def _on_cpu(platform: Platform, what: str) -> tuple[bool, str]:
    if not platform.native:
        return False, "Ingot's kernels are not built for this platform"
    return True, f"Ingot's CPU kernels ({platform.native}) decode {what} to dense arrays"


def _fallback(flags: int) -> str:
    if flags & Flags.ASTC:
        return "ASTC blocks are decoded to dense arrays on the CPU (extra astc)"
    if flags & (Flags.TCA_TBE | Flags.INT2 | Flags.INT4):
        return "a reader of the document's tables decodes to dense arrays in plain NumPy"
    return "the weight blocks are dense arrays already"


PRIORITY: tuple[_Stack, ...] = (
    _Stack(Flags.ANE_COREML, _judge_ane),
    _Stack(Flags.ASTC, _judge_astc),
    _Stack(Flags.TCA_TBE, _judge_tca),
    _Stack(Flags.INT2, _judge_int),
    _Stack(Flags.INT4, _judge_int),
)
"""The document's order, highest first; the NumPy fallback comes after all of them."""
