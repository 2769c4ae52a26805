"""Read the tasks of a compiled program: registers by name, and weights and tables of kernels (``spec/hwx.md``).

Only the registers of H13 (A14, M1) are documented: ``data/registers_h13.toml``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ingot.errors import FormatError, UnsupportedError
from ingot.ext.ane.chips.activation import ENTRIES, ActivationLut, read_lut
from ingot.ext.ane.chips.chips import data
from ingot.ext.ane.chips.program import Program

Array = np.ndarray[Any, np.dtype[Any]]

TILES = 16
_BYPASS = 4  # value of MACCfg.OpMode
_TABLE = 2  # value of MACCfg.NonlinearMode
_TYPES = {0: "u1", 1: "i1", 2: "<f2"}  # by the value of KernelCfg.KernelFmt
_MOST_TASKS = 1 << 16


@dataclass(frozen=True)
class Task:
    """A task: the offset of its descriptor in ``__text``, and its registers by name, such as
    ``NE.KernelCfg.KernelFmt``.
    """

    offset: int
    registers: Mapping[str, int]

    def __getitem__(self, name: str) -> int:
        return self.registers[name]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the kernel: output channels, input channels, height, width."""
        outputs = self["Common.Cout.Cout"]
        inputs = self["Common.Cin.Cin"]
        return outputs, inputs, self["Common.ConvCfg.Kh"], self["Common.ConvCfg.Kw"]

    @property
    def channels_per_group(self) -> int:
        return 1 << self["Common.ConvCfg.OCGSize"]

    @property
    def engines(self) -> int:
        """The number of engine cores; group g of output channels belongs to core ``g mod engines``."""
        return 1 << self["Common.Cfg.ActiveNE"]

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Offset in ``__const`` and size in bytes of every enabled coefficient channel, in the order of channels."""
        block = "KernelDMASrc.Coeff"
        on = [index for index in range(TILES) if self[f"{block}DMAConfig[{index}].En"]]
        return tuple(
            (self[f"{block}BaseAddr[{i}].Addr"] << 6, self[f"{block}BfrSize[{i}].MemBfrSize"] << 6) for i in on
        )

    @property
    def multiplies(self) -> bool:
        """Whether the task has a kernel; planar tasks and tasks that only apply an activation have none."""
        return bool(self.tiles) and self["NE.MACCfg.OpMode"] != _BYPASS


@cache
def register_map() -> Mapping[str, tuple[int, int, int]]:
    """Return the register fields of H13 by name.

    A field has the offset of its word in a descriptor, its lowest bit, and its number of bits.
    """
    registers_h13 = data("registers_h13")
    by_address = {}
    for block, registers in registers_h13["blocks"].items():
        for name, fields in registers.items():
            count = registers_h13["repeat"].get(name, 1)
            for index in range(count):
                name_of_register = (
                    f"{block}.{name}[{index}]" if count > 1 else name if "[" in name else f"{block}.{name}"
                )
                for field, value in fields.items():
                    if field != "at":
                        by_address[f"{name_of_register}.{field}"] = (fields["at"] + 4 * index, *value)
    return by_address


def tasks_of(program: Program, location: str) -> tuple[Task, ...]:
    """Return the tasks of a program in the order of their links.

    Raises
    ------
    UnsupportedError
        ``hwx.generation``: the program is for another generation than H13.
    FormatError
        ``hwx.tasks``: a descriptor outside ``__text``, or a link to an earlier offset.
    """
    registers_h13 = data("registers_h13")
    if program.generation != registers_h13["target"]:
        raise UnsupportedError(
            f"expected a program for {registers_h13['target']}, whose registers are documented, "
            f"found {program.generation}",
            rule="hwx.generation",
            where=location,
        )
    return tuple(_tasks(program.section("__TEXT", "__text"), registers_h13["size"], location))


def _tasks(text: memoryview, size: int, location: str) -> Iterator[Task]:
    offset = 0
    link = register_map()["Header[7].NextPointer"][0]
    for _ in range(_MOST_TASKS):
        if offset + size > len(text) or offset % 4:
            raise FormatError("hwx.tasks", f"expected a descriptor at {offset} of {len(text)} bytes", where=location)
        words = struct.unpack_from(f"<{size // 4}I", text, offset)
        yield Task(
            offset,
            {
                name: words[word_offset // 4] >> low & ((1 << bits) - 1)
                for name, (word_offset, low, bits) in register_map().items()
            },
        )
        following = words[link // 4]
        if not following:
            return
        if following <= offset:
            raise FormatError("hwx.tasks", f"expected a link past {offset}, found {following}", where=location)
        offset = following
    raise FormatError("hwx.tasks", f"expected {_MOST_TASKS} tasks at most", where=location)


def kernel_of(program: Program, task: Task, location: str) -> Array:
    """Return a task's stored weights (float16, int8 or uint8), [output channels, input channels, height, width].

    Group g of output channels belongs to engine core ``g mod engines``. A tile contains its groups one after the other,
    and a group contains its channels. The order of channels in a group is an assumption, because the available programs
    have only equal weights.

    Raises
    ------
    UnsupportedError
        ``hwx.kernel``: no kernel, a palette, a sparse kernel, a grouped convolution, or a table before the weights.
    FormatError
        ``hwx.kernel-bounds``: coefficients outside ``__const``, or fewer than the shape requires.
    """
    fmt = task["NE.KernelCfg.KernelFmt"]
    grouping = "Common.GroupConvCfg."
    for holds, expected in (
        (task.multiplies, "a task with a kernel"),
        (fmt in _TYPES, "uint8, int8 or fp16"),
        (not task["NE.KernelCfg.PalettizedEn"] and not task["NE.KernelCfg.SparseFmt"], "plain weights"),
        (task[f"{grouping}NumGroups"] == 1 and not task[f"{grouping}UnicastEn"], "one group of inputs"),
        (task["NE.MACCfg.NonlinearMode"] != _TABLE, "weights without a table before them"),
    ):
        if not holds:
            raise UnsupportedError(f"expected {expected}", rule="hwx.kernel", where=location)
    shape = task.shape
    ocg = task.channels_per_group
    dtype = np.dtype(_TYPES[fmt])
    per_channel = shape[1] * shape[2] * shape[3]
    const = program.section("__TEXT", "__const")
    if shape[0] * per_channel * dtype.itemsize > len(const) or not per_channel:
        raise _outside(f"{shape} weights within {len(const)} bytes", location)
    out = np.zeros((shape[0], per_channel), dtype)
    tiles = task.tiles
    used = [0] * TILES
    for group, first in enumerate(range(0, shape[0], ocg)):
        tile = group % task.engines
        count = min(ocg, shape[0] - first)
        if tile >= len(tiles):
            raise _outside(f"a coefficient channel {tile}", location)
        need = count * per_channel * dtype.itemsize
        start = tiles[tile][0] + used[tile]
        end = tiles[tile][0] + tiles[tile][1]
        if start + need > min(end, len(const)):
            raise _outside(f"{need} bytes at {start}", location)
        out[first : first + count] = np.frombuffer(const[start : start + need], dtype).reshape(count, per_channel)
        used[tile] += need
    return out.reshape(shape).astype(dtype.newbyteorder("="))


def table_of(program: Program, task: Task, location: str) -> ActivationLut | None:
    """Return a task's activation table, which is in the first coefficient channel; None if the task has none.

    Raises
    ------
    UnsupportedError
        ``hwx.kernel``: a table followed by weights; no program with both is available.
    FormatError
        ``hwx.kernel-bounds``; ``ane.lut``.
    """
    if task["NE.MACCfg.NonlinearMode"] != _TABLE or not task.tiles:
        return None
    if task.multiplies:
        raise UnsupportedError("expected a table that no weights follow", rule="hwx.kernel", where=location)
    const = program.section("__TEXT", "__const")
    start, size = task.tiles[0]
    if size < 2 * ENTRIES or start + 2 * ENTRIES > len(const):
        raise _outside(f"a table at {start}", location)
    return read_lut(np.frombuffer(const[start : start + 2 * ENTRIES], "<f2").astype(np.float16))


def _outside(expected: str, location: str) -> FormatError:
    return FormatError("hwx.kernel-bounds", f"expected {expected}, which the file does not have", where=location)
