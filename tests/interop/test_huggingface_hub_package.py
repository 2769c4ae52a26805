"""Against the package huggingface_hub: shards as it cuts them, and companions in a cache as it lays it out."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.artifacts.companions import find_companions
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.formats.safetensors.index import shard_names, split
from ingot.model.spec import PartSpec, TensorSpec
from ingot.stores.local import LocalStore


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(1, 100))
def test_tensors_are_cut_into_the_same_shards(sizes: list[int], limit: int) -> None:
    tensors = {f"t{number}": size for number, size in enumerate(sizes)}
    theirs = huggingface_hub.split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    specs = [
        TensorSpec(name, (size,), "u8", "dense", (PartSpec("data", "u8", size),)) for name, size in tensors.items()
    ]
    shards = split(specs, limit, SafetensorsFormat())
    names = shard_names("model.safetensors", len(shards))
    ours = {name: [spec.name for spec in shard] for name, shard in zip(names, shards, strict=True)}
    assert ours == theirs.filename_to_tensors


def test_what_a_cached_snapshot_links_to_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / huggingface_hub.constants.REPO_ID_SEPARATOR.join(("models", "org", "name"))
    snapshot, commit = repo / "snapshots" / ("0" * 40), "0" * 40
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "elsewhere")
    cached = huggingface_hub.try_to_load_from_cache("org/name", "config.json", cache_dir=tmp_path)
    companions = find_companions(LocalStore(snapshot))
    assert companions.files == {"config.json": cached}
    assert list(companions.skipped.values()) == [["tokenizer.json"]]
