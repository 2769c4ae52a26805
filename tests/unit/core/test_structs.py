"""Struct types are described before threads meet at them."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import msgspec
import pytest

import ingot
from ingot.core.parsing.strictjson import PRELOADED

RACE = """
import sys, threading
from ingot.formats.zt.specs import check_spec
from ingot.model.spec import PartSpec, TensorSpec
spec = TensorSpec("w", (4, 4), "f32", "dense", (PartSpec("data", "f32", 64),))
sys.setswitchinterval(1e-6)
barrier = threading.Barrier(8)
def use():
    barrier.wait()
    check_spec(spec)
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_every_struct_type_is_described_when_its_module_is_imported() -> None:
    for module in pkgutil.walk_packages(ingot.__path__, "ingot."):
        if module.name.startswith(
            (
                "ingot.formats.",
                "ingot.model.",
                "ingot.ext.",
                "ingot.conversion.",
                "ingot.delta.",
                "ingot.codecs.",
                "ingot.core.",
            )
        ):
            importlib.import_module(module.name)

    def below(kind: type) -> set[type]:
        return {inner for one in kind.__subclasses__() for inner in (one, *below(one))}

    own = {kind for kind in below(msgspec.Struct) if kind.__module__.startswith("ingot.")}
    assert own
    assert own == set(PRELOADED)


@pytest.mark.parametrize("runs", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_that_meet_at_the_first_use_of_a_type_do_not_crash(runs: int) -> None:
    assert [subprocess.run([sys.executable, "-c", RACE], check=False).returncode for _ in range(runs)] == [0] * runs
