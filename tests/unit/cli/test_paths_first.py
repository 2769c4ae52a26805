"""A path that names nothing is refused before a command imports the code that computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.cli.main import run
from ingot.errors import UsageError
from ingot.stores.location import require_local

COMMANDS = [
    *(f"{name} PATH" for name in ("inspect", "verify", "seal", "matrix", "int4", "run-plan", "plan")),
    *("cache status PATH", "cache build PATH", "cache drop PATH", "kernel PATH name", "generate PATH text"),
    *("store ls PATH", "store rm PATH name", "store gc PATH", "store verify PATH", "store get PATH name DST"),
    *("compare PATH PATH", "report PATH -o x.html", "diff PATH PATH -o x.zt", "patch PATH PATH -o x.zt"),
    *("convert PATH x.zt --recipe int4", "quantize PATH -o x --for vllm", "calibrate PATH -o s.safetensors"),
    *("merge PATH lora -o x", "adapter convert PATH -o x.gguf", "adapter extract PATH PATH -o x"),
    *("extract PATH --coreml", "extract PATH --model -o x.mlpackage", "eval PATH --text PATH"),
    *("store add library PATH",),
]
PROGRAM = """
import json, sys
from ingot.cli.main import run
code = run(json.loads(sys.argv[1]))
heavy = ("torch", "transformers", "ingot.codecs.table", "ingot.conversion.run", "huggingface_hub")
print(json.dumps([code, [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.parametrize("words", COMMANDS)
def test_a_missing_path_is_refused(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = str(tmp_path / "gone")
    assert run([gone if word == "PATH" else word for word in words.split()]) == 2
    assert f"{gone}: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["eval PATH --text PATH", "convert PATH x.zt --recipe int4", "diff PATH PATH -o x.zt"]
)
def test_nothing_heavy_is_imported_for_it(words: str, tmp_path: Path) -> None:
    command = [str(tmp_path / "gone") if word == "PATH" else word for word in words.split()]
    program = [sys.executable, "-c", PROGRAM, json.dumps(command)]
    output = subprocess.run(program, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert json.loads(output) == [2, []]


def test_an_operand_of_a_merge_may_have_a_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    present, gone = tmp_path / "present", tmp_path / "gone"
    present.mkdir()
    (tmp_path / "named:0.5").mkdir()
    assert run(["merge", str(tmp_path / "named:0.5"), str(present), "-o", str(tmp_path / "out")]) != 0
    assert "no such file or folder" not in capsys.readouterr().err
    for operands in (["PRESENT:0.7", "GONE:0.3"], ["GONE:1e-1", "PRESENT"], ["PRESENT:.5", "PRESENT:-1", "GONE"]):
        paths = [item.replace("PRESENT", str(present)).replace("GONE", str(gone)) for item in operands]
        assert run(["merge", *paths, "-o", str(tmp_path / "out"), "--method", "linear"]) == 2
        assert f"{gone}: no such file or folder" in capsys.readouterr().err


def test_a_similar_name_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert run(["inspect", str(tmp_path / "modl.safetensors")]) == 2
    assert "did you mean 'model.safetensors'" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["hf://org/name", "s3://bucket/model", "org/name", "", "x" * 5000])
def test_what_may_exist_elsewhere_is_left_to_the_command(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_local(path)
    (tmp_path / "org").mkdir()
    if path == "org/name":
        with pytest.raises(UsageError, match="no such file or folder"):
            require_local(path)
