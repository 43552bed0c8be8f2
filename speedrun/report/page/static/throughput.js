// Tokens per second and share of the machine's peak, over the run and in a table.

import { groupSeries } from "./curves.js";
import { el } from "./dom.js";
import { lineChart } from "./lines.js";
import { duration, flops, grouped, known, orDash, percent, short } from "./numbers.js";
import { choice, lastOf, named, numberColumn, runsOf, table, textColumn } from "./parts.js";
import { AXES, average, averageKnown } from "./scales.js";

/** Averages of neighbours, so that a rate shows its course and not each hiccup.
 * @type {(points: Point[], most: number) => Point[]} */
function smoothed(points, most) {
  const size = Math.ceil(points.length / most);
  const found = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    found.push({ x: part[part.length - 1].x, y: average(part.map((point) => point.y)) });
  }
  return found;
}

/** As the run's summary states it; while there is none, from its curve. */
function rateOf(/** @type {Run} */ run) {
  const [tokens, seconds] = [lastOf(run.train.tokens), lastOf(run.train.seconds)];
  return run.summary.tokens_per_second ?? (tokens && seconds ? tokens / seconds : null);
}

/** As the summary states it, each stretch of steps against the peak beside it; else from its curve. */
function shareOf(/** @type {Run} */ run) {
  return run.summary.peak_share ?? averageKnown(run.train.peak_share);
}

/** @type {Draw} */
export function throughputSection(data, state, box, redraw) {
  if (!data.runs.some((run) => run.train.step.length)) return;
  const axis = AXES[state.axis];
  const recorded = data.runs.some((run) => run.train.peak_share.some(known));
  const sharing = recorded && state.rate === "share";
  const column = sharing ? "peak_share" : "tokens_per_second";
  const series = groupSeries(data, state, (run) => ({ at: run.train, values: run.train[column] }))
    .filter((one) => !one.quiet).map((one) => ({ ...one, width: 2, points: smoothed(one.points, 60) }));
  const most = Math.max(0, ...series.flatMap((one) => one.points.map((point) => point.y)));
  const rates = { tokens: "Tokens per second", share: "Share of peak" };
  if (recorded) box.append(el("div", { class: "controls" }, choice(state, "rate", "Rate", rates, redraw)));
  box.append(lineChart(el("div", { class: "chart", id: "throughput-chart" }), {
    series, height: 240, label: `${sharing ? rates.share : rates.tokens} over ${axis.noun}`,
    xFormat: axis.format, xIsTime: axis.isTime, yFormat: sharing ? percent : short, yDomain: [0, most * 1.08 || 1],
  }));
  const rows = data.groups.map((group, index) => {
    const mean = (/** @type {(run: Run) => Maybe<number>} */ pick) => averageKnown(runsOf(data, index).map(pick));
    return {
      group, index, rate: mean(rateOf), share: mean(shareOf), cost: mean((run) => run.summary.peak_seconds),
      wait: mean((run) => run.wait_share), peak: mean((run) => run.peak_flops),
    };
  });
  box.append(table(rows, [
    textColumn("recipe", ({ index, group }) => named(index, group.label)),
    numberColumn("tokens/s", ({ rate }) => orDash(rate, grouped)),
    numberColumn("per step", ({ rate, group }) => (rate ? duration(group.batch_tokens / rate) : "–")),
    numberColumn("waiting for data", ({ wait }) => orDash(wait, percent)),
    numberColumn("share of peak", ({ share }) => (known(share) ? percent(share) : "not recorded")),
    numberColumn("peak, measured", ({ peak }) => orDash(peak, flops)),
    numberColumn("measured in", ({ cost }) => orDash(cost, duration)),
  ]));
}
