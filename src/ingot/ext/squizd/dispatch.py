"""Which kernel stack a SQUIZD file runs on: a pure function of its flags and of a machine (document, section 3.3).

``dispatch`` answers for a runtime that has all of the document's kernels; ``own_dispatch`` for Ingot, whose kernels are
those of the CPU and which hands Core ML packages to coremltools: ``ingot.load_model`` takes what that one says. Nothing
here has been run on a GPU or a Neural Engine.
"""

from __future__ import annotations

import platform as _machine
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ingot.core.runtime.isa import isa
from ingot.model.stacks import NOT_SET, Dispatch, Flags, Skipped, StackRequest
from ingot.reporting.report import Column, Table

FALLBACK = "NumPy"
_COMPUTING = ("INT2", "INT4")


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


_Verdict = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class _Stack:
    """One row of the document's priority list. ``judge`` says whether a runtime on a machine can run it, and why (not);
    ``own`` whether Ingot can."""

    flag: Flags
    judge: Callable[[Platform], _Verdict]
    own: Callable[[Platform, StackRequest], _Verdict]


def dispatch(flags: int, platform: Platform) -> Dispatch:
    """Choose the first stack, in the document's order, that the file holds and a runtime on the machine can run.

    The NumPy fallback is always there, so there is always an answer. Reserved bits are no features and are passed over.
    """
    return _first(flags, platform, lambda stack: stack.judge(platform))


def own_dispatch(flags: int, platform: Platform, request: StackRequest | None = None) -> Dispatch:
    """Choose the first stack, in the document's order, that the file holds, the machine has and Ingot can run.

    As ``dispatch``, but nothing that Ingot has no kernels for is ever chosen.
    """
    asked = request or StackRequest()
    choice = _first(flags, platform, lambda stack: stack.own(platform, asked))
    return replace(choice, computes=choice.stack in _COMPUTING and asked.from_codes)


def _first(flags: int, platform: Platform, judge: Callable[[_Stack], _Verdict]) -> Dispatch:
    skipped: list[Skipped] = []
    for stack in PRIORITY:
        name = str(stack.flag.name)
        if not flags & stack.flag:
            skipped.append(Skipped(name, NOT_SET))
            continue
        able, reason = judge(stack)
        if able:
            return Dispatch(platform.name, name, reason, tuple(skipped), _adds(flags))
        skipped.append(Skipped(name, reason))
    return Dispatch(platform.name, FALLBACK, _fallback(flags), tuple(skipped), _adds(flags))


def here() -> Platform:
    """Describe this machine; imports no framework and asks no driver more than whether it is there."""
    system = _machine.system()
    machine = _machine.machine()
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


class SquizdStacks:
    """The stack selector of ``.squizd`` files, registered in the group ``ingot.stack_selectors``."""

    def select(self, features: Flags, request: StackRequest) -> Dispatch:
        """Return the stack that Ingot takes on this machine."""
        return own_dispatch(features, here(), request)

    def tables(self, features: Flags) -> list[Table]:
        """Return the tables of ``ingot inspect``."""
        return details(features)


_DISPATCH = tuple(Column("", head=head) for head in ("platform", "stack", "why", "passed over"))


def details(flags: int) -> list[Table]:
    """Return the tables for ``ingot inspect``: what ``ingot.load_model`` takes here, and what a runtime would choose
    here and on the named platforms."""
    machine = here()
    choices = [
        own_dispatch(flags, replace(machine, name="Ingot on this machine")),
        *(dispatch(flags, platform) for platform in (machine, *PLATFORMS)),
    ]
    tables = [Table("", _DISPATCH, [_row(choice) for choice in choices], "dispatch")]
    if choices[0].adds:
        tables.append(
            Table("", (Column("", head="to every stack"),), [(add,) for add in choices[0].adds], "dispatch adds")
        )
    return tables


def _row(choice: Dispatch) -> tuple[str, ...]:
    passed_over = "; ".join(f"{each.stack}: {each.reason}" for each in choice.passed_over)
    return choice.platform, choice.stack, choice.reason, passed_over or "-"


def _adds(flags: int) -> tuple[str, ...]:
    adds = []
    if flags & Flags.SPARSE:
        adds.append("SPARSE: only kept blocks of feed-forward channels are stored; Ingot decodes the others to zeros")
    if flags & Flags.EAGLE:
        adds.append("EAGLE: a draft head for speculative decoding, by ingot generate --draft")
    return tuple(adds)


def _judge_ane(platform: Platform) -> _Verdict:
    if not platform.ane:
        return False, "needs a Neural Engine"
    if not platform.coremltools:
        return False, "needs coremltools to load the package"
    return True, "inference is handed to the Core ML package that Ingot extracts; not run by Ingot but by coremltools"


def _own_ane(platform: Platform, request: StackRequest) -> _Verdict:
    able, reason = _judge_ane(platform)
    if not able:
        return False, f"{reason}; the package can be extracted"
    obstacle = request.weights or request.refused
    return (False, obstacle) if obstacle else (True, "the Core ML package is handed to coremltools")


def _judge_astc(platform: Platform) -> _Verdict:
    if not platform.apple_gpu:
        return False, "needs the texture units of an Apple GPU"
    return True, "a runtime's textures decode in hardware; not run by Ingot, which decodes on the CPU (extra astc)"


def _own_astc(platform: Platform, request: StackRequest) -> _Verdict:
    return False, "Ingot has no kernels for texture units"


def _judge_tca(platform: Platform) -> _Verdict:
    if platform.cuda:
        return True, "a runtime's CUDA kernels decode while multiplying; not run by Ingot, which decodes on the CPU"
    return _on_cpu(platform, "bitmaps")


def _judge_int(platform: Platform) -> _Verdict:
    if platform.apple_gpu:
        return True, "a runtime's Metal kernels multiply packed codes; not run by Ingot, which decodes on the CPU"
    return _on_cpu(platform, "packed codes")


def _own_tca(platform: Platform, request: StackRequest) -> _Verdict:
    return _on_cpu(platform, "bitmaps")


def _own_int2(platform: Platform, request: StackRequest) -> _Verdict:
    able, reason = _on_cpu(platform, "some rows of packed codes at a time" if request.packed else "packed codes")
    if able and request.packed is None and request.from_codes:
        reason += "; those of 4 bits are multiplied packed"
    return able, reason


def _own_int4(platform: Platform, request: StackRequest) -> _Verdict:
    if not platform.native:
        return _on_cpu(platform, "")
    if request.packed is False:
        return False, "decoded weights are asked for"
    if not request.from_codes:
        return False, f"Ingot multiplies packed codes on the CPU, and the model is to be on {request.device}"
    return True, f"Ingot's CPU kernels ({platform.native}) multiply packed codes"


def _on_cpu(platform: Platform, what: str) -> _Verdict:
    if not platform.native:
        return False, "Ingot's kernels are not built for this platform"
    return True, f"Ingot's CPU kernels ({platform.native}) decode {what} to dense arrays"


def _fallback(flags: int) -> str:
    if flags & Flags.ASTC:
        return "ASTC blocks are decoded to dense arrays on the CPU (extra astc)"
    if flags & (Flags.TCA_TBE | Flags.INT2 | Flags.INT4):
        return "the codes are decoded to dense arrays"
    return "the weight blocks are dense arrays already"


PRIORITY: tuple[_Stack, ...] = (
    _Stack(Flags.ANE_COREML, _judge_ane, _own_ane),
    _Stack(Flags.ASTC, _judge_astc, _own_astc),
    _Stack(Flags.TCA_TBE, _judge_tca, _own_tca),
    _Stack(Flags.INT2, _judge_int, _own_int2),
    _Stack(Flags.INT4, _judge_int, _own_int4),
)
"""The document's order, highest first; the NumPy fallback comes after all of them."""
