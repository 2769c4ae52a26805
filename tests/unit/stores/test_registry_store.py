"""Artifacts of a registry as stores."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import pytest

from ingot.errors import IngotError
from ingot.model.store import Store
from ingot.stores.location import Location
from ingot.stores.registry.manifest import WEIGHT, Blob, Manifest
from ingot.testing.stores import StoreSuite
from tests.support.registry import FakeRegistry


class TestRegistryStore(StoreSuite):
    def make(self, folder: Path, files: Mapping[str, bytes]) -> Store:
        registry = FakeRegistry().__enter__()
        weakref.finalize(self, registry.__exit__, None, None, None)
        return _store(registry, files)


def _store(registry: FakeRegistry, files: Mapping[str, bytes]) -> Store:
    blobs = {}
    for name, data in {**files, "": b"{}"}.items():
        digest = f"sha256:{sha256(data).hexdigest()}"
        registry.blobs["a/b", digest] = data
        blobs[name] = Blob(digest, len(data), WEIGHT)
    config = blobs.pop("")
    registry.manifests["a/b", "v1"] = Manifest(blobs, config).encoded()
    return Location.parse(f"oci://{registry.host}/a/b:v1").store()


def test_a_copied_source_reads_the_same_version() -> None:
    data = bytes(range(256)) * 1000
    with FakeRegistry() as registry:
        store = _store(registry, {"x.bin": data})
        old = registry.manifests["a/b", "v1"]
        registry.manifests["a/b", f"sha256:{sha256(old).hexdigest()}"] = old
        registry.manifests["a/b", "v1"] = json.dumps({}).encode()  # the tag is moved
        source = store.open("x.bin")
        copy = pickle.loads(pickle.dumps(source))
        source.close()
        assert bytes(copy.view(200_000, 100)) == data[200_000:200_100]
        assert not copy.changed()
        copy.close()


def test_a_registry_without_ranges() -> None:
    with FakeRegistry() as registry:
        store = _store(registry, {"x.bin": b"x" * 100_000})
        registry.statuses["GET /v2/a/b/blobs"] = 200
        with pytest.raises(IngotError) as caught:
            store.open("x.bin")
    assert caught.value.rule == "remote.no-ranges"
