"""Read compiled programs, ``.hwx``, which Apple's compiler writes for the engine (``spec/hwx.md``).

The container is a variant of Mach-O: segments with sections, symbols, and a note of the compiler. ``__TEXT,__text``
contains task descriptors, ``__TEXT,__const`` the coefficients of kernels. The input is untrusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.errors import FormatError

MAGIC = 0xBEEFFACE
CPU = 0x80
HEAD = struct.pack("<2I", MAGIC, CPU)
GENERATIONS = {1: "H11", 3: "H12", 4: "H13", 5: "H14", 6: "H15", 7: "H16", 9: "H17", 10: "H18", 11: "H19"}
"""The engine's generation, keyed by the subtype in the header (FT)."""

_HEADER = struct.Struct("<8I")
_COMMAND = struct.Struct("<2I")
_SEGMENT = struct.Struct("<16s4Q4I")
_SECTION = struct.Struct("<16s16s2Q8I")
_SYMBOL = struct.Struct("<IBBHQ")
_SEGMENT_COMMAND = 0x19
_SYMBOLS_COMMAND = 0x02
_NOTE_COMMAND = 0x08
_MOST_COMMANDS = 4096
_MOST_SECTIONS = 4096
_MOST_SYMBOLS = 1 << 20
_LONGEST_NAME = 4096
_STAB = 0xE0


@dataclass(frozen=True, slots=True)
class ProgramSection:
    """A section of a program: its address in the engine's memory, and its offset in the file.

    The offset is 0 for a section without bytes in the file.
    """

    segment: str
    name: str
    address: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name with an address; symbols with ``debug`` describe types."""

    name: str
    address: int
    debug: bool


@dataclass(frozen=True)
class Program:
    """A compiled program: its generation, the compiler's note, sections, symbols, and the content of the file."""

    generation: str
    compiler: str
    sections: tuple[ProgramSection, ...]
    symbols: tuple[Symbol, ...]
    data: memoryview

    def section(self, segment: str, name: str) -> memoryview:
        """Return the content of a section; empty if the section does not exist or has no bytes."""
        for item in self.sections:
            if (item.segment, item.name) == (segment, name):
                return self.data[item.offset : item.offset + item.size] if item.offset else self.data[:0]
        return self.data[:0]

    @property
    def types(self) -> dict[int, str]:
        """The names of types, keyed by their numbers in the symbol table; types of tensors are left out."""
        by_number = {}
        for symbol in self.symbols:
            name, colon, type_text = symbol.name.partition(":t")
            number, equals, meaning = type_text.partition("=")
            if symbol.debug and colon and equals and number.isdigit() and not meaning.startswith("a"):
                by_number[int(number)] = name
        return by_number

    @property
    def kernels(self) -> tuple[Symbol, ...]:
        """The symbols of coefficients, which are named ``K<hash>`` for a kernel or ``K<hash>_ne_<i>`` for a tile."""
        return tuple(symbol for symbol in self.symbols if symbol.name.startswith("K") and not symbol.debug)


def is_program(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a compiled program."""
    return head.startswith(HEAD)


def read_program(data: bytes | memoryview, location: str) -> Program:
    """Return the program in ``data``, after checking all offsets.

    Raises
    ------
    FormatError
        ``hwx.magic``; ``hwx.commands``, a command outside its table; ``hwx.bounds``, a section, symbol or name outside
        the file; ``hwx.text``, a name that is not ASCII.
    """
    view = memoryview(data)
    if len(view) < _HEADER.size or not is_program(bytes(view[:8])):
        raise FormatError("hwx.magic", "expected a compiled program for the Neural Engine", where=location)
    _, _, subtype, _, count, size, _, _ = _HEADER.unpack_from(view)
    sections: list[ProgramSection] = []
    symbols: list[Symbol] = []
    compiler = ""
    for command, offset, length in _commands(view, count, size, location):
        if command == _SEGMENT_COMMAND:
            sections += _sections(view, offset, length, location)
        elif command == _SYMBOLS_COMMAND:
            symbols += _symbols(view, offset, length, location)
        elif command == _NOTE_COMMAND:
            compiler = compiler or _text(
                bytes(view[offset + _COMMAND.size : min(offset + length, offset + _LONGEST_NAME)]), location
            )
    if len(sections) > _MOST_SECTIONS:
        raise FormatError("hwx.commands", f"expected {_MOST_SECTIONS} sections at most", where=location)
    generation = GENERATIONS.get(subtype, f"subtype {subtype}")
    return Program(generation, compiler, tuple(sections), tuple(symbols), view)


def _commands(view: memoryview, count: int, size: int, location: str) -> Iterator[tuple[int, int, int]]:
    end = _HEADER.size + size
    offset = _HEADER.size
    if end > len(view) or count > _MOST_COMMANDS:
        raise FormatError("hwx.commands", f"expected commands within {len(view)} bytes, found {count}", where=location)
    for _ in range(count):
        if offset + _COMMAND.size > end:
            raise FormatError("hwx.commands", f"expected {count} commands in {size} bytes, found fewer", where=location)
        command, length = _COMMAND.unpack_from(view, offset)
        if length < _COMMAND.size or offset + length > end:
            raise FormatError(
                "hwx.commands", f"expected a command within its table, found {length} bytes", where=location
            )
        yield command, offset, length
        offset += length


def _sections(view: memoryview, command_offset: int, length: int, location: str) -> Iterator[ProgramSection]:
    first = command_offset + _COMMAND.size + _SEGMENT.size
    if first > command_offset + length:
        raise FormatError("hwx.commands", f"expected a segment of {_SEGMENT.size} bytes", where=location)
    count = _SEGMENT.unpack_from(view, command_offset + _COMMAND.size)[7]
    if count > _MOST_SECTIONS or first + count * _SECTION.size > command_offset + length:
        raise FormatError("hwx.commands", f"expected {count} sections in {length} bytes, found fewer", where=location)
    for index in range(count):
        name, segment, address, size, file_offset, *_ = _SECTION.unpack_from(view, first + index * _SECTION.size)
        if file_offset and file_offset + size > len(view):
            raise FormatError(
                "hwx.bounds", f"expected {size} bytes at {file_offset}, found {len(view)}", where=location
            )
        yield ProgramSection(_text(segment, location), _text(name, location), address, size, file_offset)


def _symbols(view: memoryview, offset: int, length: int, location: str) -> Iterator[Symbol]:
    if length < _COMMAND.size + 16:
        raise FormatError("hwx.commands", "expected a symbol command of 24 bytes", where=location)
    table, count, names, size = struct.unpack_from("<4I", view, offset + _COMMAND.size)
    inside = table + count * _SYMBOL.size <= len(view) and names + size <= len(view)
    if count > _MOST_SYMBOLS or not inside:
        raise FormatError("hwx.bounds", f"expected {count} symbols within {len(view)} bytes", where=location)
    strings = bytes(view[names : names + size])
    for index in range(count):
        start, type_bits, _, _, address = _SYMBOL.unpack_from(view, table + index * _SYMBOL.size)
        end = strings.find(b"\0", start, start + _LONGEST_NAME)
        if start >= size or end < 0:
            raise FormatError(
                "hwx.bounds", f"expected a name within {size} bytes, found one at {start}", where=location
            )
        yield Symbol(_text(strings[start:end], location), address, bool(type_bits & _STAB))


def _text(raw: bytes, location: str) -> str:
    plain = raw.partition(b"\0")[0]
    if not plain.isascii():
        raise FormatError("hwx.text", f"expected ASCII, found {plain[:32]!r}", where=location)
    return plain.decode("ascii")
