"""Inspectors of the Neural Engine's files, kernel units and compiled programs, in the group ``ingot.inspectors``."""

from __future__ import annotations

from ingot.cli.output import print_json
from ingot.cli.tables import line, table
from ingot.errors import printable
from ingot.ext.ane.chips.program import is_program
from ingot.ext.ane.kernel_units.header import is_unit
from ingot.reporting.text import number, shape_text, size_text
from ingot.stores.location import AnyPath


class KernelInspector:
    """Shows kernel units: sections and records."""

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` is a kernel unit."""
        return is_unit(head)

    def show(self, path: AnyPath, details: bool, json: bool) -> None:
        """Print the unit; with ``details`` its records."""
        from ingot.ext.ane.cli.kernel import show  # imports the command's options, which other files do not need

        show(path, details, json)


class ProgramInspector:
    """Shows compiled programs: sections, registers and kernels."""

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` is a compiled program."""
        return is_program(head)

    def show(self, path: AnyPath, details: bool, json: bool) -> None:
        """Print the program; with ``details`` the registers that are not 0."""
        show_program(path, details, json)


def show_program(path: AnyPath, list_registers: bool, json: bool) -> None:
    """Print sections, kernels and tasks; with ``list_registers`` the registers that are not 0."""
    from ingot.ext.ane.program import inspect_program

    inspection = inspect_program(path)
    if json:
        print_json(inspection)
        return
    compiler = printable(" ".join(inspection.compiler.split()[2:4])) or "an unknown compiler"
    print(
        f"{printable(inspection.path)}: compiled program for {inspection.generation} by {compiler}, "
        f"{size_text(inspection.nbytes)}"
    )
    rows = [
        (printable(f"{item.segment},{item.name}"), f"{item.address:#x}", f"{item.size}", f"{item.offset or '-'}")
        for item in inspection.sections
    ]
    table(("section", "address", "bytes", "offset"), rows)
    if inspection.note:
        line(f"  tasks   not read: {inspection.note}")
    for index, task in enumerate(inspection.tasks):
        registers = {name: value for name, value in task.registers.items() if value}
        line(f"  task {index} at {task.offset:#x}: {len(registers)} registers that are not 0")
        if task.shape is not None and task.values is not None:
            low, high, count = task.values
            line(
                f"    kernel {shape_text(task.shape)} {task.dtype}, {len(task.tiles)} tiles, groups of "
                f"{task.channels_per_group} channels; {count} values from {number(low, 4)} to {number(high, 4)}"
            )
        if task.table is not None:
            line(f"    activation table: clamps {task.table[0]:g} and {task.table[1]:g}, scale {task.table[3]:g}")
        if task.note:
            line(f"    kernel not read: {task.note}")
        if list_registers:
            table(("register", "value"), [(name, f"{value:#x}") for name, value in registers.items()])
