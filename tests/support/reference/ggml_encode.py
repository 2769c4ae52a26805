"""How floats become ggml's blocks by search (``spec/gguf.md``, "Search"), in NumPy: what the kernels equal to the bit.

All arithmetic is in f32 and in a fixed order: a sum over a group goes through its elements one after the other, a sum
over a block through its groups. Arrays hold a number for each group unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ingot.model.tensor import Array
from tests.support.reference.ggml_pack import PACKERS

F = np.float32
Nearest = Callable[[Array], Array]
_TINY, _ROUNDS, _SAME = F(2.0**-60), 2, F(2.0**-20)
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12], F)


def integers(low: int, high: int, t: Array) -> Array:
    """The nearest integer from ``low`` to ``high``, of two the even one."""
    rounded: Array = np.rint(np.where(t > low, np.where(t < high, t, F(high)), F(low)))
    return rounded


def iq4(t: Array) -> Array:
    """The nearest value of IQ4's table, of two the lower one."""
    values: Array = _IQ4[np.searchsorted((_IQ4[1:] + _IQ4[:-1]) / 2, t, side="left")]
    return values


def e2m1(t: Array) -> Array:
    """Twice the nearest value of E2M1, of two the smaller one."""
    found = _E2M1[np.searchsorted((_E2M1[1:] + _E2M1[:-1]) / 2, np.abs(t), side="left")]
    return np.where(t < 0, -found, found)


@dataclass(frozen=True)
class Kind:
    """A type: weights of a group, groups of a block, levels, limits of the integers, and where a search begins.

    ``starts`` are levels that the extreme value is put on or, for types with an offset (``most``), how many levels the
    range goes past the lowest and the highest one.
    """

    size: int
    groups: int
    nearest: Nearest
    starts: Sequence[float] | Sequence[tuple[float, float]] = ()
    most: int = 0
    low: int = 0
    high: int = 0

    @property
    def below(self) -> bool:
        """Whether offsets are not above 0."""
        return self.groups > 1 and self.most > 0


_AROUND = (
    *((0, 0), (0.25, 0.25), (-0.25, -0.25), (0.5, 0.5), (-0.5, -0.5), (0.5, 0), (0, 0.5), (-0.5, 0), (0, -0.5)),
    *((0.5, -0.5), (-0.5, 0.5), (-1, 0), (0, -1), (-1, -1)),
)
_IQ4_STARTS = (-143, -135, -127, -119, -111, -103, 129, 121, 113, 105, 97, 91)
_Q4 = (-9.2, -8.8, -8.4, -8, -7.6, -7.2, -6.8, 8.4, 8, 7.6, 7.2, 6.8, 6.4)
_Q5 = (-17.2, -16.8, -16.4, -16, -15.6, -15.2, -14.8, 16.4, 16, 15.6, 15.2, 14.8)
_Q8 = (-128, -127.5, 127.25, 127, 126.75, 126.5, 126.25, 126)
_Q6 = (-33.2, -32.8, -32.4, -32, -31.6, -31.2, 32, 31.6, 31.2, 30.8)
_Q3 = (-5, -4.6, -4.2, -3.8, -3.4, -3, 4, 3.6, 3.2, 2.8, 2.4)

KINDS = {
    "q4_0": Kind(32, 1, partial(integers, -8, 7), _Q4),
    "q4_1": Kind(32, 1, partial(integers, 0, 15), _AROUND, 15),
    "q5_0": Kind(32, 1, partial(integers, -16, 15), _Q5),
    "q5_1": Kind(32, 1, partial(integers, 0, 31), _AROUND, 31),
    "q8_0": Kind(32, 1, partial(integers, -128, 127), _Q8),
    "iq4_nl": Kind(32, 1, iq4, _IQ4_STARTS),
    "mxfp4": Kind(32, 1, e2m1),
    "q2_k": Kind(16, 16, partial(integers, 0, 3), _AROUND, 3, 0, 15),
    "q3_k": Kind(16, 16, partial(integers, -4, 3), _Q3, 0, -32, 31),
    "q4_k": Kind(32, 8, partial(integers, 0, 15), _AROUND, 15, 0, 63),
    "q5_k": Kind(32, 8, partial(integers, 0, 31), _AROUND, 31, 0, 63),
    "q6_k": Kind(16, 16, partial(integers, -32, 31), _Q6, 0, -128, 127),
    "iq4_xs": Kind(32, 8, iq4, _IQ4_STARTS, 0, -32, 31),
}


@dataclass(frozen=True)
class Groups:
    """Weights near 1 and what their errors weigh [groups, size], powers of two to there and back."""

    kind: Kind
    x: Array
    w: Array
    near: Array
    back: Array

    @property
    def weight(self) -> Array:
        return _sum(self.w)

    @property
    def total(self) -> Array:
        return _sum(self.w * self.x)

    def f16(self, numbers: Array) -> Array:
        """Numbers as f16 has them at the weights' own size."""
        rounded: Array = (numbers * self.back).astype(np.float16).astype(F) * self.near
        return rounded


def _sum(terms: Array) -> Array:
    """Add the elements of each group one after the other."""
    total = np.zeros(len(terms), F)
    for term in terms.T:
        total = total + term
    return total


def _inverse(numbers: Array) -> Array:
    return np.where(numbers != 0, F(1) / numbers, F(0))


def _over(above: Array, below: Array, *, where: Array) -> Array:
    return np.where(where, above / below, F(0))


def prepared(kind: Kind, x: Array, w: Array) -> Groups:
    """Bring each block near 1 by a power of two."""
    largest = np.abs(x).reshape(-1, kind.groups * kind.size).max(axis=1)
    exponent = np.clip(largest.view(np.uint32) >> 23, 1, 253).repeat(kind.groups)
    near, back = ((254 - exponent) << 23).view(F), (exponent << 23).view(F)
    return Groups(kind, x * near[:, None], w, near, back)


@dataclass(frozen=True)
class Sums:
    """What a scale and an offset leave, and the sums that better ones are found from."""

    error: Array
    q: Array
    qq: Array
    xq: Array


def measured(at: Groups, scale: Array, offset: Array) -> Sums:
    """Squared error, and sums over the levels that weights get."""
    moved = at.x - offset[:, None]
    q = at.kind.nearest(moved * _inverse(scale)[:, None])
    left, wq = moved - scale[:, None] * q, at.w * q
    return Sums(_sum(left * (at.w * left)), _sum(wq), _sum(q * wq), _sum(at.x * wq))


def fit_scales(at: Groups) -> Array:
    """The scale of each group by itself."""
    place = np.argmax(np.abs(at.x), axis=1)
    extreme = at.x[np.arange(len(at.x)), place]
    nothing = np.abs(extreme) < _TINY
    extreme = np.where(nothing, F(1), extreme)
    inverse, error, scale = F(1) / extreme, np.full(len(extreme), np.inf, F), np.zeros(len(extreme), F)
    for level in [*at.kind.starts, *[None] * _ROUNDS]:
        if level is None:
            factor, s = _inverse(scale), scale
        else:
            factor, s = inverse * F(level), extreme * (F(1) / F(level))
        t = at.x * factor[:, None]
        q = at.kind.nearest(t)
        r, wq = t - q, at.w * q
        rq, qq, rr = _sum(r * wq), _sum(q * wq), _sum(r * (at.w * r))
        more = _over(rq, qq, where=qq > 0)
        left = (rr - more * rq) * (s * s)
        better = left < error
        error, scale = np.where(better, left, error), np.where(better, s + more * s, scale)
    return np.where(nothing, F(0), scale)


def fit_affine(at: Groups) -> tuple[Array, Array]:
    """The scale and offset of each group by itself."""
    low, high, weight = at.x.min(axis=1), at.x.max(axis=1), at.weight
    if at.kind.below:
        low = np.minimum(low, F(0))
    flat = high - low < _TINY
    extent = np.where(flat, F(1), high - low)
    inverse, error = F(1) / extent, np.full(len(low), np.inf, F)
    scale, offset = np.zeros(len(low), F), np.zeros(len(low), F)
    for start in [*at.kind.starts, *[None] * _ROUNDS]:
        if start is None:
            base, factor, s = offset, _inverse(scale), scale
        else:
            below, above = (F(end) for end in start)
            steps = F(at.kind.most) + below + above
            s = extent * (F(1) / steps)
            base, factor = low + s * below, inverse * steps
        left, times, to = _regressed(at, weight, base, factor, s)
        better = (left < error) & (times > 0)
        error, scale = np.where(better, left, error), np.where(better, times, scale)
        offset = np.where(better, to, offset)
    return np.where(flat, F(0), scale), np.where(flat, low + F(0), offset)


def _regressed(at: Groups, weight: Array, base: Array, factor: Array, s: Array) -> tuple[Array, Array, Array]:
    """Return squared error, scale and offset for the codes that a grid gives."""
    t = (at.x - base[:, None]) * factor[:, None]
    q = at.kind.nearest(t)
    r, wq = t - q, at.w * q
    wr = at.w * r
    sq, qq, sr, rq, rr = _sum(wq), _sum(q * wq), _sum(wr), _sum(q * wr), _sum(r * wr)
    spread = weight * qq - sq * sq
    b = _over(weight * rq - sr * sq, spread, where=spread > _SAME * (weight * qq))
    a = _over(sr - b * sq, weight, where=weight > 0)
    left, to = (rr - a * sr - b * rq) * (s * s), base + a * s
    if at.kind.below:
        above = to > 0
        e = base * factor
        uq, uu = rq + e * sq, rr + (e * sr + e * (sr + e * weight))
        other = _over(uq, qq, where=qq > 0)
        left = np.where(above, (uu - other * uq) * (s * s), left)
        b, to = np.where(above, other, b), np.where(above, F(0), to)
    return left, s + b * s, to


@dataclass(frozen=True)
class Nested:
    """The scale and minimum of each group's block, the group's integers, and what they leave."""

    at: Groups
    d: Array
    least: Array
    steps: Array
    minimums: Array
    sums: Sums | None = None

    @property
    def products(self) -> tuple[Array, Array]:
        return self.d * self.steps, -(self.least * self.minimums)

    def looked(self) -> Nested:
        return replace(self, sums=measured(self.at, *self.products))

    def better(self, other: Nested, *, blocks: bool) -> Nested:
        """Take of ``other`` the groups, or whole blocks, that leave less."""
        assert self.sums is not None
        assert other.sums is not None
        ours, theirs = self.sums.error, other.sums.error
        count = self.at.kind.groups
        if blocks:
            ours, theirs = (_sum(one.reshape(-1, count)).repeat(count) for one in (ours, theirs))
        take = theirs < ours

        def pick(mine: Array, other: Array) -> Array:
            found: Array = np.where(take, other, mine)
            return found

        one, two = self.sums, other.sums
        sums = Sums(pick(one.error, two.error), pick(one.q, two.q), pick(one.qq, two.qq), pick(one.xq, two.xq))
        steps, minimums = pick(self.steps, other.steps), pick(self.minimums, other.minimums)
        return Nested(self.at, pick(self.d, other.d), pick(self.least, other.least), steps, minimums, sums)


def _step(numbers: Array, unit: Array, low: int, high: int) -> Array:
    ratio = np.where(unit != 0, numbers / unit, F(0))
    return np.where(unit != 0, integers(low, high, ratio), F(0))


def _block_scales(at: Groups, fitted: Array, most: int) -> Array:
    blocks = fitted.reshape(-1, at.kind.groups)
    extreme = blocks[np.arange(len(blocks)), np.argmax(np.abs(blocks), axis=1)].repeat(at.kind.groups)
    return at.f16(extreme / F(most))


def nested(at: Groups, scale: Array, offset: Array) -> Nested:
    """From the scales, and offsets, of groups to those of blocks."""
    kind, none = at.kind, np.zeros_like(scale)
    d = _block_scales(at, scale, kind.low or kind.high)
    least = _block_scales(at, offset, -kind.high) if kind.most else none
    minimums = _step(-offset, least, 0, kind.high) if kind.most else none
    now = Nested(at, d, least, _step(scale, d, kind.low, kind.high), minimums).looked()
    for _ in range(2):
        start = now
        for away in (0, -1, 1) if kind.most else (-1, 1):
            moved = np.where(start.d != 0, np.clip(start.steps + F(away), F(kind.low), F(kind.high)), F(0))
            other = replace(start, steps=moved).looked()
            now = now.better(other, blocks=False)
            if kind.most:
                now = now.better(_fit_minimums(other).looked(), blocks=False)
        now = now.better(_fit_blocks(now).looked(), blocks=True)
    return now


def _fit_minimums(now: Nested) -> Nested:
    assert now.sums is not None
    unit = now.least * now.at.weight
    wanted = now.d * now.steps * now.sums.q - now.at.total
    return replace(now, minimums=_step(wanted, unit, 0, now.at.kind.high))


def _fit_blocks(now: Nested) -> Nested:
    """The blocks' own scales, and minimums, of least squared error for all their codes."""
    at, sums, count = now.at, now.sums, now.at.kind.groups
    assert sums is not None

    def over_block(terms: Array) -> Array:
        return _sum(terms.reshape(-1, count)).repeat(count)

    ss, sx = over_block((now.steps * now.steps) * sums.qq), over_block(now.steps * sums.xq)
    d, least = np.where(ss > 0, sx / ss, now.d), now.least
    if at.kind.most:
        sm = over_block((now.steps * now.minimums) * sums.q)
        mm, mx = over_block((now.minimums * now.minimums) * at.weight), over_block(now.minimums * at.total)
        spread = ss * mm - sm * sm
        solvable = spread > _SAME * (ss * mm)
        d = np.where(solvable, (sx * mm - sm * mx) / spread, now.d)
        least = np.where(solvable, (sm * sx - ss * mx) / spread, now.least)
    d, least = at.f16(d), at.f16(least)
    return replace(now, d=np.where(np.isfinite(d), d, now.d), least=np.where(np.isfinite(least), least, now.least))


def _settled(at: Groups, scale: Array, offset: Array) -> tuple[Array, Array]:
    """Scale and offset in f16; then once more the scale for that offset."""
    scale, offset = at.f16(scale), at.f16(offset)
    if not at.kind.most:
        return scale, offset
    sums = measured(at, scale, offset)
    fitted = at.f16(_over(sums.xq - offset * sums.q, sums.qq, where=sums.qq > 0))
    other = np.where(sums.qq > 0, fitted, scale)
    return np.where(measured(at, other, offset).error < sums.error, other, scale), offset


def _powers(at: Groups) -> tuple[Array, Array]:
    """The power of two of least error, and its code."""
    error, scale, codes = np.full(len(at.x), np.inf, F), np.zeros(len(at.x), F), np.zeros(len(at.x), np.uint32)
    for away in (-2, -1, -3):
        code = np.maximum((at.back.view(np.uint32) >> 23).astype(np.int32) + away, 0)
        tried = np.ldexp(F(1), code - 128).astype(F) * at.near
        left = measured(at, tried, np.zeros_like(tried)).error
        better = left < error
        error, scale, codes = (np.where(better, *pair) for pair in ((left, error), (tried, scale), (code, codes)))
    return scale, codes.astype(np.uint32)


def encoded(type: str, weights: Array, importance: Array | None = None) -> Array:
    """Return blocks [blocks, bytes] of f32 weights [blocks, elements]; what f16 has no room for becomes infinite."""
    kind = KINDS[type]
    x = weights.reshape(-1, kind.size)
    w = np.ones_like(x) if importance is None else np.broadcast_to(importance, weights.shape).reshape(x.shape)
    with np.errstate(all="ignore"):
        at = prepared(kind, x, w.astype(F))
        offset, steps, minimums = np.zeros(len(x), F), np.zeros((0,), F), np.zeros((0,), F)
        if type == "mxfp4":
            scale, heads = _powers(at)
            head = heads.astype(np.uint8)[:, None]
            least = head[:, :0]
        else:
            scale, offset = fit_affine(at) if kind.most else (fit_scales(at), offset)
            if kind.groups == 1:
                scale, offset = _settled(at, scale, offset)
                d, m = scale, offset
            else:
                found = nested(at, scale, offset)
                scale, offset = found.products
                steps, minimums, d, m = found.steps, found.minimums, found.d, found.least
            head, least = (_half(one, at) for one in (d, m))
        levels = at.kind.nearest((at.x - offset[:, None]) * _inverse(scale)[:, None])
    # A block of one group has neither steps nor minimums.
    whole = [one.astype(np.int32).reshape(-1, kind.groups) for one in (steps, minimums)]
    return PACKERS[type](head, least, whole[0], whole[1], levels.reshape(weights.shape))


def _half(numbers: Array, at: Groups) -> Array:
    """The bytes of each block's f16 [blocks, 2]."""
    stored = (numbers * at.back)[:: at.kind.groups].astype("<f2")
    return stored.view(np.uint8).reshape(-1, 2)
