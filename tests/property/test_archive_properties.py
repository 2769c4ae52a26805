"""Archives of any tree of files come back; damaged ones never give other bytes than were packed."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.files.archive import pack, unpack
from ingot.errors import IngotError

NAMES = st.text("abcxyz-_.é 0", min_size=1, max_size=6).filter(lambda name: name.strip(".") and name.isprintable())
TREES = st.recursive(
    st.dictionaries(NAMES, st.binary(max_size=300), max_size=4),
    lambda inner: st.dictionaries(NAMES, st.one_of(st.binary(max_size=300), inner), max_size=4),
    max_leaves=12,
)
Tree = dict[str, object]


def plant(tree: Tree, folder: Path) -> None:
    folder.mkdir()
    for name, item in tree.items():
        if isinstance(item, dict):
            plant(item, folder / name)
        else:
            assert isinstance(item, bytes)
            (folder / name).write_bytes(item)


def harvest(folder: Path) -> Tree:
    return {path.name: harvest(path) if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def extract(data: bytes, folder: Path) -> Tree:
    folder.mkdir()

    def read_at(offset: int, out: memoryview) -> None:
        out[:] = data[offset : offset + out.nbytes]

    unpack(read_at, len(data), folder, "archive")
    return harvest(folder)


def leaves(tree: Tree) -> list[bytes]:
    found: list[bytes] = []
    for item in tree.values():
        found += leaves(item) if isinstance(item, dict) else [item]
    return sorted(found)


@settings(deadline=None, max_examples=60)
@given(tree=TREES, flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3))
def test_trees_come_back_and_damage_is_seen(tree: Tree, flips: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        plant(tree, base / "in")
        out, packs = io.BytesIO(), False
        with contextlib.suppress(IngotError):  # names that differ by case or normalization alone; an archive inside
            pack(base / "in", out)
            packs = True
        if not packs:
            return
        data = bytearray(out.getvalue())
        assert extract(bytes(data), base / "out") == tree
        for position, value in flips:
            data[position % len(data)] ^= value
        try:
            found = extract(bytes(data), base / "bad")
        except IngotError:
            return
        assert leaves(found) == leaves(tree)
