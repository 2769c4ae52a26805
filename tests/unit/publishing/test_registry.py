"""Pushing to a registry and pulling from it: a registry of the tests' own, which also lies."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.bytes.encodings import compress_frame
from ingot.errors import IngotError, UsageError
from ingot.stores.local import LocalStore
from ingot.stores.location import Location
from ingot.stores.registry.store import RegistryStore, parse_reference
from ingot.stores.remote import client
from tests.support.registry import PASSWORD, USER, FakeRegistry

WEIGHTS = {name: np.random.default_rng(3).standard_normal((300, 100)).astype(np.float32) for name in ("a.w", "b.w")}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DOCKER_AUTH_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(client, "_PAUSE", 0.001)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        yield fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "extra").mkdir(parents=True)
    ingot.save(folder / "model.safetensors", WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "README.md").write_text("# About\n")
    (folder / "extra" / "run.py").write_text("print()\n")
    (folder / "empty.txt").write_bytes(b"")
    return folder


def address(registry: FakeRegistry, tag: str = "v1") -> str:
    return f"oci://{registry.host}/org/model:{tag}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rule_of(call: Callable[[], object]) -> str | None:
    with pytest.raises(IngotError) as caught:
        call()
    assert "secret answer" not in str(caught.value)
    return caught.value.rule


def test_a_folder_there_and_back(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    pushed = ingot.push(model, address(registry))
    assert pushed.files == 5
    assert pushed.sent == pushed.size > 0
    pulled = ingot.pull(address(registry), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)
    assert pulled.version == pushed.version
    by_digest = address(registry).replace(":v1", f"@{pushed.version}")
    ingot.pull(by_digest, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(model)


def test_the_manifest_is_that_of_modelpack(registry: FakeRegistry, model: Path) -> None:
    ingot.push(model, address(registry), base="org/original")
    manifest = json.loads(registry.manifests["org/model", "v1"])
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    types = {item["annotations"]["org.cncf.model.filepath"]: item["mediaType"] for item in manifest["layers"]}
    assert types == {
        "model.safetensors": "application/vnd.cncf.model.weight.v1.raw",
        "config.json": "application/vnd.cncf.model.weight.config.v1.raw",
        "README.md": "application/vnd.cncf.model.doc.v1.raw",
        "extra/run.py": "application/vnd.cncf.model.code.v1.raw",
        "empty.txt": "application/vnd.cncf.model.weight.config.v1.raw",
    }
    config = json.loads(registry.blobs["org/model", manifest["config"]["digest"]])
    assert config["modelfs"] == {"type": "layers", "diffIds": [item["digest"] for item in manifest["layers"]]}
    assert config["config"] == {"format": "safetensors", "paramSize": "60K", "precision": "float32"}
    assert config["descriptor"]["family"] == "llama"
    assert config["descriptor"]["sourceURL"] == "https://huggingface.co/org/original"


def test_only_what_is_new_is_sent(registry: FakeRegistry, model: Path) -> None:
    first = ingot.push(model, address(registry))
    assert ingot.push(model, address(registry)).sent == 0
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "x": 1}))
    registry.log.clear()
    second = ingot.push(model, address(registry, "v2"))
    assert second.sent == (model / "config.json").stat().st_size < first.sent
    assert registry.count("POST") == 2  # config.json and the description


def test_equal_files_are_sent_once(registry: FakeRegistry, model: Path) -> None:
    (model / "copy.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    (model / "model.safetensors").unlink()
    ingot.push(model / "copy.safetensors", address(registry))
    registry.log.clear()
    (model / "twin.json").write_bytes((model / "config.json").read_bytes())
    ingot.push(model, address(registry, "v2"))
    assert len({line for line in registry.log if line.startswith("PUT") and "digest=" in line}) == registry.count(
        "POST"
    )


def test_a_tag_is_replaced_only_with_permission(registry: FakeRegistry, model: Path) -> None:
    ingot.push(model, address(registry))
    before = registry.manifests["org/model", "v1"]
    (model / "config.json").write_text("{}")
    assert rule_of(lambda: ingot.push(model, address(registry))) == "target.exists"
    assert registry.manifests["org/model", "v1"] == before
    ingot.push(model, address(registry), overwrite=True)
    assert registry.manifests["org/model", "v1"] != before


def test_an_interrupted_push_goes_on(registry: FakeRegistry, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRIES", 0)
    monkeypatch.setattr(client, "TRIES", 1)
    registry.statuses["PUT /v2/org/model/blobs"] = 503  # the first upload
    assert rule_of(lambda: ingot.push(model, address(registry))) == "remote.failed"
    assert not registry.manifests
    registry.statuses["PUT /v2/org/model/manifests"] = 503
    assert rule_of(lambda: ingot.push(model, address(registry))) == "remote.failed"
    assert not registry.manifests
    registry.log.clear()
    assert ingot.push(model, address(registry)).sent == 0
    assert registry.count("POST") == 0
    assert registry.manifests


def test_a_failed_request_is_repeated(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    for line in ("POST", "PUT /v2/org/model/blobs", "PUT /v2/org/model/manifests", "HEAD"):
        registry.statuses[line] = 502
    ingot.push(model, address(registry))
    registry.statuses["GET /v2/org/model/blobs"] = 503
    ingot.pull(address(registry), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)


def test_one_tensor_is_read_by_ranges(registry: FakeRegistry, model: Path) -> None:
    ingot.push(model, address(registry))
    with ingot.open(address(registry)) as checkpoint:
        assert np.array_equal(checkpoint["b.w"][7:9], WEIGHTS["b.w"][7:9])
        assert set(checkpoint.companions) >= {"config.json", "README.md"}
    with ingot.open(f"{address(registry)}/model.safetensors") as checkpoint:
        assert np.array_equal(checkpoint["a.w"].numpy(), WEIGHTS["a.w"])
    assert ingot.compare(address(registry), model).same
    assert [item.level for item in ingot.verify(address(registry))] == ["note"]  # no digests


def test_a_file_and_a_folder_of_an_artifact(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    ingot.push(model, address(registry))
    ingot.pull(f"{address(registry)}/config.json", tmp_path / "one")
    assert contents(tmp_path / "one") == {"config.json": (model / "config.json").read_bytes()}
    store, name = Location.parse(f"{address(registry)}/extra").find()
    assert (list(store.tree()), name) == (["run.py"], "")
    for text in (f"{address(registry)}/absent", address(registry, "none"), f"oci://{registry.host}/none:v1"):
        assert rule_of(lambda text=text: Location.parse(text).find()) == "store.missing"
    assert rule_of(lambda: ingot.save(f"{address(registry)}/x.zt", WEIGHTS)) == "store.not-writable"


@pytest.mark.parametrize("auth", ["basic", "bearer"])
def test_credentials(auth: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeRegistry(auth) as registry:
        assert rule_of(lambda: ingot.push(model, address(registry))) == "store.denied"
        wrong = address(registry).replace("oci://", f"oci://{USER}:no@")
        assert rule_of(lambda: ingot.push(model, wrong)) == "store.denied"
        entry = {"auths": {registry.host: {"auth": b64encode(f"{USER}:{PASSWORD}".encode()).decode()}}}
        monkeypatch.setattr("ingot.stores.remote.address._USERS", {})
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker" / "config.json").write_text(json.dumps(entry))
        ingot.push(model, address(registry))
        ingot.pull(address(registry), tmp_path / "back")
        assert contents(tmp_path / "back") == contents(model)
        (tmp_path / "docker" / "config.json").unlink()
        assert rule_of(lambda: ingot.open(address(registry))) == "store.denied"
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps(entry))
        with ingot.open(address(registry)) as checkpoint:
            assert "a.w" in checkpoint


def test_a_registry_with_other_bytes_is_refused(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    ingot.push(model, address(registry))
    key = "org/model", registry.digest_of("org/model", "v1", "model.safetensors")
    good = registry.blobs[key]
    registry.blobs[key] = good[:-1] + bytes([good[-1] ^ 1])
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "registry.digest"
    registry.blobs[key] = good[:-1]
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "registry.size"
    assert rule_of(lambda: ingot.open(address(registry))) == "registry.size"
    del registry.blobs[key]
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "store.missing"
    registry.blobs[key] = good
    small = "org/model", registry.digest_of("org/model", "v1", "config.json")
    registry.blobs[small] = registry.blobs[small].replace(b"llama", b"lIama")
    assert rule_of(lambda: Location.parse(address(registry)).store().open("config.json")) == "registry.digest"
    assert not (tmp_path / "back").exists()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_an_answer_that_breaks_off(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    ingot.push(model, address(registry))
    registry.cut[registry.digest_of("org/model", "v1", "model.safetensors")] = 1000
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "remote.length"
    assert not (tmp_path / "back").exists()


def test_a_registry_that_lies_about_sizes_when_pushing(registry: FakeRegistry, model: Path) -> None:
    digest = f"sha256:{sha256((model / 'config.json').read_bytes()).hexdigest()}"
    registry.sizes[digest] = 3
    assert rule_of(lambda: ingot.push(model, address(registry))) == "registry.size"
    assert not registry.manifests


def test_a_manifest_with_another_digest(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    pushed = ingot.push(model, address(registry))
    by_digest = address(registry).replace(":v1", f"@{pushed.version}")
    registry.change("org/model", pushed.version, schemaVersion=3)
    assert rule_of(lambda: ingot.pull(by_digest, tmp_path / "back")) == "registry.digest"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../x", "a\\b", "c:x", "", "README.md/x", "readme.MD", "x\ny", "model.safetensors"]
)
def test_names_that_lead_elsewhere_or_collide(registry: FakeRegistry, model: Path, tmp_path: Path, name: str) -> None:
    (model / "extra" / "run.py").unlink()
    (model / "AAA").write_text("x")  # the first layer
    ingot.push(model, address(registry))
    registry.change("org/model", "v1", layer={"annotations": {"org.cncf.model.filepath": name}})
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "registry.name"
    assert rule_of(lambda: ingot.open(address(registry))) == "registry.name"
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"layers": []}, "registry.manifest"),
        ({"layers": "x"}, "registry.manifest"),
        ({"manifests": []}, "registry.manifest"),
        ({"config": None}, "registry.manifest"),
        ({"layer": {"size": -1}}, "registry.manifest"),
        ({"layer": {"size": True}}, "registry.manifest"),
        ({"layer": {"size": 1 << 70}}, "registry.manifest"),
        ({"layer": {"digest": "sha512:00"}}, "registry.manifest"),
        ({"layer": {"digest": "sha256:" + "0" * 63 + "G"}}, "registry.manifest"),
        ({"layer": {"mediaType": 3}}, "registry.manifest"),
        ({"layer": {"mediaType": "application/vnd.cncf.model.weight.v1.zip"}}, "registry.layer"),
        ({"layer": {"mediaType": "application/vnd.cncf.model.weight.v1.tar+xz"}}, "registry.layer"),
        ({"layer": {"annotations": None}}, "registry.name"),
    ],
)
def test_manifests_that_are_refused(
    registry: FakeRegistry, model: Path, tmp_path: Path, fields: dict[str, object], rule: str
) -> None:
    ingot.push(model, address(registry))
    registry.change("org/model", "v1", **fields)
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == rule


def put_archive(registry: FakeRegistry, data: bytes, ending: str, **annotations: str) -> str:
    """Add a layer that is an archive to the artifact, and return its digest."""
    digest = f"sha256:{sha256(data).hexdigest()}"
    registry.blobs["org/model", digest] = data
    manifest = json.loads(registry.manifests["org/model", "v1"])
    media_type = f"application/vnd.cncf.model.weight.v1{ending}"
    layer = {"mediaType": media_type, "digest": digest, "size": len(data), "annotations": annotations}
    manifest["layers"].append(layer)
    registry.manifests["org/model", "v1"] = json.dumps(manifest).encode()
    return digest


def archive_of(files: dict[str, bytes], link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo(link)
            info.type = tarfile.SYMTYPE
            info.linkname = "/etc/passwd"
            archive.addfile(info)
    return out.getvalue()


PACK = {".tar": bytes, ".tar+gzip": gzip.compress, ".tar+zstd": compress_frame}
MORE = {"more/second.bin": bytes(range(256)) * 3000, "./tokenizer.json": b"{}"}
UNPACKED = {name.removeprefix("./"): data for name, data in MORE.items()}


@pytest.mark.parametrize("ending", PACK)
def test_layers_that_are_archives_are_unpacked(
    registry: FakeRegistry, model: Path, tmp_path: Path, ending: str
) -> None:
    ingot.push(model, address(registry))
    put_archive(registry, PACK[ending](archive_of(MORE)), ending, **{"org.cncf.model.filepath": "more"})
    pulled = ingot.pull(address(registry), tmp_path / "back")
    assert contents(tmp_path / "back") == {**contents(model), **UNPACKED}
    assert (pulled.files, pulled.unpacked) == (7, 1)
    assert pulled.size == sum(map(len, contents(tmp_path / "back").values()))
    assert rule_of(lambda: ingot.open(address(registry))) == "registry.layer"
    assert rule_of(lambda: ingot.pull(f"{address(registry)}/config.json", tmp_path / "one")) == "registry.layer"


def test_an_artifact_of_one_archive(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    ingot.push(model, address(registry))
    manifest = json.loads(registry.manifests["org/model", "v1"])
    registry.manifests["org/model", "v1"] = json.dumps({**manifest, "layers": []}).encode()
    put_archive(registry, archive_of(contents(model)), ".tar")
    ingot.pull(address(registry), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)
    with ingot.open(tmp_path / "back") as checkpoint:
        assert set(checkpoint) == set(WEIGHTS)


@pytest.mark.parametrize("ending", PACK)
def test_archives_that_are_refused_leave_nothing(
    registry: FakeRegistry, model: Path, tmp_path: Path, ending: str
) -> None:
    good = archive_of(MORE)
    cases = [
        (archive_of({"../up": b"1"}), "registry.name"),
        (archive_of({"/tmp/absolute": b"1"}), "registry.name"),
        (archive_of({"config.json": b"1"}), "registry.name"),  # a layer of this name exists
        (archive_of({"CONFIG.json": b"1"}), "registry.name"),
        (archive_of({"config.json/x": b"1"}), "registry.name"),
        (archive_of(MORE, link="link"), "tar.entry"),
        (good[:-11000], "tar.stream"),
        (good + b"more", "tar.stream"),
        (b"no archive" * 100, "tar.stream"),
    ]
    for data, rule in cases:
        ingot.push(model, address(registry), overwrite=True)
        put_archive(registry, PACK[ending](data), ending)
        assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == rule
        assert not (tmp_path / "back").exists()
    ingot.push(model, address(registry), overwrite=True)
    put_archive(registry, b"neither gzip nor tar", ending)
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "tar.stream"


def test_an_archive_with_other_bytes_is_refused(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    ingot.push(model, address(registry))
    data = archive_of(MORE)
    digest = put_archive(registry, data, ".tar")
    registry.blobs["org/model", digest] = data.replace(b"\x05\x06\x07", b"\x05\x06\x08")
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "registry.digest"
    registry.blobs["org/model", digest] = data + bytes(512)
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back")) == "registry.size"
    assert not (tmp_path / "back").exists()
    registry.blobs["org/model", digest] = data
    ingot.pull(address(registry), tmp_path / "back", resume=True)
    assert contents(tmp_path / "back") == {**contents(model), **UNPACKED}


def test_a_manifest_that_is_no_json_or_too_large(registry: FakeRegistry, model: Path) -> None:
    for data, rule in ((b"x", "registry.manifest"), (b" " * (5 << 20), "registry.manifest")):
        registry.manifests["org/model", "v1"] = data
        assert rule_of(lambda: ingot.open(address(registry))) == rule


def test_an_upload_is_sent_to_no_other_server(registry: FakeRegistry, model: Path) -> None:
    with FakeRegistry() as other:
        registry.upload_host = f"http://{other.host}"
        assert rule_of(lambda: ingot.push(model, address(registry))) == "registry.upload"
        assert other.log == []


def test_a_refusal_names_the_code_alone(registry: FakeRegistry, model: Path) -> None:
    registry.statuses["POST"] = 413
    with pytest.raises(IngotError, match=r"status 413 \(TEST\)") as caught:
        ingot.push(model, address(registry))
    assert caught.value.rule == "registry.refused"


def test_a_pull_goes_on_where_it_was_interrupted(
    registry: FakeRegistry, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingot.push(model, address(registry))
    digest = registry.digest_of("org/model", "v1", "model.safetensors")
    good = registry.blobs.pop(("org/model", digest))
    assert rule_of(lambda: ingot.pull(address(registry), tmp_path / "back", resume=True)) == "store.missing"
    staged = tmp_path / ".back.ingot-partial" / "files"
    assert (staged / "config.json").exists()
    (staged / "model.safetensors").write_bytes(good[:100_000])
    registry.blobs["org/model", digest] = good
    pulled = ingot.pull(address(registry), tmp_path / "back", resume=True)
    assert pulled.resumed > 100_000
    assert contents(tmp_path / "back") == contents(model)
    ingot.pull(address(registry), tmp_path / "other")
    (tmp_path / ".third.ingot-partial" / "files").mkdir(parents=True)
    (tmp_path / ".third.ingot-partial" / "files" / "model.safetensors").write_bytes(b"\0" * 100_000)  # damaged
    ingot.pull(address(registry), tmp_path / "third", resume=True)
    assert contents(tmp_path / "third") == contents(model)


def test_a_damaged_model_and_hidden_files(registry: FakeRegistry, model: Path) -> None:
    (model / ".env").write_text("SECRET=1")
    pushed = ingot.push(model, address(registry))
    assert any(".env" in note for note in pushed.notes)
    assert not any(b"SECRET" in data for data in registry.blobs.values())
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="safetensors"):
        ingot.push(model, address(registry, "v2"))


def test_shards_are_pushed_with_their_index(registry: FakeRegistry, tmp_path: Path) -> None:
    ingot.convert(
        _saved(tmp_path / "one.safetensors"), tmp_path / "m", format="safetensors", max_shard=150_000, recipe="keep"
    )
    index = "model.safetensors.index.json"
    pushed = ingot.push(tmp_path / "m" / index, address(registry))
    assert pushed.files == 3
    assert ingot.compare(address(registry), tmp_path / "m").same


def _saved(path: Path) -> Path:
    ingot.save(path, WEIGHTS)
    return path


def test_dry_run_uses_no_network(model: Path) -> None:
    pushed = ingot.push(model, "oci://localhost:1/x:v1", dry_run=True)
    assert len(pushed.listed) == 5
    assert not pushed.version


@pytest.mark.parametrize(
    "text",
    [
        "oci://h",
        "oci://h/UPPER:v1",
        "oci://h/a:" + "x" * 129,
        "oci://h/a@sha256:00",
        "oci://h/a:v1/../b",
        "oci:///a:v1",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    assert rule_of(lambda: parse_reference(text)) == "store.url"


def test_addresses() -> None:
    digest = "sha256:" + "0" * 64
    plain = parse_reference("oci://h:5000/a/b-c")
    assert (plain.repository, plain.tag, plain.digest, plain.path) == ("a/b-c", "latest", "", "")
    full = parse_reference(f"oci://me:pw@h/a:v1@{digest}/x/y.json")
    assert (full.repository, full.tag, full.digest, full.path) == ("a", "v1", digest, "x/y.json")
    assert full.public() == f"oci://h/a@{digest}"


@pytest.mark.parametrize(
    ("target", "rule"),
    [("s3://b/x", "push.address"), ("folder", "push.address"), ("oci://localhost:1/a:v/x", "push.address")],
)
def test_targets_that_are_none(model: Path, target: str, rule: str) -> None:
    assert rule_of(lambda: ingot.push(model, target)) == rule


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert rule_of(lambda: ingot.push(tmp_path / "empty", "oci://localhost:1/a:v")) in ("push.none", "open.empty")
    assert rule_of(lambda: ingot.pull("https://host/x", tmp_path / "x")) == "pull.address"


def test_a_store_of_an_artifact_is_local_nowhere(registry: FakeRegistry, model: Path) -> None:
    ingot.push(model, address(registry))
    store = Location.parse(address(registry)).store()
    assert isinstance(store, RegistryStore)
    assert store.local_path() is None
    assert isinstance(Location.parse(model).store(), LocalStore)
    with pytest.raises(UsageError):
        store.open("absent")


def test_an_artifact_of_a_library_there_and_back(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    library = ingot.Library(tmp_path / "library")
    library.add(model, "org/base")
    ingot.push(f"library:{tmp_path / 'library'}!org/base", address(registry))
    other = ingot.Library(tmp_path / "other")
    other.add(address(registry), "org/base")
    other.get("org/base", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)


def test_an_archive_is_pushed_as_it_is(registry: FakeRegistry, model: Path, tmp_path: Path) -> None:
    ingot.archive(model, tmp_path / "model.zt")
    pushed = ingot.push(tmp_path / "model.zt", address(registry))
    assert (pushed.files, pushed.size) == (1, (tmp_path / "model.zt").stat().st_size)
    config = json.loads(registry.manifests["org/model", "v1"])["config"]
    assert json.loads(registry.blobs["org/model", config["digest"]])["config"]["format"] == "zt"
    with ingot.open(address(registry)) as checkpoint:
        assert np.array_equal(checkpoint["a.w"].numpy(), WEIGHTS["a.w"])
    ingot.restore(f"{address(registry)}/model.zt", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(model)
