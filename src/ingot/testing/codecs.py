"""The test suite of codecs.

A codec's test file subclasses ``CodecSuite``, sets the codec and its cases, and adds tests that only this codec needs::

    class TestMine(CodecSuite):
        codec = MyCodec()
        cases = (Case((4, 8), "f32"), Case((0, 8), "bf16", {"bits": 4}))
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import numpy as np
import pytest

from ingot.codecs.base import FLOAT_TARGETS, Codec, Encoder
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import CodecError, IntegrityError, UsageError
from ingot.model.reading.slices import SkippingReader
from ingot.model.tensor import Array, Tensor
from ingot.testing.encoding import (
    Unreadable,
    bits,
    chunks,
    encode_parts,
    encode_tensor,
    read_rows,
    repacked,
    repacks,
    round_once,
    with_parts,
    zstd_part,
)
from ingot.testing.values import indices, random_bits

__all__ = [
    "Case",
    "CodecSuite",
    "Unreadable",
    "bits",
    "chunks",
    "encode_parts",
    "encode_tensor",
    "read_rows",
    "repacked",
    "repacks",
    "round_once",
    "with_parts",
    "zstd_part",
]


@dataclass(frozen=True)
class Case:
    """A combination that the suite tests: the shape and dtype of the source, and the options of the encoder."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{'x'.join(map(str, self.shape)) or 'scalar'}-{self.dtype}-{options or 'default'}"

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of the source as a matrix, like ``Tensor.matrix_shape``."""
        return (prod(self.shape[:-1]), self.shape[-1]) if self.shape else (1, 1)


def _rng(case: Case) -> np.random.Generator:
    return np.random.default_rng(prod(case.shape) + len(case.shape))


class CodecSuite:
    """Base class of the tests of a codec.

    A subclass sets ``codec`` and ``cases``; for a codec that rounds also ``min_snr_db``, or it overrides
    ``check_loss``. ``cases`` should contain zero sizes, 0-d tensors if the codec supports them, one, two and more
    dimensions, and all options. ``test_case`` runs once for each case. Its checks are methods ``subtest_*``, which a
    subclass may override or add.
    """

    codec: ClassVar[Codec]
    cases: ClassVar[Sequence[Case]]
    min_snr_db: ClassVar[float] = 0.0
    repacks: ClassVar[bool] = True  # False if the codec cannot decode its other layouts, because containers undo them

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", type(self).cases, ids=str)

    # Methods that a subclass may override.

    def values(self, case: Case) -> Array:
        """Return the source values of a case: random bits for a lossless encoder, weights for one that rounds."""
        if self.encoder(case).lossless and not case.options:
            return random_bits(_rng(case), case.shape, case.dtype, zeros=0.5)
        return self.weights(case)

    def weights(self, case: Case) -> Array:
        """Return values of the magnitude of a model's weights, some of them zero."""
        rng = _rng(case)
        values = rng.normal(0, 0.05, case.shape) * rng.integers(0, 3, case.shape)
        return np.asarray(values).astype(numpy_dtype(case.dtype))

    def exact(self, tensor: Tensor) -> Array:
        """Return the exact values of a tensor as float64.

        The method assumes that a lossy codec decodes to float32 exactly.
        """
        dtype = tensor.dtype if self.codec.lossless else "f32"
        return self.codec.decode(tensor, dtype).astype(np.float64)

    def check_loss(self, case: Case, source: Array, decoded: Array) -> None:
        """Check the error of a lossy encoder; ``decoded`` is f32."""
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
        """Return the float types into which the suite decodes ``tensor``: none if its own type is no float."""
        return FLOAT_TARGETS if DTYPES[tensor.dtype].is_float else ()

    # The checks: subtests of each case.

    def test_case(self, case: Case, subtests: pytest.Subtests) -> None:
        """Run all methods ``subtest_*`` of the class on one case; a failure names the method and the case."""
        names = (name for cls in reversed(type(self).__mro__) for name in vars(cls) if name.startswith("subtest_"))
        for name in dict.fromkeys(names):
            with subtests.test(name.removeprefix("subtest_")):
                getattr(self, name)(case)

    def subtest_round_trip(self, case: Case) -> None:
        tensor = self.tensor(case)
        source = self.values(case)
        assert isinstance(self.codec, Codec)
        assert isinstance(self.encoder(case), Encoder)
        assert tensor.shape == case.shape
        if self.encoder(case).lossless:
            assert bits(tensor.numpy(case.dtype)) == bits(source)
        else:
            self.check_loss(case, source, tensor.numpy("f32"))

    def subtest_parts_are_as_announced(self, case: Case) -> None:
        encoder = self.encoder(case)
        tensor = self.tensor(case)
        assert [spec.role for spec in encoder.parts] == list(tensor.parts)
        assert encoder.codec == self.codec.id
        for spec in encoder.parts:
            assert spec.encoding == "raw"
            assert spec.length in (None, tensor.parts[spec.role].length)

    def subtest_params_survive_json(self, case: Case) -> None:
        tensor = self.tensor(case)
        params = json.loads(json.dumps(tensor.params, allow_nan=False))
        assert params == dict(tensor.params)
        restored = replace(tensor, params=params)
        assert bits(restored.numpy()) == bits(tensor.numpy())

    def subtest_bytes_do_not_depend_on_chunks(self, case: Case) -> None:
        rows = case.matrix[0]
        tensor = self.tensor(case)
        for cuts in (range(rows), (1,), (rows - 1, rows // 2)):
            chunked = self.tensor(case, tuple(cuts))
            for role, part in tensor.parts.items():
                assert bytes(chunked.parts[role].view()) == bytes(part.view()), role

    def subtest_encoding_is_pure(self, case: Case) -> None:
        source = self.values(case)
        before = bits(source)
        source.flags.writeable = False
        encoder = self.encoder(case)
        first = {role: bits(part) for role, part in encode_parts(self.codec, encoder, source).items()}
        matrix = source.reshape(case.matrix)
        repeated = encoder.encode(matrix)
        assert {role: bits(part) for role, part in repeated.items()} == first
        assert bits(source) == before

    def subtest_encoder_decodes_what_it_encoded(self, case: Case) -> None:
        source = self.weights(case)
        encoder = self.encoder(case)
        tensor = self.tensor(case, source=source)
        arrays = encode_parts(self.codec, encoder, source)
        dtype = "f32" if "f32" in self.targets(tensor) else tensor.dtype
        out = np.full(case.matrix, 1, numpy_dtype(dtype))
        encoder.decode(arrays, out)
        assert bits(out) == bits(tensor.numpy(dtype))

    def subtest_reader_equals_decode(self, case: Case) -> None:
        rows = case.matrix[0]
        tensor = self.tensor(case)
        dtype = tensor.dtype if self.codec.lossless else "f32"
        expected = bits(tensor.numpy(dtype))
        for cuts in ((), tuple(range(rows)), (rows // 3,)):
            assert bits(read_rows(self.codec, tensor, dtype, cuts)) == expected, cuts

    def subtest_pieces_equal_decode(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        values = tensor.numpy()
        for index in indices(_rng(case), case.shape):
            assert bits(tensor[index]) == bits(packed[index]) == bits(values[index]), index
            assert tensor[index].shape == values[index].shape

    def subtest_rows_are_passed_over(self, case: Case) -> None:
        """After skipping rows, a reader returns the same values as after reading them, for several run lengths."""
        tensor = self.tensor(case)
        rows, cols = case.matrix
        dtype = tensor.dtype if self.codec.lossless else "f32"
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        values = tensor.numpy(dtype).reshape(rows, cols)
        for source in (tensor, packed):
            for skipped, read in ((1, 1), (2, 3), (max(1, rows // 3), 1), (rows // 2, 2)):
                reader = self.codec.reader(source)
                row = 0
                if not isinstance(reader, SkippingReader) or not values.size:
                    return
                while row < rows:
                    count = min(skipped, rows - row)
                    reader.skip(count * cols)
                    out = np.empty_like(values[row + count : row + count + read])
                    reader.read_into(out)
                    assert bits(out) == bits(values[row + count : row + count + read]), (skipped, read, row)
                    row += count + read

    def subtest_outputs_of_any_order_are_filled(self, case: Case) -> None:
        """Readers fill outputs with gaps between columns, in Fortran order and unaligned, and write nothing else."""
        tensor = self.tensor(case)
        rows, cols = case.matrix
        dtype = tensor.dtype if self.codec.lossless else "f32"
        item = numpy_dtype(dtype)
        expected = read_rows(self.codec, tensor, dtype).reshape(case.matrix)
        wide = np.zeros((rows, 2 * cols + 1), item)
        high = np.zeros((cols, rows), item)
        unaligned = np.zeros(rows * cols * item.itemsize + 1, np.uint8)[1:].view(item).reshape(rows, cols)
        for out in (wide[:, 1::2], high.T, unaligned):
            reader = self.codec.reader(tensor)
            reader.read_into(out)
            reader.finish()
            assert bits(out) == bits(expected)
        assert not np.ascontiguousarray(wide[:, ::2]).view(np.uint8).any()

    def subtest_read_only_outputs_are_refused(self, case: Case) -> None:
        tensor = self.tensor(case)
        out = np.zeros(case.matrix, numpy_dtype(tensor.dtype))
        out.flags.writeable = False
        with pytest.raises(UsageError) as caught:
            self.codec.reader(tensor).read_into(out)
        assert caught.value.rule == "tensor.out"

    def subtest_decodes_into_memory_that_is_given(self, case: Case) -> None:
        tensor = self.tensor(case, source=self.weights(case))
        for dtype in {tensor.dtype, *self.targets(tensor)}:
            out = np.full(case.shape, 1, numpy_dtype(dtype))
            assert tensor.numpy(out=out) is out
            assert bits(out) == bits(tensor.numpy(dtype))

    def subtest_decoding_rounds_once(self, case: Case) -> None:
        tensor = self.tensor(case, source=self.weights(case))
        rows = case.matrix[0]
        for dtype in self.targets(tensor):
            expected = round_once(self.exact(tensor), dtype)
            assert bits(tensor.numpy(dtype)) == bits(expected)
            assert bits(read_rows(self.codec, tensor, dtype, (rows // 2,))) == bits(expected)

    def subtest_compressed_parts_decode(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        self.codec.check(packed)
        assert bits(packed.numpy()) == bits(tensor.numpy())
        assert bits(read_rows(self.codec, packed, tensor.dtype)) == bits(tensor.numpy())

    def subtest_repacking_changes_no_bit(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        targets = (tensor.dtype,) if self.encoder(case).lossless else self.targets(tensor)
        results = (repacks(self.codec, source) if self.repacks else [] for source in (tensor, packed))
        for repack, packed_repack in zip(*results, strict=True):
            assert repack.why_not == packed_repack.why_not
            if not repack.exact:
                continue
            result = repacked(repack, tensor)
            self.codec.check(result)
            assert [part.length for part in result.parts.values()] == [part.length for part in repack.parts]
            params = repack.layout.attributes()
            assert json.loads(json.dumps(params)) == params
            for dtype in (tensor.dtype,) if repack.rounded else targets:
                assert bits(result.numpy(dtype)) == bits(tensor.numpy(dtype)), (params, dtype)
            for cuts in (tuple(range(repack.rows)), (repack.rows // 3,)):
                chunked = repacked(packed_repack, packed, cuts)
                for role, part in result.parts.items():
                    assert bytes(chunked.parts[role].view()) == bytes(part.view()), role

    def subtest_check_reads_nothing(self, case: Case) -> None:
        tensor = self.tensor(case)
        parts = {role: replace(part, source=Unreadable(part.length)) for role, part in tensor.parts.items()}
        self.codec.check(replace(tensor, parts=parts))

    def subtest_check_refuses_wrong_sizes(self, case: Case) -> None:
        tensor = self.tensor(case)
        for role, part in tensor.parts.items():
            width = DTYPES[part.dtype].bits // 8
            for length in {part.length + width, part.length + 1, part.length - width} - {-width}:
                invalid = replace(part, length=length, source=Unreadable(length))
                with pytest.raises(CodecError) as caught:
                    self.codec.check(with_parts(tensor, {role: invalid}))
                assert caught.value.rule, (role, length)

    def subtest_check_refuses_missing_parts(self, case: Case) -> None:
        tensor = self.tensor(case)
        for spec in self.encoder(case).parts:
            parts = {role: part for role, part in tensor.parts.items() if role != spec.role}
            with pytest.raises(CodecError):
                self.codec.check(replace(tensor, parts=parts))
            with pytest.raises(CodecError):
                self.codec.reader(replace(tensor, parts=parts))

    def subtest_damage_is_noticed(self, case: Case) -> None:
        tensor = self.tensor(case)
        for role, part in tensor.parts.items():
            damaged = with_parts(tensor, {role: replace(part, digest="crc32c:0xdeadbeef")})
            with pytest.raises(IntegrityError) as caught:
                damaged.numpy()
            assert caught.value.rule == "part.digest-mismatch"
            with pytest.raises(IntegrityError):
                read_rows(self.codec, damaged, tensor.dtype)

    def subtest_unknown_options_are_refused(self, case: Case) -> None:
        with pytest.raises(UsageError):
            self.codec.encoder(case.shape, case.dtype, {**case.options, "no-such-option": 1})
