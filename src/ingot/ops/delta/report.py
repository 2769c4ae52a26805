"""What a diff or a patch did, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HALF = 0.5


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor of the fine-tune in a delta.

    ``op`` is ``apply``, ``replace`` or ``same``; ``nbytes`` are stored in the delta, ``tuned_nbytes`` in the fine-tune.
    ``exact`` tells whether patching gives its values bit for bit; ``error`` is that of the reconstructed weights
    (``max_abs``, ``rms``, ``snr_db``, ``cosine``), None where exact or not measured. ``left`` is the share of the
    difference's squared norm that patching does not bring: 0 for all of it there, 1 as far away as the base.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    op: str
    codec: str
    nbytes: int
    tuned_nbytes: int
    exact: bool
    error: Mapping[str, float] | None = None
    left: float | None = None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """A finished delta. Sizes in bytes: ``size`` of the file, ``tuned_nbytes`` of the fine-tune's stored tensors.

    ``base_id`` and ``result_id`` are content ids (``ops.identity``), None where the container has other ones:
    ``parent_hash`` is a ``.wdelta``'s. ``resumed`` tensors are from an earlier run.
    """

    base: str
    tuned: str
    destination: str
    format: str
    strategy: str
    tensors: Sequence[TensorDiff]
    removed: Sequence[str]
    tuned_nbytes: int
    size: int
    seconds: float
    base_id: str | None = None
    result_id: str | None = None
    parent_hash: str | None = None
    resumed: int = 0

    @property
    def share(self) -> float:
        """The delta's size as a share of the fine-tune's tensors."""
        return self.size / max(self.tuned_nbytes, 1)

    @property
    def exact(self) -> bool:
        """Whether patching gives the fine-tune bit for bit."""
        return all(tensor.exact for tensor in self.tensors)

    @property
    def ops(self) -> dict[str, int]:
        """How many tensors are applied, replaced, the same."""
        return dict(Counter(tensor.op for tensor in self.tensors))

    @property
    def short(self) -> list[TensorDiff]:
        """Tensors of whose difference patching leaves more than half, the worst first."""
        found = [tensor for tensor in self.tensors if tensor.left is not None and tensor.left > HALF]
        return sorted(found, key=lambda tensor: -(tensor.left or 0))

    @property
    def worst(self) -> TensorDiff | None:
        """The tensor with the lowest signal-to-noise ratio."""
        lossy = [tensor for tensor in self.tensors if tensor.error]
        return min(lossy, key=lambda tensor: (tensor.error or {})["snr_db"], default=None)


@dataclass(frozen=True, slots=True)
class PatchReport:
    """A finished patch. ``verified_base`` and ``verified`` tell what was proven: the base, the result.

    ``result_id`` is the content id of the result in the fine-tune's element types, where it was computed. ``resumed``
    tensors are from an earlier run.
    """

    base: str
    deltas: Sequence[str]
    destination: str
    format: str
    tensors: int
    ops: Mapping[str, int]
    size: int
    seconds: float
    verified_base: bool
    verified: bool
    files: Sequence[str]
    companions: Sequence[str] = ()
    result_id: str | None = None
    resumed: int = 0
