"""Containers of version 2 keep what every format promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ingot.errors import IngotError
from ingot.formats.base import WriteOptions
from ingot.formats.zt2.format import Zt2Format
from ingot.formats.zt2.layout import CANONICAL
from ingot.stores.memory import MemoryStore
from ingot.testing.formats import METADATA, FormatSuite, Item


class TestZt2Suite(FormatSuite):
    format = Zt2Format()

    def described(self, items: Sequence[Item], metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Names of attributes are not empty."""
        return {name: value for name, value in (metadata or {}).items() if name}

    def test_round_trip_of_many_tensors(self) -> None:
        self.check([self.item(f"layers.{index}.w", (2, 2), "f16", index) for index in range(150)])

    def test_truncation_anywhere_is_refused(self) -> None:
        target, (name,) = self.write(self.sample(), METADATA)
        whole = bytes(target.files[name])
        near = {edge + step for edge in range(0, len(whole), CANONICAL) for step in range(-2, 60)}
        for length in sorted({*near, *range(len(whole) - 700, len(whole))} & set(range(len(whole)))):
            with pytest.raises(IngotError) as caught:
                self.format.read(MemoryStore({name: whole[:length]}), name)
            assert caught.value.rule


class TestZt2SuiteWithSha256(TestZt2Suite):
    options = WriteOptions(digest="sha256")
