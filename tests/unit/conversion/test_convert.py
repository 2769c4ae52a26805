"""``ingot.convert``: what comes out, how it is reported, and that nothing depends on threads or chunks."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.cli.main import run as ingot_command
from ingot.conversion.run import prepare
from ingot.core.runtime.memory import parse_size
from ingot.engine import resources as cost
from ingot.errors import CodecError, IngotError, IntegrityError, ResourceError, UnsupportedError, UsageError
from ingot.runtimes.table import RUNTIMES, command_lines

RECIPES = ("bf16", "int8", "int4", "int3", "int2", "lossless")


def assert_same_values(a: Path, b: Path) -> None:
    report = ingot.compare(a, b)
    assert report.same, [item for item in report.tensors if not item.same]


def test_moves_every_part_and_gives_the_source_back(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model / "model.safetensors", tmp_path / "out.zt")
    assert report.exact
    assert report.actions == {"moved": len(report.tensors)}
    ingot.convert(tmp_path / "out.zt", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_preset_keeps_sensitive_tensors_and_reports_errors(model: Path, tmp_path: Path, recipe: str) -> None:
    report = ingot.convert(model, tmp_path / "out.zt", recipe)
    by_name = {item.name: item for item in report.tensors}
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
        assert by_name[name].exact
    assert all((item.error is None) == item.exact for item in report.tensors)
    assert not any(finding.level == "error" for finding in ingot.verify(tmp_path / "out.zt"))
    if recipe in ("bf16", "lossless"):
        assert report.exact
        assert_same_values(model, tmp_path / "out.zt")
    else:
        assert report.worst is not None
        assert report.worst.error is not None
        assert 0 < report.worst.error["snr_db"] < 70


def test_reported_error_is_that_of_the_file(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "out.zt", "int4")
    compared = {item.name: item.stats for item in ingot.compare(model, tmp_path / "out.zt").tensors}
    for item in report.tensors:
        if item.error:
            stats = compared[item.name]
            assert stats is not None
            # The report measures the codec's f32 values; the file's logical dtype rounds them once more.
            assert item.error["rms"] == pytest.approx(stats.rms, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_do_not_depend_on_threads_or_chunks(
    model: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingot.convert(model, tmp_path / "one.zt", recipe, threads=1)
    expected = (tmp_path / "one.zt").read_bytes()
    monkeypatch.setattr(cost, "CHUNK_ELEMENTS", 500)
    monkeypatch.setattr(cost, "MOVE_BYTES", 777)
    ingot.convert(model, tmp_path / "many.zt", recipe, threads=5)
    assert (tmp_path / "many.zt").read_bytes() == expected


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("digest", ["crc32c", "sha256", None])
def test_dry_run_tells_the_exact_size(model: Path, tmp_path: Path, recipe: str | None, digest: str | None) -> None:
    with prepare(model, tmp_path / "out.zt", recipe, digest=digest) as prepared:
        plan = prepared.plan
    assert not (tmp_path / "out.zt").exists()
    report = ingot.convert(model, tmp_path / "out.zt", recipe, digest=digest)
    assert report.size == (tmp_path / "out.zt").stat().st_size
    if plan.size_exact:
        assert plan.size == report.size
    else:
        assert recipe == "lossless"
        assert plan.size >= report.size


def test_dry_run_of_a_hundred_gigabytes_reads_headers_only(tmp_path: Path) -> None:
    """The data of this file is a hole: reading it would take far longer than the test's time limit."""

    shape, size, count = [8192, 8192], 8192 * 8192 * 2, 745
    header = json.dumps(
        {
            f"model.layers.{i}.mlp.up_proj.weight": {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [i * size, (i + 1) * size],
            }
            for i in range(count)
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count * size)
    with prepare(path, tmp_path / "out.zt", "int4", None) as prepared:
        assert prepared.plan.size_exact
        assert 4 < 8 * prepared.plan.size / (count * 8192 * 8192) < 5


def test_folder_target_takes_companions_and_metadata(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "packed", "int8")
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == [
        "config.json",
        "model.zt",
        "tokenizer.json",
    ]
    assert sorted(report.companions) == ["config.json", "tokenizer.json"]
    with ingot.open(tmp_path / "packed") as checkpoint:
        assert checkpoint.format == "zt"
        assert checkpoint.metadata["format"] == "pt"
        assert set(checkpoint.companions) == {"config.json", "tokenizer.json"}


def test_folder_that_exists_is_replaced_only_when_asked(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "packed", "int8")
    with pytest.raises(UsageError) as caught:
        ingot.convert(model, tmp_path / "packed", "int4")
    assert caught.value.rule == "target.exists"
    report = ingot.convert(model, tmp_path / "packed", "int4", overwrite=True)
    assert report.recipe == "int4"


def test_shards_and_back(model: Path, tmp_path: Path) -> None:
    report = ingot.convert(model, tmp_path / "sharded", format="safetensors", max_shard=60_000)
    assert len(report.files) > 2
    assert "model.safetensors.index.json" in report.files
    assert_same_values(model, tmp_path / "sharded")
    ingot.convert(tmp_path / "sharded", tmp_path / "joined.safetensors")
    assert_same_values(model, tmp_path / "joined.safetensors")


def test_quantized_tensors_are_decoded_for_a_format_that_cannot_carry_them(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "small.zt", "int8")
    report = ingot.convert(tmp_path / "small.zt", tmp_path / "big.safetensors")
    assert report.actions["decoded"] > 0
    assert_same_values(tmp_path / "small.zt", tmp_path / "big.safetensors")


def test_quantizing_twice_is_refused_unless_allowed(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "int8.zt", "int8")
    with pytest.raises(UsageError) as caught:
        ingot.convert(tmp_path / "int8.zt", tmp_path / "int4.zt", "int4")
    assert caught.value.rule == "convert.requantize"
    report = ingot.convert(tmp_path / "int8.zt", tmp_path / "int4.zt", "int4", allow_requantize=True)
    assert report.actions["encoded"] > 0


def test_same_recipe_again_moves_parts(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "one.zt", "int4")
    report = ingot.convert(tmp_path / "one.zt", tmp_path / "two.zt", "int4")
    assert report.actions == {"moved": len(report.tensors)}
    assert (tmp_path / "one.zt").read_bytes() == (tmp_path / "two.zt").read_bytes()


def test_lossless_file_goes_back_to_the_same_safetensors(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "small.zt", "lossless")
    ingot.convert(tmp_path / "small.zt", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_cannot_be_quantized(
    tmp_path: Path, weights: dict[str, np.ndarray], value: float, strays: Callable[[], list[str]]
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {**weights, name: weights[name].copy()}
    bad[name][3, 5] = value
    ingot.save(tmp_path / "bad.safetensors", bad)
    with pytest.raises(CodecError) as caught:
        ingot.convert(tmp_path / "bad.safetensors", tmp_path / "out.zt", "int4")
    assert caught.value.rule == "affine.non-finite"
    assert name in str(caught.value)
    assert not (tmp_path / "out.zt").exists()
    assert strays() == []
    ingot.convert(tmp_path / "bad.safetensors", tmp_path / "out.zt", "lossless")
    assert_same_values(tmp_path / "bad.safetensors", tmp_path / "out.zt")


def test_damage_in_the_source_is_found_before_anything_is_published(
    model: Path, tmp_path: Path, strays: Callable[[], list[str]]
) -> None:
    ingot.convert(model, tmp_path / "source.zt")
    data = bytearray((tmp_path / "source.zt").read_bytes())
    data[70] ^= 1
    (tmp_path / "source.zt").write_bytes(data)
    for recipe in (None, "int8", "lossless"):
        with pytest.raises(IntegrityError) as caught:
            ingot.convert(tmp_path / "source.zt", tmp_path / "out.zt", recipe)
        assert caught.value.rule == "part.digest-mismatch"
        assert not (tmp_path / "out.zt").exists()
        assert strays() == []
    ingot.convert(tmp_path / "source.zt", tmp_path / "out.zt", verify=False)


def test_empty_and_zero_size_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = {
        "empty": np.zeros((0, 4), np.float32),
        "empty.columns": np.zeros((4, 0), ml_dtypes.bfloat16),
        "scalar": np.array(3.5, np.float32),
        "count": np.array([1, 2, 3], np.int64),
        "a\nb": np.ones((2, 2), np.float16),
    }
    ingot.save(tmp_path / "odd.safetensors", tensors)
    for recipe in (None, *RECIPES):
        ingot.convert(tmp_path / "odd.safetensors", tmp_path / "out.zt", recipe, overwrite=True)
        with ingot.open(tmp_path / "out.zt") as checkpoint:
            assert set(checkpoint) == set(tensors)
            for name, value in tensors.items():
                assert checkpoint[name].shape == value.shape
                assert np.array_equal(checkpoint[name].numpy(np.float32), value.astype(np.float32))


def test_a_checkpoint_without_tensors(tmp_path: Path) -> None:
    ingot.save(tmp_path / "none.safetensors", {})
    report = ingot.convert(tmp_path / "none.safetensors", tmp_path / "none.zt", "int4")
    assert report.tensors == []
    with ingot.open(tmp_path / "none.zt") as checkpoint:
        assert list(checkpoint) == []


def test_progress_counts_every_source_byte(model: Path, tmp_path: Path) -> None:
    events: list[tuple[int, int]] = []
    report = ingot.convert(
        model, tmp_path / "out.zt", "int4", progress=lambda event: events.append((event.processed, event.total))
    )
    assert events[-1] == (report.source_nbytes, report.source_nbytes)
    assert [done for done, _ in events] == sorted(done for done, _ in events)


def test_refusals_leave_nothing(model: Path, tmp_path: Path, strays: Callable[[], list[str]]) -> None:
    def refuse(kind: type[IngotError], rule: str, *args: object, **options: object) -> None:
        with pytest.raises(kind) as caught:
            ingot.convert(*args, **options)  # type: ignore[arg-type]
        assert caught.value.rule == rule
        assert strays() == []

    refuse(UsageError, "open.missing", tmp_path / "absent", tmp_path / "out.zt")
    refuse(UsageError, "convert.same-path", model / "model.safetensors", model / "model.safetensors")
    refuse(UsageError, "save.suffix", model, tmp_path / "out.zt", format="safetensors")
    refuse(UsageError, "format.unknown", model, tmp_path / "out", format="ggml")
    refuse(UsageError, "target.no-parent", model, tmp_path / "no" / "such" / "out.zt")
    refuse(UsageError, "convert.shard", model, tmp_path / "out.safetensors", max_shard="1MB")
    refuse(UsageError, "convert.option", model, tmp_path / "out.zt", speed="high")
    refuse(UnsupportedError, "convert.unsupported", model, tmp_path / "out.safetensors", "int4")
    refuse(ResourceError, "ram.ceiling", model, tmp_path / "out.zt", "int4", max_ram="1MiB")


def test_metadata_that_safetensors_cannot_hold_becomes_json(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.zt", {"x": np.ones(3, np.float32)}, {"steps": 3, "tags": ["a", "b"], "format": "pt"})
    ingot.convert(tmp_path / "a.zt", tmp_path / "a.safetensors")
    with ingot.open(tmp_path / "a.safetensors") as checkpoint:
        assert checkpoint.metadata == {"steps": "3", "tags": '["a","b"]', "format": "pt"}


def test_companions_in_subfolders_travel_and_other_models_stay(model: Path, tmp_path: Path) -> None:
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_bytes(b"weights")
    (model / "onnx" / "config.json").write_text("{}")
    (model / ".git").mkdir()
    (model / ".git" / "HEAD").write_text("ref")
    report = ingot.convert(model, tmp_path / "packed", "int8")
    assert set(report.companions) == {"1_Pooling/config.json", "config.json", "tokenizer.json"}
    assert (tmp_path / "packed" / "1_Pooling" / "config.json").read_text() == "{}"
    assert not (tmp_path / "packed" / "onnx").exists()
    again = ingot.convert(tmp_path / "packed", tmp_path / "again", resume=True)
    assert set(again.companions) == set(report.companions)


def test_the_ceiling_that_would_do_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as caught:
        ingot.convert(model, tmp_path / "out.zt", "int4", max_ram="1MiB")
    shortage = caught.value.message.rpartition(" by ")[2].removesuffix(" or more")
    ceiling = parse_size("1MiB") + parse_size(shortage.replace(" ", "")) + (8 << 20)  # memory in use moves a little
    ingot.convert(model, tmp_path / "out.zt", "int4", max_ram=ceiling)


@pytest.mark.parametrize(
    ("name", "format", "programs"),
    [
        ("it's a folder", None, ["ingot"]),
        ("-mlx", "mlx", ["mlx_lm.generate", "ingot"]),
        ("gptq", "gptq", ["vllm", "ingot"]),
        ("awq", "awq-gemv", ["ingot"]),
        ("a file.zt", None, ["python"]),
    ],
)
def test_what_runs_the_result_is_told(
    name: str, format: str | None, programs: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (model / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}')
    (model / "config.json").write_text(
        '{"model_type": "llama", "model_file": "llama.py", "architectures": ["LlamaForCausalLM"]}'
    )
    ingot.convert(model, "packed", "int4")
    commands = [shlex.split(text) for text in ingot.convert("packed", name, format=format).commands]
    assert [words[0] for words in commands] == programs
    for words in commands:  # the path is one word, whatever it is made of, and no option
        assert [word for word in words if name in word and not word.startswith("-")]


def test_what_is_no_model_is_checked(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text('{"architectures": ["BertModel"]}')
    for source in (model, model / "model.safetensors"):
        made = ingot.convert(source, tmp_path / "new", format="safetensors", overwrite=True)
        assert [shlex.split(text)[1] for text in made.commands] == ["verify"]


def test_programs_of_single_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / 'a "b" {} $c.x')
    assert shlex.split(command_lines(RUNTIMES["llama.cpp"], "gguf", path, path)[0])[2] == path
    (line,) = command_lines(RUNTIMES["onnxruntime"], "onnx", path, path)
    _, _, code, argument = shlex.split(line)
    opened: list[str] = []
    session = type("Session", (), {"__init__": lambda self, path: opened.append(path), "get_inputs": lambda self: []})
    monkeypatch.setitem(sys.modules, "onnxruntime", type("Runtime", (), {"InferenceSession": session}))
    monkeypatch.setattr(sys, "argv", ["-c", argument])
    exec(code, {"print": lambda _: None})
    assert opened == [path]


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_programs_and_scripts_are_not_told_what_to_do_next(
    option: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for more in ([], [option]):
        assert ingot_command(["convert", str(model), str(tmp_path / "new"), "--overwrite", *more]) == 0
        told.append("ingot generate" in capsys.readouterr().out)
    assert told == [True, False]
