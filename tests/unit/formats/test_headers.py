"""Headers that are read again."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import ingot
from ingot.artifacts.open import open_source
from ingot.stores.location import Location


def test_a_large_header_is_read_again_and_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"a.long.name.of.a.tensor.{number}": np.zeros(2, np.float32) for number in range(1000)}, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    source = open_source(Location.parse(path))
    try:
        headers = source.catalog.headers
        assert headers[path.name] is not headers[path.name]
        assert bytes(headers[path.name]) == raw[8 : 8 + length]
        assert list(headers) == [path.name]
        assert path.name in headers
        assert "other" not in headers
    finally:
        source.close()


def test_identities_of_small_and_large_headers_tell_their_bytes(tmp_path: Path) -> None:
    found = []
    for count in (1, 1000):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"a.long.name.of.a.tensor.{number}": np.zeros(2, np.float32) for number in range(count)}, path)
        with ingot.open(path) as checkpoint:
            first, second = checkpoint.identity(), checkpoint.identity()
        assert first == second
        found.append(first)
    assert found[0] != found[1]
