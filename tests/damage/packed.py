"""Decode damaged streams of the encoding ``ingot.packed/1``: ``python -m tests.damage.packed --mutants 1000000``.

Frames of every layout are changed: bits flipped, bytes replaced, cut off, put in, left out, repeated, and joined with
those of another frame. Each mutant goes through the native decoder in this process. It must be refused with
``part.packed`` or fill its output, write nothing outside of it, and never pass the frame's checksum with other bytes
than the original ones. The output and the buffer of streams have guards on both sides. ``make sanitize`` is the check
with which reads outside of a buffer are noticed as well.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from random import Random

import numpy as np

from ingot.core.bytes import packed
from ingot.errors import FormatError
from tests.unit.core.bytes.test_packed import LAYOUTS, skewed

RECORDS = (1, 3, 40, 300)
GUARD = 64
FILL = 0xA5


def cases() -> list[tuple[str, int, bytes, int]]:
    """Return name, size, frame and checksum of a frame of each layout in several sizes, and with raw modes too."""
    made = []
    for name, layout in LAYOUTS.items():
        for records in RECORDS:
            content = skewed(records * layout.record + records % 3, seed=records)
            made.append((name, len(content), packed.encode_frame(layout, content), packed.checksum(content)))
    return made


def mutant(frame: bytes, other: bytes, random: Random) -> bytes:
    """Return a frame with one to four changes; half of them are in its first 64 bytes, where heads and tables are."""
    data = bytearray(frame)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        limit = len(data) if random.random() < 0.5 else min(len(data), 64)
        position = random.randrange(max(limit, 1))
        kind = random.randrange(8)
        if kind <= 2 and data:
            data[position] ^= 1 << random.randrange(8)
        elif kind == 3 and data:
            data[position] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        elif kind == 4:
            del data[position:]
        elif kind == 5:
            data[position:position] = random.randbytes(random.randrange(1, 9))
        elif kind == 6:
            del data[position : position + random.randrange(1, 9)]
        else:
            data[position:] = other[random.randrange(len(other)) :]
    return bytes(data)


class Decoder:
    """The decoder of frames, with guards around its output and around its buffer of streams."""

    def __init__(self) -> None:
        widest = max(size for _, size, _, _ in cases()) * 4
        self._scratch = np.full(widest + 2 * GUARD, FILL, np.uint8)
        self._out = np.full(widest + 2 * GUARD, FILL, np.uint8)
        self._used = 0
        packed._scratch = self.scratch

    def scratch(self, size: int) -> packed.Array:
        """Return the buffer of streams, in place of that of the decoder."""
        self._used = size
        self._scratch[GUARD + size : 2 * GUARD + size] = FILL
        return self._scratch[GUARD : GUARD + size]

    def judge(self, name: str, size: int, frame: bytes, digest: int) -> str:
        """Return what becomes of a frame."""
        out = self._out[GUARD : GUARD + size]
        try:
            packed.decode_frame(LAYOUTS[name], frame, out, "w")
        except FormatError as error:
            result = "refused" if error.rule == "part.packed" else f"RULE {error.rule}"
        except Exception as error:
            result = f"ERROR {type(error).__name__}: {error!s:.80}"
        else:
            result = "same checksum" if packed.checksum(out.data) == digest else "other checksum"
        buffers = ((self._out, size), (self._scratch, self._used))
        guards = (buffer[start : start + GUARD] for buffer, used in buffers for start in (0, GUARD + used))
        if any(bool((guard != FILL).any()) for guard in guards):
            result = "WRITTEN OUTSIDE"
        self._out[GUARD : GUARD + size] = FILL
        return result


def main() -> int:
    """Run the mutants, print the counts of results, and return 1 if one of them must not occur."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    frames = cases()
    decoder = Decoder()
    originals = {(name, size): frame for name, size, frame, _ in frames}
    random = Random(options.seed)
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    for number in range(options.mutants):
        name, size, frame, digest = random.choice(frames)
        changed = mutant(frame, random.choice(frames)[2], random)
        result = decoder.judge(name, size, changed, digest)
        if result == "same checksum":
            kept = packed.checksum(changed) == packed.checksum(originals[name, size])
            result = "unchanged" if kept else "same bytes by other ones"
        counts[result] += 1
        if result[:2].isupper():
            print(f"mutant {number} of seed {options.seed}, {name}, {size} bytes: {result}")
    seconds = time.perf_counter() - start
    print(f"{options.mutants:,} mutants of {len(frames)} frames in {seconds:.0f} s")
    for result, count in counts.most_common():
        print(f"{count:>10,}  {result}")
    return int(any(result[:2].isupper() for result in counts))


if __name__ == "__main__":
    sys.exit(main())
