"""Adapt messages of other operations that name options which ``ingot quantize`` does not have."""

from __future__ import annotations

import re
from dataclasses import fields

from ingot.conversion.options import ConvertOptions
from ingot.core.options import about_of
from ingot.runtime.calibration.calibration import CalibrateOptions
from ingot.runtime.quantize.options import QuantizeOptions

_COMMAND = re.compile(r"`[^`]*`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_REMARK = re.compile(r" \((--[a-z][a-z0-9-]*)[^()]*\)")
_COMMANDS = (("convert", ConvertOptions), ("calibrate", CalibrateOptions))


def with_commands(message: str, options: type = QuantizeOptions) -> str:
    """Return ``message`` with a remark: the command for each option in it that ``options`` lacks.

    An option inside a command in backticks gets no remark, because it belongs to that command.
    """
    local = _names(options)
    names = [name for name in dict.fromkeys(_OPTION.findall(_COMMAND.sub("", message))) if name not in local]
    remarks = []
    for command, accepted in _COMMANDS:
        listed = [name for name in names if name in _names(accepted)]
        names = [name for name in names if name not in listed]
        verb = "is an option" if len(listed) == 1 else "are options"
        remarks += [f"{' and '.join(listed)} {verb} of `ingot {command}`"] if listed else []
    return f"{message} ({'; '.join(remarks)})" if remarks else message


def without_foreign_options(note: str) -> str:
    """Return a note without the remarks in parentheses that name an option which ``ingot quantize`` lacks."""
    local = _names(QuantizeOptions)
    return _REMARK.sub(lambda match: match[0] if match[1] in local else "", note)


def _names(options: type) -> set[str]:
    """Return the names of all options of a struct."""
    names = {"--dry-run", "--quiet", "--json", "--help"}
    for item in fields(options):
        flags = about_of(item).flags or (f"--{item.name.replace('_', '-')}",)
        names.update(name for flag in flags for name in flag.split("/"))
    return names
