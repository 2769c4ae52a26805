"""load_model runs the first stack of a .squizd that this machine has and Ingot can run, and says which and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ingot
from ingot.ext.squizd import dispatch
from ingot.model.stacks import Flags
from ingot.runtime.evaluation.generate import generate
from ingot.runtime.layers.packed_linear import PackedLinear
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.transformers import load_model
from tests.support.models import make, make_tokenizer, output_of

RULE = '[[rules]]\nlabel = "{label}"\nmatch = ["{match}"]\nmin_ndim = 2\ncodec = "{codec}"\noptions = {{ {options} }}\n'
CODECS = {
    Flags.INT4: ("affine", "bits = 4, group = 16"),
    Flags.INT2: ("affine", "bits = 2, group = 16"),
    Flags.TCA_TBE: ("tca_tbe", ""),
    Flags.ASTC: ("astc", ""),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(
        "llama",
        tmp_path_factory.mktemp("source") / "llama",
        vocab_size=make_tokenizer(tmp_path_factory.mktemp("words")),
    )


@pytest.fixture
def squizd(source: Path, tmp_path: Path) -> Callable[..., Path]:
    def convert(*flags: Flags, package: bool = False) -> Path:
        rules = [
            RULE.format(label=str(flag.name), match="*", codec=CODECS[flag][0], options=CODECS[flag][1])
            for flag in flags
        ]
        if Flags.INT2 in flags:  # a hybrid: heads in 4 bits
            rules.insert(0, RULE.format(label="head", match="lm_head*", codec="affine", options="bits = 4, group = 16"))
        (tmp_path / "r.toml").write_text('name = "r"\ndescription = "r"\n' + "".join(rules))
        options = {"coreml": make_package(tmp_path)} if package else {}
        ingot.convert(source, tmp_path / "made", str(tmp_path / "r.toml"), format="squizd", **options)
        return tmp_path / "made"

    return convert


def make_package(folder: Path) -> Path:
    inside = folder / "m.mlpackage" / "Data" / "com.apple.CoreML"
    inside.mkdir(parents=True)
    (inside / "model.mlmodel").write_bytes(b"model")
    items = {"1": {"path": "com.apple.CoreML/model.mlmodel", "author": "a", "name": "model.mlmodel"}}
    about = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": "1"}
    (folder / "m.mlpackage" / "Manifest.json").write_text(json.dumps(about))
    return folder / "m.mlpackage"


def loaded(path: Path, **options: Any) -> tuple[Any, LoadReport]:
    reports: list[LoadReport] = []
    model = load_model(path, report=reports.append, **options)
    return model, reports[0]


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine with a Neural Engine and a coremltools that takes note of what it is handed."""
    handed: list[str] = []
    machine = replace(
        dispatch.this_machine(), system="Darwin", machine="arm64", ane=True, apple_gpu=True, coremltools=True
    )

    def model_of(folder: str) -> Any:
        handed.append(folder)
        if "refuse" in handed:
            raise RuntimeError("no such operator")
        return SimpleNamespace(__proxy__=object(), predict=dict)

    tools = ModuleType("coremltools")
    tools.models = SimpleNamespace(MLModel=model_of)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "coremltools", tools)
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "this_machine", lambda: machine)
    return handed


def test_int4_is_multiplied_packed(squizd: Callable[..., Path]) -> None:
    path = squizd(Flags.INT4)
    model, report = loaded(path)
    assert report.dispatch is not None
    assert report.dispatch.stack == "INT4"
    assert report.dispatch.reason in report.why
    assert report.packed > 0
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    assert torch.equal(output_of(model), output_of(load_model(path, keep_packed=True)))
    decoded, plain = loaded(path, keep_packed=False)
    assert plain.dispatch is not None
    assert plain.dispatch.stack == dispatch.FALLBACK
    assert [skipped.stack for skipped in plain.dispatch.passed_over] == ["INT4"]
    assert plain.packed == 0
    assert type(decoded.lm_head) is torch.nn.Linear


def test_int2_is_decoded_beside_int4_that_is_multiplied(squizd: Callable[..., Path]) -> None:
    model, report = loaded(squizd(Flags.INT2))
    assert report.dispatch is not None
    assert report.dispatch.stack == "INT2"
    assert isinstance(model.lm_head, PackedLinear)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


@pytest.mark.parametrize(
    ("flag", "stack"), [(Flags.TCA_TBE, "TCA_TBE"), (Flags.ASTC, dispatch.FALLBACK), (None, dispatch.FALLBACK)]
)
def test_other_encodings_are_decoded(source: Path, squizd: Callable[..., Path], flag: Flags | None, stack: str) -> None:
    model, report = loaded(squizd(*([] if flag is None else [flag])))
    assert report.dispatch is not None
    assert report.dispatch.stack == stack
    assert report.packed == 0
    assert [skipped.stack for skipped in report.dispatch.passed_over] == (["ASTC"] if flag is Flags.ASTC else [])
    if flag is not Flags.ASTC:  # lossless
        assert torch.allclose(output_of(model).float(), output_of(load_model(source)).float(), atol=1e-2)


def test_a_package_is_handed_to_coremltools(squizd: Callable[..., Path], mac: list[str]) -> None:
    model, report = loaded(squizd(Flags.INT4, package=True))
    assert report.dispatch is not None
    assert report.dispatch.stack == "ANE_COREML"
    assert model.predict() == {}
    (folder,) = mac
    assert (Path(folder) / "Manifest.json").is_file()


@pytest.mark.parametrize("asked", [{"dtype": "f32"}, {"keep_packed": True}, {"coreml": False}])
def test_who_asks_for_weights_gets_no_package(
    squizd: Callable[..., Path], mac: list[str], asked: dict[str, Any]
) -> None:
    model, report = loaded(squizd(Flags.INT4, package=True), **asked)
    assert report.dispatch is not None
    assert report.dispatch.stack == "INT4"
    assert [skipped.stack for skipped in report.dispatch.passed_over] == ["ANE_COREML"]
    assert isinstance(model, torch.nn.Module)
    assert mac == []


def test_a_package_that_coremltools_refuses_leaves_the_weights(squizd: Callable[..., Path], mac: list[str]) -> None:
    mac.append("refuse")
    model, report = loaded(squizd(Flags.INT4, package=True))
    assert report.dispatch is not None
    assert report.dispatch.stack == "INT4"
    assert "no such operator" in report.why
    assert isinstance(model, torch.nn.Module)


def test_elsewhere_the_report_says_what_the_package_needs(squizd: Callable[..., Path]) -> None:
    _, report = loaded(squizd(Flags.INT4, package=True))
    assert report.dispatch is not None
    assert report.dispatch.stack == "INT4"
    assert [skipped.stack for skipped in report.dispatch.passed_over] == ["ANE_COREML"]
    assert report.dispatch.passed_over[0].reason in report.why


def test_generation_runs_weights_where_a_package_would_come_first(squizd: Callable[..., Path], mac: list[str]) -> None:
    path = squizd(Flags.INT4, package=True)
    make_tokenizer(path)
    generated = generate(path, "the", 3)
    assert generated.load.dispatch is not None
    assert generated.load.dispatch.stack == "INT4"
    assert mac == []


def test_other_formats_have_no_stacks(source: Path) -> None:
    assert loaded(source)[1].dispatch is None
