"""Bytes and time of each step of a training run: ``ingot.hf.DeltaCheckpoint`` beside ``torch.save`` and deltatensors.

    python bench/delta_checkpoint.py --json steps.json

A Llama model of random weights is trained by transformers' ``Trainer`` with AdamW on random tokens, on the CPU. After
each step the same weights are saved by each program. The figures are those of the saves after the first one, which is
full for all. deltatensors uses int4, the default of its callback, which is not exact.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ingot.hf

Row = dict[str, Any]


class Timed(TrainerCallback):
    """Calls ``save`` with the model after each step, and records seconds and bytes."""

    def __init__(self, name: str, folder: Path, save: Callable[[Any, int], None]) -> None:
        self.name = name
        self.folder = folder
        self.save = save
        self.seconds: list[float] = []
        self.sizes: list[int] = []
        folder.mkdir()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        before = self._size()
        start = time.perf_counter()
        self.save(model, state.global_step)
        self.seconds.append(time.perf_counter() - start)
        self.sizes.append(self._size() - before)

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def row(self) -> Row:
        seconds, sizes = self.seconds[1:], self.sizes[1:]
        return {
            "program": self.name,
            "seconds per step": round(sum(seconds) / len(seconds), 4),
            "bytes per step": sum(sizes) // len(sizes),
        }


def model_of(hidden: int, layers: int, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def ingot_saver(folder: Path, against: str) -> Callable[[Any, int], None]:
    callback = ingot.hf.DeltaCheckpoint(folder, full_every=10**6, against=against)
    return lambda model, step: callback._save(step, model)


def deltatensors_saver(folder: Path) -> Callable[[Any, int], None]:
    import deltatensors

    previous: dict[str, torch.Tensor] = {}

    def save(model: Any, step: int) -> None:
        state = {name: value.float() for name, value in model.state_dict().items()}  # it does not take bf16
        if previous:
            deltatensors.save_delta(folder / f"{step}.wdelta", state, previous, strategy="int4", use_gpu=False)
        previous.update({name: value.clone() for name, value in state.items()})

    return save


def measure(dtype: torch.dtype, rate: float, steps: int, hidden: int, layers: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        savers = {
            "torch.save": lambda model, step: torch.save(model.state_dict(), root / "torch.save" / f"{step}.pt"),
            "ingot, to the step before": ingot_saver(root / "ingot, to the step before", "step"),
            "ingot, to the full step": ingot_saver(root / "ingot, to the full step", "base"),
        }
        try:
            savers["deltatensors"] = deltatensors_saver(root / "deltatensors")
        except ImportError:
            print("deltatensors is not installed: left out")
        timed = [Timed(name, root / name, save) for name, save in savers.items()]
        model = model_of(hidden, layers, dtype)
        tokens = torch.randint(4096, (steps * 2, 16), generator=torch.Generator().manual_seed(0))
        arguments = TrainingArguments(
            root / "trainer",
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=rate,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens]
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=timed).train()
        nbytes = sum(value.nbytes for value in model.state_dict().values())
        common = {"dtype": str(dtype).removeprefix("torch."), "learning rate": rate, "weights": nbytes}
        return [{**common, **item.row()} for item in timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for dtype, rate in ((torch.bfloat16, 1e-6), (torch.bfloat16, 1e-5), (torch.float32, 1e-5)):
        rows += measure(dtype, rate, arguments.steps, arguments.hidden, arguments.layers)
    for row in rows:
        print(row)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
