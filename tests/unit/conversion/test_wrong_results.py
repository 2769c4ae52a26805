"""Workers whose results are wrong: they are noticed, and other workers do their tasks; an error if all are wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cluster import tasks
from ingot.delta.cost import delta_cost
from ingot.errors import IngotError
from tests.support.workers import Inline

NAMES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(4)]
Change = Callable[[Any], Any]
Hire = Callable[..., None]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four matrices, two in each task, and one that is cut into rows."""
    rng = np.random.default_rng(5)
    sizes = dict.fromkeys(NAMES, 64) | {"model.layers.9.mlp.up_proj.weight": 2000}
    ingot.save(
        tmp_path / "m.safetensors",
        {name: rng.standard_normal((rows, 128)).astype(np.float32) for name, rows in sizes.items()},
    )
    monkeypatch.setattr(tasks, "MIN_TASK_BYTES", 1 << 16)
    return tmp_path / "m.safetensors"


def set_at(*path: str | int, value: Any = None, by: Callable[[Any], Any] | None = None) -> Change:
    """Return what sets a value deep in a result, or changes it."""

    def change(result: Any) -> Any:
        target = result
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value if by is None else by(target[path[-1]])
        return result

    return change


def step(*path: str | int, **how: Any) -> Change:
    return set_at("steps", 0, *path, **how)


def swap_steps(result: Any) -> Any:
    result["steps"].reverse()
    return result


EVERYWHERE: dict[str, Change] = {
    "another step": step("number", value=1),
    "a step that is not there": step("number", value=1000),
    "a negative step": step("number", value=-1),
    "a step twice": lambda result: {**result, "steps": result["steps"][:1] * 2},
    "a step less": lambda result: {**result, "steps": result["steps"][1:]},
    "none": lambda result: {**result, "steps": []},
    "swapped": swap_steps,
    "another task": set_at("task", "stop", by=lambda stop: stop + 1),
    "another attempt": set_at("attempt", value="00000000"),
    "negative seconds": set_at("seconds", value=-1.0),
    "no worker": set_at("worker", value=None),
    "an unknown field": lambda result: {**result, "run": "code"},
    "no object": lambda result: 3,
    "parameters": step("params", value={"bits": 2}),
    "an error that is no number": step("error", value={"count": "many"}),
}
IN_PLACE: dict[str, Change] = {
    **EVERYWHERE,
    "a digest": step("written", "blobs", 0, 3, value="crc32c:0x00000000"),
    "a digest that is none": step("written", "blobs", 0, 3, value=7),
    "a digest of the manifest": step("written", "digests", 0, value="crc32c:0x00000000"),
    "another place": step("written", "blobs", 0, 1, by=lambda offset: offset + 64),
    "a negative place": step("written", "blobs", 0, 1, value=-64),
    "another size": step("written", "blobs", 0, 2, by=lambda size: size - 1),
    "another file": step("written", "blobs", 0, 0, value="../../m.safetensors"),
    "an absolute file": step("written", "blobs", 0, 0, value="/etc/passwd"),
    "another name": step("written", "name", value=NAMES[3]),
    "a part less": step("written", "blobs", by=lambda blobs: blobs[:-1]),
    "no record": step("written", value=None),
    "a record of nothing": step("written", value={}),
    "a file that is not there": set_at("files", value=["x.bin"]),
}
IN_A_FILE: dict[str, Change] = {
    **EVERYWHERE,
    "a digest": step("crc", value="crc32c:0x00000000"),
    "no digest": step("crc", value=""),
    "a digest that is none": step("crc", value="md5:0"),
    "another offset": step("offset", value=64),
    "another size": step("runs", 0, 1, by=lambda size: size - 1),
    "a negative size": step("runs", 0, 1, value=-1),
    "too large": step("runs", 0, 1, value=1 << 60),
    "an unknown part": step("runs", 0, 0, value="code"),
    "a file outside": step("file", value="../../../m.safetensors"),
    "an absolute file": step("file", value="/etc/passwd"),
    "a file of nobody": set_at("files", value=["../m.safetensors"]),
    "another file's state": set_at("states", value=["7"]),
    "no file": set_at("files", value=[]),
    "in its place": step("written", value={"name": NAMES[0], "blobs": []}),
}


def first(change: Change) -> Callable[[int, Any], Any]:
    """Return what changes the result of the first task alone."""
    return lambda count, result: change(deepcopy(result)) if count == 1 else result


@pytest.mark.parametrize("lie", IN_PLACE)
def test_a_wrong_result_about_final_places(source: Path, lie: str, hire: Hire) -> None:
    check(source, "x.zt", IN_PLACE[lie], hire)


@pytest.mark.parametrize("lie", IN_A_FILE)
def test_a_wrong_result_about_bytes_for_the_driver(source: Path, lie: str, hire: Hire) -> None:
    check(source, "x.squizd", IN_A_FILE[lie], hire)


def check(source: Path, name: str, change: Change, hire: Hire) -> None:
    ingot.convert(source, source.parent / f"here-{name}", recipe="int4")
    pool = Inline(change=first(change))
    hire(pool)
    ingot.convert(source, source.parent / name, recipe="int4", engine="processes")
    assert [task for task in pool.tasks if task == pool.tasks[0]] == [pool.tasks[0]] * 2
    assert len(pool.losses) == 1
    assert (source.parent / name).read_bytes() == (source.parent / f"here-{name}").read_bytes()


@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("lie", ["a digest", "another place", "another size", "another file", "a part less"])
def test_places_in_other_formats(source: Path, format: str, lie: str, hire: Hire) -> None:
    more: dict[str, Any] = {"recipe": "bf16", "format": format, "keep_names": format == "gguf"}
    suffix = "safetensors" if format == "safetensors" else "gguf"
    ingot.convert(source, source.parent / f"here.{suffix}", **more)
    pool = Inline(change=first(IN_PLACE[lie]))
    hire(pool)
    ingot.convert(source, source.parent / f"x.{suffix}", engine="processes", **more)
    assert len(pool.losses) == 1
    assert (source.parent / f"x.{suffix}").read_bytes() == (source.parent / f"here.{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["x.zt", "x.squizd"])
def test_bytes_that_are_not_those_of_the_digests(source: Path, name: str, hire: Hire) -> None:
    """A worker that writes others than it says, or whose disk does."""
    ingot.convert(source, source.parent / f"here-{name}", recipe="int4")

    def damage(result: Any) -> Any:
        folder = source.parent / f".{name}.ingot-partial"
        if written := result["steps"][0]["written"]:
            path, offset = folder / "files" / written["blobs"][0][0], written["blobs"][0][1]
        else:
            path, offset = folder / "parts" / result["files"][0], 5
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        return result

    pool = Inline(change=first(damage))
    hire(pool)
    ingot.convert(source, source.parent / name, recipe="int4", engine="processes")
    assert len(pool.losses) == 1
    assert (source.parent / name).read_bytes() == (source.parent / f"here-{name}").read_bytes()


def test_rows_that_do_not_add_up_are_all_done_again(source: Path, hire: Hire) -> None:
    """One piece of a tensor has fewer bytes than it should; which one does not show."""
    ingot.convert(source, source.parent / "here.squizd", recipe="int4")
    changed = []

    def shorten(count: int, result: Any) -> Any:
        if result["task"]["rows"] is None or changed:
            return result
        changed.append(count)
        return step("runs", 0, 1, by=lambda size: size - 16)(cut_file(result))

    def cut_file(result: Any) -> Any:
        """Let the file and its digest fit what is said of it."""
        path = source.parent / ".x.squizd.ingot-partial" / "parts" / result["files"][0]
        data = path.read_bytes()
        size = result["steps"][0]["runs"][0][1]
        data = data[: size - 16] + data[size:]
        path.write_bytes(data)
        result["states"] = [str(len(data))]
        result["steps"][0]["crc"] = ingot.core.bytes.checksums.digest("crc32c", data)
        return result

    pool = Inline(slots=4, change=shorten)
    hire(pool)
    ingot.convert(source, source.parent / "x.squizd", recipe="int4", engine="processes")
    assert changed
    assert not pool.losses
    rows = [task for task in pool.tasks if task.rows is not None]
    assert len(rows) == 2 * len(set(rows))
    assert (source.parent / "x.squizd").read_bytes() == (source.parent / "here.squizd").read_bytes()


@pytest.mark.parametrize("name", ["x.zt", "x.squizd"])
def test_results_that_are_always_wrong_end_the_run(source: Path, name: str, hire: Hire) -> None:
    pool = Inline(change=lambda count, result: {**result, "steps": []})
    hire(pool)
    with pytest.raises(IngotError, match="returned a wrong result") as caught:
        ingot.convert(source, source.parent / name, recipe="int4", engine="processes")
    assert caught.value.rule == "cluster.lost"
    assert [path.name for path in source.parent.iterdir()] == ["m.safetensors"]


@pytest.fixture
def three(source: Path) -> list[Path]:
    """A base, a delta, and a fine-tune."""
    with ingot.open(source) as base:
        tuned = {name: tensor.numpy() * np.float32(1.01) for name, tensor in base.items()}
    ingot.save(source.parent / "tuned.safetensors", tuned)
    ingot.diff(source, source.parent / "tuned.safetensors", source.parent / "d.zt", strategy="int8")
    return [source, source.parent / "d.zt", source.parent / "tuned.safetensors"]


def test_digests_of_a_diff_that_a_worker_leaves_out_or_makes_up(three: list[Path], hire: Hire) -> None:
    base, _, tuned = three
    ingot.diff(base, tuned, base.parent / "here.zt")
    lies = [
        step("notes", "digests", value={}),
        step("notes", "digests", value={"0": "abc", "1": "abc"}),
    ]

    def change(count: int, result: Any) -> Any:
        return lies.pop()(result) if "steps" in result and lies else result

    pool = Inline(change=change)
    hire(pool)
    ingot.diff(base, tuned, base.parent / "x.zt", engine="processes")
    assert len(pool.losses) == 2
    assert (base.parent / "x.zt").read_bytes() == (base.parent / "here.zt").read_bytes()


ANSWERS: dict[str, Change] = {
    "one less": lambda result: {**result, "results": result["results"][1:]},
    "one more": lambda result: {**result, "results": result["results"] * 2},
    "of another tensor": set_at("results", 0, "name", value="other"),
    "another type": set_at("results", 0, value=3),
    "no list": set_at("results", value=None),
}


@pytest.mark.parametrize("lie", ANSWERS)
def test_wrong_answers_about_tensors(three: list[Path], lie: str, hire: Hire) -> None:
    for check_files in (partial(ingot.compare, three[0], three[2]), partial(delta_cost, *three)):
        here: Any = check_files()
        pool = Inline(change=first(ANSWERS[lie]))
        hire(pool)
        assert check_files(engine="processes") == here
        assert len(pool.losses) == 1
