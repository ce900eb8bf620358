"""The page of one or two runs: one file, which asks for nothing else.

The script draws in the browser, because a picture that is scaled to a phone has letters that nobody
can read. No library does it: plotly's script has 4.8 MB, and bokeh's 1.3 MB and no nested lanes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from shardwise.report import facts
from shardwise.report.one_step import drawn
from shardwise.report.run import Run
from shardwise.report.series import charts

HERE = Path(__file__).parent


def page(runs: Sequence[Run]) -> str:
    """The HTML of a report; pure but for its own template."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((HERE / "page.html").read_text("utf-8"))
    steps = [drawn(run.step) for run in runs]
    return template.render(
        names=[run.name for run in runs],
        style=(HERE / "page.css").read_text("utf-8"),
        script=(HERE / "page.js").read_text("utf-8"),
        data=_embedded({"charts": charts(runs), "steps": steps}),
        steps=steps,
        differences=facts.differences(runs),
        results=facts.results(runs),
        recipe=facts.recipe_rows(runs),
        units=[facts.unit_rows(run) for run in runs],
        memory=[facts.memory_rows(run) for run in runs],
        samples=[facts.samples(run) for run in runs],
        warnings=[facts.warnings(run) for run in runs],
    )


def _embedded(data: Any) -> str:
    """JSON that cannot end the element in which it stands."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")
