"""The page as a browser shows it: its values, its script's errors, its size and its requests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from shardwise.report.page import page
from shardwise.report.run import read_run
from tests.report.runs import folder_of_a_run, lines_of_a_run

CHROMIUM = shutil.which("chromium")
# CI installs it, and is not to pass without it.
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="chromium is not installed"
)
WATCH = """<script>window.wrong = [];
addEventListener("error", (event) => wrong.push(event.message));</script>"""
USE = """<script>
const root = document.documentElement, before = root.dataset.theme;
document.getElementById("theme").click();
const step = document.querySelector(".step");
step.querySelector("button").click();
const read = (key) => document.querySelector(`[data-chart="${key}"] .readout`).textContent;
const shown = read("tokens_per_second"), loss = read("loss");
const made = { changed: before !== root.dataset.theme, view: step.dataset.view,
  readout: shown, loss,
  slices: step.querySelectorAll(".slice").length,
  kinds: step.querySelectorAll("[data-kind]").length,
  planned: step.querySelectorAll("path.planned").length,
  wide: root.scrollWidth <= innerWidth, errors: wrong.join("; ") };
const list = document.body.appendChild(document.createElement("pre"));
list.id = "made";
list.textContent = Object.entries(made).map(([key, value]) => key + "=" + value).join("\\n");
</script></body>"""


def opened(path: Path, width: int) -> str:
    """The document after its scripts and ours have run; chromium's log must name no error."""
    ended = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--enable-logging=stderr", f"--user-data-dir={path.parent / 'profile'}"),
            *(f"--window-size={width},900", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in ended.stderr
    return ended.stdout


@needs_chromium
def test_a_browser_shows_the_values_of_both_runs_without_an_error(tmp_path: Path) -> None:
    runs = [
        read_run(folder_of_a_run(tmp_path / "one")),
        read_run(folder_of_a_run(tmp_path / "two", "optimizer.lr=3e-3")),
    ]
    text = page(runs).replace("<body>", f"<body>{WATCH}").replace("</body>", USE)
    path = tmp_path / "page.html"
    path.write_text(text, "utf-8")
    document = opened(path, width=500)
    state = dict(
        line.split("=", 1)
        for line in re.findall(r'id="made">(.*?)</pre>', document, re.DOTALL)[0].split("\n")
    )
    start, stop = map(float, state.pop("view").split())
    assert stop - start == pytest.approx(0.075)  # half of the step
    assert state == {
        "changed": "true",
        "readout": "step 8 · one 2008 · two 2008",
        "loss": "step 8 · "
        + " · ".join(
            f"{name}: each step 2 · {name}: running mean 2 · {name}: validation 3.25 at 4"
            for name in ("one", "two")
        ),
        "slices": "4",  # the first ended before what is shown
        "kinds": "6",
        "planned": "1",
        "wide": "true",
        "errors": "",
    }
    assert cells(document, "optimizer.lr") == ["0.01", "0.003"]
    assert cells(document, "gradient buckets") == ["50 B", "40 B", "-20%"]
    assert (
        cells(document, "tokens/s beside the plan") == ["1,000 planned, 2,000 measured (+100%)"] * 2
    )
    assert cells(document, "MFU") == ["not known without --machines"] * 2
    assert cells(document, "validation loss") == ["3.2500", "3.2500"]
    assert document.index("Differences of the recipes") < document.index("Results")
    assert document.count('data-curve="two: validation"') == 1
    assert document.count('class="mark"') == 5 * 2 * 2  # charts, runs, a restart and a save


def cells(document: str, first: str) -> list[str]:
    """The cells of the row that begins with ``first``, in the first table that has it."""
    row = document[document.index(f"<td>{first}</td>") :].partition("</tr>")[0]
    return [unescape(cell) for cell in re.findall("<td>(.*?)</td>", row)[1:]]


def test_a_page_asks_for_nothing_and_ends_where_it_says(tmp_path: Path) -> None:
    text = page([read_run(folder_of_a_run(tmp_path / "run"))])
    assert "default-src 'none'" in text
    assert re.findall(r"(?:src|href)=|url\(['\"]?http|@import|fetch\(", text) == []
    assert text.count("</script>") == 2  # a sample that holds one does not end the data


def test_a_page_of_two_long_runs_has_less_than_two_megabytes(tmp_path: Path) -> None:
    run = read_run(folder_of_a_run(tmp_path / "run"))
    assert run.step is not None
    moments = run.step["moments"] * 1_000
    long = replace(run, lines=tuple(lines_of_a_run(20_000)), step={**run.step, "moments": moments})
    assert len(page([long, long]).encode()) < 2_000_000


def test_a_folder_with_a_log_alone_makes_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"record": "finished", "time": 1.0}\n', "utf-8")
    text = page([read_run(tmp_path)])
    for sentence in ("step.json is missing", "names no units", "recipe.yaml is missing"):
        assert sentence in text
