"""Modules that every layer of a family needs; the check also covers modules that all layers of a checkpoint lack."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ingot.translate.families import Family

_PROJECTIONS = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "dense", "Wqkv", "Wo"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "c_attn", "c_proj", "c_fc", "dense_h_to_4h", "Wi"),
        *("dense_4h_to_h", "w1", "w2", "w3", "in_proj", "conv1d", "conv", "fc1", "fc2", "fc11", "fc12"),
        *("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
    )
)
"""Last parts of names of modules. A layer has either all modules of a family with the same prefix, or none of them."""
_MIXERS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("in_proj", "conv1d", "out_proj"),
    ("up_proj", "gate_proj", "down_proj"),
)
"""The modules of each type of mixer, for families whose mixers have the same name prefix in layers of all types."""
_FEED_FORWARD = ("mlp", "feed_forward", "ffn")


def absent_modules(layers: Mapping[int, Collection[str]], family: Family) -> Iterator[str]:
    """Yield the name of each missing module, with the layer's index, or ``*`` if every layer lacks it.

    Parameters
    ----------
    layers : mapping
        The names of each layer's tensors, without the layer's prefix.
    family : Family
    """
    modules = {
        index: {name.rpartition(".")[0] for name in names if not name.endswith(".bias")}
        for index, names in layers.items()
    }
    for parent, group in _groups(family).items():
        partial = {index: group - present for index, present in modules.items() if group & present}
        for index, missing in sorted(partial.items()):
            yield from (f"{index}.{module}.weight" for module in sorted(missing))
        if not partial and _is_in_every_model(parent, family):
            yield from (f"*.{module}.weight" for module in sorted(group))
    yield from _absent_experts(modules, family)


def _groups(family: Family) -> dict[str, set[str]]:
    """Return sets of modules that a layer has together, keyed by their common name prefix."""
    results = {name for step in family.steps for name in step.into}
    groups: dict[str, set[str]] = {}
    for module in family.layer:
        parent, _, last = module.rpartition(".")
        is_query = family.latent or "self_attn.q_a_proj" in family.layer
        if last in _PROJECTIONS and module not in results and not (is_query and last == "q_proj"):
            groups.setdefault(parent, set()).add(module)
    mixed = [parent for parent, group in groups.items() if {f"{parent}.in_proj", f"{parent}.q_proj"} <= group]
    for parent in mixed:  # one name for the mixers of layers of several types
        group = groups.pop(parent)
        for members in _MIXERS:
            groups[f"{parent} of {members[0]}"] = {f"{parent}.{member}" for member in members} & group
    return groups


def _is_in_every_model(parent: str, family: Family) -> bool:
    if family.by_layer or family.patterns or family.steps or "shared" in parent:
        return False
    return not (parent.startswith(_FEED_FORWARD) and (family.experts is not None or family.interleaved))


def _absent_experts(modules: Mapping[int, Collection[str]], family: Family) -> Iterator[str]:
    """Yield a name with ``*`` as the expert's index for each matrix that all experts of a layer lack.

    Layers without any expert are skipped.
    """
    experts = family.experts
    if experts is None:
        return
    pattern = re.compile(rf"{re.escape(experts.prefix)}\.[0-9]{{1,6}}\.(.+)")
    for index, present in sorted(modules.items()):
        parts = {match[1] for module in present if (match := pattern.fullmatch(module))}
        missing = set(experts.modules) - parts if parts & set(experts.modules) else set()
        yield from (f"{index}.{experts.prefix}.*.{part}.weight" for part in sorted(missing))
