// Schedules over the steps of a run. Where recipes agree, one line stands for all of them.

import { isShown } from "./curves.js";
import { el } from "./dom.js";
import { lineChart } from "./lines.js";
import { known, short, trimmed } from "./numbers.js";
import { dashOf, hue, keyMark, several } from "./parts.js";
import { AXES, extent } from "./scales.js";

const thousandths = (/** @type {number} */ value) => trimmed(value.toFixed(3));
/** @type {{ key: ScheduleName, name: string, unit: string, format: Format }[]} */
const SCHEDULES = [
  { key: "lr", name: "Learning rate", unit: " × peak", format: thousandths },
  { key: "momentum", name: "Momentum of Muon", unit: "", format: thousandths },
  { key: "window", name: "Attention window", unit: " tokens", format: short },
];

/** @type {(data: PageData, state: State, key: ScheduleName) => Series[]} */
function distinct(data, state, key) {
  /** @type {Map<string, Series>} */
  const found = new Map();
  data.groups.forEach(({ label, schedules }, index) => {
    const schedule = schedules[key];
    if (!schedule.length || !isShown(state, index)) return;
    const text = JSON.stringify(schedule);
    const same = found.get(text);
    if (same) same.label += `, ${label}`;
    else {
      const points = schedule.map(([x, y]) => ({ x, y }));
      found.set(text, { label, color: hue(index), dash: dashOf(index), points, stepped: key === "window" });
    }
  });
  return [...found.values()];
}

/** @type {Draw} */
export function scheduleSection(data, state, box) {
  const panels = SCHEDULES.map(({ key, name, unit, format }) => {
    const series = distinct(data, state, key);
    if (!series.length) return null;
    const [low, high] = extent(series.flatMap((one) => one.points.map((point) => point.y)));
    const keys = series.map((one) => el("span", {}, keyMark(one.color), one.label));
    return el("div", {}, el("h3", {}, name, el("span", { class: "small" }, unit)),
      several(data) ? el("p", { class: "keys" }, keys) : null,
      lineChart(el("div", { class: "chart" }), {
        series, height: 190, label: `${name} over steps`, xFormat: AXES.steps.format, yFormat: format,
        yDomain: key === "momentum" ? [Math.min(low, high - 0.05) - 0.01, high + 0.01] : [0, high * 1.08],
      }));
  }).filter(known);
  if (!panels.length) return;
  const note = several(data) ? " Where recipes agree, one line stands for all of them." : "";
  box.append(el("div", { class: "multiples" }, panels), el("p", { class: "small" }, `Over steps.${note}`));
}
