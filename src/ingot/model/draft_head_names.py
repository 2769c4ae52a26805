"""The tensors of an EAGLE-3 draft head: their names as published, and names by shapes where a file has none.

The names are those of ``SafeAILab/EAGLE`` (``model/cnets.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

TO_TARGET, IN_DRAFT = "d2t", "t2d"
"""Names of the mapping between vocabularies: an offset per draft token, and a mask over the target's tokens."""

MATRICES = (
    *(f"self_attn.{one}_proj.weight" for one in "qkvo"),
    *(f"mlp.{one}_proj.weight" for one in ("gate", "up", "down")),
)
NORMS = ("hidden_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight")
NAMELESS = "draft"
"""What names begin with where the file has none: ``draft.{layer}.{number}``."""

_NAMELESS = re.compile(rf"{NAMELESS}\.[0-9]+\.[0-9]+")
_LAYER = "midlayer."
_Q, _K, _V, _O, _GATE, _UP, _DOWN = (_LAYER + name for name in MATRICES)
_MAPPING = {"i64": TO_TARGET, "bool": IN_DRAFT}
# The order in which roles are tried: after each, what is left has to fit the sizes that are known by then.
_ROLES = (_K, _V, _Q, _O, _GATE, _UP, _DOWN, "fc.weight", "lm_head.weight")

Matrices = Mapping[int, tuple[int, int]]


def is_nameless(names: Iterator[str] | Sequence[str] | Mapping[str, object]) -> bool:
    """Whether a draft head's tensors have no names but those that a reader has to give."""
    own = list(names)
    return bool(own) and all(_NAMELESS.fullmatch(name) for name in own)


def names_by_shape(tensors: Sequence[tuple[tuple[int, ...], str]], layers: int) -> list[str]:
    """Return a name for each tensor of a head, given shapes and element types in the order of the file.

    Published names where the shapes leave one way to give them: a head of one layer, with the final norm alone or all
    four. Matrices of one shape and role are in the published order (keys before values, gate before up; norms of the
    hidden state, of the input, after attention, final). Else ``draft.{layer}.{number}``, as many to a layer.
    """
    share = max(len(tensors) // max(layers, 1), 1)
    plain = [f"{NAMELESS}.{min(at // share, max(layers, 1) - 1)}.{at}" for at in range(len(tensors))]
    names = {at: _MAPPING[dtype] for at, (shape, dtype) in enumerate(tensors) if len(shape) == 1 and dtype in _MAPPING}
    floats = {at: shape for at, (shape, _) in enumerate(tensors) if at not in names}
    vectors = [at for at, shape in floats.items() if len(shape) == 1]
    matrices = {at: (shape[0], shape[1]) for at, shape in floats.items() if len(shape) == 2}
    hidden = {floats[at][0] for at in vectors}
    if layers != 1 or len(hidden) != 1 or len(vectors) + len(matrices) != len(floats) or len(matrices) != len(_ROLES):
        return plain
    roles = [*(_LAYER + norm for norm in NORMS), "norm.weight"]
    if len(vectors) not in (1, len(roles)) or len(set(names.values())) not in (0, 2) or len(names) not in (0, 2):
        return plain
    names |= dict(zip(vectors, roles[-len(vectors) :], strict=True))
    ways = _ways(matrices, hidden.pop(), {})
    first, second = next(ways, None), next(ways, None)
    if first is None or second is not None:
        return plain
    names |= {at: role for role, at in first.items()}
    return [names[at] for at in range(len(tensors))]


def _ways(matrices: Matrices, hidden: int, taken: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield the ways to give the matrices the roles that are left."""
    if len(taken) == len(_ROLES):
        yield dict(taken)
        return
    role = _ROLES[len(taken)]
    for at, shape in matrices.items():
        if at not in taken.values() and _fits(role, at, shape, matrices, hidden, taken):
            yield from _ways(matrices, hidden, {**taken, role: at})


def _fits(
    role: str, at: int, shape: tuple[int, int], matrices: Matrices, hidden: int, taken: Mapping[str, int]
) -> bool:
    rows, cols = shape
    if role in (_K, _Q):
        return cols == 2 * hidden
    if role in (_V, _UP):
        twin = taken[_K if role == _V else _GATE]
        return shape == matrices[twin] and at > twin
    if role in (_O, _DOWN):
        return shape == (hidden, matrices[taken[_Q if role == _O else _GATE]][0])
    return cols % 3 == 0 and rows == hidden if role == "fc.weight" else cols == hidden
