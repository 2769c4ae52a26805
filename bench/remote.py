"""From a web server of limited bandwidth to the first token: ``ingot.load_model(url)`` beside a download first.

    python bench/remote.py --json remote.json

The model has random weights and Qwen2.5-1.5B's shape (3.1 GB in bf16; ``--layers 4`` makes a small one). It is made in
a temporary folder that needs 8 GB (or in ``--folder``, once), and served from memory by a process of its own at
``--rate`` bytes a second for all requests together. Each way (those of ``--ways``) runs in a fresh process. Its seconds
are from the start of that process until the first token of a prompt of 16 is printed, imports included, and stand
beside those that the bytes take at that rate: the least that there is. They are the sum of three, as the server saw
them: before the first weights are asked for, while they travel, and after the last. ``cpu`` is the processor's time of
the whole process, ``read`` the bytes that travelled beside those of the files. huggingface_hub downloads from the same
server, as from the Hub, into an empty cache. tensorizer and run:ai's streamer take part where they are installed, or
lie in ``--peers DIR``::

    pip install --no-deps --target DIR tensorizer==2.12.1 libnacl redis boto3 botocore s3transfer jmespath \\
        python-dateutil six humanize runai-model-streamer==0.17.0 runai-model-streamer-s3==0.17.0
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

from load_model import RECIPE, make_source

COMMIT = "a" * 40
LITTLE = 1 << 17  # bytes of answers that are no weights
PROMPT = "ids = torch.arange(100, 116)[None]\nprint(int(model(ids).logits[0, -1].argmax()), flush=True)\n"
INGOT = "import sys, ingot\nmodel = ingot.load_model(sys.argv[1], keep_packed={packed})\nimport torch\n" + PROMPT
DOWNLOAD = (
    "import sys, torch, transformers, huggingface_hub\nfolder = huggingface_hub.snapshot_download(sys.argv[1])\n"
    "model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='auto')\n" + PROMPT
)
EMPTY = """
import io, json, os, sys, urllib.request, torch, transformers
settings = json.load(urllib.request.urlopen(sys.argv[1] + "config.json"))
config = transformers.AutoConfig.for_model(**settings)
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
"""
MADE = """
model.tie_weights()
model.model.rotary_emb = type(model.model.rotary_emb)(config)  # no weights of it are in the file
"""
TENSORIZER = (
    f"{EMPTY}import tensorizer\nmodel.to_empty(device='cpu')\n"
    "tensorizer.TensorDeserializer(sys.argv[1] + 'model.tensors', device='cpu').load_into_module(model)\n"
    f"{MADE}{PROMPT}"
)
RUNAI = (
    f"{EMPTY}from runai_model_streamer import SafetensorsStreamer\n"
    "with SafetensorsStreamer() as streamer:\n"
    "    streamer.stream_files(['s3://bucket/source/model.safetensors'], device='cpu')\n"
    "    weights = {name: tensor.clone() for name, tensor in streamer.get_tensors()}\n"
    f"model.load_state_dict(weights, strict=False, assign=True)\n{MADE}{PROMPT}"
)
PEERS = {"tensorizer": ("tensorizer", TENSORIZER), "runai_model_streamer": ("source", RUNAI)}
WAYS = {
    "huggingface_hub, then from_pretrained, bf16": ("source", DOWNLOAD),
    "ingot.load_model(url), bf16": ("source", INGOT.format(packed=None)),
    "ingot.load_model(url), INT4 decoded": ("int4", INGOT.format(packed=None)),
    "ingot.load_model(url), INT4 kept packed": ("int4", INGOT.format(packed=True)),
}
COLUMNS = ("GB", "least", "s", "ratio", "before", "travel", "after", "cpu", "read")


def make(root: Path, layers: int, peers: str) -> dict[str, tuple[str, str]]:
    """Make the folders to be served; return the ways there are."""
    import ingot

    if not (root / "int4").exists():
        (root / "source").mkdir(parents=True)
        make_source(root / "source", layers)
        (root / "int4.toml").write_text(RECIPE)
        ingot.convert(root / "source", root / "int4", recipe=root / "int4.toml")
    sys.path += [peers] if peers else []
    installed = {f"{name}, bf16": way for name, way in PEERS.items() if find_spec(name)}
    if "tensorizer, bf16" in installed and not (root / "tensorizer").exists():
        import tensorizer
        import transformers

        (root / "tensorizer").mkdir()
        shutil.copy(root / "source" / "config.json", root / "tensorizer")
        model = transformers.AutoModelForCausalLM.from_pretrained(root / "source", dtype="auto")
        serializer = tensorizer.TensorSerializer(root / "tensorizer" / "model.tensors")
        serializer.write_module(model)
        serializer.close()
    return {**WAYS, **installed}


def serve(root: Path, rate: float) -> None:
    """Serve the folders as a web server does, and as the Hub does; print the address."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.support.bucket import etag
    from tests.support.web import Request, WebServer

    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.glob("*/*") if path.is_file()}

    def hub(request: Request) -> tuple[int, dict[str, str], bytes]:
        """Answer for ``api/models/org/NAME/...`` and ``org/NAME/resolve/COMMIT/FILE``."""
        api, _, rest = request.key.rpartition("org/")
        name, what, *path = rest.split("/")
        inside = [key.partition("/")[2] for key in files if key.startswith(f"{name}/")]
        if not api:
            headers = {"ETag": f'"{name}-{path[-1]}"', "X-Repo-Commit": COMMIT}
            return (200, headers, files[f"{name}/{path[-1]}"]) if path[-1] in inside else (404, {}, b"")
        tree = [{"type": "file", "path": key, "size": len(files[f"{name}/{key}"]), "oid": "0" * 40} for key in inside]
        about = {"id": f"org/{name}", "sha": COMMIT, "siblings": [{"rfilename": key} for key in inside]}
        return 200, {"Content-Type": "application/json"}, json.dumps(tree if what == "tree" else about).encode()

    for data in files.values():
        etag(data)  # takes seconds, which are not those of who asks first
    with WebServer(files, listing=True, bucket="bucket") as server:
        server.rate = rate
        server.routes["api/models/"] = server.routes["org/"] = hub
        server.routes["bodies"] = lambda request: (200, {}, json.dumps(server.bodies).encode())
        print(server.url, flush=True)
        sys.stdin.read()


def first_token(url: str, folder: str, script: str, root: Path, peers: str) -> dict[str, float]:
    """Run one way; return the seconds to the first token, what they are made of, and the bytes that travelled."""
    hub = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    bucket = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    bucket |= {"AWS_DEFAULT_REGION": "us-east-1", "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}
    added = {"PYTHONPATH": peers} if peers and script in (TENSORIZER, RUNAI) else {}
    with tempfile.TemporaryDirectory(dir=root) as cache, tempfile.TemporaryFile() as errors:
        where = f"org/{folder}" if script is DOWNLOAD else f"{url}/{folder}/"
        command = [sys.executable, "-c", script, where]
        environment = {**os.environ, **hub, **bucket, **added, "HF_HOME": cache}
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        token = process.stdout.readline()
        there = time.monotonic()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        if process.returncode:
            errors.seek(0)
            sys.exit(errors.read()[-2000:].decode(errors="replace"))
    with urlopen(f"{url}/bodies") as answer:  # the clock is one for all processes
        bodies = [body for body in json.load(answer) if body[0] > began and body[1] < there]
    weights = [body for body in bodies if body[2] > LITTLE]
    first, last = min(body[0] for body in weights), max(body[1] for body in weights)
    return {
        "seconds": there - began,
        "before": first - began,
        "travel": last - first,
        "after": there - last,
        "cpu": used.ru_utime + used.ru_stime,
        "bytes": sum(body[2] for body in bodies),
        "token": int(token),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rate", type=float, default=100e6, help="bytes a second")
    parser.add_argument("--peers", default="", help="a folder with packages of peers")
    parser.add_argument("--folder", type=Path, help="where the model lies, or is made and left")
    parser.add_argument("--ways", nargs="+", default=[""], help="parts of the names of the ways to be measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.rate)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.folder or Path(folder), options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


def measure(root: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print a line for each way; return its figures."""
    ways = make(root, options.layers, options.peers)
    chosen = {way: what for way, what in ways.items() if any(part in way for part in options.ways)}
    results, tokens = {}, set()
    command = [sys.executable, __file__, "--serve", str(root), "--rate", str(options.rate)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        print(f"{options.rate / 1e6:.0f} MB/s, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        print(" " * 44, *(f"{name:>7}" for name in COLUMNS), flush=True)
        for way, (name, script) in chosen.items():
            size = sum(path.stat().st_size for path in (root / name).iterdir())
            found = first_token(url, name, script, root, options.peers)
            least = size / options.rate
            results[way] = {**found, "size": size, "least": least}
            tokens |= {found["token"]} if "bf16" in way else set()
            if len(tokens) > 1:
                sys.exit(f"{way}: another token")
            figures = (least, found["seconds"], found["seconds"] / least, found["before"], found["travel"])
            row = (size / 1e9, *figures, found["after"], found["cpu"], found["bytes"] / size)
            print(way.ljust(44), *(f"{value:7.2f}" for value in row), flush=True)
    finally:
        server.terminate()
        server.wait()
    return results


if __name__ == "__main__":
    main()
