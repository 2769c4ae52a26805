"""Finding feed-forward networks among tensor names: which matrices share the intermediate channels of one FFN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ingot.core.numeric.dtypes import DTYPES
from ingot.model.tensor import Tensor
from ingot.naming.names import role_of

# (gate or None, up, down) as modules are called; the first row whose tensors are all there decides. Gated ones first:
# `w1` and `w2` alone are a plain FFN, with `w3` a gated one (Llama's own names, Mixtral).
_TRIPLES: tuple[tuple[str | None, str, str], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("wi_0", "wi_1", "wo"),
    ("ffn_gate", "ffn_up", "ffn_down"),
    (None, "up_proj", "down_proj"),
    (None, "fc1", "fc2"),
    (None, "fc_in", "fc_out"),
    (None, "c_fc", "c_proj"),
    (None, "lin1", "lin2"),
    (None, "dense_h_to_4h", "dense_4h_to_h"),
    (None, "intermediate.dense", "output.dense"),
    (None, "wi", "wo"),
    (None, "ffn_up", "ffn_down"),
    (None, "w1", "w2"),
)
_ENDS = ("weight", "kernel", "")
# Matrices that an FFN may hold and that no triple knows: told, not pruned.
_OTHERS = ("gate_up_proj", "w1_w3", "w12", "c_fc", "fc1", "up_proj", "dense_h_to_4h", "experts")
# Modules whose matrix lies as (in, out) in GPT-2 and as (out, in) in others of that name.
_EITHER = "c_fc"


@dataclass(frozen=True, slots=True)
class Ffn:
    """One FFN: the names of its matrices and how they lie.

    ``channel_axis`` maps each name to the dimension of its intermediate channels; ``inputs`` are gate (if there is one)
    and up, ``down`` the matrix that reads the channels.
    """

    inputs: tuple[str, ...]
    down: str
    channels: int
    channel_axis: Mapping[str, int]

    @property
    def module(self) -> str:
        """The name of the down projection's module."""
        return self.down.removesuffix(".weight").removesuffix(".kernel")


@dataclass(frozen=True, slots=True)
class Skipped:
    """An FFN that cannot be pruned, and why."""

    name: str
    reason: str


def find_ffns(tensors: Mapping[str, Tensor]) -> Iterator[Ffn | Skipped]:
    """Yield every FFN of a checkpoint in its order, experts each for themselves, and what looks like one and is not."""
    taken: set[str] = set()
    for name in tensors:
        if name in taken or role_of(name) != "mlp" or len(tensors[name].shape) < 2:
            continue
        names = _partners(name, tensors)
        if names is not None:
            taken |= {item for item in names if item is not None}
            yield _checked(names, tensors)
    for name in tensors:
        if name not in taken and _looks_like_one(name, tensors[name]):
            yield Skipped(name, "its channels cannot be told from its name: fused, stacked or unknown")


def _looks_like_one(name: str, tensor: Tensor) -> bool:
    words = name.split(".")
    return len(tensor.shape) > 1 and role_of(name) == "mlp" and any(word in words for word in _OTHERS)


def _partners(name: str, tensors: Mapping[str, Tensor]) -> tuple[str | None, str, str] | None:
    """Return gate, up and down of the FFN that ``name`` belongs to."""
    for triple in _TRIPLES:
        for word in filter(None, triple):
            for end in _ENDS:
                tail = f"{word}.{end}" if end else word
                if name != tail and not name.endswith(f".{tail}"):
                    continue
                prefix = name[: len(name) - len(tail)]
                names = [f"{prefix}{item}.{end}" if end else f"{prefix}{item}" for item in triple if item]
                if all(item in tensors and role_of(item) == "mlp" for item in names):
                    return (names[0], names[1], names[2]) if len(names) == 3 else (None, names[0], names[1])
    return None


def _checked(names: tuple[str | None, str, str], tensors: Mapping[str, Tensor]) -> Ffn | Skipped:
    gate, up, down = names
    inputs = tuple(name for name in (gate, up) if name is not None)
    for name in (*inputs, down):
        tensor = tensors[name]
        if tensor.dtype not in DTYPES or not DTYPES[tensor.dtype].is_float or DTYPES[tensor.dtype].bits < 8:
            return Skipped(down, f"{name} holds {tensor.dtype}, no weights that can be compared")
        if tensor.decoder is None:
            return Skipped(down, f"there is no decoder for {name}")
        if len(tensor.shape) != 2:
            return Skipped(down, f"{name} has {len(tensor.shape)} dimensions")
    axis = _axis(up, tensors)
    if axis is None:
        return Skipped(down, f"nothing tells which dimension of {up} is the intermediate one")
    channels = tensors[up].shape[axis]
    if any(tensors[name].shape != tensors[up].shape for name in inputs) or tensors[down].shape[1 - axis] != channels:
        return Skipped(down, f"its shapes do not fit: {[list(tensors[name].shape) for name in (*inputs, down)]}")
    return Ffn(inputs, down, channels, {**dict.fromkeys(inputs, axis), down: 1 - axis})


def _axis(up: str, tensors: Mapping[str, Tensor]) -> int | None:
    """Return the dimension of the intermediate channels in the up projection; None where it cannot be told.

    Linear layers are stored as (out, in), Flax's kernels as (in, out). GPT-2's ``c_fc`` is (in, out) too, that of its
    descendants is not; its bias, one value per intermediate channel, tells.
    """
    if up.endswith(".kernel"):
        return 1
    if _EITHER not in up.split("."):
        return 0
    bias = tensors.get(f"{up.removesuffix('weight')}bias")
    rows, cols = tensors[up].shape
    if bias is None or len(bias.shape) != 1 or rows == cols:
        return None
    return {rows: 0, cols: 1}.get(bias.shape[0])
