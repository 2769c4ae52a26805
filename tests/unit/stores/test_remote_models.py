"""Checkpoints of other machines: every operation, with few requests, and no byte too many."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.cli.main import run
from ingot.errors import IngotError, UsageError
from ingot.inspect.inspect import inspect
from ingot.stores.remote import client
from ingot.stores.remote.source import HEAD
from tests.support.stores import rule_of
from tests.support.web import Fault, Request, WebServer

pytest.importorskip("obstore")
RNG = np.random.default_rng(0)
WEIGHTS = {f"model.layers.{i}.mlp.up_proj.weight": RNG.standard_normal((64, 128)).astype(np.float32) for i in range(2)}
FORMATS = (
    ("safetensors", None),
    ("zt", "int4"),
    ("squizd", "int2-hybrid"),
    ("npydir", "squish-int8"),
    ("mlx", "mlx-4bit"),
    ("gguf", None),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"dtype": "float32"}))
    return folder


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    for name, value in {"ACCESS_KEY_ID": "KEYOFTEST", "SECRET_ACCESS_KEY": "SECRETOFTEST", "REGION": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    monkeypatch.setattr(client, "RETRIES", 2)
    with WebServer(bucket="bucket", listing=True) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


def upload(server: WebServer, folder: Path, name: str = "m") -> None:
    server.files.update(
        {f"{name}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.*")}
    )


@pytest.mark.parametrize(("format", "recipe"), FORMATS)
def test_every_format_is_read_verified_compared_and_converted(
    server: WebServer, model: Path, tmp_path: Path, format: str, recipe: str | None
) -> None:
    ingot.convert(model, tmp_path / "made", recipe, format=format, keep_names=True)
    upload(server, tmp_path / "made")
    local = ingot.convert(tmp_path / "made", tmp_path / "local", format="zt", keep_names=True)
    for index, address in enumerate(("s3://bucket/m", f"{server.url}/m/")):
        with ingot.open(address) as checkpoint:
            assert content_id(checkpoint) == content_id(ingot.open(tmp_path / "made"))
        assert not [finding for finding in ingot.verify(address) if finding.level == "error"]
        assert ingot.compare(address, tmp_path / "made").same
        report = ingot.convert(address, tmp_path / str(index), format="zt", keep_names=True)
        assert report.companions == local.companions
        for path in (tmp_path / "local").iterdir():
            assert (tmp_path / str(index) / path.name).read_bytes() == path.read_bytes()


def test_deltas_and_plans_are_made_and_applied_from_afar(server: WebServer, model: Path, tmp_path: Path) -> None:
    tuned = {name: values + np.float32(0.01) for name, values in WEIGHTS.items()}
    ingot.save(tmp_path / "tuned.safetensors", tuned)
    upload(server, model)
    server.files["tuned.safetensors"] = (tmp_path / "tuned.safetensors").read_bytes()
    url = f"{server.url.replace('://', '://name:SECRET@')}/tuned.safetensors?key=SECRET"
    ingot.diff("s3://bucket/m", url, tmp_path / "d.zt")
    server.files["d.zt"] = (tmp_path / "d.zt").read_bytes()
    ingot.patch("s3://bucket/m", "s3://bucket/d.zt", tmp_path / "again.zt")
    assert content_id(ingot.open(tmp_path / "again.zt")) == content_id(ingot.open(url))
    assert run(["convert", url, "s3://bucket/made.zt", "--recipe", "int4", "--plan-out", "s3://bucket/plan.json"]) == 0
    assert run(["run-plan", "s3://bucket/plan.json"]) == 0
    ingot.convert(tmp_path / "tuned.safetensors", tmp_path / "made.zt", "int4")
    assert server.files["made.zt"] == (tmp_path / "made.zt").read_bytes()
    with pytest.raises(UsageError) as caught:
        ingot.open(url.replace("tuned", "gone"))
    assert "SECRET" not in str(caught.value)
    assert not [name for name, data in server.files.items() if b"SECRET" in data]


def test_what_is_inspected_is_opened_once(server: WebServer, model: Path) -> None:
    upload(server, model)
    for options, most in ([], 1), (["--content-id", "--json"], 2):
        server.log.clear()
        assert run(["inspect", f"{server.url}/m/model.safetensors", *options]) == 0
        assert len(server.gets("m/model.safetensors")) == most


def test_eight_shards_take_two_requests_each_at_most(server: WebServer, tmp_path: Path) -> None:
    many = {f"{'layer' * 200}.{i}.w": np.zeros(3, np.float32) for i in range(800)}
    ingot.convert(save(tmp_path / "one.safetensors", many), tmp_path / "m", format="safetensors", max_shard=1200)
    upload(server, tmp_path / "m")
    shards = [name for name in server.files if "-of-" in name]
    assert len(shards) == 8
    assert min(int.from_bytes(server.files[name][:8], "little") for name in shards) > HEAD
    assert inspect(f"{server.url}/m/model.safetensors.index.json").tensors
    assert max(len(server.gets(name)) for name in shards) == 2


def test_a_tensor_and_some_rows_take_their_bytes(server: WebServer, tmp_path: Path) -> None:
    weights = {name: RNG.standard_normal((1024, 512)).astype(np.float32) for name in "abc"}
    path = save(tmp_path / "m.safetensors", weights)
    for suffix in (".safetensors", ".zt", ".gguf"):
        ingot.convert(path, tmp_path / f"x{suffix}", keep_names=True)
        server.files[f"x{suffix}"] = (tmp_path / f"x{suffix}").read_bytes()
        with ingot.open(f"{server.url}/x{suffix}") as checkpoint:
            server.sent = 0
            assert np.array_equal(checkpoint["b"].numpy(), weights["b"])
            assert server.sent <= 1.02 * weights["b"].nbytes
            if suffix != ".zt":  # a small part's digest is that of all of it
                server.sent = 0
                assert np.array_equal(checkpoint["b"][100:900], weights["b"][100:900])
                assert server.sent <= 1.02 * weights["b"][100:900].nbytes


def test_what_changes_while_it_is_converted_is_refused(server: WebServer, model: Path, tmp_path: Path) -> None:
    upload(server, model)
    name = "m/model.safetensors"
    calls = []

    def swap(request):
        calls.append(request)
        if len(server.gets(name)) == 2:
            server.files[name] = server.files[name][:-1] + b"\1"

    server.fault = swap
    with pytest.raises(IngotError) as caught:
        ingot.convert(f"{server.url}/{name}", tmp_path / "out.zt")
    assert rule_of(caught.value) == "store.changed"
    assert not (tmp_path / "out.zt").exists()


def test_a_plan_has_no_secrets(
    server: WebServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(server, model)
    url = f"{server.url.replace('://', '://name:SECRET@')}/m/model.safetensors?key=SECRET"
    assert run(["convert", url, str(tmp_path / "out.zt"), "--plan-out", str(tmp_path / "plan.json")]) == 0
    assert run(["convert", url, str(tmp_path / "x.zt"), "--json"]) == 0
    server.fault = lambda request: Fault(status=403)
    assert run(["inspect", url]) == 1
    server.fault = None
    assert "SECRET" not in "".join(capsys.readouterr()) + (tmp_path / "plan.json").read_text()
    assert run(["run-plan", str(tmp_path / "plan.json")]) == 0
    assert (tmp_path / "out.zt").read_bytes() == (tmp_path / "x.zt").read_bytes()


def save(path: Path, weights: dict[str, np.ndarray]) -> Path:
    ingot.save(path, weights)
    return path


def test_no_command_tells_a_secret(
    server: WebServer, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(server, model)
    url = f"{server.url.replace('://', '://name:SECRET@')}/m/model.safetensors?key=SECRET"
    other = str(model / "model.safetensors")
    for arguments in (
        ["inspect", url],
        ["inspect", url, "--content-id", "--json"],
        ["verify", url],
        ["plan", url],
        ["compare", url, other],
        ["compare", other, url, "--json"],
        ["convert", url, str(tmp_path / "a.zt"), "--dry-run"],
        ["convert", url, str(tmp_path / "a.zt"), "--resume"],
        ["diff", url, url, "-o", str(tmp_path / "d.zt")],
        ["patch", url, str(tmp_path / "d.zt"), "-o", str(tmp_path / "p.zt"), "--json"],
    ):
        assert run(arguments) == 0, capsys.readouterr()
    for arguments in (["convert", url, url], ["inspect", url.replace("model.", "gone.")]):
        assert run(arguments) != 0
    assert "SECRET" not in "".join(capsys.readouterr())
    assert not [path for path in tmp_path.rglob("*.*") if path.is_file() and b"SECRET" in path.read_bytes()]


@pytest.mark.parametrize("rows", [100, 12_000])  # a small part with its digest, a large one with those of chunks
def test_what_the_way_damages_is_fetched_once_more(server: WebServer, tmp_path: Path, rows: int) -> None:
    weights = {"w": RNG.standard_normal((rows, 256)).astype(np.float32)}
    ingot.save(tmp_path / "m.zt", weights)
    server.files["m.zt"] = (tmp_path / "m.zt").read_bytes()
    place = server.files["m.zt"].index(weights["w"][-1].tobytes())
    with ingot.open(f"{server.url}/m.zt") as checkpoint:
        spoilt: list[Request] = []

        def once(request: Request) -> Fault | None:
            first, last = request.range or (0, 0)
            if request.method == "GET" and first <= place <= (last or 0) and not spoilt:
                spoilt.append(request)
                return Fault(flip=place)
            return None

        tensor = checkpoint["w"]
        for reading in (tensor.numpy, lambda: tensor[:], lambda: tensor.parts["data"].array().reshape(rows, 256)):
            spoilt.clear()
            server.fault = once
            assert np.array_equal(reading(), weights["w"])
            assert spoilt
        server.fault = lambda request: Fault(flip=place)
        with pytest.raises(IngotError) as caught:
            checkpoint["w"].numpy()
        assert caught.value.rule == "part.digest-mismatch"
        assert "m.zt" in str(caught.value)


@pytest.mark.parametrize(("format", "recipe"), FORMATS)
def test_every_format_is_written_to_a_bucket(
    server: WebServer, model: Path, tmp_path: Path, format: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    ingot.convert(model, tmp_path / "made", recipe, format=format, digest="sha256", keep_names=True)
    report = ingot.convert(model, "s3://bucket/m", recipe, format=format, digest="sha256", keep_names=True)
    assert report.destination == "s3://bucket/m"
    made = {path.relative_to(tmp_path / "made").as_posix(): path for path in (tmp_path / "made").rglob("*.*")}
    assert {f"m/{name}": path.read_bytes() for name, path in made.items()} == server.files
    assert not [finding for finding in ingot.verify("s3://bucket/m") if finding.level == "error"]


def test_deltas_copies_and_seals_are_written_to_a_bucket(
    server: WebServer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    upload(server, model)
    tuned = {name: values + np.float32(0.01) for name, values in WEIGHTS.items()}
    ingot.save("s3://bucket/tuned.safetensors", tuned)
    ingot.diff("s3://bucket/m", "s3://bucket/tuned.safetensors", "s3://bucket/d.zt")
    ingot.patch("s3://bucket/m", "s3://bucket/d.zt", "s3://bucket/again.zt")
    assert ingot.compare("s3://bucket/again.zt", "s3://bucket/tuned.safetensors").same
    ingot.seal("s3://bucket/tuned.safetensors")
    assert "tuned.safetensors.ingot.json" in server.files
    assert not ingot.verify("s3://bucket/tuned.safetensors")
    with pytest.raises(UsageError) as caught:
        ingot.convert("s3://bucket/m", "s3://bucket/m", "int4", overwrite=True)
    assert caught.value.rule == "convert.same-path"
