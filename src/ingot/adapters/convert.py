"""Conversion of adapters between the file formats of PEFT, llama.cpp and mlx_lm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.adapters.match import match, with_split_experts
from ingot.adapters.names import NameTable, name_table, stack_experts, to_gguf_changes, to_model_changes
from ingot.adapters.options import AdapterConvertOptions
from ingot.adapters.read import open_adapter
from ingot.adapters.record import Adapter, Change, LowRank
from ingot.adapters.write import GGUF, MLX, PEFT, AdapterFiles, gguf_files, mlx_files, peft_files, write_files
from ingot.artifacts.companions import is_translated
from ingot.artifacts.open import open as open_checkpoint
from ingot.core.options import takes
from ingot.errors import UsageError
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location

_EXPERT = re.compile(
    r"(?P<start>.+)\.(?:mlp\.experts|block_sparse_moe\.experts)\.(?P<index>[0-9]{1,6})\.(?P<part>\w+)\.weight\Z"
)
_MLX_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class AdapterConvertReport(Reportable):
    """The result of converting an adapter: its format before and after, and how many base tensors it changes."""

    source: str
    destination: str
    source_kind: str
    target: str
    changed: Count
    size: Bytes
    notes: Texts = ()

    def report(self) -> Report:
        """Return the figures of the conversion, and the lines of the text report."""
        lines = [
            Line("{source} ({source_kind}) -> {destination} ({target})"),
            Line("{changed} tensors of the base are changed", "adapter"),
            Line("{size}", "size"),
            Line("{item}", "note", items="notes"),
        ]
        return Report(figures_of(self), lines)


@takes(AdapterConvertOptions, "adapter")
def convert_adapter(options: AdapterConvertOptions) -> AdapterConvertReport:
    """Convert an adapter to the file format of PEFT, llama.cpp or mlx_lm.

    Factors keep their values and element types. If the target format has one scale for all modules, scales that differ
    are multiplied into one factor in f32. llama.cpp and transformers order the rows of q and k differently; these rows
    are reordered.

    Returns
    -------
    AdapterConvertReport

    Raises
    ------
    UsageError
        ``adapter.option``: conversion from or to GGUF without ``base``; ``adapter.none``: no adapter.
    UnsupportedError
        ``adapter.base``, ``adapter.shape``: the adapter does not fit the base; ``adapter.unsupported``: the target
        format cannot express a change; the errors of ``open_adapter``.

    Examples
    --------
    >>> report = ingot.convert_adapter("style", "style-mlx", base="model")
    >>> report.target
    'mlx'
    """
    out = Location.parse(options.out)
    with open_adapter(options.adapter) as adapter:
        target = options.to or _target(out.display, adapter.writer)
        files, changed = _files(adapter, target, options)
        location, size = write_files(files, target, out, overwrite=options.overwrite)
        return AdapterConvertReport(adapter.location, location, adapter.writer, target, changed, size, files.notes)


def _target(out: str, source: str) -> str:
    if out.endswith(".gguf"):
        return GGUF
    return MLX if source == PEFT else PEFT


def _files(adapter: Adapter, target: str, options: AdapterConvertOptions) -> tuple[AdapterFiles, int]:
    base_name = adapter.base
    if options.base is None:
        if GGUF in (target, adapter.writer):
            raise UsageError(
                "expected --base with the adapter's base, which determines llama.cpp's names and the order of rows",
                rule="adapter.option",
                where=adapter.location,
            )
        changes = {name: list(items) for name, items in adapter.changes.items()}
        return _model_files(changes, target, base_name), len(changes)
    with open_checkpoint(options.base) as base:
        matched = match(adapter, base)
        translated = is_translated(base)
        table = name_table(base) if target == GGUF or translated else None
        if target == GGUF:
            assert table is not None
            changes = matched if translated else _in_gguf(matched, table)
            return gguf_files(changes, table.family.arch, base_name), len(changes)
        changes = to_model_changes(matched, table) if table is not None else matched
        return _model_files(changes, target, base_name), len(changes)


def _in_gguf(changes: Mapping[str, Sequence[Change]], table: NameTable) -> dict[str, list[Change]]:
    plain: dict[str, list[Change]] = {
        name: [item.plain() if isinstance(item, LowRank) else item for item in items] for name, items in changes.items()
    }
    return to_gguf_changes(with_split_experts(plain, table.stacks), table)


def _model_files(changes: Mapping[str, Sequence[Change]], target: str, base: str | None) -> AdapterFiles:
    return peft_files(changes, base) if target == PEFT else mlx_files(_with_mlx_stacks(changes), base)


def _with_mlx_stacks(changes: Mapping[str, Sequence[Change]]) -> dict[str, list[Change]]:
    """Return the changes with separate experts joined into the stacks that mlx_lm uses."""
    result: dict[str, list[Change]] = {}
    stacks: dict[str, dict[int, LowRank]] = {}
    for name, items in changes.items():
        expert = _EXPERT.match(name)
        if expert is None:
            result[name] = list(items)
            continue
        part = _MLX_PARTS.get(expert["part"], expert["part"])
        block = "block_sparse_moe" if "block_sparse_moe" in name else "mlp"
        stack = f"{expert['start']}.{block}.switch_mlp.{part}.weight"
        stacks.setdefault(stack, {}).update({int(expert["index"]): item for item in items if isinstance(item, LowRank)})
    for stack, members in stacks.items():
        result[stack] = [stack_experts(members, max(members) + 1, stack)]
    return result
