// The results: headline, loss curves, time to target, ablation, published runs.
// A section fills its box and returns whether there was anything to show.

function card(index, name, big, ...under) {
  const style = known(index) ? `--hue:${hue(index)}` : null;
  return el("div", { class: "fact", style },
    el("span", { class: "name" }, name), el("b", {}, big), under.filter(known).map((text) => el("span", {}, text)));
}

function raceCard(race, row, i, axis) {
  const index = race.groups[i];
  const name = race.recipes[i];
  const missed = known(row.reached) && row.reached < row.n;
  const shortfall = missed ? `${row.n - row.reached} of ${plural(row.n, "seed")} missed ${race.target}` : null;
  if (i === 0) {
    const under = shortfall || `${axis.noun} to a loss of ${race.target}, mean of ${plural(row.n, "seed")}`;
    return card(index, name, orDash(row.mean, axis.form), under);
  }
  if (!known(row.ratio)) return card(index, name, "–", shortfall || `${race.recipes[0]} has no mean to compare with`);
  const ends = interval(row.ratio_low, row.ratio_high, fixed(2));
  const lone = Math.min(row.n, race.metrics[axis.to][0].n) < 2;
  const without = lone ? "one seed: no interval" : "the seeds differ too much for an interval";
  const bounds = known(row.ratio_low) ? `95% interval ${ends}` : without;
  return card(index, name, `${row.ratio.toFixed(2)}×`, `the ${axis.noun} of ${race.recipes[0]}`, bounds);
}

function plainCards(D, rows, axis) {
  return D.groups.flatMap((group, index) => {
    const runs = runsOf(D, index);
    const mean = (pick) => averageKnown(runs.map(pick));
    const final = mean((run) => lastOf(run.val.loss));
    const row = rows && rows[D.race.groups.indexOf(index)];
    const rate = several(D) ? null : mean((run) => run.summary.tokens_per_second);
    const size = several(D) ? null : runs[0].summary.params;
    const seeds = runs.length > 1 ? `, mean of ${plural(runs.length, "run")}` : "";
    return [
      known(final) ? card(index, group.label, loss(final), `last validation loss${seeds}`) : null,
      row && known(row.mean) ? card(index, `to ${D.race.target}`, axis.form(row.mean), axis.noun) : null,
      known(rate) ? card(null, "throughput", short(rate), "tokens per second") : null,
      known(size) ? card(null, "parameters", short(size), grouped(size)) : null,
    ].filter(known);
  });
}

function runTable(D, axis) {
  const header = [["recipe"], ["seed", "n"], ["status"], ["steps", "n"], ["validation loss", "n"], ["bits/byte", "n"],
    ["to target", "n"], ["training", "n"], ["wall", "n"], ["parameters", "n"], ["peak memory", "n"]];
  const row = (run) => {
    const hit = known(D.target) ? run.val.loss.findIndex((value) => known(value) && value <= D.target) : -1;
    const late = known(D.target) ? "not reached" : "no target";
    const clock = (column) => orDash(lastOf(run.val[column]) ?? lastOf(run.train[column]), duration);
    return [named(run.group, D.groups[run.group].label), run.seed, run.status,
      `${grouped(run.steps)} / ${grouped(run.total_steps)}`, loss(lastOf(run.val.loss)),
      orDash(lastOf(run.val.bits_per_byte), fixed(4)), hit >= 0 ? axis.form(run.val[axis.of][hit]) : late,
      clock("seconds"), clock("wall_seconds"), orDash(run.summary.params, short),
      orDash(run.summary.peak_memory_bytes, bytes)];
  };
  const table = fillTable(header, D.runs.map(row));
  table.classList.add("tight");
  return table;
}

// The headline of an ablation: how much is settled, and the largest effects that are.
function ablationCards(ablation) {
  const alpha = ablation.alpha ?? 0.05;
  const effects = ablation.effects.filter((one) => one.metric === "val_loss");
  const settled = effects.filter((one) => known(one.effect) && (one.p_holm ?? one.p ?? 1) < alpha);
  settled.sort((a, b) => Math.abs(b.effect) - Math.abs(a.effect));
  const largest = settled.slice(0, 3).map((one) => card(null, one.switch, signed(one.effect, 4),
    `on the final loss when ${one.switch.includes("=") ? "set" : "left out"}`, pValue(one.p_holm ?? one.p)));
  return [card(null, "settled", `${settled.length} of ${effects.length}`, `changes, at ${alpha} after Holm’s correction`), ...largest];
}

function resultSection(D, S, box) {
  const axis = AXES[S.axis];
  const rows = D.race && D.race.metrics[axis.to];
  const compared = rows && D.race.recipes.length > 1;
  const ablated = D.ablation && !D.raced;
  const cards = ablated ? ablationCards(D.ablation)
    : compared ? rows.map((row, i) => raceCard(D.race, row, i, axis)) : plainCards(D, rows, axis);
  if (cards.length) box.append(el("div", { class: "cards" }, cards));
  if (D.runs.length > 4) {
    box.append(el("details", { class: "bare" }, el("summary", {}, `All ${D.runs.length} runs`), runTable(D, axis)));
  } else if (D.runs.length) box.append(runTable(D, axis));
  return cards.length + D.runs.length > 0;
}

function lossSection(D, S, box, again) {
  if (!D.runs.length) return false;
  const axis = AXES[S.axis];
  const training = S.curve === "train";
  const series = groupSeries(D, S, S.curve, "loss");
  const bands = [];
  // Published times are those of another machine: only tokens and steps can be laid over.
  const overlaid = training || !["tokens", "steps"].includes(S.axis) ? [] : D.published;
  for (const record of overlaid.filter((one) => isShown(S, one.group))) {
    const color = "var(--ink)";
    const points = record.points.map((p) => [p[axis.of], p.mean, p.std]);
    series.push({ label: `record ${record.record}, published`, color, dash: "5 4", width: 1.6, points });
    const spread = points.filter((p) => known(p[2]));
    bands.push({ color, points: spread.map(([x, mean, std]) => [x, mean - 2 * std, mean + 2 * std]) });
  }
  const lines = known(D.target) ? [{ y: D.target, text: `target ${D.target}` }] : [];
  const stretch = Math.max(...D.runs.map((run) => run.train.stretch[0] || 1));
  const averaged = training && stretch > 1 ? `Each point is the mean of ${stretch} steps. ` : "";
  const seeded = D.groups.some((_, i) => runsOf(D, i).length > 1);
  const dashed = overlaid.length ? "dashed: published mean, band ± 2 standard deviations" : "";
  const unlike = overlaid.map((record) => setOtherwise(D, record)).join("");
  box.append(
    el("div", { class: "controls" },
      choice(S, "curve", "Which loss", { val: "Validation", train: "Training" }, again),
      choice(S, "range", "Range of losses", { detail: "Detail", whole: "Whole" }, again)),
    legend(D, S, again, el("span", { class: "small" }, dashed)),
    lineChart(el("div", { class: "chart", id: "loss-chart" }), {
      series, bands, lines, label: `${training ? "Training" : "Validation"} loss over ${axis.noun}`,
      xForm: axis.form, xTime: axis.form === duration, yForm: (v) => trimmed(v.toFixed(3)), tipForm: loss,
      yDomain: S.range === "detail" ? closeUp(series, lines) : null,
    }),
    el("p", { class: "small" }, averaged,
      seeded ? "Thin lines are single seeds, thick ones their mean over the steps all seeds have." : "", unlike));
  return true;
}

// A recipe's name promises nothing: what a run sets otherwise than the record it is laid over.
function setOtherwise(D, record) {
  if (!record.changed.length) return "";
  const most = 8;
  const more = record.changed.length - most;
  const keys = record.changed.slice(0, most).join(", ") + (more > 0 ? ` and ${grouped(more)} more` : "");
  return ` ${D.groups[record.group].label} is set otherwise than record ${record.record} in ${keys}.`;
}

// From the best loss up to where the slowest curve stands after an eighth of its way.
function closeUp(series, lines) {
  const late = series.filter((one) => one.points.length).map((one) => {
    const end = one.points.at(-1)[0];
    const points = one.points.filter(([x]) => x >= end / 8);
    return { points: points.length > 1 ? points : one.points };
  });
  return domainOf(late, lines);
}

function targetSection(D, S, box) {
  const axis = AXES[S.axis];
  const race = D.race;
  if (!race || !Object.keys(race.metrics).length) return false;
  const rows = race.metrics[axis.to];
  if (!rows) {
    box.append(el("p", { class: "small" }, `No run states its ${axis.noun} to the target.`));
    return true;
  }
  const partly = (row) => known(row.reached) && row.reached < row.n;
  const bars = rows.map((row, i) => {
    const ratio = i > 0 && known(row.ratio) ? ` · ${row.ratio.toFixed(2)}×` : "";
    const mean = known(row.mean) ? axis.form(row.mean) + ratio : "no run yet";
    const text = partly(row) ? `${row.reached} of ${row.n} reached it` : mean;
    return { ...row, label: race.recipes[i], color: hue(race.groups[i]), text };
  });
  const header = [["recipe"], ["seeds", "n"], ["mean", "n"], ["deviation", "n"], ["95% interval", "n"],
    [`ratio to ${race.recipes[0]}`, "n"], ["95% interval", "n"], ["last loss", "n"]];
  const table = rows.map((row, i) => {
    const final = race.final[i];
    const spread = known(final.std) ? ` ± ${final.std.toFixed(4)}` : "";
    return [named(race.groups[i], race.recipes[i]), partly(row) ? `${row.reached} of ${row.n}` : row.n,
      orDash(row.mean, axis.form), orDash(row.std, axis.form),
      known(row.low) ? interval(row.low, row.high, axis.form) : "–", orDash(row.ratio, fixed(3)),
      i > 0 && known(row.ratio_low) ? interval(row.ratio_low, row.ratio_high, fixed(3)) : "–",
      known(final.mean) ? loss(final.mean) + spread : "–"];
  });
  const every = Math.max(0, ...D.groups.map((group) => group.validation_every || 0));
  box.append(
    barFigure(el("div", { class: "figure", id: "target-figure" }), bars, axis.form,
      `${axis.label} to the target by recipe`),
    fillTable(header, table),
    el("p", { class: "small" }, "Bars are means, circles single seeds, whiskers the 95% t interval of the mean; "
      + "ratios of means carry Fieller’s interval. ",
    every ? `Losses are known every ${plural(every, "step")}, so a time to the target may be late by as much.` : ""));
  return true;
}

const plusMinus = (form) => (value) => (value < 0 ? "−" : "+") + form(Math.abs(value));
const EFFECTS = {
  val_loss: ["final loss", (value) => signed(value, 4)],
  tokens_to_target: ["tokens to target", plusMinus(short)],
  seconds_to_target: ["training time to target", plusMinus(duration)],
};
const effectOf = (metric) => EFFECTS[metric] || [metric.replaceAll("_", " "), plusMinus(short)];

function ablationSection(D, S, box, again) {
  if (!D.ablation || !D.ablation.effects.length) return false;
  const metrics = [...new Set(D.ablation.effects.map((one) => one.metric))];
  if (!metrics.includes(S.effect)) S.effect = metrics[0];
  const [noun, form] = effectOf(S.effect);
  const alpha = D.ablation.alpha ?? 0.05;
  const family = D.ablation.effects.filter((one) => one.metric === S.effect);
  const missing = family.filter((one) => !known(one.effect));
  const effects = family.filter((one) => known(one.effect)).sort((a, b) => b.effect - a.effect);
  const pairs = (one) => {
    const all = one.of ?? D.ablation.seeds;
    return known(all) && one.n !== all ? `${one.n ?? 0} of ${all}` : one.n ?? "–";
  };
  const without = S.effect.endsWith("_to_target") ? "reached the target" : "have a number";
  const rows = effects.map((one) => {
    const p = one.p_holm ?? one.p;
    const settled = known(p) && p < alpha;
    const more = one.more_seeds > 0 ? `, open: ${plural(one.more_seeds, "more seed")}` : ", open";
    const verdict = settled ? Math.sign(one.effect) : 0;
    return { ...one, label: one.switch, verdict, text: pValue(p) + (settled ? "" : more) };
  });
  rows.push(...missing.map((one) => (
    { ...one, label: one.switch, verdict: 0, text: `${pairs(one)} pairs ${without}` })));
  if (metrics.length > 1) {
    const options = Object.fromEntries(metrics.map((metric) => [metric, effectOf(metric)[0]]));
    box.append(el("div", { class: "controls" }, choice(S, "effect", "Effect on", options, again)));
  }
  const bare = (p) => orDash(p, (value) => pValue(value).slice(4));
  const header = [["change"], ["effect", "n"], ["95% interval", "n"], ["p", "n"], ["p, Holm", "n"],
    ["pairs", "n"], ["more seeds", "n"], ["settings"]];
  const settings = (one) => (D.ablation.settings?.[one.switch] || []).join(" ");
  const table = [...effects, ...missing].map((one) => [one.switch, orDash(one.effect, form),
    known(one.low) ? interval(one.low, one.high, form) : "–", bare(one.p), bare(one.p_holm), pairs(one),
    orDash(one.more_seeds, grouped), { class: "mono", text: settings(one) }]);
  box.append(
    el("p", { class: "say" }, `Effect on ${noun} of one change at a time to ${D.ablation.recipe || "the recipe"}, paired `
      + `by seed, with 95% intervals: what a change makes worse, the technique was good for. Filled marks are settled `
      + `at ${alpha} after Holm’s correction for ${plural(family.length, "test")}; “more seeds” is what an open `
      + "question would take.",
    missing.length ? ` No effect is given where not all pairs ${without}: the lucky ones would flatter it.` : ""),
    forestFigure(el("div", { class: "figure", id: "forest-figure" }), rows, form, `Effect of each switch on ${noun}`),
    el("details", { class: "bare" }, el("summary", {}, "Figures"), fillTable(header, table)));
  return true;
}

function publishedSection(D, S, box) {
  for (const record of D.published) {
    const group = D.groups[record.group];
    const color = hue(record.group);
    const borrowed = record.borrowed
      ? ` Only one log of it is public, so the spread is that of record ${record.borrowed}.` : "";
    const length = record.steps !== group.steps
      ? ` The record ran ${grouped(record.steps)} steps, these ${grouped(group.steps)}.` : "";
    box.append(el("p", { class: "say" }, `${group.label} against the public logs of record ${record.record}: `
      + `distance from their mean in standard deviations of one run.${borrowed}${length}${setOtherwise(D, record)}`));
    const series = record.runs.map((run) => ({
      label: run.name, color, width: 1.8, dots: true,
      points: run.rows.filter((row) => known(row.deviations)).map((row) => [row.step, row.deviations]),
    }));
    const most = 1.08 * Math.max(3, ...series.flatMap((one) => one.points.map((p) => Math.abs(p[1]))));
    if (series.some((one) => one.points.length)) {
      box.append(lineChart(el("div", { class: "chart", id: `published-${record.group}` }), {
        series, height: 220, label: "Deviation from the published mean", yDomain: [-most, most],
        bands: [{ color, points: record.points.map((p) => [p.step, -2, 2]) }],
        xForm: AXES.steps.form, yForm: (v) => signed(v, 0), tipForm: (v) => `${signed(v, 2)} sd`,
      }));
    }
    const header = [["step", "n"], ["loss", "n"], ["published", "n"], ["difference", "n"],
      ["standard deviations", "n"]];
    const figures = (row) => [grouped(row.step), loss(row.loss), loss(row.published),
      signed(row.loss - row.published, 4), orDash(row.deviations, (value) => signed(value, 2))];
    box.append(...record.runs.map((run) =>
      el("details", {}, el("summary", {}, run.name), fillTable(header, run.rows.map(figures)))));
  }
  return D.published.length > 0;
}
