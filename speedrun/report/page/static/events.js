// What happened to the runs: a line each along the shared axis, and a list.

import { drawing, el, svg } from "./dom.js";
import { figure, verticals } from "./figure.js";
import { duration, grouped, orDash, plural } from "./numbers.js";
import { folded, hue, numberColumn, table, textColumn } from "./parts.js";
import { AXES, extent, scale, ticks } from "./scales.js";

/** @type {Record<string, { path: string, color: string, text: string, open?: boolean }>} */
const MARKS = {
  start: { path: "M-4 -6L6 0L-4 6Z", color: "var(--soft)", text: "start" },
  end: { path: "M-5 -5H5V5H-5Z", color: "var(--soft)", text: "end" },
  checkpoint: { path: "M0 -6L6 0L0 6L-6 0Z", color: "var(--accent)", text: "checkpoint" },
  resume: { path: "M0 -6L6 5H-6Z", color: "var(--good)", text: "resume" },
  spike: { path: "M0 -7L5 6H-5Z", color: "var(--bad)", text: "spike" },
  nonfinite: { path: "M-5 -5L5 5M5 -5L-5 5", color: "var(--bad)", text: "not finite", open: true },
  rewind: { path: "M6 -6L-2 0L6 6M-1 -6V6", color: "var(--bad)", text: "rewind", open: true },
};
const CIRCLE = "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0";
function markOf(/** @type {string} */ kind) {
  return MARKS[kind] || { path: CIRCLE, color: "var(--faint)", text: kind.replaceAll("_", " ") };
}

/** @type {(kind: string, attributes: Attributes, ...children: Child[]) => Element} */
function markPath(kind, attributes, ...children) {
  const { path, color, open } = markOf(kind);
  const style = open ? `fill:none;stroke:${color};stroke-width:2.4` : `fill:${color};stroke:var(--card);stroke-width:1`;
  return svg("path", { d: path, style, ...attributes }, children);
}
function titleOf(/** @type {RunEvent} */ event) {
  return `${markOf(event.kind).text} at step ${event.step}${event.detail ? `: ${event.detail}` : ""}`;
}

/** @type {(box: HTMLElement, runs: Run[], labelOf: (run: Run) => string, axis: Axis) => HTMLElement} */
function eventFigure(box, runs, labelOf, axis) {
  const rows = runs.map((run) => {
    const curves = [run.train[axis.column].at(-1), run.val[axis.column].at(-1)];
    const places = [...curves, ...run.events.map((event) => event[axis.column])];
    return { run, label: labelOf(run), end: Math.max(...places.map((place) => place || 0)) };
  });
  const [, most] = extent([1e-9, ...rows.map((row) => row.end)]);
  const longest = Math.max(...rows.map((row) => row.label.length));
  return figure(box, (width) => {
    const narrow = width < 640;
    const tall = narrow ? 40 : 27;
    const names = narrow ? 0 : Math.min(230, 12 + 6.6 * longest);
    const height = rows.length * tall + 26;
    const x = scale(0, most, names + 8, width - 12);
    const picture = drawing(width, height, `Events of each run over ${axis.noun}`);
    verticals(picture, x, ticks(0, most, narrow ? 3 : 7, axis.isTime), 0, height - 22, axis.format);
    rows.forEach(({ run, label, end }, index) => {
      const middle = index * tall + (narrow ? 28 : 15);
      const track = { x1: x(0), x2: x(end), y1: middle, y2: middle, style: `stroke:${hue(run.group)}` };
      picture.append(
        svg("text", { class: "halo", x: 0, y: narrow ? middle - 13 : middle + 4 }, label),
        svg("line", { ...track, "stroke-width": 3, "stroke-opacity": 0.45 }),
        ...run.events.map((event) => {
          const transform = `translate(${x(event[axis.column] || 0).toFixed(1)} ${middle})`;
          return markPath(event.kind, { class: "event", transform }, svg("title", {}, titleOf(event)));
        }));
    });
    return [picture];
  });
}

/** @type {Draw} */
export function eventSection(data, state, box) {
  const runs = data.runs.filter((run) => run.events.length);
  if (!runs.length) return;
  const labelOf = (/** @type {Run} */ run) =>
    (data.runs.length > 1 ? `${data.groups[run.group].label}, seed ${run.seed}` : run.name);
  const events = runs.flatMap((run) => run.events.map((event) => ({ run, event })));
  const kinds = [...new Set(events.map(({ event }) => event.kind))];
  box.append(
    el("div", { class: "legend" }, kinds.map((kind) => el("span", { class: "small mark" },
      svg("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" }, markPath(kind, {})), markOf(kind).text))),
    eventFigure(el("div", { class: "figure" }), runs, labelOf, AXES[state.axis]),
    folded(`List of ${plural(events.length, "event")}`, table(events, [
      textColumn("run", ({ run }) => run.name),
      numberColumn("step", ({ event }) => orDash(event.step, grouped)),
      numberColumn("wall", ({ event }) => orDash(event.wall_seconds, duration)),
      textColumn("event", ({ event }) => markOf(event.kind).text),
      textColumn("detail", ({ event }) => event.detail),
    ])));
}
