// The page of `speedrun serve`: a prompt and settings, and one run or two that go on from it.

import { keepCards, closeCard } from "./card.js";
import { RunColumn } from "./column.js";
import { byId, el } from "./dom.js";
import { SettingForm, remembered } from "./settings.js";
import { Refusal, servedRuns } from "./stream.js";
import { offerThemes } from "./theme.js";
import { LEVEL_NAMES } from "./tokens.js";
import { END_OF_TEXT, facts } from "./words.js";

const EXAMPLES = {
  "Once upon a time": "Once upon a time",
  "def main(": "def main(",
  "two documents": `This is the first document.\n${END_OF_TEXT}This is the second one. `,
};
const NOTHING = ""; // what the second select calls no second run

const prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt"));
/** @type {RunColumn[]} */
let columns = [];

function main() {
  offerThemes();
  keepCards();
  prompt.value = remembered().prompt ?? "";
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus(); // no keyboard comes up over the page
  const form = new SettingForm(byId("settings"));
  const writeAnew = () => start(form, (column, settings) => column.write(prompt.value, settings));
  byId("panel").addEventListener("submit", (event) => {
    event.preventDefault();
    writeAnew();
  });
  byId("panel").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    writeAnew();
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    closeCard();
    stop();
  });
  byId("on").addEventListener("click", () => {
    const begun = columns.filter((column) => column.written);
    if (begun.length) start(form, (column, settings) => (column.written ? column.writeOn(settings) : Promise.resolve()));
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", () => {
    columns.forEach((column) => column.clear());
    prompt.value = "";
    prompt.focus();
    refresh();
  });
  for (const [name, text] of Object.entries(EXAMPLES)) {
    byId("examples").append(el("button", { type: "button", class: "plain example", onclick: () => {
      prompt.value = text;
      writeAnew();
    } }, name));
  }
  const command = /Mac|iPhone|iPad/.test(navigator.userAgent) ? "⌘" : "Ctrl";
  byId("keys").textContent = `${command}+Enter writes, Enter begins a line, Escape stops.`;
  byId("shade").addEventListener("change", shade);
  byId("levels").append(...LEVEL_NAMES.map((name, level) => el("span", {}, el("i", { class: `level${level}` }), name)));
  shade();
  servedRuns().then(offerRuns).catch((error) => {
    if (!(error instanceof Refusal)) throw error;
    byId("lead").replaceChildren(el("span", { class: "error", role: "alert" }, `${error.message} Then load this page again.`));
  });
}

function shade() {
  const on = /** @type {HTMLInputElement} */ (byId("shade")).checked;
  byId("texts").classList.toggle("shaded", on);
  byId("levels").hidden = !on;
}

/** The first two side by side, until others are chosen. */
function offerRuns(/** @type {ServedRun[]} */ runs) {
  const options = () => runs.map((run) => el("option", { value: run.id }, run.id));
  const left = el("select", { id: "left" }, options());
  const right = el("select", { id: "right" }, options(), el("option", { value: NOTHING }, "nothing"));
  left.value = runs[0].id;
  right.value = runs[1]?.id ?? NOTHING;
  let chosen = [left.value, right.value];
  const choose = () => {
    // The same run twice would write the same text twice: the two change places.
    if (left.value === right.value) [left.value, right.value] = [chosen[1] || chosen[0], chosen[0]];
    if (left.value === right.value) right.value = NOTHING;
    chosen = [left.value, right.value];
    showRuns(runs.filter((run) => run.id === left.value).concat(runs.filter((run) => run.id === right.value)));
  };
  for (const select of [left, right]) select.addEventListener("change", choose);
  byId("runs").append(el("label", {}, "Runs", left), el("label", {}, "beside", right));
  byId("runs").hidden = runs.length < 2;
  choose();
}

/** A run that is still chosen keeps its text. */
function showRuns(/** @type {ServedRun[]} */ runs) {
  const kept = runs.map((run) => columns.find((column) => column.run === run) ?? new RunColumn(run));
  for (const column of columns) if (!kept.includes(column)) column.stop();
  columns = kept;
  byId("texts").replaceChildren(...columns.map((column) => column.element));
  const names = runs.map((run) => run.id).join(" beside ");
  byId("title").textContent = names;
  document.title = `${names} · Speedrun`;
  byId("texts").classList.toggle("alone", runs.length < 2);
  byId("lead").textContent = runs.length > 1 ? "Two runs go on from the same beginning, with the same settings."
    : facts(runs[0]);
  refresh();
}

/** @type {(form: SettingForm, work: (column: RunColumn, settings: Settings) => Promise<void>) => Promise<void>} */
async function start(form, work) {
  if (columns.some((column) => column.writing)) return;
  const settings = form.read();
  if (!settings) return;
  closeCard();
  const ends = columns.map((column) => work(column, settings));
  refresh();
  byId("said").textContent = "Writing";
  bringIntoView();
  await Promise.all(ends);
  byId("said").textContent = columns.map((column) => column.said).join(". ");
  refresh();
}

/** Where the text would begin below the screen, it is brought up as far as Stop stays in sight. */
function bringIntoView() {
  if (byId("texts").getBoundingClientRect().top < 0.7 * innerHeight) return;
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("stop").scrollIntoView({ block: "start", behavior: calm ? "auto" : "smooth" });
}

function stop() {
  columns.forEach((column) => column.stop());
}

/** Buttons that would do nothing say so. They keep the focus, so that it is where it was when a text ends. */
function refresh() {
  const writing = columns.some((column) => column.writing);
  const button = byId("stop");
  if (!writing && document.activeElement === button) byId("write").focus();
  button.hidden = !writing;
  byId("write").setAttribute("aria-disabled", String(writing));
  byId("on").setAttribute("aria-disabled", String(writing || !columns.some((column) => column.written)));
}

main();
