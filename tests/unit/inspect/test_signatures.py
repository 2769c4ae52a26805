"""Signatures of models: what Ingot signs the package's own command verifies, and the reverse."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError, MissingExtraError

pytest.importorskip("model_signing")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
from cryptography.hazmat.primitives import serialization  # noqa: E402

WEIGHTS = {"w": np.arange(6000, dtype=np.float32).reshape(60, 100)}


def make_keys(folder: Path, name: str, curve: Any) -> tuple[Path, Path]:
    """Write a new key; return the paths of the private and of the public one."""
    key = ec.generate_private_key(curve)
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path, "me", ec.SECP256R1())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    ingot.save(folder / "model.safetensors", WEIGHTS)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError("the network is used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def package(*words: str | Path) -> int:
    command = [sys.executable, "-m", "model_signing", *map(str, words)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def rules(path: Path, signature: Path, public: Path) -> tuple[set[str], bool]:
    """Return the rules of the findings about the signature, and whether there is any error."""
    findings = ingot.verify(path, signature=signature, public_key=public)
    signed = {item.rule for item in findings if item.rule.startswith("signature.")}
    return signed, any(item.level == "error" for item in findings)


@pytest.mark.parametrize("curve", ["SECP256R1", "SECP384R1", "SECP521R1"])
def test_a_folder_is_signed_and_verified(model: Path, tmp_path: Path, curve: str) -> None:
    private, public = make_keys(tmp_path, curve, getattr(ec, curve)())
    written = ingot.seal(model, sign=private)
    assert written[-1].seal == str(model / "model.sig")
    assert rules(model, model / "model.sig", public) == ({"signature.valid"}, False)
    written_again = ingot.seal(model, sign=private)  # the old signature is not signed
    assert len(written_again) == len(written)
    assert rules(model, model / "model.sig", public) == ({"signature.valid"}, False)


@pytest.mark.slow
def test_the_package_verifies_what_ingot_signs(model: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    ingot.seal(model, sign=private)
    inside = model / "model.sig"
    verify = ("verify", "key", "--public_key", public)
    assert package(*verify, "--signature", inside, model) == 0
    (tmp_path / "moved.sig").write_bytes(inside.read_bytes())
    inside.unlink()
    assert package(*verify, "--signature", tmp_path / "moved.sig", model) == 0
    ingot.seal(model / "model.safetensors", sign=private, signature=tmp_path / "one.sig")
    assert package(*verify, "--signature", tmp_path / "one.sig", model / "model.safetensors") == 0
    (model / "config.json").write_text("{ }")
    assert package(*verify, "--signature", tmp_path / "moved.sig", model) != 0


@pytest.mark.slow
def test_ingot_verifies_what_the_package_signs(model: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    signature = tmp_path / "theirs.sig"
    assert package("sign", "key", "--private_key", private, "--signature", signature, model) == 0
    assert rules(model, signature, public) == ({"signature.valid"}, False)
    signature.rename(model / "theirs.sig")
    assert rules(model, model / "theirs.sig", public) == ({"signature.valid"}, False)
    (model / "theirs.sig").unlink()
    assert package("sign", "key", "--private_key", private, "--signature", model / "in.sig", model) == 0
    assert rules(model, model / "in.sig", public) == ({"signature.valid"}, False)


def test_changes_are_noticed(model: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    signature = tmp_path / "model.sig"
    ingot.seal(model, sign=private, signature=signature)
    good = rules(model, signature, public)
    (model / "more.txt").write_text("x")
    assert rules(model, signature, public) == ({"signature.invalid"}, True)
    (model / "more.txt").unlink()
    assert rules(model, signature, public) == good
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-1] + b"\1")
    assert rules(model, signature, public) == ({"signature.invalid"}, True)
    (model / "model.safetensors").write_bytes(weights)
    (model / "config.json").unlink()
    assert rules(model, signature, public) == ({"signature.invalid"}, True)


def test_another_key_and_a_changed_signature(model: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    signature = tmp_path / "model.sig"
    ingot.seal(model, sign=keys[0], signature=signature)
    assert rules(model, signature, make_keys(tmp_path, "other", ec.SECP256R1())[1]) == ({"signature.invalid"}, True)
    text = signature.read_text()
    bundle = json.loads(text)
    envelope = bundle["dsseEnvelope"]
    payload = b64decode(envelope["payload"]).replace(b"config.json", b"c0nfig.json")
    bundle["dsseEnvelope"] = {**envelope, "payload": b64encode(payload).decode()}
    for changed in (json.dumps(bundle), "x", "{}", text[: len(text) // 2]):
        signature.write_text(changed)
        assert rules(model, signature, keys[1]) == ({"signature.invalid"}, True)


def test_options_and_keys_that_are_refused(model: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    curve = make_keys(tmp_path, "odd", ec.SECP256K1())
    ingot.seal(model, sign=private)
    signature = model / "model.sig"
    for call, rule in (
        (lambda: ingot.verify(model, signature=signature), "verify.signature"),
        (lambda: ingot.verify(model, public_key=public), "verify.signature"),
        (lambda: ingot.seal(model, signature=signature), "seal.signature"),
        (lambda: ingot.seal(model, sign=public), "signature.key"),
        (lambda: ingot.seal(model, sign=curve[0]), "signature.key"),
        (lambda: ingot.seal(model, sign=tmp_path / "none"), "store.missing"),
        (lambda: ingot.verify(model, signature=signature, public_key=private), "signature.key"),
        (lambda: ingot.verify(model, signature=tmp_path / "none", public_key=public), "store.missing"),
    ):
        with pytest.raises(IngotError) as caught:
            call()
        assert caught.value.rule == rule


def test_links_are_not_signed(model: Path, tmp_path: Path, keys: tuple[Path, Path]) -> None:
    (tmp_path / "far.txt").write_text("x")
    (model / "link.txt").symlink_to(tmp_path / "far.txt")
    with pytest.raises(IngotError) as caught:
        ingot.seal(model, sign=keys[0])
    assert caught.value.rule == "signature.files"
    assert not (model / "model.sig").exists()


def test_without_the_package(model: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(MissingExtraError, match=r"ingot\[sign\]"):
        ingot.seal(model, sign=keys[0])
