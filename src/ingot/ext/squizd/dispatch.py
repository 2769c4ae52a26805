"""Choose the kernel stack for a SQUIZD file from its flags and from the properties of a machine (document, section
3.3).

``dispatch`` chooses for a runtime that has all kernels of the document. ``ingot_dispatch`` chooses for Ingot, which has
CPU kernels and passes Core ML packages to coremltools; ``ingot.load_model`` uses it. Nothing in this module has been
tested on a GPU or a Neural Engine.
"""

from __future__ import annotations

import platform as _machine
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ingot.core.runtime.native import isa
from ingot.model.stacks import NOT_SET, Dispatch, Flags, Skipped, StackRequest
from ingot.reporting.report import Column, Table

FALLBACK = "NumPy"
_COMPUTING = ("INT2", "INT4")


@dataclass(frozen=True, slots=True)
class Platform:
    """The properties of a machine that determine the stack.

    Parameters
    ----------
    name : str
    system, machine : str
        Names as in Python's ``platform``: ``Darwin``, ``arm64``.
    ane, apple_gpu, cuda : bool
        Whether the machine has a Neural Engine, an Apple GPU, an NVIDIA driver.
    coremltools : bool
        Whether coremltools is installed, which loads Core ML packages.
    native : str
        Instruction set of Ingot's kernels; "" if they are not built.
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
"""Named machines, for reports on any machine. The document does not distinguish generations of Apple's chips."""


_Verdict = tuple[bool, str]


@dataclass(frozen=True, slots=True)
class _Stack:
    """A kernel stack in the document's priority list: its feature flag, and the functions that decide on it.

    ``judge`` returns whether a runtime with all kernels of the document can run the stack on a machine, and the reason.
    ``judge_ingot`` returns the same for Ingot.
    """

    flag: Flags
    judge: Callable[[Platform], _Verdict]
    judge_ingot: Callable[[Platform, StackRequest], _Verdict]


def dispatch(flags: int, platform: Platform) -> Dispatch:
    """Return the first stack, in the document's order, that the file supports and a runtime on the machine can run.

    If there is no such stack, return the NumPy fallback. Reserved flag bits are ignored.
    """
    return _first(flags, platform, lambda stack: stack.judge(platform))


def ingot_dispatch(flags: int, platform: Platform, request: StackRequest | None = None) -> Dispatch:
    """Return the first stack, in the document's order, that the file and the machine support and Ingot can run.

    Unlike ``dispatch``, it never returns a stack for which Ingot has no kernels.
    """
    stack_request = request or StackRequest()
    choice = _first(flags, platform, lambda stack: stack.judge_ingot(platform, stack_request))
    return replace(choice, computes=choice.stack in _COMPUTING and stack_request.from_codes)


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


def this_machine() -> Platform:
    """Return the properties of this machine; no framework is imported and no driver is called."""
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
        """Return the stack that Ingot uses on this machine."""
        return ingot_dispatch(features, this_machine(), request)

    def tables(self, features: Flags) -> list[Table]:
        """Return the tables of ``ingot inspect``."""
        return details(features)


_DISPATCH = tuple(Column("", head=head) for head in ("platform", "stack", "why", "passed over"))


def details(flags: int) -> list[Table]:
    """Return the tables for ``ingot inspect``.

    They show the stack of ``ingot.load_model`` on this machine. They also show the stack that a runtime with all
    kernels would choose, on this machine and on each of ``PLATFORMS``.
    """
    machine = this_machine()
    choices = [
        ingot_dispatch(flags, replace(machine, name="Ingot on this machine")),
        *(dispatch(flags, platform) for platform in (machine, *PLATFORMS)),
    ]
    tables = [Table("", _DISPATCH, [_row(choice) for choice in choices], "dispatch")]
    if choices[0].adds:
        tables.append(
            Table("", (Column("", head="to every stack"),), [(add,) for add in choices[0].adds], "dispatch adds")
        )
    return tables


def _row(choice: Dispatch) -> tuple[str, ...]:
    passed_over = "; ".join(f"{skipped.stack}: {skipped.reason}" for skipped in choice.passed_over)
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
    return True, "coremltools runs the Core ML package that Ingot extracts (not run by Ingot itself)"


def _ingot_ane(platform: Platform, request: StackRequest) -> _Verdict:
    able, reason = _judge_ane(platform)
    if not able:
        return False, f"{reason}; the package can be extracted"
    obstacle = request.weights or request.refused
    return (False, obstacle) if obstacle else (True, "coremltools runs the Core ML package")


def _judge_astc(platform: Platform) -> _Verdict:
    if not platform.apple_gpu:
        return False, "needs the texture units of an Apple GPU"
    return True, "the texture units decode in hardware (not run by Ingot, which decodes on the CPU with the extra astc)"


def _ingot_astc(platform: Platform, request: StackRequest) -> _Verdict:
    return False, "Ingot has no kernels for texture units"


def _judge_tca(platform: Platform) -> _Verdict:
    if platform.cuda:
        return True, "CUDA kernels decode while multiplying (not run by Ingot, which decodes on the CPU)"
    return _on_cpu(platform, "bitmaps")


def _judge_int(platform: Platform) -> _Verdict:
    if platform.apple_gpu:
        return True, "Metal kernels multiply packed codes (not run by Ingot, which decodes on the CPU)"
    return _on_cpu(platform, "packed codes")


def _ingot_tca(platform: Platform, request: StackRequest) -> _Verdict:
    return _on_cpu(platform, "bitmaps")


def _ingot_int2(platform: Platform, request: StackRequest) -> _Verdict:
    able, reason = _on_cpu(platform, "packed codes, a few rows at a time," if request.packed else "packed codes")
    if able and request.packed is None and request.from_codes:
        reason += "; those of 4 bits are multiplied packed"
    return able, reason


def _ingot_int4(platform: Platform, request: StackRequest) -> _Verdict:
    if not platform.native:
        return _on_cpu(platform, "")
    if request.packed is False:
        return False, "the request is for decoded weights"
    if not request.from_codes:
        return False, f"Ingot multiplies packed codes on the CPU only, and the model's device is {request.device}"
    return True, f"Ingot's CPU kernels ({platform.native}) multiply packed codes"


def _on_cpu(platform: Platform, data: str) -> _Verdict:
    if not platform.native:
        return False, "Ingot's kernels are not built for this platform"
    return True, f"Ingot's CPU kernels ({platform.native}) decode {data} to dense arrays"


def _fallback(flags: int) -> str:
    if flags & Flags.ASTC:
        return "ASTC blocks are decoded to dense arrays on the CPU (extra astc)"
    if flags & (Flags.TCA_TBE | Flags.INT2 | Flags.INT4):
        return "the codes are decoded to dense arrays"
    return "the weight blocks are dense arrays already"


PRIORITY: tuple[_Stack, ...] = (
    _Stack(Flags.ANE_COREML, _judge_ane, _ingot_ane),
    _Stack(Flags.ASTC, _judge_astc, _ingot_astc),
    _Stack(Flags.TCA_TBE, _judge_tca, _ingot_tca),
    _Stack(Flags.INT2, _judge_int, _ingot_int2),
    _Stack(Flags.INT4, _judge_int, _ingot_int4),
)
"""The stacks in the document's order, highest priority first; the NumPy fallback comes last."""
