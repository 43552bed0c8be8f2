// What the models write: the last sample of each group, the others folded.

import { el } from "./dom.js";
import { folded, named } from "./parts.js";

function written(/** @type {Run["samples"][number]} */ { prompt, text }) {
  const begun = prompt && text.startsWith(prompt);
  return el("pre", { tabindex: 0 }, begun ? [el("b", {}, prompt), text.slice(prompt.length)] : text);
}

/** @type {Draw} */
export function sampleSection(data, _, box) {
  const runs = data.runs.filter((run) => run.samples.length);
  if (!runs.length) return;
  const firsts = runs.filter((run, i) => runs.findIndex((other) => other.group === run.group) === i);
  /** @type {(run: Run, samples: Run["samples"]) => Element | null} */
  const shown = (run, samples) => (samples.length ? el("div", { class: "sample" },
    el("h3", {}, named(run.group, data.groups[run.group].label), el("span", { class: "small" }, ` seed ${run.seed}`)),
    samples.map(written)) : null);
  box.append(el("div", { class: "pairs" }, firsts.map((run) => shown(run, run.samples.slice(-1)))));
  const others = runs.map((run) => shown(run, firsts.includes(run) ? run.samples.slice(0, -1) : run.samples));
  if (others.some(Boolean)) box.append(folded("Other samples", el("div", { class: "pairs" }, others)));
}
