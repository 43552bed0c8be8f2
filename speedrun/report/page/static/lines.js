// Line charts: series over a shared horizontal axis, with bands, target lines and a cursor.

import { attachCursor } from "./cursor.js";
import { drawing, el, svg } from "./dom.js";
import { figure } from "./figure.js";
import { extent, scale, ticks } from "./scales.js";

let clips = 0; // so far on this page: each has an id of its own

/** @type {(box: HTMLElement, chart: Chart) => HTMLElement} */
export function lineChart(box, chart) {
  return figure(box, (width) => draw(chart, width));
}

/** @type {(chart: Chart, width: number) => Element[]} */
function draw(chart, width) {
  const { bands = [], lines = [] } = chart;
  const series = chart.series.filter((one) => one.points.length);
  const narrow = width < 560;
  const height = chart.height || (narrow ? 270 : 360);
  const [left, right, top, bottom] = [46, width - (narrow ? 10 : 16), 12, height - 34];
  const [first, last] = extent([...series, ...bands].flatMap((one) => one.points.map((point) => point.x)));
  const [xLow, xHigh] = last > -Infinity ? [Math.min(0, first), last || 1] : [0, 1];
  const [yLow, yHigh] = chart.yDomain || domainOf(series.map((one) => one.points), lines);
  const x = scale(xLow, xHigh, left, right);
  const y = scale(yLow, yHigh, bottom, top);
  const picture = drawing(width, height, `${chart.label}. Arrow keys move the cursor.`, { tabindex: 0 });
  for (const tick of ticks(yLow, yHigh, narrow ? 4 : 6)) {
    picture.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, chart.yFormat(tick)));
  }
  for (const tick of ticks(xLow, xHigh, narrow ? 3 : 7, chart.xIsTime)) {
    const anchor = x(tick) > right - 22 ? "end" : "middle";
    picture.append(
      svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }),
      svg("text", { x: Math.min(x(tick), right + 4), y: bottom + 18, "text-anchor": anchor }, chart.xFormat(tick)));
  }
  picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  clips += 1;
  const frame = svg("rect", { x: left, y: top - 3, width: right - left + 6, height: bottom - top + 6 });
  picture.append(
    svg("clipPath", { id: `clip-${clips}` }, frame),
    svg("g", { "clip-path": `url(#clip-${clips})` },
      bands.map((band) => bandPath(band, x, y)), series.map((one) => linePath(one, x, y))));
  for (const line of lines) {
    if (line.y < yLow || line.y > yHigh) continue;
    picture.append(
      svg("line", { class: "target", x1: left, x2: right, y1: y(line.y), y2: y(line.y) }),
      svg("text", { class: "target", x: left + 8, y: y(line.y) - 6 }, line.text));
  }
  const tip = el("div", { class: "tip", hidden: true, "aria-live": "polite" });
  attachCursor(picture, tip, chart, { series: series.filter((one) => !one.quiet), x, y, width, top, bottom });
  return [picture, tip];
}

/** The range of values of some curves and lines, with room above and below.
 * @type {(curves: Point[][], lines: Line[]) => [low: number, high: number]} */
export function domainOf(curves, lines) {
  const values = [...curves.flat(), ...lines].map((one) => one.y);
  if (!values.length) return [0, 1];
  const [low, high] = extent(values);
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

/** @type {(one: Series, x: Scale, y: Scale) => Child} */
function linePath(one, x, y) {
  const path = one.points.map((point, i) => {
    const [across, down] = [x(point.x).toFixed(1), y(point.y).toFixed(1)];
    return `${i > 0 && one.stepped ? `H${across}` : ""}${i ? "L" : "M"}${across} ${down}`;
  });
  const line = svg("path", {
    class: "series", d: path.join(""), fill: "none", style: `stroke:${one.color}`,
    "stroke-width": one.width || 2, "stroke-opacity": one.opacity || 1, "stroke-dasharray": one.dash,
    "stroke-linejoin": "round", "stroke-linecap": "round",
  });
  const dots = one.dots && one.points.length < 3 ? one.points : []; // a line of one point is no line
  return [line, dots.map((point) =>
    svg("circle", { cx: x(point.x), cy: y(point.y), r: 3.5, style: `fill:${one.color}` }))];
}

/** @type {(band: Band, x: Scale, y: Scale) => Child} */
function bandPath(band, x, y) {
  /** @type {(at: number, value: number) => string} */
  const place = (at, value) => `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
  const forth = band.points.map((point) => place(point.x, point.high));
  const back = band.points.map((point) => place(point.x, point.low)).reverse();
  if (!forth.length) return null;
  return svg("path", { d: `M${[...forth, ...back].join("L")}Z`, style: `fill:${band.color}`, "fill-opacity": 0.16 });
}
