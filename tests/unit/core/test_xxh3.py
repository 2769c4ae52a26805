"""XXH3 with 64 bits: known values, in one update and in many."""

from __future__ import annotations

import numpy as np
import pytest

from ingot.core.bytes import checksums

DATA = bytes((i * i + i // 7) & 255 for i in range(5000))
VALUES = {
    0: 0x2D06800538D394C2,
    1: 0xC44BDFF4074EECDB,
    2: 0xD6645FC3051A9457,
    3: 0x37892F624F40B19C,
    4: 0x5206B2E6B553FE7E,
    5: 0x4059737F905531B6,
    8: 0x98C961A085A126A8,
    9: 0xD6FF946995B5F732,
    15: 0xCF3A17459B4E35B4,
    16: 0x7811A63C955DB878,
    17: 0xB1ADC62E0CF2E837,
    32: 0x78FAF7A1DC3009B8,
    33: 0x47800873B760103E,
    64: 0x32A24085CF441787,
    65: 0x3BFBA3FDB567F4CF,
    96: 0x0E0BCC1632CF339A,
    97: 0xE91ED4DFF1EE5094,
    128: 0x75F641DE129B9250,
    129: 0xC0874810AB91D5E5,
    143: 0x4AF918EE26AA6A82,
    144: 0xFF723F18173F910B,
    200: 0xFFA1C3048F8289D6,
    240: 0x100873FE1BBC153A,
    241: 0x1EF3A6CB47FBAD2D,
    255: 0x5E3C23DEC42596A4,
    256: 0xD2EC23F78AFF05CE,
    257: 0x6B12920C9551F26B,
    319: 0x950D5AC5DDDCA40D,
    320: 0x70E25C24415C0F60,
    321: 0x19E13E22F1A7973A,
    1023: 0x364CCF4C2C9E55BD,
    1024: 0x6811158F016AD5DC,
    1025: 0x17E75D922EE4C353,
    1088: 0xD6A03E7DC0FA9F1B,
    2047: 0x757EE06D78B58330,
    2048: 0x67BE7858B252E442,
    2049: 0xD8DC27162768A102,
    4999: 0x509BC504653BCF0B,
}


def test_known_values() -> None:
    assert {size: checksums.xxh3(DATA[:size]) for size in VALUES} == VALUES


@pytest.mark.parametrize("seed", range(4))
def test_pieces_do_not_matter(seed: int) -> None:
    sizes = np.random.default_rng(seed)
    for total, value in VALUES.items():
        running = checksums.hasher("xxh3")
        start = 0
        while start < total:
            stop = min(total, start + int(sizes.choice([0, 1, 63, 64, 65, 255, 256, 257, 700])))
            running.update(DATA[start:stop])
            start = stop
        assert running.text() == f"xxh3:{value:016x}"
        assert running.text() == f"xxh3:{value:016x}"
