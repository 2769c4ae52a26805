"""Models loaded from another machine: weights by ranges, what lies beside them by copies of it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import ingot

pytest.importorskip("obstore")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ingot.adapters.transformers_tokenizer import load_tokenizer  # noqa: E402
from ingot.testing.models import make, make_tokenizer, output_of  # noqa: E402
from ingot.testing.web import WebServer  # noqa: E402


def test_a_model_and_its_tokenizer_come_from_afar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("llama", tmp_path / "m")
    make_tokenizer(tmp_path / "m")
    ingot.convert(tmp_path / "m", tmp_path / "q", "int4")
    files = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    with WebServer(files, listing=True) as server:
        for name, options in (("m", {}), ("q", {"keep_packed": True})):
            url = f"{server.url.replace('://', '://name:SECRET@')}/{name}/"
            reports: list[object] = []
            model = ingot.load_model(url, report=reports.append, **options)
            assert torch.equal(output_of(model), output_of(ingot.load_model(tmp_path / name, **options)))
            assert "SECRET" not in str(reports[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            near, far = load_tokenizer(tmp_path / "m"), load_tokenizer(f"{server.url}/m/")
        assert far("the 123").input_ids == near("the 123").input_ids
