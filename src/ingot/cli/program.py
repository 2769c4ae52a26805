"""What ``ingot inspect`` prints of a compiled program of the Neural Engine."""

from __future__ import annotations

from ingot.cli.output import print_json
from ingot.cli.tables import line, table
from ingot.errors import printable
from ingot.model.words import number, shape_text, size_text
from ingot.ops.options import AnyPath


def show(path: AnyPath, list_registers: bool, json: bool) -> None:
    """Print sections, kernels and tasks; with ``list_registers`` the registers that are not 0."""
    from ingot.ops.ane.program import inspect_program

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
