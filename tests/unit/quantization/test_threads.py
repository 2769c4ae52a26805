"""Results of rounding do not depend on the number of threads, and threads share the work."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ingot.core.runtime import parallel
from ingot.errors import CodecError
from ingot.model.statistics import Statistics
from ingot.quantization.choice import parse_quantizer
from ingot.quantization.factors import feedback_factor
from ingot.quantization.products import Pairs, multiply
from ingot.quantization.tensor import round_tensor
from ingot.quantization.threads import each_block, in_steps, on_threads, pool_threads, share

ROWS, COLS = 300, 512
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "q4_0": ("two-sided", "ggml_blocks", {"type": "q4_0"}),
    "q4_k": ("two-sided", "ggml_blocks", {"type": "q4_k"}),
    "wide groups": ("two-sided", "affine", {"bits": 4, "group": 512}),
    "a table": ("two-sided", "scaled_codebook", {"bits": 3, "group": 64}),
    "an order": ("gptq", "affine", {"bits": 4, "group": 64, "act_order": True}),
    "one side": ("gptq", "ggml_blocks", {"type": "q4_1"}),
    "importance": ("importance", "affine", {"bits": 3, "group": 64}),
    "a trellis": ("two-sided", "trellis", {"bits": 3, "group": 64}),
    "a trellis by one side": ("gptq", "trellis", {"bits": 4, "group": 64}),
    "a palette": ("two-sided", "palette", {"bits": 4, "group": 64}),
}


def moment(size: int, random: np.random.Generator) -> Any:
    samples = random.standard_normal((2 * size, size), np.float32) @ random.standard_normal((size, size), np.float32)
    return samples.T @ samples


@pytest.fixture(scope="module")
def statistics() -> Statistics:
    random = np.random.default_rng(5)
    arrays = {"w:inputs": moment(COLS, random), "w:outputs": moment(ROWS, random), "w:count": np.array([9])}
    return Statistics.in_memory({**arrays, "w:in_sum2": np.ascontiguousarray(arrays["w:inputs"].diagonal())})


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_errors_are_those_of_one_thread(name: str, statistics: Statistics) -> None:
    spec = parse_quantizer(*CASES[name])
    rows = ROWS if name != "a palette" else 256
    random = np.random.default_rng(2)
    weights = random.standard_normal((rows, COLS), np.float32)
    if rows != ROWS:
        arrays = {f"w:{field}": moment(size, random) for field, size in (("inputs", COLS), ("outputs", rows))}
        statistics = Statistics.in_memory(
            {**arrays, "w:count": np.array([9]), "w:in_sum2": np.ascontiguousarray(arrays["w:inputs"].diagonal())}
        )
    results = [round_tensor(spec, [("w", weights)], statistics, threads=threads) for threads in (1, 2, 3)]
    expected, outcomes = results[0]
    for parts, outcome in results[1:]:
        assert {role: part.tobytes() for role, part in parts.items()} == {
            role: part.tobytes() for role, part in expected.items()
        }
        assert outcome == outcomes


def test_products_and_factors_are_those_of_one_thread() -> None:
    random = np.random.default_rng(3)
    a = random.standard_normal((70, 1100), np.float32)
    square = moment(1100, random)

    def compute() -> tuple[bytes, ...]:
        factor = feedback_factor(square.copy)
        results = multiply(a, square), Pairs.pack(square).multiply(a), factor.upper, factor.diagonal
        return tuple(result.tobytes() for result in results)

    expected = compute()
    for threads in (2, 3):
        with on_threads(threads):
            assert compute() == expected


def test_steps_overlap_in_the_order_of_their_blocks() -> None:
    lock = threading.Lock()
    complete: list[tuple[int, int]] = []
    threads: set[int] = set()
    both = threading.Barrier(2, timeout=10)

    def work(step: int, block: int) -> None:
        if (step, block) in ((0, 0), (1, 1)):  # two steps are at work at the same time
            both.wait()
        with lock:
            assert block == 2 or (step, block + 1) in complete
            assert step == 0 or (step - 1, block) in complete
            complete.append((step, block))
            threads.add(threading.get_ident())

    with on_threads(3):
        in_steps(4, 3, work)
    assert len(complete) == 12
    assert len(threads) > 1
    complete.clear()
    in_steps(1, 3, lambda step, block: complete.append((step, block)))
    assert complete == [(0, 2), (0, 1), (0, 0)]


def test_an_error_of_a_block_ends_the_steps_that_wait_for_it() -> None:
    def work(step: int, block: int) -> None:
        if step == 1:
            raise CodecError("quantizer.scale-overflow", f"block {block}")

    with on_threads(3), pytest.raises(CodecError, match="block 2"):
        in_steps(5, 3, work)


def test_matrices_share_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.quantization.threads.default_workers", lambda: 5)
    assert (share(), pool_threads()) == (1, 1)
    inner: list[Sequence[int]] = []
    with on_threads(None):
        assert (share(), pool_threads()) == (5, 5)
        each_block(range(2), lambda _: inner.append((share(), pool_threads())))

        def beside() -> None:
            with on_threads(5):
                inner.append((share(), pool_threads()))

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert inner == [(1, 1), (1, 1), (3, 5)]
    assert parallel.default_workers() >= 1
