"""Wrong calls of Python's functions: the error names the argument as Python spells it, and what was expected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.errors import IngotError

VALUES = {"a": np.ones((4, 4), np.float32)}
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("convert", (), {}, "expected convert(src, dst, ...), found no src and no dst"),
    ("convert", ("m.zt",), {}, "found no dst"),
    ("convert", (None, "x.zt"), {}, "expected a path as src, found None"),
    ("convert", ("m.zt", 3), {}, "expected a path as dst, found 3"),
    ("convert", ("m.zt", "x.zt"), {"recipes": "q4_k"}, "unknown option 'recipes' of convert (did you mean 'recipe'?)"),
    ("convert", ("m.zt", "x.zt"), {"recipe": 4}, "expected a path as recipe, found 4"),
    ("convert", ("m.zt", "x.zt"), {"recipe": "q4_kk"}, "did you mean 'q4_k'"),
    ("convert", ("m.zt", "x.zt"), {"format": "gguff"}, "unknown format 'gguff' (did you mean 'gguf'?)"),
    ("convert", ("m.zt", "x.zt"), {"format": 3}, "expected format to be text or None, found 3"),
    ("convert", ("m.zt", "x.gguf"), {"runtime": "lama.cpp"}, "did you mean 'llama.cpp'?"),
    ("convert", ("m.zt", "x.zt"), {"threads": "2"}, "expected threads to be an integer or None, found '2'"),
    ("convert", ("m.zt", "x.zt"), {"threads": 0}, "expected threads of at least 1, found 0"),
    ("convert", ("m.zt", "x.zt"), {"max_ram": "2 bananas"}, "max_ram: expected a size such as 2GiB"),
    ("convert", ("m.zt", "x.zt"), {"resume": "yes"}, "expected resume to be True or False, found 'yes'"),
    ("convert", ("m.zt", "x.zt"), {"digest": "md4"}, "expected the digest crc32c, sha256 or none, found 'md4'"),
    ("convert", ("m.zt", "x.zt"), {"device": "cudaa"}, "device=cudaa is for recipes with a quantizer"),
    ("convert", ("m.zt", "x.zt"), {"engine": "local2"}, "expected the engine local, processes or ray"),
    ("convert", ("m.zt", "x.zt"), {"io": "fast"}, "expected io 'auto', 'mmap' or 'pread', found 'fast'"),
    ("convert", ("m.zt", "x.zt"), {"drop": "a*"}, "expected drop to be a list of texts, found 'a*'"),
    ("convert", ("m.zt", "x.zt"), {"drop": [3]}, "expected drop to be a list of texts, found [3]"),
    ("convert", ("m.zt", "x.zt"), {"rename": {"a": "b"}}, "expected rename to be a list of texts, found {'a': 'b'}"),
    ("convert", ("m.zt", "x.zt"), {"rename": ["a"]}, "expected rename=OLD=NEW, with one star"),
    ("convert", ("m.zt", "x.zt"), {"rotate": "r3"}, "expected rotate=r1, r2 or r1,r2, found 'r3'"),
    ("convert", ("m.zt", "x.zt"), {"prune_block": 8}, "prune_block= and activations= need prune= with a share"),
    ("convert", ("m.zt", "x.zt"), {"progress": 3}, "expected progress to be a function of an event or None, found 3"),
    ("quantize", ("m.zt",), {}, "found no out"),
    ("quantize", (None, "x.gguf"), {}, "expected a path as model, found None"),
    ("quantize", ("m.zt", "x"), {}, "expected runtime= with a program (llama.cpp"),
    ("quantize", ("m.zt", "x.gguf"), {"bit": 4}, "unknown option 'bit' of quantize (did you mean 'bits'?)"),
    ("quantize", ("m.zt", "x.gguf"), {"bits": "4"}, "expected bits to be an integer or None, found '4'"),
    ("quantize", ("m.zt", "x.gguf"), {"bits": 17}, "llama.cpp has no preset of 17 bits (did you mean 16?)"),
    ("quantize", ("m.zt", "x.gguf"), {"bits": 4, "type": "Q4_K_M"}, "expected one of bits= and type=, found both"),
    ("quantize", ("m.zt", "x.gguf"), {"type": "Q4_K_X"}, "no type of llama.cpp (did you mean 'Q4_K_S'?)"),
    ("quantize", ("m.zt", "x.gguf"), {"calibration": "atuo"}, "calibration= 'atuo' is no mode (auto, full"),
    ("quantize", ("m.zt", "x.gguf"), {"calibration": None}, "expected a path as calibration, found None"),
    ("quantize", ("m.zt", "x.gguf"), {"time": -3}, "expected time to be text or None, found -3"),
    ("quantize", ("m.zt", "x.gguf"), {"group_size": "32"}, "expected group_size to be an integer or None"),
    ("open", (None,), {}, "expected a path, found None"),
    ("open", ("m.zt",), {"verify": "yes"}, "expected verify to be True or False, found 'yes'"),
    ("open", ("m.zt",), {"io": "fast"}, "expected io 'auto', 'mmap' or 'pread'"),
    ("open", ("m.zt",), {"max_decompressed": "lots"}, "max_decompressed: expected a size"),
    ("save", (None, VALUES), {}, "expected a path, found None"),
    ("save", ("x.zt", None), {}, "expected tensors to be a mapping of names to arrays, found NoneType None"),
    ("save", (VALUES, "x.zt"), {}, "expected tensors to be a mapping of names to arrays, found str 'x.zt'"),
    ("save", ("x.zt", VALUES), {"metadata": 3}, "expected metadata to be a mapping of keys to values, found int 3"),
    ("save", ("x.zt", {3: np.ones(3)}), {}, "expected text as a tensor's name, found 3"),
    ("save", ("x.zt", {"a": None}), {}, "a: expected an element type"),
    ("save", ("x.zt", VALUES), {"format": "nope"}, "unknown format 'nope'"),
    ("merge", ("m.zt",), {}, "expected merge(base, operands, out, ...), found no operands and no out"),
    ("merge", ("m.zt", [], "z"), {}, "expected at least one adapter or model, but the list is empty"),
    ("merge", ("m.zt", [3], "z"), {}, "expected paths as operands, found 3"),
    ("merge", ("m.zt", ["m.zt"], "z"), {"method": "avg"}, "there is no merging method 'avg'; expected one of linear"),
    ("merge", ("m.zt", ["m.zt"], "z"), {"weights": "1"}, "weights= needs method=, which merges models"),
    ("compare", ("m.zt",), {}, "found no b"),
    ("verify", ("m.zt",), {"strict": "x"}, "expected strict to be True or False, found 'x'"),
    ("diff", ("m.zt", None, "d"), {}, "expected a path as finetuned, found None"),
    ("diff", ("m.zt", "m.zt", "d.zt"), {"strategy": "nope"}, "expected a strategy exact"),
    ("patch", ("m.zt", [3], "p"), {}, "expected paths as deltas, found 3"),
    ("calibrate", ("m.zt", "s"), {"samples": "3"}, "expected samples to be an integer, found '3'"),
    ("extract_adapter", ("m.zt", "m.zt", "ad"), {"rank": "8"}, "expected rank to be an integer or None, found '8'"),
    ("load_model", (None,), {}, "expected a path as path, found None"),
    ("load_model", ("m.zt",), {"keep_packed": "no"}, "expected keep_packed to be True or False or None, found 'no'"),
    ("load_model", ("m.zt",), {"keep_paked": True}, "(did you mean 'keep_packed'?)"),
    ("plan", ("m.zt", "m99"), {}, "expected a chip (m1"),
    ("push", ("m.zt", None), {}, "expected dst to be text, found None"),
    ("Library", (3,), {}, "expected a path, found 3"),
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    ingot.save("m.zt", VALUES)
    return tmp_path


@pytest.mark.parametrize(("function", "arguments", "options", "message"), CALLS)
def test_an_error_names_the_argument(
    model: Path, function: str, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(IngotError) as caught:
        getattr(ingot, function)(*arguments, **options)
    assert message in str(caught.value)
    assert "--" not in str(caught.value).replace("`", "")
    assert [item.name for item in model.iterdir()] == ["m.zt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "m.zt", "-o", "x.gguf", "--bits", "4", "--type", "Q4_K_M"], "expected one of --bits and --type"),
        (["quantize", "m.zt", "-o", "x"], "expected --for with a program"),
        (["merge", "m.zt", "m.zt", "-o", "z", "--weights", "1"], "--weights needs --method"),
        (["convert", "m.zt", "x.zt", "--rename", "a"], "expected --rename OLD=NEW"),
    ],
)
def test_the_command_line_names_options_in_its_own_way(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_commands_in_errors_stay_commands(model: Path) -> None:
    """Text in backticks is for a shell."""
    ingot.save("q.zt", {"model.layers.0.mlp.up_proj.weight": np.ones((64, 64), np.float32)})
    ingot.convert("q.zt", "q4.zt", "int4")
    with pytest.raises(IngotError) as caught:
        ingot.quantize("q4.zt", "x.gguf", bits=4)
    assert "allow_requantize=True" in str(caught.value)
    assert "--allow-requantize" not in str(caught.value)
