"""The report as one self-contained HTML page: text, tables, and interactive plots.

`contents.py` creates texts and tables, `series.py` the numbers of plots, `charts.py` the plots (plotly's JSON).
`page.html` is a jinja2 template that includes `style.css`, `script.js` and plotly.js.
"""

import json
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from rayfl.results.findings import Findings
from rayfl.results.page.charts import charts_of
from rayfl.results.page.contents import contents_of

NAME = "report.html"


def write_page(found: Findings) -> Path:
    """Write report.html into the folder of the findings. Return its path."""
    path = found.folder / NAME
    path.write_text(page(found), encoding="utf-8")
    return path


def page(found: Findings) -> str:
    """Return the page. Texts of users are escaped."""
    from plotly.offline import get_plotlyjs

    texts = {
        name: files("rayfl.results.page").joinpath(name).read_text("utf-8")
        for name in ("page.html", "style.css", "script.js")
    }
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    charts = charts_of(found)
    return template.from_string(texts["page.html"]).render(
        contents_of(found),
        charts=[chart.described for chart in charts],
        data=_in_script({chart.id: chart.data for chart in charts}),
        style=texts["style.css"],
        script=texts["script.js"],
        plotly=get_plotlyjs(),
    )


def _in_script(value: object) -> str:
    """Return JSON that cannot end a script element. Numbers have five digits; infinite ones and NaN become null."""
    return json.dumps(_rounded(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
