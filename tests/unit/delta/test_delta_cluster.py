"""Diffs and patches by several workers: the bytes and reports of a local run, whoever is killed meanwhile."""

from __future__ import annotations

import _thread
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs

import ingot
from ingot.cluster import tasks
from ingot.cluster.messages import WorkerLostError
from ingot.cluster.pool import Processes
from ingot.delta.cost import delta_cost
from ingot.delta.pairs import PairMap
from ingot.delta.plan import DiffPlanner, DiffPlannerData
from ingot.engine.data import bind_steps, step_data
from ingot.errors import IngotError
from ingot.formats.detect import FORMATS
from tests.support.workers import Inline

NAMES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Matrices of which one is the same, and a vector; the fine-tune has a tensor more, and one fewer."""
    rng = np.random.default_rng(5)
    base = {name: rng.standard_normal((64, 512)).astype(ml_dtypes.bfloat16) for name in NAMES}
    base["norm"] = rng.standard_normal(512).astype(ml_dtypes.bfloat16)
    tuned = {name: moved(rng, values) for name, values in base.items()} | {NAMES[1]: base[NAMES[1]]}
    alike = {**base, NAMES[1]: base[NAMES[1]]}
    ingot.save(tmp_path / "alike.safetensors", alike)
    ingot.save(tmp_path / "tuned.safetensors", tuned)
    ingot.save(tmp_path / "base.safetensors", {**base, "gone": base["norm"]})
    ingot.save(tmp_path / "more.safetensors", {**tuned, "new": rng.standard_normal((200, 128)).astype(np.float32)})
    monkeypatch.setattr(tasks, "MIN_TASK_BYTES", 1 << 15)
    return tmp_path


def moved(rng: Any, values: Any) -> Any:
    return (values.astype(np.float32) * (1 + 0.01 * rng.standard_normal(values.shape))).astype(values.dtype)


def diff(folder: Path, out: str, pair: tuple[str, str] = ("base", "more"), **more: Any) -> Any:
    (folder / "here").mkdir(exist_ok=True)
    return ingot.diff(*(folder / f"{name}.safetensors" for name in pair), folder / out, **more)


def told(report: Any) -> Any:
    """What a report says, but for how long it took and where the result lies."""
    return replace(report, seconds=0.0, destination="")


ALIKE = ("alike", "tuned")
KINDS: list[Any] = [
    ("x.zt", ("base", "more"), {}),
    ("x.zt", ("base", "more"), {"strategy": "int4"}),
    ("x.zt", ("base", "more"), {"strategy": "auto", "max_error": 0.1}),
    ("x.zt", ("base", "more"), {"strategy": "auto", "target_size": 0.6}),
    ("x.wdelta", ALIKE, {}),
    ("x.wdelta", ALIKE, {"strategy": "sparse"}),
    ("x.safetensors", ALIKE, {"allow_larger": True}),
]


@pytest.mark.parametrize(("name", "pair", "more"), KINDS)
def test_the_bytes_and_the_report_are_those_of_a_local_run(
    folder: Path, name: str, pair: tuple[str, str], more: dict[str, Any], hire: Callable[..., None]
) -> None:
    """While workers of planning, of checking for what is the same, and of encoding are lost."""
    here = diff(folder, f"here/{name}", pair, **more)
    pool, events = Inline(lambda count: WorkerLostError("lost") if count % 3 == 1 else None), list[Any]()
    hire(pool)
    found = diff(folder, name, pair, engine="processes", progress=events.append, **more)
    assert len(pool.tasks) > 8
    assert (folder / name).read_bytes() == (folder / "here" / name).read_bytes()
    assert told(found) == told(here)
    assert events[-1].processed == events[-1].total
    assert not list(folder.glob(".x*"))


@pytest.mark.parametrize(
    ("out", "more"), [("x.zt", {}), ("x.safetensors", {"allow_larger": True}), ("x.wdelta", {"strategy": "quantized"})]
)
def test_a_large_tensor_is_done_in_slices(
    tmp_path: Path, out: str, more: dict[str, Any], hire: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their digests, which a delta states, are those of the whole tensor."""
    monkeypatch.setattr(tasks, "MIN_TASK_BYTES", 1 << 18)
    rng = np.random.default_rng(7)
    base = {"small": rng.standard_normal((8, 8)).astype(np.float32)}
    base["large"] = rng.standard_normal((3000, 512)).astype(ml_dtypes.bfloat16)
    ingot.save(tmp_path / "base.safetensors", base)
    ingot.save(tmp_path / "tuned.safetensors", {name: moved(rng, values) for name, values in base.items()})
    here = diff(tmp_path, f"here/{out}", ("base", "tuned"), **more)
    pool = Inline(slots=4)
    hire(pool)
    found = diff(tmp_path, out, ("base", "tuned"), engine="processes", **more)
    cut = [task for task in pool.tasks if getattr(task, "rows", None) is not None]
    assert len(cut) > 4
    assert sum(task.nbytes for task in cut) == 2 * base["large"].nbytes
    assert (tmp_path / out).read_bytes() == (tmp_path / "here" / out).read_bytes()
    assert replace(told(found), tensors=[]) == replace(told(here), tensors=[])
    for mine, other in zip(found.tensors, here.tensors, strict=True):  # sums of squares are added in another order
        assert replace(mine, error=None, unrestored=None) == replace(other, error=None, unrestored=None)
        assert mine.unrestored == pytest.approx(other.unrestored)
        assert mine.error == pytest.approx(other.error)


def test_what_only_the_delta_tells_is_not_cut(folder: Path, hire: Callable[..., None]) -> None:
    """The digest of what patching gives would need all of it."""
    pool = Inline(slots=64)
    hire(pool)
    diff(folder, "x.zt", engine="processes", strategy="int8")
    assert not [task for task in pool.tasks if task.rows is not None]


def test_a_process_that_is_killed_is_replaced(folder: Path, hire: Callable[..., None]) -> None:
    diff(folder, "here/x.zt")
    pool, killed = Processes(1), list[int]()
    hire(pool)

    def kill(event: ingot.ProgressEvent) -> None:
        running = [pid for pid in pool.pids if pid not in killed]  # one that is killed stays there for a moment
        if len(killed) < 2 and event.rates and running:
            killed.append(running[0])
            os.kill(killed[-1], signal.SIGKILL)

    diff(folder, "x.zt", engine="processes", progress=kill)
    assert (folder / "x.zt").read_bytes() == (folder / "here" / "x.zt").read_bytes()
    assert len(killed) == 2
    assert pool.pids == []


def test_ctrl_c_stops_workers_and_leaves_nothing(folder: Path, hire: Callable[..., None]) -> None:
    pool, pids = Processes(1), list[int]()
    hire(pool)

    def interrupt(event: ingot.ProgressEvent) -> None:
        if event.rates and not pids:
            pids.extend(pool.pids)
            _thread.interrupt_main()

    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(KeyboardInterrupt):
        diff(folder, "here/../x.zt", engine="processes", progress=interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "here"])


def test_a_driver_that_ends_leaves_what_the_next_one_takes(folder: Path, hire: Callable[..., None]) -> None:
    diff(folder, "here/x.zt")
    first, second = Inline(), Inline()
    hire(first)
    diff(folder, "x.zt", engine="processes")
    made = len(first.tasks)
    third = Inline(lambda count: KeyError() if count == made - 1 else None)
    hire(third, second)
    (folder / "x.zt").unlink()
    with pytest.raises(KeyError):
        diff(folder, "x.zt", engine="processes", resume=True)
    assert not (folder / "x.zt").exists()
    diff(folder, "x.zt", engine="processes", resume=True)
    assert len(second.tasks) < made
    assert (folder / "x.zt").read_bytes() == (folder / "here" / "x.zt").read_bytes()


def test_an_error_is_that_of_a_local_run(folder: Path, hire: Callable[..., None]) -> None:
    ingot.convert(folder / "more.safetensors", folder / "more.zt")
    data = bytearray((folder / "more.zt").read_bytes())
    with ingot.open(folder / "more.zt") as checkpoint:
        data[checkpoint[NAMES[1]].parts["data"].offset + 5] ^= 1
    (folder / "more.zt").write_bytes(data)
    found = []
    for engine in ("local", "processes"):
        hire(Inline())
        with pytest.raises(IngotError) as caught:
            ingot.diff(folder / "base.safetensors", folder / "more.zt", folder / "x.zt", engine=engine)
        found.append((caught.value.rule, str(caught.value)))
    assert found[0] == found[1]
    assert found[0][0] == "part.digest-mismatch"
    assert not (folder / "x.zt").exists()


def patch(folder: Path, out: str, **more: Any) -> Any:
    return ingot.patch(folder / "base.safetensors", [folder / "d1.zt", folder / "d2.zt"], folder / out, **more)


@pytest.fixture
def chain(folder: Path) -> Path:
    """Two deltas, one after the other: a lossy one that removes a tensor and brings one, and an exact one."""
    diff(folder, "d1.zt", strategy="int8")
    ingot.patch(folder / "base.safetensors", folder / "d1.zt", folder / "first.safetensors")
    with ingot.open(folder / "first.safetensors") as first:
        second = {name: tensor.numpy().copy() for name, tensor in first.items()}
    second[NAMES[0]] = moved(np.random.default_rng(9), second[NAMES[0]])
    ingot.save(folder / "second.safetensors", second)
    diff(folder, "d2.zt", ("first", "second"))
    return folder


@pytest.mark.parametrize("out", ["x.safetensors", "x.zt", "x.squizd"])
def test_a_patch_has_the_bytes_of_a_local_run_and_is_proven(chain: Path, out: str, hire: Callable[..., None]) -> None:
    done, events = list[Any](), list[Any]()
    here = patch(chain, f"here/{out}", progress=done.append)
    pool = Inline(lambda count: WorkerLostError("lost") if count % 3 == 1 else None)
    hire(pool)
    found = patch(chain, out, engine="processes", progress=events.append)
    assert len(pool.tasks) > 4
    assert (chain / out).read_bytes() == (chain / "here" / out).read_bytes()
    assert told(found) == told(here)
    assert found.verified
    assert (events[-1].processed, events[-1].total) == (done[-1].processed, done[-1].total)


def test_a_patch_of_another_base_is_refused(chain: Path, hire: Callable[..., None]) -> None:
    rng = np.random.default_rng(11)
    with ingot.open(chain / "base.safetensors") as base:
        other = {name: moved(rng, tensor.numpy()) for name, tensor in base.items()}
    ingot.save(chain / "base.safetensors", other, overwrite=True)
    hire(Inline())
    with pytest.raises(IngotError) as caught:
        patch(chain, "x.zt", engine="processes")
    assert caught.value.rule == "delta.base"
    assert not (chain / "x.zt").exists()


def test_a_delta_of_the_other_tool_is_proven_by_its_parent_hash(folder: Path, hire: Callable[..., None]) -> None:
    """The driver reads the base for it, in order."""
    diff(folder, "d.wdelta", ALIKE)
    told = (folder / "alike.safetensors", folder / "d.wdelta")
    ingot.patch(*told, folder / "here.safetensors")
    hire(Inline(), Inline())
    assert ingot.patch(*told, folder / "x.safetensors", engine="processes").verified_base
    assert (folder / "x.safetensors").read_bytes() == (folder / "here.safetensors").read_bytes()
    with pytest.raises(IngotError) as caught:
        ingot.patch(folder / "tuned.safetensors", told[1], folder / "y.safetensors", engine="processes")
    assert caught.value.rule == "delta.base"


def test_what_a_delta_costs_is_told_by_workers_too(folder: Path, hire: Callable[..., None]) -> None:
    diff(folder, "d.zt", strategy="int4")
    paths = [folder / name for name in ("base.safetensors", "d.zt", "more.safetensors")]
    pool, events = Inline(lambda count: WorkerLostError("lost") if count == 2 else None), list[Any]()
    hire(pool)
    assert delta_cost(*paths, engine="processes", progress=events.append) == delta_cost(*paths)
    assert len(pool.tasks) > 3
    assert events[-1].processed == events[-1].total


@pytest.mark.parametrize("more", [{"engine": "fog"}, {"engine": "processes", "address": "host:1"}])
def test_an_unknown_engine_is_refused(folder: Path, more: dict[str, Any]) -> None:
    with pytest.raises(IngotError) as caught:
        diff(folder, "x.zt", **more)
    assert caught.value.rule == "cluster.engine"


def test_a_state_dict_is_for_this_process_alone(folder: Path) -> None:
    with pytest.raises(IngotError) as caught:
        ingot.diff({"a": np.zeros(3)}, folder / "tuned.safetensors", folder / "x.zt", engine="processes")
    assert caught.value.rule == "cluster.engine"


@pytest.mark.parametrize(
    "change",
    [
        {"tensor": "model.norm"},  # in neither
        {"tensor": "norm"},  # of another shape
        {"source": 0},
        {"step_type": "patch"},
        {"options": {"bits": 3}},
        {"step_type": "move"},
    ],
)
def test_a_step_that_does_not_fit_is_refused(folder: Path, change: dict[str, Any]) -> None:
    """As plans of conversions are: what it writes is worked out anew."""
    with ingot.open(folder / "base.safetensors") as base, ingot.open(folder / "tuned.safetensors") as tuned:
        sources, format = [base, tuned], FORMATS["zt"]
        both = PairMap(base, tuned)[NAMES[0]]
        step = DiffPlannerData.from_planner(DiffPlanner("zt", "int4", is_default=False))(both).step
        assert step_data(next(bind_steps([step], sources, format)))["spec"] == step.spec
        with pytest.raises(IngotError) as caught:
            list(bind_steps([structs.replace(step, **change)], sources, format))
    assert caught.value.rule == "plan.step"
