"""What a calibration will take: how many windows pass together, what is kept in memory, and about how long it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ingot.core.runtime.memory import anonymous_in_use, available_ram, parse_size
from ingot.errors import ResourceError
from ingot.runtime.calibration.calibrate_layers import Layered
from ingot.runtime.calibration.calibrate_passes import LOGITS
from ingot.runtime.calibration.calibration import CalibrateOptions, CalibratePlan
from ingot.runtime.calibration.samples import DRAWN
from ingot.runtime.calibration.skeleton import Layer
from ingot.runtime.calibration.skeleton_ends import ROWS

RESERVE = 128 << 20
"""Bytes for what is not reckoned one by one."""
_BATCH = 8  # windows that pass through a layer together
# Times that each product's operands are in memory: as activations, as gradients, and weighed or turned on the way.
_TIMES = 3
_LOGITS_TIMES = 6  # logits, their softmax and its logarithm, random numbers, gradients
_TOP = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SIDE = 1024  # of the matrices that the processor's speed is measured with


@dataclass(frozen=True, slots=True)
class Means:
    """How a calibration is carried out.

    ``kept``: the model stays in memory; ``spilled``: keys and values of samples do not; ``batch`` windows of
    ``window`` bytes of activations pass together; ``least`` is what a layer and its largest sums take.
    """

    windows: int
    length: int
    batch: int
    window: int
    kept: bool
    spilled: bool
    sampling: bool
    free: int
    weights: int
    sums: int
    ends: int

    @property
    def tokens(self) -> int:
        return self.windows * self.length

    @property
    def work(self) -> int:
        """Units of progress, set by ``means_of`` from the number of layers."""
        return self.tokens * self._weight

    _weight: int = 1

    def room(self, layer: Layer) -> int:
        """Return the bytes that there are for the sums of a layer."""
        return self.free - self.weights - self.batch * self.window


def means_of(model: Layered, options: CalibrateOptions, shape: tuple[int, int], *, sampling: bool) -> Means:
    """Decide how a calibration is carried out in the memory there is; ``calibrate.ram`` where none is enough."""
    skeleton, (windows, length) = model.skeleton, shape
    ceiling = available_ram() // 2 if options.max_ram is None else parse_size(options.max_ram) - anonymous_in_use()
    free = ceiling - RESERVE
    # Merged weights lie there twice while they are merged.
    largest = max(skeleton.nbytes(layer) * (2 if layer.merged else 1) for layer in model.layers)
    ends = {id(site.tensor): 4 * site.tensor.size for site in (model.embedding, model.head) if site is not None}
    whole = sum(map(skeleton.nbytes, model.layers)) + sum(ends.values())
    sums = [each for layer in model.layers for each in model.sizes(layer)]
    most = max(sums, default=0)
    window = max(4 * length * (_TIMES * _active(model, layer) + 2 * _heads(model) * length) for layer in model.layers)
    vocabulary = 1 if model.head is None else model.head.tensor.shape[0]
    logits = 4 * _LOGITS_TIMES * min(max(LOGITS, vocabulary), windows * length * vocabulary)
    at_ends = logits + min(2 * ROWS, sum(ends.values())) + 4 * model.width**2
    kept = whole + _BATCH * window + max(4 * most, at_ends) <= free
    weights = whole if kept else largest
    batch = next((few for few in (_BATCH, 4, 2) if weights + few * window + most <= free), 1)
    needed = max(weights + batch * window + most, (whole if kept else 0) + at_ends)
    if needed > free:
        raise ResourceError(
            f"expected room for {needed >> 20} MiB: a layer, what passes through it and one matrix's second moments; "
            f"found {max(free, 0) >> 20} MiB; raise --max-ram, or take a smaller --length, --largest, --no-fisher",
            rule="calibrate.ram",
            where=skeleton.checkpoint.location,
        )
    cache = _cached(model, min(windows, DRAWN), length)
    count = len(model.layers)
    weight = int(sampling) + count + 2 + (3 * count + 1 if options.fisher else 0)
    spilled = sampling and weights + cache + at_ends > free
    return Means(
        windows, length, batch, window, kept, spilled, sampling, free, weights, sum(sums), at_ends, _weight=weight
    )


def estimated(model: Layered, means: Means) -> CalibratePlan:
    """Return about what a calibration will take; computes and reads a little to find out how fast that goes."""
    skeleton, fisher = model.skeleton, model.settings.fisher
    layer = model.layers[0]
    started = time.perf_counter()
    with skeleton.loaded(layer):
        loading = (time.perf_counter() - started) / max(skeleton.nbytes(layer), 1)
    whole = sum(map(skeleton.nbytes, model.layers))
    used = sum(_active(model, each, products=True) for each in model.layers)
    head = 0 if model.head is None else model.head.tensor.size
    samples = int(means.sampling)
    products = (samples + (3 if fisher else 1)) * used + (samples + (3 if fisher else 0)) * head
    halves = means.sums // 4  # of symmetric sums, half of which is computed
    operations = means.tokens * (2 * products + halves)
    reads = (means.length - 1 if means.sampling else 0) + 1 + int(fisher)
    seconds = operations / _speed(model.torch) + (0 if means.kept else reads * whole * loading)
    count, hidden = len(model.layers), 4 * means.tokens * model.width
    activations = ((count + 1) if fisher else 2) * hidden + (2 * hidden if fisher else 0)
    cache = _cached(model, min(means.windows, DRAWN), means.length) if means.spilled else 0
    size = means.sums
    return CalibratePlan(
        seconds=seconds,
        memory=means.weights + max(means.batch * means.window + min(means.sums, means.room(layer)), means.ends),
        disk=max(cache, activations) + 2 * size,
        size=size,
        reads=1 if means.kept else reads,
    )


def _speed(torch: Any) -> float:
    """Return operations a second, of a product that is like those to come."""
    first = torch.ones(_SIDE // 4, _SIDE)
    second = torch.ones(_SIDE, _SIDE)
    first @ second
    started = time.perf_counter()
    first @ second
    return float(2 * first.numel() * _SIDE / max(time.perf_counter() - started, 1e-6))


def _active(model: Layered, layer: Layer, *, products: bool = False) -> int:
    """Return what a token needs of a layer's matrices: the sum of rows and columns, or of products."""
    dense, routed = model.shapes(layer)
    share = _share(model.skeleton.model.config)
    totals = [sum(rows * cols if products else rows + cols for rows, cols in some) for some in (dense, routed)]
    return totals[0] + int(totals[1] * share)


def _share(config: Any) -> float:
    """Return the share of experts that a token is sent to."""
    text = config.get_text_config()
    top, count = (
        next((getattr(text, key) for key in keys if getattr(text, key, None)), 0) for keys in (_TOP, _EXPERTS)
    )
    return top / count if isinstance(top, int) and isinstance(count, int) and top and count else 1.0


def _heads(model: Layered) -> int:
    found = getattr(model.skeleton.model.config.get_text_config(), "num_attention_heads", 0)
    return found if isinstance(found, int) else 0


def _cached(model: Layered, windows: int, length: int) -> int:
    """Return the bytes of keys and values of all layers."""
    text = model.skeleton.model.config.get_text_config()
    heads = _heads(model)
    own, width = getattr(text, "num_key_value_heads", None), getattr(text, "head_dim", None)
    own = own if isinstance(own, int) else heads
    width = width if isinstance(width, int) else model.width // max(heads, 1)
    return 8 * windows * length * len(model.layers) * own * width
