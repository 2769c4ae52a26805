"""The tensor names of EAGLE-3 draft heads, and how they follow from shapes if a file contains no names.

The names follow ``SafeAILab/EAGLE`` (``model/cnets.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

TO_TARGET, IN_DRAFT = "d2t", "t2d"
"""Names of two tensors: the offset of each draft token to its target token, and a mask over the target's tokens."""

MATRICES = (
    *(f"self_attn.{projection}_proj.weight" for projection in "qkvo"),
    *(f"mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")),
)
NORMS = ("hidden_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight")
PLACEHOLDER = "draft"
"""The beginning of placeholder names, for files without names: ``draft.{layer}.{index}``."""

_PLACEHOLDER_NAME = re.compile(rf"{PLACEHOLDER}\.[0-9]+\.[0-9]+")
_LAYER = "midlayer."
_Q, _K, _V, _O, _GATE, _UP, _DOWN = (_LAYER + name for name in MATRICES)
_MAPPING = {"i64": TO_TARGET, "bool": IN_DRAFT}
# Roles are assigned in this order: each assignment fixes sizes that constrain the later roles.
_ROLES = (_K, _V, _Q, _O, _GATE, _UP, _DOWN, "fc.weight", "lm_head.weight")

Matrices = Mapping[int, tuple[int, int]]


def is_nameless(names: Iterator[str] | Sequence[str] | Mapping[str, object]) -> bool:
    """Return whether all names of a draft head are placeholders, which a reader uses for files without names."""
    names_list = list(names)
    return bool(names_list) and all(_PLACEHOLDER_NAME.fullmatch(name) for name in names_list)


def names_by_shape(tensors: Sequence[tuple[tuple[int, ...], str]], layers: int) -> list[str]:
    """Return a name for each tensor of a draft head from shapes and element types in file order.

    If the shapes determine the roles uniquely, the result has the names of published heads. This needs a head of one
    layer, either with the final norm only or with all four norms. Tensors of equal shape must have the published order:
    keys before values, gate before up. The order of the norms is: hidden state, input, after attention, final.
    Otherwise the names are placeholders ``draft.{layer}.{index}``, with equally many tensors per layer.
    """
    share = max(len(tensors) // max(layers, 1), 1)
    placeholders = [f"{PLACEHOLDER}.{min(index // share, max(layers, 1) - 1)}.{index}" for index in range(len(tensors))]
    names = {
        index: _MAPPING[dtype] for index, (shape, dtype) in enumerate(tensors) if len(shape) == 1 and dtype in _MAPPING
    }
    floats = {index: shape for index, (shape, _) in enumerate(tensors) if index not in names}
    vectors = [index for index, shape in floats.items() if len(shape) == 1]
    matrices = {index: (shape[0], shape[1]) for index, shape in floats.items() if len(shape) == 2}
    hidden = {floats[index][0] for index in vectors}
    if layers != 1 or len(hidden) != 1 or len(vectors) + len(matrices) != len(floats) or len(matrices) != len(_ROLES):
        return placeholders
    roles = [*(_LAYER + norm for norm in NORMS), "norm.weight"]
    if len(vectors) not in (1, len(roles)) or len(set(names.values())) not in (0, 2) or len(names) not in (0, 2):
        return placeholders
    names |= dict(zip(vectors, roles[-len(vectors) :], strict=True))
    assignments = list(islice(_assignments(matrices, hidden.pop(), {}), 2))
    if len(assignments) != 1:
        return placeholders
    names |= {index: role for role, index in assignments[0].items()}
    return [names[index] for index in range(len(tensors))]


def _assignments(matrices: Matrices, hidden: int, assigned: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield each complete assignment of roles to indices of ``matrices`` that contains the entries of ``assigned``."""
    if len(assigned) == len(_ROLES):
        yield dict(assigned)
        return
    role = _ROLES[len(assigned)]
    for index, shape in matrices.items():
        if index not in assigned.values() and _fits(role, index, shape, matrices, hidden, assigned):
            yield from _assignments(matrices, hidden, {**assigned, role: index})


def _fits(
    role: str, index: int, shape: tuple[int, int], matrices: Matrices, hidden: int, assigned: Mapping[str, int]
) -> bool:
    rows, cols = shape
    if role in (_K, _Q):
        return cols == 2 * hidden
    if role in (_V, _UP):
        twin = assigned[_K if role == _V else _GATE]
        return shape == matrices[twin] and index > twin
    if role in (_O, _DOWN):
        return shape == (hidden, matrices[assigned[_Q if role == _O else _GATE]][0])
    return cols % 3 == 0 and rows == hidden if role == "fc.weight" else cols == hidden
