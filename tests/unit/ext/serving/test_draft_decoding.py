"""Speculative decoding: the tokens of plain generation, whatever a draft head proposes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import ingot
from ingot.cli.main import run
from ingot.codecs.table import CODECS
from ingot.errors import IngotError
from ingot.ext.serving import speculate as speculate_module
from ingot.ext.serving.eagle import DraftHead
from ingot.ext.serving.speculate import speculate
from ingot.runtime.evaluation.generate import draft_head, generate, greedy
from ingot.runtime.layers.decoder_layers import InNativeCalls
from ingot.runtime.layers.packed_linear import PackedLinear, rows_alone
from ingot.runtime.loading.options import Draft
from ingot.runtime.loading.transformers import load_model
from ingot.testing.codecs import encode_tensor
from tests.support.drafts import draft_head as random_head
from tests.support.models import make, make_tokenizer

ROOT = Path(__file__).resolve().parents[4]
MODELS = ROOT.parent / "shared" / "models"
COUNT = 24
PROMPT = torch.tensor([[5, 9, 33, 60, 2, 17]])


def never(new: list[int]) -> bool:
    return False


class Oracle:
    """Proposes what the model will choose; each token with some probability, else another one."""

    features = (0, 1, 2)

    def __init__(self, tokens: Sequence[int], right: float) -> None:
        self.tokens, self.right, self.known, self.random = list(tokens), right, 0, random.Random(3)

    def extend(self, features: torch.Tensor, ids: Sequence[int]) -> None:
        assert features.shape[1] == len(ids)
        self.known += len(ids) if self.known else 1
        assert self.tokens[: self.known][-1] == ids[-1]

    def propose(self, count: int) -> list[int]:
        best = (self.tokens[self.known :] + [0] * count)[:count]
        return [token if self.random.random() < self.right else (token + 1) % 64 for token in best]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers with a vocabulary of the tokenizer's size; random weights, so that tokens depend on all before."""
    folder = tmp_path_factory.mktemp("target") / "llama"
    size = make_tokenizer(folder)
    make("llama", folder, vocab_size=size, num_hidden_layers=5, eos_token_id=None, max_position_embeddings=256)
    return folder


@pytest.fixture(scope="module")
def packed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "squizd"
    ingot.convert(target, folder, "int4", format="squizd")
    return folder


def head_of(folder: Path, **sizes: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    values = {"vocab": config["vocab_size"], "hidden": config["hidden_size"], "target": config["hidden_size"], **sizes}
    return random_head(**values)


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    (tmp_path / "head").mkdir()
    ingot.save(tmp_path / "head" / "model.safetensors", head_of(target))
    return tmp_path / "head"


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
def test_tokens_are_those_without_a_drafter(target: Path, dtype: str, right: float) -> None:
    """Accepted, rejected in the middle, rejected at once: a cache that were not rolled back would show."""
    model = load_model(target, dtype=dtype)
    plain, _ = greedy(model, PROMPT, COUNT, never)
    assert len(set(plain)) > 3
    done = speculate(model, PROMPT, COUNT, never, Oracle(plain, right))
    assert done.tokens == plain
    assert done.dropped == ""
    assert len(done.tokens) - 1 == sum(done.accepted) + len(done.accepted) + (len(done.single_seconds) - 5)
    lengths = done.accepted
    if right == 1.0:
        assert lengths[:-1] == [4] * (len(lengths) - 1)
    elif right == 0.0:
        assert set(lengths) == {0}
    else:
        assert len(set(lengths)) > 2


def test_packed_layers_draft_too(packed: Path) -> None:
    model = load_model(packed)
    plain, _ = greedy(model, PROMPT, COUNT, never)
    for ahead in (3, 7):
        done = speculate(model, PROMPT, COUNT, never, Oracle(plain, 0.7), ahead)
        assert (done.tokens, done.dropped) == (plain, "")
        assert max(done.accepted) > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers are large enough that sums in another order come out otherwise in 16 bits."""
    folder = tmp_path_factory.mktemp("wide") / "llama"
    size = make_tokenizer(folder)
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
    make("llama", folder, vocab_size=size, eos_token_id=None, max_position_embeddings=256, **shape)
    return folder


RULE = '[[rules]]\nroles = ["attention", "mlp"]\nmin_ndim = 2\ncodec = "affine"\noptions = {{ bits = 4, group = {} }}\n'


@pytest.mark.parametrize("group", [64, 24])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_packed_layers_compute_proposals_with_the_bits_of_single_tokens(
    wide: Path, tmp_path: Path, group: int, dtype: str
) -> None:
    """A pass over proposals is of more rows than the kernel takes that computes single tokens."""
    (tmp_path / "r.toml").write_text(RULE.format(group))
    ingot.convert(wide, tmp_path / "packed", tmp_path / "r.toml", format="zt")
    model = load_model(tmp_path / "packed", keep_packed=True, dtype=dtype)
    plain, _ = greedy(model, PROMPT, 14, never)
    done = speculate(model, PROMPT, 14, never, Oracle(plain, 0.8), 7)
    assert (done.tokens, done.dropped) == (plain, "")
    assert max(done.accepted) > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_alone_have_the_bits_of_one_row(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((2048, 1024)).astype(np.float32)
    tensor = encode_tensor(CODECS["affine"], weight, {"bits": 4, "group": 64}, dtype="f32")
    layer = PackedLinear.from_tensor(tensor, dtype=dtype)
    x = torch.from_numpy(rng.standard_normal((8, 1024)).astype(np.float32)).to(dtype)
    with torch.inference_mode():
        single = torch.cat([layer(row) for row in x.split(1)])
        assert not torch.equal(layer(x), single)
        with rows_alone():
            assert torch.equal(layer(x), single)
        assert not torch.equal(layer(x), single)


def test_layers_in_native_calls_draft_too(wide: Path, tmp_path: Path) -> None:
    """With ``compute="int8"`` a layer that somebody listens to computes otherwise: features come without a hook."""
    (tmp_path / "r.toml").write_text(RULE.format(64))
    ingot.convert(wide, tmp_path / "packed", tmp_path / "r.toml", format="zt")
    model = load_model(tmp_path / "packed", keep_packed=True, compute="int8")
    assert sum(isinstance(module, InNativeCalls) for module in model.modules()) == 4
    plain, _ = greedy(model, PROMPT, 14, never)
    run_once = speculate_module._Run(model, Oracle(plain, 1.0), speculate_module.Speculated())
    with torch.inference_mode():
        logits, features = run_once._pass(PROMPT)
        assert torch.equal(logits, model(input_ids=PROMPT, use_cache=True).logits)
    assert features.shape == (1, PROMPT.shape[1], 3 * 256)
    assert not any(getattr(module, "listener", None) for module in model.modules())
    for right in (1.0, 0.6):
        done = speculate(model, PROMPT, 14, never, Oracle(plain, right))
        assert (done.tokens, done.dropped) == (plain, "")
    assert greedy(model, PROMPT, 14, never)[0] == plain


@pytest.mark.parametrize("count", [1, 2, 5, 6, 8])
def test_no_more_tokens_than_asked_for(target: Path, count: int) -> None:
    model = load_model(target)
    plain, _ = greedy(model, PROMPT, COUNT, never)
    assert speculate(model, PROMPT, count, never, Oracle(plain, 1.0)).tokens == plain[:count]


def test_ends_where_the_model_ends(target: Path) -> None:
    """Also where the end is one of several accepted tokens, or the one that a pass gives beside them."""
    model = load_model(target)
    plain, _ = greedy(model, PROMPT, COUNT, never)
    for length in (1, 2, 4, 6, 7, 13):

        def stop(new: list[int], length: int = length) -> bool:
            return len(new) == length

        for right in (1.0, 0.5):
            assert speculate(model, PROMPT, COUNT, stop, Oracle(plain, right)).tokens == plain[:length]


def test_a_machine_that_computes_otherwise_together(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows come out with other bits the first pass shows it: the drafter is given up, the tokens stay."""
    model = load_model(target, dtype="f32")
    plain, _ = greedy(model, PROMPT, COUNT, never)
    linear = torch.nn.functional.linear

    def together(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = linear(x, *rest)
        return out * 1.001 if x.shape[-2] == 5 else out

    monkeypatch.setattr(speculate_module.RowByRow, "_linear", lambda self, func, args, named: together(*args))
    done = speculate(model, PROMPT, COUNT, never, Oracle(plain, 1.0))
    assert done.tokens == plain
    assert done.dropped
    assert len(done.accepted) == 1


def test_heads_compute_as_published(target: Path, tmp_path: Path) -> None:
    """Against the formulas, whole sequences at a time and with loops; taken in at once or in pieces."""
    tensors = head_of(target, draft_vocab=30)
    ingot.save(tmp_path / "head.safetensors", tensors)
    model = load_model(target, dtype="f32")
    wide = {name: torch.from_numpy(np.asarray(values, np.float64)) for name, values in tensors.items()}
    ids = [7, 3, 50, 21, 9, 14, 2]
    features = torch.randn(1, len(ids), 3 * 32, generator=torch.Generator().manual_seed(1))
    wanted = reference(wide, model.get_input_embeddings().weight.double(), features[0].double(), ids, 4)
    with torch.inference_mode(), ingot.open(tmp_path / "head.safetensors") as checkpoint:
        for pieces in ([7], [1, 6], [3, 3, 1], [1] * 7):
            head, start = DraftHead(checkpoint, model), 0
            for size in pieces:
                head.extend(features[:, start : start + size], ids[start : start + size])
                head.propose(3)  # leaves nothing behind
                start += size
            assert head.propose(4) == wanted


def reference(
    head: dict[str, torch.Tensor], table: torch.Tensor, features: torch.Tensor, ids: list[int], count: int
) -> Any:
    """The published formulas in f64, everything again for each token: the head's own states stand in for features."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * head[f"{name}.weight"]

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:  # one head of 8: pairs are i and i + 4
        angles = position * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        turned = torch.complex(x[:4], x[4:]) * torch.polar(torch.ones(4, dtype=torch.float64), angles)
        return torch.cat((turned.real, turned.imag))

    states, tokens, proposed = list(features @ head["fc.weight"].T), list(ids), []
    for _ in range(count):
        outputs = []
        taken = [
            torch.cat((norm(table[token], "midlayer.input_layernorm"), norm(state, "midlayer.hidden_norm")))
            for token, state in zip(tokens, states, strict=True)
        ]
        q, k, v = ([head[f"midlayer.self_attn.{name}_proj.weight"] @ x for x in taken] for name in "qkv")
        for at, state in enumerate(states):
            mixed = []
            for number in range(4):  # four heads of queries on two of keys
                mine, its = slice(8 * number, 8 * number + 8), slice(8 * (number // 2), 8 * (number // 2) + 8)
                scores = torch.stack([turn(q[at][mine], at) @ turn(k[j][its], j) / 8**0.5 for j in range(at + 1)])
                mixed.append(scores.softmax(0) @ torch.stack([v[j][its] for j in range(at + 1)]))
            hidden = state + head["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
            x = norm(hidden, "midlayer.post_attention_layernorm")
            gate, up = (head[f"midlayer.mlp.{name}_proj.weight"] @ x for name in ("gate", "up"))
            outputs.append(hidden + head["midlayer.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up))
        own = int((head["lm_head.weight"] @ norm(outputs[-1], "norm")).argmax())
        proposed.append(own + int(head["d2t"][own]))
        tokens.append(proposed[-1])
        states.append(outputs[-1])
    return proposed


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A target whose next token follows from the last alone, by a permutation in one cycle."""
    folder, size = tmp_path_factory.mktemp("markov") / "llama", 64
    after = [(5 * token + 3) % size for token in range(size)]
    values = {"num_hidden_layers": 5, "hidden_size": size, "num_attention_heads": 2, "num_key_value_heads": 2}
    make("llama", folder, "float32", vocab_size=size, eos_token_id=None, max_position_embeddings=256, **values)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.norm.weight.fill_(1)
        model.lm_head.weight.copy_(torch.eye(size)[torch.tensor(after).argsort()])
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder, after


@pytest.mark.parametrize("from_features", [False, True])
def test_a_perfect_head_is_always_right(markov: tuple[Path, list[int]], tmp_path: Path, from_features: bool) -> None:
    """One that reads the token before, or the features one position earlier: both lie where they are published to."""
    folder, after = markov
    size = len(after)
    tensors = {name: values.astype(np.float32) for name, values in head_of(folder, draft_vocab=size).items()}
    tensors = {name: np.zeros_like(values) for name, values in tensors.items() if name not in ("d2t", "t2d")}
    tensors |= {name: np.ones_like(values) for name, values in tensors.items() if values.ndim == 1}
    kv, step = tensors["midlayer.self_attn.v_proj.weight"].shape[0], np.zeros((size, size), np.float32)
    step[after, range(size)] = 1
    if from_features:  # f_j is token j; two steps on is what comes behind token j + 1
        tensors["fc.weight"][:, :size] = np.eye(size)
        tensors["lm_head.weight"] = step @ step
    else:  # every position looks at itself alone, and puts its token in place of what the state says
        for name in ("q", "k"):
            tensors[f"midlayer.self_attn.{name}_proj.weight"][:, :size] = 30
        tensors["midlayer.self_attn.v_proj.weight"] = np.zeros((size, 2 * size), np.float32)
        tensors["midlayer.self_attn.k_proj.weight"] = np.repeat(
            tensors["midlayer.self_attn.k_proj.weight"], size // kv, 0
        )
        tensors["midlayer.self_attn.v_proj.weight"][:] = np.hstack([np.eye(size), -np.eye(size)])
        tensors["midlayer.self_attn.o_proj.weight"] = np.eye(size, dtype=np.float32)
        tensors["lm_head.weight"] = step
    ingot.save(tmp_path / "head.safetensors", tensors)
    model = load_model(folder)
    plain, _ = greedy(model, PROMPT, COUNT, never)
    assert plain[1:] == [after[token] for token in plain[:-1]]
    done = speculate(model, PROMPT, COUNT, never, draft_head(tmp_path / "head.safetensors", model))
    assert done.tokens == plain
    if from_features:  # its own states stay where they are: it knows one token ahead
        assert set(done.accepted) == {1}
    else:
        assert done.accepted[:-1] == [4] * (len(done.accepted) - 1)


def test_generate_with_a_carried_head(
    target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (head / "config.json").write_text(json.dumps({"num_attention_heads": 4, "rms_norm_eps": 0.25, "hidden_size": 32}))
    ingot.convert(target, tmp_path / "made", "int4", format="squizd", draft=head)
    plain = generate(tmp_path / "made", "the list", COUNT)
    drafted = generate(tmp_path / "made", "the list", COUNT, draft=Draft(tokens=3))
    assert drafted.tokens == plain.tokens
    assert plain.drafted is None
    assert drafted.drafted is not None
    assert drafted.drafted.dropped == ""
    assert drafted.drafted.accepted == sum(drafted.drafted.accepted_lengths) <= drafted.drafted.proposed
    assert drafted.drafted.speed_up is not None
    assert draft_head(tmp_path / "made", load_model(tmp_path / "made")).config.eps == 0.25  # its config.json travels
    command = ["generate", str(tmp_path / "made"), "the list", "--max-tokens", "9"]
    assert run([*command, "--draft", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == list(plain.tokens[:9])
    assert told["drafted"]["passes"] == len(told["drafted"]["accepted_lengths"])
    assert run([*command, "--draft-head", str(head), "--draft-tokens", "2"]) == 0
    assert plain.text[:4] in capsys.readouterr().out


def test_a_head_of_another_shape(target: Path, tmp_path: Path) -> None:
    """With layers by number, the later one on the state alone, narrower than its target and with its own embeddings."""
    tensors = head_of(target, layer="layers.0.", hidden=16)
    rest = {name.replace("layers.0", "layers.1"): values for name, values in tensors.items() if "layers.0" in name}
    for name in "qkv":
        rest[f"layers.1.self_attn.{name}_proj.weight"] = rest[f"layers.1.self_attn.{name}_proj.weight"][:, :16].copy()
    table = np.random.default_rng(1).normal(size=(len(tensors["t2d"]), 16)).astype(np.float16)
    ingot.save(tmp_path / "head.safetensors", {**tensors, **rest, "embed_tokens.weight": table})
    generated = generate(target, "the", 8, draft=Draft(tmp_path / "head.safetensors"))
    assert generated.tokens == generate(target, "the", 8).tokens
    assert generated.drafted is not None
    assert generated.drafted.passes > 0


def refused(attempt: Callable[[], object]) -> str | None:
    with pytest.raises(IngotError) as error:
        attempt()
    return error.value.rule


def test_refusals(target: Path, head: Path, tmp_path: Path) -> None:
    assert refused(lambda: generate(target, "the", 4, draft=Draft())) == "attachments.none"
    for count in (0, 8):
        assert refused(lambda count=count: Draft(tokens=count)) == "draft.tokens"  # type: ignore[misc]
    for sizes in ({"target": 48}, {"vocab": 99}, {"hidden": 48}):
        ingot.save(tmp_path / "other.safetensors", head_of(target, **sizes), overwrite=True)
        assert (
            refused(lambda: generate(target, "the", 4, draft=Draft(tmp_path / "other.safetensors"))) == "draft.target"
        )
    (head / "config.json").write_text(json.dumps({"head_dim": 5}))
    assert refused(lambda: generate(target, "the", 4, draft=Draft(head))) == "draft.heads"
    (head / "config.json").write_text(
        json.dumps({"head_dim": 8, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}})
    )
    assert refused(lambda: generate(target, "the", 4, draft=Draft(head))) == "draft.config"


def test_models_that_no_head_drafts_for(tmp_path: Path) -> None:
    """Products that are no linear layers, and windows that cannot take back tokens."""
    for kind, values in (
        ("gpt2", {}),
        ("tied qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ):
        model = load_model(make(kind, tmp_path / kind, eos_token_id=None, **values))
        assert (
            refused(
                lambda model=model: speculate(model, PROMPT, 8, never, Oracle(greedy(model, PROMPT, 8, never)[0], 1))
            )
            == "draft.model"
        )  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.models
def test_the_trainer_makes_a_head_that_helps(tmp_path: Path) -> None:
    """It compares the tokens itself; a moment of training is enough to be right more often than chance."""
    text = ["--text", str(MODELS / "heldout_prose.txt"), "--texts", "300"]
    options = [*text, "--steps", "40", "--measured", "12"]
    command = [
        sys.executable,
        str(ROOT / "tools" / "train_draft.py"),
        str(MODELS / "base"),
        str(tmp_path / "head"),
        *options,
    ]
    subprocess.run(command, check=True, capture_output=True)
    generated = generate(MODELS / "base", "The command", 32, draft=Draft(tmp_path / "head"))
    assert generated.drafted is not None
    assert generated.drafted.accepted > 0
