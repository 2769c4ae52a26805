"""What ``ingot quantize`` chooses from --for, --bits, --type, --preset and the suffix; refusals name the nearest."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.conversion.choose_preset import choose
from ingot.conversion.preset_fit import container_for, holds, presets_held, presets_of, quantizes
from ingot.errors import UsageError
from ingot.formats.detect import FORMATS
from ingot.recipes.llama_types import MIXTURES, available_types, preset_of_type
from ingot.recipes.load import ALL_PRESETS, load_recipe
from ingot.runtimes.table import BUILT_IN, RUNTIMES
from ingot.stores.location import Location


def chosen(out: str = "out", **options: Any) -> tuple[str, str, str, str]:
    found = choose(Location.parse(out), **options)
    return found.profile.name if found.profile else "", found.container, found.plain, found.calibrated


@pytest.mark.parametrize(
    ("out", "options", "expected"),
    [
        ("out", {"runtime": "vllm"}, ("vllm", "compressed-tensors", "w4a16", "w4a16-calibrated")),
        ("out", {"runtime": "vLLM", "bits": 8}, ("vllm", "compressed-tensors", "w8a16", "")),
        ("out", {"runtime": "vllm", "bits": 16}, ("vllm", "safetensors", "16bit", "")),
        ("out", {"runtime": "vllm", "format": "gptq"}, ("vllm", "gptq", "w4a16", "w4a16-calibrated")),
        ("out", {"runtime": "mlx-lm", "bits": 3}, ("mlx", "mlx", "mlx-3bit", "mlx-3bit-calibrated")),
        ("x.gguf", {}, ("llama.cpp", "gguf", "q4_k", "q4_k-calibrated")),
        ("x.gguf", {"bits": 8}, ("llama.cpp", "gguf", "q8_0", "")),
        ("x.gguf", {"type": "q6_K"}, ("llama.cpp", "gguf", "Q6_K", "Q6_K-calibrated")),
        ("out", {"type": "Q8_0"}, ("llama.cpp", "gguf", "Q8_0", "")),
        ("out", {"runtime": "ollama", "type": "F16"}, ("ollama", "gguf", "f16", "")),
        ("out", {"runtime": "openvino"}, ("openvino", "gguf", "q4_0", "q4_0-calibrated")),
        ("out", {"runtime": "mlx", "preset": "INT4"}, ("mlx", "mlx", "int4", "int4-calibrated")),
        ("x.zt", {}, ("", "zt", "int4", "int4-calibrated")),
    ],
)
def test_the_choice(out: str, options: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert chosen(out, **options)[: len(expected)] == expected


@pytest.mark.parametrize(
    ("out", "options", "rule", "words"),
    [
        ("out", {}, "quantize.option", "--for with a program"),
        ("out", {"runtime": "vlm"}, "runtime.unknown", "did you mean 'vllm'"),
        ("out", {"runtime": "mlx", "bits": 7}, "quantize.bits", "did you mean"),
        ("out", {"runtime": "vllm", "bits": 4, "type": "q4_0"}, "quantize.option", "one of --bits and --type"),
        ("x.gguf", {"runtime": "vllm"}, "quantize.option", "does not read gguf"),
        ("out", {"runtime": "vllm", "format": "ggfu"}, "format.unknown", "did you mean 'gguf'"),
        ("x.gguf", {"type": "Q4_KM"}, "quantize.type", "did you mean 'Q4_K_M'"),
        ("x.gguf", {"type": "Q2_K_S"}, "quantize.type", "nearest is"),
        ("x.gguf", {"preset": "q4_kk"}, "recipe.unknown", "did you mean 'q4_k'"),
        ("out", {"runtime": "vllm", "preset": "trellis4-calibrated"}, "quantize.preset", "w4a16-calibrated"),
        ("x.gguf", {"preset": "table3-calibrated"}, "quantize.preset", "presets that it holds"),
        ("x.zt", {"bits": 5}, "quantize.bits", "there are: 2, 3, 4, 8, 16"),
    ],
)
def test_refusals_are_one_line_with_the_nearest(out: str, options: dict[str, Any], rule: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        chosen(out, **options)
    assert caught.value.rule == rule
    assert "\n" not in str(caught.value)


def test_every_type_of_llama_cpp_has_a_preset_or_the_nearest_one() -> None:
    for name in MIXTURES:
        for spelling in (name, name.lower(), name.replace("_", "-")):
            try:
                plain, calibrated = preset_of_type(spelling)
            except UsageError as error:
                assert error.message.rpartition(" ")[2] in ALL_PRESETS  # noqa: PT017 - either outcome is right
            else:
                assert {plain, calibrated} - {""} <= set(ALL_PRESETS)
    assert {"Q8_0", "Q6_K", "Q4_0", "IQ4_XS", "F16"} <= set(available_types())


@pytest.mark.parametrize("name", BUILT_IN)
def test_default_presets_fit_their_container_and_the_program_accepts_them(name: str) -> None:
    profile = RUNTIMES[name]
    for item in profile.presets:
        for preset in filter(None, (item.plain, item.calibrated)):
            recipe = load_recipe(preset)
            assert holds(FORMATS[item.container], recipe)
            assert container_for(profile, recipe) == item.container
            assert preset in presets_of(profile)


def test_what_containers_hold() -> None:
    assert not presets_held(FORMATS["safetensors"])
    assert "trellis4-calibrated" not in presets_held(FORMATS["mlx"])
    assert {"q4_k", "q4_0"} <= set(presets_held(FORMATS["gguf"]))
    assert not holds(FORMATS["gguf"], load_recipe("trellis4-calibrated"))
    assert all(quantizes(load_recipe(name)) for name in presets_held(FORMATS["zt"]))
    assert not any(quantizes(load_recipe(name)) for name in ("keep", "bf16", "f16", "lossless", "decompress"))
