"""A compiled program, ``.hwx``: what Apple's compiler writes for the engine (``spec/hwx.md``). Read, never written.

The container is a variant of Mach-O: segments with sections, symbols, the compiler's own line. ``__TEXT,__text``
holds task descriptors, ``__TEXT,__const`` the coefficients of kernels. Everything in it may be hostile.
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
"""Generation by the header's subtype (FT)."""

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
    """A section: addresses are the engine's, ``offset`` is in the file; without bytes in it (buffers), ``offset`` is
    0."""

    segment: str
    name: str
    address: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name with an address; ``debug`` symbols describe types."""

    name: str
    address: int
    debug: bool


@dataclass(frozen=True)
class Program:
    """A compiled program: its generation, what the compiler says of itself, sections, symbols, and the file's bytes."""

    generation: str
    compiler: str
    sections: tuple[ProgramSection, ...]
    symbols: tuple[Symbol, ...]
    data: memoryview

    def section(self, segment: str, name: str) -> memoryview:
        """Return the bytes of a section; empty where there is none."""
        for item in self.sections:
            if (item.segment, item.name) == (segment, name):
                return self.data[item.offset : item.offset + item.size] if item.offset else self.data[:0]
        return self.data[:0]

    @property
    def types(self) -> dict[int, str]:
        """Type numbers of the symbol table with the names of the types, those of tensors left out."""
        by_number = {}
        for symbol in self.symbols:
            name, colon, rest = symbol.name.partition(":t")
            number, equals, meaning = rest.partition("=")
            if symbol.debug and colon and equals and number.isdigit() and not meaning.startswith("a"):
                by_number[int(number)] = name
        return by_number

    @property
    def kernels(self) -> tuple[Symbol, ...]:
        """Symbols of coefficients: ``K<hash>``, one per kernel, or ``K<hash>_ne_<i>``, one per tile."""
        return tuple(symbol for symbol in self.symbols if symbol.name.startswith("K") and not symbol.debug)


def is_program(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a compiled program."""
    return head.startswith(HEAD)


def read_program(data: bytes | memoryview, where: str) -> Program:
    """Read the container.

    Raises
    ------
    FormatError
        ``hwx.magic``, ``hwx.commands`` (a command that leaves its table), ``hwx.bounds`` (a section, symbol or text
        outside the file), ``hwx.text`` (a name that is no ASCII).
    """
    view = memoryview(data)
    if len(view) < _HEADER.size or not is_program(bytes(view[:8])):
        raise FormatError("hwx.magic", "expected a compiled program for the Neural Engine", where=where)
    _, _, subtype, _, count, size, _, _ = _HEADER.unpack_from(view)
    sections: list[ProgramSection] = []
    symbols: list[Symbol] = []
    compiler = ""
    for command, at, length in _commands(view, count, size, where):
        if command == _SEGMENT_COMMAND:
            sections += _sections(view, at, length, where)
        elif command == _SYMBOLS_COMMAND:
            symbols += _symbols(view, at, length, where)
        elif command == _NOTE_COMMAND:
            compiler = compiler or _text(bytes(view[at + _COMMAND.size : min(at + length, at + _LONGEST_NAME)]), where)
    if len(sections) > _MOST_SECTIONS:
        raise FormatError("hwx.commands", f"expected {_MOST_SECTIONS} sections at most", where=where)
    generation = GENERATIONS.get(subtype, f"subtype {subtype}")
    return Program(generation, compiler, tuple(sections), tuple(symbols), view)


def _commands(view: memoryview, count: int, size: int, where: str) -> Iterator[tuple[int, int, int]]:
    end = _HEADER.size + size
    at = _HEADER.size
    if end > len(view) or count > _MOST_COMMANDS:
        raise FormatError("hwx.commands", f"expected commands within {len(view)} bytes, found {count}", where=where)
    for _ in range(count):
        if at + _COMMAND.size > end:
            raise FormatError("hwx.commands", f"expected {count} commands in {size} bytes, found fewer", where=where)
        command, length = _COMMAND.unpack_from(view, at)
        if length < _COMMAND.size or at + length > end:
            raise FormatError("hwx.commands", f"expected a command within its table, found {length} bytes", where=where)
        yield command, at, length
        at += length


def _sections(view: memoryview, at: int, length: int, where: str) -> Iterator[ProgramSection]:
    first = at + _COMMAND.size + _SEGMENT.size
    if first > at + length:
        raise FormatError("hwx.commands", f"expected a segment of {_SEGMENT.size} bytes", where=where)
    count = _SEGMENT.unpack_from(view, at + _COMMAND.size)[7]
    if count > _MOST_SECTIONS or first + count * _SECTION.size > at + length:
        raise FormatError("hwx.commands", f"expected {count} sections in {length} bytes, found fewer", where=where)
    for index in range(count):
        name, segment, address, size, offset, *_ = _SECTION.unpack_from(view, first + index * _SECTION.size)
        if offset and offset + size > len(view):
            raise FormatError("hwx.bounds", f"expected {size} bytes at {offset}, found {len(view)}", where=where)
        yield ProgramSection(_text(segment, where), _text(name, where), address, size, offset)


def _symbols(view: memoryview, at: int, length: int, where: str) -> Iterator[Symbol]:
    if length < _COMMAND.size + 16:
        raise FormatError("hwx.commands", "expected a symbol command of 24 bytes", where=where)
    table, count, names, size = struct.unpack_from("<4I", view, at + _COMMAND.size)
    inside = table + count * _SYMBOL.size <= len(view) and names + size <= len(view)
    if count > _MOST_SYMBOLS or not inside:
        raise FormatError("hwx.bounds", f"expected {count} symbols within {len(view)} bytes", where=where)
    strings = bytes(view[names : names + size])
    for index in range(count):
        start, kind, _, _, address = _SYMBOL.unpack_from(view, table + index * _SYMBOL.size)
        end = strings.find(b"\0", start, start + _LONGEST_NAME)
        if start >= size or end < 0:
            raise FormatError("hwx.bounds", f"expected a name within {size} bytes, found one at {start}", where=where)
        yield Symbol(_text(strings[start:end], where), address, bool(kind & _STAB))


def _text(raw: bytes, where: str) -> str:
    plain = raw.partition(b"\0")[0]
    if not plain.isascii():
        raise FormatError("hwx.text", f"expected ASCII, found {plain[:32]!r}", where=where)
    return plain.decode("ascii")
