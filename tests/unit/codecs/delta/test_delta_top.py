"""Large differences are encoded in chunks: the bytes of one piece, for every cut, in memory that chunks bound."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from ingot.codecs.base import ChunkParts, row_step
from ingot.codecs.delta import top as delta_top
from ingot.codecs.delta.base import delta_codec
from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import CodecError
from ingot.testing.codecs import Case, CodecSuite, bits, encode_parts, encode_tensor

Array = np.ndarray[Any, np.dtype[Any]]
WAYS = [
    *(("delta_int4", {"outlier_fraction": share, "layout": 1}) for share in (0, 0.1, 0.6, 0.97, 1)),
    *(("delta_int4", {"outlier_fraction": share, "layout": 2}) for share in (0.1, 1)),
    *(("delta_sparse", {"sparsity": share}) for share in (0, 0.9)),
]
CASES = tuple(Case(shape, options={"outlier_fraction": 0.3}) for shape in [(1,), (31, 3), (4, 3, 5)])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything streams; chunks may begin every few elements, and few candidates wait."""
    monkeypatch.setattr(delta_top, "MAX_SINGLE_CHUNK", 0)
    monkeypatch.setattr(delta_top, "BATCH", 4)
    monkeypatch.setattr(delta_top, "_GRID", 3)
    monkeypatch.setattr(delta_top, "_LONG", 20)


@pytest.mark.usefixtures("small_pieces")
class TestStreamedInt4(CodecSuite):
    codec = CODECS["delta_int4"]
    cases = CASES
    min_snr_db = 10


@pytest.mark.usefixtures("small_pieces")
class TestStreamedSparse(CodecSuite):
    codec = CODECS["delta_sparse"]
    cases = tuple(Case(case.shape) for case in CASES)


def values_of(kind: str, shape: tuple[int, ...]) -> Array:
    rng = np.random.default_rng(len(kind))
    made = {
        "normal": rng.normal(0, 0.01, shape),
        "ties": rng.integers(-2, 3, shape) / 8,
        "equal": np.full(shape, 0.25),
        "rising": np.arange(np.prod(shape)).reshape(shape) / 64,
        "falling": -np.arange(np.prod(shape))[::-1].reshape(shape) / 64,
        "long-run": np.where(np.arange(np.prod(shape)).reshape(shape) % 40 < 31, 1, rng.normal(0, 0.01, shape)),
    }[kind]
    return np.asarray(made).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "rising", "falling", "long-run"])
@pytest.mark.parametrize("shape", [(1, 1), (83,), (29, 5), (14, 6), (2, 31)])
def test_chunks_give_the_bytes_of_one_piece(monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, ...]) -> None:
    source = values_of(kind, shape)
    wanted = [encode_parts(CODECS[id], CODECS[id].encoder(shape, "f32", options), source) for id, options in WAYS]
    for name, value in {"MAX_SINGLE_CHUNK": 0, "BATCH": 4, "_GRID": 6, "_LONG": 20}.items():
        monkeypatch.setattr(delta_top, name, value)
    for flat in (source.reshape(-1, 1), source.reshape(-1, shape[-1])):  # cut anywhere, and between rows
        for (id, options), parts in zip(WAYS, wanted, strict=True):
            codec = CODECS[id]
            step = row_step(codec, codec.encoder(shape, "f32", options), flat.shape[1])
            for count in {step, 5 * step, len(flat)}:
                encoder = codec.encoder(shape, "f32", options)
                assert encoder.fit_passes == 1
                chunks = [(start, flat[start : start + count]) for start in range(0, len(flat), count)]
                for _, chunk in chunks:
                    encoder.fit_pass(chunk)
                found = [encoder.encode(chunk, start) for start, chunk in chunks]
                for role, part in parts.items():
                    assert bits(np.concatenate([one[role] for one in found])) == bits(part), (id, options, role, count)
                whole, again = np.empty_like(flat), np.empty_like(flat)
                encoder.decode(parts, whole)
                for (start, chunk), one in zip(chunks, found, strict=True):
                    encoder.decode(one, again[start : start + len(chunk)])
                assert bits(again) == bits(whole)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("id", ["delta_sparse", "delta_int4"])
def test_a_chunk_is_added_as_the_whole(id: str) -> None:
    source, base = values_of("normal", (40, 3)), values_of("ties", (40, 3))
    encoder = delta_codec(id).encoder(source.shape, "f32", {})
    encoder.fit_pass(base, base + source)
    tuned = base + source
    first, second = (encoder.encode(base[rows], tuned[rows], rows.start) for rows in (slice(0, 17), slice(17, 40)))
    joined = {role: np.concatenate([first[role], second[role]]) for role in first}
    whole, again = np.empty_like(base), np.empty_like(base)
    encoder.rebuild(joined, base, whole)
    encoder.rebuild(first, base[:17], again[:17])
    encoder.rebuild(second, base[17:], again[17:])
    assert bits(again) == bits(whole)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("outer", ["with_outliers", "sparse_blocks"])
def test_codecs_around_tell_chunks_apart(outer: str) -> None:
    """The error that is measured chunk by chunk is that of what is stored."""
    source = values_of("normal", (60, 6))
    options = {"inner": "delta_int4", **({"block": 3} if outer == "sparse_blocks" else {})}
    codec = CODECS[outer]
    encoder = codec.encoder(source.shape, "f32", options)
    encoder.fit_pass(source)
    assert encoder.retained_bytes() > 0
    whole, again = encode_tensor(codec, source, options, dtype="f32").numpy(), np.empty_like(source)
    for start in range(0, 60, 3):
        parts = encoder.encode(source[start : start + 3], start)
        assert isinstance(parts, ChunkParts)
        encoder.decode(parts, again[start : start + 3])
    assert bits(again) == bits(whole)
    encoder.forget()
    with pytest.raises(CodecError):
        encoder.encode(source)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("id", ["delta_sparse", "delta_int4"])
def test_wrong_scans_are_refused(id: str) -> None:
    source = values_of("normal", (40, 3))
    encoder = CODECS[id].encoder(source.shape, "f32", {})
    encoder.fit_pass(source[:-1])
    for wrong in (lambda: encoder.encode(source), lambda: encoder.fit_pass(source)):
        with pytest.raises(CodecError) as caught:
            wrong()
        assert caught.value.rule == f"{id}.whole"
    bad = source.copy()
    bad[[13, 20], 1] = np.nan, np.inf
    encoder = CODECS[id].encoder(source.shape, "f32", {})
    encoder.fit_pass(bad[:2])
    with pytest.raises(CodecError, match="element 40") as caught:
        encoder.fit_pass(bad[2:])
    assert caught.value.rule == f"{id}.non-finite"


@pytest.mark.parametrize(("id", "most"), [("delta_int4", 4), ("delta_sparse", 8)])
def test_memory_is_that_of_chunks_and_of_what_is_kept(id: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading, scanning and encoding take a chunk and ``held``, however large the tensor; whole it takes 8 and more."""
    monkeypatch.setattr(delta_top, "MAX_SINGLE_CHUNK", 1 << 18)
    monkeypatch.setattr(delta_top, "BATCH", 1 << 14)
    shape, chunk = (1 << 11, 1 << 10), 1 << 6
    encoder = delta_codec(id).encoder(shape, "f32", {})

    def rows(start: int) -> tuple[Array, Array]:
        found = np.random.default_rng(start).normal(0, 0.01, (chunk, shape[1])).astype(np.float32)
        return np.zeros_like(found), found

    assert not encoder.single_chunk
    tracemalloc.start()
    try:
        for start in range(0, shape[0], chunk):
            encoder.fit_pass(*rows(start))
        for start in range(0, shape[0], chunk):
            encoder.encode(*rows(start), start)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < encoder.retained_bytes() + 32 * chunk * shape[1]
    assert peak < most * shape[0] * shape[1]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "onesided", "zeros", "nan"])
@pytest.mark.parametrize("whole", [True, False])
def test_pairs_give_the_bytes_of_their_differences(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, whole: bool
) -> None:
    """Subtracted on the way or before, of every type: the same parts or refusal, zeros of either sign too."""
    if not whole:
        for name, value in {"MAX_SINGLE_CHUNK": 0, "BATCH": 2000, "_GRID": 3000}.items():
            monkeypatch.setattr(delta_top, name, value)
    shape, rng, element = (67, 1000), np.random.default_rng(3), numpy_dtype(dtype)
    old = rng.normal(0, 0.02, shape).astype(element)
    change = np.abs(values_of("normal", shape)) * (rng.random(shape) < 0.4)
    if kind in ("normal", "ties", "equal"):
        change = values_of(kind, shape)
    new = (old.astype(np.float32) + change).astype(element)
    if kind in ("zeros", "nan"):
        old, new = (np.where(rng.random(shape) < 0.5, 0.0, -0.0).astype(element) for _ in range(2))
    if kind == "nan":
        new[40, 20:] = np.nan
    wide = new.astype(np.float32) - old.astype(np.float32)
    for id, options in WAYS:
        found = [encoded(delta_codec(id).encoder(shape, dtype, options), old, new)]
        found.append(encoded(CODECS[id].encoder(shape, "f32", options), wide))
        assert found[0] == found[1], (id, options)
        if kind == "zeros" and id == "delta_int4" and isinstance(found[0], dict) and options["outlier_fraction"] < 1:
            kind_of_place = np.int64 if options["layout"] == 1 else np.int32
            outliers = np.frombuffer(found[0]["outlier_idx"], kind_of_place).astype(np.int64)
            assert np.frombuffer(found[0]["zero_point"], np.float16)[0] == np.delete(wide.reshape(-1), outliers).min()


def encoded(encoder: Any, *arrays: Array) -> dict[str, bytes] | str:
    """Return the parts that rows give in chunks, or the refusal."""
    rows, cols = arrays[0].shape
    count = rows if encoder.single_chunk else 4 * encoder.step // cols
    cuts = [slice(start, start + count) for start in range(0, rows, count)]
    try:
        for _ in range(encoder.fit_passes):
            for cut in cuts:
                encoder.fit_pass(*(array[cut] for array in arrays))
        made = [encoder.encode(*(array[cut] for array in arrays), cut.start) for cut in cuts]
    except CodecError as error:
        return str(error)
    return {role: b"".join(np.ascontiguousarray(parts[role]).tobytes() for parts in made) for role in made[0]}
