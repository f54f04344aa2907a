"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };

function layoutOf(given, height) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, soft] = ["--ink", "--line", "--soft"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zeroline: false, linecolor: line, automargin: true };
  return {
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
    height,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 56, r: 12, t: 28, b: given.showlegend === false ? 48 : narrow.matches ? 120 : 84 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
    hovermode: "closest",
    ...given,
    xaxis: { ...axis, ...given.xaxis, title: { standoff: 8, ...given.xaxis.title } },
    yaxis: { ...axis, ...given.yaxis },
  };
}

function curve(row, axis) {
  const x = row[axis.of];
  const line = { color: row.color, dash: row.dash, width: 2 };
  const mode = x.length > 12 ? "lines" : "lines+markers";
  const hover = "%{y:.4g} at %{x}<extra>%{fullData.name}</extra>";
  const own = { x, y: row.y, name: row.name, legendgroup: row.name, mode, line, hovertemplate: hover };
  if (!row.std || !row.std.some((std) => std > 0)) return [own];
  const upper = row.y.map((y, i) => y + row.std[i]);
  const lower = row.y.map((y, i) => y - row.std[i]);
  const band = {
    x: [...x, ...[...x].reverse()], y: [...upper, ...lower.reverse()], fill: "toself", fillcolor: row.color + "26",
    line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: row.name,
  };
  return [band, own];
}

function figureOf(id) {
  const chart = data[id];
  if (chart.kind === "plotly") return [chart.traces, chart.layout];
  const [metric, place] = [...document.querySelectorAll(`select[data-chart="${id}"]`)].map((select) => select.selectedIndex);
  const axis = chart.axes[place];
  const title = Object.keys(chart.metrics)[metric];
  const thin = title !== chart.chosen ? [] : chart.others.map((row) => ({
    x: row[axis.of], y: row.y, name: row.name, legendgroup: row.name, showlegend: false, mode: "lines",
    opacity: 0.3, line: { color: row.color, width: 1 }, hovertemplate: `%{y:.4g} at %{x}<extra>${row.name} ${row.point}</extra>`,
  }));
  const traces = [...thin, ...chart.metrics[title].flatMap((row) => curve(row, axis))];
  return [traces, { xaxis: { title: { text: axis.title } }, yaxis: { title: { text: title } } }];
}

function draw(id) {
  const [traces, layout] = figureOf(id);
  return Plotly.react(id, traces, layoutOf(layout, document.getElementById(id).clientHeight), config);
}

// plotly interprets markup: names from files are escaped
for (const chart of Object.values(data)) {
  for (const row of [...(chart.traces ?? []), ...(chart.others ?? []), ...Object.values(chart.metrics ?? {}).flat()]) {
    for (const key of ["name", "point"]) if (row[key]) row[key] = row[key].replaceAll("<", "&lt;");
  }
}
const ids = Object.keys(data);
const drawAll = () => Promise.all(ids.map(draw));
dark.addEventListener("change", drawAll);
narrow.addEventListener("change", drawAll);
document.addEventListener("change", (event) => { if (event.target.dataset.chart) draw(event.target.dataset.chart); });
drawAll().then(() => { document.documentElement.dataset.drawn = ids.length; });
