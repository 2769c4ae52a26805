"""Fuzzes pickles of trainers' checkpoints, which are read as plain data (``inert_pickle``).

    pip install --group fuzz
    python -m tests.fuzz.fuzz_pickles -max_total_time=600

Any bytes are plain data, or end in an IngotError; no class is imported and nothing is called. Findings are written to
the current folder as crash-*; ``python -m tests.fuzz.fuzz_pickles crash-...`` replays one. By its first byte an input
is a pickle as it is, or a series of operations of pickles.
"""

from __future__ import annotations

import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import atheris

from ingot.errors import IngotError
from ingot.formats.torch.inert_pickle import Name, Record, Reference, load
from tests.fuzz.common import fuzz
from tests.support.reading import checked

PLAIN = (dict, list, tuple, str, bytes, bytearray, int, float, bool, type(None), Name, Record, Reference)
OPERATIONS = [operation.code.encode("latin-1") for operation in pickletools.opcodes]
ARGUMENTS = [
    b"\0",
    b"\1",
    b"\xff",
    b"\1\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\2ab",
    b"os\nsystem\n",
    b"torch\nSize\n",
    b"collections\nOrderedDict\n",
    b"1\n",
    b"9" * 40 + b"\n",
]


def chosen(data: atheris.FuzzedDataProvider) -> bytes:
    """Return operations with arguments, and bytes between them."""
    parts = [b"\x80\x04"]
    for _ in range(data.ConsumeIntInRange(1, 60)):
        parts.append(data.PickValueInList(OPERATIONS))
        if data.ConsumeBool():
            parts.append(data.PickValueInList(ARGUMENTS))
        elif data.ConsumeBool():
            parts.append(data.ConsumeBytes(4))
    return b"".join([*parts, b"."])


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    raw = data[1:] if data[:1] >= b"\xc0" else chosen(atheris.FuzzedDataProvider(data[1:]))
    try:
        value = load(raw, "fuzz")
    except IngotError as error:
        checked(error)
        return
    if not isinstance(value, PLAIN):
        raise AssertionError(f"expected plain data, found {type(value)}")  # noqa: TRY004 - the fuzzer reports it


class _Object:
    """An object whose pickle has a class, a state and items."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (OrderedDict, (), {"state": 1}, iter([1, 2]), iter([("a", 1)]))


def seeds() -> list[bytes]:
    """Return pickles of all protocols."""
    value = {"a": [1, -5, 2**70, 1.5, None, True], "b": ("x", b"y"), "c": OrderedDict(d={1, 2}), "e": slice(1, 2)}
    values = [pickle.dumps(value, protocol) for protocol in range(6)]
    return [b"\xff" + data for data in (*values, pickle.dumps(_Object(), 2), pickle.dumps(_Object(), 4))]


if __name__ == "__main__":
    fuzz(one_input, seeds(), 4096)
