// Means and effects with their intervals: bars of recipes, and the forest plot of an ablation.

import { drawing, put, svg } from "./dom.js";
import { figure, verticals } from "./figure.js";
import { known } from "./numbers.js";
import { extent, scale, ticks } from "./scales.js";

/** @type {(x: Scale, low: number, high: number, middle: number, color: string) => Element} */
function whisker(x, low, high, middle, color) {
  const [from, to] = [x(low), x(high)];
  const ends = [from, to].map((at) => `M${at} ${middle - 5}V${middle + 5}`).join("");
  const d = `M${from} ${middle}H${to}${ends}`;
  return svg("path", { d, fill: "none", style: `stroke:${color}`, "stroke-width": 1.7 });
}

/** A bar each, its seeds as circles.
 * @type {(box: HTMLElement, bars: Bar[], format: Format, label: string) => HTMLElement} */
export function barFigure(box, bars, format, label) {
  return figure(box, (width) => {
    const tall = 52;
    const height = bars.length * tall + 26;
    const [, most] = extent([1e-9, ...bars.flatMap((bar) => [bar.mean, bar.high, ...bar.values]).filter(known)]);
    const x = scale(0, most, 0, width - 14);
    const picture = drawing(width, height, label);
    verticals(picture, x, ticks(0, most, width < 560 ? 3 : 6), 0, height - 22, format);
    bars.forEach((bar, index) => {
      const top = index * tall + 4;
      const middle = top + 30;
      const edge = known(bar.mean) ? "var(--ink)" : bar.color;
      put(picture, {},
        svg("text", { class: "halo", x: 0, y: top + 12 },
          svg("tspan", { class: "strong" }, bar.label), svg("tspan", { dx: 10 }, bar.text)),
        known(bar.mean) && svg("rect", {
          class: "mean", x: 0, y: middle - 9, width: Math.max(1, x(bar.mean)), height: 18, rx: 3,
          style: `fill:${bar.color}`, "fill-opacity": 0.82,
        }),
        known(bar.low) && known(bar.high) && whisker(x, Math.max(0, bar.low), bar.high, middle, "var(--ink)"),
        bar.values.filter(known).map((value) => svg("circle", {
          cx: x(value), cy: middle, r: 3.6, style: `fill:var(--card);stroke:${edge}`, "stroke-width": 1.4,
        }, svg("title", {}, format(value)))));
    });
    return [picture];
  });
}

/** One change a row; without an effect there is no mark.
 * @type {(box: HTMLElement, rows: ForestRow[], format: Format, label: string) => HTMLElement} */
export function forestFigure(box, rows, format, label) {
  const brief = (/** @type {number} */ value) => format(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return figure(box, (width) => {
    const narrow = width < 640; // labels and p-values above the line instead of beside it
    const names = narrow ? 0 : Math.min(300, width * 0.32);
    const notes = narrow ? 0 : 196;
    const tall = narrow ? 62 : 36;
    const height = rows.length * tall + 52;
    const [low, high] = extent([0, ...rows.flatMap((row) => [row.effect, row.low, row.high]).filter(known)]);
    const room = (high - low || 1) * 0.05;
    const x = scale(low - room, high + room, names + 10, width - notes - 12);
    const picture = drawing(width, height, label);
    verticals(picture, x, ticks(low - room, high + room, narrow ? 3 : 5), 22, height - 24, brief);
    put(picture, {},
      svg("line", { x1: x(0), x2: x(0), y1: 18, y2: height - 24, style: "stroke:var(--soft)", "stroke-width": 1.4 }),
      svg("text", { x: x(0) + 7, y: 13 }, "the change hurts →"),
      x(0) - names > 150 && svg("text", { x: x(0) - 7, y: 13, "text-anchor": "end" }, "← the change helps"));
    rows.forEach((row, index) => {
      const top = 24 + index * tall;
      const middle = top + (narrow ? 44 : tall / 2);
      const color = row.verdict > 0 ? "var(--good)" : row.verdict < 0 ? "var(--bad)" : "var(--faint)";
      const place = narrow ? { x: 0, y: top + 14 } : { x: names, y: middle + 4, "text-anchor": "end" };
      const beside = narrow ? { x: 0, y: top + 30 } : { x: width - notes, y: middle + 4 };
      put(picture, {},
        svg("text", { class: "strong halo", ...place }, row.label),
        svg("text", { class: "halo", ...beside }, row.text),
        known(row.low) && known(row.high) && whisker(x, row.low, row.high, middle, color),
        known(row.effect) && svg("circle", {
          class: "effect", cx: x(row.effect), cy: middle, r: 5.5, "stroke-width": 2,
          style: `fill:${row.verdict || row.settled === "equal" ? color : "var(--card)"};stroke:${color}`,
        }, svg("title", {}, `${row.label}: ${format(row.effect)}`)));
    });
    return [picture];
  });
}
