"""Conversions into Squish directories and back: what they hold, and that nothing is lost on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.core.numeric.exact_cast import EXACT_WIDER_DTYPES, narrow, widen
from ingot.core.runtime.progress import ProgressEvent
from ingot.errors import IntegrityError, UnsupportedError, UsageError
from tests.support.paths import DEMO_DATA as DEMO

RNG = np.random.default_rng(0)


def model(dtype: type = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": RNG.normal(0, 0.05, (96, 128)) for i in range(3)}
    tensors["model.layers.0.self_attn.q_proj.weight"] = RNG.normal(0, 0.05, (64, 65))  # odd columns
    tensors["model.norm.weight"] = np.ones(128)
    tensors["model.embed_tokens.weight"] = RNG.normal(0, 0.02, (50, 128))
    return {name: values.astype(dtype) for name, values in tensors.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", model(), {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "manifest.json").write_text('{"somebody": "else\'s"}')
    return folder


def same(a: Path, b: Path) -> bool:
    return all(item.status == "identical" for item in ingot.compare(a, b).tensors)


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("recipe", [None, "int8", "squish-int8", "squish-int4", "squish-int3"])
def test_there_and_back_through_zt(source: Path, tmp_path: Path, recipe: str | None) -> None:
    made = tmp_path / "squish"
    ingot.convert(source, made, recipe, "npydir")
    assert ingot.verify(made, strict=True) == []
    assert json.loads((made / "config.json").read_text()) == {"model_type": "llama"}
    assert "somebody" not in (made / "manifest.json").read_text()  # the directory's own, not the source's
    report = ingot.convert(made, tmp_path / "model.zt")
    assert {item.action for item in report.tensors} <= {"moved"}
    ingot.convert(tmp_path / "model.zt", tmp_path / "again", None, "npydir")
    ours = {name: data for name, data in files(made).items() if name != "config.json"}
    assert files(tmp_path / "again") == ours
    with ingot.open(made) as checkpoint:
        assert checkpoint.metadata == {"format": "pt"}
        assert set(checkpoint.companions) == {"config.json"}
        assert checkpoint["model.layers.0.mlp.up_proj.weight"].dtype == "bf16"
        assert checkpoint["model.norm.weight"].dtype == ("f16" if recipe and "squish" in recipe else "bf16")
    back = tmp_path / "back.safetensors"
    ingot.convert(made, back)
    assert same(made, back)


def test_every_file_opens_with_numpy(source: Path, tmp_path: Path) -> None:
    for recipe in ("int8", "squish-int4", "squish-int3"):
        made = tmp_path / recipe
        ingot.convert(source, made, recipe, "npydir")
        for path in (made / "tensors").glob("*.npy"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            assert array.flags.c_contiguous


@pytest.mark.parametrize("recipe", ["int8", "squish-int4", "squish-int3"])
def test_dry_runs_state_the_size_exactly(source: Path, tmp_path: Path, recipe: str) -> None:
    from ingot.conversion.run import prepare

    made = tmp_path / "squish"
    with prepare(source, made, recipe, "npydir") as prepared:
        size = prepared.plan.size
        assert prepared.plan.size_exact
    report = ingot.convert(source, made, recipe, "npydir")
    assert report.size == size == sum(len(data) for name, data in files(made).items() if name != "config.json")


def test_the_sentinel_of_four_bits_is_there_where_all_are(source: Path, tmp_path: Path) -> None:
    ingot.convert(source, tmp_path / "mixed", "squish-int4", "npydir")  # 65 columns stay as they are
    ingot.convert(source, tmp_path / "eight", "int8", "npydir")
    assert (tmp_path / "mixed" / ".squish_int4_ready").exists()
    assert not (tmp_path / "eight" / ".squish_int4_ready").exists()
    assert (tmp_path / "eight" / "tensors" / ".manifest_ready").read_bytes() == b""


class StopHereError(Exception):
    """Raised from the progress callback."""


@pytest.mark.parametrize("fraction", [0.0, 0.4, 0.9])
def test_resumed_directories_are_the_same(source: Path, tmp_path: Path, fraction: float) -> None:
    def stop(event: ProgressEvent) -> None:
        if event.processed > fraction * event.total:
            raise StopHereError

    ingot.convert(source, tmp_path / "whole", "int8", "npydir")
    with pytest.raises(StopHereError):
        ingot.convert(source, tmp_path / "out", "int8", "npydir", resume=True, progress=stop)
    assert not (tmp_path / "out").exists()
    report = ingot.convert(source, tmp_path / "out", "int8", "npydir", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert (report.resumed > 0) == (fraction > 0)


def test_other_weights_in_the_folder_are_its_tiers(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "squish"
    ingot.convert(source, made, "int8", "npydir")
    ingot.save(made / "squish_weights.safetensors", {"other": np.ones(3, np.float32)})
    with ingot.open(made) as checkpoint:
        assert checkpoint.format == "npydir"
        assert "other" not in checkpoint


def test_bf16_is_f16_where_that_is_exact_and_f32_elsewhere(tmp_path: Path) -> None:
    exact = np.array([1, -0.5, 2.0**-24, np.inf, 0.0, -0.0]).astype(ml_dtypes.bfloat16)
    tiny = np.array([1e-38, 3e38]).astype(ml_dtypes.bfloat16)
    odd = np.array([0x7FC1, 0xFF81, 0x7F80, 0x0001], np.uint16).view(ml_dtypes.bfloat16)  # NaN payloads, a subnormal
    tensors = {"exact": exact, "tiny": tiny, "odd": odd}
    ingot.save(tmp_path / "a.safetensors", tensors)
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "squish", None, "npydir")
    stored = {name: np.load(tmp_path / "squish" / "tensors" / f"{name}__pt.npy") for name in tensors}
    assert {name: array.dtype for name, array in stored.items()} == {"exact": "f2", "tiny": "f4", "odd": "f4"}
    assert np.array_equal(stored["tiny"], tiny.astype(np.float32))
    with ingot.open(tmp_path / "squish") as checkpoint:
        for name, values in tensors.items():
            found = checkpoint[name].numpy()
            assert found.dtype == values.dtype
            assert found.tobytes() == values.tobytes()
    ingot.convert(tmp_path / "squish", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("source", "holder"), [(name, holder) for name in EXACT_WIDER_DTYPES for holder in EXACT_WIDER_DTYPES[name]]
)
def test_every_value_that_a_wider_type_holds_comes_back(source: str, holder: str) -> None:
    from ingot.core.numeric.dtypes import numpy_dtype

    own = numpy_dtype(source)
    every = np.arange(2 ** (8 * own.itemsize)).astype(f"u{own.itemsize}").view(own)
    held = 0
    for start in range(0, every.size, 256 if (source, holder) == ("bf16", "f16") else every.size):
        some = every[start : start + 256] if every.size > 256 and holder == "f16" else every
        wide = widen(some, source, holder)
        if wide is None:
            continue
        held += some.size
        back = narrow(wide, source)
        assert back is not None
        assert back.tobytes() == some.tobytes()
        finite = np.isfinite(some.astype(np.float32))
        assert np.array_equal(wide[finite].astype(np.float32), some[finite].astype(np.float32))
    assert held == every.size or (source, holder) == ("bf16", "f16")


def test_values_that_ingot_json_denies_are_refused(tmp_path: Path) -> None:
    ingot.save(tmp_path / "a.safetensors", {"w": np.array([1, 1e-30]).astype(ml_dtypes.bfloat16)})
    made = tmp_path / "squish"
    ingot.convert(tmp_path / "a.safetensors", made, None, "npydir", digest=None)
    np.save(made / "tensors" / "w__pt.npy", np.array([1, 1.0001], np.float32))
    with ingot.open(made) as checkpoint, pytest.raises(ingot.errors.FormatError) as caught:
        checkpoint["w"].numpy()
    assert caught.value.rule == "npydir.narrowed"


@pytest.mark.parametrize("file", ["pt", "q", "s", "shape"])
def test_a_flipped_bit_is_found_by_its_digest(source: Path, tmp_path: Path, file: str) -> None:
    made = tmp_path / "squish"
    ingot.convert(source, made, "int8", "npydir")
    path = next((made / "tensors").glob(f"*__{file}.npy"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [item.rule for item in ingot.verify(made) if item.level == "error"] in (
        ["part.digest-mismatch"],
        ["npydir.narrowed"],
    )


def test_a_file_written_to_meanwhile_is_refused(source: Path, tmp_path: Path) -> None:
    made = tmp_path / "squish"
    ingot.convert(source, made, "int8", "npydir")
    with ingot.open(made, io="pread") as checkpoint:
        part = checkpoint["model.layers.0.mlp.up_proj.weight"].parts["packed_weight"]
        path = made / "tensors" / "model__layers__0__mlp__up_proj__weight__q.npy"
        os.utime(path, ns=(1, 1))
        assert part.source.changed()
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(IntegrityError) as caught:
            part.stored()
        assert caught.value.rule in ("store.changed", "store.shrank")


def test_names_that_would_share_files_are_refused(tmp_path: Path) -> None:
    for other in ("a__b", "A.b"):
        ingot.save(tmp_path / "a.safetensors", {"a.b": np.ones(2), other: np.ones(2)})
        with pytest.raises(UnsupportedError) as caught:
            ingot.convert(tmp_path / "a.safetensors", tmp_path / "squish", None, "npydir")
        assert caught.value.rule == "npydir.collision"
        assert not (tmp_path / "squish").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "group": 64, "scales": "f32"},
        {"bits": 2, "scales": "f32"},
        {"bits": 8, "group": 60, "scales": "f32"},
        {"bits": 3, "group": 32, "symmetric": False, "scales": "f32"},
        {"bits": 8, "group": "tensor"},
        {"bits": 4, "group": 32, "symmetric": False, "scales": "f32"},
    ],
)
def test_what_has_no_form_is_refused_by_name_and_decoded_by_conversions(
    tmp_path: Path, options: dict[str, object]
) -> None:
    recipe = tmp_path / "r.toml"
    text = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    recipe.write_text(f'name = "r"\n[[rules]]\ncodec = "affine"\noptions = {{ {text} }}\n')
    ingot.save(tmp_path / "a.safetensors", {"w": RNG.normal(0, 1, (4, 128)).astype(ml_dtypes.bfloat16)})
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(tmp_path / "a.safetensors", tmp_path / "squish", recipe, "npydir")
    assert caught.value.rule == "convert.unsupported"
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "a.zt", recipe)
    report = ingot.convert(tmp_path / "a.zt", tmp_path / "squish", None, "npydir")
    assert [item.action for item in report.tensors] == ["decoded"]
    assert not any(item.status == "differs" for item in ingot.compare(tmp_path / "a.zt", tmp_path / "squish").tensors)


@pytest.mark.parametrize(
    "options", ['bits = 8, scales = "f16"', 'bits = 3, group = 64, symmetric = false, scales = "bf16"']
)
def test_scales_become_f32_where_its_forms_have_them_so(tmp_path: Path, options: str) -> None:
    (tmp_path / "r.toml").write_text(f'name = "r"\n[[rules]]\ncodec = "affine"\noptions = {{ {options} }}\n')
    ingot.save(tmp_path / "a.safetensors", {"w": RNG.normal(0, 1, (4, 128)).astype(ml_dtypes.bfloat16)})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "a.zt", tmp_path / "r.toml")
    report = ingot.convert(tmp_path / "a.zt", tmp_path / "squish", None, "npydir")
    assert [(item.action, item.equal) for item in report.tensors] == [
        ("repacked", ["integers", "scales", "f32", "type"])
    ]
    with ingot.open(tmp_path / "a.zt") as stored, ingot.open(tmp_path / "squish") as moved:
        assert np.array_equal(stored["w"].numpy("f32"), moved["w"].numpy("f32"))


def test_a_single_file_cannot_be_a_directory(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        ingot.convert(source, tmp_path / "out.zt", None, "npydir")


def test_more_files_than_may_be_open_at_once(tmp_path: Path) -> None:
    import resource

    tensors = {f"layers.{i}.mlp.w": np.full((64, 64), i, np.float32) for i in range(150)}
    ingot.save(tmp_path / "a.safetensors", tensors)
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "squish", "int8", "npydir")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (120, limits[1]))
    try:
        with ingot.open(tmp_path / "squish") as checkpoint:
            for name, tensor in checkpoint.items():
                assert tensor.numpy()[0, 0] == pytest.approx(float(name.split(".")[1]), rel=1e-6)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_shipped_model_keeps_its_cosine(tmp_path: Path) -> None:
    folder = tmp_path / "squish"
    source = next(DEMO.glob("*.safetensors"), None) or DEMO
    ingot.convert(source, folder, "int8", "npydir")
    for item in ingot.compare(source, folder).tensors:
        assert item.same or (item.stats is not None and item.stats.cosine >= 0.99995)


@pytest.mark.parametrize("recipe", ["bf16", "decompress"])
@pytest.mark.parametrize("source", ["bf16", "f32", "int8"])
def test_what_no_name_of_npy_says_is_held_whatever_the_recipe(tmp_path, recipe, source):
    """What is kept without a recipe is carried by one that asks for bf16, values rounded once and named bf16."""
    values = np.random.default_rng(1).standard_normal((64, 64)).astype(ml_dtypes.bfloat16)
    values = values.astype(np.float32) * np.float32(1.01) if source == "f32" else values
    path = tmp_path / "a.safetensors"
    ingot.save(path, {"model.layers.0.mlp.up_proj.weight": values})
    if source == "int8":
        path = tmp_path / "a.zt"
        ingot.convert(tmp_path / "a.safetensors", path, "int8")
    ingot.convert(path, tmp_path / "wanted.zt", recipe, allow_requantize=True)
    ingot.convert(path, tmp_path / "out", recipe, format="npydir", allow_requantize=True)
    with ingot.open(tmp_path / "wanted.zt") as wanted, ingot.open(tmp_path / "out") as found:
        one, other = (next(iter(item.values())) for item in (wanted, found))
        assert (one.dtype, other.codec) == (other.dtype, "dense")
        assert np.array_equal(one.numpy().view(np.uint8), other.numpy().view(np.uint8))


def test_a_form_that_is_not_squishs_names_the_preset_that_makes_one(tmp_path):
    values = np.ones((64, 64), np.float32)
    ingot.save(tmp_path / "a.safetensors", {"model.layers.0.mlp.up_proj.weight": values})
    with pytest.raises(UnsupportedError, match="squish-int4") as caught:
        ingot.convert(tmp_path / "a.safetensors", tmp_path / "out", "palette4", format="npydir")
    assert caught.value.rule == "convert.unsupported"
