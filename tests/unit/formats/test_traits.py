"""The traits of all formats fit together, and a format without a feature gets a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ingot.formats.base import Catalog, Format, FormatTraits, FormatWriter, WriteOptions
from ingot.formats.detect import FORMATS
from ingot.model.artifact import NO_ATTACHMENTS, Artifact
from ingot.model.bytesource import Buffer, Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store
from ingot.stores.memory import MemoryStore, MemoryTarget

PROMISED = {"looks_inside": "confirms", "overlays": "overlay", "carries_receipt": "with_receipt"}


class PlainWriter(FormatWriter):
    """A writer without late metadata."""

    def begin(self, spec: TensorSpec) -> None:
        pass

    def write(self, role: str, data: Buffer) -> None:
        pass

    def end(self) -> dict[str, Any]:
        return {}

    def restore(self, record: Mapping[str, Any]) -> None:
        pass

    def finish(self) -> list[str]:
        return []

    def abort(self) -> None:
        pass


class PlainFormat(Format):
    """A format that states only what has no default."""

    name = "plain"
    suffixes = (".plain",)
    summary = "nothing but the obligatory"

    def claims(self, name: str, head: bytes) -> bool:
        return name.endswith(self.suffixes)

    def entry(self, names: Sequence[str]) -> str | None:
        return None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        return None

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        return Catalog({})

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        return 0

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> FormatWriter:
        return PlainWriter()


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_implements_what_its_traits_promise(name: str) -> None:
    format = FORMATS[name]
    assert isinstance(format, Format)
    for trait, method in PROMISED.items():
        overridden = getattr(type(format), method) is not getattr(Format, method)
        assert overridden == getattr(format.traits, trait), method


@pytest.mark.parametrize("name", FORMATS)
def test_traits_of_a_format_fit_together(name: str) -> None:
    traits = FORMATS[name].traits
    assert all(other in FORMATS for other in traits.containers.values())
    assert not traits.containers or name in traits.containers.values()
    assert traits.shards or not traits.shards_on_request
    assert traits.config_keys or not traits.packed_codecs  # config.json says how layers are packed
    assert traits.packed_codecs or not (traits.merges or traits.dense_key or traits.how_to_quantize)
    assert traits.group_sizes is not None or not traits.one_group
    assert traits.folder or not traits.tiers


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_its_file(name: str) -> None:
    assert FORMATS[name].file_name("model")


def test_a_plain_format_gets_defaults() -> None:
    format, store = PlainFormat(), MemoryStore({})
    assert format.traits == FormatTraits()
    assert format.file_name("model") == "model.plain"
    assert list(format.order([])) == []
    assert format.metadata({"a": 1}) == {"a": 1}
    assert format.for_attachments(NO_ATTACHMENTS) is format.for_source({}) is format.compacted() is format
    assert format.base_identity() is None
    assert (format.declared_dtype("w"), format.required_dtype("w", (1,)), format.why_constant("w")) == (None,) * 3
    assert not format.has_constant("w")
    assert not format.has_sentinel(store)
    assert format.original_name("w") == "w"


def test_settings_are_dropped_unless_a_format_keeps_them() -> None:
    artifact = Artifact([], {})
    assert PlainFormat().dropped_settings(artifact, {"kv_cache": "fp8"}) == ["kv_cache (fp8)"]


def test_a_writer_without_late_metadata_refuses_it() -> None:
    writer = PlainFormat().writer(MemoryTarget(), "x", Artifact([], {}), WriteOptions())
    with pytest.raises(TypeError, match="PlainWriter"):
        writer.amend({})
