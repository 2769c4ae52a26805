"""Every key of a ``quantization_config`` is used, irrelevant, or refused by its name."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import IngotError
from ingot.formats.detect import FORMATS
from ingot.formats.packed_folders.config_keys import Key, require_known_keys

from . import packing
from .packing import layer

STEM = "model.layers.0.mlp.up_proj"
FIELDS: dict[str, Any] = json.loads((Path(__file__).parent / "peer_config_fields.json").read_text())
TABLES = [name for name in FIELDS if name != "versions"]


def table_at(path: str) -> Mapping[str, Key]:
    """The table of a dialect, or the one inside it at the keys that follow, such as ``awq/dynamic/*``."""
    name, *keys = path.split("/")
    table = FORMATS[name].keys
    for key in keys:
        table = table[key].inner or {}
    return table


@pytest.mark.parametrize("path", TABLES)
def test_every_field_of_the_peers_is_in_the_table(path: str) -> None:
    table = table_at(path)
    missing = {peer: [name for name in names.split() if name not in table] for peer, names in FIELDS[path].items()}
    assert not {peer: names for peer, names in missing.items() if names}


def fields_of(peer: str) -> set[str]:
    """The fields of a configuration class: of a pydantic model, a dataclass, or the arguments of ``__init__``."""
    module, _, name = peer.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    names = set(getattr(cls, "model_fields", {})) or set(inspect.signature(cls.__init__).parameters)
    return names - {"self", "kwargs"}


@pytest.mark.parametrize(
    ("path", "peer"),
    [(path, peer) for path in TABLES for peer in FIELDS[path] if ":" not in peer],
    ids=lambda item: item,
)
def test_the_committed_fields_are_those_of_the_installed_package(path: str, peer: str) -> None:
    package = peer.partition(".")[0]
    module = pytest.importorskip(package)
    if module.__version__ != FIELDS["versions"][package]:
        pytest.skip(f"the list is of {package} {FIELDS['versions'][package]}")
    assert fields_of(peer) <= {*FIELDS[path][peer].split()}


def refused(tmp_path: Path, quantization: dict[str, Any], entries: Any = None) -> IngotError:
    of = layer(64, 64, 4, 32, sym=True)
    entries = packing.gptq(STEM, of) if entries is None else entries
    with pytest.raises(IngotError) as caught:
        ingot.open(packing.folder(tmp_path / "m", entries, quantization))
    return caught.value


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
CT = packing.ct_config(4, 32, sym=True)
ROTATED = {"config_groups": {"R4": {"type": "hadamard", "apply": []}}}


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        ({**GPTQ, "permuted": True}, "permuted"),
        ({**GPTQ, "rotation": "hadamard"}, "rotation"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 4, "swap": 1}}}, "dynamic.+:.*.swap"),
        ({**GPTQ, "dynamic": {"+:.*": 4}}, "dynamic.+:.*"),
        ({**GPTQ, "quant_method": "awq", "version": "gemm", "backend": "llm-awq"}, "backend"),
        ({**CT, "transform_config": ROTATED}, "transform_config"),
        ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        ({**CT, "moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config"),
        (
            {**CT, "config_groups": {"g": {"targets": [], "weights": {"num_bits": 4, "codebook": 3}}}},
            "weights.codebook",
        ),
        ({**CT, "config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
        ({"quant_method": "fp8", "store_dtype": "mxfp4"}, "store_dtype"),
        ({"quant_method": "bitsandbytes", "double": 1}, "double"),
        ({"quant_method": "mxfp4", "axis": 1}, "axis"),
        ({"quant_method": "quanto", "matmul": 1}, "matmul"),
        ({"quant_method": "torchao", "x": [1]}, "x"),
        ({"quant_method": "hqq", "x": 1}, "x"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "lora_rank": 32}, "lora_rank"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "spinquant_config": {"r4": True}}, "spinquant"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_key_that_may_change_the_weights_is_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], key: str
) -> None:
    error = refused(tmp_path, quantization)
    assert error.rule == "interop.config-key"
    assert key in str(error)


@pytest.mark.parametrize("level", [{"quantization": {"bits": 4, "group_size": 32, "x": 1}}, {"q": {"bits": 4, "x": 1}}])
def test_keys_of_mlx(tmp_path: Path, level: dict[str, Any]) -> None:
    path = packing.folder(tmp_path / "m", {"n": np.zeros(4, np.float32)}, {})
    stated = level.get("quantization", {"bits": 4, "group_size": 32, **level})
    (path / "config.json").write_text(json.dumps({"quantization": stated}))
    with pytest.raises(IngotError) as caught:
        ingot.open(path)
    assert caught.value.rule == "interop.config-key"


@pytest.mark.parametrize(
    "more",
    [
        {"new_option": None, "rotation": None, "adapter": {}, "meta": {"anything": {"at": ["all"]}}},
        {"pack_dtype": "int32", "is_marlin_format": False, "dynamic": {}, "damp_percent": 0.1, "tokenizer": "x"},
    ],
)
def test_options_that_are_not_set_say_nothing(tmp_path: Path, more: dict[str, Any]) -> None:
    of = layer(64, 64, 4, 32, sym=True)
    with ingot.open(packing.folder(tmp_path / "m", packing.gptq(STEM, of), {**GPTQ, **more})) as checkpoint:
        assert np.array_equal(checkpoint[f"{STEM}.weight"].numpy(), of.values)


def test_values_that_are_no_objects_do_not_crash() -> None:
    table = FORMATS["compressed-tensors"].keys
    for value in ([], "", 0, 1.5, float("nan"), [[]], [1], {"a": 1}, {"a": [{}]}):
        for key in ("config_groups", "kv_cache_scheme", "sparsity_config"):
            try:
                require_known_keys({key: value}, table, "x", "here")
            except IngotError as error:
                assert error.rule == "interop.config-key"  # noqa: PT017
