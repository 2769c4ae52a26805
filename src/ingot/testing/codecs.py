"""The test suite that every codec inherits.

A codec's test file subclasses ``CodecSuite``, names its codec and its cases, and adds what only that codec promises::

    class TestMine(CodecSuite):
        codec = MyCodec()
        cases = (Case((4, 8), "f32"), Case((0, 8), "bf16", {"bits": 4}))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar

import numpy as np
import pytest

from ingot.codecs.base import FLOAT_TARGETS, Codec, Encoder, Repacked, repack, row_step
from ingot.core import checksums, encodings
from ingot.core.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IntegrityError, UsageError
from ingot.model.bytesource import MemorySource
from ingot.model.layouts.base import Alternative
from ingot.model.part import Part, memory_part
from ingot.model.slices import Skipping
from ingot.model.tensor import Array, Tensor
from ingot.testing.strategies import indices, random_bits


@dataclass(frozen=True)
class Case:
    """One combination to test: shape and dtype of the source, options of the encoder."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}-{self.dtype}-{options or 'default'}"

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns, as ``Tensor.matrix_shape``."""
        return (prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)


class Unreadable:
    """A byte source that fails the test when somebody reads from it."""

    mapped = True
    name = "<unreadable>"

    def __init__(self, size: int) -> None:
        self.size = size

    def view(self, offset: int, length: int) -> memoryview:
        raise AssertionError(f"nobody may read here, asked for {length} bytes at {offset}")

    def readinto(self, offset: int, out: memoryview) -> None:
        self.view(offset, out.nbytes)

    def changed(self) -> bool:
        return False

    def close(self) -> None:
        pass


def chunks(rows: int, cuts: Sequence[int]) -> list[slice]:
    """Return consecutive slices over ``rows``, cut at ``cuts``; one empty slice where there are no rows."""
    edges = sorted({0, rows, *(cut for cut in cuts if 0 < cut < rows)})
    return [slice(start, stop) for start, stop in pairwise(edges)] or [slice(0, 0)]


def encode_parts(codec: Codec, encoder: Encoder, array: Array, cuts: Sequence[int] = ()) -> dict[str, Array]:
    """Run an encoder over an array: its fit passes, then its chunks; join each part's pieces."""
    matrix = array.reshape(prod(array.shape[:-1]), array.shape[-1]) if array.ndim else array.reshape(1, 1)
    step = row_step(codec, encoder, matrix.shape[1])
    pieces = chunks(len(matrix), () if encoder.single_chunk else [cut - cut % step for cut in cuts])
    for _ in range(encoder.fit_passes):
        for piece in pieces:
            encoder.fit_pass(matrix[piece])
    encoded = [encoder.encode(matrix[piece], piece.start) for piece in pieces]
    return {spec.role: np.concatenate([chunk[spec.role].reshape(-1) for chunk in encoded]) for spec in encoder.parts}


def encode_tensor(
    codec: Codec, array: Array, options: Mapping[str, Any] | None = None, *, dtype: str, cuts: Sequence[int] = ()
) -> Tensor:
    """Return ``array`` as a tensor of ``codec`` with its parts in memory and the decoder attached."""
    encoder = codec.encoder(array.shape, dtype, options or {})
    arrays = encode_parts(codec, encoder, array, cuts)
    parts = {spec.role: memory_part(arrays[spec.role], spec.dtype, spec.type) for spec in encoder.parts}
    only = encoder.parts[0]
    stored = (only.type or only.dtype) if len(parts) == 1 else dtype
    stored = str(encoder.params.get("dtype", "")) or stored
    return Tensor("tensor", array.shape, stored, encoder.codec, parts, dict(encoder.params), codec)


def repacks(codec: Codec, tensor: Tensor) -> list[Repacked]:
    """Return ``tensor`` in each of the other layouts that its numbers can have, the nearest first."""
    layout = tensor.layout
    others = layout.alternatives(tensor) if isinstance(layout, Alternative) else ()
    return [repack(codec, tensor, other) for other in others]


def repacked(repack: Repacked, tensor: Tensor, cuts: Sequence[int] = ()) -> Tensor:
    """Return ``tensor`` repacked, in chunks that begin at the multiples of ``step`` next to ``cuts``."""
    reader, packed = repack.reader(), dict[str, list[Array]]()
    for rows in chunks(repack.rows, [cut // repack.step * repack.step for cut in cuts]):
        for role, array in reader.read(rows.stop - rows.start).items():
            packed.setdefault(role, []).append(array.reshape(-1))
    reader.finish()
    parts = {part.role: memory_part(np.concatenate(packed[part.role]), part.dtype, part.type) for part in repack.parts}
    return replace(tensor, codec=repack.layout.codec, params=repack.layout.attributes(), parts=parts)


def with_parts(tensor: Tensor, parts: Mapping[str, Part]) -> Tensor:
    """Return the tensor with some parts replaced."""
    return replace(tensor, parts={**tensor.parts, **parts})


def zstd_part(part: Part) -> Part:
    """Return a part compressed, with a digest of the stored bytes, as a writer makes it."""
    data = bytes(part.view())
    frames = [data[start : start + encodings.FRAME] for start in range(0, len(data), encodings.FRAME)] or [b""]
    stored = b"".join(encodings.compress_frame(frame) for frame in frames)
    return replace(
        part,
        source=MemorySource(stored),
        length=len(stored),
        encoding="zstd",
        uncompressed_length=len(data),
        digest=checksums.digest("crc32c", stored),
    )


def bits(array: Array) -> bytes:
    """The bytes of an array: for comparisons that see NaN payloads and the sign of zero."""
    return np.ascontiguousarray(array).tobytes()


def read_rows(codec: Codec, tensor: Tensor, dtype: str, cuts: Sequence[int] = ()) -> Array:
    """Decode by the codec's reader in chunks cut at ``cuts``."""
    rows, cols = tensor.matrix_shape
    out = np.empty((rows, cols), numpy_dtype(dtype))
    reader = codec.reader(tensor)
    for piece in chunks(rows, cuts):
        reader.read_into(out[piece])
    reader.finish()
    return out.reshape(tensor.shape)


def round_once(values: Array, dtype: str) -> Array:
    """Round float64 values to the nearest of a float type, ties to even, by arithmetic that shares nothing with a cast.

    The spacing of a type with ``m`` stored mantissa bits at a value of binary exponent ``e`` is ``2**(e - m)``, and not
    less than at its smallest normal number (IEEE 754-2019 section 3.3). Values past the range are not for this.
    """
    limits: Any = np.finfo(numpy_dtype(dtype)) if dtype in ("f64", "f32", "f16") else _ml_finfo(dtype)
    exponent = np.frexp(values)[1] - 1
    spacing = np.maximum(exponent, limits.minexp) - limits.nmant
    return np.asarray(np.ldexp(np.rint(np.ldexp(values, -spacing)), spacing)).astype(numpy_dtype(dtype))


def _ml_finfo(dtype: str) -> Any:
    import ml_dtypes  # noqa: PLC0415 - optional until somebody tests such a type

    finfo: Any = ml_dtypes.finfo
    return finfo(numpy_dtype(dtype))


def _rng(case: Case) -> np.random.Generator:
    return np.random.default_rng(prod(case.shape) + len(case.shape))


class CodecSuite:
    """Inherit, set ``codec`` and ``cases``; for a codec that rounds also ``min_snr_db`` or ``check_loss``.

    ``cases`` should hold zero sizes, 0-d where the codec takes it, one, two and more dimensions, and every option.
    """

    codec: ClassVar[Codec]
    cases: ClassVar[Sequence[Case]]
    min_snr_db: ClassVar[float] = 0.0
    repacks: ClassVar[bool] = True  # False where other layouts are for containers that undo them, and none decodes

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", type(self).cases, ids=str)

    # What a codec may have to say differently.

    def values(self, case: Case) -> Array:
        """Source values of a case: any bits for an encoder that keeps them, weights for one that rounds."""
        if self.encoder(case).lossless and not case.options:
            return random_bits(_rng(case), case.shape, case.dtype, zeros=0.5)
        return self.weights(case)

    def weights(self, case: Case) -> Array:
        """Source values of the size of a model's weights, zeros among them."""
        rng = _rng(case)
        values = rng.normal(0, 0.05, case.shape) * rng.integers(0, 3, case.shape)
        return np.asarray(values).astype(numpy_dtype(case.dtype))

    def exact(self, tensor: Tensor) -> Array:
        """The values that the parts stand for, as float64; a lossy codec is taken to decode exactly to float32."""
        dtype = tensor.dtype if self.codec.lossless else "f32"
        return self.codec.decode(tensor, dtype).astype(np.float64)

    def check_loss(self, case: Case, source: Array, decoded: Array) -> None:
        """Judge what a lossy encoder left: ``decoded`` is f32."""
        reference = source.astype(np.float64)
        noise = float(((reference - decoded.astype(np.float64)) ** 2).sum())
        signal = float((reference**2).sum())
        assert noise <= signal * 10 ** (-self.min_snr_db / 10)

    # Helpers.

    def encoder(self, case: Case) -> Encoder:
        return self.codec.encoder(case.shape, case.dtype, case.options)

    def tensor(self, case: Case, cuts: Sequence[int] = (), source: Array | None = None) -> Tensor:
        values = self.values(case) if source is None else source
        return encode_tensor(self.codec, values, case.options, dtype=case.dtype, cuts=cuts)

    def targets(self, tensor: Tensor) -> tuple[str, ...]:
        """The float types that this tensor must decode to."""
        return FLOAT_TARGETS if DTYPES[tensor.dtype].is_float else ()

    # The tests.

    def test_round_trip(self, case: Case) -> None:
        tensor, source = self.tensor(case), self.values(case)
        assert tensor.shape == case.shape
        if self.encoder(case).lossless:
            assert bits(tensor.numpy(case.dtype)) == bits(source)
        else:
            self.check_loss(case, source, tensor.numpy("f32"))

    def test_parts_are_as_announced(self, case: Case) -> None:
        encoder, tensor = self.encoder(case), self.tensor(case)
        assert [spec.role for spec in encoder.parts] == list(tensor.parts)
        assert encoder.codec == self.codec.id
        for spec in encoder.parts:
            assert spec.encoding == "raw"
            assert spec.length in (None, tensor.parts[spec.role].length)

    def test_params_survive_json(self, case: Case) -> None:
        tensor = self.tensor(case)
        params = json.loads(json.dumps(tensor.params, allow_nan=False))
        assert params == dict(tensor.params)
        again = replace(tensor, params=params)
        assert bits(again.numpy()) == bits(tensor.numpy())

    def test_bytes_do_not_depend_on_chunks(self, case: Case) -> None:
        rows = case.matrix[0]
        whole = self.tensor(case)
        for cuts in (range(rows), (1,), (rows - 1, rows // 2)):
            cut = self.tensor(case, tuple(cuts))
            for role, part in whole.parts.items():
                assert bytes(cut.parts[role].view()) == bytes(part.view()), role

    def test_encoding_is_pure(self, case: Case) -> None:
        source = self.values(case)
        before = bits(source)
        source.flags.writeable = False
        encoder = self.encoder(case)
        first = {role: bits(part) for role, part in encode_parts(self.codec, encoder, source).items()}
        matrix = source.reshape(case.matrix)
        again = encoder.encode(matrix)
        assert {role: bits(part) for role, part in again.items()} == first
        assert bits(source) == before

    def test_encoder_decodes_what_it_encoded(self, case: Case) -> None:
        source, encoder = self.weights(case), self.encoder(case)
        tensor, arrays = self.tensor(case, source=source), encode_parts(self.codec, encoder, source)
        dtype = "f32" if "f32" in self.targets(tensor) else tensor.dtype
        out = np.full(case.matrix, 1, numpy_dtype(dtype))
        encoder.decode(arrays, out)
        assert bits(out) == bits(tensor.numpy(dtype))

    def test_reader_equals_decode(self, case: Case) -> None:
        rows = case.matrix[0]
        tensor = self.tensor(case)
        dtype = tensor.dtype if self.codec.lossless else "f32"
        whole = bits(tensor.numpy(dtype))
        for cuts in ((), tuple(range(rows)), (rows // 3,)):
            assert bits(read_rows(self.codec, tensor, dtype, cuts)) == whole, cuts

    def test_pieces_equal_decode(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        whole = tensor.numpy()
        for index in indices(_rng(case), case.shape):
            assert bits(tensor[index]) == bits(packed[index]) == bits(whole[index]), index
            assert tensor[index].shape == whole[index].shape

    def test_rows_are_passed_over(self, case: Case) -> None:
        """Readers that can skip give the rows behind as if they had read those before, wherever runs end."""
        tensor, (rows, cols) = self.tensor(case), case.matrix
        dtype = tensor.dtype if self.codec.lossless else "f32"
        whole = tensor.numpy(dtype).reshape(rows, cols)
        for passed, read in ((1, 1), (2, 3), (max(1, rows // 3), 1), (rows // 2, 2)):
            reader, row = self.codec.reader(tensor), 0
            if not isinstance(reader, Skipping) or not whole.size:
                return
            while row < rows:
                count = min(passed, rows - row)
                reader.skip(count * cols)
                out = np.empty_like(whole[row + count : row + count + read])
                reader.read_into(out)
                assert bits(out) == bits(whole[row + count : row + count + read]), (passed, read, row)
                row += count + read

    def test_outputs_of_any_order_are_filled(self, case: Case) -> None:
        """Every second column, columns first, off alignment: the values of a plain output, and nothing beside them."""
        tensor = self.tensor(case)
        (rows, cols), dtype = case.matrix, tensor.dtype if self.codec.lossless else "f32"
        kind, whole = numpy_dtype(dtype), read_rows(self.codec, tensor, dtype).reshape(case.matrix)
        wide, high = np.zeros((rows, 2 * cols + 1), kind), np.zeros((cols, rows), kind)
        odd = np.zeros(rows * cols * kind.itemsize + 1, np.uint8)[1:].view(kind).reshape(rows, cols)
        for out in (wide[:, 1::2], high.T, odd):
            reader = self.codec.reader(tensor)
            reader.read_into(out)
            reader.finish()
            assert bits(out) == bits(whole)
        assert not np.ascontiguousarray(wide[:, ::2]).view(np.uint8).any()

    def test_read_only_outputs_are_refused(self, case: Case) -> None:
        tensor = self.tensor(case)
        out = np.zeros(case.matrix, numpy_dtype(tensor.dtype))
        out.flags.writeable = False
        with pytest.raises(UsageError) as caught:
            self.codec.reader(tensor).read_into(out)
        assert caught.value.rule == "tensor.out"

    def test_decodes_into_memory_that_is_given(self, case: Case) -> None:
        tensor = self.tensor(case, source=self.weights(case))
        for dtype in {tensor.dtype, *self.targets(tensor)}:
            out = np.full(case.shape, 1, numpy_dtype(dtype))
            assert tensor.numpy(out=out) is out
            assert bits(out) == bits(tensor.numpy(dtype))

    def test_decoding_rounds_once(self, case: Case) -> None:
        tensor = self.tensor(case, source=self.weights(case))
        rows = case.matrix[0]
        for dtype in self.targets(tensor):
            wanted = round_once(self.exact(tensor), dtype)
            assert bits(tensor.numpy(dtype)) == bits(wanted)
            assert bits(read_rows(self.codec, tensor, dtype, (rows // 2,))) == bits(wanted)

    def test_compressed_parts_decode(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        self.codec.check(packed)
        assert bits(packed.numpy()) == bits(tensor.numpy())
        assert bits(read_rows(self.codec, packed, tensor.dtype)) == bits(tensor.numpy())

    def test_repacking_changes_no_bit(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        targets = self.targets(tensor)
        layouts = (repacks(self.codec, one) if self.repacks else [] for one in (tensor, packed))
        for ours, other in zip(*layouts, strict=True):
            assert ours.why_not == other.why_not
            if not ours.exact:
                continue
            whole = repacked(ours, tensor)
            self.codec.check(whole)
            assert [part.length for part in whole.parts.values()] == [part.length for part in ours.parts]
            params = ours.layout.attributes()
            assert json.loads(json.dumps(params)) == params
            for dtype in targets:
                assert bits(whole.numpy(dtype)) == bits(tensor.numpy(dtype)), (params, dtype)
            for cuts in (tuple(range(ours.rows)), (ours.rows // 3,)):
                cut = repacked(other, packed, cuts)
                assert all(bytes(part.view()) == bytes(cut.parts[role].view()) for role, part in whole.parts.items())

    def test_check_reads_nothing(self, case: Case) -> None:
        tensor = self.tensor(case)
        parts = {role: replace(part, source=Unreadable(part.length)) for role, part in tensor.parts.items()}
        self.codec.check(replace(tensor, parts=parts))

    def test_check_refuses_wrong_sizes(self, case: Case) -> None:
        tensor = self.tensor(case)
        for role, part in tensor.parts.items():
            width = DTYPES[part.dtype].bits // 8
            for length in {part.length + width, part.length + 1, part.length - width} - {-width}:
                wrong = replace(part, length=length, source=Unreadable(length))
                with pytest.raises(CodecError) as caught:
                    self.codec.check(with_parts(tensor, {role: wrong}))
                assert caught.value.rule, (role, length)

    def test_check_refuses_missing_parts(self, case: Case) -> None:
        tensor = self.tensor(case)
        for spec in self.encoder(case).parts:
            parts = {role: part for role, part in tensor.parts.items() if role != spec.role}
            with pytest.raises(CodecError):
                self.codec.check(replace(tensor, parts=parts))
            with pytest.raises(CodecError):
                self.codec.reader(replace(tensor, parts=parts))

    def test_damage_is_noticed(self, case: Case) -> None:
        tensor = self.tensor(case)
        for role, part in tensor.parts.items():
            wrong = replace(part, digest="crc32c:0xdeadbeef")
            damaged = with_parts(tensor, {role: wrong})
            with pytest.raises(IntegrityError) as caught:
                damaged.numpy()
            assert caught.value.rule == "part.digest-mismatch"
            with pytest.raises(IntegrityError):
                read_rows(self.codec, damaged, tensor.dtype)

    def test_unknown_options_are_refused(self, case: Case) -> None:
        with pytest.raises(UsageError):
            self.codec.encoder(case.shape, case.dtype, {**case.options, "no-such-option": 1})
