// What each technique is worth: effects of one change at a time.

import { el } from "./dom.js";
import { forestFigure } from "./intervals.js";
import { duration, grouped, interval, known, orDash, plural, pValue, short, signed } from "./numbers.js";
import { choice, folded, monospaced, numberColumn, table, textColumn } from "./parts.js";

/** @type {(format: Format) => Format} */
const plusMinus = (format) => (value) => (value < 0 ? "−" : "+") + format(Math.abs(value));
/** @type {Record<string, { noun: string, format: Format }>} */
const METRICS = {
  val_loss: { noun: "final loss", format: (value) => signed(value, 4) },
  tokens_to_target: { noun: "tokens to target", format: plusMinus(short) },
  seconds_to_target: { noun: "training time to target", format: plusMinus(duration) },
};
function metricOf(/** @type {string} */ metric) {
  return METRICS[metric] || { noun: metric.replaceAll("_", " "), format: plusMinus(short) };
}

/** @type {Draw} */
export function ablationSection(data, state, box, redraw) {
  const { ablation } = data;
  if (!ablation || !ablation.effects.length) return;
  const counted = ablation.effects.filter((one) => known(one.effect) || one.n !== 0); // 0: without a target
  const metrics = [...new Set((counted.length ? counted : ablation.effects).map((one) => one.metric))];
  if (!metrics.includes(state.effect)) state.effect = metrics[0];
  const { noun, format } = metricOf(state.effect);
  const alpha = ablation.alpha ?? 0.05;
  const family = ablation.effects.filter((one) => one.metric === state.effect);
  const missing = family.filter((one) => !known(one.effect));
  const found = family.filter((one) => known(one.effect)).sort((a, b) => Number(b.effect) - Number(a.effect));
  const without = state.effect.endsWith("_to_target") ? "reached the target" : "have a number";
  const pairs = (/** @type {Pick<Effect, "of" | "n">} */ one) => {
    const all = one.of ?? ablation.seeds;
    return known(all) && one.n !== all ? `${one.n ?? 0} of ${all}` : String(one.n ?? "–");
  };
  const rows = [...found, ...missing].map((one) => {
    const row = { ...one, label: one.switch, verdict: 0, settled: one.verdict };
    if (one.note) return { ...row, text: one.note };
    if (!known(one.effect)) return { ...row, text: `${pairs(one)} pairs ${without}` };
    if (one.verdict === "equal") return { ...row, text: `equal, ${pValue(one.p_equal)}` };
    const p = one.p_holm ?? one.p;
    const shown = known(p) && p < alpha ? Math.sign(one.effect) : 0; // of results without verdicts
    const verdict = one.verdict ? Number(one.verdict === "helps") - Number(one.verdict === "hurts") : shown;
    if (verdict) return { ...row, verdict, text: pValue(p) };
    const wanted = known(one.more_seeds) && one.more_seeds > 0 ? (one.n ?? 0) + one.more_seeds : 0;
    const more = wanted ? `: ${plural(wanted, "new seed")}` : "";
    return { ...row, text: `${pValue(p)}, open${more}` };
  });
  if (metrics.length > 1) {
    const nouns = Object.fromEntries(metrics.map((metric) => [metric, metricOf(metric).noun]));
    box.append(el("div", { class: "controls" }, choice(state, "effect", "Effect on", nouns, redraw)));
  }
  const bare = (/** @type {number} */ p) => pValue(p).slice("p = ".length);
  const intervals = ablation.until
    ? `with intervals that hold however often one looks`
    : "with 95% intervals";
  const open = ablation.until ? "" : "; “new seeds” are what a new test of an open question would take";
  const equal = ablation.margin ? ` Equal is within ${ablation.margin} nats.` : "";
  box.append(
    el("p", { class: "say" }, `Effect on ${noun} of one change at a time to ${ablation.recipe || "the recipe"}, paired `
      + `by seed, ${intervals}: what a change makes worse, the technique was good for. Filled marks are settled `
      + `at ${alpha} after correction for ${plural(family.length, "test")}${open}.${equal}`,
    missing.length ? ` No effect is given where not all pairs ${without}: the lucky ones would flatter it.` : ""),
    forestFigure(el("div", { class: "figure", id: "forest-figure" }), rows, format, `Effect of each switch on ${noun}`),
    folded("Figures", table(rows, [
      textColumn("change", (one) => one.switch),
      numberColumn("effect", (one) => orDash(one.effect, format)),
      numberColumn("interval", (one) => interval(one.low, one.high, format)),
      numberColumn("p", (one) => orDash(one.p, bare)),
      numberColumn("p, corrected", (one) => orDash(one.p_holm, bare)),
      numberColumn("p of equality", (one) => orDash(one.p_equal, bare)),
      textColumn("verdict", (one) => one.settled ?? ""),
      numberColumn("pairs", pairs),
      numberColumn("new seeds", (one) => orDash(one.more_seeds ? (one.n ?? 0) + one.more_seeds : null, grouped)),
      textColumn("settings", (one) => monospaced((ablation.settings?.[one.switch] || []).join(" "))),
    ])));
}
