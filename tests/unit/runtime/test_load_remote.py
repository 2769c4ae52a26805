"""Models loaded from another machine: weights by ranges, what lies beside them by copies of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ingot

pytest.importorskip("obstore")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ingot.errors import IngotError  # noqa: E402
from ingot.model.checkpoint import Checkpoint  # noqa: E402
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer  # noqa: E402
from ingot.runtime.loading.transformers_weights import loading_order  # noqa: E402
from ingot.stores.remote import client, prefetch  # noqa: E402
from ingot.stores.remote.source import RemoteSource  # noqa: E402
from tests.support.models import make, make_tokenizer, output_of  # noqa: E402
from tests.support.web import Fault, Request, WebServer  # noqa: E402


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


def test_weights_are_read_ahead_in_the_order_in_which_transformers_takes_them() -> None:
    from transformers.core_model_loading import dot_natural_key

    names = [f"model.layers.{at}.{part}" for at in (10, 2, 0) for part in ("w2.weight", "w1.weight", "b")]
    names += ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]
    assert loading_order(names) == sorted(names, key=dot_natural_key)
    packed = {"model.layers.0.w2.weight", "lm_head.weight"}
    assert loading_order(names, packed)[-2:] == ["lm_head.weight", "model.layers.0.w2.weight"]


def test_a_model_begins_to_travel_after_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("llama", tmp_path)
    ingot.convert(tmp_path, tmp_path / "q", "int4")
    files = {f"q/{path.name}": path.read_bytes() for path in (tmp_path / "q").iterdir()}
    asked: list[int] = []
    with WebServer(files, listing=True) as server:
        monkeypatch.setattr(Checkpoint, "read_ahead", lambda *_: asked.append(server.requests()))
        ingot.load_model(f"{server.url}/q/", keep_packed=True)
    assert asked[0] <= 8


@pytest.mark.parametrize("most", [1, 1 << 30], ids=["nothing ahead", "all ahead"])
@pytest.mark.parametrize("options", [{}, {"keep_packed": True}], ids=["decoded", "packed"])
def test_each_byte_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], most: int
) -> None:
    """Also that of a matrix that two layers share, and of one that several threads decode."""
    monkeypatch.setattr(prefetch, "MAX_AHEAD", most)
    make("tied qwen2", tmp_path / "m", vocab_size=60_000)
    (tmp_path / "all.toml").write_text('[[rules]]\nmatch = ["*.weight"]\nmin_ndim = 2\ncodec = "affine"\n')
    ingot.convert(tmp_path / "m", tmp_path / "q", tmp_path / "all.toml")
    files = {f"q/{path.name}": path.read_bytes() for path in (tmp_path / "q").iterdir()}
    with WebServer(files, listing=True) as server:
        ingot.load_model(f"{server.url}/q/", **options)
        assert server.sent < 1.02 * sum(map(len, files.values())) + (1 << 17)


@pytest.mark.parametrize("most", [1, 1 << 30], ids=["nothing ahead", "all ahead"])
@pytest.mark.parametrize("kind", ["llama", "tied qwen2"])
def test_shards_become_the_same_model_and_each_byte_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    monkeypatch.setattr(prefetch, "MAX_AHEAD", most)
    make(kind, tmp_path / "m", vocab_size=6000)
    ingot.convert(tmp_path / "m", tmp_path / "s", format="safetensors", max_shard="300KB")
    files = {f"s/{path.name}": path.read_bytes() for path in (tmp_path / "s").iterdir()}
    assert sum(name.endswith(".safetensors") for name in files) > 1
    with WebServer(files, listing=True) as server:
        model = ingot.load_model(f"{server.url}/s/")
        assert server.sent < 1.02 * sum(map(len, files.values())) + (1 << 17)
    near = ingot.load_model(tmp_path / "m")
    for (name, value), other in zip(model.state_dict().items(), near.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert prefetch._QUEUE._held_bytes == 0


def test_dense_weights_stay_where_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One memory for each: the one that the answer was read into is the parameter's."""
    monkeypatch.setattr(prefetch, "LARGE", 1 << 11)
    make("llama", tmp_path / "m", vocab_size=6000)
    files = {f"m/{path.name}": path.read_bytes() for path in (tmp_path / "m").iterdir()}
    read, places = RemoteSource._read, set()

    def noted(source: RemoteSource, tasks: Sequence[tuple[int, memoryview]]) -> None:
        places.update(np.asarray(out).ctypes.data for _, out in tasks)
        read(source, tasks)

    monkeypatch.setattr(RemoteSource, "_read", noted)
    with WebServer(files, listing=True) as server:
        model = ingot.load_model(f"{server.url}/m/")
    large = [value for value in model.parameters() if value.nbytes >= 1 << 11]
    assert len(large) > 2
    assert all(value.data_ptr() in places for value in large)


@pytest.mark.parametrize("options", [{}, {"keep_packed": True}], ids=["decoded", "packed"])
@pytest.mark.parametrize("rule", ["part.digest-mismatch", "store.changed", "remote.failed"])
def test_what_fails_midway_is_refused_by_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], rule: str
) -> None:
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    monkeypatch.setattr(client, "RETRIES", 0)
    make("llama", tmp_path / "m", vocab_size=6000)
    (tmp_path / "all.toml").write_text('[[rules]]\nmatch = ["*.weight"]\nmin_ndim = 2\ncodec = "affine"\n')
    ingot.convert(tmp_path / "m", tmp_path / "q", tmp_path / "all.toml")
    files = {f"q/{path.name}": path.read_bytes() for path in (tmp_path / "q").iterdir()}
    with ingot.open(tmp_path / "q") as file:
        part = file["lm_head.weight"].parts["packed_weight"]
        place = part.offset + part.length // 2
    faults = {
        "part.digest-mismatch": Fault(flip=place),
        "store.changed": Fault(etag='"another"'),
        "remote.failed": Fault(status=500),
    }

    def fault(request: Request) -> Fault | None:
        first, last = request.range or (0, 0)
        inside = request.key == "q/model.zt" and last is not None and first <= place <= last
        return faults[rule] if inside else None

    with WebServer(files, listing=True) as server:
        server.fault = fault
        with pytest.raises(IngotError) as caught:
            ingot.load_model(f"{server.url}/q/", **options)
    assert caught.value.rule == rule
    assert "q/" in str(caught.value)
    assert prefetch._QUEUE._held_bytes == 0
    assert not prefetch._QUEUE._waiting
