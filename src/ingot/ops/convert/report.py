"""What a conversion did, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ingot.core.floats import FLOATS
from ingot.core.stats import ErrorStats
from ingot.engine.work import Step


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor: what happened (``moved``, ``repacked``, ``decoded``, ``encoded``), by which rule, sizes in bytes,
    error where lossy.

    ``error`` has ``max_abs``, ``rms``, ``snr_db`` and ``cosine``; None where ``exact`` or where it was not measured.
    ``sparsity`` is the share of the values that structured pruning left out, 0 to 1; they count in the error.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    codec: str
    source_codec: str
    action: str
    rule: str
    exact: bool
    source_nbytes: int
    nbytes: int
    error: Mapping[str, float] | None = None
    sparsity: float = 0.0

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """A finished conversion.

    Sizes in bytes: ``source_size`` and ``size`` of all weight files, ``source_nbytes`` of the source's stored parts
    alone; ``seconds`` of wall time. ``warnings`` say what was asked for and had no effect.
    """

    source: str
    destination: str
    format: str
    recipe: str
    tensors: Sequence[TensorReport]
    source_nbytes: int
    source_size: int
    size: int
    seconds: float
    files: Sequence[str]
    companions: Sequence[str] = ()
    resumed: int = 0
    notes: Sequence[str] = field(default_factory=tuple)
    warnings: Sequence[str] = ()

    @property
    def elements(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Bits of the result's files per element of its tensors."""
        return 8 * self.size / max(self.elements, 1)

    @property
    def exact(self) -> bool:
        """Whether every value of every tensor survives."""
        return all(tensor.exact for tensor in self.tensors)

    @property
    def actions(self) -> dict[str, int]:
        """How many tensors were moved, repacked, decoded, encoded."""
        return dict(Counter(tensor.action for tensor in self.tensors))

    @property
    def pruned(self) -> Sequence[TensorReport]:
        """The tensors that lack blocks."""
        return [tensor for tensor in self.tensors if tensor.sparsity]

    @property
    def sparsity(self) -> float:
        """Share of the pruned tensors' values that is left out, 0 to 1."""
        return sum(item.sparsity * item.elements for item in self.pruned) / max(
            sum(item.elements for item in self.pruned), 1
        )

    @property
    def worst(self) -> TensorReport | None:
        """The lossy tensor with the lowest signal-to-noise ratio."""
        lossy = [tensor for tensor in self.tensors if tensor.error]
        return min(lossy, key=lambda tensor: (tensor.error or {})["snr_db"], default=None)


def tensor_report(step: Step, nbytes: int, error: ErrorStats | None) -> TensorReport:
    """Describe a finished step."""
    return TensorReport(
        name=step.tensor.name,
        shape=step.tensor.shape,
        dtype=step.spec.dtype,
        codec=step.spec.codec,
        source_codec=step.tensor.codec,
        action=step.action,
        rule=step.rule,
        exact=step.exact,
        source_nbytes=step.tensor.nbytes,
        nbytes=nbytes,
        error=error.summary() if error is not None and error.count else None,
        sparsity=_sparsity(step.spec.params) if step.spec.codec == "sparse_blocks" else 0.0,
    )


def retyped(steps: Sequence[Step]) -> tuple[dict[str, str], str]:
    """Return which floating-point type most elements of each became where that is another, and which most have now."""
    became: dict[str, Counter[str]] = {}
    for step in steps:
        if step.tensor.dtype in FLOATS and step.spec.dtype in FLOATS:
            became.setdefault(step.tensor.dtype, Counter())[step.spec.dtype] += step.tensor.size
    most = {was: count.most_common(1)[0][0] for was, count in became.items()}
    total: Counter[str] = sum(became.values(), Counter())
    changed = {was: now for was, now in most.items() if was != now}
    return changed, total.most_common(1)[0][0] if total else ""


def _sparsity(params: Mapping[str, Any]) -> float:
    return 1.0 - int(params["kept"]) / max(int(params["channels"]), 1)
