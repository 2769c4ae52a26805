"""Compiled programs of the Neural Engine: what is in one, and the weights of its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ingot.errors import UnsupportedError
from ingot.ext.ane.chips.program import Program, ProgramSection, read_program
from ingot.ext.ane.chips.program_tasks import Task, kernel_of, table_of, tasks_of
from ingot.model.tensor import Array
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task: registers by name, and its kernel as far as it can be read.

    ``shape`` is [output channels, input channels, height, width]; ``dtype`` and ``values`` (least, largest, number of
    different ones) are those of the stored weights, ``table`` the 43 entries of an activation table; ``note`` says
    why not.
    """

    offset: int
    registers: Mapping[str, int]
    shape: tuple[int, ...] | None = None
    channels_per_group: int | None = None
    tiles: tuple[tuple[int, int], ...] = ()
    dtype: str | None = None
    values: tuple[float, float, int] | None = None
    table: tuple[float, ...] | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """What ``ingot inspect`` tells of a compiled program; ``kernels`` are the names of coefficients with their
    addresses."""

    path: str
    nbytes: int
    generation: str
    compiler: str
    sections: tuple[ProgramSection, ...]
    types: Mapping[int, str]
    kernels: Mapping[str, int]
    tasks: tuple[TaskReport, ...]
    note: str = ""


def load_program(path: AnyPath) -> Program:
    """Read a compiled program; errors as ``targets.ane.program.read_program``."""
    location = Location.parse(path)
    return read_program(location.read(), location.display)


def program_weights(path: AnyPath) -> list[Array]:
    """Return the weights of every kernel of a compiled program, as stored, in the order of its tasks.

    Raises
    ------
    FormatError
        Those of ``targets.ane.program`` and ``targets.ane.program_tasks``.
    UnsupportedError
        ``hwx.generation``, ``hwx.kernel``: what is not known well enough to be unpacked.
    """
    location = Location.parse(path)
    program, where = load_program(location), location.display
    return [kernel_of(program, task, where) for task in tasks_of(program, where) if task.multiplies]


def inspect_program(path: AnyPath) -> ProgramReport:
    """Read a compiled program and describe it: sections, symbols, and, where registers are known, its tasks."""
    location = Location.parse(path)
    program, where, note = load_program(location), location.display, ""
    try:
        tasks = tuple(_task(program, task, where) for task in tasks_of(program, where))
    except UnsupportedError as error:
        tasks, note = (), error.message
    return ProgramReport(
        where,
        len(program.data),
        program.generation,
        program.compiler,
        program.sections,
        program.types,
        {symbol.name: symbol.address for symbol in program.kernels},
        tasks,
        note,
    )


def _task(program: Program, task: Task, where: str) -> TaskReport:
    try:
        lut = table_of(program, task, where)
        table = None if lut is None else tuple(lut.entries().astype(float).tolist())
        if not task.multiplies:
            return TaskReport(task.offset, task.registers, table=table)
        weights = kernel_of(program, task, where)
    except UnsupportedError as error:
        return TaskReport(task.offset, task.registers, note=error.message)
    values = (float(weights.min()), float(weights.max()), int(np.unique(weights).size))
    return TaskReport(
        task.offset, task.registers, task.shape, task.channels_per_group, task.tiles, weights.dtype.name, values, table
    )
