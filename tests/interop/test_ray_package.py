"""Conversions and checks by a Ray cluster of two nodes here: `make ray` installs Ray into a venv of its own."""

from __future__ import annotations

import _thread
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cluster import tasks
from ingot.delta.cost import delta_cost
from ingot.errors import IngotError
from ingot.model.store import Listing
from ingot.stores.location import Location
from tests.support.s3 import bucket, environment, moto

pytestmark = pytest.mark.skipif(not os.environ.get("INGOT_RAY"), reason="INGOT_RAY is not set: make ray")
NAMES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(24)]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of buckets, which the nodes find by their environment."""
    folder = tmp_path_factory.mktemp("server")
    with bucket(moto, os.environ["INGOT_MOTO_SERVER"], folder) as url, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(url).items():
            patch.setenv(name, value)
        yield url


@pytest.fixture(scope="module")
def nodes(endpoint: str) -> Iterator[Any]:
    """Two nodes of two processors."""
    from ray.cluster_utils import Cluster  # it has to be there: this is what is tested

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    started.add_node(num_cpus=2)
    yield started
    started.shutdown()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(5)
    sizes = dict.fromkeys(NAMES, 256) | {NAMES[7]: 8000}
    path = tmp_path / "m.safetensors"
    ingot.save(path, {name: rng.standard_normal((rows, 256)).astype(np.float32) for name, rows in sizes.items()})
    monkeypatch.setattr(tasks, "MIN_TASK_BYTES", 1 << 18)
    return path


def workers() -> list[int]:
    """The processes of this machine in which Ray runs tasks of ours."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::IngotWorker" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ["x.zt", "x.squizd"])
def test_processes_killed_at_random(source: Path, name: str, nodes: Any) -> None:
    ingot.convert(source, source.parent / f"here-{name}", recipe="int4")
    chance, killed, over = random.Random(3), list[int](), threading.Event()

    def kill() -> None:
        while not over.wait(0.2) and len(killed) < 6:
            if found := workers():
                killed.append(chance.choice(found))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        ingot.convert(source, source.parent / name, recipe="int4", engine="ray", address=nodes.address)
    finally:
        over.set()
        thread.join()
    assert killed
    assert (source.parent / name).read_bytes() == (source.parent / f"here-{name}").read_bytes()
    assert sorted(path.name for path in source.parent.iterdir()) == sorted(["m.safetensors", name, f"here-{name}"])


def test_a_node_that_goes(source: Path, nodes: Any) -> None:
    ingot.convert(source, source.parent / "here.zt", recipe="int4")
    third = nodes.add_node(num_cpus=2)
    gone: list[Any] = []

    def remove(event: ingot.ProgressEvent) -> None:
        if event.processed and not gone:
            gone.append(third)
            nodes.remove_node(third, allow_graceful=False)

    ingot.convert(source, source.parent / "x.zt", recipe="int4", engine="ray", address=nodes.address, progress=remove)
    assert gone
    assert (source.parent / "x.zt").read_bytes() == (source.parent / "here.zt").read_bytes()


def test_ctrl_c_stops_workers_and_leaves_nothing(source: Path, nodes: Any) -> None:
    def interrupt(event: ingot.ProgressEvent) -> None:
        if event.processed:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        ingot.convert(
            source, source.parent / "x.zt", recipe="int4", engine="ray", address=nodes.address, progress=interrupt
        )
    while workers():
        time.sleep(0.1)
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]


def test_from_a_bucket_into_a_bucket(source: Path, nodes: Any) -> None:
    more = {"format": "safetensors", "recipe": "bf16", "max_shard": 2_000_000}
    ingot.convert(source, source.parent / "here", **more)
    ingot.convert(source, "s3://bucket/m.safetensors")
    ingot.convert("s3://bucket/m.safetensors", "s3://bucket/there", engine="ray", address=nodes.address, **more)
    there, here = Location.parse("s3://bucket/there").store(), source.parent / "here"
    assert sorted(there.list().files) == sorted(path.name for path in here.iterdir())
    assert all(there.read(path.name, 1 << 30, "test") == path.read_bytes() for path in here.iterdir())
    assert Location.parse("s3://bucket").store().list() == Listing(("m.safetensors",), ("there",))


def test_a_worker_s_error_is_the_driver_s(source: Path, nodes: Any) -> None:
    ingot.convert(source, source.parent / "m.zt")
    data = bytearray((source.parent / "m.zt").read_bytes())
    data[len(data) // 2] ^= 1
    (source.parent / "m.zt").write_bytes(data)
    with pytest.raises(IngotError) as here:
        ingot.convert(source.parent / "m.zt", source.parent / "x.zt", recipe="int4")
    with pytest.raises(IngotError) as caught:
        ingot.convert(
            source.parent / "m.zt", source.parent / "x.zt", recipe="int4", engine="ray", address=nodes.address
        )
    assert caught.value.rule == here.value.rule
    assert not (source.parent / "x.zt").exists()


def test_checks_say_what_one_process_says(source: Path, nodes: Any) -> None:
    """Of files in a bucket and here, while processes are killed."""
    ingot.convert(source, "s3://bucket/small.zt", recipe="int4", overwrite=True)
    chosen, killed = random.Random(4), list[int]()

    def kill(event: ingot.ProgressEvent) -> None:
        if len(killed) < 2 and (found := workers()):
            killed.append(chosen.choice(found))
            os.kill(killed[-1], signal.SIGKILL)

    ray: dict[str, Any] = {"engine": "ray", "address": nodes.address, "progress": kill}
    assert ingot.compare(source, "s3://bucket/small.zt", **ray) == ingot.compare(source, "s3://bucket/small.zt")
    assert ingot.verify("s3://bucket/small.zt", **ray) == ingot.verify("s3://bucket/small.zt")
    assert killed


def test_an_address_where_no_cluster_is(source: Path) -> None:
    """In a process of its own: this one is connected already."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    script = "import sys, ingot; ingot.convert(*sys.argv[1:3], engine='ray', address=sys.argv[3])"
    command = [sys.executable, "-c", script, source, source.parent / "x.zt", place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"{place}: expected a Ray cluster that answers" in done.stderr
    assert "[cluster.address]" in done.stderr
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]


def test_without_a_cluster_processes_work_and_nothing_listens(source: Path, tmp_path: Path) -> None:
    """In a process of its own, whose sockets, and its children's, are looked at while it works."""
    script = """
import sys, warnings, psutil, ingot
def look(event):
    mine = psutil.Process()
    for process in (mine, *mine.children(recursive=True)):
        print(process.name(), [item.laddr for item in process.net_connections("inet") if item.status == "LISTEN"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ingot.convert(*sys.argv[1:3], recipe="int4", engine="ray", progress=look)
print(*(item.message for item in caught if "no Ray cluster" in str(item.message)))
"""
    command = [sys.executable, "-c", script, source, source.parent / "x.zt"]
    variables = {**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=variables)
    *lines, warning = done.stdout.splitlines()
    assert warning.startswith("no Ray cluster is named")
    assert len(lines) > 2
    assert all(line.endswith(" []") for line in lines)
    ingot.convert(source, source.parent / "here.zt", recipe="int4")
    assert (source.parent / "x.zt").read_bytes() == (source.parent / "here.zt").read_bytes()


@pytest.mark.parametrize(
    ("out", "more"), [("x.zt", {}), ("y.zt", {"strategy": "auto", "max_error": 0.1}), ("x.wdelta", {})]
)
def test_diffs_and_patches_while_processes_are_killed(source: Path, out: str, more: dict[str, Any], nodes: Any) -> None:
    """The one of a bucket with one of here: the delta, its patch and its cost."""
    folder, rng = source.parent, np.random.default_rng(6)
    with ingot.open(source) as base:
        weights = {name: tensor.numpy().copy() for name, tensor in base.items()}
    tuned = {name: (w * (1 + 0.01 * rng.standard_normal(w.shape))).astype(np.float32) for name, w in weights.items()}
    tuned[NAMES[3]] = weights[NAMES[3]]
    ingot.save(folder / "tuned.safetensors", tuned)
    ingot.convert(folder / "tuned.safetensors", "s3://bucket/tuned.safetensors", overwrite=True)
    here = ingot.diff(source, folder / "tuned.safetensors", folder / f"here-{out}", **more)
    chosen, killed = random.Random(5), list[int]()

    def kill(event: ingot.ProgressEvent) -> None:
        if len(killed) < 3 and event.rates and (found := workers()):
            killed.append(chosen.choice(found))
            os.kill(killed[-1], signal.SIGKILL)

    ray: dict[str, Any] = {"engine": "ray", "address": nodes.address}
    there = ingot.diff(source, "s3://bucket/tuned.safetensors", folder / out, **ray, progress=kill, **more)
    assert killed
    assert (folder / out).read_bytes() == (folder / f"here-{out}").read_bytes()
    assert (there.base_id, there.result_id, there.parent_hash) == (here.base_id, here.result_id, here.parent_hash)
    ingot.patch(source, folder / out, folder / "here.safetensors")
    assert ingot.patch(source, folder / out, folder / "p.safetensors", **ray).verified_base
    assert (folder / "p.safetensors").read_bytes() == (folder / "here.safetensors").read_bytes()
    paths = (source, folder / out, folder / "tuned.safetensors")
    assert delta_cost(*paths, **ray) == delta_cost(*paths)
