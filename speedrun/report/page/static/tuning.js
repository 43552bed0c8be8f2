// What a tuning tried: the loss of every trial against each of the values, and a table.

import { drawing, el, put, svg } from "./dom.js";
import { figure } from "./figure.js";
import { fixed, known, loss, orDash, plural, signed, trimmed } from "./numbers.js";
import { numberColumn, table, textColumn } from "./parts.js";
import { extent, logTicks, scale, ticks } from "./scales.js";

/** Which rows the trials are judged by, by the name of those. @type {Record<string, string>} */
const ROWS = {
  between: "validation rows between those a race is judged by", spread: "validation rows beside those of a race",
  last: "the last validation rows, a race being judged by the first",
  first: "the first validation rows, a race being judged by the last",
};
const digits = (/** @type {number} */ value) => String(Number(value.toPrecision(4)));

/** @type {Draw} */
export function tuningSection(data, _, box) {
  const { tuning } = data;
  if (!tuning || !tuning.trials.length) return;
  const best = tuning.trials.find((one) => one.number === tuning.best);
  const own = tuning.trials.find((one) => one.number === 0);
  const rest = (/** @type {Trial} */ one) => one.loss ?? Infinity;
  const ranked = [...tuning.trials].sort((a, b) => rest(a) - rest(b) || a.number - b.number);
  const { trials, seconds } = tuning.budget;
  const budget = known(trials) ? plural(trials, "trial") : `${trimmed(((seconds ?? 0) / 60).toFixed(1))} minutes`;
  const [first, last] = [tuning.seeds[0], tuning.seeds.at(-1)];
  const seeds = first === last ? `seed ${first}` : `seeds ${first} to ${last}`;
  const figures = tuning.over.map((range) => scatterFigure(el("div", { class: "figure" }), {
    range, trials: tuning.trials, best, label: `Final loss of the trials against ${range.key}`,
  }));
  const difference = (/** @type {Trial} */ one) =>
    (known(one.loss) && known(own?.loss) ? signed(one.loss - own.loss, 4) : "–");
  const some = tuning.trials.length === trials ? budget : `${tuning.trials.length} trials within ${budget}`;
  box.append(
    el("p", { class: "say" }, `Final loss of ${some}, on ${seeds} and ${ROWS[tuning.rows] ?? tuning.rows}. The diamond `
      + `is ${tuning.recipe} as it stands, the filled circle the best trial; pale circles were taken from the whole `
      + "ranges, others from boxes around the best so far. An arrow is a trial far worse than these",
    tuning.trials.some((one) => one.diverged) ? ", a cross one that diverged." : ".",
    tuning.stopped ? ` When the time was over, ${plural(tuning.stopped, "trial")} under way had to stop.` : ""),
    tuning.edges.length ? el("p", { class: "say" }, el("strong", {}, tuning.edges.join(" and ")),
      ": the best value is at the edge of the range, so a wider range may hold a better one.") : "",
    el("div", { class: "multiples" }, tuning.over.map((range, i) =>
      el("div", {}, el("h3", {}, range.key, el("span", { class: "small" },
        ` ${digits(range.low)} to ${digits(range.high)}${range.log ? ", log" : ""}`)), figures[i]))),
    table(ranked, [
      numberColumn("trial", (one) => one.number),
      ...valueColumns(tuning),
      numberColumn("loss", (one) => (one.diverged ? "diverged" : loss(one.loss))),
      numberColumn("against the recipe", difference),
      ...seedColumns(tuning),
      textColumn("", (one) => [one === best && "best", one === own && "as it stands"].filter(Boolean).join(", ")),
    ]));
}

/** @type {(tuning: Tuning) => Column<Trial>[]} */
const valueColumns = ({ over }) => over.map(({ key }) => numberColumn(key, (one) => digits(one.values[key])));

/** @type {(tuning: Tuning) => Column<Trial>[]} */
const seedColumns = ({ seeds }) => (seeds.length > 1
  ? [numberColumn("by seed", (one) => one.losses.map((value) => orDash(value, fixed(4))).join(", "))] : []);

/** The range of losses that is worth seeing: what is far worse than half of the trials is put at the top.
 * @type {(trials: Trial[]) => [low: number, high: number]} */
function worthSeeing(trials) {
  const losses = trials.map((one) => one.loss).filter(known).sort((a, b) => a - b);
  if (!losses.length) return [0, 1];
  const [low, middle] = [losses[0], losses[losses.length >> 1]];
  const own = trials.find((one) => one.number === 0)?.loss ?? low;
  const seen = losses.filter((value) => value <= Math.max(own, low + 3 * (middle - low)));
  const high = Math.max(...seen);
  const lowest = Math.min(...trials.filter((one) => known(one.loss)).flatMap((one) => one.losses).filter(known));
  const room = (high - lowest || Math.abs(high) || 1) * 0.08;
  return [lowest - room, high + room];
}

/** @type {(box: HTMLElement, scatter: Scatter) => HTMLElement} */
function scatterFigure(box, { range, trials, best, label }) {
  return figure(box, (width) => {
    const height = Math.min(300, Math.max(220, width * 0.55));
    const [left, right, top, bottom] = [50, width - 14, 26, height - 26];
    const at = (/** @type {number} */ value) => (range.log ? Math.log10(value) : value);
    const drawn = trials.filter((one) => !range.log || one.values[range.key] > 0);
    const [first, last] = extent([range.low, range.high, ...drawn.map((one) => one.values[range.key])]);
    const across = scale(at(first), at(last), left + 8, right - 8);
    const x = (/** @type {number} */ value) => across(at(value));
    const [low, high] = worthSeeing(trials);
    const y = scale(low, high, bottom, top);
    const picture = drawing(width, height, label);
    const narrow = width < 420;
    for (const tick of ticks(low, high, 5)) {
      picture.append(
        svg("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
        svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, trimmed(tick.toFixed(4))));
    }
    for (const tick of range.log ? logTicks(first, last, narrow ? 5 : 9) : ticks(first, last, narrow ? 4 : 7)) {
      picture.append(
        svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: bottom, y2: bottom + 4 }),
        svg("text", { x: x(tick), y: bottom + 18, "text-anchor": "middle" }, digits(tick)));
    }
    picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
    // The best and the recipe itself lie on top of all others.
    const rank = (/** @type {Trial} */ one) => (one === best ? 2 : one.number === 0 ? 1 : 0);
    const marks = [...drawn].sort((a, b) => rank(a) - rank(b));
    put(picture, {}, marks.map((one) => markOf(one, one === best, x(one.values[range.key]), y, top)));
    const own = drawn.find((one) => one.number === 0);
    if (own && best !== own) picture.append(named("as it stands", own));
    if (best) picture.append(named("best", best));
    return [picture];

    /** @type {(text: string, one: Trial) => Element} */
    function named(text, one) {
      const place = x(one.values[range.key]);
      const above = known(one.loss) ? Math.max(top, y(one.loss)) : top;
      const anchor = place > right - 50 ? "end" : place < left + 50 ? "start" : "middle";
      return svg("text", { class: "strong halo", x: place, y: above - 10, "text-anchor": anchor }, text);
    }
  });
}

/** The mark of a trial at a place of the horizontal axis.
 * @type {(one: Trial, isBest: boolean, across: number, y: Scale, top: number) => Child} */
function markOf(one, isBest, across, y, top) {
  const values = Object.entries(one.values).map(([key, value]) => `${key} = ${digits(value)}`).join(", ");
  const title = svg("title", {}, `trial ${one.number}: ${values}: ${known(one.loss) ? loss(one.loss) : "diverged"}`);
  const color = isBest ? "var(--good)" : one.number === 0 ? "var(--ink)" : known(one.loss) ? "var(--c1)" : "var(--bad)";
  const pale = one.box === 1 && !isBest ? 0.45 : 1;
  const look = {
    class: "trial", style: `fill:${isBest ? color : "var(--card)"};stroke:${color}`, "stroke-width": 2,
    "stroke-opacity": known(one.loss) ? pale : 1,
  };
  if (!known(one.loss)) return svg("path", { ...look, d: `M${across - 4.5} ${top - 4.5}l9 9m0 -9l-9 9` }, title);
  const down = y(one.loss);
  // Far worse than others: an arrow at the top.
  if (down < top) return svg("path", { ...look, d: `M${across} ${top - 6}l5 9h-10z` }, title);
  const [least, most] = extent(one.losses.filter(known));
  const bounds = { x1: across, x2: across, y1: y(least), y2: Math.max(top, y(most)) };
  return [
    most > least && svg("line", { ...bounds, style: `stroke:${color}`, "stroke-opacity": 0.5 * pale }),
    one.number === 0 ? svg("path", { ...look, d: `M${across} ${down - 7}l7 7l-7 7l-7 -7z` }, title)
      : svg("circle", { ...look, cx: across, cy: down, r: isBest ? 6.5 : 4.5 }, title),
  ];
}
