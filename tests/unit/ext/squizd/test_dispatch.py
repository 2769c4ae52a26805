"""Dispatch: every combination of flags on every platform, in the document's order (section 3.3)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from itertools import product

import pytest

from ingot.ext.squizd.dispatch import (
    FALLBACK,
    PLATFORMS,
    Platform,
    StackRequest,
    details,
    dispatch,
    ingot_dispatch,
    this_machine,
)
from ingot.model.stacks import Flags

# Highest first, as the document lists them.
ORDER = ("ANE_COREML", "ASTC", "TCA_TBE", "INT2", "INT4", FALLBACK)
EVERY = range(1 << 7)
ABILITIES = ("ane", "apple_gpu", "cuda", "coremltools")
# Every machine there can be, likely or not.
MACHINES = tuple(
    Platform("some", "Any", "any", **dict(zip(ABILITIES, having, strict=True)), native=native)
    for *having, native in product(*([(False, True)] * len(ABILITIES)), ("", "baseline"))
)


def expected(flags: int, platform: Platform) -> str:
    """The table of who can run what, said once more and otherwise."""
    can = {
        "ANE_COREML": platform.ane and platform.coremltools,
        "ASTC": platform.apple_gpu,
        "TCA_TBE": platform.cuda or bool(platform.native),
        "INT2": platform.apple_gpu or bool(platform.native),
        "INT4": platform.apple_gpu or bool(platform.native),
    }
    return next((name for name in ORDER[:-1] if flags & Flags[name] and can[name]), FALLBACK)


@pytest.mark.parametrize("platform", [*PLATFORMS, this_machine()], ids=lambda platform: platform.name)
def test_every_combination_has_one_answer(platform: Platform) -> None:
    for flags in EVERY:
        found = dispatch(flags, platform)
        assert found == dispatch(flags, platform)
        assert found.stack == expected(flags, platform)
        assert found.platform == platform.name
        assert found.reason
        assert [one.stack for one in found.skipped] == list(ORDER[: ORDER.index(found.stack)])
        assert all(one.reason for one in found.skipped)
        assert [one.reason == "flag not set" for one in found.skipped] == [
            not flags & Flags[one.stack] for one in found.skipped
        ]


def test_any_machine_is_answered_as_the_table_says() -> None:
    for platform in MACHINES:
        for flags in EVERY:
            assert dispatch(flags, platform).stack == expected(flags, platform)


def test_more_features_and_more_machine_never_choose_a_later_stack() -> None:
    def rank(flags: int, platform: Platform) -> int:
        return ORDER.index(dispatch(flags, platform).stack)

    for platform in MACHINES:
        more = [replace(platform, **{ability: True}) for ability in ABILITIES] + [replace(platform, native="x86-64-v4")]
        for flags in EVERY:
            assert all(rank(flags | flag, platform) <= rank(flags, platform) for flag in Flags)
            assert all(rank(flags, better) <= rank(flags, platform) for better in more)


def test_sparse_and_eagle_add_and_never_choose() -> None:
    for platform in PLATFORMS:
        for flags in EVERY:
            found = dispatch(flags, platform)
            assert [add.partition(":")[0] for add in found.adds] == [
                flag.name for flag in (Flags.SPARSE, Flags.EAGLE) if flags & flag
            ]
            assert found.stack == dispatch(flags & ~(Flags.SPARSE | Flags.EAGLE), platform).stack


def test_reserved_bits_choose_nothing() -> None:
    for platform in PLATFORMS:
        assert dispatch(0xFFFFFF80, platform) == dispatch(0, platform)
        assert dispatch(Flags.INT4 | 1 << 31, platform) == dispatch(Flags.INT4, platform)


@pytest.mark.parametrize(
    ("name", "flags", "stack"),
    [
        ("apple-m1", Flags.INT4, "INT4"),
        ("apple-m1", Flags.INT4 | Flags.ANE_COREML, "ANE_COREML"),
        ("apple-no-coremltools", Flags.INT4 | Flags.ANE_COREML, "INT4"),
        ("apple-m4", Flags.ASTC, "ASTC"),
        ("linux-cuda", Flags.TCA_TBE, "TCA_TBE"),
        ("linux-cuda", Flags.ASTC, FALLBACK),
        ("linux-cpu", Flags.INT2 | Flags.ANE_COREML, "INT2"),
        ("linux-cpu", Flags(0), FALLBACK),
        ("windows-cpu", Flags.INT4 | Flags.INT2 | Flags.TCA_TBE, FALLBACK),
    ],
)
def test_named_platforms(name: str, flags: Flags, stack: str) -> None:
    platform = next(platform for platform in PLATFORMS if platform.name == name)
    assert dispatch(flags, platform).stack == stack


def test_what_ingot_does_not_run_is_said() -> None:
    """Stacks of GPUs and of the Neural Engine belong to a runtime."""
    for platform in PLATFORMS:
        for flags in EVERY:
            found = dispatch(flags, platform)
            cpu = found.stack == FALLBACK or "Ingot's CPU kernels" in found.reason
            assert cpu != ("not run by Ingot" in found.reason)


def test_ingot_takes_what_it_has_kernels_for() -> None:
    """The same order, and of what the machine has only what Ingot runs: its own kernels and coremltools."""
    for platform in MACHINES:
        can = {
            "ANE_COREML": platform.ane and platform.coremltools,
            **dict.fromkeys(("TCA_TBE", "INT2", "INT4"), bool(platform.native)),
        }
        for flags in EVERY:
            choice = ingot_dispatch(flags, platform)
            wanted = next((name for name in ORDER[:-1] if flags & Flags[name] and can.get(name)), FALLBACK)
            assert choice.stack == wanted
            assert choice.computes == (wanted in ("INT2", "INT4"))
            assert ORDER.index(wanted) >= ORDER.index(dispatch(flags, platform).stack)
            assert [each.stack for each in choice.passed_over] == [
                name for name in ORDER[: ORDER.index(wanted)] if flags & Flags[name]
            ]


@pytest.mark.parametrize(
    ("asked", "stack", "computes"),
    [
        (StackRequest(packed=False), FALLBACK, False),
        (StackRequest(packed=True), "ANE_COREML", True),
        (StackRequest(device="cuda"), "ANE_COREML", False),
        (StackRequest(weights="a dtype is asked for"), "INT4", True),
        (StackRequest(device="cuda", weights="a device is asked for"), FALLBACK, False),
        (StackRequest("cuda", packed=True, weights="packed weights are asked for"), "INT4", True),
        (StackRequest(refused="no such operator"), "INT4", True),
    ],
)
def test_what_is_asked_for_decides_too(asked: StackRequest, stack: str, computes: bool) -> None:
    machine = replace(PLATFORMS[0], ane=stack == "ANE_COREML" or bool(asked.weights or asked.refused))
    choice = ingot_dispatch(Flags.INT4 | Flags.ANE_COREML, machine, asked)
    assert choice.stack == stack
    assert choice.computes == (computes and stack == "INT4")


def test_this_machine_is_described_without_frameworks() -> None:
    code = (
        "import sys; from ingot.ext.squizd.dispatch import this_machine; this_machine(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'coremltools', 'jax', 'mlx')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert all(getattr(this_machine(), field.name) is not None for field in fields(Platform))


def test_tables_for_inspect() -> None:
    tables = details(Flags.INT4 | Flags.ANE_COREML | Flags.SPARSE | Flags.EAGLE)
    assert [row[0] for row in tables[0].rows] == [
        "Ingot on this machine",
        "this machine",
        *(platform.name for platform in PLATFORMS),
    ]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert len(tables[1].rows) == 2
    assert len(details(0)) == 1
