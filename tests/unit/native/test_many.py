"""Many small parts in one buffer: digests, positions and copies, each as it is done by itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ingot.core import checksums, native
from ingot.core.buffers import take_each
from ingot.core.checksums import prove_each

DATA = np.random.default_rng(3).integers(0, 256, 4096, np.uint8)
Ints = np.ndarray[Any, np.dtype[np.int64]]


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def texts_of(piece: bytes) -> list[tuple[str, bool]]:
    """Digests of a piece, and whether each is proven: one spelled otherwise than it is written takes a closer look."""
    crc, sha, xxh = (checksums.digest(name, piece) for name in ("crc32c", "sha256", "xxh3"))
    other = [checksums.digest(name, piece + b"x") for name in ("crc32c", "sha256", "xxh3")]
    odd = [
        "crc32c:0x+1234567",
        "crc32c:0x-0000001",
        "crc32c:" + crc[9:],
        "md5:",
        ":",
        "xxh3:0x12345678abcdef",
        "md5:00",
        "",
        "sha256:",
    ]
    long = f"{xxh}{xxh[5:]}"
    right = [crc, crc.replace("x", "*").lower().replace("*", "x"), sha, sha.upper().replace("SHA", "sha"), xxh]
    return [(text, True) for text in right] + [(text, False) for text in (*other, *odd, long, crc + "0")]


def test_digests_are_proven_as_one_by_one() -> None:
    cases = [(start, size) for start in (0, 1, 7, 513) for size in (0, 1, 3, 16, 200, 241, 512, 3000)]
    starts, lengths, spelled, wanted = [], [], [], []
    for start, size in cases:
        for text, proven in texts_of(DATA[start : start + size].tobytes()):
            starts.append(start)
            lengths.append(size)
            spelled.append(text.encode())
            wanted.append(proven)
            assert checksums.proves(text, DATA[start : start + size].tobytes()) == proven
    sizes = np.array([*map(len, spelled)])
    begins = np.cumsum(sizes) - sizes
    begins[::11] = -1  # without a digest nothing is to be proven
    wanted[::11] = [True] * len(wanted[::11])
    found = prove_each((DATA, np.array(starts), np.array(lengths)), b"".join(spelled), begins, sizes)
    assert found.tolist() == wanted


@pytest.mark.parametrize(("name", "before"), [("crc32c", "crc32c:0x"), ("sha256", "sha256:"), ("xxh3", "xxh3:")])
def test_a_prefix_among_the_digits_is_no_digest(name: str, before: str) -> None:
    """Python's ``int`` takes ``0x`` before digits of base 16: a digest that begins with zeros could be spelled so."""
    pieces = (str(number).encode() for number in range(10_000))
    piece = next(each for each in pieces if checksums.digest(name, each).startswith(before + "00"))
    right = checksums.digest(name, piece)
    for text, proven in ((right, True), (right.replace(before + "00", before + "0x"), False)):
        assert checksums.proves(text, piece) == proven
        data = np.frombuffer(piece, np.uint8), ints(0), ints(len(piece))
        assert prove_each(data, text.encode(), ints(0), ints(len(text))).tolist() == [proven]


@pytest.mark.parametrize(
    ("starts", "lengths", "begins", "sizes"),
    [
        (ints(4090), ints(7), ints(0), ints(1)),
        (ints(-1), ints(1), ints(0), ints(1)),
        (ints(0), ints(-1), ints(0), ints(1)),
        (ints(1 << 62), ints(1 << 62), ints(0), ints(1)),
        (ints(0), ints(1), ints(0), ints(5)),
        (ints(0), ints(1), ints(-1), ints(1)),
        (ints(0, 0), ints(1), ints(0), ints(1)),
    ],
)
def test_pieces_outside_are_refused(starts: Ints, lengths: Ints, begins: Ints, sizes: Ints) -> None:
    with pytest.raises(ValueError, match="expected"):
        native.kernels.prove_each(DATA, starts, lengths, b"text", begins, sizes, np.empty(1, np.uint8))


def test_copies_go_where_they_belong() -> None:
    outs = [np.empty(shape, kind) for shape, kind in (((2, 3), "f4"), ((), "i8"), ((0, 4), "f2"), ((5,), "u1"))]
    outs.append(np.empty((2, 2), ml_dtypes.bfloat16))
    starts = [3, 100, 4096, 4091, 8]
    take_each(DATA, np.array(starts), outs)
    for start, out in zip(starts, outs, strict=True):
        assert out.tobytes() == DATA[start : start + out.nbytes].tobytes()
    for start in (4092, -1, 1 << 62):
        with pytest.raises(ValueError, match="inside"):
            take_each(DATA, ints(start), outs[3:4])
    with pytest.raises(ValueError, match="output"):
        take_each(DATA, ints(0, 1), outs[:1])
    with pytest.raises((BufferError, ValueError)):
        take_each(DATA, ints(0), [np.broadcast_to(np.float32(0), (4,))])


def sound(positions: Ints, values: Any, limit: int, at: int) -> bool:
    data = np.zeros(at + 12 * len(positions) + 3, np.uint8)
    data[at : at + 8 * len(positions)] = positions.astype("<i8").view(np.uint8)
    data[at + 8 * len(positions) : at + 12 * len(positions)] = np.array(values, "<f4").view(np.uint8)
    found = np.empty(1, np.uint8)
    places = ints(at), ints(at + 8 * len(positions))
    native.kernels.placed_each(data, *places, ints(len(positions)), ints(limit), found)
    return bool(found[0])


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7])
def test_positions_and_values_are_looked_at(at: int) -> None:
    assert sound(ints(), [], 0, at)
    assert sound(ints(0, 1, 9), [1, -2, 3e38], 10, at)
    assert not sound(ints(0, 1, 9), [1, -2, 3], 9, at)
    assert not sound(ints(0, 1, 1), [1, -2, 3], 10, at)
    assert not sound(ints(2, 1, 3), [1, -2, 3], 10, at)
    assert not sound(ints(-1, 1, 3), [1, -2, 3], 10, at)
    assert not sound(ints(0, 1, 1 << 62), [1, -2, 3], 10, at)
    for odd in (np.nan, np.inf, -np.inf):
        assert not sound(ints(0, 1, 9), [1, odd, 3], 10, at)


@pytest.mark.parametrize(
    ("positions", "values", "counts"),
    [(4089, 0, 1), (0, 4093, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1), (0, 0, 1 << 61), (5000, 0, 0), (0, 0, 513)],
)
def test_positions_outside_are_refused(positions: int, values: int, counts: int) -> None:
    with pytest.raises(ValueError, match="inside"):
        native.kernels.placed_each(DATA, ints(positions), ints(values), ints(counts), ints(9), np.empty(1, np.uint8))
