"""The presets ``lossless`` and ``lossless-max`` on quantized models: the same codes and scales, in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import ingot
from ingot.core.bytes.packed import PACKED
from ingot.errors import IngotError
from ingot.model.checkpoint import Checkpoint
from tests.support import preset_model

PRESETS = [
    ("q4_k", "gguf"),
    ("q8_0", "gguf"),
    ("q6_k", "gguf"),
    ("q5_k", "gguf"),
    ("q4_0", "gguf"),
    ("iq4_xs", "gguf"),
    ("int4", "zt"),
    ("int8", "zt"),
    ("int3", "zt"),
    ("int2", "zt"),
    ("mxfp4", "zt"),
    ("nvfp4", "zt"),
    ("nf4", "zt"),
    ("palette4", "zt"),
    ("mlx-4bit", "zt"),
    ("mlx-6bit", "zt"),
    ("squish-int4", "zt"),
]


def model(path: Path) -> Path:
    """Write tensors of a layer without a config.json, and return the file."""
    rng = np.random.default_rng(2)
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
    weights: dict[str, Any] = {
        f"model.layers.0.{name}.weight": (0.05 * rng.standard_normal((512, 256))).astype(ml_dtypes.bfloat16)
        for name in names
    }
    weights["model.norm.weight"] = np.ones(256, ml_dtypes.bfloat16)
    file = path.with_suffix(".safetensors")
    save_file(weights, file)
    return file


def parts(checkpoint: Checkpoint) -> dict[tuple[str, str], bytes]:
    """Return the decoded bytes of all parts of quantized tensors."""
    return {
        (name, role): bytes(part.view())
        for name, tensor in checkpoint.items()
        if tensor.codec not in ("dense", "float_entropy")
        for role, part in tensor.parts.items()
    }


@pytest.mark.parametrize(("preset", "suffix"), PRESETS)
def test_quantized_tensors_stay_what_they_are(tmp_path: Path, preset: str, suffix: str) -> None:
    source = tmp_path / f"source.{suffix}"
    ingot.convert(model(tmp_path / "model"), source, recipe=preset, keep_names=suffix == "gguf")
    packed = tmp_path / "packed.zt"
    ingot.convert(source, packed, recipe="lossless")
    with ingot.open(source) as before, ingot.open(packed) as after:
        stored = parts(before)
        assert stored
        assert parts(after) == stored
        quantized = [tensor for tensor in before.values() if (tensor.name, next(iter(tensor.parts))) in stored]
        for tensor in quantized:
            assert after[tensor.name].codec == tensor.codec
            assert dict(after[tensor.name].params) == dict(tensor.params)
            for role, part in tensor.parts.items():
                target = after[tensor.name].parts[role]
                assert target.nbytes == part.nbytes
                assert target.length <= part.length
        total = sum(part.length for tensor in quantized for part in tensor.parts.values())
        smaller = sum(part.length for tensor in quantized for part in after[tensor.name].parts.values())
        # Codes that minimize the entropy, as those of nf4 do, are almost equally frequent.
        assert smaller < (total if preset in ("nf4", "palette4") else 0.99 * total)
    ingot.verify(packed)
    back = tmp_path / f"back.{suffix}"
    ingot.convert(packed, back, keep_names=suffix == "gguf")
    if suffix == "gguf":
        assert back.read_bytes() == source.read_bytes()
    with ingot.open(back) as restored:
        assert parts(restored) == stored


def test_lossless_max_does_the_same_and_a_second_run_moves_the_bytes(tmp_path: Path) -> None:
    ingot.convert(model(tmp_path / "model"), tmp_path / "a.gguf", recipe="q4_0", keep_names=True)
    ingot.convert(tmp_path / "a.gguf", tmp_path / "a.zt", recipe="lossless-max")
    ingot.convert(tmp_path / "a.zt", tmp_path / "b.zt", recipe="lossless-max")
    with ingot.open(tmp_path / "a.zt") as first, ingot.open(tmp_path / "b.zt") as second:
        for name, tensor in first.items():
            for role, part in tensor.parts.items():
                assert second[name].parts[role].encoding == part.encoding
                assert bytes(second[name].parts[role].stored()) == bytes(part.stored())
        assert any(part.encoding == PACKED for tensor in first.values() for part in tensor.parts.values())


def test_rows_and_ranges_of_packed_tensors(tmp_path: Path) -> None:
    ingot.convert(model(tmp_path / "model"), tmp_path / "a.gguf", recipe="q8_0", keep_names=True)
    ingot.convert(tmp_path / "a.gguf", tmp_path / "a.zt", recipe="lossless")
    with ingot.open(tmp_path / "a.gguf") as plain, ingot.open(tmp_path / "a.zt") as packed:
        for name in plain:
            np.testing.assert_array_equal(packed[name].numpy(), plain[name].numpy())
            np.testing.assert_array_equal(packed[name][100:103], plain[name][100:103])
            if plain[name].codec == "ggml_blocks":
                out = bytearray(999)
                packed[name].parts["blocks"].readinto(77, memoryview(out))
                assert out == bytes(plain[name].parts["blocks"].view())[77 : 77 + 999]


def test_flipped_bytes_are_found_without_the_digests_of_parts(tmp_path: Path) -> None:
    ingot.convert(model(tmp_path / "model"), tmp_path / "a.gguf", recipe="q4_k", keep_names=True)
    ingot.convert(tmp_path / "a.gguf", tmp_path / "a.zt", recipe="lossless")
    data = (tmp_path / "a.zt").read_bytes()
    with ingot.open(tmp_path / "a.zt") as packed:
        tensor = next(t for t in packed.values() if t.codec == "ggml_blocks")
        part = tensor.parts["blocks"]
        start = part.offset
        length = part.length
    for position in range(start, start + length, length // 23):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        (tmp_path / "damaged.zt").write_bytes(damaged)
        with ingot.open(tmp_path / "damaged.zt", verify=False) as opened, pytest.raises(IngotError, match=r"packed"):
            opened[tensor.name].numpy()


def test_a_recipe_can_quantize_and_pack_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[[rules]]\nlabel = "weights"\nroles = ["attention", "mlp"]\ncodec = "affine"\n'
        'options = { bits = 4, group = 32 }\nencoding = "ingot.packed/1"\n'
    )
    source = model(tmp_path / "model")
    ingot.convert(source, tmp_path / "packed.zt", recipe=str(recipe))
    recipe.write_text(recipe.read_text().replace('encoding = "ingot.packed/1"\n', ""))
    ingot.convert(source, tmp_path / "plain.zt", recipe=str(recipe))
    with ingot.open(tmp_path / "plain.zt") as plain, ingot.open(tmp_path / "packed.zt") as packed:
        stored = parts(plain)
        assert parts(packed) == stored
        assert {part.encoding for t in packed.values() if t.codec == "affine" for part in t.parts.values()} == {PACKED}
    ingot.convert(tmp_path / "packed.zt", tmp_path / "unpacked.zt2.zt", container="2")
    with ingot.open(tmp_path / "unpacked.zt2.zt") as other:
        assert parts(other) == stored


def test_packed_with_another_pick_is_refused() -> None:
    from ingot.recipes.load import parse_recipe

    with pytest.raises(IngotError) as error:
        parse_recipe(
            "[[rules]]\npick = 'accurate'\nmin_snr_db = 3\npacked = true\ncandidates = [{ codec = 'dense' }]",
            location="test",
        )
    assert error.value.rule == "recipe.pick"


@pytest.mark.parametrize(
    ("container", "preset"),
    [
        ("gptq", "w4a16"),
        ("awq", "w4a16"),
        ("compressed-tensors", "w4a16"),
        ("bitsandbytes", "nf4"),
        ("modelopt", "nvfp4"),
    ],
)
def test_folders_of_packed_layers_come_back(tmp_path: Path, container: str, preset: str) -> None:
    source = preset_model.written(tmp_path / "model", ml_dtypes.bfloat16)
    ingot.convert(source, tmp_path / "packed", recipe=preset, format=container)
    ingot.convert(tmp_path / "packed", tmp_path / "archive.zt", recipe="lossless")
    with ingot.open(tmp_path / "archive.zt") as archive:
        encodings = {part.encoding for tensor in archive.values() for part in tensor.parts.values()}
    assert PACKED in encodings
    ingot.convert(tmp_path / "archive.zt", tmp_path / "back", format=container)
    files = sorted(path.name for path in (tmp_path / "packed").glob("*.safetensors"))
    assert files
    for name in files:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "packed" / name).read_bytes()
