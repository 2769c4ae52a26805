"""Buckets of S3 servers that others made, moto and SeaweedFS: `make s3` installs them into a venv of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cluster import pool
from ingot.cluster.pool import Processes
from ingot.errors import IngotError
from ingot.model.store import Listing
from ingot.stores.location import Location
from ingot.stores.remote import client
from tests.support.libraries import contents, folder, moved, weights
from tests.support.proxy import FaultyProxy
from tests.support.s3 import bucket, environment, moto, seaweed
from tests.support.workers import Inline

MOTO = os.environ.get("INGOT_MOTO_SERVER", "")
WEED = os.environ.get("INGOT_WEED", "")
WEIGHTS = {f"{name}.w": np.random.default_rng(7).standard_normal((1500, 1024)).astype(np.float32) for name in "abc"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (moto, MOTO), marks=pytest.mark.skipif(not MOTO, reason="INGOT_MOTO_SERVER names no program: make s3")
        ),
        pytest.param(
            (seaweed, WEED), marks=pytest.mark.skipif(not WEED, reason="INGOT_WEED names no program: make s3")
        ),
    ],
    ids=["moto", "seaweedfs"],
)
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with bucket(*request.param, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture(autouse=True)
def _environment(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in environment(endpoint).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))


def test_shards_in_parts_there_and_back(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.safetensors", WEIGHTS)
    ingot.convert(tmp_path / "a.safetensors", "s3://bucket/m", format="safetensors", max_shard=13_000_000)
    assert len(Location.parse("s3://bucket/m").store().list().files) == 3
    assert ingot.compare("s3://bucket/m", tmp_path / "a.safetensors").same
    ingot.seal("s3://bucket/m")
    assert not ingot.verify("s3://bucket/m")
    ingot.save("s3://bucket/m", WEIGHTS, overwrite=True)
    assert Location.parse("s3://bucket/m").store().list() == Listing(("model.zt",))


def test_an_object_that_is_replaced_is_refused() -> None:
    ingot.save("s3://bucket/x.zt", WEIGHTS)
    with ingot.open("s3://bucket/x.zt") as checkpoint:
        assert np.array_equal(checkpoint["b.w"][7:9], WEIGHTS["b.w"][7:9])
        ingot.save("s3://bucket/x.zt", {name: values + 1 for name, values in WEIGHTS.items()})
        with pytest.raises(IngotError) as caught:
            checkpoint["c.w"].numpy()
    assert caught.value.rule == "store.changed"


def test_connections_that_break_off_now_and_then(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ingot.save("s3://bucket/y.zt", WEIGHTS)
    monkeypatch.setattr(client, "_PAUSE", 0.01)
    with FaultyProxy(int(endpoint.rpartition(":")[2]), lambda count: (900_000, 0) if count % 3 < 2 else None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with ingot.open("s3://bucket/y.zt") as checkpoint:
            assert all(np.array_equal(checkpoint[name].numpy(), values) for name, values in WEIGHTS.items())
        assert proxy.connections > 1


def test_a_library_is_kept_in_a_bucket(tmp_path: Path) -> None:
    """Leases, listings and their clock are the server's own."""
    library = ingot.Library("s3://bucket/libraries/one")
    base, tuned = folder(tmp_path / "base", weights()), folder(tmp_path / "tuned", moved(weights(), 1))
    library.add(base)
    assert library.add(tuned, "org/tuned").deltas == 2
    library.rm("base")
    kept = Location.parse(library.address).share()
    with kept.shared_lock(), pytest.raises(IngotError) as caught:
        library.gc(wait=0)
    assert caught.value.rule == "library.busy"
    assert library.gc().objects == 1
    assert not kept.sizes("leases")
    assert library.verify() == []
    library.get("org/tuned", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tuned)


def test_shards_that_workers_made_are_copied_by_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver puts the index alone, and after a run that ended takes over what workers have left there."""
    more: dict[str, Any] = {"format": "safetensors", "recipe": "bf16", "max_shard": 4_000_000}
    ingot.save(tmp_path / "m.safetensors", WEIGHTS)
    ingot.convert(tmp_path / "m.safetensors", tmp_path / "here", **more)
    copied, put = list[str](), list[str]()
    real_copy, real_put = client.Client.copy, client.Client.put
    monkeypatch.setattr(client.Client, "copy", lambda self, key, to: (copied.append(to), real_copy(self, key, to))[1])
    monkeypatch.setattr(client.Client, "put", lambda self, key, path: (put.append(key), real_put(self, key, path))[1])
    pools = iter((Inline(lambda count: KeyError() if count == 3 else None), Inline(), Processes(1)))
    monkeypatch.setattr(pool, "Processes", lambda: next(pools))
    with pytest.raises(KeyError):
        ingot.convert(tmp_path / "m.safetensors", "s3://bucket/made", engine="processes", resume=True, **more)
    made = [key for key in put if ".ingot-partial" in key]
    assert len(made) == 2
    for out in ("made", "again"):
        copied.clear()
        put.clear()
        resumed = {"resume": out == "made"}
        ingot.convert(tmp_path / "m.safetensors", f"s3://bucket/{out}", engine="processes", **resumed, **more)
        there, here = Location.parse(f"s3://bucket/{out}").store(), tmp_path / "here"
        assert sorted(there.list().files) == sorted(path.name for path in here.iterdir())
        assert all(there.read(path.name, 1 << 30, "test") == path.read_bytes() for path in here.iterdir())
        assert len(copied) == 3
        assert [key for key in put if key.endswith(".safetensors") and ".ingot-partial" not in key] == []
        assert len([key for key in put if ".ingot-partial" in key]) == (1 if out == "made" else 0)
    objects = client.Client.stamps(
        Location.parse("s3://bucket/made").share().client, ""
    )  # SeaweedFS keeps folders without any
    assert [key for key in objects if ".ingot-partial" in key] == []
