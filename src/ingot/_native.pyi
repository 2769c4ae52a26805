"""Types of the native core."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Maybe = Array | None
Buffer = bytes | bytearray | memoryview

def isa() -> str: ...
def best_isa(leaf1_ecx: int, leaf7_ebx: int, extended_ecx: int, xcr0: int) -> str: ...
def available_isas() -> list[str]: ...
def set_isa(name: str) -> None: ...
def release_freed() -> None: ...
def share_team(address: int) -> None: ...
def crc32c(data: Buffer, value: int = 0) -> int: ...
def crc32c_combine(first: int, second: int, second_size: int) -> int: ...
def fnv1a64(data: Buffer) -> int: ...
def table_cbor(
    data: Buffer, schema: Any, under: str, max_depth: int, max_items: int, deterministic: bool
) -> tuple[Any, ...] | None: ...
def spelled(
    data: Buffer, starts: Array, lengths: Array, forms: Sequence[tuple[bytes, int]], digits: bytes, out: Array
) -> None: ...
def same(data: Buffer, starts: Array, rows: Array, out: Array) -> None: ...
def zeros(data: Buffer, starts: Array, lengths: Array) -> bool: ...
def any_ends(names: list[str], endings: Sequence[str]) -> bool: ...
def map_file(descriptor: int, offset: int, size: int, writable: bool) -> Array: ...
def crc32c_by_table(data: Buffer, value: int = 0) -> int: ...
def crc32c_has_instruction() -> bool: ...
def cbor_loads(data: Buffer, max_depth: int, max_items: int, deterministic: bool) -> Any: ...
def cbor_dumps(value: Any, max_depth: int, sorted: bool) -> bytes: ...

AFFINE_CANDIDATES: int

class AffineLayout:
    def __init__(
        self,
        *,
        cols: int,
        group: int,
        bits: int,
        signed: bool,
        msb: bool,
        per_tensor: bool,
        row_bytes: int,
        offset: bool = False,
    ) -> None: ...

class PackedMatrix:
    def __init__(
        self,
        packed: Array,
        scales: Array,
        zeros: Maybe,
        *,
        rows: int,
        cols: int,
        group: int,
        bits: int,
        signed: bool,
        per_tensor: bool,
        row_bytes: int,
        offset: bool,
        zero_point: int,
        scale_dtype: str,
    ) -> None: ...
    def matmul(self, x: Array, bias: Maybe, out: Array, dtype: str, bias_dtype: str, threads: int) -> None: ...
    def gemm(self, x: Array, bias: Maybe, out: Array, dtype: str, bias_dtype: str, threads: int) -> None: ...
    def int8(
        self, x: Array, bias: Maybe, out: Array, dtype: str, bias_dtype: str, threads: int, dots: bool = True
    ) -> None: ...

class DecoderLayer:
    def __init__(
        self,
        matrices: list[PackedMatrix],
        biases: list[Maybe],
        norms: list[Maybe],
        epsilons: list[float],
        width: int,
        dtype: str,
    ) -> None: ...
    def project(
        self, x: Array, cosines: Array, sines: Array, queries: Array, keys: Array, values: Array, threads: int
    ) -> None: ...
    def finish(self, attended: Array, x: Array, out: Array, threads: int) -> None: ...
    def step(
        self,
        x: Array,
        cosines: Array,
        sines: Array,
        keys: Array,
        values: Array,
        used: int,
        scale: float,
        out: Array,
        threads: int,
    ) -> None: ...

def attend(
    queries: Array, keys: Array, values: Array, tokens: int, out: Array, dtype: str, scale: float, threads: int
) -> None: ...
def affine_dequantize(
    packed: Array, scales: Array, zeros: Maybe, out: Array, layout: AffineLayout, scale_dtype: str, dtype: str
) -> None: ...
def affine_add(
    packed: Array,
    scales: Array,
    zeros: Maybe,
    base: Array,
    out: Array,
    layout: AffineLayout,
    scale_dtype: str,
    dtype: str,
) -> None: ...
def affine_quantize(
    values: Array,
    dtype: str,
    packed: Array,
    scales: Array,
    zeros: Maybe,
    layout: AffineLayout,
    scale_dtype: str,
    method: str,
    zero_point: int = -1,
) -> tuple[int, int]: ...
def affine_offsets(scales: Array, points: Array, out: Array, dtype: str) -> bool: ...
def affine_points(scales: Array, offsets: Array, low: float, high: float, out: Array, dtype: str) -> bool: ...
def affine_shift(points: Array, dtype: str, delta: float, out: Array, target: str) -> bool: ...
def affine_equal(values: Array, dtype: str, wanted: float) -> bool: ...
def affine_integers(values: Array, dtype: str, low: float, high: float, out: Array) -> bool: ...
def affine_numbers(integers: Array, signed: bool, out: Array, dtype: str) -> None: ...
def affine_same(values: Array, dtype: str, out: Array, target: str) -> bool: ...
def affine_range(values: Array, dtype: str) -> tuple[float, float, int]: ...
def affine_candidates(
    low: float, high: float, bits: int, signed: bool, symmetric: bool, scale_dtype: str, scales: Array, zeros: Array
) -> None: ...
def affine_errors(
    values: Array, dtype: str, bits: int, signed: bool, symmetric: bool, scales: Array, zeros: Array, totals: Array
) -> None: ...
def cast(values: Array, dtype: str, out: Array, target: str) -> None: ...
def tca_tbe_encode(
    values: Array,
    start: int,
    counts: Array,
    bitmap1: Array,
    bitmap2: Array,
    bitmap3: Array,
    high: Array,
    fallback: Array,
) -> tuple[int, int]: ...
def tca_tbe_decode(
    counts: Array, bitmap1: Array, bitmap2: Array, bitmap3: Array, high: Array, fallback: Array, start: int, out: Array
) -> int: ...
def bf16_exponents(values: Array, counts: Array) -> None: ...
def pair_stats(
    reference: Array, dtype: str, other: Array, other_dtype: str
) -> tuple[int, float, float, float, float, float, int, int]: ...
def pair_error(reference: Array, dtype: str, other: Array, other_dtype: str) -> float: ...
def delta_encode(base: Array, tuned: Array, chunk: int, floats: bool, shift: int, out: Array, sizes: Array) -> int: ...
def delta_apply(
    planes: Array, sizes: Array, chunk: int, last: int, floats: bool, shift: int, base: Array, out: Array
) -> tuple[int, int]: ...
def int4_add(
    packed: Array,
    first: int,
    table: Array,
    positions: Array,
    values: Array,
    gaps: bool,
    base: Array,
    out: Array,
    back: Maybe,
    less: bool,
    dtype: str,
) -> None: ...
def sign_add(
    bits: Array, first: int, scales: Array, base: Array, out: Array, back: Maybe, less: bool, dtype: str
) -> None: ...
def placed_add(
    positions: Array, origin: int, values: Array, base: Array, out: Array, back: Maybe, less: bool, dtype: str
) -> None: ...
def differences(tuned: Array, base: Array, out: Array, dtype: str) -> None: ...
def changed_words(old: Array, fresh: Array, gaps: Array, steps: Array) -> int: ...
def entropy_encode(values: Array, chunk: int, max: bool, joint: bool, out: Array, sizes: Array) -> int: ...
def entropy_decode(planes: Array, sizes: Array, chunk: int, out: Array) -> tuple[int, int]: ...
def symbols_encode(symbols: Array, unit: int, contexts: Array, count: int, pairs: bool, out: Array) -> int: ...
def symbols_decode(data: Array, unit: int, contexts: Array, count: int, pairs: bool, out: Array) -> int: ...
def move_bits(source: Array, target: Array, records: int, fields: Array) -> None: ...
def ggml_decode(type: str, blocks: Array, grid: Maybe, out: Array, dtype: str) -> bool: ...
def ggml_encode(
    type: str, values: Array, dtype: str, importance: Maybe, search: bool, grid: Maybe, blocks: Array
) -> tuple[int, int]: ...
def ggml_grid_nearest(
    type: str,
    values: Array,
    scales: Array,
    weights: Array,
    grid: Array,
    entries: Array,
    negative: Array,
    down: Array,
    decoded: Array,
) -> None: ...
def ggml_grid_compose(
    type: str, d: Array, steps: Array, entries: Array, negative: Array, down: Array, blocks: Array
) -> None: ...
def ggml_pack(type: str, codes: Array, scales: Array, minima: Maybe, blocks: Array) -> None: ...
def ggml_compose(
    type: str, codes: Array, d: Array, dmin: Maybe, steps: Maybe, minimums: Maybe, blocks: Array
) -> None: ...
def ggml_unpack(type: str, blocks: Array, codes: Array, scales: Array, minima: Maybe) -> None: ...
def kv_scores(
    queries: Array,
    packed: Array,
    scales: Array,
    zeros: Array,
    blocks: int,
    bits: int,
    out: Array,
    first: int,
    threads: int,
) -> None: ...
def kv_values(
    weights: Array,
    first: int,
    packed: Array,
    scales: Array,
    zeros: Array,
    blocks: int,
    bits: int,
    group: int,
    out: Array,
    threads: int,
) -> None: ...
def words_turn(
    in_: Array, start: int, stride: int, rows: int, cols: int, out: Array, out_start: int, out_stride: int
) -> None: ...
def short_turn(in_: Array, each: int, rows: int, cols: int, out: Array, out_start: int, out_stride: int) -> None: ...
def lines_turn(in_: Array, lines: int, cols: int, to_awq: bool, out: Array) -> None: ...
def words_from_awq(
    in_: Array, start: int, stride: int, rows: int, cols: int, out: Array, out_start: int, out_stride: int
) -> None: ...
def words_to_awq(
    in_: Array, start: int, stride: int, rows: int, cols: int, out: Array, out_start: int, out_stride: int
) -> None: ...
def gather_column(records: Array, key: int, column: int, out: Array, dtype: str) -> tuple[bool, bool, bool]: ...
def top_prune(positions: Array, values: Array, count: int) -> int: ...
def range_between(values: Array, skipped: Array) -> tuple[float, float]: ...
def top_of(tuned: Array, base: Maybe, dtype: str, positions: Array, kept: Array) -> tuple[int, float, float]: ...
def top_collect(
    tuned: Array, base: Maybe, dtype: str, bound: int, offset: int, positions: Array, kept: Array
) -> tuple[int, int, float, float, int, float]: ...
def int4_encode(
    tuned: Array,
    base: Maybe,
    dtype: str,
    before: float | None,
    skipped: Array,
    low: float,
    divisor: float,
    factor: float,
    packed: Array,
) -> None: ...
def int4_decode(
    packed: Array, first: int, table: Array, positions: Array, values: Array, gaps: bool, out: Array
) -> None: ...
def sign_encode(tuned: Array, base: Maybe, dtype: str, sums: Array, bits: Array) -> int: ...
def sign_decode(bits: Array, first: int, scales: Array, out: Array) -> None: ...
def place_values(positions: Array, values: Array, out: Array) -> None: ...
def first_unordered(positions: Array, last: int, limit: int) -> int: ...
def palette_decode(packed: Array, bits: int, tables: Array, ids: Maybe, run: int, phase: int, out: Array) -> None: ...
def palette_unpack(packed: Array, bits: int, out: Array) -> None: ...
def palette_pack(codes: Array, bits: int, out: Array) -> None: ...

class TrellisMatrix:
    def __init__(
        self,
        words: Array,
        values: Array,
        scales: Array,
        *,
        rows: int,
        cols: int,
        bits: int,
        group: int,
        band: int,
        scale_dtype: str,
        within: bool,
    ) -> None: ...
    def gemm(self, x: Array, bias: Maybe, out: Array, dtype: str, bias_dtype: str, threads: int) -> None: ...

class PaletteMatrix:
    def __init__(
        self, packed: Array, tables: Array, *, rows: int, cols: int, bits: int, dtype: str, within: bool
    ) -> None: ...
    def gemm(self, x: Array, bias: Maybe, out: Array, dtype: str, bias_dtype: str, threads: int) -> None: ...

class RoundingGrid:
    def __init__(
        self,
        levels: Array,
        uniform: bool,
        zeros: str,
        turned: bool,
        scales: str,
        steps: tuple[float, float, float] = ...,
    ) -> None: ...

def matrix_multiply(a: Array, b: Array, out: Array, threads: int = ...) -> None: ...
def matrix_multiply_add(
    a: Array, b: Array, out: Array, first: int, last: int, to: int, count: int, threads: int = ...
) -> None: ...
def matrix_factor(a: Array, own: Array, threads: int = ...) -> bool: ...
def rounding_scales(
    grid: RoundingGrid, values: Array, first: int, last: int, weights: Array, scales: Array, zeros: Maybe, group: int
) -> int: ...
def rounding_nearest(
    grid: RoundingGrid, values: Array, codes: Array, groups: Array, scales: Array, zeros: Maybe
) -> None: ...
def rounding_feedback(
    grid: RoundingGrid,
    columns: tuple[int, int, int],
    wanted: Array,
    targets: Array,
    factor: Array,
    errors: Array,
    codes: Array,
    groups: Array,
    scales: Array,
    zeros: Maybe,
    below: Maybe = ...,
    shifts: Maybe = ...,
    changes: Maybe = ...,
    start: int = ...,
) -> None: ...
def pairs_pack(rows: Array, first: int, depth: int, unit: float, words: Array) -> None: ...
def pairs_multiply_add(
    a: Array,
    columns: tuple[int, int],
    words: Array,
    depth: int,
    row: int,
    to: tuple[int, int],
    factor: float,
    unit: float,
    out: Array,
    threads: int = ...,
) -> None: ...
def rounding_descend(
    grid: RoundingGrid,
    inputs: Array,
    pairs: Array,
    outputs: Maybe,
    gradient: Array,
    product: Array,
    change: Array,
    unit: float,
    refit: bool,
    codes: Array,
    groups: Array,
    scales: Array,
    zeros: Maybe,
    units: Maybe = ...,
    zero_units: Maybe = ...,
    threads: int = ...,
) -> None: ...
def trellis_decode(
    words: Array, bits: int, rows: int, group: int, values: Array, scales: Array, first: int, out: Array, dtype: str
) -> None: ...
def trellis_search(
    bits: int, group: int, values: Array, weights: Array, scales: Array, windows: Array, wanted: Array, open: bool
) -> None: ...
def trellis_feedback(
    bits: int,
    group: int,
    values: Array,
    weights: Array,
    scales: Array,
    windows: Array,
    first: int,
    last: int,
    wanted: Array,
    targets: Array,
    factor: Array,
    errors: Array,
    below: Maybe = ...,
    diagonal: Maybe = ...,
    shift: Maybe = ...,
) -> None: ...
def palette_count(
    values: Array, dtype: str, cols: int, importance: Maybe, exponent: int, weights: Array, sums: Maybe
) -> int: ...
def palette_solve(weights: Array, sums: Maybe, dtype: str, centroids: Array, layers: bool = False) -> int: ...
def palette_assign(values: Array, dtype: str, thresholds: Array, codes: Array) -> None: ...
def palette_nearest(
    points: Array,
    centroids: Array,
    codes: Array,
    sums: Array,
    counts: Array,
    bounds: Maybe = None,
    moved: float = 0.0,
    moves: bool = False,
) -> float: ...
def palette_cells(points: Array, columns: Array, starts: Array, boxes: Array, places: Array) -> float: ...
def palette_codes(places: Array, starts: Array, codes: Array, out: Array) -> None: ...
def palette_step(
    columns: Array,
    starts: Array,
    boxes: Array,
    first: int,
    end: int,
    centroids: Array,
    codes: Array,
    owners: Array,
    sums: Array,
    counts: Array,
) -> None: ...
def palette_guess(
    points: Array, centroids: Array, codes: Array, slacks: Array, sums: Array, counts: Array
) -> float: ...
def palette_reach(before: Array | None, after: Array, reach: Array, lost: Array) -> None: ...
def palette_near(
    points: Array,
    centroids: Array,
    reach: Array,
    lost: Array,
    codes: Array,
    slacks: Array,
    sums: Array,
    counts: Array,
) -> None: ...
def palette_means(totals: Array, centroids: Array, squares: float, n: int, after: Array) -> tuple[float, float]: ...
def palette_spread(points: Array, draws: Array, chosen: Array) -> None: ...
def mask_count(mask: Array, n: int) -> int: ...
def mask_expand(mask: Array, values: Array, out: Array) -> None: ...
def mask_clear(mask: Array, out: Array) -> None: ...
def mask_select(mask: Array, values: Array, out: Array) -> None: ...
def scaled_decode(
    packed: Array,
    bits: int,
    high_first: bool,
    values: str,
    table: Maybe,
    scales: Array,
    scale_table: Maybe,
    cols: int,
    group: int,
    phase: int,
    out: Array,
    dtype: str,
) -> None: ...
