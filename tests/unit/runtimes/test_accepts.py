"""Whether a program would load a folder or file: answers for what was found to load, and for what was refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.open import open_source
from ingot.cli.main import run
from ingot.runtimes.accepts import Answer, accepts
from ingot.runtimes.profile import parse_profile
from ingot.runtimes.table import RUNTIMES, builtin_text, runtime_named
from ingot.stores.location import Location
from ingot.translate.expected import expected_tensors
from tests.support import model_folder

MATRICES = '[[rules]]\nroles = ["attention", "mlp"]\nmin_ndim = 2\n'
INT4 = MATRICES + 'codec = "affine"\noptions = {{ bits = 4, group = {}, symmetric = {} }}\n'
FP8 = MATRICES + 'codec = "scaled_codebook"\noptions = {{ table = "f8_e4m3fn", group = {} }}\n'
NO_F32 = """
[[schemes]]
name = "single floats"
containers = ["safetensors"]
storage = "dense"
types = ["f32"]
outcome = "refused"
note = "no f32"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder.write(tmp_path_factory.mktemp("model") / "m")


def answer(path: Path, runtime: str) -> Answer:
    source = open_source(Location.parse(path))
    try:
        return accepts(RUNTIMES[runtime], source)
    finally:
        source.close()


def rules(path: Path, runtime: str) -> set[str]:
    return {reason.rule for reason in answer(path, runtime).reasons}


def written(model: Path, out: Path, text: str, format: str) -> Path:
    recipe = out.parent / f"{out.name}.toml"
    recipe.write_text(text)
    if "affine" in text:
        ingot.convert(model, out.with_name(f"{out.name}-zt"), recipe=recipe)
        ingot.convert(out.with_name(f"{out.name}-zt"), out, format=format)
    else:
        ingot.convert(model, out, recipe=recipe, format=format)
    return out


def resized(path: Path, **sizes: int) -> Path:
    """Write a model folder with other sizes than those of ``model_folder.CONFIG``."""
    config = {**model_folder.CONFIG, **sizes}
    random = np.random.default_rng(0)
    shapes = expected_tensors(config) or {}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return model_folder.write(path, config, weights)


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "transformers", "mlx", "mistral.rs"])
def test_a_plain_folder_loads(model: Path, runtime: str) -> None:
    assert not rules(model, runtime)


@pytest.mark.parametrize("runtime", ["llama.cpp", "ollama", "openvino", "onnxruntime", "coreml"])
def test_another_container_is_named(model: Path, runtime: str) -> None:
    (reason,) = answer(model, runtime).reasons
    assert reason.rule == "runtime.container"
    assert RUNTIMES[runtime].containers[0] in reason.message


def test_compressed_tensors_of_four_bits_load(model: Path, tmp_path: Path) -> None:
    out = written(model, tmp_path / "w4", INT4.format(32, "true"), "compressed-tensors")
    found = answer(out, "vllm")
    assert found.accepted
    assert {scheme.outcome for scheme in found.schemes} == {"run"}


@pytest.mark.parametrize("bits", [2, 3])
def test_other_bits_are_refused_with_those_that_load(model: Path, tmp_path: Path, bits: int) -> None:
    out = written(
        model, tmp_path / "w", INT4.format(32, "true").replace("bits = 4", f"bits = {bits}"), "compressed-tensors"
    )
    (reason,) = answer(out, "vllm").reasons
    assert reason.rule == "runtime.scheme"
    assert f"{bits} bits, not 4" in reason.message
    assert "model.layers.*.self_attn.q_proj.weight" in reason.location or "and" in reason.location


def test_int_quantized_weights_alone_are_refused(model: Path, tmp_path: Path) -> None:
    text = INT4.format('"row"', "true").replace("bits = 4", "bits = 8")
    out = written(model, tmp_path / "w8", text, "compressed-tensors")
    assert not rules(out, "vllm")
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"


def test_gptq_is_symmetric_by_its_config(model: Path, tmp_path: Path) -> None:
    for symmetric in ("true", "false"):
        packed = written(model, tmp_path / f"ct-{symmetric}", INT4.format(32, symmetric), "compressed-tensors")
        out = tmp_path / f"gptq-{symmetric}"
        ingot.convert(packed, out, format="gptq")
        reasons = answer(out, "vllm").reasons
        assert (not reasons) == (symmetric == "true")
        assert not reasons or "bits=4, sym=False" in reasons[0].message
        assert not rules(out, "transformers")


def test_fp8_blocks_have_to_divide_merged_rows(model: Path, tmp_path: Path) -> None:
    out = written(model, tmp_path / "fp8", FP8.format("[128, 128]"), "fp8")
    found = rules(out, "vllm")
    assert "runtime.blocks" in found  # q has 64 rows, k and v 32
    assert "runtime.blocks" not in rules(out, "transformers")


def test_one_scale_per_matrix_is_refused_where_the_program_reads_another_name(model: Path, tmp_path: Path) -> None:
    out = written(model, tmp_path / "fp8", FP8.format('"tensor"'), "fp8")
    (reason,) = [item for item in answer(out, "vllm").reasons if item.rule == "runtime.scheme"]
    assert "weight_scale" in reason.message


def test_a_merged_matrix_needs_one_scheme(model: Path, tmp_path: Path) -> None:
    text = INT4.format(32, "true").replace('roles = ["attention", "mlp"]', 'match = "*q_proj*"')
    out = written(model, tmp_path / "part", text, "compressed-tensors")
    assert rules(out, "vllm") == {"runtime.merged"}
    assert not rules(out, "transformers")


def test_files_and_keys_of_config_are_required(tmp_path: Path) -> None:
    bare = model_folder.write(tmp_path / "bare", None)
    assert "runtime.file" in rules(bare, "vllm")
    mute = model_folder.write(tmp_path / "mute", words={})
    for runtime in ("vllm", "sglang", "mlx"):
        (reason,) = answer(mute, runtime).reasons
        assert "tokenizer.json or tokenizer.model" in reason.message
    assert not rules(mute, "transformers")
    no_class = {key: value for key, value in model_folder.CONFIG.items() if key != "architectures"}
    assert rules(model_folder.write(tmp_path / "class", no_class), "vllm") == {"runtime.config"}
    new = {key: value for key, value in model_folder.CONFIG.items() if key != "rope_theta"}
    new |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    folder = model_folder.write(tmp_path / "new", new)
    assert rules(folder, "mistral.rs") == {"runtime.config"}
    assert not rules(folder, "vllm")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = {name: array for name, array in model_folder.tensors().items() if "up_proj" not in name}
    reasons = answer(model_folder.write(tmp_path / "m", weights=weights), "vllm").reasons
    assert [(item.rule, item.location) for item in reasons] == [
        ("runtime.tensors", "model.layers.0.mlp.up_proj.weight")
    ]


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    words = model_folder.tokenizer([f"<|more-{index}|>" for index in range(20)])
    assert rules(model_folder.write(tmp_path / "m", words=words), "vllm") == {"runtime.vocabulary"}


def test_gguf_loads_and_lacks_what_was_removed(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    ingot.convert(model, tmp_path / "m.gguf", recipe="q8_0")
    for runtime in ("llama.cpp", "ollama", "openvino", "mistral.rs"):
        assert not rules(tmp_path / "m.gguf", runtime)
    ingot.convert(model, tmp_path / "none.gguf", recipe="q8_0", keep_names=True)
    assert "runtime.metadata" in rules(tmp_path / "none.gguf", "llama.cpp")
    with ingot.open(tmp_path / "m.gguf") as opened:
        metadata = {key: value for key, value in opened.metadata.items() if key != "llama.block_count"}
        arrays = {name: tensor.numpy() for name, tensor in opened.items()}
    ingot.save(tmp_path / "bare.gguf", {**arrays, "blk.0.extra.weight": np.ones(4, np.float32)}, metadata)
    reasons = answer(tmp_path / "bare.gguf", "llama.cpp").reasons
    assert {item.rule for item in reasons} == {"runtime.metadata", "runtime.tensors"}
    assert any("llama.block_count" in item.message for item in reasons)
    assert any(item.location == "blk.*.extra.weight" for item in reasons)


def test_blocks_that_a_program_does_not_read(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    ingot.convert(model, tmp_path / "m.gguf", recipe="q4_k")  # 64 columns: Q5_0 takes the place of Q4_K
    (reason,) = answer(tmp_path / "m.gguf", "openvino").reasons
    assert "Q5_0" in reason.message
    assert not rules(tmp_path / "m.gguf", "llama.cpp")


def test_second_scales_of_a_merged_matrix_are_equal(model: Path, tmp_path: Path) -> None:
    options = 'options = { table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "multiply" }'
    text = f'[[rules]]\nroles = ["attention", "mlp"]\nmin_ndim = 2\ncodec = "scaled_codebook"\n{options}\n'
    out = written(model, tmp_path / "nvfp4", text, "modelopt")
    assert "runtime.merged" not in rules(out, "vllm")
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])["model.layers.0.mlp.up_proj.weight_scale_2"]
    start = 8 + length + entry["data_offsets"][0]
    scale = np.frombuffer(data[start : start + 4], np.float32)
    data[start : start + 4] = (2 * scale).astype(np.float32).tobytes()
    file.write_bytes(data)
    assert "runtime.merged" in rules(out, "vllm")


def test_packed_embeddings_are_refused_where_only_linear_layers_are_packed(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "packed", recipe="mlx-mxfp4", format="compressed-tensors")
    assert "runtime.embeddings" in rules(tmp_path / "packed", "vllm")
    assert "runtime.embeddings" in rules(tmp_path / "packed", "transformers")


def test_verify_answers_for_a_program(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(model), "--for", "vLLM"]) == 0
    assert "vLLM 0.32.0 would load this" in capsys.readouterr().out
    assert run(["verify", str(model), "--for", "llama.cpp"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert "[runtime.container]" in lines[0]
    assert run(["verify", str(model), "--for", "llama.cp"]) == 2
    assert "did you mean 'llama.cpp'?" in capsys.readouterr().err
    assert [item.rule for item in ingot.verify(model, runtime="coreml") if item.level == "error"] == [
        "runtime.container"
    ]


def test_a_refused_scheme_wins(model: Path) -> None:
    text = builtin_text("transformers").replace('name = "dense"', 'name = "all dense"', 1)
    profile = parse_profile(text + NO_F32, "x")
    source = open_source(Location.parse(model))
    try:
        (reason,) = accepts(profile, source).reasons
    finally:
        source.close()
    assert "single floats: no f32" in reason.message
    assert runtime_named("transformers").schemes[0].name == "dense"


@pytest.mark.parametrize("table", ["nf4", "fp4"])
@pytest.mark.parametrize(("block", "divides"), [(32, True), (64, True), (128, False)])
def test_flat_blocks_that_cross_rows_are_refused(
    model: Path, tmp_path: Path, table: str, block: int, divides: bool
) -> None:
    """The matrices have 64 or 128 columns. bitsandbytes' CPU kernel takes other scales if a block crosses rows."""
    options = f'{{ table = "{table}", group = {block}, flat = true, order = "high_first" }}'
    text = f'{MATRICES}codec = "scaled_codebook"\noptions = {options}\n'
    out = written(model, tmp_path / "packed", text, "bitsandbytes")
    reasons = [item for item in answer(out, "transformers").reasons if item.rule == "runtime.scheme"]
    if divides:
        assert not reasons
        return
    (reason,) = reasons
    assert f"blocks of {block} elements do not divide 64 columns" in reason.message
    assert "down_proj" not in reason.location  # 128 columns


def test_quantize_refuses_flat_blocks_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = resized(tmp_path / "m", hidden_size=96, head_dim=24)
    out = tmp_path / "out"
    options = ["--for", "transformers", "--preset", "nf4", "--calibration", "none"]
    assert run(["quantize", str(source), "-o", str(out), *options]) != 0
    assert "blocks of 64 elements do not divide 96 columns" in capsys.readouterr().err
    assert not out.exists()


def test_heads_of_another_size_than_the_program_derives_are_refused(tmp_path: Path) -> None:
    """64 columns and 4 heads: mistral.rs takes heads of 16 columns, and llama.cpp reads the size from the file."""
    for size, expected in ((16, set()), (32, {"runtime.heads"})):
        source = resized(tmp_path / f"m{size}", head_dim=size)
        out = tmp_path / f"m{size}.gguf"
        ingot.convert(source, out)
        assert rules(out, "mistral.rs") == expected
        assert not rules(out, "llama.cpp")
    (reason,) = answer(out, "mistral.rs").reasons
    assert reason.location == "llama.attention.key_length"
    assert "heads of 32 columns" in reason.message
    assert "64 / 4" in reason.message
