// The cursor of a line chart, for mouse, touch and arrow keys: a tip with every curve's value.

import { el, put, svg } from "./dom.js";
import { keyMark } from "./parts.js";

const MOST_ROWS = 12; // of a tip

/** The value of a series at x: on the line between points (or the step's level), past its ends none.
 * @type {(series: Series, at: number) => number | null} */
function valueAt({ points, stepped }, at) {
  let low = 0;
  let high = points.length - 1;
  if (at < points[low].x || at > points[high].x) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle].x <= at) low = middle; else high = middle;
  }
  const [before, after] = [points[low], points[high]];
  if (stepped) return at >= after.x ? after.y : before.y;
  if (after.x === before.x) return after.y;
  return before.y + ((after.y - before.y) * (at - before.x)) / (after.x - before.x);
}

/** `view` has the series to read and where they are drawn.
 * @type {(picture: SVGSVGElement, tip: HTMLElement, chart: Chart, view:
 *   { series: Series[], x: Scale, y: Scale, width: number, top: number, bottom: number }) => void} */
export function attachCursor(picture, tip, chart, { series, x, y, width, top, bottom }) {
  const stops = [...new Set(series.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);
  if (!stops.length) return;
  const cursor = svg("g", { visibility: "hidden" });
  picture.append(cursor);
  const end = stops.length - 1;
  let place = end;
  function show(/** @type {number} */ index) {
    place = Math.max(0, Math.min(end, index));
    const at = stops[place];
    const rows = series.flatMap((one) => {
      const value = valueAt(one, at);
      return value === null ? [] : [{ label: one.label, color: one.color, value }];
    });
    rows.sort((a, b) => b.value - a.value);
    const dots = rows.filter((row) => y(row.value) > top - 3).map((row) =>
      svg("circle", { class: "dot", cx: x(at), cy: y(row.value), r: 4, style: `fill:${row.color}` }));
    cursor.replaceChildren(svg("line", { class: "cursor", x1: x(at), x2: x(at), y1: top, y2: bottom }), ...dots);
    cursor.setAttribute("visibility", "visible");
    const format = chart.tipFormat || chart.yFormat;
    const lines = rows.slice(0, MOST_ROWS).map((row) =>
      el("tr", {}, el("td", {}, keyMark(row.color), row.label), el("td", { class: "n" }, format(row.value))));
    tip.hidden = false;
    tip.replaceChildren(el("strong", {}, chart.xFormat(at)), el("table", {}, lines));
    const left = x(at) * (picture.clientWidth / width || 1);
    const fits = left + 14 + tip.offsetWidth < picture.clientWidth;
    tip.style.left = `${fits ? left + 14 : Math.max(0, left - 14 - tip.offsetWidth)}px`;
    tip.style.top = `${top + 2}px`;
  }
  function hide() {
    cursor.setAttribute("visibility", "hidden");
    tip.hidden = true;
  }
  function follow(/** @type {PointerEvent} */ event) {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const gap = (/** @type {number} */ index) => Math.abs(x(stops[index]) - at);
    show(stops.reduce((best, _, index) => (gap(index) < gap(best) ? index : best), 0));
  }
  const page = Math.max(1, Math.round(stops.length / 20));
  /** @type {Record<string, number>} */
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -page, PageUp: page, Home: -end, End: end };
  function move(/** @type {KeyboardEvent} */ event) {
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(place + moves[event.key]);
  }
  put(picture, {
    onpointermove: follow, onpointerdown: follow, onpointerleave: hide, onblur: hide, onkeydown: move,
    onfocus: () => { if (picture.matches(":focus-visible")) show(place); },
  });
}
