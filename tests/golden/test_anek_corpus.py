"""The golden kernel units: in step with their script; values as a reader made from the page alone has them."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ingot

HERE = Path(__file__).parent
CORPUS = HERE / "anek"
UNITS = sorted(path.stem for path in CORPUS.glob("*.anek"))
Array = np.ndarray[Any, np.dtype[Any]]


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_anek", HERE / "make_anek.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def up(size: int) -> int:
    return -(-size // 64) * 64


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 512 if exponent == 0 else (8 + mantissa) / 8 * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


class Stranger:
    """A reader of one unit: fields of the header by the page's table, then group by group."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        assert data[:8] == b"ANEKUNIT"
        words = struct.unpack_from("<11I", data, 8)
        self.version, _, self.format, self.flags, self.tiles, self.ocg = words[:6]
        self.vector, self.books, self.copies, rank, self.word = words[6:]
        self.per, self.block = struct.unpack_from("<QI", data, 52)
        self.shape = struct.unpack_from(f"<{rank}I", data, 64)
        names = ("lut", "pal", "ocgs", "scale", "bias", "weights")
        self.sections = {name: struct.unpack_from("<QQIHH", data, 96 + 24 * at) for at, name in enumerate(names)}

    def part(self, name: str, dtype: str) -> Array:
        offset, size, *_ = self.sections[name]
        return np.frombuffer(self.data[offset : offset + size], dtype)

    def bits(self) -> int:
        for first, width in ((7, 1), (11, 2), (15, 3), (19, 4), (23, 6)):
            if first <= self.format < first + 4:
                return width
        return {1: 8, 5: 8, 4: 16, 27: 8}[self.format]

    def codes(self) -> tuple[Array, Array]:
        """Stored numbers of every channel (or run of channels), and which of them are there."""
        bits, rows = self.bits(), self.shape[0] // self.vector
        stored, kept = np.zeros((rows, self.per), np.int64), np.ones((rows, self.per), bool)
        start, groups = self.sections["weights"][0], -(-self.shape[0] // self.ocg)
        records = self.part("ocgs", "<u4").reshape(groups, 14)
        order = [group for tile in range(self.tiles) for group in range(tile, groups, self.tiles)]
        for record, group in zip(records, order, strict=True):
            offset, channels = int(record[0]), int(record[1])
            span = slice(group * self.ocg // self.vector, (group * self.ocg + channels) // self.vector)
            at, count = start + offset, kept[span].size
            if self.flags & 1:
                raw = np.frombuffer(self.data[at : at + -(-count // 8)], np.uint8)
                kept[span] = np.unpackbits(raw, bitorder="little")[:count].reshape(kept[span].shape)
                at += raw.size
            wanted = int(kept[span].sum())
            raw = np.frombuffer(self.data[at : at + -(-wanted * bits // 8)], np.uint8)
            flat = np.unpackbits(raw, bitorder="little")[: wanted * bits].reshape(wanted, bits).astype(np.int64)
            values = np.zeros(count, np.int64)
            values[kept[span].reshape(-1)] = flat @ (1 << np.arange(bits))
            stored[span] = values.reshape(kept[span].shape)
        return stored, kept

    def values(self) -> Array:
        channels = self.shape[0]
        scale = self.part("scale", "<f4" if self.sections["scale"][4] == 32 else "u1")
        zero = np.zeros(channels)
        if scale.dtype == np.uint8:
            if self.flags & 2:
                zero, scale = scale[-channels:].view("i1").astype(float), scale[:-channels]
            scale = scale.view("<f2")
        factors = np.ones((channels, self.per), np.float32)
        if scale.size:
            wide = np.repeat(scale.reshape(channels, -1), self.block or self.per, axis=1)
            factors = wide[:, : self.per].astype(np.float32)
        if 28 <= self.format <= 30:
            return (np.eye(channels, dtype=np.float32) * factors).astype(np.float16)
        stored, kept = self.codes()
        if self.format == 4:
            numbers = stored.astype(np.uint16).view(np.float16).astype(np.float32)
        elif self.format == 1:
            numbers = (stored - 256 * (stored > 127)).astype(np.float32) - zero[:, None]
        elif self.format == 5:
            numbers = np.vectorize(e4m3)(stored)
        else:
            books = self.part("pal", "<f2").reshape(self.books, -1, self.vector)
            share = channels // self.books
            numbers = np.array(
                [
                    [books[row // share, index, row % self.vector] for index in stored[row // self.vector]]
                    for row in range(channels)
                ]
            )
            kept = np.repeat(kept, self.vector, axis=0)
        return np.where(kept, numbers.astype(np.float32) * factors, 0).astype(np.float16).reshape(self.shape)


def test_the_corpus_is_what_its_script_makes() -> None:
    made: dict[str, bytes] = maker().corpus()
    there = {str(path.relative_to(CORPUS)): path.read_bytes() for path in CORPUS.rglob("*") if path.is_file()}
    assert sorted(there) == sorted(made)
    assert [name for name, data in made.items() if there[name] != data] == []


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_values_are_those_of_the_page(name: str, io: str) -> None:
    expected = Stranger((CORPUS / f"{name}.anek").read_bytes()).values()
    with ingot.open(CORPUS / f"{name}.anek", io=io) as checkpoint:
        np.testing.assert_array_equal(checkpoint[name].numpy().astype(np.float16).reshape(expected.shape), expected)
    assert not [item for item in ingot.verify(CORPUS / f"{name}.anek", io=io) if item.level == "error"]


def test_a_folder_opens_by_its_index() -> None:
    with ingot.open(CORPUS / "model") as checkpoint:
        assert list(checkpoint) == ["a.q.weight", "a.k.weight"]
        for name in checkpoint:
            expected = Stranger((CORPUS / "model" / f"{name}.anek").read_bytes()).values()
            np.testing.assert_array_equal(checkpoint[name].numpy(), expected)
    assert {item.rule for item in ingot.verify(CORPUS / "model")} >= {"anek.refused"}
