"""Describe compiled programs of the Neural Engine, and read the weights of their kernels."""

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
    """A task: its registers by name, and its kernel if it can be decoded.

    ``shape`` is [output channels, input channels, height, width]. ``dtype`` and ``values`` (minimum, maximum, number of
    distinct values) describe the stored weights. ``table`` has the 43 entries of an activation table. If the kernel
    cannot be decoded, ``note`` is the reason, else empty.
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
    """The description of a compiled program for ``ingot inspect``; ``kernels`` are names of coefficients with
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
    """Return a compiled program. Raises the errors of ``read_program``."""
    location = Location.parse(path)
    return read_program(location.read(), location.display)


def program_weights(path: AnyPath) -> list[Array]:
    """Return the stored weights of every kernel of a compiled program, in the order of its tasks.

    Raises
    ------
    FormatError
        Errors of ``ingot.ext.ane.chips.program`` and ``ingot.ext.ane.chips.program_tasks``.
    UnsupportedError
        ``hwx.generation``, ``hwx.kernel``: the layout is not documented well enough to be unpacked.
    """
    address = Location.parse(path)
    program = load_program(address)
    location = address.display
    return [kernel_of(program, task, location) for task in tasks_of(program, location) if task.multiplies]


def inspect_program(path: AnyPath) -> ProgramReport:
    """Return the description of a compiled program: sections, symbols, and tasks with documented registers."""
    address = Location.parse(path)
    program = load_program(address)
    location = address.display
    note = ""
    try:
        tasks = tuple(_task(program, task, location) for task in tasks_of(program, location))
    except UnsupportedError as error:
        tasks = ()
        note = error.message
    return ProgramReport(
        location,
        len(program.data),
        program.generation,
        program.compiler,
        program.sections,
        program.types,
        {symbol.name: symbol.address for symbol in program.kernels},
        tasks,
        note,
    )


def _task(program: Program, task: Task, location: str) -> TaskReport:
    try:
        lut = table_of(program, task, location)
        table = None if lut is None else tuple(lut.entries().astype(float).tolist())
        if not task.multiplies:
            return TaskReport(task.offset, task.registers, table=table)
        weights = kernel_of(program, task, location)
    except UnsupportedError as error:
        return TaskReport(task.offset, task.registers, note=error.message)
    values = (float(weights.min()), float(weights.max()), int(np.unique(weights).size))
    return TaskReport(
        task.offset, task.registers, task.shape, task.channels_per_group, task.tiles, weights.dtype.name, values, table
    )
