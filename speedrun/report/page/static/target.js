// How soon each recipe reaches the target.

import { el } from "./dom.js";
import { barFigure } from "./intervals.js";
import { fixed, interval, known, loss, orDash } from "./numbers.js";
import { hue, named, numberColumn, table, textColumn } from "./parts.js";
import { AXES } from "./scales.js";

/** @type {Draw} */
export function targetSection(data, state, box) {
  const axis = AXES[state.axis];
  const { race } = data;
  if (!race || !Object.keys(race.metrics).length) return;
  const rows = race.metrics[axis.metric];
  if (!rows) {
    box.append(el("p", { class: "small" }, `No run states its ${axis.noun} to the target.`));
    return;
  }
  const partly = (/** @type {RaceRow} */ row) => (row.reached < row.n ? `${row.reached} of ${row.n}` : null);
  const bars = rows.map((row, i) => {
    const ratio = i > 0 && known(row.ratio) ? ` · ${row.ratio.toFixed(2)}×` : "";
    const mean = known(row.mean) ? axis.format(row.mean) + ratio : "no run yet";
    const text = partly(row) ? `${partly(row)} reached it` : mean;
    return { ...row, label: race.recipes[i], color: hue(race.groups[i]), text };
  });
  const meanLoss = (/** @type {RaceRow} */ { mean, std }) =>
    loss(mean) + (known(mean) && known(std) ? ` ± ${std.toFixed(4)}` : "");
  const method = { paired: ", paired by seed", Welch: ", by Welch" };
  const methods = [...new Set(rows.flatMap((row, i) => (i > 0 && row.ratio_method ? [row.ratio_method] : [])))];
  const { test } = race;
  const cell = race.finished
    ? "Each figure is the length of the shortest run whose schedule ends at the target, found between two lengths a "
      + "tenth apart"
    : "A target is reached where the line between two validations crosses it";
  box.append(
    barFigure(el("div", { class: "figure", id: "target-figure" }), bars, axis.format,
      `${axis.label} to the target by recipe`),
    table(rows, [
      textColumn("recipe", (_, i) => named(race.groups[i], race.recipes[i])),
      numberColumn("seeds", (row) => partly(row) ?? row.n),
      numberColumn("mean", (row) => orDash(row.mean, axis.format)),
      numberColumn("deviation", (row) => orDash(row.std, axis.format)),
      numberColumn("95% interval", (row) => interval(row.low, row.high, axis.format)),
      numberColumn(`ratio to ${race.recipes[0]}`, (row) => orDash(row.ratio, fixed(3))),
      numberColumn("95% interval", (row, i) => (i > 0 ? interval(row.ratio_low, row.ratio_high, fixed(3)) : "–")),
      numberColumn("last loss", (_, i) => meanLoss(race.final[i])),
      ...(test ? [numberColumn("test loss", (_, i) => meanLoss(test[i]))] : []),
    ]),
    el("p", { class: "small" }, "Bars are means, circles single seeds, whiskers the 95% t interval of the mean; "
      + `ratios of means carry Fieller’s interval${methods.map((name) => method[name]).join(" or")}. `,
    `${cell}; the distance of the two is in the whiskers.`),
    ...race.verdicts.map((line) => el("p", { class: "small" }, line)));
}
