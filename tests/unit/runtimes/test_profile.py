"""Profiles of runtimes: those that ship are valid, and wrong ones are refused in one line."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from ingot.errors import UsageError
from ingot.formats.detect import FORMATS
from ingot.model.layouts.ggml import TYPES
from ingot.recipes.load import PRESETS
from ingot.runtimes.profile import RuntimeProfile, parse_profile
from ingot.runtimes.table import BUILT_IN, RUNTIMES, builtin_text, command_lines, runtime_named

MINIMAL = """
name = "x"
title = "X"
date = "2026-11-28"
summary = "A program."
containers = ["gguf"]
commands = { default = ["x {file}"] }
"""
SCHEME = '[[schemes]]\nname = "a"\ncontainers = ["gguf"]\nstorage = "dense"\noutcome = "run"\n'


def builtin() -> list[RuntimeProfile]:
    return [RUNTIMES[name] for name in BUILT_IN]


def test_every_file_is_in_the_table() -> None:
    files = resources.files("ingot.runtimes").joinpath("profiles").iterdir()
    assert sorted(item.name.removesuffix(".toml") for item in files) == sorted(BUILT_IN)


@pytest.mark.parametrize("profile", builtin(), ids=BUILT_IN)
def test_profiles_name_containers_presets_and_types_that_exist(profile: RuntimeProfile) -> None:
    assert set(profile.containers) <= set(FORMATS)
    named = {name for preset in profile.presets for name in (preset.plain, preset.calibrated) if name}
    assert named <= set(PRESETS)
    blocks = {name for scheme in profile.schemes if scheme.storage == "blocks" for name in scheme.types}
    assert blocks <= set(TYPES)
    calibrated = [preset for preset in profile.presets if preset.calibrated]
    assert all(preset.calibrated.endswith("-calibrated") for preset in calibrated)


@pytest.mark.parametrize("profile", builtin(), ids=BUILT_IN)
def test_only_programs_that_ran_have_schemes_that_ran(profile: RuntimeProfile) -> None:
    outcomes = {scheme.outcome for scheme in profile.schemes}
    assert bool(profile.machine) == bool(outcomes & {"run", "loads", "config"})


def test_names_and_aliases_are_distinct() -> None:
    names = [name for profile in builtin() for name in (profile.name, *profile.aliases)]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)


@pytest.mark.parametrize(
    ("given", "name"), [("vLLM", "vllm"), ("MLX-LM", "mlx"), ("llamacpp", "llama.cpp"), ("hf", "transformers")]
)
def test_a_program_is_found_by_aliases_in_any_case(given: str, name: str) -> None:
    assert runtime_named(given).name == name


def test_an_unknown_program_has_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'vllm'\?.*there are: llama\.cpp") as caught:
        runtime_named("vlmm")
    assert caught.value.rule == "runtime.unknown"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "colour = 1", "unknown field `colour`"),
        (MINIMAL + SCHEME + "bit = [4]", "unknown field `bit`"),
        (MINIMAL + SCHEME.replace('"run"', '"runs"'), "runs"),
        (MINIMAL + SCHEME.replace('"gguf"', '"zt"'), "container 'zt' is not among"),
        (MINIMAL + '[[presets]]\nbits = 8\ncontainer = "gguf"\nplain = "q8_0"', "preset for the default of 4 bits"),
        (MINIMAL + '[[presets]]\nbits = 4\ncontainer = "gguf"', "expected a recipe for 4 bits"),
        (MINIMAL + 2 * '[[presets]]\nbits = 4\ncontainer = "gguf"\nplain = "q4_0"\n', "one preset for each bit width"),
        (MINIMAL.replace("{file}", "{home}"), "{home}"),
        (MINIMAL.replace("{file}", "{"), "command"),
        (MINIMAL.replace('["gguf"]', "[]"), "at least one container"),
        (MINIMAL.replace("title", "heading"), "heading"),
        ("name = ", "TOML|value"),
    ],
)
def test_a_wrong_profile_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_profile(text, "x.toml")
    assert caught.value.rule == "runtime.profile"
    assert caught.value.where == "x.toml"
    assert "\n" not in str(caught.value)


def test_commands_quote_paths_and_follow_the_container() -> None:
    text = MINIMAL.replace("{ default", '{ gguf = ["y {path} {name}"], default')
    profile = parse_profile(text, "x.toml")
    assert command_lines(profile, "gguf", "my model.gguf", "f") == ["y 'my model.gguf' 'my model'"]
    assert command_lines(profile, "zt", "p", "a;b") == ["x 'a;b'"]


def test_profiles_are_plain_toml() -> None:
    for name in BUILT_IN:
        assert tomllib.loads(builtin_text(name))["name"] == name
