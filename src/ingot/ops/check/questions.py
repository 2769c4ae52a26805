"""The tasks of workers for ``verify`` and ``compare``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from ingot.model.tensor import Tensor
from ingot.ops.check.compare import Pair, compare_pair, pairs_of, sides
from ingot.ops.check.comparisons import TensorComparison
from ingot.ops.check.findings import Finding
from ingot.ops.check.options import CheckedFile, ComparedFiles, CompareOptions
from ingot.ops.check.tensors import check_tensor
from ingot.ops.check.verify import tensors_of
from ingot.ops.cluster.spread import Opened, Question
from ingot.ops.open import open_source


@contextmanager
def _open_checked(files: CheckedFile) -> Iterator[Opened[Tensor]]:
    with closing(open_source(files.path, io=files.io, max_decompressed=files.max_decompressed)) as source:
        yield Opened(tensors_of(source), source.identity())


@contextmanager
def _open_compared(files: ComparedFiles) -> Iterator[Opened[Pair]]:
    """Open the pairs again. The driver checks digests over full files."""
    options = CompareOptions(files.a, files.b, max_decompressed=files.max_decompressed)
    with sides(options, whole=False) as (first, second):
        yield Opened(pairs_of(first, second)[0], [first.identity(), second.identity()])


VERIFY = Question(CheckedFile, tuple[()], list[Finding], _open_checked, check_tensor)
COMPARE = Question(ComparedFiles, tuple[()], TensorComparison, _open_compared, compare_pair)
