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


def _rng(case: Case) -> np.random.Generator:
    return np.random.default_rng(prod(case.shape) + len(case.shape))


class CodecSuite:
    """Inherit, set ``codec`` and ``cases``; for a codec that rounds also ``min_snr_db`` or ``check_loss``.

    ``cases`` should hold zero sizes, 0-d where the codec takes it, one, two and more dimensions, and every option.
    ``test_case`` runs once for each case. Its checks are methods ``subtest_*``: override one, or add one.
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

    # The checks: each is a subtest of each case.

    def test_case(self, case: Case, subtests: pytest.Subtests) -> None:
        """Run every method ``subtest_*`` of the class on one case; a failure names the method and the case."""
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
        encoder, tensor = self.encoder(case), self.tensor(case)
        assert [spec.role for spec in encoder.parts] == list(tensor.parts)
        assert encoder.codec == self.codec.id
        for spec in encoder.parts:
            assert spec.encoding == "raw"
            assert spec.length in (None, tensor.parts[spec.role].length)

    def subtest_params_survive_json(self, case: Case) -> None:
        tensor = self.tensor(case)
        params = json.loads(json.dumps(tensor.params, allow_nan=False))
        assert params == dict(tensor.params)
        again = replace(tensor, params=params)
        assert bits(again.numpy()) == bits(tensor.numpy())

    def subtest_bytes_do_not_depend_on_chunks(self, case: Case) -> None:
        rows = case.matrix[0]
        whole = self.tensor(case)
        for cuts in (range(rows), (1,), (rows - 1, rows // 2)):
            cut = self.tensor(case, tuple(cuts))
            for role, part in whole.parts.items():
                assert bytes(cut.parts[role].view()) == bytes(part.view()), role

    def subtest_encoding_is_pure(self, case: Case) -> None:
        source = self.values(case)
        before = bits(source)
        source.flags.writeable = False
        encoder = self.encoder(case)
        first = {role: bits(part) for role, part in encode_parts(self.codec, encoder, source).items()}
        matrix = source.reshape(case.matrix)
        again = encoder.encode(matrix)
        assert {role: bits(part) for role, part in again.items()} == first
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
        whole = bits(tensor.numpy(dtype))
        for cuts in ((), tuple(range(rows)), (rows // 3,)):
            assert bits(read_rows(self.codec, tensor, dtype, cuts)) == whole, cuts

    def subtest_pieces_equal_decode(self, case: Case) -> None:
        tensor = self.tensor(case)
        packed = replace(tensor, parts={role: zstd_part(part) for role, part in tensor.parts.items()})
        whole = tensor.numpy()
        for index in indices(_rng(case), case.shape):
            assert bits(tensor[index]) == bits(packed[index]) == bits(whole[index]), index
            assert tensor[index].shape == whole[index].shape

    def subtest_rows_are_passed_over(self, case: Case) -> None:
        """After a skip, a reader returns the same rows as after reading the rows before, wherever a run ends."""
        tensor, (rows, cols) = self.tensor(case), case.matrix
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
        """Every second column, columns first, off alignment: the values of a plain output, and nothing beside them."""
        tensor = self.tensor(case)
        (rows, cols), dtype = case.matrix, tensor.dtype if self.codec.lossless else "f32"
        kind = numpy_dtype(dtype)
        whole = read_rows(self.codec, tensor, dtype).reshape(case.matrix)
        wide = np.zeros((rows, 2 * cols + 1), kind)
        high = np.zeros((cols, rows), kind)
        odd = np.zeros(rows * cols * kind.itemsize + 1, np.uint8)[1:].view(kind).reshape(rows, cols)
        for out in (wide[:, 1::2], high.T, odd):
            reader = self.codec.reader(tensor)
            reader.read_into(out)
            reader.finish()
            assert bits(out) == bits(whole)
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
            wanted = round_once(self.exact(tensor), dtype)
            assert bits(tensor.numpy(dtype)) == bits(wanted)
            assert bits(read_rows(self.codec, tensor, dtype, (rows // 2,))) == bits(wanted)

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
            for dtype in (tensor.dtype,) if ours.rounded else targets:
                assert bits(whole.numpy(dtype)) == bits(tensor.numpy(dtype)), (params, dtype)
            for cuts in (tuple(range(ours.rows)), (ours.rows // 3,)):
                cut = repacked(other, packed, cuts)
                assert all(bytes(part.view()) == bytes(cut.parts[role].view()) for role, part in whole.parts.items())

    def subtest_check_reads_nothing(self, case: Case) -> None:
        tensor = self.tensor(case)
        parts = {role: replace(part, source=Unreadable(part.length)) for role, part in tensor.parts.items()}
        self.codec.check(replace(tensor, parts=parts))

    def subtest_check_refuses_wrong_sizes(self, case: Case) -> None:
        tensor = self.tensor(case)
        for role, part in tensor.parts.items():
            width = DTYPES[part.dtype].bits // 8
            for length in {part.length + width, part.length + 1, part.length - width} - {-width}:
                wrong = replace(part, length=length, source=Unreadable(length))
                with pytest.raises(CodecError) as caught:
                    self.codec.check(with_parts(tensor, {role: wrong}))
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
            wrong = replace(part, digest="crc32c:0xdeadbeef")
            damaged = with_parts(tensor, {role: wrong})
            with pytest.raises(IntegrityError) as caught:
                damaged.numpy()
            assert caught.value.rule == "part.digest-mismatch"
            with pytest.raises(IntegrityError):
                read_rows(self.codec, damaged, tensor.dtype)

    def subtest_unknown_options_are_refused(self, case: Case) -> None:
        with pytest.raises(UsageError):
            self.codec.encoder(case.shape, case.dtype, {**case.options, "no-such-option": 1})
