"""What moves exactly between families: every family's integers and small floats, and every format that may take them.

The table in ``spec/interop.md`` is made here (``tools/interop_table.py``); ``tests/oracles/test_matrix.py`` checks it.
Into GGUF and folders of known architectures, and into given graphs, tensors go through the views of a conversion.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ingot.artifacts.destination import STEM, Destination
from ingot.codecs.base import IN_F32
from ingot.codecs.table import CODECS
from ingot.conversion.onnx.into_graph import into_graph
from ingot.conversion.options import ConvertOptions
from ingot.conversion.placement import plan_exact
from ingot.conversion.prepare_source import prepare_source
from ingot.conversion.report import exactness
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.engine.steps import Repack
from ingot.engine.work import Step
from ingot.formats.base import Format
from ingot.formats.detect import FORMATS
from ingot.formats.gguf.format import GgufFormat
from ingot.formats.onnx.format import OnnxFormat
from ingot.model.checkpoint import Checkpoint
from ingot.model.layouts.affine import OFFSETS, PER_TENSOR, POINTS, ROW, ROWS_LSB, AffineLayout, Constant, Group, Zero
from ingot.model.layouts.alternatives import CODEBOOKS, UNPACKED
from ingot.model.layouts.dense import DenseLayout
from ingot.model.layouts.ggml import BLOCKS, TYPES, GgmlBlocksLayout
from ingot.model.layouts.scaled_codebook import HIGH_FIRST, Run, ScaledCodebookLayout, Tiles
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.naming.config import CONFIG
from ingot.reporting.report import Texts
from ingot.stores.location import Location
from ingot.testing.encoding import repacked
from ingot.views.nvfp4_scales import rounded_second_scales
from tests.support.onnx import Graph, numbers

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPE = (32, 256)
EXPERTS, STACK = "model.layers.0.mlp.experts.gate_up_proj", (2, 32, 64)
_LLAMA = {
    "model_type": "llama", "architectures": ["OneMatrix"],
    "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 32, "vocab_size": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GPT_OSS = {
    **_LLAMA, "model_type": "gpt_oss", "hidden_size": 32, "head_dim": 8, "num_local_experts": 2,
    "num_experts_per_tok": 1, "sliding_window": 8,
}  # fmt: skip
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128, None)
INTEGERS = ("zt", "gptq", "gptq-planes", "awq", "compressed-tensors", "mlx", "onnx")
"""Formats whose layers are integers with scales and zero points; ggml's blocks are listed by type."""
TARGETS = (
    "gguf",
    "gptq",
    "gptq-planes",
    "awq",
    "awq-gemv",
    "compressed-tensors",
    "mlx",
    "fp8",
    "modelopt",
    "bitsandbytes",
    "onnx MatMul",
    "onnx Gemm",
    "zt2",
    "squizd",
    "coreml",
    "npydir",
)
GRAPHS = {"onnx MatMul": "MatMul", "onnx Gemm": "Gemm"}
"""Operators that take a matrix in a given graph: ``MatMul`` one turned, ``Gemm`` (``transB``) one as most have it."""
SYMMETRIC, POINT, OFFSET = "symmetric", "zero points", "offsets"
YES, IF, TYPE, KNOWN = "yes", "if", "type", "known"


@dataclass(frozen=True, slots=True)
class Found:
    """One layer of a family, and how one format takes it.

    ``group`` are the columns that share a scale (None: a row), ``few`` whether scales have few bits. ``made`` is the
    layer as the format has it; None where it is decoded. ``rounded``: values are equal in the layer's type only;
    ``equal`` are the grades of what is repacked.
    ``known``: alone it is decoded, as part of a model of a known architecture it is moved or repacked.
    """

    family: str
    what: str
    group: int | None
    few: bool
    target: str
    source: Tensor
    made: Tensor | None
    rounded: bool = False
    known: bool = False
    equal: Texts = ()


def explore(targets: Sequence[str] = TARGETS) -> list[Found]:
    """Return every layer of every family beside every format; needs the package gguf, for names."""
    with TemporaryDirectory() as folder:
        return [
            Found(family, what, group, few, target, source, *_way(source, target, Path(folder)))
            for family, what, group, few, source in _sources()
            for target in targets
        ]


def _way(source: Tensor, target: str, folder: Path) -> tuple[Tensor | None, bool, bool, Texts]:
    """Return the tensor as a format has it, whether rounded, whether it gets there in a model that is known, grades."""
    made, equal = _in_graph(source, target, folder) if target in GRAPHS else _taken(source, target)
    if made is not None or target in GRAPHS or source.codec != ScaledCodebookLayout.codec:
        return made, bool(equal) and IN_F32 not in equal, False, equal
    rounded, known = _in_model(source, target, folder / CONFIG)
    return None, rounded, known, ()


def _taken(source: Tensor, target: str) -> tuple[Tensor | None, Texts]:
    format = FORMATS[target]
    return _made(source, plan_exact(source, format, ""), format)


def _made(source: Tensor, step: Step | None, format: Format) -> tuple[Tensor | None, Texts]:
    if not isinstance(step, Repack):
        return (None if step is None else source), ()
    made = repacked(step.repack, source)
    return replace(made, dtype=step.spec.dtype, decoder=CODECS[made.codec]), exactness(step, format, ()) or ()


def _in_graph(source: Tensor, target: str, folder: Path) -> tuple[Tensor | None, Texts]:
    """Return the tensor as a graph has it whose one weight it is; None where it is decoded, and for stacks."""
    if len(source.shape) != 2:
        return None, ()
    path, turned = folder / f"{target}.onnx", target == "onnx MatMul"
    if not path.exists():
        graph = Graph()
        graph.constant(NAME, numbers(SHAPE[::-1] if turned else SHAPE), "float")
        graph.node(GRAPHS[target], ["x", NAME], ["y"], () if turned else [("transB", 1)])
        path.write_bytes(graph.model())
    with into_graph(_alone(source), path) as view:
        (placed,) = view.values()
        if placed.codec == DenseLayout.codec:
            return None, ()
        format = OnnxFormat().for_attachments(view.attachments)
        return _made(placed, plan_exact(placed, format, ""), format)


def _in_model(source: Tensor, target: str, config: Path) -> tuple[bool, bool]:
    """Return whether values are rounded, and whether nothing is decoded, of a tensor in a model's folder."""
    config.write_text(json.dumps(_GPT_OSS if source.name == EXPERTS else _LLAMA))
    format = FORMATS[target]
    held = _alone(source, {CONFIG: str(config)})
    with prepare_source(
        held,
        Destination(Location.parse(""), True, format, format.file_name(STEM)),
        ConvertOptions("", "", no_tokenizer=True),
        {},
    ).checkpoint as view:
        packed = all(tensor.codec != DenseLayout.codec or tensor.size == 1 for tensor in view.values())
        known = packed and all(plan_exact(tensor, format, "") is not None for tensor in view.values())
    return known and bool(rounded_second_scales(held)) and target == GgufFormat.name, known


def _alone(source: Tensor, companions: Mapping[str, str] | None = None) -> Checkpoint:
    return Checkpoint({source.name: source}, format="zt", location="", companions=companions or {})


def _sources() -> Iterator[tuple[str, str, int | None, bool, Tensor]]:
    for bits in BITS:
        for zero in (SYMMETRIC, POINT, OFFSET):
            for few in (False, True) if zero == POINT else (False,):
                for group in GROUPS if bits in (4, 8) else GROUPS[1:2]:
                    plain = integers(bits, zero, group, few=few)
                    for family in INTEGERS:
                        made = plain if family == "zt" else _taken(plain, family)[0]
                        if made is not None:
                            yield family, f"{bits} bits, {zero}", group, few, made
    for kind in UNPACKED:
        yield "gguf", kind.upper(), None, False, blocks(kind)
    for family, what, layout in FLOATS:
        yield family, what, None, False, floats(layout)


def integers(bits: int, zero: str, group: int | None, *, few: bool) -> Tensor:
    """Return random integers with scales in f16, of 11 bits or of ``few``, so that products fit."""
    rng = np.random.default_rng(bits)
    kind: Zero = Constant(1 << (bits - 1))
    if zero != SYMMETRIC:
        kind = POINTS if zero == POINT else OFFSETS
    grid = ROW if group is None else Group(group)
    layout = AffineLayout(bits, grid, ROWS_LSB, False, kind, "f16", "f16")
    count = layout.scale_count(SHAPE)
    scales = rng.uniform(0.001, 0.01, count).astype(np.float16)
    if few:
        scales = np.ldexp(rng.integers(1, 8, count).astype(np.float32), -9).astype(np.float16)
    zeros = rng.integers(0, 1 << bits, count).astype(np.float16)
    zeros = rng.uniform(-0.1, 0.1, count).astype(np.float16) if zero == OFFSET else zeros
    codes = rng.integers(0, 256, (SHAPE[0], layout.row_bytes(SHAPE[1])), np.uint8)
    parts: dict[str, Array] = {"packed_weight": codes, "scales": scales}
    return Tensor.from_parts(layout, {**parts, "zeros": zeros} if layout.zeros else parts, SHAPE, NAME)


def blocks(kind: str) -> Tensor:
    """Return blocks with random integers and sound scales."""
    layout, rng, block = GgmlBlocksLayout(kind), np.random.default_rng(3), TYPES[kind]
    raw = rng.integers(0, 256, (SHAPE[0] * SHAPE[1] // block.elements, block.nbytes), np.uint8)
    for start, size in block.wide:
        if size == 2:  # numbers of f16 between 2^-9 and 2^-5, and the integers that stand beside them
            raw[:, start + 1] = rng.integers(0x18, 0x28, len(raw))
    if kind in CODEBOOKS and not block.wide:
        raw[:, : 1 if kind == "mxfp4" else 4] = rng.integers(100, 120, (len(raw), 1))
    return Tensor.from_parts(layout, {BLOCKS: memory_part(raw, "u8")}, SHAPE, NAME)


_MXFP4 = ScaledCodebookLayout(4, Group(32), "bf16", scales="f8_e8m0fnu", values="f4_e2m1fn")
_NVFP4 = replace(_MXFP4, grid=Group(16), scales="f8_e4m3fn")
_FP8 = replace(_MXFP4, bits=8, values="f8_e4m3fn", scales="f32")
FLOATS: Sequence[tuple[str, str, ScaledCodebookLayout]] = (
    ("compressed-tensors", "MXFP4", _MXFP4),
    ("mxfp4", "MXFP4, transposed", replace(_MXFP4, transposed=True)),
    ("compressed-tensors", "MXFP6", replace(_MXFP4, bits=6, values="f6_e2m3fn")),
    ("compressed-tensors", "MXFP8", replace(_MXFP4, bits=8, values="f8_e4m3fn")),
    ("mlx", "NVFP4", _NVFP4),
    ("modelopt", "NVFP4, multiplied", replace(_NVFP4, second="multiply")),
    ("compressed-tensors", "NVFP4, divided", replace(_NVFP4, second="divide")),
    ("fp8", "FP8, blocks of 128", replace(_FP8, grid=Tiles(128, 128))),
    ("fp8", "MXFP8, blocks of 1 x 32", replace(_FP8, grid=Tiles(1, 32), scales="f8_e8m0fnu")),
    ("fp8", "FP8, one scale", replace(_FP8, grid=PER_TENSOR)),
    ("modelopt", "FP8, one scale", replace(_FP8, grid=PER_TENSOR)),
    ("onnx Gemm", "FP8, one scale", replace(_FP8, grid=PER_TENSOR, dtype="f32")),
    ("fp8", "FP8, rows", replace(_FP8, grid=ROW)),
    ("onnx Gemm", "FP8, rows", replace(_FP8, grid=ROW, dtype="f32")),
    ("compressed-tensors", "FP8, rows", replace(_FP8, grid=ROW)),
    ("bitsandbytes", "NF4", ScaledCodebookLayout(4, Run(64), "bf16", values="nf4", order=HIGH_FIRST)),
)


def floats(layout: ScaledCodebookLayout) -> Tensor:
    """Return random indices with sound scales."""
    rng, parts = np.random.default_rng(5), {}
    name, shape = (EXPERTS, STACK) if layout.transposed else (NAME, SHAPE)
    for spec in layout.part_specs(shape):
        size = spec.length or 0
        if spec.role == "indices":
            most = 120 if layout.bits == 8 else 256  # no NaN
            parts[spec.role] = memory_part(rng.integers(0, most, size, np.uint8), "u8")
        elif spec.dtype == "u8":
            parts[spec.role] = memory_part(rng.integers(100, 126, size, np.uint8), "u8", spec.type)
        else:
            values = rng.uniform(0.001, 0.01, size // 4).astype(numpy_dtype(spec.dtype))
            parts[spec.role] = memory_part(values, spec.dtype)
    return Tensor.from_parts(layout, parts, shape, name)


def table(found: Sequence[Found]) -> str:
    """Return the matrix as Markdown: a row for each kind of layer, a column for each format."""
    rows: dict[tuple[str, str], dict[str, list[Found]]] = {}
    for item in found:
        rows.setdefault((item.family, item.what), {}).setdefault(item.target, []).append(item)
    shown: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for (family, what), cells in rows.items():
        line = tuple(_cell(cells[target], target, rows) for target in TARGETS)
        shown.setdefault(line, {}).setdefault(family, []).append(what)
    lines = [f"| from | {' | '.join(TARGETS)} |", f"| --- |{' --- |' * len(TARGETS)}"]
    for line, families in shown.items():
        names = "; ".join(f"{family}: {_merged(whats)}" for family, whats in families.items())
        lines.append(f"| {names} | {' | '.join(line)} |")
    return "\n".join(lines)


def _merged(whats: Sequence[str]) -> str:
    """Join what differs in bits alone."""
    by_zero: dict[str, list[str]] = {}
    for what in whats:
        bits, said, zero = what.partition(" bits, ")
        by_zero.setdefault(zero if said else what, []).append(bits)
    return ", ".join(key if bits == [key] else f"{key} {' '.join(bits)}" for key, bits in by_zero.items())


def _cell(items: Sequence[Found], target: str, rows: Mapping[tuple[str, str], Mapping[str, Sequence[Found]]]) -> str:
    """Return how a format takes layers: in which groups exactly, where numbers fit, or what is in the way."""
    exact = {item.group for item in items if item.made is not None}
    if any(item.known for item in items):
        return f"{KNOWN}, {TYPE}" if any(item.rounded for item in items) else KNOWN
    if not exact:
        return _obstacle(items[0], target, rows)
    groups = {item.group for item in items}
    usual = [item for item in items if not item.few]
    how = YES if any(item.made is not None for item in usual) else IF
    how = TYPE if any(item.rounded for item in items) else how
    if exact == groups:
        return how
    return f"{how}: {' '.join('row' if group is None else str(group) for group in GROUPS if group in exact)}"


def _obstacle(item: Found, target: str, rows: Mapping[tuple[str, str], Mapping[str, Sequence[Found]]]) -> str:
    """Return what has to be otherwise for a layer to be taken: order, zero points, bits, groups; else the kind."""
    if item.what.endswith("transposed"):
        return "order"
    family, what = item.family, item.what
    own = UNPACKED.get(what.lower()) if family == "gguf" else None
    if isinstance(own, AffineLayout):
        family, what = "zt", f"{own.bits} bits, {OFFSET if own.offset else SYMMETRIC}"
    bits, said, zero = what.partition(" bits, ")
    if not said:
        lying = rows[item.family, item.what].get("onnx Gemm", ()) if target == "onnx MatMul" else ()
        return "order" if any(other.made is not None for other in lying) else "kind"

    def taken(what: str) -> bool:
        return any(other.made is not None for other in rows.get((family, what), {}).get(target, ()))

    if isinstance(own, AffineLayout) and taken(what):
        return "group" if own.group_size not in GROUPS else "scales"
    if zero != SYMMETRIC and any(taken(f"{bits} bits, {other}") for other in (SYMMETRIC, POINT)):
        return "zero"
    return "bits" if any(taken(f"{other} bits, {every}") for other in BITS for every in (SYMMETRIC, zero)) else "kind"
