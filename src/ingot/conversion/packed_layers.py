"""Packed layers in a folder for an inference server: which layers must be packed in the same way, or stay dense.

vLLM merges q_proj, k_proj and v_proj into one matrix, also gate_proj and up_proj, and all experts of a layer. It
refuses a folder in which parts of a merged matrix are packed and other parts are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ingot.codecs.repacked_encoder import REPACKED_FROM
from ingot.codecs.scaled_codebook.options import AMAX
from ingot.codecs.table import CODECS
from ingot.conversion.placement import KEEP, plan_decoded, plan_unchanged, why_not_exact
from ingot.engine.chunks import largest_magnitude
from ingot.engine.steps import DECODED, Encode
from ingot.engine.work import Step
from ingot.errors import UnsupportedError
from ingot.formats.base import Format
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.scaled_codebook import SECOND, ScaledCodebookLayout, Tiles
from ingot.model.spec import TensorSpec
from ingot.naming.names import merged_matrix
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Decision

_SCHEME = ("bits", "group_size", "granularity", "group", "values", "scales", "second")
_MAX_REASONS = 3
_MAX_NAMES = 4
_MERGES = (
    "vLLM multiplies by q_proj, k_proj and v_proj, by gate_proj and up_proj, and by all experts of a layer, as one"
)


@dataclass(frozen=True, slots=True)
class PackedLayers:
    """The steps of a conversion after changes for merged matrices, and notes on these changes."""

    steps: Sequence[Step]
    notes: Sequence[str] = ()


def unify_merged_layers(
    steps: Sequence[Step], format: Format, decisions: Mapping[str, Decision], *, general: bool
) -> PackedLayers:
    """Return the steps, changed so that all parts of a merged matrix are packed in the same way, and notes.

    vLLM merges some matrices, such as the projections of Q, K and V, and refuses parts that are packed in different
    ways. ``general`` is true if the decisions come from a preset, or if there is no recipe. A recipe file may pack only
    some parts of a merged matrix; then a note says that vLLM refuses the result.
    """
    if not format.traits.packed_codecs:
        return _share_second_scales(steps)
    notes = [*_smaller_groups(steps, format, decisions), *_decoded_layers(steps, format)]
    if not format.traits.merges:
        return PackedLayers(steps, notes)
    merged = _share_scheme(steps, format, general=general)
    even = _without_uneven_blocks(merged.steps, format) if general else PackedLayers(merged.steps)
    shared = _share_second_scales(even.steps)
    notes += [*merged.notes, *even.notes, *shared.notes, *_unlike_scales(shared.steps)]
    return PackedLayers(shared.steps, notes)


def repeated_scales(steps: Sequence[Step], groups: Mapping[str, int]) -> str:
    """Return a note on packed layers whose groups are smaller than in the source, so that scales are repeated.

    The note is empty if there are no such layers.
    """
    if not groups:
        return ""
    stored = [step.spec for step in steps if step.tensor.name in groups and step.spec.codec != DenseLayout.codec]
    if not stored:
        return ""
    sizes = ", ".join(str(size) for size in sorted({groups[spec.name] for spec in stored}))
    return (
        f"{len(stored)} layers have groups of {sizes} columns, with the same scales repeated: groups of the source do "
        "not divide the columns, or are of several sizes"
    )


def require_layers(steps: Sequence[Step], format: Format) -> None:
    """Raise ``UnsupportedError`` ``convert.nothing-packed`` if no layer of a folder for packed layers is packed."""
    if not format.traits.how_to_quantize or not len(steps):
        return
    if any(step.spec.codec in format.traits.packed_codecs for step in steps):
        return
    stored = [step for step in steps if step.action == DECODED]
    text = "the source is dense, and no recipe packs layers"
    if stored:
        text = f"none of the {len(stored)} quantized tensors fits: {why_not_exact(stored[0].tensor, format)}"
    raise UnsupportedError(
        f"nothing would be quantized in this {format.name} folder: {text}. To quantize: "
        f"{format.traits.how_to_quantize}. For a plain copy: --format safetensors",
        rule="convert.nothing-packed",
    )


def _share_scheme(steps: Sequence[Step], format: Format, *, general: bool) -> PackedLayers:
    shared = list(steps)
    dense_count = 0
    mixed_count = 0
    for indices in _merged(steps).values():
        packed = [index for index in indices if steps[index].spec.codec in format.traits.packed_codecs]
        dense = [steps[index] for index in indices if index not in packed]
        decoded = any(step.action == DECODED for step in dense)
        encoded = general and all(isinstance(steps[index], Encode) for index in packed)
        if packed and dense and (decoded or encoded):
            for index in packed:
                shared[index] = _as_dense(steps[index], format)
            dense_count += len(packed)
        else:
            mixed_count += len({_scheme(steps[index].spec, format) for index in indices}) > 1
    notes = []
    if dense_count:
        notes.append(
            f"{dense_count} more layers stay dense, because other parts of the same merged matrix do: {_MERGES}"
        )
    if mixed_count:
        notes.append(f"vLLM refuses {mixed_count} merged matrices, whose parts are packed in different ways: {_MERGES}")
    return PackedLayers(shared, notes)


def _without_uneven_blocks(steps: Sequence[Step], format: Format) -> PackedLayers:
    """Return the steps, changed so that a merged matrix is dense if blocks do not divide the rows of each part."""
    changed = list(steps)
    names = []
    size = 0
    for indices in _merged(steps).values():
        rows = _uneven_block_rows([steps[index].spec for index in indices])
        if len(indices) < 2 or not rows or not all(isinstance(steps[index], Encode) for index in indices):
            continue
        size = max(size, *rows)
        for index in indices:
            changed[index] = _as_dense(steps[index], format)
            names.append(steps[index].spec.name)
    if not names:
        return PackedLayers(steps)
    note = (
        f"{len(names)} layers stay dense: blocks of {size} rows do not divide all parts of a matrix that vLLM merges, "
        f"so that it would read other values: {', '.join(names[:_MAX_NAMES])}{', ...' * (len(names) > _MAX_NAMES)}"
    )
    return PackedLayers(changed, [note])


def _uneven_block_rows(specs: Sequence[TensorSpec]) -> list[int]:
    """Return the block heights that do not divide the number of rows of their matrix."""
    layouts = [
        (spec, ScaledCodebookLayout.from_tensor(spec)) for spec in specs if spec.codec == ScaledCodebookLayout.codec
    ]
    grids = [(spec, layout.grid) for spec, layout in layouts]
    return [grid.rows for spec, grid in grids if isinstance(grid, Tiles) and spec.shape[-2] % grid.rows]


def _share_second_scales(steps: Sequence[Step]) -> PackedLayers:
    """Return the steps with one second scale (NVFP4's scale per tensor) for all parts of a merged matrix.

    Reads these parts.
    """
    changed = list(steps)
    count = 0
    for indices in _merged(steps).values():
        parts = [index for index in indices if _has_new_second(steps[index])]
        if len(parts) < 2:
            continue
        amax = max(largest_magnitude(steps[index].tensor) for index in parts)
        count += 1
        for index in parts:
            changed[index] = _with_amax(steps[index], amax)
    notes = [f"{count} matrices that vLLM merges have one second scale for all their parts"] if count else []
    return PackedLayers(changed, notes)


def _second_scale_key(step: Step) -> float | str:
    """Return a key that is equal for parts with the same second scale.

    For a new scale, the key contains the largest magnitude from which it is computed; for a stored scale, the scale.
    """
    if isinstance(step, Encode):
        return f"of {step.options[AMAX]}" if AMAX in step.options else step.tensor.name
    return float(step.tensor.parts[SECOND].array()[0])


def _has_new_second(step: Step) -> bool:
    """Return whether a step computes a new second scale."""
    if not isinstance(step, Encode) or step.spec.codec != ScaledCodebookLayout.codec or REPACKED_FROM in step.options:
        return False
    return ScaledCodebookLayout.from_tensor(step.spec).second is not None and AMAX not in step.options


def _with_amax(step: Step, amax: float) -> Step:
    assert isinstance(step, Encode)
    options = {**step.options, AMAX: amax}
    encoder = CODECS[step.spec.codec].encoder(step.tensor.shape, step.tensor.dtype, options)
    return replace(step, encoder=encoder, options=options)


def _merged(steps: Sequence[Step]) -> Mapping[str, list[int]]:
    """Return the indices of the steps whose matrices vLLM merges, keyed by the name of the merged matrix."""
    positions: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        common = merged_matrix(step.spec.name)
        if common is not None:
            positions.setdefault(common, []).append(index)
    return positions


def _as_dense(step: Step, format: Format) -> Step:
    tensor = step.tensor
    rule = f"{step.rule} (dense: part of a merged matrix)"
    if tensor.codec == DenseLayout.codec:
        return plan_unchanged(tensor, format, rule)
    return plan_decoded(tensor, format, rule)


def _scheme(spec: TensorSpec, format: Format) -> Hashable:
    """Return the parameters that must be equal in all parts of a merged matrix; None for a dense tensor."""
    return tuple(str(spec.params.get(key)) for key in _SCHEME) if spec.codec in format.traits.packed_codecs else None


def _smaller_groups(steps: Sequence[Step], format: Format, decisions: Mapping[str, Decision]) -> Iterator[str]:
    """Yield a note on layers whose groups are smaller than the recipe requests, with the number of layers.

    There is one note for each combination of requested group size, stored group size and number of columns.
    """
    if format.traits.group_sizes is None:
        return
    counts: Counter[tuple[int, int, int]] = Counter()
    for step in steps:
        choice = decisions[step.tensor.name].choice if step.tensor.name in decisions else None
        requested = choice.options.get("group") if isinstance(choice, Choice) else None
        group = step.spec.params.get("group_size")
        cols = step.spec.shape[-1] if step.spec.shape else 0
        if isinstance(requested, int) and isinstance(group, int) and group < requested and cols % requested:
            counts[requested, group, cols] += 1
    for (requested, group, cols), count in counts.items():
        yield f"{count} layers are quantized in groups of {group}: groups of {requested} do not divide {cols} columns"


def _decoded_layers(steps: Sequence[Step], format: Format) -> Iterator[str]:
    """Yield a note on quantized layers that are decoded although no rule requires it: their number, and the reasons."""
    decoded = [step for step in steps if step.action == DECODED and step.rule == KEEP]
    by_layout: dict[Hashable, str] = {}
    reasons: Counter[str] = Counter()
    for step in decoded:
        tensor = step.tensor
        key = tensor.codec, tensor.shape, str(tensor.params)
        if key not in by_layout:
            by_layout[key] = why_not_exact(tensor, format)
        reasons[by_layout[key]] += 1
    if decoded:
        common = reasons.most_common(_MAX_REASONS)
        shown = "; ".join(f"{reason} ({count})" for reason, count in common)
        remaining = len(decoded) - sum(count for _, count in common)
        listing = f", named under {format.traits.dense_key} of config.json" if format.traits.dense_key else ""
        more = f"; other reasons ({remaining})" if remaining else ""
        yield f"{len(decoded)} quantized layers are decoded and stay dense{listing}: {shown}{more}"


def _unlike_scales(steps: Sequence[Step]) -> Iterator[str]:
    """Yield notes with the number of merged matrices for which vLLM would use wrong scales.

    There are two types: matrices with blocks that begin in one part and end in the next, and NVFP4 matrices whose parts
    have different second scales.
    """
    blocks = 0
    size = 0
    second = 0
    for indices in _merged(steps).values():
        parts = [steps[index] for index in indices if steps[index].spec.codec == ScaledCodebookLayout.codec]
        layouts = [ScaledCodebookLayout.from_tensor(step.spec) for step in parts]
        if len(parts) < 2:
            continue
        uneven = _uneven_block_rows([step.spec for step in parts])
        blocks += bool(uneven)
        size = max([size, *uneven])
        second_scales = {
            _second_scale_key(step) for step, layout in zip(parts, layouts, strict=True) if layout.second is not None
        }
        second += len(second_scales) > 1
    if blocks:
        yield (
            f"{blocks} matrices that vLLM merges have rows that blocks of {size} do not divide: vLLM refuses them, or "
            'reads other values; a scale for each row (group = "row") has no such limit'
        )
    if second:
        yield (
            f"{second} merged matrices have different second scales in their parts; vLLM uses one for all parts, and "
            "reads other values"
        )
