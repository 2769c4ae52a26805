"""llama.cpp itself with our files: `make interop-llama` builds it into a venv of its own, beside the one of the tests.

Bounds are of the root mean square of the difference of logits, relative to that of the logits about their mean. Where
weights are f32, both programs compute in f32, and differ by the order of sums. With f16 and bf16 llama.cpp rounds what
it multiplies with to the weights' type: 2^-11 and 2^-8 for each number. With blocks it rounds that to 8 bits with a
scale for 32 or 256 numbers, 1/254 of the largest each, whatever the bits of the weights: seen were 0.013 to 0.017 for
every type. That nothing else differs is shown by the same weights, decoded by us to f32, in llama.cpp.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

PYTHON = os.environ.get("INGOT_LLAMA_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="INGOT_LLAMA_PYTHON names no Python with llama_cpp: make interop-llama"),
    pytest.mark.models,
]
MODELS = Path(__file__).parents[3] / "shared" / "models"
BASE = MODELS / "base"
PROGRAM = Path(__file__).with_name("llama_program.py")
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json")

Array = np.ndarray[Any, np.dtype[Any]]

ROUNDING = {"f32": 1e-5, "f16": 2e-3, "bf16": 1.5e-2}
BLOCKS = 0.05
OF_32 = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4")
OF_256 = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
FILE_TYPES = {
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17, "q6_k": 18,
    "iq4_nl": 25, "iq4_xs": 30,
}  # fmt: skip
"""``enum llama_ftype`` of include/llama.h."""


def ask(folder: Path, *jobs: list[Any]) -> list[Any]:
    """Have llama.cpp do some jobs of ``llama_program.py``, and return its answers."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    done = subprocess.run([PYTHON, str(PROGRAM), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def folder(path: Path, tensors: dict[str, Array], **config: Any) -> Path:
    path.mkdir()
    ingot.save(path / "model.safetensors", tensors, {"format": "pt"})
    for name in SMALL:
        shutil.copy(BASE / name, path / name)
    known = json.loads((BASE / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**known, **config}))
    return path


def whole(path: Path) -> Path:
    """The small trained model in f32."""
    with ingot.open(BASE) as checkpoint:
        return folder(path, {name: tensor.numpy("f32") for name, tensor in checkpoint.items()})


def cut(path: Path, **config: Any) -> Path:
    """Two of its layers, cut to 256 columns: blocks of 256 fit, and weights are distributed as trained ones are."""
    found = {}
    with ingot.open(BASE) as checkpoint:
        for name, tensor in checkpoint.items():
            if ".layers." in name and int(name.split(".")[2]) >= 2:
                continue
            rows = 64 if "k_proj" in name or "v_proj" in name else 256 if "q_proj" in name or "o_proj" in name else None
            rows = 256 if "down_proj" in name or len(tensor.shape) == 1 else rows
            values = tensor.numpy("f32")[:rows]
            found[name] = values if "down_proj" in name or values.ndim == 1 else np.ascontiguousarray(values[:, :256])
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    return folder(path, found, hidden_size=256, num_hidden_layers=2, **heads, **config)


def packed(model: Path, target: Path, kind: str) -> Path:
    """Write every matrix in one type."""
    if kind in ROUNDING:
        ingot.convert(model, target, None if kind == "f32" else kind)
        return target
    codec, options = "ggml_blocks", f'{{ type = "{kind}" }}'
    if kind == "mxfp4":
        codec, options = "scaled_codebook", '{ table = "f4_e2m1fn", group = 32, scales = "f8_e8m0fnu" }'
    rule = f'min_ndim = 2\ncodec = "{codec}"\noptions = {options}'
    (target.parent / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    between = target.with_suffix("") if kind == "mxfp4" else target
    ingot.convert(model, between, target.parent / "r.toml")
    if between != target:
        ingot.convert(between, target)
    return target


def prompt(count: int) -> list[list[int]]:
    """Windows of 64 tokens of text that the model was not trained on."""
    text = (MODELS / "heldout_prose.txt").read_text()[: 1000 * count]
    tokens = load_tokenizer(BASE)(text, add_special_tokens=False)["input_ids"]
    return [tokens[64 * index : 64 * index + 64] for index in range(count)]


def ours(path: Path, windows: list[list[int]]) -> Array:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        logits: Array = ingot.load_model(path, dtype="f32")(torch.tensor(windows)).logits.float().numpy()
    return logits


def wide(tensor: ingot.Tensor) -> Array:
    return tensor.numpy("f32").astype(np.float64)


def distance(found: Array, wanted: Array) -> float:
    around = wanted - wanted.mean(-1, keepdims=True)
    return float(np.sqrt(np.square(found - wanted).mean() / np.square(around).mean()))


@pytest.mark.parametrize(("make", "kinds"), [(whole, (*ROUNDING, *OF_32)), (cut, ("f32", *OF_256))])
def test_logits_are_ours(tmp_path: Path, make: Any, kinds: tuple[str, ...]) -> None:
    model, windows = make(tmp_path / "model"), prompt(2)
    files = {kind: packed(model, tmp_path / f"{kind}.gguf", kind) for kind in kinds}
    blocks = [kind for kind in kinds if kind not in ROUNDING]
    for kind in blocks:
        files[f"{kind} decoded"] = tmp_path / f"{kind}-decoded.gguf"
        ingot.convert(files[kind], files[f"{kind} decoded"], "decompress")
    ask(tmp_path, *(["logits", path, windows, path.with_suffix(".npy")] for path in files.values()))
    made = {kind: np.load(path.with_suffix(".npy")) for kind, path in files.items()}
    for kind in kinds:
        logits = ours(files[kind], windows)
        assert distance(made[kind], logits) < ROUNDING.get(kind, BLOCKS), kind
        if kind in blocks:
            assert distance(made[f"{kind} decoded"], logits) < ROUNDING["f32"], kind


def test_scaled_rotary_positions(tmp_path: Path) -> None:
    """As Llama 3.1 has them: a tensor of factors there."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model, windows = cut(tmp_path / "model", rope_parameters=scaling), prompt(2)
    ingot.convert(model, tmp_path / "x.gguf")
    ask(tmp_path, ["logits", tmp_path / "x.gguf", windows, tmp_path / "x.npy"])
    made = np.load(tmp_path / "x.npy")
    assert distance(made, ours(model, windows)) < ROUNDING["f32"]
    assert distance(made, ours(cut(tmp_path / "plain"), windows)) > 100 * ROUNDING["f32"]


def test_longrope(tmp_path: Path) -> None:
    """As Phi-3 has it: tensors of factors for windows longer than those that it first learnt, and for others.

    llama.cpp chooses by the window, which it makes 256 tokens at least, transformers by the text.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    base = json.loads((BASE / "config.json").read_text())
    factors = {"long_factor": [1.5, 2.0, 4.0, 9.0], "short_factor": [1.0, 1.1, 1.3, 2.0]}
    for length in (32, 512):
        config = transformers.Phi3Config(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
            vocab_size=base["vocab_size"], max_position_embeddings=1024, original_max_position_embeddings=length,
            pad_token_id=0, rope_parameters={"rope_type": "longrope", "rope_theta": 100.0, **factors},
        )  # fmt: skip
        torch.manual_seed(1)
        model, windows = tmp_path / f"{length}", prompt(2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
        for name in SMALL[1:]:
            shutil.copy(BASE / name, model / name)
        ingot.convert(model, tmp_path / f"{length}.gguf")
        ask(tmp_path, ["logits", tmp_path / f"{length}.gguf", windows, tmp_path / "x.npy"])
        made = np.load(tmp_path / "x.npy")
        assert distance(made, ours(model, windows)) < ROUNDING["f32"]
        other = json.loads((model / "config.json").read_text())
        other["rope_parameters"]["short_factor" if length > 64 else "long_factor"] = [1.0] * 4
        (model / "config.json").write_text(json.dumps(other))
        assert distance(made, ours(model, windows)) > 10 * ROUNDING["f32"]


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_encoders_whose_positions_begin_behind_padding(tmp_path: Path, kind: str) -> None:
    """From a text to what the last layer makes of each of its tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text, model = (MODELS / "heldout_prose.txt").read_text(), tmp_path / "model"
    model.mkdir()
    if kind == "roberta":
        package = pytest.importorskip("tokenizers")
        made = package.ByteLevelBPETokenizer()
        marks = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        made.train_from_iterator([text[:50_000]], vocab_size=600, special_tokens=marks, show_progress=False)
        made.post_processor = package.processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
        made.save(str(model / "tokenizer.json"))
        rows = made.get_vocab_size()
    else:
        package, written = pytest.importorskip("sentencepiece"), io.BytesIO()
        package.SentencePieceTrainer.train(
            sentence_iterator=iter(text[:50_000].splitlines()), model_writer=written, vocab_size=600, minloglevel=2
        )
        (model / "sentencepiece.bpe.model").write_bytes(written.getvalue())
        rows = 602
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class":
             "RobertaTokenizer" if kind == "roberta" else "XLMRobertaTokenizer"}  # fmt: skip
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=rows,
        max_position_embeddings=258, pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1,
    )  # fmt: skip
    torch.manual_seed(2)
    encoder = transformers.AutoModel.from_config(config).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    encoder.save_pretrained(model)
    ingot.convert(model, tmp_path / "x.gguf")
    (tmp_path / "text").write_text(text[60_000:60_300])
    ask(tmp_path, ["hidden", tmp_path / "x.gguf", tmp_path / "text", tmp_path / "x.npy"])
    tokens = transformers.AutoTokenizer.from_pretrained(model)(text[60_000:60_300], return_tensors="pt")
    with torch.inference_mode():
        wanted = encoder(**tokens).last_hidden_state[0].numpy()
    found = np.load(tmp_path / "x.npy")
    assert found.shape == wanted.shape
    assert distance(found, wanted) < 1e-3  # GELU by a table of numbers in f16


def test_texts_are_cut_into_the_same_tokens(tmp_path: Path) -> None:
    ingot.convert(BASE, tmp_path / "x.gguf")
    texts = {name: (MODELS / f"heldout_{name}.txt").read_text()[:60_000] for name in ("prose", "code")}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = ask(tmp_path, *(["tokens", tmp_path / "x.gguf", tmp_path / name] for name in texts))
    tokenizer = load_tokenizer(BASE)
    assert found == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts.values()]


@pytest.mark.parametrize("kind", ["bpe", "no prefix", "unigram"])
def test_what_sentencepiece_trained_is_cut_alike(tmp_path: Path, kind: str) -> None:
    """A folder with ``tokenizer.model`` alone: the package's own tokens, a space before the text as it was trained."""
    package = pytest.importorskip("sentencepiece")
    text = (MODELS / "heldout_prose.txt").read_text()
    written = io.BytesIO()
    unigram = kind == "unigram"
    settings = {"model_type": "unigram"} if unigram else {"model_type": "bpe", "normalization_rule_name": "identity"}
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(text[:20_000].splitlines()), model_writer=written, vocab_size=600, minloglevel=2,
        byte_fallback=not unigram, remove_extra_whitespaces=unigram, add_dummy_prefix=kind != "no prefix", **settings,
    )  # fmt: skip
    model = cut(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text("{}")
    (model / "tokenizer.model").write_bytes(written.getvalue())
    ingot.convert(model, tmp_path / "x.gguf")
    wanted = text[20_000:30_000] + " caf\u00e9 \u4e2d\u6587\n  x"
    (tmp_path / "text").write_text(wanted)
    own = package.SentencePieceProcessor(model_proto=written.getvalue())
    assert ask(tmp_path, ["tokens", tmp_path / "x.gguf", tmp_path / "text"]) == [own.encode(wanted)]


def test_its_own_quantizer_is_not_nearer(tmp_path: Path) -> None:
    """Per tensor, the squared error of each type."""
    model = cut(tmp_path / "model")
    source = packed(model, tmp_path / "f32.gguf", "f32")
    theirs = {kind: tmp_path / f"theirs-{kind}.gguf" for kind in FILE_TYPES}
    answers = ask(tmp_path, *(["quantize", source, theirs[kind], number] for kind, number in FILE_TYPES.items()))
    assert not any(answers)
    with ingot.open(source) as exact:
        values = {name: wide(tensor) for name, tensor in exact.items() if len(tensor.shape) == 2}
    for kind, path in theirs.items():
        errors = []
        for file in (packed(model, tmp_path / f"{kind}.gguf", kind), path):
            with ingot.open(file) as made:
                assert {made[name].params["type"] for name in values} == {kind}
                errors.append({name: np.square(wide(made[name]) - values[name]).sum() for name in values})
        worse = {name: (error, errors[1][name]) for name, error in errors[0].items() if error > errors[1][name]}
        assert not worse, kind


def test_gptq_becomes_a_file_that_writes_text(tmp_path: Path) -> None:
    options = '{ bits = 4, group = 32, scales = "f16" }'
    rule = f'roles = ["attention", "mlp"]\nmin_ndim = 2\ncodec = "affine"\noptions = {options}'
    (tmp_path / "r.toml").write_text(f'name = "n"\ndescription = "n"\n[[rules]]\nlabel = "n"\n{rule}\n')
    ingot.convert(BASE, tmp_path / "int4", tmp_path / "r.toml")
    ingot.convert(tmp_path / "int4", tmp_path / "gptq", format="gptq")
    report = ingot.convert(tmp_path / "gptq", tmp_path / "x.gguf")
    assert report.exact
    with ingot.open(tmp_path / "x.gguf") as made:
        kinds = [tensor.params.get("type") for name, tensor in made.items() if name.startswith("blk.")]
    assert kinds.count("q4_0") == 42
    windows = prompt(2)
    file, out = tmp_path / "x.gguf", tmp_path / "x.npy"
    text, _ = ask(tmp_path, ["generate", file, "This program", 24], ["logits", file, windows, out])
    assert len(text.split()) > 5
    print(f"This program{text}")
    assert distance(np.load(out), ours(tmp_path / "gptq", windows)) < BLOCKS


def test_calibrated_blocks_diverge_less_there_too(tmp_path: Path) -> None:
    """Q4_0 rounded by what matrices multiply, in llama.cpp's own arithmetic: well below Q4_0 by search at its size."""
    statistics, windows = tmp_path / "s.safetensors", prompt(16)
    ingot.calibrate(BASE, statistics, samples=24, length=128)
    files = {"f16": {}, "q4_0": {}, "q4_0-calibrated": {"calibration": statistics}}
    for recipe, more in files.items():
        ingot.convert(BASE, tmp_path / f"{recipe}.gguf", recipe, **more)
    ask(tmp_path, *(["logits", tmp_path / f"{name}.gguf", windows, tmp_path / f"{name}.npy"] for name in files))
    found = {name: log_softmax(np.load(tmp_path / f"{name}.npy")) for name in files}
    kl = {name: float((np.exp(found["f16"]) * (found["f16"] - found[name])).sum(-1).mean()) for name in files}
    print(f"KL in llama.cpp: Q4_0 {kl['q4_0']:.5f}, calibrated {kl['q4_0-calibrated']:.5f}")
    assert kl["q4_0-calibrated"] < 0.75 * kl["q4_0"]
    sizes = [(tmp_path / f"{name}.gguf").stat().st_size for name in ("q4_0", "q4_0-calibrated")]
    assert sizes[0] == sizes[1]


def log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
