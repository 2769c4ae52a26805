"""Compiled programs: the container, registers by name, kernels and tables; and the packer beside what the compiler
wrote.

The programs are put together here, with the figures of real ones: those of TG (``spec/hwx.md``), compiled for H13.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.cli.main import run
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.ext.ane.chips.activation import ENTRIES, fit_lut, read_lut
from ingot.ext.ane.chips.chips import data, load_chip
from ingot.ext.ane.chips.descriptor import KernelKind, kernel_word
from ingot.ext.ane.chips.program import read_program
from ingot.ext.ane.chips.program_tasks import kernel_of, register_map, tasks_of
from ingot.ext.ane.kernel_units.pack import KernelWeight, pack_unit
from ingot.ext.ane.kernel_units.unit import read_unit
from ingot.ext.ane.program import inspect_program, program_weights

TEXT = 0x4000
TYPES = ("void:t1=1", "int8:t2=r2;0;127", "uint6:t10=r1;0;63", "image:t11=ar1;0;1;12=s64h:ar1;0;1;13=s2w:5")

CONV = {
    "Common.Cin.Cin": 3, "Common.Cout.Cout": 3, "Common.ConvCfg.Kw": 1, "Common.ConvCfg.Kh": 1,
    "Common.ConvCfg.OCGSize": 0, "Common.Cfg.ActiveNE": 2, "Common.GroupConvCfg.NumGroups": 1,
    "NE.KernelCfg.KernelFmt": 2, "NE.KernelCfg.PalettizedBits": 8,
}  # fmt: skip
"""Three channels of 1 x 1: one per group, one group per engine, a tile of 64 bytes each."""
SIGMOID = {
    "Common.Cin.Cin": 1, "Common.Cout.Cout": 1, "Common.ConvCfg.Kw": 1, "Common.ConvCfg.Kh": 1,
    "NE.KernelCfg.PalettizedBits": 8, "NE.MACCfg.OpMode": 4, "NE.MACCfg.NonlinearMode": 2,
}  # fmt: skip


@dataclass
class Made:
    """A program of one task or several, with its coefficients."""

    tasks: list[Mapping[str, int]]
    tiles: list[bytes]
    subtype: int = 4
    patches: dict[int, bytes] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        text, size = bytearray(), data("registers_h13")["size"]
        stride = -(-size // 0x100) * 0x100
        for index, registers in enumerate(self.tasks):
            words = [0] * (stride // 4)
            more = {} if index + 1 == len(self.tasks) else {"Header[7].NextPointer": (index + 1) * stride}
            for name, value in {**registers, **self._coefficients(), **more}.items():
                at, low, bits = register_map()[name]
                assert value < 1 << bits
                words[at // 4] |= value << low
            text += struct.pack(f"<{len(words)}I", *words)
        const, sections = b"".join(self.tiles), b""
        for name, offset, content in (("__text", TEXT, text), ("__const", TEXT + len(text), const)):
            place = struct.pack("<2Q8I", 0x30000000 + offset - TEXT, len(content), offset, 6, 0, 0, 0, 0, 0, 0)
            sections += name.encode().ljust(16, b"\0") + b"__TEXT".ljust(16, b"\0") + place
        segment = struct.pack("<2I16s4Q4I", 0x19, 72 + len(sections), b"__TEXT", 0, 0, 0, 0, 5, 5, 2, 0) + sections
        names, symbols = b"\0", b""
        for name in ("Kabc_ne_0", *TYPES):
            symbols += struct.pack("<IBBHQ", len(names), 0x80 if ":" in name else 0x0F, 2, 0, 0x30000280)
            names += name.encode() + b"\0"
        note = struct.pack("<2I", 0x08, 56) + b"ANEC v1\nzin_ane_compiler v4.2.1\n\t-t h13".ljust(48, b"\0")
        start = 32 + len(segment) + len(note) + 24
        table = struct.pack("<6I", 2, 24, start, len(TYPES) + 1, start + len(symbols), len(names))
        commands = segment + note + table
        head = struct.pack("<8I", 0xBEEFFACE, 0x80, self.subtype, 2, 3, len(commands), 0x200000, 0)
        whole = bytearray((head + commands + symbols + names).ljust(TEXT, b"\0") + text + const)
        for offset, patch in self.patches.items():
            whole[offset : offset + len(patch)] = patch
        return bytes(whole)

    def _coefficients(self) -> dict[str, int]:
        found, at = {}, 0
        for index, tile in enumerate(self.tiles):
            found[f"KernelDMASrc.CoeffDMAConfig[{index}].En"] = 1
            found[f"KernelDMASrc.CoeffBaseAddr[{index}].Addr"] = at >> 6
            found[f"KernelDMASrc.CoeffBfrSize[{index}].MemBfrSize"] = len(tile) >> 6
            at += len(tile)
        return found


def tile(values: np.ndarray) -> bytes:
    raw = values.tobytes()
    return raw.ljust(-(-len(raw) // 64) * 64, b"\0")


def conv(values: np.ndarray, **more: int) -> Made:
    """A program of one 1 x 1 convolution whose tiles have a channel each."""
    shape = {"Common.Cout.Cout": values.shape[0], "Common.Cin.Cin": values.shape[1]}
    registers = {**CONV, **shape, **{name.replace("__", "."): value for name, value in more.items()}}
    return Made([registers], [tile(row) for row in values])


TWOS = np.full((3, 3), 2, np.float16)


def test_a_program_tells_its_sections_types_and_registers(tmp_path: Path) -> None:
    path = tmp_path / "conv.hwx"
    path.write_bytes(conv(TWOS).to_bytes())
    found = inspect_program(path)
    assert (found.generation, found.kernels) == ("H13", {"Kabc_ne_0": 0x30000280})
    assert "zin_ane_compiler v4.2.1" in found.compiler
    assert found.types == {1: "void", 2: "int8", 10: "uint6"}
    assert [(item.segment, item.name, item.size) for item in found.sections][1] == ("__TEXT", "__const", 192)
    (task,) = found.tasks
    assert (task.shape, task.dtype, task.values) == ((3, 3, 1, 1), "float16", (2.0, 2.0, 1))
    assert task.registers["NE.KernelCfg.PalettizedBits"] == 8
    np.testing.assert_array_equal(program_weights(path)[0].reshape(3, 3), TWOS)
    assert run(["inspect", str(path)]) == 0
    assert run(["inspect", str(path), "--json"]) == 0


def test_the_packer_writes_the_compilers_bytes() -> None:
    """conv.hwx: 3 x 3 of 2.0 in three tiles of 64 bytes, a channel each, and its kernel word; gemm.hwx: 32 of 512 per
    tile."""
    m1 = load_chip("m1")
    unit = read_unit(pack_unit(KernelWeight((3, 3, 1, 1), TWOS.reshape(3, 3, 1, 1), 16), m1))
    section = unit.header.sections["weights"]
    raw = pack_unit(KernelWeight((3, 3, 1, 1), TWOS.reshape(3, 3, 1, 1), 16), m1)
    compiled = read_program(conv(TWOS).to_bytes(), "conv").section("__TEXT", "__const")
    assert raw[section.offset :].ljust(192, b"\0")[:192] == bytes(compiled)
    assert unit.records[:, 0].tolist() == [0, 64, 128]
    assert unit.header.word == 0x82
    gemm = read_unit(pack_unit(KernelWeight((512, 512), np.zeros((512, 512), np.float16), 16), m1)).header
    assert (gemm.ocg, gemm.sections["weights"].length) == (32, 0x80000)


def test_groups_go_round_the_engines() -> None:
    """Five groups of two channels over four tiles: the first tile has the first group and the last."""
    values = np.arange(10 * 4, dtype=np.float16).reshape(10, 4)
    tiles = [tile(np.concatenate([values[0:2], values[8:10]])), *(tile(values[i : i + 2]) for i in (2, 4, 6))]
    registers = {**CONV, "Common.Cout.Cout": 10, "Common.Cin.Cin": 4, "Common.ConvCfg.OCGSize": 1}
    program = read_program(Made([registers], tiles).to_bytes(), "made")
    (task,) = tasks_of(program, "made")
    np.testing.assert_array_equal(kernel_of(program, task, "made").reshape(10, 4), values)


@pytest.mark.parametrize(("fmt", "dtype"), [(0, np.uint8), (1, np.int8)])
def test_integers_come_as_stored(fmt: int, dtype: type) -> None:
    values = np.arange(-6, 6).astype(dtype).reshape(3, 4)
    program = read_program(conv(values, NE__KernelCfg__KernelFmt=fmt).to_bytes(), "made")
    (task,) = tasks_of(program, "made")
    np.testing.assert_array_equal(kernel_of(program, task, "made").reshape(3, 4), values)


def sigmoid_table() -> np.ndarray:
    """The compiler's table of a sigmoid: knots of the curve at every half from -8 to 8, lines to 0 and 1 beyond."""
    knots = 1 / (1 + np.exp(8 - np.arange(33) / 2))
    head = np.array([-9.9375, 8.3203125, 0, 1], np.float16)
    tails = np.array([0.0001731, 0.00172, 0.001524, 0.9873], np.float16)
    words = np.array([1, 1], np.uint16).view(np.float16)
    return np.concatenate([head, knots.astype(np.float16), tails, words])


def test_a_compiled_table_errs_by_what_was_measured() -> None:
    """B3 measured 0.0034 on the engine; the compiler's own table gives that, evaluated as here."""
    program = Made([SIGMOID], [tile(sigmoid_table())])
    report = inspect_of(program)
    assert report.table is not None
    lut = read_lut(np.array(report.table).astype(np.float16))
    x = np.linspace(-20, 20, 100_001).astype(np.float16)
    worst = np.abs(lut(x).astype(np.float64) - 1 / (1 + np.exp(-x.astype(np.float64)))).max()
    assert worst == pytest.approx(0.0034, abs=0.0001)
    assert lut.outside == "line"
    assert (lut.knot_inputs[0], lut.knot_inputs[-1], lut(-30.0), lut(30.0)) == (-8, 8, 0, 1)
    # Fitted over the same knots, Ingot's own has the same layout: 86 bytes, no shift, a scale of 1, mode words of 1.
    ours = fit_lut("sigmoid", (-10.0, 10.0), (-8.0, 8.0), "line").lut.entries()
    np.testing.assert_array_equal(ours[[2, 3, -2, -1]].view(np.uint16), sigmoid_table()[[2, 3, -2, -1]].view(np.uint16))
    assert len(ours) == ENTRIES


def inspect_of(made: Made) -> object:
    from ingot.ext.ane.program import _task

    program = read_program(made.to_bytes(), "made")
    return _task(program, tasks_of(program, "made")[0], "made")


def test_tasks_follow_their_links() -> None:
    made = Made([CONV, SIGMOID, {}], [tile(sigmoid_table())])
    found = tasks_of(read_program(made.to_bytes(), "made"), "made")
    assert [task.offset for task in found] == [0, 0x300, 0x600]
    assert [task.multiplies for task in found] == [True, False, True]


@pytest.mark.parametrize(
    ("registers", "rule"),
    [
        ({"NE.KernelCfg.PalettizedEn": 1}, "hwx.kernel"),
        ({"NE.KernelCfg.SparseFmt": 1}, "hwx.kernel"),
        ({"NE.KernelCfg.KernelFmt": 3}, "hwx.kernel"),
        ({"Common.GroupConvCfg.NumGroups": 4}, "hwx.kernel"),
        ({"NE.MACCfg.NonlinearMode": 2}, "hwx.kernel"),
        ({"Common.Cout.Cout": 0x1FFFF}, "hwx.kernel-bounds"),
        ({"Common.Cin.Cin": 40}, "hwx.kernel-bounds"),
        ({"Common.Cin.Cin": 0}, "hwx.kernel-bounds"),
        ({"Common.Cfg.ActiveNE": 0, "Common.Cin.Cin": 32}, "hwx.kernel-bounds"),
    ],
)
def test_what_is_not_known_is_refused(registers: Mapping[str, int], rule: str) -> None:
    made = Made([{**CONV, **registers}], [tile(row) for row in np.full((3, 32), 2, np.float16)])
    program = read_program(made.to_bytes(), "made")
    with pytest.raises((UnsupportedError, FormatError)) as found:
        kernel_of(program, tasks_of(program, "made")[0], "made")
    assert found.value.rule == rule


def test_other_generations_show_their_sections() -> None:
    made = conv(TWOS)
    made.subtype = 7
    program = read_program(made.to_bytes(), "made")
    assert program.generation == "H16"
    with pytest.raises(UnsupportedError) as found:
        tasks_of(program, "made")
    assert found.value.rule == "hwx.generation"


@pytest.mark.parametrize(
    ("offset", "layout", "value", "rule"),
    [
        (0, "<I", 0xFEEDFACF, "hwx.magic"),
        (16, "<I", 4097, "hwx.commands"),
        (16, "<I", 9, "hwx.commands"),
        (20, "<I", 1 << 30, "hwx.commands"),
        (36, "<I", 0, "hwx.commands"),
        (32 + 64, "<I", 3, "hwx.commands"),
        (32 + 72 + 40, "<Q", 1 << 62, "hwx.bounds"),
        (32 + 72 + 160 + 64 + 8, "<I", 1 << 31, "hwx.bounds"),
        (32 + 72 + 160 + 64 + 16, "<I", 1 << 31, "hwx.bounds"),
        (32 + 72, "<I", 0x80808080, "hwx.text"),
        (TEXT + 0x1C, "<I", 2, "hwx.tasks"),
        (TEXT + 0x1C, "<I", 0x4000, "hwx.tasks"),
    ],
)
def test_hostile_programs_are_refused(offset: int, layout: str, value: int, rule: str) -> None:
    made = conv(TWOS)
    made.patches = {offset: struct.pack(layout, value)}
    with pytest.raises(FormatError) as found:
        tasks_of(read_program(made.to_bytes(), "made"), "made")
    assert found.value.rule == rule


@settings(max_examples=60)
@given(st.integers(0, 800), st.binary(min_size=1, max_size=8))
def test_damage_is_refused_or_read(offset: int, patch: bytes) -> None:
    made = conv(TWOS)
    made.patches = {offset: patch}
    try:
        program = read_program(made.to_bytes(), "made")
        for task in tasks_of(program, "made"):
            kernel_of(program, task, "made")
    except IngotError:
        pass


def test_the_word_of_a_compiled_kernel() -> None:
    registers = tasks_of(read_program(conv(TWOS).to_bytes(), "made"), "made")[0].registers
    word = sum(
        value << register_map()[name][1] for name, value in registers.items() if name.startswith("NE.KernelCfg.")
    )
    assert word == kernel_word(KernelKind(), "H13", detect_zeros=True) == 0x82
