// What is set differently between the groups, and how to repeat each: commands and environments.

import { el } from "./dom.js";
import { bytes, plural } from "./numbers.js";
import { definitions, monospaced, runsOf, several, table, textColumn } from "./parts.js";

/** @type {Draw} */
export function configSection(data, _, box) {
  if (!several(data)) return;
  if (!data.diff.length) {
    box.append(el("p", { class: "small" }, "The runs are set alike but for recipe name and seed."));
    return;
  }
  /** @type {Column<PageData["diff"][number]>[]} */
  const groups = data.groups.map((group, i) =>
    textColumn(group.label, ({ values }) => monospaced(values[i], values[i] !== values[0])));
  box.append(table(data.diff, [textColumn("key", ({ key }) => monospaced(key)), ...groups]));
}

/** @type {Draw} */
export function repeatSection(data, _, box) {
  if (data.race?.command) box.append(el("h3", {}, "The race"), commandBox(data.race.command));
  if (data.ablation?.command) box.append(el("h3", {}, "The ablation"), commandBox(data.ablation.command));
  if (data.tuning?.command) box.append(el("h3", {}, "The tuning"), commandBox(data.tuning.command));
  data.groups.forEach((group, index) => {
    const [first, ...others] = runsOf(data, index);
    const seeds = others.map((run) => run.seed).join(", ");
    const likewise = seeds ? ` seed ${first.seed}; likewise with --seed ${seeds}` : "";
    box.append(el("h3", {}, group.label, el("span", { class: "small" }, likewise)), commandBox(first.command));
    if (group.own_code) {
      box.append(el("p", { class: "small" }, "Made with code of its own: ", el("span", { class: "mono" }, group.own_code)));
    }
  });
  const places = environments(data.runs);
  for (const [text, names] of places) {
    const facts = Object.entries(JSON.parse(text)).map(([key, value]) =>
      [key.replaceAll("_", " "), key.endsWith("_bytes") ? bytes(Number(value)) : String(value)]);
    const whose = places.size > 1 ? names.join(", ") : `of ${plural(data.runs.length, "run")}`;
    box.append(el("details", {},
      el("summary", {}, "Environment ", el("span", { class: "small" }, whose)), definitions(Object.fromEntries(facts))));
  }
}

/** Who ran in each of the distinct environments, by their JSON; the command differs with each run. */
function environments(/** @type {Run[]} */ runs) {
  /** @type {Map<string, string[]>} */
  const found = new Map();
  for (const run of runs) {
    const text = JSON.stringify({ ...run.environment, command: undefined });
    if (text !== "{}") found.set(text, [...found.get(text) ?? [], run.name]);
  }
  return found;
}

function commandBox(/** @type {string} */ text) {
  const pre = el("pre", { tabindex: 0 }, text);
  const copy = async () => {
    getSelection()?.selectAllChildren(pre);
    try { await navigator.clipboard.writeText(text); } catch { document.execCommand("copy"); }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  const button = el("button", { type: "button", class: "plain", onclick: copy }, "Copy");
  return el("div", { class: "command" }, pre, button);
}
