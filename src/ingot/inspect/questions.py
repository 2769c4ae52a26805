"""The questions about tensors of files that workers answer for ``verify`` and ``compare``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from ingot.artifacts.open import open_source
from ingot.cluster.driver.spread import Opened, Question
from ingot.core.parsing.structs import warm
from ingot.inspect.comparisons import TensorComparison
from ingot.inspect.findings import Finding
from ingot.inspect.options import CompareOptions
from ingot.inspect.tensors import check_tensor
from ingot.inspect.verify import tensors_of
from ingot.model.tensor import Tensor
from ingot.stores.location import Location

if TYPE_CHECKING:
    from ingot.inspect.compare import Pair


@warm
class CheckedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file or folder that is checked, as a worker opens it."""

    path: str
    io: str
    max_decompressed: int | str | None


@warm
class ComparedFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Two artifacts that are compared, as a worker opens them."""

    a: str
    b: str
    max_decompressed: int | str | None


@contextmanager
def _open_checked(files: CheckedFile) -> Iterator[Opened[Tensor]]:
    location = Location.parse(files.path)
    with closing(open_source(location, io=files.io, max_decompressed=files.max_decompressed)) as source:
        yield Opened(tensors_of(source), source.identity())


@contextmanager
def _open_compared(files: ComparedFiles) -> Iterator[Opened[Pair]]:
    """Open the pairs again. Digests over whole files are the driver's business."""
    from ingot.inspect.compare import pairs_of, sides

    options = CompareOptions(files.a, files.b, max_decompressed=files.max_decompressed)
    with sides(options, whole=False) as (first, second):
        yield Opened(pairs_of(first, second)[0], [first.identity(), second.identity()])


def _compare(pair: Pair) -> TensorComparison:
    from ingot.inspect.compare import compare_pair

    return compare_pair(pair)


VERIFY = Question(CheckedFile, tuple[()], list[Finding], _open_checked, check_tensor)
COMPARE = Question(ComparedFiles, tuple[()], TensorComparison, _open_compared, _compare)
