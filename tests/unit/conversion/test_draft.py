"""Draft heads: published layouts are taken, every broken one is refused by its rule, and weights are not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.draft_head import DraftShape, check_draft
from ingot.artifacts.save import plan_tensors
from ingot.errors import FormatError
from ingot.model.part import memory_part
from ingot.model.tensor import Array, Tensor
from ingot.testing.codecs import Unreadable
from tests.support.drafts import draft_head

Head = dict[str, Array]


def tensors(head: Head) -> dict[str, Tensor]:
    from ingot.formats.detect import FORMATS

    return {tensor.name: tensor for tensor, _ in plan_tensors(FORMATS["zt"], head)}


def test_a_published_head_is_taken() -> None:
    found = check_draft(tensors(draft_head()))
    assert found == DraftShape(
        layers=1,
        hidden=16,
        target_hidden=24,
        attention=16,
        kv=8,
        intermediate=40,
        vocab=50,
        draft_vocab=20,
        mapped=True,
        embedded=False,
    )


def test_the_spelling_of_speculators_is_taken() -> None:
    assert check_draft(tensors(draft_head(layer="layers.0."))) == check_draft(tensors(draft_head()))


def test_more_layers_are_counted() -> None:
    head = draft_head(layer="layers.0.")
    for name in [name for name in head if name.startswith("layers.0.")]:
        values = head[name]
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            values = values[:, :16]  # later layers take the hidden state alone
        head[name.replace("layers.0.", "layers.1.")] = values
    assert check_draft(tensors(head)).layers == 2


def test_without_a_mapping_both_vocabularies_are_one() -> None:
    head = draft_head()
    del head["d2t"], head["t2d"]
    found = check_draft(tensors(head))
    assert (found.vocab, found.draft_vocab, found.mapped) == (20, 20, False)


def test_a_mapping_of_zeros_is_taken() -> None:
    head = draft_head() | {"d2t": np.zeros(20, np.int64), "t2d": np.ones(20, bool)}
    assert check_draft(tensors(head)).vocab == 20


def test_embeddings_may_come_along() -> None:
    head = draft_head() | {"embed_tokens.weight": np.zeros((50, 16), np.float16)}
    assert check_draft(tensors(head)).embedded


def test_unknown_tensors_travel_along() -> None:
    check_draft(tensors(draft_head() | {"midlayer.self_attn.q_proj.bias": np.zeros(16, np.float32)}))


def test_only_the_mapping_is_read() -> None:
    head = {
        name: tensor
        if name in ("d2t", "t2d")
        else replace(
            tensor, parts={role: replace(part, source=Unreadable(part.length)) for role, part in tensor.parts.items()}
        )
        for name, tensor in tensors(draft_head()).items()
    }
    check_draft(head)


Change = Callable[[Head], object]


def without(name: str) -> Change:
    return lambda head: head.pop(name)


def put(name: str, values: Any) -> Change:
    return lambda head: head.__setitem__(name, np.asarray(values))


def shape(name: str, *size: int, dtype: Any = np.float16) -> Change:
    return put(name, np.zeros(size, dtype))


def offset(token: int, value: int) -> Change:
    return lambda head: head["d2t"].__setitem__(token, value)


MATRICES = [f"midlayer.self_attn.{one}_proj.weight" for one in "qkvo"] + [
    f"midlayer.mlp.{one}_proj.weight" for one in ("gate", "up", "down")
]
BROKEN: list[tuple[Change, str]] = [
    *((without(name), "draft.missing") for name in ["fc.weight", "norm.weight", "lm_head.weight", *MATRICES]),
    *((shape(name, 16), "draft.shape") for name in ["fc.weight", "lm_head.weight", *MATRICES]),
    *((shape(name, 15, 33), "draft.shape") for name in ["fc.weight", "lm_head.weight", *MATRICES]),
    *((shape(name, 16, 16, dtype=np.int8), "draft.dtype") for name in ["fc.weight", "norm.weight", *MATRICES]),
    (shape("fc.weight", 16, 71), "draft.shape"),
    (shape("fc.weight", 16, 0), "draft.shape"),
    (shape("norm.weight", 0), "draft.shape"),
    (shape("norm.weight", 16, 1), "draft.shape"),
    (shape("midlayer.hidden_norm.weight", 32), "draft.shape"),
    (shape("midlayer.self_attn.q_proj.weight", 16, 16), "draft.shape"),  # without the embedding
    (shape("embed_tokens.weight", 20, 16), "draft.shape"),
    (shape("layers.0.mlp.up_proj.weight", 40, 16), "draft.layers"),
    (without("d2t"), "draft.mapping"),
    (without("t2d"), "draft.mapping"),
    (put("d2t", np.zeros(20, np.int32)), "draft.dtype"),
    (put("t2d", np.ones(50, np.uint8)), "draft.dtype"),
    (put("d2t", np.zeros(19, np.int64)), "draft.shape"),
    (put("d2t", np.zeros((20, 1), np.int64)), "draft.shape"),
    (put("t2d", np.ones((50, 1), bool)), "draft.shape"),
    (put("t2d", np.ones(0, bool)), "draft.range"),
    (offset(19, 50 - 19), "draft.range"),  # one past the last
    (offset(3, -4), "draft.range"),
    (offset(3, 2**63 - 1), "draft.range"),
    (offset(0, -(2**63)), "draft.range"),
    (offset(5, 0), "draft.order"),  # below the token before
    (lambda head: head["d2t"].__setitem__(5, head["d2t"][4] - 1), "draft.order"),  # the same token twice
    (put("t2d", np.ones(50, bool)), "draft.mask"),
    (put("t2d", np.arange(50) < 20), "draft.mask"),  # as many, others
]


@pytest.mark.parametrize(("change", "rule"), BROKEN)
def test_broken_heads_are_refused(change: Change, rule: str) -> None:
    head = draft_head()
    change(head)
    with pytest.raises(FormatError) as caught:
        check_draft(tensors(head))
    assert caught.value.rule == rule


@pytest.mark.parametrize("start", ["layers.1.", "layers.00.", "layers.7777777."])
def test_layers_begin_at_zero(start: str) -> None:
    with pytest.raises(FormatError) as caught:
        check_draft(tensors(draft_head(layer=start)))
    assert caught.value.rule in ("draft.layers", "draft.missing")


def test_a_mask_with_bytes_that_are_no_bool_is_refused() -> None:
    head = tensors(draft_head())
    head["t2d"] = replace(head["t2d"], parts={"data": memory_part(np.full(50, 2, np.uint8), "u8", "bool")})
    with pytest.raises(ingot.errors.CodecError):
        check_draft(head)


def test_heads_from_files_and_folders(tmp_path: Path) -> None:
    head = draft_head()
    ingot.save(tmp_path / "head.safetensors", head)
    ingot.save(tmp_path / "folder", head, format="zt")
    for path in (tmp_path / "head.safetensors", tmp_path / "folder"):
        with ingot.open(path) as found:
            assert check_draft(found) == check_draft(tensors(head))


def test_a_model_is_no_draft_head(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    ingot.save(path, {"model.norm.weight": np.zeros(4, np.float32)})
    with ingot.open(path) as found, pytest.raises(FormatError) as caught:
        check_draft(found)
    assert caught.value.rule == "draft.missing"
