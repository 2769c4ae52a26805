"""Small specs and a way to write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from ingot.formats.base import Catalog
from ingot.formats.zt.reader import read_catalog
from ingot.formats.zt.writer import ZtWriter
from ingot.model.bytesource import MemorySource
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.memory import MemoryTarget
from ingot.testing.formats import Item, feed

Write = Callable[..., bytes]


@pytest.fixture
def spec() -> Callable[..., TensorSpec]:
    """Make the spec of a dense f32 vector, or of what the arguments say."""

    def make(name: str = "t", count: int = 4, parts: Sequence[PartSpec] | None = None, **fields: Any) -> TensorSpec:
        about = {"shape": (count,), "dtype": "f32", "codec": "dense", **fields}
        return TensorSpec(name, parts=tuple(parts or (PartSpec("data", "f32", 4 * count),)), **about)

    return make


@pytest.fixture
def write() -> Write:
    """Write tensors given as (spec, {role: stored bytes}) and return the file."""

    def run(*tensors: tuple[TensorSpec, Mapping[str, Any]], **options: Any) -> bytes:
        target = MemoryTarget()
        with ZtWriter(target.create("model.zt"), [spec for spec, _ in tensors], **options) as writer:
            for spec, parts in tensors:
                feed(writer, Item(spec, parts))
        return bytes(target.files["model.zt"])

    return run


@pytest.fixture
def read() -> Callable[..., Catalog]:
    """Read a file from memory."""

    def run(data: bytes, **options: Any) -> Catalog:
        return read_catalog(MemorySource(data, "model.zt"), **options)

    return run
