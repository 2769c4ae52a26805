"""Plans as JSON: executed by another process they give the same bytes, and nothing else makes steps of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.conversion.planfile import VERSION, PlanData
from ingot.engine.data import from_json_value, to_json_value
from ingot.errors import FormatError, IngotError, IntegrityError

RECIPE = """
[[rules]]
match = ["*.mlp.*"]
codec = "affine"
options = { bits = 4, group = 32 }
encoding = "zstd"
[[rules]]
match = ["*.self_attn.*"]
codec = "palette"
options = { bits = 2 }
"""


def planned(src: Path, dst: Path, plan: Path, *more: str) -> dict[str, Any]:
    assert run(["convert", str(src), str(dst), "--plan-out", str(plan), *more]) == 0
    assert not dst.exists()
    found: dict[str, Any] = json.loads(plan.read_bytes())
    return found


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    """A model with weights per matrix, in a type that .squizd and .npz-like folders have no name for."""
    rng = np.random.default_rng(3)
    names = [f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("mlp.up_proj", "self_attn.q_proj")]
    ingot.save(tmp_path / "m.safetensors", {n: rng.standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for n in names})
    ingot.save(tmp_path / "i.safetensors", {n: rng.random(64).astype(np.float32) + 0.1 for n in names})
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.mark.parametrize("suffix", [".zt", ".squizd"])
def test_another_process_gives_the_same_bytes(fused: Path, suffix: str) -> None:
    src, out, recipe = fused / "m.safetensors", fused / f"out{suffix}", str(fused / "recipe.toml")
    more = ["--importance", str(fused / "i.safetensors")] if suffix == ".zt" else []
    recipe = recipe if suffix == ".zt" else "int4"
    assert run(["convert", str(src), str(fused / f"direct{suffix}"), "--recipe", recipe, *more, "-q"]) == 0
    planned(src, out, fused / "plan.json", "--recipe", recipe, *more)
    command = [sys.executable, "-m", "ingot.cli.main", "run-plan", str(fused / "plan.json"), "--json"]
    done = subprocess.run(command, capture_output=True, check=True, cwd="/")
    assert out.read_bytes() == (fused / f"direct{suffix}").read_bytes()
    assert json.loads(done.stdout)["actions"] == {"encoded": 4}


@pytest.mark.parametrize(
    ("start", "end", "recipe"), [("x.zt", "y.squizd", None), ("x.npy/", "z.safetensors", None), ("x.zt", "y/", None)]
)
def test_moves_repacks_and_folders(model: Path, tmp_path: Path, start: str, end: str, recipe: str | None) -> None:
    format = "npydir" if start.endswith("/") else None
    ingot.convert(model, tmp_path / start.rstrip("/"), "squish-int8" if format else "int4", format)
    more = ["--recipe", recipe] if recipe else []
    source, folder = tmp_path / start.rstrip("/"), end.endswith("/")
    ingot.convert(source, tmp_path / f"direct-{end}".rstrip("/"), recipe)
    planned(source, tmp_path / end.rstrip("/"), tmp_path / "plan.json", *more)
    report = ingot.execute(tmp_path / "plan.json")
    for name in report.files:
        made = tmp_path / end / name if folder else tmp_path / name
        direct = tmp_path / f"direct-{end}" / name if folder else tmp_path / f"direct-{name}"
        assert made.read_bytes() == direct.read_bytes()


@pytest.mark.parametrize(
    ("end", "more"), [("b.zt", ["--container", "2"]), ("b.squizd", []), ("b", ["-f", "awq", "--keep-names"])]
)
def test_blocks_of_gguf_go_by_plan_where_they_go_directly(fused: Path, end: str, more: list[str]) -> None:
    source = fused / "m.gguf"
    ingot.convert(fused / "m.safetensors", source, "q4_0", keep_names=True)
    assert run(["convert", str(source), str(fused / f"direct-{end}"), *more, "-q"]) == 0
    planned(source, fused / end, fused / "plan.json", *more)
    report = ingot.execute(fused / "plan.json")
    assert report.exact
    assert not report.actions.get("decoded")
    # AWQ's readers round to the type of the scales: that is told, and the numbers in f32 are those of the blocks.
    assert ingot.compare(source, fused / end).same == (end != "b") == (not report.notes)
    with ingot.open(source) as blocks, ingot.open(fused / end) as made:
        assert all(np.array_equal(tensor.numpy("f32"), made[name].numpy("f32")) for name, tensor in blocks.items())
    for name in report.files:
        there, direct = (
            (fused / end, fused / f"direct-{end}") if "." in end else (fused / end / name, fused / "direct-b" / name)
        )
        assert there.read_bytes() == direct.read_bytes()


def test_a_delta_between_files_of_container_2(fused: Path) -> None:
    for name, recipe in ("base", None), ("tuned", "int4"):
        ingot.convert(fused / "m.safetensors", fused / f"{name}.zt", recipe, container=2)
    assert not ingot.compare(fused / "base.zt", fused / "tuned.zt").same
    ingot.diff(fused / "base.zt", fused / "tuned.zt", fused / "d.zt", allow_larger=True)  # values of 4 bits, exactly
    ingot.patch(fused / "base.zt", fused / "d.zt", fused / "again.safetensors")
    assert ingot.compare(fused / "tuned.zt", fused / "again.safetensors").same


def test_views_are_made_again(model: Path, tmp_path: Path) -> None:
    """Blocks of channels that a conversion leaves out are chosen from the same weights, and compared."""
    ingot.convert(model, tmp_path / "direct.zt", "int4", prune=0.5, prune_block=8)
    more = ["--recipe", "int4", "--prune", "0.5", "--prune-block", "8"]
    planned(model, tmp_path / "out.zt", tmp_path / "plan.json", *more)
    report = ingot.execute(tmp_path / "plan.json", max_ram="8GiB", threads=1)
    assert report.pruned
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "direct.zt").read_bytes()


def test_some_of_the_steps_make_an_artifact_of_those_tensors(fused: Path) -> None:
    ingot.convert(fused / "m.safetensors", fused / "direct.zt", "int4")
    plan = planned(fused / "m.safetensors", fused / "out.zt", fused / "plan.json", "--recipe", "int4")
    steps = plan["steps"]
    for number, share in enumerate((steps[:1], steps[1:])):
        (fused / "share.json").write_text(json.dumps({**plan, "steps": share}))
        ingot.execute(fused / "share.json", fused / f"{number}.zt")
    with ingot.open(fused / "direct.zt") as direct:
        parts = [ingot.open(fused / f"{number}.zt") for number in range(2)]
        assert [name for part in parts for name in part] == list(direct)
        for part in parts:
            for name, tensor in part.items():
                assert dict(tensor.params) == dict(direct[name].params)
                for role, stored in tensor.parts.items():
                    assert bytes(stored.view()) == bytes(direct[name].parts[role].view())


def test_a_changed_source_is_refused(fused: Path) -> None:
    planned(fused / "m.safetensors", fused / "out.zt", fused / "plan.json", "--recipe", "int4")
    data = (fused / "m.safetensors").read_bytes()
    (fused / "m.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError) as caught:
        ingot.execute(fused / "plan.json")
    assert caught.value.rule == "plan.source"
    assert not (fused / "out.zt").exists()


def changed(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(plan: dict[str, Any]) -> None:
        inner: Any = plan
        *keys, last = path.split(".")
        for key in keys:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        inner[int(last) if isinstance(inner, list) else last] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("version", VERSION - 1, "plan.version"),
        ("version", VERSION + 1, "plan.version"),
        ("ingot", "0.0.1", "plan.version"),
        ("steps", 7, "plan.json"),
        ("stray", 7, "plan.json"),
        ("steps.0.kind", "run", "plan.json"),
        ("steps.0.stray", 1, "plan.json"),
        ("steps.0.source", 1, "plan.step"),
        ("steps.0.source", -1, "plan.step"),
        ("steps.0.tensor", "none", "plan.step"),
        ("steps.0.kind", "move", "plan.step"),
        ("steps.0.kind", "repack", "plan.step"),
        ("steps.0.spec.codec", "no-such", "plan.step"),
        ("steps.0.spec.codec", [], "plan.step"),
        ("steps.0.spec.parts", [{}], "plan.step"),
        ("steps.0.spec.parts.0.length", 1 << 60, "plan.step"),
        ("steps.0.spec.shape", [1], "plan.step"),
        ("steps.0.options", {"bits": 8}, "plan.step"),
        ("steps.0.options", {"bits": {"$bytes": "?"}}, "plan.step"),
        ("steps.0.options", {"bits": {"$array": ["O", [1], ""]}}, "plan.step"),
        ("steps.0.options", {"bits": {"$array": ["<f8", [1 << 60], ""]}}, "plan.step"),
        ("target.digest", "md5", "convert.digest"),
        ("source.identity", [], "plan.source"),
        ("view.without", ["none"], "tensor.unknown"),
        ("view.prune", 0.5, "convert.prune"),
        ("target.path", "x" * 300 + ".zt", "store.name-too-long"),
        ("target.path", "\ud800.zt", "plan.json"),
        ("source.url", "file:///" + "x" * 300, "store.name-too-long"),
        ("source.url", "\udfff", "plan.json"),
        ("recipe", "\udcff", "plan.json"),
        ("steps.0.tensor", "\ud800", "plan.json"),
        ("steps.0.options", {"\ud800": 1}, "plan.json"),
    ],
)
def test_other_plans_are_refused_by_rule(fused: Path, path: str, value: Any, rule: str) -> None:
    plan = planned(fused / "m.safetensors", fused / "out.zt", fused / "plan.json", "--recipe", "int4")
    changed(path, value)(plan)
    (fused / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(IngotError) as caught:
        ingot.execute(fused / "plan.json")
    assert caught.value.rule == rule
    assert not (fused / "out.zt").exists()


def test_fields_and_version_of_plans_change_together() -> None:
    """A new digest here needs a new ``VERSION``, so that plans with the old fields are refused."""

    def without_description(item: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in item.items() if key != "description"}

    schema = json.loads(json.dumps(msgspec.json.schema(PlanData)), object_hook=without_description)
    digest = sha256(json.dumps(schema, sort_keys=True).encode()).hexdigest()
    assert (VERSION, digest[:16]) == (9, "1d61216ac87d20ef")


def test_what_claims_to_be_exact_is_measured_all_the_same(fused: Path) -> None:
    plan = planned(fused / "m.safetensors", fused / "out.zt", fused / "plan.json", "--recipe", "int4")
    for step in plan["steps"]:
        step.update(exact=True, action="decoded")
    (fused / "plan.json").write_text(json.dumps(plan))
    report = ingot.execute(fused / "plan.json")
    assert not report.exact
    assert all(item.error is not None and item.action == "encoded" for item in report.tensors)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"version":1,"version":1}', b'{"version":NaN}', b"[" * 100_000, b'{"\\ud800":1}']
)
def test_no_json(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(FormatError) as caught:
        ingot.execute(tmp_path / "plan.json")
    assert caught.value.rule == "plan.json"


def test_values_that_json_has_no_words_for_come_back() -> None:
    value = {"a": [1, 2.5, float("inf"), True, None], "b": b"\x00\xff", "c": {"d": np.arange(6.0).reshape(2, 3)}}
    found = from_json_value(json.loads(json.dumps(to_json_value(value))))
    assert found["a"] == value["a"]
    assert found["b"] == value["b"]
    assert np.array_equal(found["c"]["d"], np.arange(6.0).reshape(2, 3))
