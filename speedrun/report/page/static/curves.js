// Curves of groups of runs, and the legend that shows and hides them.

import { el } from "./dom.js";
import { known } from "./numbers.js";
import { dashOf, hue, runsOf } from "./parts.js";
import { AXES, average } from "./scales.js";

/** @type {(state: State, group: number) => boolean} */
export const isShown = (state, group) => !state.hidden.has(group);

/** @type {(data: PageData, state: State, redraw: () => void, note: string) => Element} */
export function legend(data, state, redraw, note) {
  const buttons = data.groups.map((group, index) => {
    const seeds = runsOf(data, index).length;
    const toggle = () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      redraw();
    };
    return el("button", {
      type: "button", "aria-pressed": String(isShown(state, index)), style: `--hue:${hue(index)}`, onclick: toggle,
    }, el("i", { class: dashOf(index) ? "dash" : null }), group.label,
    seeds > 1 ? el("span", { class: "small" }, `× ${seeds}`) : null);
  });
  return el("div", { class: "legend", role: "group", "aria-label": "Show or hide" },
    buttons, el("span", { class: "small" }, note));
}

/** @typedef {(run: Run) => { at: Clocks, values: Values }} CurveOf */

/** The known points of a run's curve, each with its step.
 * @type {(run: Run, curveOf: CurveOf, column: ClockName) => (Point & { step: number })[]} */
function pointsOf(run, curveOf, column) {
  const { at, values } = curveOf(run);
  return values.flatMap((y, i) => (known(y) ? [{ step: at.step[i], x: at[column][i], y }] : []));
}
/** Mean over some runs at the steps all of them have; one run is its own mean.
 * @type {(runs: Run[], curveOf: CurveOf, column: ClockName) => Point[]} */
function meanCurve(runs, curveOf, column) {
  /** @type {Map<number, Point[]>} */
  const byStep = new Map();
  for (const { step, x, y } of runs.flatMap((run) => pointsOf(run, curveOf, column))) {
    if (!byStep.has(step)) byStep.set(step, []);
    byStep.get(step)?.push({ x, y });
  }
  const shared = [...byStep.values()].filter((points) => points.length === runs.length);
  return shared.map((points) => ({
    x: average(points.map((point) => point.x)), y: average(points.map((point) => point.y)),
  }));
}

/** For each group its mean, and under it its seeds as thin lines that the cursor passes over.
 * @type {(data: PageData, state: State, curveOf: CurveOf) => Series[]} */
export function groupSeries(data, state, curveOf) {
  const { column } = AXES[state.axis];
  return data.groups.flatMap((group, index) => {
    if (!isShown(state, index)) return [];
    const runs = runsOf(data, index);
    const color = hue(index);
    const seeds = runs.length < 2 ? [] : runs.map((run) => ({
      label: `${group.label}, seed ${run.seed}`, color, width: 1.1, opacity: 0.38, quiet: true,
      points: pointsOf(run, curveOf, column),
    }));
    const mean = meanCurve(runs, curveOf, column);
    return [...seeds, { label: group.label, color, dash: dashOf(index), dots: true, width: 2.4, points: mean }];
  });
}
