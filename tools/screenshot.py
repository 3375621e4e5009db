"""Runs a notebook in a real JupyterLab in headless Chromium and takes pictures of it.

    python -m pip install playwright          # drives Debian's Chromium; downloads no browser
    CT_SIZE=tiny python tools/screenshot.py notebooks/02_train_transformer.ipynb out/

Leaves `out/top.png`, one `out/NN.png` a screen down to the end, and says which cells failed.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_lab(folder: Path, python: str) -> tuple[subprocess.Popen, str]:
    """Starts JupyterLab on loopback; returns the process and its address."""
    port = free_port()
    command = [python, "-m", "jupyter", "lab", "--no-browser", "--allow-root",
               "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token=",
               "--ServerApp.disable_check_xsrf=True", "--LabApp.news_url=None",
               f"--ServerApp.root_dir={folder}"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(120):
        try:
            urllib.request.urlopen(f"{url}/api", timeout=1)
            return process, url
        except OSError:
            time.sleep(0.5)
    raise SystemExit("JupyterLab did not start within a minute")


def main() -> int:
    """Runs all cells, waits until the kernel is idle, and takes the pictures."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the Python that has JupyterLab")
    parser.add_argument("--minutes", type=float, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    scratch = args.notebook.with_name(f"shot-{args.notebook.name}")
    shutil.copy(args.notebook, scratch)
    lab, url = start_lab(args.notebook.resolve().parent, args.python)
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM_ARGS)
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(f"{url}/lab/tree/{scratch.name}")
            page.wait_for_selector(".jp-Notebook", timeout=60_000)
            page.wait_for_timeout(8000)
            choose_kernel(page)
            page.wait_for_selector(
                '.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000
            )
            for _ in range(3):
                page.click(".lm-MenuBar-itemLabel >> text='Run'")
                page.click("text='Run All Cells'")
                page.wait_for_timeout(4000)
                if not choose_kernel(page):
                    break
            wait_until_done(page, args.minutes * 60)
            page.wait_for_timeout(8000)
            reload_tensorboard(page)
            take(page, args.out)
            failed = page.locator(
                ".jp-RenderedText[data-mime-type*=stderr] >> text=Traceback"
            ).count()
            print(f"cells with a traceback: {failed}")
            browser.close()
        return 1 if failed else 0
    finally:
        lab.terminate()
        lab.wait()
        scratch.unlink(missing_ok=True)


def choose_kernel(page) -> bool:
    """Accepts the question for a kernel, where JupyterLab asks it."""
    asked = page.locator(".jp-Dialog >> text='Select Kernel'").count() > 0
    if asked:
        page.click(".jp-Dialog button.jp-mod-accept")
        page.wait_for_timeout(4000)
    return asked


def wait_until_done(page, seconds: float) -> None:
    """Waits until the kernel has been idle at ten looks in a row: it is, briefly, between cells."""
    end, idle = time.monotonic() + seconds, 0
    page.wait_for_timeout(10_000)
    while time.monotonic() < end:
        busy = page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').count()
        idle = 0 if busy else idle + 1
        if idle == 10:
            return
        page.wait_for_timeout(500)
    raise SystemExit(f"still running after {seconds:.0f} s")


def reload_tensorboard(page) -> None:
    """Presses TensorBoard's round arrow, where a cell shows one, and picks the loss."""
    if page.locator("text='No' >> visible=true").count():
        page.locator("text='No' >> visible=true").first.click()  # Jupyter news
    if page.locator("iframe").count():
        page.locator("iframe").first.scroll_into_view_if_needed()
        button = page.frame_locator("iframe").first.locator("app-header-reload button")
        if button.count():
            button.first.click()
            page.wait_for_timeout(5000)
            tags = page.frame_locator("iframe").first.locator("input[placeholder*='Filter tags']")
            tags.first.fill("^loss")
            tags.first.press("Escape")
            page.wait_for_timeout(5000)


def take(page, out: Path) -> None:
    """One picture a screen, from the top of the notebook to its end."""
    scroll = "() => document.querySelector('.jp-WindowedPanel-outer')"
    page.evaluate(f"({scroll})().scrollTop = 0")
    page.wait_for_timeout(1500)
    page.screenshot(path=out / "top.png")
    height = page.evaluate(f"({scroll})().scrollHeight")
    for number, top in enumerate(range(0, int(height), 850)):
        page.evaluate(f"(t) => {{ ({scroll})().scrollTop = t }}", top)
        page.wait_for_timeout(1500)
        page.screenshot(path=out / f"{number:02}.png")


if __name__ == "__main__":
    sys.exit(main())
