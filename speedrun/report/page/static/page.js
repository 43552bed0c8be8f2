// The page: which sections it has, in which order, and when they are drawn.

import { ablationSection } from "./ablation.js";
import { byId, el } from "./dom.js";
import { eventSection } from "./events.js";
import { drawFigures } from "./figure.js";
import { connect } from "./live.js";
import { lossSection } from "./loss.js";
import { maskSection } from "./mask.js";
import { grouped, known, plural } from "./numbers.js";
import { choice, startColors } from "./parts.js";
import { planSection } from "./plans.js";
import { publishedSection } from "./published.js";
import { resultSection } from "./result.js";
import { sampleSection } from "./samples.js";
import { AXES } from "./scales.js";
import { scheduleSection } from "./schedules.js";
import { configSection, repeatSection } from "./settings.js";
import { targetSection } from "./target.js";
import { offerThemes, preparePrint } from "./theme.js";
import { throughputSection } from "./throughput.js";
import { tuningSection } from "./tuning.js";

/** @type {Section[]} */
const SECTIONS = [
  { id: "result", heading: "Result", link: "Result", draw: resultSection, followsAxis: true },
  { id: "ablation", heading: "What each technique is worth", link: "Ablation", draw: ablationSection },
  { id: "tuning", heading: "What the search found", link: "Tuning", draw: tuningSection },
  { id: "loss", heading: "Loss", link: "Loss", draw: lossSection, followsAxis: true },
  { id: "target", heading: "How soon the target is reached", link: "Target", draw: targetSection, followsAxis: true },
  { id: "published", heading: "Against the published runs", link: "Published", draw: publishedSection },
  { id: "schedules", heading: "Schedules", link: "Schedules", draw: scheduleSection },
  { id: "throughput", heading: "Throughput", link: "Throughput", draw: throughputSection, followsAxis: true },
  { id: "plans", heading: "What it would take on GPUs", link: "On GPUs", draw: planSection },
  { id: "events", heading: "Events", link: "Events", draw: eventSection, followsAxis: true },
  { id: "mask", heading: "Who attends to whom", link: "Attention", draw: maskSection },
  { id: "samples", heading: "What the models write", link: "Samples", draw: sampleSection },
  { id: "config", heading: "What is set differently", link: "Config", draw: configSection },
  { id: "repeat", heading: "Repeat it", link: "Repeat", draw: repeatSection },
];

/** @type {State} */
const state = {
  axis: "tokens", curve: "val", range: "detail", rate: "tokens", effect: "val_loss",
  hidden: new Set(), mask: null, frame: null,
};
/** @type {PageData} */
let data = JSON.parse(byId("data").textContent ?? "");
// Runs that are judged by their last loss were validated at both ends only, which is no curve.
if (data.runs.length && data.runs.every((run) => run.val.loss.length <= 2)) state.curve = "train";

function leadOf() {
  const validated = [...new Set(data.runs.map((run) => run.summary.val_tokens).filter(known))];
  const machine = data.runs.map((run) => run.environment.gpu || run.environment.cpu).find(known);
  const jobs = Math.max(1, ...data.runs.map((run) => run.jobs));
  return [
    data.groups.length ? `${plural(data.groups.length, "configuration")}, ${plural(data.runs.length, "run")}` : null,
    known(data.target) ? `target ${data.target} nats per token` : null,
    validated.length === 1 ? `validated on ${grouped(validated[0])} tokens` : null,
    machine,
    jobs > 1 ? `${jobs} runs at a time shared the machine: times do not compare` : null,
  ].filter(known).join(" · ");
}

/** What a redraw would lose of a section, as a function that gives it back: open details and the focus. */
function remember(/** @type {Element} */ box) {
  const open = [...box.querySelectorAll("details")].map((one) => one.open);
  const nameOf = (/** @type {Element} */ node) => [node.tagName, node.getAttribute("name"), node.id,
    node instanceof HTMLInputElement && node.type === "radio" ? node.value : ""].join();
  const { activeElement } = document;
  const focused = activeElement && box.contains(activeElement) ? nameOf(activeElement) : null;
  return () => {
    box.querySelectorAll("details").forEach((one, i) => { if (i < open.length) one.open = open[i]; });
    /** @type {NodeListOf<HTMLElement>} */
    const controls = box.querySelectorAll("input, select, button");
    if (focused) [...controls].find((one) => nameOf(one) === focused)?.focus();
  };
}

/** Whether there was anything to draw under the heading. */
function drawSection(/** @type {Section} */ section) {
  const { id, heading, draw } = section;
  const box = byId(id);
  const giveBack = remember(box);
  const hidden = [...state.hidden].join();
  const redraw = () => { if ([...state.hidden].join() === hidden) drawSection(section); else drawAll(); };
  const head = el("div", { class: "head" }, el("h2", { id: `${id}-heading` }, heading));
  box.replaceChildren(head);
  draw(data, state, box, redraw);
  box.hidden = box.childElementCount === 1;
  const controls = box.querySelector(":scope > .controls");
  if (controls) head.append(controls);
  drawFigures(box);
  giveBack();
  return !box.hidden;
}

function drawAll() {
  startColors(data);
  byId("title").replaceChildren(...data.title.split(" ").flatMap((word) => [el("span", { class: "word" }, word), " "]));
  byId("lead").textContent = leadOf();
  const shown = SECTIONS.filter(drawSection);
  byId("nav").replaceChildren(...shown.map(({ id, link }) => el("a", { href: `#${id}` }, link)));
}

const shared = data.runs.some((run) => run.jobs > 1);
const axes = /** @type {Record<AxisName, string>} */ (
  Object.fromEntries(Object.entries(AXES).filter(([, axis]) => !(shared && axis.isTime))
    .map(([name, axis]) => [name, axis.label])));
byId("nav").after(choice(state, "axis", "Measure by", axes, () => {
  SECTIONS.filter((section) => section.followsAxis).forEach(drawSection);
}));

byId("main").append(...SECTIONS.map(({ id }) => el("section", { id, "aria-labelledby": `${id}-heading` })));
offerThemes();
preparePrint();
drawAll();
if (data.live) {
  connect((news) => {
    data = news;
    drawAll();
  });
}
