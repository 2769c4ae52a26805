"""A head beside embeddings that ``config.json`` says are tied: one of the two statements is no longer needed, or wrong.

transformers takes such a head for what it is where its values are others, and ties it where they are the same. mlx_lm
drops the weight, not its scales, and refuses the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.core.names import role_of
from ingot.model.account import Omission
from ingot.model.tensor import Tensor
from ingot.ops.delta.inputs import alike, equal_values

_HEAD = "lm_head.weight"
_KEY = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class Tied:
    """What is to be done: leave out the tensors in ``without``, or say in the config that nothing is tied."""

    without: Mapping[str, Omission] = field(default_factory=dict)
    untie: bool = False
    note: str = ""


def untangle(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tied:
    """Decide for a checkpoint; reads a head and its embeddings where the config ties them."""
    inner = config.get("text_config")
    if config.get(_KEY) is not True and not (isinstance(inner, Mapping) and inner.get(_KEY) is True):
        return Tied()
    head = next((name for name in tensors if name == _HEAD or name.endswith(f".{_HEAD}")), None)
    if head is None:
        return Tied()
    embeddings = [name for name in tensors if role_of(name) == "embedding" and alike(tensors[name], tensors[head])]
    same = next((name for name in embeddings if equal_values(tensors[name], tensors[head])), None)
    if same is not None:
        reason = f"the values of {same}, to which config.json ties it: {_KEY}"
        return Tied({head: Omission(reason, superseded=True)})
    return Tied(untie=True, note=f"config.json now says {_KEY} false: {head} has values of its own")
