"""The report as one HTML page, which opens from a file and loads nothing: text, tables, and interactive plots.

`contents.py` is what it says, `series.py` the numbers of its plots, `charts.py` the plots themselves (plotly's JSON);
`page.html` is a template of jinja2, `style.css` and `script.js` stand in it as they are, and so does plotly.js.
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
    """report.html in the folder that the findings are of; returns its path."""
    path = found.folder / NAME
    path.write_text(page(found), encoding="utf-8")
    return path


def page(found: Findings) -> str:
    """The page. Whatever a user wrote into a file is text in it, never markup."""
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
    """JSON that ends no script element. Numbers with five digits; none where there is no finite one."""
    return json.dumps(_rounded(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value
