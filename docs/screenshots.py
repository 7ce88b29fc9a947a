"""Take the pictures of docs/images: MLflow's pages of two runs, and ttrain's own.

Needs Chromium and the test extras.

`python docs/screenshots.py` makes two tiny runs in a temporary home; `--home artifacts` takes the
two newest of a home.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser import Browser  # noqa: E402
from support.pipeline_home import Cli, write_corpus  # noqa: E402

SMOOTH = (
    "pretrain.tokens=61440",
    "sft.epochs=6",
    "lora.epochs=3",
    "runtime.log_every_steps=1",
    "runtime.sample_every_steps=20",
)
# Of the second run: other models from the base on.
CHANGED = ("model.layers=3", "sft.epochs=8")
LABELS = ("--note", "Deeper, longer SFT")
IMAGES = ROOT / "docs" / "images"
# MLflow opens its chat over the page the first time, and greets with what is not about training.
QUIET = {
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
    "mlflow.assistant.panelOpen_v1": "false",
    "mlflow.workflowType_v1": '"machine_learning"',
}
HIDE = """document.head.append(
    Object.assign(document.createElement('style'), {textContent: '%s {display: none}'})
)"""
TOOLS = "[data-assistant-ui], [aria-label*=Assistant], .modebar"
TABLE = "document.querySelector('.ag-root-wrapper')"
ROWS = "document.querySelector('.ag-center-cols-container')"
CHARTS = "document.querySelector('.js-plotly-plot')"
MAIN = "document.querySelector('main')"
# Of a report: the cards, the first two curves, and the answers to the last two prompts.
CROP = """
const hide = part => part.style.display = 'none';
document.querySelectorAll('nav, section > details').forEach(part => part.remove());
for (const section of document.querySelectorAll('section')) {
  const heading = section.querySelector('h2').textContent;
  const parts = [...section.children].slice(1);
  if (heading == 'Curves') parts.slice(2).forEach(hide);
  else if (heading == 'Samples') parts.slice(0, -4).forEach(hide);
  else hide(section);
  [...section.querySelectorAll('figure')].slice(2).forEach(hide);
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--home", type=Path, help="a home with two runs; without it two tiny ones are made"
    )
    home = parser.parse_args().home
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        cli = Cli(home.resolve() if home else Path(folder) / "home", Path(folder) / "data")
        write_corpus(cli.data)
        if not home:
            for labels, changed in (((), ()), (LABELS, CHANGED)):  # without the time limit of tests
                command = cli.command(
                    "pipeline", "run", "full", "--engine", "none", *labels, *SMOOTH, *changed
                )
                subprocess.run(command, env=cli.environment, cwd=cli.data, check=True)
        runs = [run["run"] for run in cli.runs() if run["outcome"] == "completed"][:2][::-1]
        take_of_mlflow(cli, runs)
        take_of_pages(cli, runs, Path(folder))
    for path in sorted(IMAGES.glob("*.png")):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size // 1000} kB")


def take_of_mlflow(cli: Cli, runs: list[str]) -> None:
    """The runs' table and curves, MLflow's comparison, the page of a run; without toolbars."""
    with served(cli, runs) as pages, Browser(width=1600, height=620) as browser:

        def go(url: str, ready: str, click: str = "") -> None:
            browser.open("about:blank")  # else MLflow changes the view, not the page
            browser.open(url)
            browser.wait_for(ready)
            browser.evaluate(click or "0")
            browser.evaluate(HIDE % TOOLS)
            browser.settle()

        browser.open(pages["table"].partition("#")[0])
        for name, value in QUIET.items():
            browser.evaluate(f"localStorage.setItem({json.dumps(name)}, {json.dumps(value)})")
        go(
            pages["table"],
            "document.querySelectorAll('[role=gridcell][col-id*=\"eval/\"]').length > 1",
        )
        save(browser, "mlflow-runs.png", TABLE, ROWS)
        browser.resize(1500, 1150)
        go(pages["curves"], "document.querySelectorAll('.js-plotly-plot .lines').length > 3")
        save(
            browser,
            "mlflow-curves.png",
            f"{CHARTS}.closest('[style*=grid], [class*=grid]') || {CHARTS}",
        )
        browser.resize(1500, 1700)
        switches = "document.querySelectorAll('button[role=switch]')"
        go(pages["url"], f"{switches}.length > 1", f"{switches}.forEach(one => one.click())")
        save(browser, "mlflow-compare.png", MAIN)
        browser.resize(1500, 1000)
        more = "[...document.querySelectorAll('button')].find(one => one.innerText == 'Show more')"
        go(addresses(cli, runs[-1:])["url"], f"Boolean({more})", f"{more}.click()")
        save(browser, "mlflow-run.png", MAIN)


def save(browser: Browser, name: str, element: str, last: str = "") -> None:
    """Save what the window shows of an element, down to the end of the last one."""
    bounds = (
        f"[[{element}, {last or element}].map(one => one.getBoundingClientRect())]"
        ".map(([top, end]) => [top.x, top.y, Math.min(top.right, innerWidth) - top.x, "
        "Math.min(end.bottom, innerHeight) - top.y])[0]"
    )
    clip = dict(zip(("x", "y", "width", "height"), browser.evaluate(bounds), strict=True))
    picture = browser.send("Page.captureScreenshot", format="png", clip={**clip, "scale": 1})
    (IMAGES / name).write_bytes(base64.b64decode(picture["data"]))


def take_of_pages(cli: Cli, runs: list[str], folder: Path) -> None:
    """The report of a run, cropped, by day and in the dark, and a comparison."""
    report, compared = folder / "report.html", folder / "compare.html"
    cli("report", runs[0], "--out", str(report), settings=False)
    cli("compare", *runs, "--html", str(compared), settings=False)
    shots = (
        (report, "report-dark.png", 1080, "dark"),
        (report, "report-light.png", 1080, "light"),
        (compared, "compare.png", 1000, "light"),
    )
    for page, name, height, scheme in shots:
        with Browser(width=1200, height=height) as browser:
            browser.prefer(scheme)
            browser.open(page.as_uri())
            if page == report:
                browser.evaluate(CROP)
            browser.settle()
            (IMAGES / name).write_bytes(browser.picture())


@contextmanager
def served(cli: Cli, runs: list[str]) -> Iterator[dict[str, Any]]:
    """The addresses that `ttrain up` names, while it serves them."""
    try:
        yield addresses(cli, runs)
    finally:
        cli("down", settings=False)


def addresses(cli: Cli, runs: list[str]) -> dict[str, Any]:
    """The addresses that `ttrain up` names; it starts the servers unless they run."""
    output = cli(
        "up", *runs, "--json", settings=False
    )  # with what it says while it starts the servers
    found: dict[str, Any] = json.loads(output[output.index("{") : output.rindex("}") + 1])
    return found


if __name__ == "__main__":
    main()
