// The headline in cards, and the table of runs.

import { el } from "./dom.js";
import {
  bytes, duration, fixed, grouped, interval, known, loss, orDash, plural, pValue, short, signed,
} from "./numbers.js";
import { folded, hue, lastOf, named, numberColumn, runsOf, several, table, textColumn } from "./parts.js";
import { AXES, averageKnown } from "./scales.js";

/** @type {(group: number | null, name: string, value: string, ...notes: (string | null)[]) => Element} */
function card(group, name, value, ...notes) {
  const style = known(group) ? `--hue:${hue(group)}` : null;
  return el("div", { class: "fact", style },
    el("span", { class: "name" }, name), el("b", {}, value), notes.filter(known).map((note) => el("span", {}, note)));
}

/** One a recipe, the first as it is and the others in ratio to it.
 * @type {(race: Race, rows: RaceRow[], axis: Axis) => Element[]} */
function raceCards(race, rows, axis) {
  const [yardstick] = race.recipes;
  return rows.map((row, i) => {
    const group = race.groups[i];
    const name = race.recipes[i];
    const missed = row.reached < row.n
      ? `${row.n - row.reached} of ${plural(row.n, "seed")} missed ${race.target}` : null;
    if (i === 0) {
      const what = race.finished ? "of the shortest run that ends at" : "to a loss of";
      const note = missed || `${axis.noun} ${what} ${race.target}, mean of ${plural(row.n, "seed")}`;
      return card(group, name, orDash(row.mean, axis.format), note);
    }
    if (!known(row.ratio)) return card(group, name, "–", missed || `${yardstick} has no mean to compare with`);
    const lone = Math.min(row.n, rows[0].n) < 2;
    const without = lone ? "one seed: no interval" : "the seeds differ too much for an interval";
    const bounds = known(row.ratio_low) ? `95% interval ${interval(row.ratio_low, row.ratio_high, fixed(2))}` : without;
    return card(group, name, `${row.ratio.toFixed(2)}×`, `the ${axis.noun} of ${yardstick}`, bounds);
  });
}

/** @type {(data: PageData, rows: RaceRow[] | undefined, axis: Axis) => Element[]} */
function groupCards(data, rows, axis) {
  return data.groups.flatMap((group, index) => {
    const runs = runsOf(data, index);
    const final = averageKnown(runs.map((run) => lastOf(run.val.loss)));
    const mean = data.race && rows ? rows[data.race.groups.indexOf(index)]?.mean : null;
    const rate = several(data) ? null : averageKnown(runs.map((run) => run.summary.tokens_per_second));
    const size = several(data) ? null : runs[0].summary.params;
    const seeds = runs.length > 1 ? `, mean of ${plural(runs.length, "run")}` : "";
    return [
      known(final) ? card(index, group.label, loss(final), `last validation loss${seeds}`) : null,
      known(mean) ? card(index, `to ${data.race?.target}`, axis.format(mean), axis.noun) : null,
      known(rate) ? card(null, "throughput", short(rate), "tokens per second") : null,
      known(size) ? card(null, "parameters", short(size), grouped(size)) : null,
    ].filter(known);
  });
}

/** How much of an ablation is settled, and the largest effects that are. */
function ablationCards(/** @type {Ablation} */ ablation) {
  const alpha = ablation.alpha ?? 0.05;
  const effects = ablation.effects.filter((one) => one.metric === "val_loss");
  const settled = effects.flatMap(({ effect, ...one }) => {
    const p = one.p_holm ?? one.p ?? 1;
    return known(effect) && p < alpha ? [{ effect, change: one.switch, p }] : [];
  });
  settled.sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
  const largest = settled.slice(0, 3).map(({ effect, change, p }) => card(null, change, signed(effect, 4),
    `on the final loss when ${change.includes("=") ? "set" : "left out"}`, pValue(p)));
  const equal = effects.filter((one) => one.verdict === "equal").length;
  const share = `${settled.length + equal} of ${effects.length}`;
  const alike = equal ? `, ${equal} of them equal within ${ablation.margin} nats` : "";
  return [card(null, "settled", share, `changes, at ${alpha} after correction${alike}`), ...largest];
}

/** The best trial, and the recipe that it was searched from. */
function tuningCards(/** @type {Tuning} */ tuning) {
  const best = tuning.trials.find((one) => one.number === tuning.best);
  const own = tuning.trials.find((one) => one.number === 0);
  const seeds = tuning.seeds.length > 1 ? `, mean of ${plural(tuning.seeds.length, "seed")}` : "";
  const gain = best && own && known(own.loss) && known(best.loss) ? best.loss - own.loss : null;
  return [
    card(null, "as it stands", own ? loss(own.loss) : "–", own?.diverged ? "diverged" : `final loss${seeds}`),
    card(null, "best found", loss(best?.loss),
      best ? `trial ${best.number}, of ${plural(tuning.trials.length, "trial")}` : "all diverged"),
    known(gain) ? card(null, "difference", signed(gain, 4), gain < 0 ? "the lowest of all flatters itself"
      : "nothing better was found") : null,
  ].filter(known);
}

/** @type {(data: PageData, axis: Axis) => Element} */
function runTable(data, axis) {
  const { target } = data;
  const toTarget = (/** @type {Run} */ run) => {
    if (!known(target)) return "no target";
    const crossing = run.summary.target === target ? run.summary[axis.metric] : null;
    if (known(crossing)) return axis.format(crossing);
    const hit = run.val.loss.findIndex((value) => known(value) && value <= target);
    return hit >= 0 ? axis.format(run.val[axis.column][hit]) : "not reached";
  };
  /** @type {(run: Run, clock: ClockName) => string} */
  const clock = (run, name) => orDash(lastOf(run.val[name]) ?? lastOf(run.train[name]), duration)
    + (run.jobs > 1 ? ", shared" : "");
  const shown = table(data.runs, [
    textColumn("recipe", (run) => named(run.group, data.groups[run.group].label)),
    numberColumn("seed", (run) => run.seed),
    textColumn("status", (run) => run.status),
    numberColumn("steps", (run) => `${grouped(run.steps)} / ${grouped(run.total_steps)}`),
    numberColumn("validation loss", (run) => loss(lastOf(run.val.loss))),
    numberColumn("bits/byte", (run) => orDash(lastOf(run.val.bits_per_byte), fixed(4))),
    numberColumn("to target", toTarget),
    numberColumn("training", (run) => clock(run, "seconds")),
    numberColumn("wall", (run) => clock(run, "wall_seconds")),
    numberColumn("parameters", (run) => orDash(run.summary.params, short)),
    numberColumn("peak memory", (run) => orDash(run.summary.peak_memory_bytes, bytes)),
  ]);
  shown.classList.add("tight");
  return shown;
}

/** @type {Draw} */
export function resultSection(data, state, box) {
  const axis = AXES[state.axis];
  const { race, ablation, tuning } = data;
  const rows = race?.metrics[axis.metric];
  const cards = ablation && !data.raced ? ablationCards(ablation)
    : tuning && !data.raced ? tuningCards(tuning)
    : race && rows && race.recipes.length > 1 ? raceCards(race, rows, axis) : groupCards(data, rows, axis);
  if (cards.length) box.append(el("div", { class: "cards" }, cards));
  if (data.runs.length > 4) box.append(folded(`All ${data.runs.length} runs`, runTable(data, axis)));
  else if (data.runs.length) box.append(runTable(data, axis));
}
