"""Tensors back into their graph: what is kept keeps its bytes, codes take the place of constants and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.cli.main import run
from ingot.core.parsing.wire import bytes_field, number_field
from ingot.errors import CodecError, IngotError, UnsupportedError
from ingot.formats.base import WriteOptions
from ingot.formats.onnx import layout
from ingot.formats.onnx.format import OnnxFormat
from ingot.formats.onnx.graph import INITIALIZERS, MICROSOFT, parse_model
from ingot.formats.onnx.template import Template
from ingot.model.artifact import Artifact
from ingot.model.attachments import Attachments
from ingot.recipes.choice import Choice
from ingot.recipes.recipe import Recipe, Rule
from ingot.stores.memory import MemoryStore, MemoryTarget
from ingot.testing.formats import Item, feed
from tests.support.onnx import Graph, numbers, outside, packed, sample, tensor

UP, SQUARE, HEAD = "model.layers.0.mlp.up_proj.weight", "onnx::MatMul_7", "lm_head.weight"


DEQUANTIZED = (
    ("uint4", (2, 32), ("gptq", "awq", "compressed-tensors", "gguf", "mlx")),
    ("int4", (2, 32), ("modelopt", "gguf")),
    ("int8", (2, 32), ("compressed-tensors", "gptq", "gguf")),
    ("uint8", (32,), ("compressed-tensors", "gptq")),
)


def affine(*names: str, **options: Any) -> Recipe:
    return Recipe("test", (Rule(Choice("affine", options), match=names or ("*weight*",)),))


def saved(folder: Path, graph: Graph, name: str = "m.onnx") -> Path:
    (folder / name).write_bytes(graph.model())
    return folder / name


def operators(path: Path) -> list[str]:
    data = path.read_bytes()
    return [operator.type for operator in parse_model(data, "m").main.operators]


def beside(folder: Path) -> Path:
    """A model whose weights lie in another file, but for one."""
    graph, data, fields = sample(), b"", []
    model = Template(MemoryStore({"m.onnx": graph.model()}), "m.onnx")
    for site in model.sites:
        constant = site.slots["data"].constant
        raw = model.bytes_of(constant)
        if site.name == "shape":
            fields.append(bytes_field(INITIALIZERS, tensor("shape", "int64", (2,), raw)))
            continue
        fields.append(
            bytes_field(INITIALIZERS, outside(site.name, "float", constant.dims, "w.bin", len(data), len(raw)))
        )
        data += raw + bytes(-len(raw) % 48)
    (folder / "w.bin").write_bytes(data)
    graph.fields[:5] = fields
    return saved(folder, graph)


def test_a_model_that_is_kept_is_the_same_file(tmp_path: Path) -> None:
    source = saved(tmp_path, sample())
    ingot.convert(source, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == source.read_bytes()


def test_a_model_with_weights_beside_it_is_the_same_two_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = beside(tmp_path / "in")
    ingot.convert(source, tmp_path / "out", format="onnx")
    assert (tmp_path / "out" / "model.onnx").read_bytes() == source.read_bytes()
    written = (tmp_path / "out" / "w.bin").read_bytes()
    assert (tmp_path / "in" / "w.bin").read_bytes()[: len(written)] == written


def test_one_file_takes_in_what_lay_beside_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = beside(tmp_path / "in")
    ingot.convert(source, tmp_path / "out.onnx")
    (tmp_path / "in" / "w.bin").unlink()
    with ingot.open(tmp_path / "out.onnx") as found:
        assert np.array_equal(found[UP].numpy(), numbers((64, 32), 2))


@pytest.mark.parametrize("external", [False, True])
def test_matrices_of_matmul_become_codes_of_matmulnbits_and_dense_again(tmp_path: Path, external: bool) -> None:
    (tmp_path / "in").mkdir()
    source = beside(tmp_path / "in") if external else saved(tmp_path / "in", sample())
    out, back = tmp_path / "out", tmp_path / "back.onnx"
    recipe = affine(UP, "*down_proj*", bits=4, group=32, quantizer="mse")
    report = ingot.convert(source, out, format="onnx", recipe=recipe)
    assert {tensor.name for tensor in report.tensors if tensor.action == "encoded"} == {f"{UP}_Q4", f"{SQUARE}_Q4"}
    assert operators(out / "model.onnx") == ["Gather", "MatMulNBits", "MatMulNBits", "Reshape", "Gemm"]
    assert (out / "w.bin").exists() == external
    with ingot.open(out) as packed_model:
        assert packed_model[f"{UP}_Q4"].shape == (32, 64)
        values = {name: packed_model[f"{name}_Q4"].numpy() for name in (UP, SQUARE)}
        assert np.abs(values[UP].T - numbers((64, 32), 2)).max() < 0.05
        assert np.abs(values[SQUARE].T - numbers((32, 32), 3)).max() < 0.05
    report = ingot.convert(out, back, recipe="decompress")
    told = {tensor.name: (tensor.action, tensor.source_codec) for tensor in report.tensors}
    assert {name: told[name] for name in (UP, SQUARE)} == dict.fromkeys((UP, SQUARE), ("decoded", "affine"))
    assert operators(back) == ["Gather", "MatMul", "MatMul", "Reshape", "Gemm"]
    with ingot.open(back) as dense:
        assert all(np.array_equal(dense[name].numpy(), values[name].T) for name in values)
        assert list(dense) == ["emb", UP, SQUARE, HEAD, "shape"]


def test_nothing_but_the_operator_and_its_constants_changes(tmp_path: Path) -> None:
    source = saved(tmp_path, sample())
    ingot.convert(source, tmp_path / "a.onnx", recipe=affine(UP, bits=4, group=32))
    ingot.convert(tmp_path / "a.onnx", tmp_path / "b.onnx", recipe="decompress")
    before, after = source.read_bytes(), (tmp_path / "b.onnx").read_bytes()
    own, made = (parse_model(data, "m") for data in (before, after))
    for old, new in zip(own.main.operators, made.main.operators, strict=True):
        assert (old.type, old.name, old.inputs, old.outputs) == (new.type, new.name, new.inputs, new.outputs)
        if old.inputs[1] != UP:
            assert old.message.payload() == new.message.payload()
    for name in set(own.main.constants) - {UP}:
        assert own.main.constants[name].message.payload() == made.main.constants[name].message.payload()
    assert dict(own.opsets) | {"com.microsoft": 1} == made.opsets


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 8, "group": "row"},
        {"bits": 4, "group": 16, "symmetric": False},
        {"bits": 8, "group": 64, "symmetric": False},
        {"bits": 4, "group": 128},  # more than there are columns
    ],
)
def test_what_matmulnbits_holds_reads_back_as_it_was_encoded(tmp_path: Path, options: dict[str, Any]) -> None:
    source = saved(tmp_path, sample(cols=48))
    ingot.convert(source, tmp_path / "o.onnx", recipe=affine(UP, **options))
    with ingot.open(tmp_path / "o.onnx") as found:
        values = found[f"{UP}_Q{options['bits']}"].numpy()
    same = {**options, "scales": "source"}
    if options.get("symmetric", True):
        same |= {"signed": False, "zero_point": 1 << (options["bits"] - 1)}
    turned = np.ascontiguousarray(numbers((48, 32), 2).T)
    ingot.save(tmp_path / "w.zt", {"w.weight": turned})
    ingot.convert(tmp_path / "w.zt", tmp_path / "e.zt", recipe=affine(**same))
    with ingot.open(tmp_path / "e.zt") as expected:
        assert np.array_equal(expected["w.weight"].numpy(), values)


@pytest.mark.parametrize(
    ("name", "options", "attributes"),
    [
        (HEAD, {"bits": 4, "group": 16}, {"axis": 1, "block_size": 16}),
        (HEAD, {"bits": 8, "group": "row"}, {"axis": 0, "block_size": 0}),
        ("emb", {"bits": 8, "group": "tensor", "symmetric": False}, {"axis": -9, "block_size": 0}),
        ("emb", {"bits": 4, "group": 32, "symmetric": False}, {"axis": 1, "block_size": 32}),
    ],
)
def test_other_constants_get_dequantizelinear_in_front(
    tmp_path: Path, name: str, options: dict[str, Any], attributes: Mapping[str, int]
) -> None:
    source = saved(tmp_path, sample())
    report = ingot.convert(source, tmp_path / "o.onnx", recipe=affine(name, **options))
    made = parse_model((tmp_path / "o.onnx").read_bytes(), "m").main.operators[0]
    assert (made.type, made.outputs) == ("DequantizeLinear", (name,))
    assert {key: made.integer(key, -9 if key == "axis" else 0) for key in attributes} == attributes
    assert [tensor.name for tensor in report.tensors if tensor.action == "encoded"] == [name]
    ingot.convert(tmp_path / "o.onnx", tmp_path / "b.onnx", recipe="decompress")
    with ingot.open(tmp_path / "o.onnx") as packed_model, ingot.open(tmp_path / "b.onnx") as dense:
        assert packed_model[name].codec == "affine"
        assert np.array_equal(packed_model[name].numpy(), dense[name].numpy())
        assert dense[name].codec == "dense"
    # Back in place: only the values of the one constant are others.
    assert len((tmp_path / "b.onnx").read_bytes()) == len(source.read_bytes())


def test_an_old_model_is_told_what_it_lacks(tmp_path: Path) -> None:
    graph = sample()
    graph.opsets = {"": 17}
    source = saved(tmp_path, graph)
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, tmp_path / "o.onnx", recipe=affine(HEAD, bits=4, group=16))
    assert caught.value.rule == "convert.unsupported"
    ingot.convert(source, tmp_path / "o.onnx", recipe=affine(UP, bits=4, group=32))  # of another domain


def test_a_constant_used_elsewhere_is_not_packed_for_matmul(tmp_path: Path) -> None:
    graph = sample()
    graph.node("Identity", [SQUARE], ["z"])
    graph.outputs = ("y", "z")
    source = saved(tmp_path, graph)
    ingot.convert(source, tmp_path / "o.onnx", recipe=affine("*down_proj*", bits=4, group=32))
    assert "MatMulNBits" not in operators(tmp_path / "o.onnx")


@pytest.mark.parametrize("zeros", [False, True])
def test_packed_models_keep_every_byte_padding_too(tmp_path: Path, zeros: bool) -> None:
    source = saved(tmp_path, packed(cols=50, zeros=zeros))
    ingot.convert(source, tmp_path / "o.onnx")
    assert (tmp_path / "o.onnx").read_bytes() == source.read_bytes()


def test_integers_move_into_other_containers(tmp_path: Path) -> None:
    source = saved(tmp_path, sample())
    ingot.convert(source, tmp_path / "o.onnx", recipe=affine(UP, bits=4, group=32))
    report = ingot.convert(tmp_path / "o.onnx", tmp_path / "o.zt")
    assert {tensor.action for tensor in report.tensors} == {"moved"}
    with ingot.open(tmp_path / "o.onnx") as one, ingot.open(tmp_path / "o.zt") as other:
        assert np.array_equal(one[f"{UP}_Q4"].numpy(), other[f"{UP}_Q4"].numpy())


@pytest.mark.parametrize(("format", "codec"), [("gptq", "affine_words"), ("mlx", "affine"), ("gguf", "ggml_blocks")])
def test_integers_move_into_folders_that_go_by_names(tmp_path: Path, format: str, codec: str) -> None:
    graph = Graph({"": 14, "com.microsoft": 1})
    random = np.random.default_rng(6)
    graph.constant(f"{UP}_Q4", random.integers(0, 256, (32, 2, 16), np.uint8), "uint8")
    graph.constant("s", random.random((32, 2)).astype(np.float16), "float16")
    attributes = [("K", 64), ("N", 32), ("bits", 4), ("block_size", 32)]
    graph.node("MatMulNBits", ["x", f"{UP}_Q4", "s"], ["y"], attributes, "com.microsoft")
    source = model_folder(saved(tmp_path, graph))
    report = ingot.convert(source, tmp_path / "out", format=format, no_tokenizer=True)
    name = "blk.0.ffn_up.weight" if format == "gguf" else UP
    assert [(tensor.name, tensor.action) for tensor in report.tensors] == [(name, "repacked")]
    with ingot.open(source) as one, ingot.open(tmp_path / "out") as other:
        assert other[name].codec == codec
        assert np.array_equal(one[f"{UP}_Q4"].numpy("f16"), other[name].numpy("f16"))
    compared = ingot.compare(source, tmp_path / "out")
    assert [tensor.detail for tensor in compared.tensors if tensor.status == "shape differs"] == []


def model_folder(path: Path) -> Path:
    """Put a config.json beside a model, and return their folder."""
    config = {
        "architectures": ["OneMatrix"],
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (path.parent / "model").mkdir()
    path.rename(path.parent / "model" / "model.onnx")
    (path.parent / "model" / "config.json").write_text(json.dumps(config))
    return path.parent / "model"


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("kind", "dims", "formats"), DEQUANTIZED)
def test_codes_of_dequantizelinear_move_into_folders_too(
    kind: str, dims: tuple[int, ...], formats: tuple[str, ...], zeros: bool, tmp_path: Path
) -> None:
    """Products with a matrix [inputs, outputs]: its integers are turned, and its blocks are groups of a row."""
    inputs, outputs, bits = 64, 32, 8 if kind.endswith("8") else 4
    graph, random = Graph(), np.random.default_rng(7)
    codes = random.integers(0, 256, inputs * outputs * bits // 8, np.uint8)
    graph.raw("w_Q", kind, (inputs, outputs), codes.tobytes())
    graph.constant("s", random.uniform(0.1, 0.2, dims).astype(np.float16), "float16")
    names = ["w_Q", "s"]
    if zeros:
        graph.raw("z", kind, dims, codes[: -(-int(np.prod(dims)) * bits // 8)].tobytes())
        names.append("z")
    grid = [("axis", 0), ("block_size", 32)] if len(dims) == 2 else [("axis", 1)]
    graph.node("DequantizeLinear", names, ["onnx::MatMul_1"], grid)
    graph.node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/model/layers.0/mlp/up_proj/MatMul")
    source = model_folder(saved(tmp_path, graph))
    for format in formats:
        if not (zeros and format in ("gguf", "mlx", "modelopt")):
            report = ingot.convert(source, tmp_path / format, format=format, no_tokenizer=True)
            name = "blk.0.ffn_up.weight" if format == "gguf" else UP
            assert [(item.name, item.action) for item in report.tensors] in ([(name, "repacked")], [(name, "moved")])
            with ingot.open(source) as one, ingot.open(tmp_path / format) as other:
                assert np.array_equal(one["onnx::MatMul_1"].numpy("f16").T, other[name].numpy("f16"))


def test_comparing_turns_matrices_to_face_each_other(tmp_path: Path) -> None:
    source = saved(tmp_path, sample())
    ingot.convert(source, tmp_path / "o.onnx", recipe=affine(UP, "*down_proj*", bits=8, group=32))
    for pair in ((source, tmp_path / "o.onnx"), (tmp_path / "o.onnx", source)):
        report = ingot.compare(*pair)
        worst = min(tensor.stats.snr_db for tensor in report.tensors if tensor.status == "differs" and tensor.stats)
        assert {tensor.status for tensor in report.tensors} == {"identical", "differs"}
        assert worst > 40


def test_a_plan_is_carried_out_from_its_json(tmp_path: Path) -> None:
    source = saved(tmp_path, sample(128, 64))
    plan, out = str(tmp_path / "plan.json"), str(tmp_path / "planned.onnx")
    ingot.convert(source, tmp_path / "whole.onnx", recipe="int8")
    assert operators(tmp_path / "whole.onnx").count("MatMulNBits") == 2
    assert run(["convert", str(source), out, "--recipe", "int8", "--plan-out", plan, "-q"]) == 0
    ingot.execute(plan)
    assert Path(out).read_bytes() == (tmp_path / "whole.onnx").read_bytes()


def written(template: Template, items: list[Item], done: int = 0, options: WriteOptions | None = None) -> MemoryTarget:
    """Write items; the first ``done`` of them by another writer, which is stopped within the next."""
    specs, target = [item.spec for item in items], MemoryTarget()
    artifact = Artifact(specs, attachments=Attachments(graph=template))
    first = OnnxFormat().writer(target, "model.onnx", artifact, options or WriteOptions())
    records = [feed(first, item) for item in items[:done]]
    first.abort()
    writer = OnnxFormat().writer(target, "model.onnx", artifact, options or WriteOptions())
    for record in records:
        writer.restore(record)
    for item in items[done:]:
        feed(writer, item)
    names = writer.finish()
    assert sorted(names) == sorted(target.files)
    assert OnnxFormat().size(artifact, options or WriteOptions()) == sum(map(len, target.files.values()))
    return target


def items_of(template: Template) -> list[Item]:
    data = bytes(template["m.onnx"].view())
    tensors = OnnxFormat().read(MemoryStore({"m.onnx": data}), "m.onnx").tensors
    return [
        Item(tensor.spec(), {role: bytes(part.view()) for role, part in tensor.parts.items()})
        for tensor in tensors.values()
    ]


def test_a_resumed_run_gives_the_same_bytes() -> None:
    template = Template(MemoryStore({"m.onnx": packed(zeros=True).model()}), "m.onnx")
    items = items_of(template)
    assert written(template, items, done=1).files == written(template, items).files


def test_a_large_model_lies_beside_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_MODEL", 8000)
    template = Template(MemoryStore({"m.onnx": sample().model()}), "m.onnx")
    files = written(template, items_of(template)).files
    assert set(files) == {"model.onnx", "model.onnx.data"}
    again = OnnxFormat().read(MemoryStore(files), "model.onnx")
    assert np.frombuffer(again.tensors[UP].parts["data"].view(), "<f4").tobytes() == numbers((64, 32), 2).tobytes()
    with pytest.raises(UnsupportedError) as caught:
        written(template, items_of(template), options=WriteOptions(siblings=False))
    assert caught.value.rule == "onnx.too-large"


def test_other_tensors_than_the_graphs_are_refused() -> None:
    template = Template(MemoryStore({"m.onnx": sample().model()}), "m.onnx")
    items = items_of(template)
    for wrong in (items[1:], [*items, items[0]]):
        with pytest.raises(IngotError) as caught:
            written(template, wrong)
        assert caught.value.rule in ("onnx.tensors", "writer.duplicate")
    with pytest.raises(UnsupportedError) as refused:
        OnnxFormat().writer(MemoryTarget(), "m.onnx", Artifact([]), WriteOptions())
    assert refused.value.rule == "onnx.no-graph"


def test_zero_points_between_integers_are_refused() -> None:
    template = Template(MemoryStore({"m.onnx": packed(zeros=True).model()}), "m.onnx")
    item = items_of(template)[0]
    halves = np.full(len(item.parts["zeros"]) // 4, 0.5, "<f4").tobytes()
    with pytest.raises(CodecError) as caught:
        written(template, [Item(item.spec, {**item.parts, "zeros": halves})])
    assert caught.value.rule == "onnx.zero-point"


def test_numbers_that_stand_one_by_one_stay() -> None:
    item = tensor("w", "int64", (2,), None, number_field(7, 1) + number_field(7, 2))
    template = Template(MemoryStore({"m.onnx": Graph(fields=[bytes_field(INITIALIZERS, item)]).model()}), "m.onnx")
    items = items_of(template)
    assert bytes(written(template, items).files["model.onnx"]) == bytes(template["m.onnx"].view())
    with pytest.raises(UnsupportedError) as caught:
        written(template, [Item(items[0].spec, {"data": bytes(16)})])
    assert caught.value.rule == "onnx.typed-data"


def overlapping(*offsets: int) -> Template:
    """A model with constants of 8 bytes at these places of a file."""
    items = [outside(f"w{number}", "float", (2,), "w.bin", offset, 8) for number, offset in enumerate(offsets)]
    model = Graph(fields=[bytes_field(INITIALIZERS, item) for item in items]).model()
    return Template(MemoryStore({"m.onnx": model, "w.bin": numbers((8,)).tobytes()}), "m.onnx")


def items_beside(template: Template) -> list[Item]:
    return [Item(site.spec(), {"data": template.bytes_of(site.slots["data"].constant)}) for site in template.sites]


def test_constants_that_share_a_place_share_it_afterwards_or_are_refused() -> None:
    template = overlapping(0, 0)
    items = items_beside(template)
    files = written(template, items, done=1).files
    assert bytes(files["model.onnx"]) == bytes(template["m.onnx"].view())
    assert bytes(files["w.bin"]) == items[0].parts["data"]
    for done in (0, 1):
        with pytest.raises(UnsupportedError) as caught:
            written(template, [items[0], Item(items[1].spec, {"data": bytes(8)})], done=done)
        assert caught.value.rule == "onnx.shared-data"


def test_a_name_that_is_taken_is_not_taken_again(tmp_path: Path) -> None:
    graph = packed()
    graph.fields.pop()
    graph.constant("bias", numbers((8,)), "float")
    attributes = [("K", 48), ("N", 8), ("bits", 4), ("block_size", 32)]
    graph.node("MatMulNBits", ["x", "w_Q4", "w_scales", "", "", "bias"], ["y"], attributes, MICROSOFT)
    graph.node("Identity", ["x"], ["y_product"])
    ingot.convert(saved(tmp_path, graph), tmp_path / "out.onnx", Recipe("test", (Rule(Choice("dense", {})),)))
    found = parse_model((tmp_path / "out.onnx").read_bytes(), "m").main.operators
    assert sorted(operator.type for operator in found) == ["Add", "Identity", "MatMul"]
    assert len({name for operator in found for name in operator.outputs}) == 3


def test_constants_that_share_some_bytes_part() -> None:
    template = overlapping(0, 4)
    items = [Item(item.spec, {"data": bytes([number]) * 8}) for number, item in enumerate(items_beside(template))]
    again = Template(MemoryStore(dict(written(template, items).files)), "model.onnx")
    assert [item.parts["data"] for item in items_beside(again)] == [bytes(8), b"\1" * 8]
