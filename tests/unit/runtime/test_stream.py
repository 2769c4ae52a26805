"""Streamed weights: the same model in the memory of two layers."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError, IntegrityError
from ingot.runtime.evaluation.generate import generate
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.options import LoadOptions
from ingot.runtime.loading.transformers import load_model
from tests.support.models import KINDS, make, make_tokenizer, output_of, tokens

ALL = """name = "all"
description = "all"
[[rules]]
label = "all"
match = ["*"]
min_ndim = 2
codec = "affine"
options = { bits = 4, group = 16 }
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipes") / "all.toml"
    path.write_text(ALL)
    return str(path)


@pytest.fixture(scope="module")
def small(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, everything in INT4 (in .zt, where nothing keeps it packed by itself)."""
    root = tmp_path_factory.mktemp("small")
    size = make_tokenizer(root / "words")
    make("llama", root / "llama", vocab_size=size, num_hidden_layers=6, eos_token_id=None)
    make_tokenizer(root / "llama")
    ingot.convert(root / "llama", root / "zt", recipe, format="zt")
    return root / "zt"


def loaded(path: Path, **options: Any) -> tuple[Any, LoadReport]:
    reports: list[LoadReport] = []
    model = load_model(path, report=reports.append, **options)
    return model, reports[0]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_models_compute_the_same(kind: str, recipe: str, tmp_path: Path) -> None:
    """Tied weights, biases, merged experts and norms of every kind; what is not streamed is as always."""
    ingot.convert(make(kind, tmp_path / "source"), tmp_path / "zt", recipe, format="zt")
    model, report = loaded(tmp_path / "zt", stream=True)
    whole = load_model(tmp_path / "zt")
    assert report.streamed > 0
    for _ in range(2):
        assert torch.equal(output_of(model), output_of(whole))
    for name, values in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], values)


def test_a_layer_has_values_while_it_computes_and_not_after(small: Path) -> None:
    model, _ = loaded(small, stream=True)
    held: list[int] = []

    def count(*_: Any) -> None:
        held.append(sum(isinstance(layer.mlp.up_proj.weight, torch.nn.Parameter) for layer in model.model.layers))

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(count)
    output_of(model)
    assert held == [1] * 6
    count()
    assert held[-1] == 0


def test_a_failed_pass_leaves_nothing_behind(small: Path) -> None:
    model, _ = loaded(small, stream=True)
    wanted = output_of(model)
    handle = model.model.layers[2].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output_of(model)
    handle.remove()
    assert not any(isinstance(layer.mlp.up_proj.weight, torch.nn.Parameter) for layer in model.model.layers)
    assert torch.equal(output_of(model), wanted)


def test_layers_in_any_order(small: Path) -> None:
    """What was read ahead is of no use then, and nothing else is wrong."""
    orders = []
    for stream in (False, True):
        model, _ = loaded(small, stream=stream)
        model.model.layers = torch.nn.ModuleList([model.model.layers[number] for number in (4, 1, 1, 0, 5, 2)])
        with torch.inference_mode():
            orders.append(model(tokens(), use_cache=False).logits)
    assert torch.equal(*orders)


def test_a_model_larger_than_max_ram_generates(small: Path) -> None:
    whole = generate(small, "the", 8)
    assert whole.load.decoded > 40_000
    with pytest.raises(IngotError) as error:
        generate(LoadOptions(small, max_ram=40_000), "the", 8)
    assert error.value.rule == "ram.guard"
    streamed = generate(LoadOptions(small, max_ram=40_000, stream=True), "the", 8)
    assert streamed.tokens == whole.tokens
    assert streamed.load.streamed == whole.load.decoded - streamed.load.decoded
    assert streamed.load.decoded + streamed.load.window <= 40_000
    with pytest.raises(IngotError) as error:
        generate(LoadOptions(small, max_ram=streamed.load.window // 2, stream=True), "the", 8)
    assert error.value.rule == "ram.guard"


def test_on_the_command_line(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(small), "the", "--max-tokens", "3", "--max-ram", "40000"]) == 1
    assert run(["generate", str(small), "the", "--max-tokens", "3", "--max-ram", "40000", "--stream"]) == 0
    assert "streamed" in capsys.readouterr().err


def test_mapped_weights_are_not_streamed(small: Path) -> None:
    _, report = loaded(small.parent / "llama", stream=True)
    assert report.mapped > 0
    assert report.streamed == report.window == 0


def test_packed_layers_stay_and_the_rest_is_streamed(small: Path) -> None:
    model, report = loaded(small, stream=True, keep_packed=True, dtype="f32")
    assert report.packed > 0
    assert 0 < report.streamed < report.packed
    assert torch.equal(output_of(model), output_of(load_model(small, keep_packed=True, dtype="f32")))


def test_changed_files_are_refused(small: Path, tmp_path: Path) -> None:
    for file in small.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model, _ = loaded(tmp_path, stream=True)
    output_of(model)
    weights = next(tmp_path.glob("*.zt"))
    data = bytearray(weights.read_bytes())
    with weights.open("r+b") as file:
        file.write(data)
    os.utime(weights, ns=(1, 1))
    with pytest.raises(IntegrityError) as error:
        output_of(model)
    assert error.value.rule == "store.changed"


def test_a_streamed_model_is_neither_copied_nor_saved(small: Path, tmp_path: Path) -> None:
    model, _ = loaded(small, stream=True)
    out = tmp_path / "saved"
    for attempt in (
        lambda: copy.deepcopy(model),
        lambda: model.save_pretrained(out),
        lambda: model.model.save_pretrained(out),
    ):
        with pytest.raises(IngotError) as error:
            attempt()
        assert error.value.rule == "model.stream"
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")
def test_memory_is_that_of_two_layers(tmp_path: Path, recipe: str) -> None:
    """Sixteen layers of 5.5 MB in f32; beside two of them there is what torch and a decoder take."""
    size = make_tokenizer(tmp_path / "words")
    values = {"num_hidden_layers": 16, "hidden_size": 256, "intermediate_size": 1536, "vocab_size": size}
    make("llama", tmp_path / "llama", "float32", **values)
    ingot.convert(tmp_path / "llama", tmp_path / "zt", recipe, format="zt")
    code = (
        "import sys, threading, time, torch\n"
        "from ingot.runtime.loading.transformers import load_model\n"
        "from ingot.core.runtime.memory import anonymous_rss\n"
        "reports, peak, done = [], 0, False\n"
        "ids = torch.tensor([[5, 9, 33]])\n"
        "load_model(sys.argv[2])(ids)\n"
        "before = anonymous_rss()\n"
        "def watch():\n"
        "    global peak\n"
        "    while not done:\n"
        "        peak = max(peak, anonymous_rss() - before)\n"
        "        time.sleep(0.001)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "model = load_model(sys.argv[1], stream=True, report=reports.append)\n"
        "with torch.inference_mode():\n"
        "    for _ in range(3): model(ids)\n"
        "done = True; thread.join()\n"
        "report = reports[0]\n"
        "print(peak, report.window, report.streamed)\n"
    )
    small = make("llama", tmp_path / "one", "float32", **{**values, "num_hidden_layers": 1, "hidden_size": 32})
    command = [sys.executable, "-c", code, str(tmp_path / "zt"), str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, window, streamed = map(int, done.stdout.split())
    assert streamed > 7 * window
    assert peak < window + (8 << 20), (peak, window)
