// Loss curves, with a record's published one under its own recipe.

import { groupSeries, isShown, legend } from "./curves.js";
import { el } from "./dom.js";
import { domainOf, lineChart } from "./lines.js";
import { known, loss, trimmed } from "./numbers.js";
import { choice, runsOf } from "./parts.js";
import { setOtherwise } from "./published.js";
import { AXES } from "./scales.js";

/** @type {Draw} */
export function lossSection(data, state, box, redraw) {
  if (!data.runs.length) return;
  const axis = AXES[state.axis];
  const training = state.curve === "train";
  const series = groupSeries(data, state, (run) => ({ at: run[state.curve], values: run[state.curve].loss }));
  /** @type {Band[]} */
  const bands = [];
  // Published times are those of another machine: only tokens and steps can be laid over.
  const column = axis.column === "tokens" ? "tokens" : "step";
  const overlaid = training || axis.isTime ? [] : data.published;
  for (const { record, group, points } of overlaid) {
    if (!isShown(state, group)) continue;
    const color = "var(--ink)";
    const mean = points.map((point) => ({ x: point[column], y: point.mean }));
    series.push({ label: `record ${record}, published`, color, dash: "5 4", width: 1.6, points: mean });
    const spread = points.flatMap((point) => (known(point.std)
      ? [{ x: point[column], low: point.mean - 2 * point.std, high: point.mean + 2 * point.std }] : []));
    bands.push({ color, points: spread });
  }
  const lines = known(data.target) ? [{ y: data.target, text: `target ${data.target}` }] : [];
  const stretch = Math.max(...data.runs.map((run) => run.train.stretch[0] || 1));
  const averaged = training && stretch > 1 ? `Each point is the mean of ${stretch} steps. ` : "";
  const seeded = data.groups.some((_, i) => runsOf(data, i).length > 1);
  const dashed = overlaid.length ? "dashed: published mean, band ± 2 standard deviations" : "";
  const unlike = overlaid.map((record) => setOtherwise(data, record)).join("");
  box.append(
    el("div", { class: "controls" },
      choice(state, "curve", "Which loss", { val: "Validation", train: "Training" }, redraw),
      choice(state, "range", "Range of losses", { detail: "Detail", whole: "Whole" }, redraw)),
    legend(data, state, redraw, dashed),
    lineChart(el("div", { class: "chart", id: "loss-chart" }), {
      series, bands, lines, label: `${training ? "Training" : "Validation"} loss over ${axis.noun}`,
      xFormat: axis.format, xIsTime: axis.isTime, yFormat: (value) => trimmed(value.toFixed(3)), tipFormat: loss,
      yDomain: state.range === "detail" ? closeUp(series, lines) : null,
    }),
    el("p", { class: "small" }, averaged,
      seeded ? "Thin lines are single seeds, thick ones their mean over the steps all seeds have." : "", unlike));
}

/** From the best loss up to where the slowest curve stands after an eighth of its way.
 * @type {(series: Series[], lines: Line[]) => [low: number, high: number]} */
function closeUp(series, lines) {
  const late = series.map(({ points }) => {
    const later = points.filter(({ x }) => x >= points[points.length - 1].x / 8);
    return later.length > 1 ? later : points;
  });
  return domainOf(late, lines);
}
