"""The metadata of an option: its help text, its names on the command line, and the values that it accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class About:
    """Metadata of an option, in addition to its name, type and default.

    Parameters
    ----------
    help : str
        One or two sentences, for Python's ``help`` and the command line.
    flags : tuple of str
        Names on the command line, if they do not follow from the field's name.
    panel : str or None
        The heading under which ``--help`` lists the option.
    metavar : str or None
        The placeholder of the value in ``--help``.
    minimum : int or None
        The smallest allowed number; a smaller one is a ``UsageError``.
    reads : bool
        Whether the value is the path of an existing file or folder, or an address. The command line checks a local path
        before it imports the command's code.
    size : bool
        Whether the value is a number of bytes, as a number or as text such as ``2GiB``.
    aliases : tuple of str
        Further names on the command line, which its help does not list.
    command : bool
        Whether the command line has the option.
    argument : bool
        Whether the option is a positional argument of the command line. With ``flags`` it is also an option.
    """

    help: str
    flags: tuple[str, ...] = ()
    panel: str | None = None
    metavar: str | None = None
    minimum: int | None = None
    reads: bool = False
    size: bool = False
    aliases: tuple[str, ...] = ()
    command: bool = True
    argument: bool = False
