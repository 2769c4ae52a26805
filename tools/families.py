"""Compare tiny models of each family with llama.cpp, and write docs/families.md: ``make families``.

Each model has two to five layers, a hidden size of 64 and random weights. It is converted to GGUF in f32, f16 and
q4_0. llama.cpp (the package xllamacpp, found through PYTHONPATH) computes the logits of 16 tokens, and transformers the
logits of the f32 model. The table states the largest difference. For q4_0 it states only that llama.cpp loads the file.
The way back is compared tensor by tensor.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import ingot
from ingot.errors import IngotError
from ingot.translate.families import FAMILIES, refusal_reasons
from ingot.translate.mlx_families import VERSION as MLX_VERSION
from ingot.translate.mlx_families import module_of
from ingot.translate.projectors import PROJECTORS
from tests.support.llama_cpp import IMAGES, LOGITS, run_jobs
from tests.support.tiny_images import IMAGE_MODELS, embeddings, random_image, write_image_model
from tests.support.tiny_models import ENCODERS, SETTINGS, write_model
from tests.support.tiny_wrappers import WRAPPERS, write_wrapper

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
PROMPT = [5, 9, 2, 30, 11, 7, 40, 200, 256, 31, 77, 3, 150, 99, 8, 61]
TOLERANCE = 0.01
WIDE = ("conv", "A_log", "router", "gate.weight", "gate.wg", "position", "norms", "shared_expert_gate")
"""Parts of the names of matrices that GGUF files keep in f32."""
IMAGE_VARIANTS = {"f32": None, "f16": "f16", "bf16": "bf16", "q8_0": "q8_0"}
VARIANTS = {"f32": None, "f16": "f16", "q4_0": "q4_0"}


def outputs(model: Any) -> Any:
    """Return the logits, or the hidden states of a model without a head, f32 [tokens, values]."""
    with torch.inference_mode():
        result = model(torch.tensor([PROMPT]))
    return (result.logits if hasattr(result, "logits") else result.last_hidden_state)[0].float().numpy()


def rounded(model: Any) -> Any:
    """Return the model with its matrices rounded to f16, except those that GGUF files keep in f32."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not any(word in name for word in WIDE):
            parameter.data.copy_(parameter.data.half().float())
    return model


def compare_back(source: Path, file: Path, folder: Path) -> str:
    """Return how the tensors differ that come back from a GGUF file."""
    try:
        ingot.convert(file, folder, format="safetensors")
    except IngotError as error:
        return f"refused: {error.message[:80]}"
    with ingot.open(source) as before, ingot.open(folder) as after:
        names = [name for name in before if not name.startswith("pooler.")]
        if set(after) != set(names):
            return "other tensors"
        differing = [name for name in names if not np.array_equal(before[name].numpy(), after[name].numpy())]
    return f"last bits of {len(differing)}" if differing else "same bits"


def compare_text_model(exact: Any, file: Path, folder: Path) -> str:
    """Return how the logits differ of the text model that comes back from a GGUF file."""
    try:
        ingot.convert(file, folder, format="safetensors")
    except IngotError as error:
        return f"refused: {error.message[:80]}"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    distance = float(np.abs(outputs(model) - exact).max())
    return "same logits" if distance < 1e-4 else f"{distance:.4f}"


def sweep(model_types: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return the cells of the table by model type."""
    rows: dict[str, dict[str, str]] = {}
    expected: dict[str, Any] = {}
    jobs = []
    for model_type in model_types:
        source = folder / model_type
        model = (write_wrapper if model_type in WRAPPERS else write_model)(model_type, source)
        exact = outputs(model)
        expected[model_type] = {"f32": exact, "q4_0": exact, "f16": outputs(rounded(model))}
        rows[model_type] = {}
        part = "text" if model_type in WRAPPERS else None
        for variant, recipe in VARIANTS.items():
            file = folder / f"{model_type}.{variant}.gguf"
            try:
                ingot.convert(source, file, recipe, part=part)
            except IngotError as error:
                rows[model_type][variant] = f"refused: {error.message[:80]}"
                continue
            jobs.append(
                {
                    "path": str(file), "out": f"{file}.npy", "tokens": PROMPT, "embeddings": model_type in ENCODERS,
                }
            )  # fmt: skip
        file, back = folder / f"{model_type}.f32.gguf", folder / f"{model_type}-back"
        if model_type in WRAPPERS:
            rows[model_type]["back"] = compare_text_model(exact, file, back)
        else:
            rows[model_type]["back"] = compare_back(source, file, back)
    errors = run_jobs(LOGITS, jobs, folder)
    for model_type, cells in rows.items():
        for variant in VARIANTS:
            path = folder / f"{model_type}.{variant}.gguf"
            if str(path) not in errors:
                continue
            if errors[str(path)]:
                cells[variant] = errors[str(path)][:300]
                continue
            wanted = expected[model_type][variant]
            distance = float(np.abs(np.load(f"{path}.npy")[:, : wanted.shape[1]] - wanted).max())
            cells[variant] = "loads" if variant == "q4_0" else f"{distance:.4f}"
    return rows


def sweep_images(names: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """Return the cells of the table of vision models by name: differences as shares of the largest value."""
    rows: dict[str, dict[str, str]] = {}
    expected: dict[str, Any] = {}
    jobs = []
    for name in names:
        source, stem = folder / f"images-{name}", name.replace("/", "-")
        model = write_image_model(name, source)
        image = random_image(name)
        expected[name] = embeddings(name, model, image)
        np.save(folder / f"{stem}.image.npy", image)
        ingot.convert(source, folder / f"{stem}.text.gguf", part="text")
        rows[name] = {}
        for variant, recipe in IMAGE_VARIANTS.items():
            file = folder / f"{stem}.{variant}.mmproj.gguf"
            ingot.convert(source, file, recipe, part="mmproj")
            paths = {"path": f"{stem}.text.gguf", "image": f"{stem}.image.npy", "out": f"{file.name}.npy"}
            jobs.append({"mmproj": str(file), **{key: str(folder / path) for key, path in paths.items()}})
    errors = run_jobs(IMAGES, jobs, folder)
    for name, cells in rows.items():
        for variant in IMAGE_VARIANTS:
            path = str(folder / f"{name.replace('/', '-')}.{variant}.mmproj.gguf")
            if errors[path]:
                cells[variant] = errors[path][:300]
                continue
            distance = np.abs(np.load(f"{path}.npy") - expected[name]).max() / np.abs(expected[name]).max()
            cells[variant] = f"{float(distance):.4f}"
    return rows


def text_type(model_type: str) -> str:
    """Return the model type of the text model in a model of several parts."""
    settings = WRAPPERS[model_type].text
    default = type(transformers.AutoConfig.for_model(model_type))().text_config.model_type
    return str(settings.get("model_type", default))


def row(model_type: str, arch: str, cells: dict[str, str]) -> str:
    """Return a line of the table."""
    values = " | ".join(cells.get(key, "") for key in (*VARIANTS, "back"))
    return f"| `{model_type}` | `{arch}` | {values} | {mlx_module(model_type)} |"


def mlx_module(model_type: str) -> str:
    """Return the module of mlx_lm that reads a family; "none" if mlx_lm lists none."""
    module = module_of(model_type)
    return "none" if module is None else f"`{module}`"


def page(rows: dict[str, dict[str, str]], images: dict[str, dict[str, str]]) -> str:
    """Return the text of docs/families.md."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "gguf", "xllamacpp"))
    measured = f"Measured on {datetime.now(UTC):%d %B %Y} with {packages}."
    lines = [
        "# Families of models in GGUF",
        "",
        "`make families` writes this page. For each family it saves a tiny random model with transformers, converts it",
        "to GGUF and compares the logits of 16 tokens with llama.cpp's. The numbers are the largest differences.",
        "For f16, transformers computes with matrices that are rounded to f16. In the column q4_0, llama.cpp loads the",
        "file. The column back compares the tensors that come back from the f32 file. The last column names the module",
        f"of mlx_lm {MLX_VERSION} that reads the family, by mlx_lm's own list. `tests/interop/test_mlx_families.py`",
        "compares tensors and logits of some of the modules.",
        "",
        measured,
        "",
        "| family | llama.cpp | f32 | f16 | q4_0 | back | mlx_lm |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model_type, cells in sorted(rows.items()):
        if model_type not in WRAPPERS:
            lines.append(row(model_type, FAMILIES[model_type].arch, cells))
    lines += [
        "",
        "## Models of several parts",
        "",
        "With `--part text`, the text model of each model becomes a GGUF file. The column back compares the logits of",
        "the text model that comes back, which transformers loads as a model of its own.",
        "",
        "| model | llama.cpp | f32 | f16 | q4_0 | back | mlx_lm |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        row(name, FAMILIES[text_type(name)].arch, cells) for name, cells in sorted(rows.items()) if name in WRAPPERS
    ]
    lines += [
        "",
        "## Vision models",
        "",
        "With `--part mmproj`, the vision model and its projector become a file for llama.cpp's `--mmproj`. llama.cpp",
        "and transformers compute the embeddings of one random image. The numbers are the largest differences as",
        "shares of the largest value. For Llama 4, llama.cpp orders the embeddings by columns instead of rows.",
        "",
        "| model | projector | f32 | f16 | bf16 | q8_0 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, cells in sorted(images.items()):
        values = " | ".join(cells[variant] for variant in IMAGE_VARIANTS)
        lines.append(f"| `{name}` | `{PROJECTORS[name].projector}` | {values} |")
    lines += ["", "## Refused by name", "", "| family | reason |", "| --- | --- |"]
    lines += [f"| `{model_type}` | {reason} |" for model_type, reason in sorted(refusal_reasons().items())]
    lines += [
        "",
        "Every other family is refused too: Ingot has no record of it.",
        "[A family of models](developing/family.md) shows how to add one.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Sweep the families that the command line names, or all of them and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", choices=[*SETTINGS, *WRAPPERS, []])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = arguments.families or [*SETTINGS, *WRAPPERS]
        rows = sweep(names, Path(folder))
        chosen = [name for name in IMAGE_MODELS if name.partition("/")[0] in names]
        images = sweep_images(chosen, Path(folder))
    for model_type, cells in [*rows.items(), *images.items()]:
        print(model_type, cells)
    if not arguments.families:
        PAGE.write_text(page(rows, images))
    failed = [name for name, cells in rows.items() if not is_close(cells)]
    failed += [name for name, cells in images.items() if not is_close({**cells, "q4_0": "loads"})]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(rows)} families differ: {', '.join(failed)}")


def is_close(cells: dict[str, str]) -> bool:
    """Return whether llama.cpp loads all files of a family and agrees in f32 and f16."""
    try:
        return cells["q4_0"] == "loads" and all(float(cells[key]) <= TOLERANCE for key in ("f32", "f16"))
    except (KeyError, ValueError):
        return False


if __name__ == "__main__":
    main()
