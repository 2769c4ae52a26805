"""Differences between two versions of a model on one thread, beside general compressors in the same run.

    python bench/delta.py --base BASE --tuned FINETUNE --json delta.json

Section ``fused``: quantized differences added in place in one pass, one thread, beside memcpy of the weights.
Section ``exact``: ``delta_exact`` beside XOR, bytes sorted into planes, and zstd. Rates are of the fine-tune's bytes.
Pairs are two checkpoints, given by ``--base`` and ``--tuned``, and made ones: Gaussian weights of which a share moved
by up to three units in the last place, or to which noise is added. Of checkpoints, all tensors of the type that the
first one has are taken; zstd gets them at once, ``delta_exact`` one by one, as they are stored. Buffers are touched
beforehand; the best time of each counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from clock import turns

import ingot
from ingot.codecs.base import Encoder
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.delta.exact_chunks import pack, unpack
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.delta.strategy import STRATEGIES
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor

Row = dict[str, Any]
Pair = tuple[np.ndarray, np.ndarray]
SHARED = "two checkpoints"
# Largest size in parts of the fine-tune, least rates of encoding and applying in GB/s.
TARGETS = {SHARED: (0.50, None, 0.5), "bf16, 2 % moved": (0.03, 1.0, 2.0)}


@dataclass(frozen=True)
class Source:
    """Base and fine-tune, tensor by tensor."""

    label: str
    pairs: Sequence[Pair]

    @property
    def nbytes(self) -> int:
        return sum(tuned.nbytes for _, tuned in self.pairs)


def checkpoints(base: Path, tuned: Path) -> Source:
    old, new = ingot.open(base), ingot.open(tuned)
    kind = new[next(iter(new))].dtype
    both = [name for name in new if name in old and old[name].shape == new[name].shape]
    names = [name for name in both if old[name].dtype == new[name].dtype == kind]
    return Source(SHARED, [(old[name].numpy(), new[name].numpy()) for name in names])


def made(megabytes: int) -> Iterator[Source]:
    rng = np.random.default_rng(0)
    for dtype in ("bf16", "f16", "f32"):
        count = (megabytes << 20) // numpy_dtype(dtype).itemsize
        weights = rng.standard_normal(count, np.float32) * np.float32(0.02)
        base = weights.astype(numpy_dtype(dtype))
        words = base.view(f"u{base.dtype.itemsize}")
        for percent in (0, 0.1, 2, 10) if dtype == "bf16" else (2,):
            steps = rng.integers(1, 4, count) * rng.choice((-1, 1), count) * (rng.random(count) < percent / 100)
            yield Source(f"{dtype}, {percent} % moved", [(base, (words + steps.astype(words.dtype)).view(base.dtype))])
        for scale in (1e-4, 1e-3) if dtype == "bf16" else (1e-4,):
            noise = rng.standard_normal(count, np.float32) * np.float32(scale)
            yield Source(f"{dtype}, noise of {scale / 0.02:g} sigma", [(base, (weights + noise).astype(base.dtype))])


def exact(arguments: argparse.Namespace) -> Iterator[Row]:
    if arguments.base and arguments.tuned:
        yield from compare(checkpoints(arguments.base, arguments.tuned), arguments.repeat, (3, 19))
    for source in made(arguments.megabytes):
        yield from compare(source, arguments.repeat, (3, 19) if source.label in TARGETS else (3,))


def compare(source: Source, repeat: int, levels: Sequence[int]) -> Iterator[Row]:
    yield ours(source, repeat)
    for level in levels:
        yield zstd(source, level)


def ours(source: Source, repeat: int) -> Row:
    outs = [np.full_like(base, 1) for base, _ in source.pairs]
    packed = [pack(base, tuned, workers=0) for base, tuned in source.pairs]

    def encode() -> None:
        for base, tuned in source.pairs:
            pack(base, tuned, workers=0)

    def apply() -> None:
        for parts, (base, _), out in zip(packed, source.pairs, outs, strict=True):
            unpack(parts, base, out, workers=0)

    rates = [source.nbytes / turns(repeat, call)[0] / 1e9 for call in (encode, apply)]
    for (_, tuned), out in zip(source.pairs, outs, strict=True):
        if tuned.tobytes() != out.tobytes():
            raise SystemExit(f"{source.label}: delta_exact did not give the fine-tune back")
    size = sum(array.nbytes for parts in packed for array in parts.values())
    return entry(source, "delta_exact", size, rates, TARGETS.get(source.label))


def zstd(source: Source, level: int) -> Row:
    """XOR the words, sort their bytes into planes, compress; and back."""
    old, new = (np.concatenate([pair[side].reshape(-1).view(np.uint8) for pair in source.pairs]) for side in (0, 1))
    width = source.pairs[0][1].dtype.itemsize
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    out = np.full_like(new, 1)
    frames: list[bytes] = []

    def encode() -> None:
        planes = np.ascontiguousarray((old ^ new).reshape(-1, width).T)
        frames[:] = [packer.compress(plane) for plane in planes]

    def apply() -> None:
        planes = np.stack([np.frombuffer(unpacker.decompress(frame), np.uint8) for frame in frames])
        np.bitwise_xor(old, planes.T.reshape(-1), out=out)

    rates = [new.nbytes / turns(1 if level > 3 else 3, call)[0] / 1e9 for call in (encode, apply)]
    if not np.array_equal(out, new):
        raise SystemExit(f"{source.label}: zstd did not give the fine-tune back")
    return entry(source, f"XOR, planes, zstd -{level}", sum(map(len, frames)), rates, None)


def fused(arguments: argparse.Namespace) -> Iterator[Row]:
    """Quantized differences decoded, added and rounded in one pass, in place, beside a copy of the weights."""
    rows = max(1, arguments.megabytes << 7)  # of 4096 bf16 values
    rng = np.random.default_rng(0)
    base = (rng.standard_normal((rows, 4096), np.float32) * np.float32(0.02)).astype(numpy_dtype("bf16"))
    change = rng.standard_normal(base.shape, np.float32) * np.float32(0.002)
    source, out = Source(f"fused into bf16, {base.nbytes >> 20} MiB", [(base, base)]), base.copy()
    copy = base.nbytes / turns(arguments.repeat, lambda: np.copyto(out, base))[0] / 1e9
    yield entry(source, "memcpy", base.nbytes, (copy, copy), None) | {"section": "fused"}
    ways = [(name, "affine", STRATEGIES[name].options) for name in ("int8", "int4", "int3", "int2", "int1")]
    ways += [(name, name, {}) for name in ("delta_int4", "delta_sign", "delta_sparse")]
    for name, codec_id, options in ways:
        codec = CODECS[codec_id]
        encoder = codec.encoder(base.shape, "f32", options)
        parts = whole(encoder, change)
        encode = base.nbytes / turns(1, lambda encoder=encoder: whole(encoder, change))[0] / 1e9
        stored = {part.role: memory_part(parts[part.role], part.dtype) for part in encoder.parts}
        tensor = Tensor("t", base.shape, "f32", codec.id, stored, dict(encoder.params), codec)

        def apply(tensor: Tensor = tensor) -> None:
            applier = delta_codec(tensor.codec).applier(tensor, "bf16")
            applier.apply(out, out)
            applier.finish()

        rate = base.nbytes / turns(arguments.repeat, apply)[0] / 1e9
        target = (1, None, copy / 2) if name in ("int4", "delta_int4") else None
        yield entry(source, name, tensor.nbytes, (encode, rate), target) | {"section": "fused"}


def whole(encoder: Encoder, values: np.ndarray) -> Mapping[str, np.ndarray]:
    for _ in range(encoder.fit_passes):
        encoder.fit_pass(values)
    return encoder.encode(values)


def entry(source: Source, name: str, size: int, rates: Sequence[float], target: Sequence[float | None] | None) -> Row:
    ratio = size / source.nbytes
    met = None
    if target is not None:
        most, *least = target
        met = ratio <= (most or 1) and all(rate >= (wanted or 0) for rate, wanted in zip(rates, least, strict=True))
    return {
        "section": "exact",
        "source": source.label,
        "name": name,
        "share": round(ratio, 5),
        "encode": round(rates[0], 3),
        "apply": round(rates[1], 3),
        "target": target,
        "met": met,
    }


def table(rows: list[Row]) -> str:
    lines, last = [], ""
    for row in rows:
        if row["source"] != last:
            lines.append(f"{row['source']:30}{'size %':>9}{'encode GB/s':>13}{'apply GB/s':>12}")
        last = row["source"]
        mark = " !" if row["met"] is False else ""
        lines.append(f"  {row['name']:28}{100 * row['share']:9.3f}{row['encode']:13.2f}{row['apply']:12.2f}{mark}")
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {"exact": exact, "fused": fused}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only these (default: all)")
    parser.add_argument("--base", type=Path, help="a checkpoint")
    parser.add_argument("--tuned", type=Path, help="its fine-tune")
    parser.add_argument("--megabytes", type=int, default=64, help="of made weights (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    rows: list[Row] = []
    for name in arguments.section or SECTIONS:
        rows += SECTIONS[name](arguments)
    print(f"one thread, instruction set {arguments.isa}; '!' marks a missed target")
    print(table(rows))
    if arguments.json:
        versions = {"zstandard": metadata.version("zstandard")}
        arguments.json.write_text(json.dumps({"isa": arguments.isa, "versions": versions, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
