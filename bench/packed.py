"""Products with packed weights against torch's bf16 linear layers of the same shapes, in the same run.

    python bench/packed.py --json packed.json
    python bench/packed.py --only products --cpu --threads 1 --batch 16 64 256 --forms "int4 g32" "int4 g128" "int8 row"
    python bench/packed.py --only passes --batch 1 8 16 64 256 --forms "int4 g32" "int8 row"

Every shape has as many copies as make 256 MB of bf16, so that no cache holds them; ours, the same with x in 8 bits
(``compute="int8"``) and torch's take turns, and the best time of each counts. ``stack`` is the linear layers of
Qwen2.5-1.5B (28 layers, and the head 151936 x 1536), one token at a time: what a model does beside them is not in it.
``passes`` is those of all 28 layers without the head, by rows of x, on each number of threads in turn, and how many
times the first one's speed that is; ``memory`` says how fast so many threads read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clock import turns

from ingot.codecs.affine.matmul import PackedMatrix
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.model.layouts.affine import NO_ZERO, OFFSETS, ROW, AffineLayout, Group
from ingot.runtime.layers.packed_linear import PackedLinear

Row = dict[str, Any]

SHAPES = ((1536, 1536), (256, 1536), (8960, 1536), (1536, 8960))
LAYER = ((1536, 1536), (256, 1536), (256, 1536), (1536, 1536), (8960, 1536), (8960, 1536), (1536, 8960))
HEAD = (151936, 1536)
INT4 = AffineLayout(4, Group(128), "rows_lsb", True, NO_ZERO, "bf16")
FORMS = {
    "int4 g128": (INT4, "f16"),
    "int4 g64 offset": (
        AffineLayout(4, Group(64), "rows_lsb", False, OFFSETS, "bf16"),
        "bf16",
    ),
    "int4 g32": (AffineLayout(4, Group(32), "rows_lsb", True, NO_ZERO, "bf16"), "f16"),
    "int8 row": (AffineLayout(8, ROW, "rows_lsb", True, NO_ZERO, "bf16"), "f32"),
}
TARGETS = {"int4": 1.5, "int8": 1.2}


def packed(form: str, shape: tuple[int, int]) -> PackedLinear:
    """Random codes, scales near 1 / sqrt(columns): the product's size is that of x."""
    params, scale_dtype = FORMS[form]
    rows, cols = shape
    codes = np.random.default_rng(0).integers(0, 256, rows * params.row_bytes(cols), np.uint8)
    scales = np.full(params.scale_shape(rows, cols), 0.2 / cols**0.5 / 2 ** (params.bits - 4)).astype(
        numpy_dtype(scale_dtype)
    )
    zeros = (-7.5 * scales.astype(np.float32)).astype(scales.dtype) if params.zeros else None
    return PackedLinear(PackedMatrix(params, shape, codes, scales, zeros))


def dense(shape: tuple[int, int]) -> torch.nn.Linear:
    layer = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    layer.weight.requires_grad_(False)
    layer.weight.fill_(0.5 / shape[1] ** 0.5)
    return layer


def nbytes(layer: PackedLinear) -> int:
    return sum(buffer.nbytes for buffer in layer.buffers())


def products(batches: list[int], repeat: int, forms: Sequence[str], clock: Callable[[], float]) -> list[Row]:
    rows = []
    for shape in SHAPES:
        copies = max(2, 256_000_000 // (2 * shape[0] * shape[1]))
        plain = [dense(shape) for _ in range(copies)]
        for form in forms:
            ours = [packed(form, shape) for _ in range(copies)]
            for batch in batches:
                x = torch.randn(batch, shape[1], dtype=torch.bfloat16)
                ways = (partial(every, plain, x), partial(every, ours, x), partial(rounded, ours, x))
                theirs, mine, int8 = (seconds / copies for seconds in turns(repeat, *ways, clock=clock))
                rows.append(
                    {
                        "shape": shape,
                        "form": form,
                        "batch": batch,
                        "threads": torch.get_num_threads(),
                        "us": round(mine * 1e6, 1),
                        "gb_per_s": round(nbytes(ours[0]) / mine / 1e9, 2),
                        "torch_us": round(theirs * 1e6, 1),
                        "torch_gb_per_s": round(2 * shape[0] * shape[1] / theirs / 1e9, 2),
                        "ratio": round(theirs / mine, 2),
                        "int8_us": round(int8 * 1e6, 1),
                        "int8_gb_per_s": round(nbytes(ours[0]) / int8 / 1e9, 2),
                        "int8_ratio": round(mine / int8, 2),
                    }
                )
                print(line(rows[-1]), flush=True)
    return rows


def every(layers: Sequence[torch.nn.Module], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def rounded(layers: Sequence[PackedLinear], x: torch.Tensor) -> None:
    """The same with x in 8 bits."""
    for layer in layers:
        layer.rounding = True
    every(layers, x)
    for layer in layers:
        layer.rounding = False


def line(row: Row) -> str:
    shape = f"{row['shape'][0]} x {row['shape'][1]}"
    ours = f"{row['us']:>9.1f} us {row['gb_per_s']:>6.2f} GB/s"
    theirs = f"{row['torch_us']:>9.1f} us {row['torch_gb_per_s']:>6.2f} GB/s"
    head = f"{shape:12} x{row['batch']:<3} {row['threads']} threads  {row['form']:16}"
    int8 = f"{row['int8_us']:>9.1f} us {row['int8_gb_per_s']:>6.2f} GB/s {row['int8_ratio']:.2f} x"
    return f"{head}{ours}   torch{theirs}  {row['ratio']:.2f} x   int8{int8}"


def overhead() -> float:
    """Microseconds of a call of a layer that has next to nothing to compute."""
    layer, x = packed("int4 g32", (64, 64)), torch.zeros(1, 64, dtype=torch.bfloat16)
    return turns(20, lambda: [layer(x) for _ in range(200)])[0] / 200 * 1e6


def token(layers: list[list[torch.nn.Module]], head: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    for q, k, v, o, gate, up, down in layers:
        x = x + o(q(x) + (k(x) + v(x)).repeat(1, 6))
        x = x + down(gate(x) * up(x))
    return head(x)


def stack(repeat: int) -> list[Row]:
    x = torch.randn(1, 1536, dtype=torch.bfloat16)
    plain, plain_head = [[dense(shape) for shape in LAYER] for _ in range(28)], dense(HEAD)
    rows = []
    for form in ("int4 g128", "int4 g64 offset", "int8 row"):
        ours = [[packed(form, shape) for shape in LAYER] for _ in range(28)]
        head = packed("int8 row", HEAD)
        pairs = ((plain, plain_head), (ours, plain_head), (ours, head))
        ways = [partial(token, layers, last, x) for layers, last in pairs]
        theirs, same_head, int8_head = turns(repeat, *ways)
        for name, seconds in (("head bf16", same_head), ("head int8", int8_head)):
            target = TARGETS[form[:4]]
            rows.append(
                {
                    "form": f"{form}, {name}",
                    "threads": torch.get_num_threads(),
                    "tokens_per_s": round(1 / seconds, 2),
                    "torch_tokens_per_s": round(1 / theirs, 2),
                    "ratio": round(theirs / seconds, 2),
                    "target": target,
                    "met": theirs / seconds >= target,
                }
            )
            print(rows[-1], flush=True)
    return rows


def memory(repeat: int, threads: list[int]) -> list[Row]:
    """GB/s at which a gigabyte is read."""
    values = torch.ones(1 << 28, dtype=torch.int32)
    ways = [partial(threaded, count, values.max) for count in threads]
    found = [
        {"threads": count, "gb_per_s": round(values.nbytes / seconds / 1e9, 1)}
        for count, seconds in zip(threads, turns(repeat, *ways), strict=True)
    ]
    print(*(f"reading: {row['threads']} threads {row['gb_per_s']} GB/s" for row in found), sep="\n", flush=True)
    return found


def threaded(threads: int, way: Callable[[], object]) -> None:
    torch.set_num_threads(threads)
    way()


def inputs(layers: list[list[torch.nn.Module]], batch: int) -> list[tuple[torch.nn.Module, torch.Tensor]]:
    """Every layer of a model with an x of its own width: a chain of them would leave the numbers that models have."""
    x = {cols: torch.randn(batch, cols, dtype=torch.bfloat16) for _, cols in LAYER}
    return [(layer, x[shape[1]]) for block in layers for layer, shape in zip(block, LAYER, strict=True)]


def linears(layers: list[tuple[torch.nn.Module, torch.Tensor]], rounding: bool | None = None) -> None:
    for layer, x in layers:
        if rounding is not None:
            layer.rounding = rounding
        layer(x)


def passes(batches: list[int], repeat: int, threads: list[int], forms: Sequence[str]) -> list[Row]:
    plain = [[dense(shape) for shape in LAYER] for _ in range(28)]
    rows: list[Row] = []
    for form in forms:
        ours = [[packed(form, shape) for shape in LAYER] for _ in range(28)]
        for batch in batches:
            theirs, mine = inputs(plain, batch), inputs(ours, batch)
            ways = [
                partial(threaded, count, way)
                for count in threads
                for way in (partial(linears, theirs), partial(linears, mine, False), partial(linears, mine, True))
            ]
            seconds = turns(repeat, *ways)
            for place, count in enumerate(threads):
                here = dict(zip(("torch", "exact", "int8"), seconds[3 * place : 3 * place + 3], strict=True))
                gain = dict(zip(here, (a / b for a, b in zip(seconds, here.values(), strict=False)), strict=True))
                rows.append({"form": form, "batch": batch, "threads": count, "seconds": here, "gain": gain})
                shown = "   ".join(f"{way} {here[way]:7.4f} s {gain[way]:.2f} x" for way in here)
                print(
                    f"{form:16} x{batch:<3} {count} threads  {shown}   {here['torch'] / here['exact']:.2f} x",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa())
    parser.add_argument("--forms", choices=FORMS, nargs="*", default=list(FORMS), metavar="FORM")
    parser.add_argument("--cpu", action="store_true", help="processor time, of products alone")
    parser.add_argument("--only", choices=["products", "stack", "passes"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    native.set_isa(arguments.isa)
    result: dict[str, Any] = {"isa": arguments.isa, "products": [], "stack": [], "passes": []}
    clock = time.process_time if arguments.cpu else time.perf_counter
    with torch.inference_mode():
        result["overhead_us"] = round(overhead(), 1)
        print(f"a call of a layer: {result['overhead_us']} us")
        if arguments.only in (None, "passes"):
            result["memory"] = memory(arguments.repeat, arguments.threads)
            result["passes"] = passes(arguments.batch, arguments.repeat, arguments.threads, arguments.forms)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            if arguments.only in (None, "products"):
                result["products"] += products(arguments.batch, arguments.repeat, arguments.forms, clock)
            if arguments.only in (None, "stack"):
                result["stack"] += stack(arguments.repeat)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
