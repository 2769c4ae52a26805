"""Recipes with a quantizer: rounded once, whatever the container; statistics of another model are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run
from ingot.codecs.palette.rows import pack
from ingot.codecs.table import CODECS
from ingot.conversion.options import ConvertOptions
from ingot.conversion.planfile import plan_json
from ingot.conversion.run import prepare
from ingot.core.runtime.memory import anonymous_in_use, parse_size
from ingot.errors import IngotError, UsageError
from ingot.model.layouts.affine import CODES, ROWS_LSB, SCALES, ZEROS, AffineLayout, Group
from ingot.model.layouts.affine import OFFSETS as OFFSET_PART
from ingot.model.layouts.affine import POINTS as POINT_PART
from ingot.model.layouts.ggml import GgmlBlocksLayout
from ingot.model.statistics import Statistics
from ingot.model.tensor import Tensor
from ingot.quantization.choice import parse_quantizer, round_with
from ingot.quantization.factors import factors_of
from ingot.quantization.grid import GRIDS, OFFSETS, POINTS, Grid
from ingot.quantization.rounding import round_matrix, values_of
from ingot.recipes.load import parse_recipe

NAME = "model.layers.0.mlp.up_proj.weight"
OTHER = "model.layers.0.mlp.down_proj.weight"
OFFSET = 'zero_kind = "offset"'
RECIPE = """
[[rules]]
match = "*_proj.weight"
codec = "{codec}"
options = {options}
quantizer = "two-sided"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    random = np.random.default_rng(1)
    weights = {name: random.normal(size=(64, 64)).astype(np.float16) for name in (NAME, OTHER)}
    ingot.save(path, {**weights, "model.norm.weight": np.ones(64, np.float32)})
    return path


@pytest.fixture(scope="module")
def statistics(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("statistics") / "s.safetensors"
    random = np.random.default_rng(2)
    inputs, outputs = (random.normal(size=(size, 200)).astype(np.float32) for size in (64, 64))
    arrays = {
        f"{NAME}:inputs": inputs @ inputs.T / 200,
        f"{NAME}:outputs": outputs @ outputs.T / 200,
        f"{NAME}:in_sum2": np.square(inputs).mean(1),
        f"{NAME}:count": np.array([200]),
    }
    with ingot.open(model) as checkpoint:
        ingot.save(path, arrays, {"ingot.statistics": "1", "model": content_id(checkpoint)})
    return path


def recipe(folder: Path, codec: str, options: str) -> Path:
    path = folder / "own.toml"
    path.write_text(RECIPE.format(codec=codec, options=options))
    return path


def wanted(model: Path, statistics: Path, grid: Grid) -> np.ndarray:
    with ingot.open(model) as checkpoint, Statistics.open(statistics, checkpoint) as known:
        of = known.for_matrix(NAME)
        assert of is not None
        return round_matrix(checkpoint[NAME].numpy("f32"), grid, factors_of(of)).values()


@pytest.mark.parametrize(
    ("codec", "options", "grid", "target"),
    [
        ("affine", "{ bits = 4, group = 32 }", Grid(4, 32), "out.zt"),
        ("affine", "{ bits = 3, group = 32 }", Grid(3, 32), "out.zt"),
        ("scaled_codebook", "{ bits = 4, group = 32 }", Grid(4, 32, learnt=True), "out.zt"),
        ("scaled_codebook", "{ bits = 3, group = 64 }", Grid(3, 64, learnt=True), "out.zt"),
        ("ggml_blocks", '{ type = "q4_0" }', Grid(4, 32), "out.gguf"),
        ("ggml_blocks", '{ type = "q8_0" }', Grid(8, 32), "out.gguf"),
        ("affine", "{ bits = 4, group = 32 }", Grid(4, 32), "out.squizd"),
        ("affine", "{ bits = 3, group = 24, symmetric = false }", Grid(3, 24, zeros=POINTS), "out.zt"),
        ("affine", '{ group = 32, zero_kind = "offset" }', Grid(4, 32, zeros=OFFSETS), "out.gguf"),
        ("ggml_blocks", '{ type = "q4_1" }', GRIDS["q4_1"], "out.gguf"),
        ("ggml_blocks", '{ type = "q5_0" }', GRIDS["q5_0"], "out.gguf"),
        ("ggml_blocks", '{ type = "q5_1" }', GRIDS["q5_1"], "out.zt"),
        ("ggml_blocks", '{ type = "iq4_nl" }', GRIDS["iq4_nl"], "out.gguf"),
    ],
)
def test_any_container_holds_what_was_chosen(
    model: Path, statistics: Path, tmp_path: Path, codec: str, options: str, grid: Grid, target: str
) -> None:
    out, own = tmp_path / target, recipe(tmp_path, codec, options)
    report = ingot.convert(model, out, own, calibration=statistics, keep_names=True)
    with ingot.open(out) as found:
        tensor = found[NAME]
        assert tensor.codec != "dense"
        exact = wanted(model, statistics, grid)
        values = tensor.numpy("f32")
    assert np.array_equal(values, exact)
    assert any("rounded by the statistics" in note for note in report.notes)
    assert any(OTHER in note for note in report.notes)  # nothing is known of that one


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors", "mlx"])
def test_folders_of_other_programs_hold_it(model: Path, statistics: Path, tmp_path: Path, format: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(model.read_bytes())
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    ingot.convert(folder, tmp_path / "out", own, format=format, calibration=statistics, keep_names=True)
    with ingot.open(tmp_path / "out") as found:
        values = found[NAME].numpy("f32")
        assert found[NAME].codec != "dense"
    assert np.array_equal(values, wanted(model, statistics, Grid(4, 32)))


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"])
def test_blocks_of_256_arrive_as_they_were_rounded(tmp_path: Path, kind: str) -> None:
    random = np.random.default_rng(3)
    weights, inputs = random.normal(size=(7, 256)).astype(np.float16), random.normal(size=(256, 300))
    arrays = {f"{NAME}:inputs": inputs @ inputs.T / 300, f"{NAME}:in_sum2": np.square(inputs).mean(1)}
    known = {**{key: array.astype(np.float32) for key, array in arrays.items()}, f"{NAME}:count": np.array([300])}
    ingot.save(tmp_path / "m.safetensors", {NAME: weights})
    ingot.save(tmp_path / "s.safetensors", known, {"ingot.statistics": "1"})
    own = recipe(tmp_path, "ggml_blocks", f'{{ type = "{kind}" }}')
    of = Statistics.in_memory(known).for_matrix(NAME)
    assert of is not None
    exact = round_matrix(weights.astype(np.float32), GRIDS[kind], factors_of(of)).values()
    for target in ("out.gguf", "out.zt"):
        out = tmp_path / target
        ingot.convert(tmp_path / "m.safetensors", out, own, calibration=tmp_path / "s.safetensors", keep_names=True)
        with ingot.open(out) as found:
            assert GgmlBlocksLayout.from_tensor(found[NAME]).type == kind
            assert np.array_equal(found[NAME].numpy("f32"), exact)


@pytest.mark.parametrize("format", ["gptq", "awq", "compressed-tensors", "mlx"])
def test_zeros_arrive_integer_for_integer(
    model: Path, statistics: Path, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of other programs: codes, scales and zeros, and nothing is rounded before it is written."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(model.read_bytes())
    offsets = format == "mlx"
    grid = Grid(4, 32, zeros=OFFSETS if offsets else POINTS)
    with ingot.open(model) as checkpoint, Statistics.open(statistics, checkpoint) as known:
        of = known.for_matrix(NAME)
        assert of is not None
        exact = round_matrix(checkpoint[NAME].numpy("f32"), grid, factors_of(of))
    own = recipe(tmp_path, "affine", f"{{ bits = 4, group = 32, {OFFSET if offsets else 'symmetric = false'} }}")
    options = ConvertOptions(folder, tmp_path / "out", own, format=format, calibration=statistics, keep_names=True)
    with monkeypatch.context() as patch:
        patch.setattr("ingot.quantization.tensor.round_with", lambda *_, **__: pytest.fail("rounded while planning"))
        with prepare(options) as prepared:
            assert prepared.plan.size
    ingot.convert(folder, tmp_path / "out", own, format=format, calibration=statistics, keep_names=True)
    with ingot.open(tmp_path / "out") as found:
        stored = found[NAME]
        plain = AffineLayout(4, Group(32), ROWS_LSB, False, OFFSET_PART if offsets else POINT_PART, "f16", "f16")
        values, same = stored.numpy("f32"), stored.layout == plain
        parts = {key: part.view() for key, part in stored.parts.items()} if same else taken(stored, plain)
    assert np.array_equal(np.frombuffer(parts[CODES], np.uint8), pack(exact.codes, 4))
    assert np.array_equal(np.frombuffer(parts[SCALES], np.float16), exact.scales.reshape(-1))
    assert exact.zeros is not None
    assert np.array_equal(np.frombuffer(parts[ZEROS], np.float16), exact.zeros.reshape(-1))
    assert np.array_equal(values, exact.values())


def taken(tensor: Tensor, layout: AffineLayout) -> dict[str, np.ndarray]:
    """Return the parts that a tensor has in another layout."""
    found = CODECS[tensor.codec].repack(tensor, layout)
    assert found.exact, found.why_not
    reader = found.reader()
    parts: dict[str, np.ndarray] = reader.read(found.rows)
    reader.finish()
    return parts


def test_the_bytes_are_the_same_on_any_number_of_threads(model: Path, statistics: Path, tmp_path: Path) -> None:
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    for threads in (1, 4):
        ingot.convert(model, tmp_path / f"{threads}.zt", own, calibration=statistics, threads=threads)
    assert (tmp_path / "1.zt").read_bytes() == (tmp_path / "4.zt").read_bytes()


@pytest.mark.parametrize("target", ["out.zt", "out.gguf", "out.safetensors"])
def test_what_is_rounded_is_not_said_to_be_exact(
    model: Path, statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    report = ingot.convert(model, tmp_path / target, own, calibration=statistics, keep_names=True)
    source = {each.source_codec for each in report.tensors}
    assert not report.exact
    assert [each.action for each in report.tensors if each.codec != "dense" and each.action == "moved"] == []
    assert not any(each.exact for each in report.tensors if each.action != "moved")
    assert source == {"dense"} or target != "out.zt"
    assert sum(each.source_nbytes for each in report.tensors) == report.source_nbytes
    asked = ["convert", str(model), str(tmp_path / target), "--recipe", str(own), "--calibration", str(statistics)]
    asked.append("--keep-names")
    assert run([*asked, "--overwrite"]) == 0
    assert "bit for bit" not in capsys.readouterr().out
    assert run([*asked, "--overwrite", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["tensors"]
    assert {each["name"]: each["exact"] for each in planned} == {each.name: each.exact for each in report.tensors}


def test_what_statistics_lack_is_told(tmp_path: Path) -> None:
    """Inputs that were always 0, an expert without a token, a second moment that is none: named, in JSON too."""
    random = np.random.default_rng(6)
    stack = "model.layers.0.mlp.experts.up_proj.weight"
    x = random.normal(size=(32, 90)).astype(np.float32)
    x[3] = x[7] = 0
    bad = np.eye(32, dtype=np.float32)
    bad[0, 1] = bad[1, 0] = 1.05
    arrays = {
        f"{stack}:expert.0:inputs": x @ x.T / 90,
        f"{stack}:expert.0:in_sum2": np.square(x).mean(1),
        f"{stack}:expert.0:count": np.array([90]),
        f"{stack}:expert.1:in_sum2": np.zeros(32, np.float32),
        f"{stack}:expert.1:count": np.array([0]),
        f"{OTHER}:inputs": bad,
        f"{OTHER}:in_sum2": np.ones(32, np.float32),
        f"{OTHER}:count": np.array([5]),
    }
    weights = {stack: random.normal(size=(2, 8, 32)), OTHER: random.normal(size=(8, 32)), NAME: np.ones((8, 32))}
    ingot.save(tmp_path / "m.safetensors", {name: array.astype(np.float32) for name, array in weights.items()})
    ingot.save(tmp_path / "s.safetensors", arrays, {"ingot.statistics": "1"})
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    report = ingot.convert(tmp_path / "m.safetensors", tmp_path / "o.zt", own, calibration=tmp_path / "s.safetensors")
    found = {each.matrix: each for each in report.rounded}
    assert [found[f"{stack}:expert.{n}"].tokens for n in (0, 1)] == [90, 0]
    assert (found[f"{stack}:expert.0"].dead, found[f"{stack}:expert.1"].dead) == (2, 0)
    assert found[NAME].tokens is None
    assert 0.05 < found[OTHER].damping < 0.2
    assert found[f"{stack}:expert.0"].damping == 0.01
    for part in (
        f"{stack}:expert.0 (2)",
        f"no token was sent there, all errors weighed alike: {stack}:expert.1",
        OTHER,
    ):
        assert any(part in note for note in report.notes), part
    data = {figure.name: figure.value for figure in report.report().figures if figure.data}["rounded"]
    assert [row["matrix"] for row in data] == sorted(found)
    assert {"tokens", "damping", "dead", "error"} <= set(data[0])


def test_statistics_of_another_model_are_refused(statistics: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    ingot.save(other, {NAME: np.ones((64, 64), np.float16)})
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    with pytest.raises(UsageError) as refused:
        ingot.convert(other, tmp_path / "out.zt", own, calibration=statistics)
    assert refused.value.rule == "statistics.model"
    assert not (tmp_path / "out.zt").exists()


def test_what_nothing_would_use_is_refused(model: Path, statistics: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        ingot.convert(model, tmp_path / "out.zt", "int4", calibration=statistics)
    assert refused.value.rule == "convert.calibration"


def test_integers_are_not_rounded_again_unasked(model: Path, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "int8.zt", "int8")
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    with pytest.raises(UsageError) as refused:
        ingot.convert(tmp_path / "int8.zt", tmp_path / "out.zt", own)
    assert refused.value.rule == "convert.requantize"


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    weights = np.ones((64, 64), np.float32)
    weights[3, 3] = np.nan
    ingot.save(tmp_path / "bad.safetensors", {NAME: weights})
    arrays = {f"{NAME}:in_sum2": np.ones(64, np.float32), f"{NAME}:count": np.array([1])}
    ingot.save(tmp_path / "s.safetensors", arrays, {"ingot.statistics": "1"})
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    with pytest.raises(IngotError) as refused:
        ingot.convert(tmp_path / "bad.safetensors", tmp_path / "out.zt", own, calibration=tmp_path / "s.safetensors")
    assert refused.value.rule == "quantizer.non-finite"
    assert not (tmp_path / "out.zt").exists()


def test_vectors_are_no_matrices(tmp_path: Path) -> None:
    ingot.save(tmp_path / "v.safetensors", {"a_proj.weight": np.ones(64, np.float32)})
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    with pytest.raises(IngotError) as refused:
        ingot.convert(tmp_path / "v.safetensors", tmp_path / "out.zt", own)
    assert refused.value.rule == "quantizer.matrix"


def test_plans_do_not_leave_the_process(model: Path, statistics: Path, tmp_path: Path) -> None:
    own = recipe(tmp_path, "affine", "{ bits = 4, group = 32 }")
    options = ConvertOptions(model, tmp_path / "out.zt", own, calibration=statistics)
    with prepare(options) as prepared, pytest.raises(IngotError) as refused:
        plan_json(prepared, options)
    assert refused.value.rule == "plan.quantizer"


@pytest.mark.parametrize("target", ["out.zt", "out.gguf"])
def test_planning_rounds_nothing(
    model: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("rounded while planning")

    monkeypatch.setattr("ingot.quantization.tensor.round_with", never)
    own = recipe(tmp_path, "ggml_blocks", '{ type = "q4_0" }')
    options = ConvertOptions(model, tmp_path / target, own, calibration=statistics, keep_names=True)
    with prepare(options) as prepared:
        assert prepared.plan.size


@pytest.mark.parametrize(
    ("codec", "bits", "cols", "group"),
    [("scaled_codebook", 4, 32, 16), ("scaled_codebook", 3, 15, 5), ("affine", 3, 21, 8), ("affine", 5, 24, 24)],
)
def test_experts_that_lie_stacked_are_rounded_one_by_one(
    tmp_path: Path, codec: str, bits: int, cols: int, group: int
) -> None:
    random = np.random.default_rng(4)
    # The second expert's values are distributed otherwise: a table of its own would differ.
    weights = np.stack([random.normal(size=(7, cols)), random.uniform(-1, 1, size=(7, cols)) ** 5]).astype(np.float32)
    name = "model.layers.0.mlp.experts.up_proj.weight"
    inputs = [random.normal(size=(cols, 50)).astype(np.float32) for _ in weights]
    arrays = {
        f"{name}:expert.{number}:{field}": array
        for number, x in enumerate(inputs)
        for field, array in {
            "inputs": x @ x.T / 50, "in_sum2": np.square(x).mean(1), "count": np.array([50]),
        }.items()
    }  # fmt: skip
    ingot.save(tmp_path / "m.safetensors", {name: weights})
    ingot.save(tmp_path / "s.safetensors", arrays, {"ingot.statistics": "1"})
    own = recipe(tmp_path, codec, f"{{ bits = {bits}, group = {group} }}")
    report = ingot.convert(tmp_path / "m.safetensors", tmp_path / "out.zt", own, calibration=tmp_path / "s.safetensors")
    assert not any("without statistics" in note for note in report.notes)
    grid, levels, wanted = Grid(bits, group, learnt=codec == "scaled_codebook"), None, []
    for number, matrix in enumerate(weights):
        known = Statistics.in_memory(arrays).for_matrix(f"{name}:expert.{number}")
        assert known is not None
        found = round_matrix(matrix, grid, factors_of(known), levels=levels)
        levels = found.levels
        wanted.append(found.values())
    with ingot.open(tmp_path / "out.zt") as made:
        assert np.array_equal(made[name].numpy("f32"), np.stack(wanted))


@pytest.mark.parametrize("group", ["16", '"tensor"'])
def test_palettes_are_held_and_stored(model: Path, statistics: Path, tmp_path: Path, group: str) -> None:
    own = recipe(tmp_path, "palette", f"{{ bits = 4, group = {group} }}")
    ingot.convert(model, tmp_path / "out.zt", own, calibration=statistics)
    with ingot.open(model) as checkpoint, Statistics.open(statistics, checkpoint) as known:
        of = known.for_matrix(NAME)
        assert of is not None
        wanted = parse_quantizer("two-sided", "palette", {"bits": 4, "group": "tensor" if group != "16" else 16})
        exact = values_of(round_with(wanted, checkpoint[NAME].numpy("f32"), factors_of(of)))
    with ingot.open(tmp_path / "out.zt") as found:
        assert found[NAME].codec == "palette"
        assert np.array_equal(found[NAME].numpy("f32"), exact)


def test_stacked_matrices_have_one_palette(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.up_proj.weight"
    weights = np.random.default_rng(5).normal(size=(3, 8, 24)).astype(np.float32)
    ingot.save(tmp_path / "m.safetensors", {name: weights})
    ingot.save(tmp_path / "s.safetensors", {f"{name}:expert.0:in_sum2": np.ones(24, np.float32),
               f"{name}:expert.0:count": np.array([9])}, {"ingot.statistics": "1"})  # fmt: skip
    for options, fits in (("{ bits = 4 }", True), ("{ bits = 4, group = 2 }", False)):
        own = recipe(tmp_path, "palette", options)
        if fits:
            ingot.convert(tmp_path / "m.safetensors", tmp_path / "o.zt", own, calibration=tmp_path / "s.safetensors")
            with ingot.open(tmp_path / "o.zt") as found:
                assert len(np.unique(found[name].numpy("f32"))) <= 16
            continue
        with pytest.raises(IngotError) as refused:
            ingot.convert(tmp_path / "m.safetensors", tmp_path / "p.zt", own, calibration=tmp_path / "s.safetensors")
        assert refused.value.rule == "quantizer.matrix"


def test_rows_that_are_no_blocks_are_refused(tmp_path: Path) -> None:
    ingot.save(tmp_path / "m.safetensors", {NAME: np.ones((4, 96), np.float32)})
    own = recipe(tmp_path, "ggml_blocks", '{ type = "q4_k" }')
    with pytest.raises(IngotError) as refused:
        ingot.convert(tmp_path / "m.safetensors", tmp_path / "out.gguf", own, keep_names=True)
    assert refused.value.rule == "ggml_blocks.columns"


def test_a_rule_that_knows_names_of_the_result_alone_is_refused(tmp_path: Path) -> None:
    """Else the same codec would quantize without what the rule asks for."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 8, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["OneMatrix"], **config, **more})
    )
    ingot.save(folder / "model.safetensors", {NAME: np.ones((64, 64), np.float16)})
    (tmp_path / "own.toml").write_text(
        RECIPE.format(codec="affine", options="{ group = 32 }").replace("*_proj", "*_up")
    )
    with pytest.raises(IngotError) as refused:
        ingot.convert(folder, tmp_path / "out.gguf", tmp_path / "own.toml", no_tokenizer=True)
    assert refused.value.rule == "quantizer.matrix"


def test_candidates_have_no_quantizer() -> None:
    text = '[[rules]]\npick = "smallest"\ncandidates = [{ codec = "affine", quantizer = "gptq" }]'
    with pytest.raises(UsageError) as refused:
        parse_recipe(text, location="r.toml")
    assert refused.value.rule == "recipe.pick"


def test_a_ceiling_without_room_for_a_matrix_and_its_factors_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    """The file that is written is small; what two-sided takes for 4096 rows is G, 64 MiB, and what lies beside it."""
    rows, cols = 4096, 32
    random = np.random.default_rng(5)
    ingot.save(tmp_path / "m.safetensors", {NAME: random.normal(size=(rows, cols)).astype(np.float32)})
    arrays = {f"{NAME}:in_sum2": np.ones(cols, np.float32), f"{NAME}:count": np.array([9])}
    arrays |= {f"{NAME}:inputs": np.eye(cols, dtype=np.float32), f"{NAME}:outputs": np.eye(rows, dtype=np.float32)}
    given = Statistics.in_memory(arrays)
    own = recipe(tmp_path, "scaled_codebook", "{ bits = 4, group = 32 }")

    def convert(more: int) -> None:
        ingot.convert(
            tmp_path / "m.safetensors", tmp_path / "out.zt", own, calibration=given,
            max_ram=anonymous_in_use() + more, overwrite=True,
        )  # fmt: skip

    with pytest.raises(IngotError) as refused:
        convert(parse_size("60MiB"))
    assert refused.value.rule == "ram.ceiling"
    assert refused.value.where == NAME
    assert "--largest" in str(refused.value)
    assert not (tmp_path / "out.zt").exists()
    convert(parse_size("400MiB"))
    assert (tmp_path / "out.zt").exists()
