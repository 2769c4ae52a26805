"""Calibration, rounding and decoding on a GPU: agreement with the CPU, seconds of a layer, tokens a second, memory.

    python bench/gpu.py > gpu.json                  # on a machine with a GPU: at most 8 minutes
    python bench/gpu.py --device cpu --tiny         # the same program on small shapes, without a GPU

The layer has the shape of Llama 3 8B's. Weights and activations are random: their values do not change the time. Every
part begins only while its share of the time is left, and parts that were left out are named. Without a GPU and without
``--device`` nothing is measured, and the result says so. Progress goes to stderr, the result as JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingot.core.border import require
from ingot.core.runtime.device import available_devices, is_out_of_memory, release_cached, resolve_device, synchronize
from ingot.model.statistics import Statistics
from ingot.quantization.device import round as device_round
from ingot.quantization.device.round import round_on_device
from ingot.quantization.factors import Factors, factors_of
from ingot.quantization.grid import Grid
from ingot.quantization.rounding import GPTQ, IMPORTANCE, TWO_SIDED, How, error_under, round_matrix
from ingot.runtime.calibration.moments import start_moment

LIMIT = 480.0
LAYERS = 32
GRIDS = {
    "int4 in groups of 32": Grid(4, 32),
    "table of 3 bits": Grid(3, 64, learnt=True),
    "offsets": Grid(4, 32, zeros="offsets"),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, of the matrices that are compared, and of the samples."""

    width: int = 4096
    inner: int = 14336
    keys: int = 1024
    heads: int = 32
    compared: tuple[int, int] = (512, 1024)
    tokens: int = 32768
    batch: int = 2048
    decoded: int = 64

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns of a layer's matrices."""
        return {
            "q_proj": (self.width, self.width),
            "k_proj": (self.keys, self.width),
            "v_proj": (self.keys, self.width),
            "o_proj": (self.width, self.width),
            "gate_proj": (self.inner, self.width),
            "up_proj": (self.inner, self.width),
            "down_proj": (self.width, self.inner),
        }


TINY = Shape(64, 128, 32, 4, (48, 64), 256, 64, 4)


@dataclass
class Run:
    """One measurement: device, shape, the end of the time, and the results so far."""

    torch: Any
    device: Any
    shape: Shape
    end: float
    results: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def part(self, name: str, share: float, compute: Callable[[], Any]) -> None:
        """Measure a part if ``share`` seconds are left; record its result, or why there is none."""
        remaining = self.end - time.monotonic()
        if remaining < share:
            self.left_out[name] = f"{remaining:.0f} s were left, less than {share:.0f} s"
            return
        print(f"{name} ...", file=sys.stderr)
        try:
            self.results[name] = compute()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.left_out[name] = "the device's memory ran out"
            release_cached(self.torch, self.device)

    def seconds(self, compute: Callable[[], Any]) -> float:
        """Return the seconds of a computation until the device is done."""
        synchronize(self.torch, self.device)
        started = time.perf_counter()
        compute()
        synchronize(self.torch, self.device)
        return time.perf_counter() - started


def random_factors(rows: int, cols: int, seed: int) -> Factors:
    """Return the factors of correlated random inputs and gradients."""
    random = np.random.default_rng(seed)
    arrays = {"w:count": np.array([2 * cols])}
    for name, size in (("inputs", cols), ("outputs", rows)):
        mixed = np.eye(size) + 0.5 / np.sqrt(size) * random.normal(size=(size, size))
        samples = (random.normal(size=(2 * size, size)) @ mixed).astype(np.float32)
        arrays[f"w:{name}"] = samples.T @ samples
    arrays["w:in_sum2"] = arrays["w:inputs"].diagonal().copy()
    entry = Statistics.in_memory(arrays).for_matrix("w")
    assert entry is not None
    return factors_of(entry)


def agreement(run: Run) -> dict[str, dict[str, dict[str, float]]]:
    """Return the share of equal codes and the ratio of errors of device and kernels, by grid and quantizer."""
    rows, cols = run.shape.compared
    weights = np.random.default_rng(1).standard_t(5, size=(rows, cols)).astype(np.float32)
    factors = random_factors(rows, cols, 2)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, grid in GRIDS.items():
        table[name] = {}
        for quantizer in (IMPORTANCE, GPTQ, TWO_SIDED):
            native = round_matrix(weights, grid, factors, quantizer)
            result = round_on_device(weights, grid, factors, How(quantizer), run.device)
            errors = [error_under(weights, rounded.values(), factors) for rounded in (native, result)]
            table[name][quantizer] = {
                "equal_codes": float((native.codes == result.codes).mean()),
                "error_ratio": errors[1] / errors[0],
            }
    return table


def calibration(run: Run) -> dict[str, float]:
    """Return the seconds of the forward products and moments of one layer, and tokens a second for all layers."""
    torch = run.torch
    shape = run.shape

    def layer() -> None:
        moments = {size: start_moment(torch, size, run.device) for size in (shape.width, shape.inner)}
        weights = [torch.randn(rows, cols, device=run.device) * 0.02 for rows, cols in shape.matrices().values()]
        for _ in range(0, shape.tokens, shape.batch):
            for weight in weights:
                inputs = torch.randn(shape.batch, weight.shape[1], device=run.device)
                _ = inputs @ weight.T
            for size, count in ((shape.width, 3), (shape.inner, 1)):
                values = torch.randn(shape.batch, size, device=run.device)
                for _ in range(count):
                    moments[size].add(values)

    seconds = run.seconds(layer)
    return {"tokens": shape.tokens, "seconds_a_layer": seconds, "tokens_a_second": shape.tokens / seconds / LAYERS}


def rounding(run: Run, quantizer: str, passes: int | None = None) -> dict[str, Any]:
    """Return the seconds that each matrix of a layer takes; ``passes`` limits those of descent."""
    seconds: dict[str, float] = {}
    before = device_round.PASSES
    device_round.PASSES = before if passes is None else passes
    try:
        for name, (rows, cols) in run.shape.matrices().items():
            if time.monotonic() > run.end:
                break
            same = next((key for key in seconds if run.shape.matrices()[key] == (rows, cols)), None)
            if same is not None:
                seconds[name] = seconds[same]
                continue
            weights = np.random.default_rng(3).standard_normal((rows, cols), np.float32)
            outputs = np.eye(rows, dtype=np.float32) if quantizer == TWO_SIDED else None
            factors = Factors(np.eye(cols, dtype=np.float32), outputs, np.ones(cols, np.float32))
            grid = GRIDS["int4 in groups of 32"]
            seconds[name] = run.seconds(
                lambda: round_on_device(weights, grid, factors, How(quantizer), run.device)  # noqa: B023
            )
            print(f"  {quantizer} {name}: {seconds[name]:.1f} s", file=sys.stderr)
    finally:
        device_round.PASSES = before
    complete = len(seconds) == len(run.shape.matrices())
    return {
        "passes": device_round.PASSES if passes is None else passes,
        "seconds": seconds,
        "seconds_a_layer": sum(seconds.values()) if complete else None,
    }


def decoding(run: Run) -> dict[str, float]:
    """Return tokens a second of one sequence in bf16, from two decoder layers, for a model of ``LAYERS`` layers."""
    torch = run.torch
    transformers = require("transformers", "transformers")
    shape = run.shape
    config = transformers.LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=2, num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads * shape.keys // shape.width, head_dim=shape.width // shape.heads,
        vocab_size=256,
    )  # fmt: skip
    with torch.device(run.device):
        model = transformers.LlamaModel(config).to(torch.bfloat16).eval()
    token = torch.zeros(1, 1, dtype=torch.int64, device=run.device)
    cache = None

    def decode(count: int) -> None:
        nonlocal cache
        for _ in range(count):
            cache = model(input_ids=token, past_key_values=cache, use_cache=True).past_key_values

    with torch.no_grad():
        decode(2)
        seconds = run.seconds(lambda: decode(shape.decoded))
    return {"tokens_a_second": shape.decoded / (seconds / 2 * LAYERS), "layers_measured": 2}


def peak_memory(run: Run) -> int | None:
    """Return the peak of allocated bytes on the device; None if torch does not count them."""
    measure = getattr(getattr(run.torch, run.device.type, None), "max_memory_allocated", None)
    return None if measure is None or run.device.type == "cpu" else int(measure(run.device))


def measure(device: Any, shape: Shape, limit: float) -> dict[str, Any]:
    """Measure all parts on a device within ``limit`` seconds."""
    torch = require("torch", "torch")
    started = time.monotonic()
    run = Run(torch, device, shape, started + limit)
    run.part("agreement", limit * 0.25, lambda: agreement(run))
    run.part("calibration", limit * 0.1, lambda: calibration(run))
    run.part("decoding", limit * 0.1, lambda: decoding(run))
    run.part("importance", limit * 0.1, lambda: rounding(run, IMPORTANCE))
    run.part("gptq", limit * 0.15, lambda: rounding(run, GPTQ))
    run.part("two-sided", limit * 0.15, lambda: rounding(run, TWO_SIDED, passes=1))
    properties = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return {
        "device": str(device),
        "name": platform.processor() or platform.machine() if properties is None else properties(device),
        "gpu": device.type != "cpu",
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started, 1),
        "peak_device_bytes": peak_memory(run),
        **run.results,
        "left_out": run.left_out,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", help="device of torch; default: the first GPU")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the program")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds; default %(default)s")
    options = parser.parse_args(arguments)
    torch = require("torch", "torch")
    device = options.device or next((name for name in available_devices(torch) if name != "cpu"), None)
    if device is None:
        note = "torch has no GPU here, so nothing was measured; --device cpu --tiny tries the program on the CPU"
        print(json.dumps({"device": None, "gpu": False, "note": note}, indent=1))
        return 0
    result = measure(resolve_device(device), TINY if options.tiny else Shape(), options.limit)
    if not result["gpu"]:
        result["note"] = "on the CPU: these figures are not those of a GPU"
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
