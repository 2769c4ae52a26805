"""A reader of Squish directories written from section 4 of squish's document: NumPy and nothing of Ingot's.

It gives the values that Ingot gives, in f32, for real weights in every form; and what NumPy's own writer makes of a
model in the document's way opens in Ingot.
"""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

import ingot
from ingot.artifacts.open import with_decoders
from ingot.core.runtime.memory import anonymous_rss
from ingot.demo.tokenizer import Tokenizer
from ingot.errors import IngotError
from ingot.ext.squish.npydir.format import NpydirFormat
from ingot.ext.squish.tiers.choose import choose
from ingot.ext.squish.tiers.prepare import prepare
from ingot.runtime.loading.load_report import LoadReport
from ingot.runtime.loading.transformers import load_model
from ingot.stores.local import LocalStore
from tests.support.matrix import explore
from tests.support.paths import DEMO_DATA as DEMO
from tests.support.stores import CountingStore

BASE = Path(__file__).parents[3] / "shared" / "models" / "base"
MODELS = [
    pytest.param(DEMO, id="demo"),
    pytest.param(BASE, id="base", marks=pytest.mark.models),
]

Array = np.ndarray[Any, Any]


class Squish:
    """Loads as squish does: four bits before eight where the sentinel says so, plain values mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text())
        self.int4 = (folder / ".squish_int4_ready").exists()

    def array(self, name: str, suffix: str) -> Array | None:
        path = self.folder / "tensors" / f"{self.manifest[name]}__{suffix}.npy"
        return np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else None

    def load(self, name: str) -> Array:
        plain, codes = self.array(name, "pt"), self.array(name, "q")
        four, three = self.array(name, "q4a"), self.array(name, "q3")
        if four is not None and (self.int4 or codes is None):
            values = self.four_bits(name, four)
        elif three is not None:
            values = self.three_bits(name, three)
        elif plain is not None:
            return plain
        else:
            assert codes is not None
            values = codes.astype(np.float32) * self.array(name, "s")[:, None]
        return values.reshape(self.array(name, "shape"))

    def four_bits(self, name: str, packed: Array) -> Array:
        rows, half = packed.shape
        codes = np.empty((rows, 2 * half), np.float32)
        codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
        scales, offsets = self.array(name, "s4a"), self.array(name, "z4a")
        groups = codes.reshape(rows, scales.shape[1], -1)
        return offsets[:, :, None] + groups * scales[:, :, None]

    def three_bits(self, name: str, packed: Array) -> Array:
        triples = packed.reshape(-1, 3).astype(np.uint32)
        words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
        codes = np.stack([words >> 3 * i & 7 for i in range(8)], -1).reshape(-1, 64).astype(np.float32)
        return (codes - self.array(name, "z3")[:, None]) * self.array(name, "s3")[:, None]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", ["squish-int8", "squish-int4", "squish-int3", "int8"])
def test_a_reader_of_the_document_has_the_same_values(model: Path, recipe: str, tmp_path: Path) -> None:
    ingot.convert(model, tmp_path / "squish", recipe, "npydir")
    stranger = Squish(tmp_path / "squish")
    with ingot.open(tmp_path / "squish") as checkpoint:
        assert list(stranger.manifest) == list(checkpoint)
        for name, tensor in checkpoint.items():
            assert np.array_equal(stranger.load(name).astype(np.float32), tensor.numpy("f32")), name


def test_four_bits_in_place_are_read_by_the_stranger(tmp_path: Path) -> None:
    from ingot.ext.squish.tiers.int4 import add_int4

    ingot.convert(DEMO, tmp_path / "squish", "squish-int8", "npydir")
    for drop in (False, True):
        add_int4(tmp_path / "squish", drop_int8=drop)
        stranger = Squish(tmp_path / "squish")
        with ingot.open(tmp_path / "squish") as checkpoint:
            for name, tensor in checkpoint.items():
                assert np.array_equal(stranger.load(name).astype(np.float32), tensor.numpy("f32")), name


def write_as_squish(
    folder: Path, tensors: dict[str, Array], *, by_key: bool = False, plain: tuple[str, ...] = ()
) -> None:
    """The document's section 3 and 4: INT8 per row for matrices, f16 for the rest, a manifest.

    ``by_key`` as section 4 says it: from safe keys to names, and without the sentinel that squish's code adds.
    ``plain``: parts of the names of matrices that stay f16.
    """
    (folder / "tensors").mkdir(parents=True)
    for name, values in tensors.items():
        start = folder / "tensors" / name.replace(".", "__")
        if values.ndim < 2 or any(part in name for part in plain):
            np.save(f"{start}__pt.npy", values.astype(np.float16))
            continue
        scales = (np.abs(values).max(1) / 127).astype(np.float32)
        scales[scales == 0] = 1
        codes = np.round(values / scales[:, None]).clip(-128, 127).astype(np.int8)
        for suffix, array in (("q", codes), ("s", scales), ("shape", np.array(values.shape))):
            np.save(f"{start}__{suffix}.npy", array)
    keys = {name: name.replace(".", "__") for name in tensors}
    pairs = {key: name for name, key in keys.items()} if by_key else keys
    (folder / "manifest.json").write_text(json.dumps(pairs))
    if not by_key:
        (folder / "tensors" / ".manifest_ready").touch()


SOURCE, WEIGHTS, FINALIZED, PACKED = "tensors", "squish_weights.safetensors", "finalized", "squish_4bit"
SENTINELS = {WEIGHTS: ".squish_ready", FINALIZED: "finalized/.ready", PACKED: ".squish_4bit_ready"}
SUBSETS = [forms for count in (1, 2, 3, 4) for forms in combinations((SOURCE, WEIGHTS, FINALIZED, PACKED), count)]


def write_directory(folder: Path, forms: tuple[str, ...]) -> dict[str, Array]:
    """Section 4 with some of its tiers, by NumPy and the package safetensors; return the tensors' values.

    The packed folder is a model of mlx_lm: here one without packed layers, which is a folder of safetensors.
    """
    rng = np.random.default_rng(5)
    names = {"model.layers.0.mlp.up_proj.weight": (32, 16), "model.norm.weight": (16,)}
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in names.items()}
    write_as_squish(folder, tensors, by_key=True)
    reader = Squish(folder)
    reader.manifest = {name: key for key, name in reader.manifest.items()}
    tensors = {name: np.asarray(reader.load(name)) for name in tensors}
    if SOURCE not in forms:
        shutil.rmtree(folder / "tensors")
        (folder / "manifest.json").unlink()
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    if WEIGHTS in forms:
        save_file({name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}, folder / WEIGHTS)
    if FINALIZED in forms:
        (folder / FINALIZED).mkdir()
        for name, values in tensors.items():
            np.save(folder / FINALIZED / f"{name}.npy", values.astype(np.float16))
    if PACKED in forms:
        (folder / PACKED).mkdir()
        save_file(
            {name: values.astype(np.float16) for name, values in tensors.items()}, folder / PACKED / "m.safetensors"
        )
        (folder / PACKED / "config.json").write_text('{"model_type": "llama"}')
    return tensors


def finish(folder: Path, forms: tuple[str, ...]) -> None:
    """Write the sentinels, empty as squish leaves them."""
    for form in forms:
        if form in SENTINELS:
            (folder / SENTINELS[form]).touch()


@pytest.mark.parametrize("forms", SUBSETS, ids="+".join)
def test_every_part_of_section_4_is_one_model(forms: tuple[str, ...], tmp_path: Path) -> None:
    """Each subset of the forms opens, converts with config.json and is not refused by a strict check."""
    tensors = write_directory(tmp_path / "d", forms)
    finish(tmp_path / "d", forms)
    with ingot.open(tmp_path / "d") as checkpoint:
        assert sorted(checkpoint) == sorted(tensors)
        for name, values in tensors.items():
            rounding = 0 if SOURCE in forms else 2**-8
            assert np.allclose(checkpoint[name].numpy("f32"), values, rtol=rounding, atol=0)
    ingot.convert(tmp_path / "d", tmp_path / "out", format="safetensors")
    assert (tmp_path / "out" / "config.json").exists()
    assert not [item for item in ingot.verify(tmp_path / "d", strict=True) if item.level == "error"]


@pytest.mark.parametrize("forms", SUBSETS, ids="+".join)
def test_the_decision_tree_takes_complete_tiers_in_the_documents_order(forms: tuple[str, ...], tmp_path: Path) -> None:
    """Section 7 for the runtime that it was written for; without a sentinel a tier is passed over."""
    write_directory(tmp_path / "d", forms)
    tree = {PACKED: "4bit", WEIGHTS: "bf16", FINALIZED: "finalized", SOURCE: "tensors"}
    for marked in (False, True):
        if marked:
            finish(tmp_path / "d", forms)
        taken = [tier for form, tier in tree.items() if form in forms and (marked or form == SOURCE)]
        if taken:
            assert choose(tmp_path / "d", "mlx").tier.name == taken[0]
        else:
            with pytest.raises(IngotError):
                choose(tmp_path / "d", "mlx")


def test_other_weights_beside_the_tensors_are_another_checkpoint(tmp_path: Path) -> None:
    write_directory(tmp_path / "d", (SOURCE, WEIGHTS))
    shutil.copy(tmp_path / "d" / WEIGHTS, tmp_path / "d" / "model.safetensors")
    with pytest.raises(IngotError) as caught:
        ingot.open(tmp_path / "d")
    assert caught.value.rule == "detect.several"


def test_a_directory_is_usable_after_the_first_load(tmp_path: Path) -> None:
    """The first load saves the bf16 tier beside the tensors."""
    tensors = write_directory(tmp_path / "d", (SOURCE,))
    assert prepare(tmp_path / "d").tier.name == "bf16"
    assert (tmp_path / "d" / WEIGHTS).exists()
    assert choose(tmp_path / "d").tier.name == "bf16"
    with ingot.open(tmp_path / "d") as checkpoint:
        assert checkpoint.format == "npydir"
        assert all(np.array_equal(checkpoint[name].numpy("f32"), values) for name, values in tensors.items())


def test_a_directory_that_squish_wrote_opens_and_converts(tmp_path: Path) -> None:
    with ingot.open(DEMO) as checkpoint:
        tensors = {name: tensor.numpy("f32") for name, tensor in checkpoint.items()}
    write_as_squish(tmp_path / "squish", tensors)
    ingot.convert(tmp_path / "squish", tmp_path / "model.zt")
    ingot.convert(DEMO, tmp_path / "own.zt", "squish-int8")
    with ingot.open(tmp_path / "squish") as found, ingot.open(tmp_path / "model.zt") as moved:
        for name, values in tensors.items():
            close = found[name].numpy("f32")
            assert np.abs(close - values).max() <= np.abs(values).max() / 127 / 2 * 1.01 + 1e-7
            assert np.array_equal(close, moved[name].numpy("f32"))


def test_codes_are_those_of_the_documents_formula(tmp_path: Path) -> None:
    values = np.random.default_rng(3).normal(0, 0.1, (64, 96)).astype(np.float32)
    write_as_squish(tmp_path / "theirs", {"layers.0.mlp.w": values})
    ingot.save(tmp_path / "a.safetensors", {"layers.0.mlp.w": values})
    ingot.convert(tmp_path / "a.safetensors", tmp_path / "ours", "int8", "npydir")
    for suffix in ("q", "s", "shape"):
        name = f"tensors/layers__0__mlp__w__{suffix}.npy"
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_layers_of_every_family_that_fit(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="names of llama.cpp are those of the package gguf")
    found = [item for item in explore(("npydir",)) if item.made is not None]
    rows = [item for item in found if item.made.params["bits"] != 8 or item.made.params["granularity"] == "row"]
    layers = {f"{item.family}.{index}": item for index, item in enumerate(rows)}  # bytes have scales of rows there
    assert len(layers) > 50
    ingot.save(tmp_path / "m", {name: item.made for name, item in layers.items()}, format="npydir")
    stranger = Squish(tmp_path / "m")
    for name, item in layers.items():
        assert np.array_equal(stranger.load(name).astype(np.float32), item.source.numpy("f32")), (name, item.what)


def demo() -> dict[str, Array]:
    """The model that ships with Ingot, by the package safetensors."""
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("form", [WEIGHTS, FINALIZED])
def test_whole_weights_are_mapped_and_take_no_memory(form: str, tmp_path: Path) -> None:
    """Sections 2 and 5, on a model of 32 MB in 16 bits: what grows by it is next to nothing."""
    tensors = demo()
    tensors |= {name: np.zeros((40_000, 192), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    config = json.loads((DEMO / "config.json").read_text()) | {"vocab_size": 40_000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if form == WEIGHTS:
        save_file({name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}, tmp_path / WEIGHTS)
    else:
        (tmp_path / FINALIZED).mkdir()
        for name, values in tensors.items():
            np.save(tmp_path / FINALIZED / f"{name}.npy", values.astype(np.float16))
    finish(tmp_path, (form,))
    reports: list[LoadReport] = []
    dtype = "bf16" if form == WEIGHTS else "f16"
    load_model(tmp_path, dtype=dtype)  # imports what it imports
    before = anonymous_rss()
    model = load_model(tmp_path, dtype=dtype, report=reports.append)
    assert anonymous_rss() - before < 4 << 20
    assert reports[0].decoded == 0
    assert reports[0].mapped == 2 * sum(values.size for values in tensors.values())
    assert model.lm_head.weight.shape == (40_000, 192)


def test_only_bytes_that_are_needed_are_read(tmp_path: Path) -> None:
    """Sections 4 and 8: each array's head once, and no weight; then one tensor's arrays and no other."""
    write_as_squish(tmp_path / "d", {f"layers.{index}.w": np.ones((64, 512), np.float32) for index in range(8)})
    store = CountingStore(LocalStore(tmp_path / "d"))
    tensors = NpydirFormat().read(store, "manifest.json").tensors
    arrays = [name for name in store.opened if name.endswith(".npy")]
    assert len(arrays) == len(set(arrays)) == 3 * 8
    opening, size = store.nbytes, 8 * 64 * 512
    assert opening < size / 4
    with_decoders(tensors)["layers.3.w"].numpy()
    assert 64 * 512 <= store.nbytes - opening < 2 * 64 * 512


def test_more_arrays_than_may_be_open_at_once(tmp_path: Path) -> None:
    """Section 4: 249 x 3 + 89 files."""
    tensors = {f"layers.{index}.w": np.full((4, 8), index, np.float32) for index in range(249)}
    tensors |= {f"norms.{index}": np.full(4, index, np.float32) for index in range(89)}
    write_as_squish(tmp_path / "d", tensors)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        with ingot.open(tmp_path / "d") as checkpoint:
            assert len(checkpoint) == 338
            for name, tensor in checkpoint.items():
                assert tensor.numpy().flat[0] == pytest.approx(float(name.split(".")[1]), rel=1e-6)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_tokens_after_eight_bits_are_those_before(tmp_path: Path) -> None:
    """Section 6: the first token after five prompts, and the share of 20 tokens that agree, 73 to 100 % there."""
    write_as_squish(tmp_path / "d", demo(), plain=("embed", "lm_head"))
    shutil.copy(DEMO / "config.json", tmp_path / "d")
    models = [load_model(path, dtype="f32", cache=False) for path in (DEMO, tmp_path / "d")]
    text = Tokenizer.load(DEMO / "tokenizer.json").encode((DEMO / "heldout.txt").read_text()[:20_000])
    prompts = torch.tensor([text[start : start + 32] for start in range(0, 5 * 500, 500)])
    ours, theirs = (greedy(model, prompts, 20) for model in models)
    assert torch.equal(ours[:, 0], theirs[:, 0])
    assert (ours == theirs).float().mean() >= 0.73


def greedy(model: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens[:, -count:]
