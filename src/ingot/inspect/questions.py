"""The tasks of workers for ``verify`` and ``compare``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from ingot.artifacts.open import open_source
from ingot.cluster.driver.spread import Opened, Question
from ingot.inspect.compare import Pair, compare_pair, open_sides, pairs_of
from ingot.inspect.comparisons import TensorComparison
from ingot.inspect.findings import Finding
from ingot.inspect.options import CheckedFile, ComparedFiles, CompareOptions
from ingot.inspect.tensors import check_tensor
from ingot.inspect.verify import tensors_of
from ingot.model.tensor import Tensor
from ingot.stores.location import Location


@contextmanager
def _open_checked(files: CheckedFile) -> Iterator[Opened[Tensor]]:
    """Open a file or folder in a worker; yield its tensors and their identity."""
    location = Location.parse(files.path)
    with closing(open_source(location, io=files.io, max_decompressed=files.max_decompressed)) as source:
        yield Opened(tensors_of(source), source.identity())


@contextmanager
def _open_compared(files: ComparedFiles) -> Iterator[Opened[Pair]]:
    """Open two artifacts in a worker; yield the pairs of tensors. The driver checks digests over full files."""
    options = CompareOptions(files.a, files.b, max_decompressed=files.max_decompressed)
    with open_sides(options, check_files=False) as (first, second):
        yield Opened(pairs_of(first, second)[0], [first.identity(), second.identity()])


VERIFY = Question(CheckedFile, tuple[()], list[Finding], _open_checked, check_tensor)
"""The task of ``verify`` for workers: return the findings of one tensor."""

COMPARE = Question(ComparedFiles, tuple[()], TensorComparison, _open_compared, compare_pair)
"""The task of ``compare`` for workers: return the comparison of one pair of tensors."""
