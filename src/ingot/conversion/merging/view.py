"""The view of a base merged with other models; tensors are computed in f32 when they are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import numpy as np

from ingot.adapters.options import AdapterRef
from ingot.codecs.table import CODECS
from ingot.conversion.merging.methods import (
    BLOCK,
    LINEAR,
    SLERP,
    WITH_DENSITY,
    WITHOUT_BASE,
    Merger,
    TensorMerge,
    is_mergeable,
)
from ingot.conversion.merging.operands import Operand, open_operand
from ingot.conversion.merging.weights import RULE, WeightRules, load_weights, subjects_of
from ingot.core.numeric.dtypes import DTYPES, cast, file_bytes, numpy_dtype, require_inside
from ingot.errors import UsageError
from ingot.model.bytesource import DerivedSource
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.dense import DATA, DenseLayout
from ingot.model.part import Part
from ingot.model.reading.concat_source import DecodedRange, verify_part
from ingot.model.reading.view import derive_checkpoint
from ingot.model.tensor import Array, Tensor
from ingot.recipes.recipe import Patterns, Subject
from ingot.views.common import BuildTensor, lazy_tensors


@dataclass(frozen=True, slots=True)
class ModelMerge:
    """A merge of models: the method, its parameters, and the models after the base.

    ``base_weight`` is the weight of the base for methods that treat it like the other models. ``weights`` is the path
    of a TOML file with rules (``merging.weights``).
    """

    method: str
    base: str
    models: tuple[AdapterRef, ...]
    base_weight: float = 1.0
    density: float = 1.0
    scale: float = 1.0
    seed: int = 0
    weights: str | None = None
    drop: tuple[str, ...] = ()
    io: str = "pread"
    max_decompressed: int | str | None = None

    def rules(self) -> WeightRules:
        """Return the rules of the file ``weights``; no rules if there is no file."""
        return load_weights(self.weights, [self.base, *(item.path for item in self.models)], self.method)


def merged_models(checkpoint: Checkpoint, merge: ModelMerge, *, exact: bool = False) -> Checkpoint:
    """Return the checkpoint merged with the models of ``merge``, computed when tensors are read.

    Changed tensors are dense: f32 if ``exact``, else in the element type of the base. Closing the view closes the
    models and the base.

    Raises
    ------
    UsageError
        ``merge.weights``: a rule that applies to no tensor, or weights that the method cannot use.
    UnsupportedError, IntegrityError
        The errors of ``open_operand``.
    """
    with ExitStack() as stack:
        operands = []
        for reference in merge.models:
            operand = open_operand(reference, checkpoint, merge.drop, merge.io, merge.max_decompressed)
            stack.callback(operand.close)
            operands.append(operand)
        view = merge_operands(checkpoint, merge, operands, exact=exact)
        stack.pop_all()
    return view


def _with_models(checkpoint: Checkpoint, argument: tuple[ModelMerge, bool]) -> Checkpoint:
    merge, exact = argument
    return merged_models(checkpoint, merge, exact=exact)


def merge_operands(
    checkpoint: Checkpoint, merge: ModelMerge, operands: Sequence[Operand], *, exact: bool
) -> Checkpoint:
    """Return the view of ``merged_models`` for opened models; closing the view closes them."""
    plans = tensor_merges(checkpoint, merge)

    def builder(name: str) -> BuildTensor:
        tensors = [checkpoint[name], *(item.tensors[name] for item in operands)]
        return lambda: _merged_tensor(tensors, plans[name], exact=exact)

    def close() -> None:
        for item in operands:
            item.close()

    entries = [(name, builder(name) if name in plans else None, name) for name in checkpoint]
    return derive_checkpoint(
        checkpoint,
        lazy_tensors(entries, checkpoint),
        _with_models,
        (merge, exact),
        [asdict(merge), exact, *(item.source.identity() for item in operands)],
        opened=[item.source for item in operands],
        also_close=close,
    )


def tensor_merges(checkpoint: Checkpoint, merge: ModelMerge) -> dict[str, TensorMerge]:
    """Return the parameters of the merge of each tensor, keyed by name.

    Tensors that are dropped, or whose values are not floating-point numbers, are omitted.

    Raises ``UsageError`` ``merge.weights``.
    """
    rules = merge.rules()
    dropped = Patterns(merge.drop)
    plans = {
        name: _tensor_merge(merge, rules, subject)
        for name, subject in subjects_of(checkpoint).items()
        if is_mergeable(checkpoint[name].dtype) and not dropped(name)
    }
    rules.require_all_used()
    return plans


def _tensor_merge(merge: ModelMerge, rules: WeightRules, subject: Subject) -> TensorMerge:
    first = 0 if merge.method in WITHOUT_BASE else 1
    defaults = [merge.base_weight, *(item.weight for item in merge.models)]
    numbers = [
        rules.numbers(subject, model, weight, merge.density) for model, weight in enumerate(defaults) if model >= first
    ]
    weights = tuple(weight for weight, _ in numbers)
    total = np.sum(np.array(weights, np.float32), dtype=np.float32)
    if merge.method == SLERP and (min(weights) < 0 or total <= 0):
        raise _weights_error("expected weights of at least 0, not all of them 0", weights, rules, subject.name)
    if merge.method == LINEAR and (total == 0 or not np.isfinite(total)):
        raise _weights_error("expected weights whose sum is not 0", weights, rules, subject.name)
    densities = tuple(density for _, density in numbers) if merge.method in WITH_DENSITY else ()
    return TensorMerge(merge.method, weights, densities, merge.scale, merge.seed)


def _weights_error(expected: str, weights: tuple[float, ...], rules: WeightRules, name: str) -> UsageError:
    shown = ", ".join(f"{weight:g}" for weight in weights)
    return UsageError(f"{expected}; found {shown} for {name[:200]}", rule=RULE, where=rules.location)


def _merged_tensor(tensors: Sequence[Tensor], plan: TensorMerge, *, exact: bool) -> Tensor:
    base = tensors[0]
    dtype = "f32" if exact else base.dtype
    row = DTYPES[dtype]
    source = _MergedSource(base.name, tensors, plan, dtype)
    part = Part(
        row.storage, source.size, source, type=None if row.is_storage else row.name, where=f"{base.name}: {DATA}"
    )
    codec = CODECS[DenseLayout.codec]
    merged = Tensor(base.name, base.shape, dtype, codec.id, {DATA: part}, {}, codec)
    return replace(merged, source_bits=base.stored_bits, stored_like=base if exact else None)


class _MergedSource(DerivedSource):
    """The bytes of a merged tensor, computed in blocks of ``BLOCK`` elements.

    The last computed block is cached until the end of the tensor is read.
    """

    mapped = False

    def __init__(self, name: str, tensors: Sequence[Tensor], plan: TensorMerge, dtype: str) -> None:
        self.name = name
        self._tensors = tensors
        self._dtype = dtype
        self._width = DTYPES[dtype].bits // 8
        self._count = tensors[0].size
        self.size = self._count * self._width
        self._ranges = [DecodedRange(tensor, scattered=False) for tensor in tensors]
        self._merger = Merger(name, self._count, plan, self._read)
        self._lock = threading.Lock()
        self._block: tuple[int, memoryview] = (-1, memoryview(b""))

    def working_bytes(self) -> int:
        return 3 * (len(self._tensors) + 2) * BLOCK * 4

    def view(self, offset: int, length: int) -> memoryview:
        out = np.empty(max(length, 0), np.uint8).data
        self.readinto(offset, out)
        return out

    def readinto(self, offset: int, out: memoryview) -> None:
        require_inside(offset, out.nbytes, self.size, self.name)
        if not out.nbytes:
            return
        target = out.cast("B")
        filled = 0
        with self._lock:
            while filled < target.nbytes:
                index, skipped = divmod(offset + filled, BLOCK * self._width)
                if index != self._block[0]:
                    values = self._merger.block(index)
                    self._block = (index, memoryview(file_bytes(cast(values, self._dtype))).cast("B"))
                block = self._block[1]
                count = min(block.nbytes - skipped, target.nbytes - filled)
                target[filled : filled + count] = block[skipped : skipped + count]
                filled += count
            if offset + filled == self.size:
                self._release()

    def _read(self, start: int, stop: int) -> list[Array]:
        """Return the elements from ``start`` to ``stop`` in f32, one array per model."""
        values = []
        for tensor, source in zip(self._tensors, self._ranges, strict=True):
            stored = np.empty(stop - start, numpy_dtype(tensor.dtype))
            source.readinto(start * stored.itemsize, stored.view(np.uint8).data)
            values.append(cast(stored, "f32"))
        return values

    def _release(self) -> None:
        self._block = (-1, memoryview(b""))
        for source in self._ranges:
            source.release()

    def changed(self) -> bool:
        return any(source.changed() for source in self._ranges)

    def verify_sources(self) -> None:
        for tensor in self._tensors:
            for part in tensor.parts.values():
                verify_part(part)

    def close(self) -> None:
        """Do nothing: the checkpoints close their files."""
