"""lm-evaluation-harness runs a local task with the model ``ingot``, and scores are those computed by hand."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from tests.support.models import make, make_tokenizer
from tests.support.paths import DEMO_DATA

pytest.importorskip("lm_eval")

TASK = """
task: local_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
QUESTIONS = [
    {"question": "The function returns", "choices": ["a list", "qqzzvx"], "label": 0},
    {"question": "Return the", "choices": ["jkwq#", "value"], "label": 1},
    {"question": "import", "choices": ["module", "os"], "label": 0},
]


@pytest.fixture(scope="module")
def demo() -> Path:
    return DEMO_DATA


@pytest.mark.slow
def test_a_local_task(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "local.yaml").write_text(TASK.format(data=tmp_path / "words.jsonl"))
    command = [sys.executable, "-m", "ingot.lm_eval", "run", "--model", "ingot", "--tasks", "local_words"]
    command += ["--model_args", f"path={demo},dtype=f32", "--include_path", str(tmp_path), "--batch_size", "2"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for choice, answer in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            assert float(answer[0]) == pytest.approx(by_hand(demo, sample["doc"]["question"], f" {choice}"), rel=1e-4)


def by_hand(folder: Path, context: str, continuation: str) -> float:
    from ingot.runtime.loading.transformers import load_model
    from ingot.runtime.loading.transformers_tokenizer import load_tokenizer

    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype="f32")
    before, both = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
    with torch.inference_mode():
        scores = model(torch.tensor([both])).logits[0].double().log_softmax(-1)
    return sum(float(scores[i - 1, both[i]]) for i in range(len(before), len(both)))


def test_generation_rolling_and_refusals(demo: Path) -> None:
    from lm_eval.api.instance import Instance

    from ingot.errors import IngotError
    from ingot.runtime.evaluation.lm_eval import IngotLM

    def request(kind: str, *arguments: object) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    model = IngotLM(pretrained=str(demo), batch_size="auto", max_length=32)
    (text,) = model.generate_until([request("generate_until", "The file", {"until": ["\n"], "max_gen_toks": 20})])
    (whole,) = model.generate_until([request("generate_until", "The file", {"until": ["@@"], "max_gen_toks": 20})])
    assert "\n" not in text
    assert whole.startswith(text)
    with pytest.raises(IngotError) as caught:
        model.generate_until([request("generate_until", "The", {"do_sample": True, "temperature": 0.7})])
    assert caught.value.rule == "lm-eval.sampling"
    with pytest.raises(IngotError) as caught:
        model.loglikelihood_rolling([request("loglikelihood_rolling", "The file is read.")])
    assert caught.value.rule == "lm-eval.prefix"
    model.tokenizer.bos_token = model.tokenizer.convert_ids_to_tokens(10)
    long = "The file is read, and its lines are returned as a list of strings. " * 3
    (score,) = model.loglikelihood_rolling([request("loglikelihood_rolling", long)])
    assert len(model.tok_encode(long)) > 32
    assert score < 0
    for arguments, rule in (({}, "lm-eval.path"), ({"path": str(demo), "batch_size": "many"}, "lm-eval.batch")):
        with pytest.raises(IngotError) as caught:
            IngotLM(**arguments)
        assert caught.value.rule == rule


@pytest.fixture
def hflm(monkeypatch: pytest.MonkeyPatch) -> type:
    """The harness's own model. It imports accelerate at once, and uses nothing of it for a model that is in memory."""
    with monkeypatch.context() as patch:
        if importlib.util.find_spec("accelerate") is None:
            for name in ("accelerate", "accelerate.utils"):
                module: Any = ModuleType(name)
                module.__getattr__ = lambda attribute: None
                module.__spec__ = importlib.util.spec_from_loader(name, None)
                patch.setitem(sys.modules, name, module)
        found: type = importlib.import_module("lm_eval.models.huggingface").HFLM
    return found


PAIRS = (
    ("in the", " 123 cafe"),
    ("<s>in the", " end"),
    ("", "in the 12"),
    # More tokens than the model has positions for, and none twice in a row: the harness would take one window's logits
    # for another of the same tokens.
    (" ".join(map(str, range(50))), " thing"),
    ("a", "the thin " * 3),
)


@pytest.mark.parametrize(
    ("begins", "options"),
    [(True, {}), (False, {}), (True, {"add_bos_token": False}), (False, {"add_bos_token": True})],
)
def test_scores_are_those_of_the_harness_own_model(
    hflm: Any, tmp_path: Path, begins: bool, options: dict[str, Any]
) -> None:
    from lm_eval.api.instance import Instance

    from ingot.runtime.evaluation.lm_eval import IngotLM

    def requests(kind: str, arguments: Any) -> list[Instance]:
        return [Instance(request_type=kind, doc={}, arguments=item, idx=i) for i, item in enumerate(arguments)]

    make("llama", tmp_path, "float32", vocab_size=make_tokenizer(tmp_path, begins=begins))
    wanted = hflm(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), batch_size=3, **options)
    found = IngotLM(str(tmp_path), batch_size=3, **options)
    for text in [one for pair in PAIRS for one in pair if one]:
        for special in (None, True, False):
            assert found.tok_encode(text, special) == wanted.tok_encode(text, special)
    pairs = requests("loglikelihood", PAIRS)
    for left, right in zip(found.loglikelihood(pairs), wanted.loglikelihood(pairs), strict=True):
        assert left == (pytest.approx(right[0], rel=1e-5), right[1])
    texts = requests("loglikelihood_rolling", [(one,) for pair in PAIRS for one in pair if one])
    assert found.loglikelihood_rolling(texts) == pytest.approx(wanted.loglikelihood_rolling(texts), rel=1e-5)
