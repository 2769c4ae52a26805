"""Translation of an adapter's changes between the tensor names of transformers and llama.cpp, in both directions.

The names, the orders of rows and the stacks of experts are taken from the base's translation plan
(``translate.tensor_plan``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingot.adapters.record import Addition, Change, Factor, LowRank, Replacement
from ingot.artifacts.companions import companion_config, is_translated
from ingot.errors import UnsupportedError
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Array
from ingot.naming.config import CONFIG
from ingot.translate import companions
from ingot.translate.families import FAMILIES, Family, family_of
from ingot.translate.tensor_plan import plan_to_gguf, plan_to_model
from ingot.translate.unsupported_families import require_family, unknown_architecture

RULE = "adapter.unsupported"


@dataclass(frozen=True, slots=True)
class NameTable:
    """The names of a base's tensors in transformers and in llama.cpp.

    Parameters
    ----------
    family : Family
    names : mapping
        The name in llama.cpp, keyed by the name in transformers.
    order : mapping
        The order of rows in llama.cpp, keyed by the name in transformers: row ``i`` is row ``order[i]`` of
        transformers.
    stacks : mapping
        The names of experts in transformers, keyed by the name of their stack in llama.cpp.
    """

    family: Family
    names: Mapping[str, str]
    order: Mapping[str, Array]
    stacks: Mapping[str, Sequence[str]]


def name_table(base: Checkpoint) -> NameTable:
    """Return the names of the tensors of a base, which is a model folder or a GGUF file.

    Raises the errors of ``plan_to_gguf`` and ``plan_to_model``, such as ``architecture.unknown``.
    """
    if not is_translated(base):
        config = companion_config(base.companions, "architecture.companion")
        folder_family = require_family(config if CONFIG in base.companions else None, base.location)
        plan = plan_to_gguf(base, config, folder_family)
        return NameTable(folder_family, plan.names, plan.order, plan.stacks)
    arch = str(base.metadata.get("general.architecture"))
    files = companions.stored_files(base.metadata)
    declared = FAMILIES.get(str(companions.parse_file(files, CONFIG).get("model_type"))) if CONFIG in files else None
    family = declared if declared is not None and declared.arch == arch else family_of(arch, base.metadata)
    if family is None:
        raise unknown_architecture(base.metadata, base.location)
    plan = plan_to_model(base, base.metadata, family, base=family.base)
    order = {plan.names[old]: np.argsort(rows) for old, rows in plan.order.items()}
    return NameTable(family, {new: old for old, new in plan.names.items()}, order, plan.stacks)


def to_gguf_changes(changes: Mapping[str, Sequence[Change]], table: NameTable) -> dict[str, list[Change]]:
    """Return changes keyed by llama.cpp's tensor names, given changes keyed by transformers' names.

    Raises ``UnsupportedError`` ``adapter.unsupported``: llama.cpp has no counterpart of the tensor or of the change.
    """
    stack_of = {
        member: (stack, index) for stack, members in table.stacks.items() for index, member in enumerate(members)
    }
    result: dict[str, list[Change]] = {}
    experts: dict[str, dict[int, LowRank]] = {}
    for name, items in changes.items():
        for item in items:
            if name in stack_of and isinstance(item, LowRank):
                stack, index = stack_of[name]
                experts.setdefault(stack, {})[index] = item
            elif name in table.names:
                result.setdefault(table.names[name], []).append(_reordered(item, table.order.get(name), name, table))
            else:
                raise _unsupported(name, table.family)
    for stack, members in experts.items():
        result[stack] = [stack_experts(members, len(table.stacks[stack]), stack)]
    return result


def to_model_changes(changes: Mapping[str, Sequence[Change]], table: NameTable) -> dict[str, list[Change]]:
    """Return changes keyed by transformers' tensor names, given changes keyed by llama.cpp's names.

    Raises the errors of ``to_gguf_changes``.
    """
    model_names = {gguf: name for name, gguf in table.names.items()}
    result: dict[str, list[Change]] = {}
    for gguf, items in changes.items():
        for item in items:
            if gguf in table.stacks and isinstance(item, LowRank):
                for index, member in enumerate(table.stacks[gguf]):
                    result.setdefault(member, []).append(expert_of(item, index))
            elif gguf in model_names:
                name = model_names[gguf]
                order = table.order.get(name)
                back = None if order is None else np.argsort(order)
                result.setdefault(name, []).append(_reordered(item, back, gguf, table))
            else:
                raise _unsupported(gguf, table.family)
    return result


def _unsupported(name: str, family: Family) -> UnsupportedError:
    return UnsupportedError(
        f"the adapter changes a tensor without a counterpart in llama.cpp's {family.arch}; merge the adapter into its "
        "base (ingot merge)",
        rule=RULE,
        where=name,
    )


def _reordered(item: Change, order: Array | None, name: str, table: NameTable) -> Change:
    """Return a change with the rows of the weight reordered: new row ``i`` is old row ``order[i]``.

    If ``order`` is None, the rows keep their order.
    """
    if isinstance(item, Replacement) and table.family.shifted and name.endswith("norm.weight"):
        raise _unsupported(name, table.family)
    if order is None:
        return item
    if isinstance(item, LowRank):
        magnitude = None if item.magnitude is None else item.magnitude.take(order)
        return replace(item, b=item.b.take(order), magnitude=magnitude)
    if isinstance(item, Addition) or item.rows is None:
        return replace(item, values=item.values.take(order))
    raise _unsupported(name, table.family)


def expert_of(item: LowRank, index: int) -> LowRank:
    """Return the change of matrix ``index`` of a stack."""

    def matrix(factor: Factor) -> Factor:
        return factor.map(lambda values: values[index], factor.shape[1:])

    return replace(item, a=matrix(item.a), b=matrix(item.b), any_orientation=False)


def stack_experts(members: Mapping[int, LowRank], count: int, name: str) -> LowRank:
    """Return the changes of single experts as one change of their stack, which has ``count`` matrices.

    The change of an expert without an entry in ``members`` is zero.

    Raises ``UnsupportedError`` ``adapter.unsupported``: experts with different ranks, or with DoRA.
    """
    first = next(iter(members.values()))
    same = all(item.rank == first.rank and item.magnitude is None for item in members.values())
    if not same:
        raise UnsupportedError(
            "expected experts of one rank without DoRA, to join them in one stack; merge the adapter into its base "
            "(ingot merge)",
            rule=RULE,
            where=name,
        )

    def join(role: str) -> Factor:
        factors = {index: getattr(item.with_scale(first.scale), role) for index, item in members.items()}
        sample = next(iter(factors.values()))
        dtypes = {factor.dtype for factor in factors.values()}

        def load() -> Array:
            zeros = np.zeros(sample.shape, np.float32)
            return np.stack([factors[index].load() if index in factors else zeros for index in range(count)])

        return Factor(name, (count, *sample.shape), sample.dtype if len(dtypes) == 1 else "f32", load)

    return LowRank(join("a"), join("b"), first.scale)
