// How soon each recipe reaches the target.

import { el } from "./dom.js";
import { barFigure } from "./intervals.js";
import { fixed, interval, known, loss, orDash, plural } from "./numbers.js";
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
  const lastLoss = (/** @type {number} */ i) => {
    const { mean, std } = race.final[i];
    return loss(mean) + (known(mean) && known(std) ? ` ± ${std.toFixed(4)}` : "");
  };
  const method = { paired: ", paired by seed", Welch: ", by Welch" };
  const methods = [...new Set(rows.flatMap((row, i) => (i > 0 && row.ratio_method ? [row.ratio_method] : [])))];
  const every = Math.max(0, ...data.groups.map((group) => group.validation_every || 0));
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
      numberColumn("last loss", (_, i) => lastLoss(i)),
    ]),
    el("p", { class: "small" }, "Bars are means, circles single seeds, whiskers the 95% t interval of the mean; "
      + `ratios of means carry Fieller’s interval${methods.map((name) => method[name]).join(" or")}. `,
    every ? `Losses are known every ${plural(every, "step")}, so a time to the target may be late by as much.` : ""));
}
