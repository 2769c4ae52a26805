"""Plan of a calibration: windows per batch, use of memory, and estimates of time and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ingot.core.runtime.memory import anonymous_in_use, available_ram, parse_size
from ingot.errors import ResourceError
from ingot.runtime.calibration.calibrate_layers import LayerwiseModel
from ingot.runtime.calibration.calibrate_passes import LOGITS
from ingot.runtime.calibration.calibration import CalibrateOptions, CalibratePlan
from ingot.runtime.calibration.samples import BATCH
from ingot.runtime.calibration.skeleton import Layer, MetaModel
from ingot.runtime.calibration.skeleton_ends import ROWS

RESERVE = 128 << 20
"""Bytes reserved for all memory that the plan does not list."""
_BATCH = 8  # windows that pass through a layer together
# Copies of each product's operands in memory: activations, gradients, and weighted or transposed intermediates.
_TIMES = 3
_LOGITS_TIMES = 6  # copies of logits: the logits, their softmax and its logarithm, random numbers, gradients
_TOP = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory plan of a calibration; all sizes are in bytes.

    If ``in_memory`` is set, the model stays in memory. If ``spilled`` is set, keys and values of samples are in files.
    ``batch`` windows pass through a layer together, with ``window`` bytes of activations each. ``weights`` is the size
    of the weights in memory, ``sums`` the size of all moments, and ``ends`` the size of embedding, head and logits
    together.
    """

    windows: int
    length: int
    batch: int
    window: int
    in_memory: bool
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
        """The total of the progress bar: tokens times a weight that depends on the number of layers."""
        return self.tokens * self._weight

    _weight: int = 1

    def moment_bytes(self, layer: Layer) -> int:
        """Return the number of bytes available for the moments of a layer."""
        return self.free - self.weights - self.batch * self.window


def _free(options: CalibrateOptions) -> int:
    """Return the number of bytes of memory that a calibration may use."""
    ceiling = available_ram() // 2 if options.max_ram is None else parse_size(options.max_ram) - anonymous_in_use()
    return ceiling - RESERVE - options.reserve


def fits_in_memory(skeleton: MetaModel, options: CalibrateOptions) -> bool:
    """Return whether all weights fit in memory in f32; sampling is slow otherwise."""
    return sum(4 * tensor.size for tensor in skeleton.checkpoint.values()) <= _free(options)


def plan_memory(
    model: LayerwiseModel, options: CalibrateOptions, shape: tuple[int, int], *, sampling: bool
) -> MemoryPlan:
    """Return the memory plan for the available memory; raise ``calibrate.ram`` if it is too small."""
    skeleton, (windows, length) = model.skeleton, shape
    free = _free(options)
    # memory holds weights twice while they are merged
    largest = max(skeleton.nbytes(layer) * (2 if layer.merged else 1) for layer in model.layers)
    ends = {id(site.tensor): 4 * site.tensor.size for site in (model.embedding, model.head) if site is not None}
    all_weights = sum(map(skeleton.nbytes, model.layers)) + sum(ends.values())
    sums = [size for layer in model.layers for size in model.sizes(layer)]
    largest_sums = max(sums, default=0)
    window = max(
        4 * length * (_TIMES * active_size(model, layer) + 2 * _heads(model) * length) for layer in model.layers
    )
    vocabulary = 1 if model.head is None else model.head.tensor.shape[0]
    logits = 4 * _LOGITS_TIMES * min(max(LOGITS, vocabulary), windows * length * vocabulary)
    at_ends = logits + min(2 * ROWS, sum(ends.values())) + 4 * model.width**2
    in_memory = all_weights + _BATCH * window + max(4 * largest_sums, at_ends) <= free
    weights = all_weights if in_memory else largest
    batch = next(
        (
            count_of_windows
            for count_of_windows in (_BATCH, 4, 2)
            if weights + count_of_windows * window + largest_sums <= free
        ),
        1,
    )
    needed = max(weights + batch * window + largest_sums, (all_weights if in_memory else 0) + at_ends)
    if needed > free:
        raise ResourceError(
            f"expected {needed >> 20} MiB of memory for a layer, its activations and the second moments of a matrix; "
            f"found {max(free, 0) >> 20} MiB; raise --max-ram, or use a smaller --length, --largest, --no-fisher",
            rule="calibrate.ram",
            where=skeleton.checkpoint.location,
        )
    cache = _cached(model, min(windows, BATCH), length)
    layer_count = len(model.layers)
    weight = int(sampling) + layer_count + 2 + (3 * layer_count + 1 if options.fisher else 0)
    spilled = sampling and weights + cache + at_ends > free
    return MemoryPlan(
        windows, length, batch, window, in_memory, spilled, sampling, free, weights, sum(sums), at_ends, _weight=weight
    )


def estimate(
    model: LayerwiseModel, memory_plan: MemoryPlan, seconds: float = 0.0, *, by_layers: bool = False
) -> CalibratePlan:
    """Return estimates for a calibration that takes ``seconds``.

    If ``by_layers`` is set, a layer's statistics are deleted before those of the next layer are summed.
    """
    fisher = model.settings.fisher
    reads = (memory_plan.length - 1 if memory_plan.sampling else 0) + 1 + int(fisher)
    hidden = 4 * memory_plan.tokens * model.width
    activations = ((len(model.layers) + 1) if fisher else 2) * hidden + (2 * hidden if fisher else 0)
    cache = _cached(model, min(memory_plan.windows, BATCH), memory_plan.length) if memory_plan.spilled else 0
    size = max((sum(model.sizes(item)) for item in model.layers), default=0) if by_layers else memory_plan.sums
    return CalibratePlan(
        seconds=seconds,
        memory=memory_plan.weights
        + max(
            memory_plan.batch * memory_plan.window + min(memory_plan.sums, memory_plan.moment_bytes(model.layers[0])),
            memory_plan.ends,
        ),
        disk=max(cache, activations) + 2 * size,
        size=size,
        reads=1 if memory_plan.in_memory else reads,
    )


def active_size(model: LayerwiseModel, layer: Layer, *, products: bool = False) -> int:
    """Return the sum of rows + columns over the matrices of a layer that one token uses.

    With ``products``, return the sum of rows * columns.
    """
    dense, routed = model.shapes(layer)
    share = _share(model.skeleton.model.config)
    totals = [sum(rows * cols if products else rows + cols for rows, cols in shapes) for shapes in (dense, routed)]
    return totals[0] + int(totals[1] * share)


def _share(config: Any) -> float:
    """Return the fraction of a layer's experts that one token uses, according to ``config``."""
    text = config.get_text_config()
    top, count = (
        next((getattr(text, key) for key in keys if getattr(text, key, None)), 0) for keys in (_TOP, _EXPERTS)
    )
    return top / count if isinstance(top, int) and isinstance(count, int) and top and count else 1.0


def _heads(model: LayerwiseModel) -> int:
    heads = getattr(model.skeleton.model.config.get_text_config(), "num_attention_heads", 0)
    return heads if isinstance(heads, int) else 0


def _cached(model: LayerwiseModel, windows: int, length: int) -> int:
    """Return the number of bytes of keys and values of all layers for ``windows`` sequences of ``length`` tokens."""
    text = model.skeleton.model.config.get_text_config()
    heads = _heads(model)
    key_heads = getattr(text, "num_key_value_heads", None)
    width = getattr(text, "head_dim", None)
    key_heads = key_heads if isinstance(key_heads, int) else heads
    width = width if isinstance(width, int) else model.width // max(heads, 1)
    return 8 * windows * length * len(model.layers) * key_heads * width
