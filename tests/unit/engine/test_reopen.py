"""What was written is opened by its format's reader before it is published, and must be what was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IntegrityError
from ingot.formats.base import FormatWriter, WriteOptions
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec


def transposed(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[::-1])


def retyped(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="u32", parts=tuple(replace(part, dtype="u32") for part in spec.parts))


def renamed(spec: TensorSpec) -> TensorSpec:
    return replace(spec, name=f"{spec.name}.other")


class _Lies:
    """A writer whose header says something else than the plan."""

    def __init__(self, writer: FormatWriter, lie: Callable[[TensorSpec], TensorSpec]) -> None:
        self._writer, self._lie = writer, lie

    def begin(self, spec: TensorSpec) -> None:
        self._writer.begin(self._lie(spec))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@pytest.mark.parametrize("lie", [transposed, retyped, renamed])
@pytest.mark.parametrize("target", ["b.safetensors", "folder"])
def test_a_writer_that_lies_publishes_nothing(
    lie: Callable[[TensorSpec], TensorSpec], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingot.save(tmp_path / "a.zt", {"w": np.ones((4, 8), np.float32)})
    write = SafetensorsFormat.writer

    def lying(
        self: SafetensorsFormat, place: Target, name: str, artifact: Artifact, options: WriteOptions
    ) -> FormatWriter:
        wrong = replace(artifact, tensors=[lie(spec) for spec in artifact.tensors])
        writer: Any = _Lies(write(self, place, name, wrong, options), lie)
        return writer  # type: ignore[no-any-return]

    monkeypatch.setattr(SafetensorsFormat, "writer", lying)
    with pytest.raises(IntegrityError) as caught:
        ingot.convert(tmp_path / "a.zt", tmp_path / target, format="safetensors")
    assert caught.value.rule == "written.unreadable"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zt"]


def test_a_file_that_its_reader_refuses_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.formats.safetensors import writer

    ingot.save(tmp_path / "a.zt", {"w": np.ones((4, 8), np.float32)})
    finish = writer.SafetensorsWriter.finish

    def cut_off(self: Any) -> list[str]:
        names = finish(self)
        for path in tmp_path.rglob("b.safetensors"):
            path.write_bytes(path.read_bytes()[:-8])
        return names

    monkeypatch.setattr(writer.SafetensorsWriter, "finish", cut_off)
    with pytest.raises(IntegrityError, match="refuses the finished file"):
        ingot.convert(tmp_path / "a.zt", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()
