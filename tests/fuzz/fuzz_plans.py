"""Fuzzes plans: any JSON is carried out as the plan of a conversion, a diff or a patch, or ends in an IngotError.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_plans -max_total_time=600

Findings are written to the current folder as crash-*; ``python -m tests.fuzz.fuzz_plans crash-...`` replays one. By its
first byte an input is a plan as it is, or a series of choices that change values of a plan that is right. Sources and
results lie in memory. A result has the tensors that its plan is of: nothing is lost without an error.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris
import numpy as np

import ingot
from ingot.conversion import run as convert
from ingot.conversion.options import ConvertOptions
from ingot.conversion.planfile import plan_json
from ingot.delta import planfile
from ingot.errors import IngotError, UsageError
from ingot.stores.location import Location
from ingot.stores.memory import MemoryTarget, shared_files
from tests.fuzz.common import VALUES, as_json, changed, fuzz
from tests.support.reading import checked

RECIPES = ("keep", "bf16", "int4", "lossless")
FILES = ("m.safetensors", "t.safetensors", "d.zt")
BASE = Path(tempfile.mkdtemp(prefix="ingot-fuzz-"))


def prepare() -> list[dict[str, Any]]:
    """Put checkpoints into memory and return plans of conversions that are right."""
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": values + layer for layer in range(2)}
    ingot.save("memory:fuzz/m.safetensors", {**tensors, "n": values[0]})
    ingot.save("memory:fuzz/t.safetensors", {**{name: each + 1 for name, each in tensors.items()}, "n": values[0]})
    ingot.diff("memory:fuzz/m.safetensors", "memory:fuzz/t.safetensors", "memory:fuzz/d.zt")
    plans = []
    for recipe in RECIPES:
        for suffix in (".zt", ".safetensors", ".squizd"):
            options = ConvertOptions("memory:fuzz/m.safetensors", f"memory:out/m{suffix}", recipe)
            with suppress(IngotError), convert.prepare(options) as prepared:
                plans.append(json.loads(plan_json(prepared, options)))
    return plans


def write_local(name: str) -> Path:
    """Write a file of memory to a disk, where workers find it."""
    (BASE / name).write_bytes(shared_files("fuzz")[name])
    return BASE / name


def delta_plans() -> list[dict[str, Any]]:
    """Return plans of a diff and a patch that are right: what the driver hands to workers."""
    plans: list[dict[str, Any]] = []
    write = planfile.delta_plan_json

    def record(*arguments: Any) -> bytes:
        plans.append(json.loads(write(*arguments)))
        raise UsageError("recorded", rule="fuzz.recorded")

    planfile.delta_plan_json = record
    m, t, d = (str(write_local(name)) for name in FILES)
    for call in (
        lambda: ingot.diff(m, t, BASE / "diffed.zt", engine="processes", strategy="exact"),
        lambda: ingot.patch(m, d, BASE / "patched.zt", engine="processes"),
    ):
        with suppress(IngotError):
            call()
    planfile.delta_plan_json = write
    if len(plans) != 2:
        raise AssertionError(f"expected the plans of a diff and a patch, found {len(plans)}")
    return plans


PLANS = prepare()
DELTA_PLANS = delta_plans()
SOURCES = {name: bytes(shared_files("fuzz")[name]) for name in FILES}
CHOICES = [*VALUES, *(f"memory:fuzz/{name}" for name in FILES), "memory:fuzz/none", "memory:", "file:///\ud800", "hf:x"]
CHOICES += [
    "move",
    "encode",
    "repack",
    "diff",
    "patch",
    "dense",
    "affine",
    "float_entropy",
    "f32",
    "bf16",
    "u8",
    "zstd",
]
CHOICES += [{"$bytes": "AA=="}, {"$array": ["<f4", [1], "AAAAAA=="]}, {"$array": ["|O", [1], ""]}, {"$float": "nan"}]
CHOICES += [{"$array": ["<f4", [-1], "AAAAAA=="]}, {"$float": "x"}, {"$bytes": 3}, PLANS[0]["steps"][0], "n"]


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    kind = data[:1]
    if kind >= b"\xc0":
        raw = data[1:]
    else:
        choices = atheris.FuzzedDataProvider(data[1:])
        raw = as_json(changed(choices, choices.PickValueInList(PLANS if kind < b"\x80" else DELTA_PLANS), CHOICES))
    for name in ("fuzz", "out"):
        shared_files(name).clear()
    shared_files("fuzz").update({name: bytearray(content) for name, content in SOURCES.items()})
    shared_files("fuzz")["q.json"] = bytearray(raw)
    for run in (run_conversion, run_delta):
        try:
            run(raw)
        except IngotError as error:
            checked(error)


def run_conversion(raw: bytes) -> None:
    """Carry out a plan of a conversion; the result has what was planned."""
    report = ingot.execute("memory:fuzz/q.json", out="memory:out/x")
    repr(report)
    planned = [step["spec"]["name"] for step in json.loads(raw)["steps"]]
    with ingot.open("memory:out/x") as made:
        if sorted(made) != sorted(planned):
            raise AssertionError(f"expected {planned}, found {list(made)}")


def run_delta(raw: bytes) -> None:
    """Open a plan of a diff or patch as a worker does, and make its steps."""
    opened = planfile.shared(Location.parse("memory:fuzz/q.json"))
    try:
        plan = opened.plan(range(len(opened.names)))
        opened.hashed(range(len(opened.names)))
        opened.writer(MemoryTarget())
        if [step.spec.name for step in plan.steps] != list(opened.names):
            raise AssertionError("expected steps of the planned tensors")
    finally:
        opened.close()


if __name__ == "__main__":
    fuzz(one_input, [b"\xff" + as_json(plan) for plan in (*PLANS, *DELTA_PLANS)], 65536)
