"""The picture of a trace's page: trains on eight ranks, writes the page, and takes it with a browser.

    python docs/timeline_picture.py [TRACED_RUN]          rewrites docs/images/timeline.png

A run that is traced already is taken as it is.  Needs an MPI for eight ranks, playwright, and a Chromium.  A picture of
a real run is never twice the same, so nothing checks that it is current.
"""

from __future__ import annotations

import base64
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TRAIN = "--dp 2 --tp 2 --pp 2 --microbatches 4 --steps 20 --trace --trace-ops 1".split()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Train, trace, take the picture."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else traced_run(Path(folder))
        html = Path(folder) / "trace.html"
        subprocess.run([sys.executable, "-m", "mpitrain", "trace", str(run), "--html", str(html)], check=True, cwd=ROOT)
        take(html, ROOT / "docs" / "images" / "timeline.png")


def traced_run(folder: Path) -> Path:
    """The folder of a short run on eight ranks."""
    words = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--run", str(folder / "run"), *TRAIN]
    subprocess.run(["mpirun", "-n", "8", *words], check=True, cwd=folder)
    return folder / "run"


def take(html: Path, target: Path) -> None:
    """A picture of the timeline in the step of middle length, with its longest wait selected."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=sandbox)
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.goto(html.as_uri())
        page.wait_for_function("performance.getEntriesByName('drawn').length")
        page.evaluate("byId('title').textContent = 'runs/a'; select(longestWaits(1)[0]); drawAll()")
        shot = page.locator("#timeline").screenshot()
        pixels = pixels_of(browser.new_page(), shot)
        browser.close()
    target.write_bytes(with_palette(pixels))


def pixels_of(page: Any, shot: bytes) -> np.ndarray:
    """(height, width, 3) colours of a picture; the browser unpacks it."""
    height, width, text = page.evaluate(
        """async (text) => {
            const picture = await createImageBitmap(await (await fetch("data:image/png;base64," + text)).blob());
            const pen = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
            pen.drawImage(picture, 0, 0);
            const bytes = pen.getImageData(0, 0, picture.width, picture.height).data;
            let letters = "";
            for (let i = 0; i < bytes.length; i += 4096) letters += String.fromCharCode(...bytes.subarray(i, i + 4096));
            return [picture.height, picture.width, btoa(letters)];
        }""",
        base64.b64encode(shot).decode(),
    )
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width, 4)[..., :3]


def with_palette(pixels: np.ndarray) -> bytes:
    """A PNG with the 256 most frequent colours; each other one becomes the nearest of them."""
    height, width, _ = pixels.shape
    colours, place, count = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(-count)[:256]]
    far = ((colours[:, None].astype(int) - palette[None].astype(int)) ** 2).sum(axis=-1)
    rows = far.argmin(axis=1).astype(np.uint8)[place.reshape(-1)].reshape(height, width)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # each begins with its filter: none
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    packed = [struct.pack(">I", len(p)) + name + p + struct.pack(">I", zlib.crc32(name + p)) for name, p in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


if __name__ == "__main__":
    main()
