"""The page of `ingot report` in a browser, by WebDriver over HTTP; `make browser` where Debian's chromium is."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot

DRIVER = os.environ.get("INGOT_CHROMEDRIVER", "")
PICTURES = os.environ.get("INGOT_PICTURES", "")
pytestmark = pytest.mark.skipif(not DRIVER, reason="INGOT_CHROMEDRIVER names no chromedriver: make browser")
LAYERS, ROWS = 110, 992
TOO_WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Browser:
    """A session of a browser."""

    def __init__(self, address: str, dark: bool, width: int) -> None:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1200"]
        arguments += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        self.base = address
        made = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base = f"{address}/session/{made['sessionId']}"

    def ask(self, method: str, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self.base + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.ask("POST", "/execute/sync", {"script": script, "args": arguments})

    def element(self, css: str) -> str:
        return str(next(iter(self.ask("POST", "/element", {"using": "css selector", "value": css}).values())))

    def click(self, css: str) -> None:
        self.ask("POST", f"/element/{self.element(css)}/click", {})

    def type(self, css: str, text: str) -> None:
        self.ask("POST", f"/element/{self.element(css)}/value", {"text": text})

    def log(self, kind: str) -> list[dict[str, Any]]:
        return list(self.ask("POST", "/se/log", {"type": kind}))

    def picture(self, name: str) -> None:
        """Leave a picture of the whole page in the folder that INGOT_PICTURES names."""
        if PICTURES:
            size = self.run("return [document.body.scrollWidth, document.body.scrollHeight]")
            clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], 8000), "scale": 1}
            asked = {"cmd": "Page.captureScreenshot", "params": {"clip": clip, "captureBeyondViewport": True}}
            data = self.ask("POST", "/goog/cdp/execute", asked)["data"]
            (Path(PICTURES) / f"{name}.png").write_bytes(base64.b64decode(data))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("driver") / "log"
    process = subprocess.Popen([DRIVER, f"--port={port}", f"--log-path={log}"], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{address}/status", timeout=10):
                    break
            except OSError:
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a conversion of a thousand tensors with evaluations, and that of one checkpoint alone."""
    folder = tmp_path_factory.mktemp("pages")
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {"model.embed_tokens.weight": rng.standard_normal((512, 128), np.float32)}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{start}self_attn.{name}.weight"] = rng.standard_normal((128, 128), np.float32)
        for name, shape in (("gate_proj", (256, 128)), ("up_proj", (256, 128)), ("down_proj", (128, 256))):
            weights[f"{start}mlp.{name}.weight"] = rng.standard_normal(shape, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{start}{name}.weight"] = np.ones(128, np.float32)
    weights["lm_head.weight"] = rng.standard_normal((512, 128), np.float32)
    ingot.save(folder / "big.safetensors", weights)
    made = ingot.convert(folder / "big.safetensors", folder / "int4.zt", "int4")
    actions = [{"name": item.name, "action": item.action} for item in made.tensors]
    (folder / "convert.json").write_text(json.dumps({"tensors": actions}))
    for index, loss in enumerate((26.21, 26.62, 27.76)):
        told = {"model": f"int{8 - 2 * index}", "perplexity": loss, "reference_perplexity": 26.2, "kl": 0.01 * index}
        (folder / f"{index}.json").write_text(json.dumps(told))
    pages = {"pair": folder / "pair.html", "alone": folder / "alone.html"}
    evaluations = [folder / f"{index}.json" for index in range(3)]
    ingot.report(
        folder / "big.safetensors",
        folder / "int4.zt",
        out=pages["pair"],
        evaluations=evaluations,
        conversion=folder / "convert.json",
    )
    ingot.report(folder / "big.safetensors", out=pages["alone"])
    return pages


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 1280), (False, 420)])
@pytest.mark.parametrize("name", ["pair", "alone"])
def test_the_page_works_and_asks_for_nothing(
    driver: str, pages: dict[str, Path], name: str, dark: bool, width: int
) -> None:
    browser = Browser(driver, dark, width)
    try:
        browser.ask("POST", "/url", {"url": pages[name].as_uri()})
        browser.picture(f"{name}-{'dark' if dark else 'light'}-{width}")
        assert browser.run(TOO_WIDE) <= 0  # only charts and tables scroll, within themselves
        colour = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 384) == dark
        rows = (
            "return Array.from(document.querySelectorAll('#table tbody tr'), row => row.cells[arguments[0]].dataset.v)"
        )
        heads = browser.run("return Array.from(document.querySelectorAll('#table th'), head => head.textContent)")
        column = heads.index("bytes")
        browser.click(f"#table th:nth-child({column + 1}) button")
        sizes = list(map(int, browser.run(rows, column)))
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == ROWS
        browser.type(f"#table th:nth-child({column + 1}) button", "\ue007")  # by the keyboard
        sizes = list(map(int, browser.run(rows, column)))
        assert sizes == sorted(sizes)
        browser.type("#search", "MLP layers.7.")
        visible = (
            "return Array.from(document.querySelectorAll('#table tbody tr:not([hidden])'), row => row.textContent)"
        )
        shown = browser.run(visible)
        assert len(shown) == 3
        assert all("layers.7.mlp" in text for text in shown)
        assert browser.run("return document.getElementById('count').textContent") == f"3 of {ROWS} tensors"
        assert browser.run("return document.querySelectorAll('figure svg').length") > 20
        assert [entry for entry in browser.log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
        sent = [json.loads(entry["message"])["message"] for entry in browser.log("performance")]
        asked = [item["params"]["request"]["url"] for item in sent if item["method"] == "Network.requestWillBeSent"]
        assert asked == [pages[name].as_uri()]
    finally:
        browser.ask("DELETE", "")


def test_it_prints_within_the_page(driver: str, pages: dict[str, Path]) -> None:
    browser = Browser(driver, dark=True, width=794)  # A4
    try:
        features = [{"name": "prefers-color-scheme", "value": "light"}]
        params = {"media": "print", "features": features}
        browser.ask("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": params})
        browser.ask("POST", "/url", {"url": pages["pair"].as_uri()})
        browser.picture("pair-print")
        assert browser.run(TOO_WIDE) <= 0
    finally:
        browser.ask("DELETE", "")
