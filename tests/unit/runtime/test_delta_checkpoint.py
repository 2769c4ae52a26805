"""``ingot.hf.DeltaCheckpoint``: each step of a real ``Trainer`` is restored bit for bit, also after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import ingot.hf
from ingot.errors import IngotError, UnsupportedError, UsageError
from ingot.runtime.training.step_files import StepFolder, copy_state

State = dict[str, torch.Tensor]


def tiny_model(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


class Recorder(TrainerCallback):
    """Keeps a copy of the weights after each step."""

    def __init__(self) -> None:
        self.steps: dict[int, State] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    on_step_end = on_train_begin


def train(tmp_path: Path, model: LlamaForCausalLM, callback: Any, steps: int = 7) -> Recorder:
    tokens = torch.arange(256).reshape(32, 8) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    recorder = Recorder()
    arguments = TrainingArguments(
        tmp_path / "trainer",
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",  # the same steps in runs of any length
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[recorder, callback]).train()
    return recorder


def require_equal(first: State, second: State) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)), name


@pytest.mark.parametrize("against", ["step", "base"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_step_is_restored_bit_for_bit(tmp_path: Path, against: str, tied: bool) -> None:
    folder = tmp_path / "steps"
    callback = ingot.hf.DeltaCheckpoint(folder, full_every=4, against=against)
    recorder = train(tmp_path, tiny_model(tied=tied), callback)
    assert ingot.hf.DeltaCheckpoint.saved_steps(folder) == list(range(8))
    for step, weights in recorder.steps.items():
        require_equal(weights, ingot.hf.DeltaCheckpoint.restore(folder, step))
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if name.endswith(".safetensors")] == [
        "step-00000000.safetensors",
        "step-00000004.safetensors",
    ]
    assert f"step-00000007.from-{6 if against == 'step' else 4:08}.zt" in names
    restored = ingot.hf.DeltaCheckpoint.restore(folder, 7)
    if tied:
        assert restored["lm_head.weight"] is restored["model.embed_tokens.weight"]
    tiny_model(tied=tied).load_state_dict(restored)


def test_a_run_of_every_third_step_saves_the_last_one_too(tmp_path: Path) -> None:
    recorder = train(tmp_path, tiny_model(), ingot.hf.DeltaCheckpoint(tmp_path / "steps", every=3))
    assert ingot.hf.DeltaCheckpoint.saved_steps(tmp_path / "steps") == [0, 3, 6, 7]
    require_equal(recorder.steps[7], ingot.hf.DeltaCheckpoint.restore(tmp_path / "steps", 7))


def test_later_steps_of_an_earlier_run_are_removed_only_on_request(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    train(tmp_path, tiny_model(), ingot.hf.DeltaCheckpoint(folder), steps=4)
    with pytest.raises(UsageError, match="step 4") as error:
        train(tmp_path, tiny_model(), ingot.hf.DeltaCheckpoint(folder), steps=2)
    assert error.value.rule == "steps.folder"
    assert ingot.hf.DeltaCheckpoint.saved_steps(folder) == [0, 1, 2, 3, 4]
    recorder = train(tmp_path, tiny_model(), ingot.hf.DeltaCheckpoint(folder, overwrite=True), steps=2)
    assert ingot.hf.DeltaCheckpoint.saved_steps(folder) == [0, 1, 2]
    require_equal(recorder.steps[2], ingot.hf.DeltaCheckpoint.restore(folder, 2))


@pytest.mark.parametrize("options", [{"every": 0}, {"full_every": 0}, {"against": "last"}])
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as error:
        ingot.hf.DeltaCheckpoint(tmp_path, **options)
    assert error.value.rule == "steps.option"


def saved_folder(tmp_path: Path, count: int = 4) -> tuple[StepFolder, list[State]]:
    """Save a full step and deltas, each to the step before; return the folder and the states."""
    folder = StepFolder(tmp_path / "steps")
    state: State = {"w": torch.randn(64, 32).bfloat16(), "n": torch.tensor([1.0, float("nan"), float("inf"), -0.0])}
    states = [copy_state(state)[0]]
    folder.save_full(0, state, {})
    for step in range(1, count):
        state["w"][:, step] *= 1.5
        state["n"][0] += 1
        assert folder.save_delta(step, state, step - 1, states[-1]) is not None
        states.append(copy_state(state)[0])
    return folder, states


def test_nan_infinity_and_negative_zero_are_restored(tmp_path: Path) -> None:
    folder, states = saved_folder(tmp_path)
    for step, state in enumerate(states):
        require_equal(state, folder.restore(step))


def test_a_torn_step_and_the_steps_after_it_are_ignored(tmp_path: Path) -> None:
    folder, states = saved_folder(tmp_path)
    path = folder.files()[2].path
    data = path.read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert folder.steps() == [0, 1]
        with pytest.raises(IngotError):
            folder.restore(3)
    path.unlink()
    assert folder.steps() == [0, 1]
    with pytest.raises(UsageError, match="no step 2, to which step 3 is a delta"):
        folder.restore(3)
    require_equal(states[1], folder.restore(1))


def test_a_damaged_value_is_refused(tmp_path: Path) -> None:
    folder, _ = saved_folder(tmp_path)
    path = folder.files()[0].path
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(IngotError) as error:
        folder.restore(3)
    assert error.value.rule == "delta.base"


def test_names_that_no_step_has_are_ignored(tmp_path: Path) -> None:
    folder, _ = saved_folder(tmp_path, 2)
    for name in ("step-1.safetensors", "step-00000009.from-00000009.zt", "step-00000005.zt", "other"):
        (folder.folder / name).write_bytes(b"x")
    (folder.folder / ".step-00000005.safetensors.ingot-partial").mkdir()
    assert folder.steps() == [0, 1]
    assert list(folder.files()) == [0, 1]


def test_weights_of_which_every_bit_changes(tmp_path: Path) -> None:
    folder, states = saved_folder(tmp_path, 1)
    state = {"w": torch.empty(64, 32, dtype=torch.bfloat16), "n": torch.empty(4)}
    for value in state.values():
        value.view(torch.uint8).random_()
    path = folder.save_delta(1, state, 0, states[0])
    require_equal(state, folder.restore(1))
    assert path.stat().st_size < 64 * 32 * 2 + 4096


def test_weights_whose_tie_changes_are_saved_in_full(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    callback = ingot.hf.DeltaCheckpoint(folder)
    model = tiny_model(tied=True)
    state = TrainerState(global_step=0)
    callback.on_train_begin(TrainingArguments(tmp_path), state, TrainerControl(), model=model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    state.global_step = 1
    callback.on_step_end(TrainingArguments(tmp_path), state, TrainerControl(), model=model)
    require_equal(dict(model.state_dict()), StepFolder(folder).restore(1))
    assert StepFolder(folder).files()[1].parent is None


def test_divided_weights_are_refused(tmp_path: Path) -> None:
    callback = ingot.hf.DeltaCheckpoint(tmp_path / "steps")
    model = tiny_model().to("meta")
    with pytest.raises(UnsupportedError) as error:
        callback.on_train_begin(TrainingArguments(tmp_path), TrainerState(), TrainerControl(), model=model)
    assert error.value.rule == "steps.sharded"
    assert not (tmp_path / "steps").exists()


_PROGRAM = """
import sys, torch
from ingot.runtime.training.step_files import StepFolder, copy_state
folder, generator = StepFolder(sys.argv[1]), torch.Generator().manual_seed(0)
state = {"w": torch.zeros(512, 512, dtype=torch.bfloat16)}
folder.save_full(0, state, {})
for step in range(1, 10000):
    before, _ = copy_state(state)
    state["w"][:, step % 512] = step
    print(step, flush=True)
    folder.save_delta(step, state, step - 1, before) if step % 5 else folder.save_full(step, state, {})
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.013, 0.047, 0.111])
def test_every_step_before_a_kill_is_restored(tmp_path: Path, delay: float) -> None:
    folder = tmp_path / "steps"
    command = [sys.executable, "-c", _PROGRAM, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 12:
                break
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        begun = [12, *(int(line) for line in process.stdout.read().splitlines() if line)][-1]
    steps = StepFolder(folder).steps()
    assert steps in (list(range(begun)), list(range(begun + 1)))
    expected = torch.zeros(512, 512, dtype=torch.bfloat16)
    for step in steps:
        expected[:, step % 512] = step
        if step:
            require_equal({"w": expected}, StepFolder(folder).restore(step))


_TRAINING = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import ingot.hf
from tests.unit.runtime.test_delta_checkpoint import tiny_model, train
train(Path(sys.argv[1]), tiny_model(), ingot.hf.DeltaCheckpoint(Path(sys.argv[1]) / "steps", full_every=4), steps=5000)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_keeps_its_steps(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    folder = tmp_path / "steps"
    process = subprocess.Popen([sys.executable, "-c", _TRAINING, str(tmp_path), str(root)])
    deadline = time.monotonic() + 120
    while not (folder / "step-00000008.safetensors").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    steps = StepFolder(folder).steps()
    assert steps == list(range(len(steps)))
    assert len(steps) >= 9
    recorder = train(tmp_path / "again", tiny_model(), ingot.hf.DeltaCheckpoint(tmp_path / "other"), steps=8)
    for step, weights in recorder.steps.items():
        require_equal(weights, StepFolder(folder).restore(step))
