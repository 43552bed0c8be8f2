// The page: which sections it has, what can be switched, and the live connection.

// id, heading, word in the navigation, what draws it, whether the axis changes it
const SECTIONS = [
  ["result", "Result", "Result", resultSection, true],
  ["ablation", "What each technique is worth", "Ablation", ablationSection, false],
  ["loss", "Loss", "Loss", lossSection, true],
  ["target", "How soon the target is reached", "Target", targetSection, true],
  ["published", "Against the published runs", "Published", publishedSection, false],
  ["schedules", "Schedules", "Schedules", scheduleSection, false],
  ["throughput", "Throughput", "Throughput", throughputSection, true],
  ["events", "Events", "Events", eventSection, true],
  ["mask", "Who attends to whom", "Attention", maskSection, false],
  ["samples", "What the models write", "Samples", sampleSection, false],
  ["config", "What is set differently", "Config", configSection, false],
  ["repeat", "Repeat it", "Repeat", repeatSection, false],
];

const S = {
  axis: "tokens", curve: "val", range: "detail", rate: "tokens", effect: "val_loss",
  hidden: new Set(), mask: null, frame: null,
};
let D = JSON.parse(byId("data").textContent);

function leadOf() {
  const validated = [...new Set(D.runs.map((run) => run.summary.val_tokens).filter(known))];
  const place = D.runs.map((run) => run.environment.gpu || run.environment.cpu).find(known);
  return [
    D.groups.length ? `${plural(D.groups.length, "configuration")}, ${plural(D.runs.length, "run")}` : null,
    known(D.target) ? `target ${D.target} nats per token` : null,
    validated.length === 1 ? `validated on ${grouped(validated[0])} tokens` : null,
    place,
  ].filter(known).join(" · ");
}

// Draws a section anew and gives back what a redraw would lose: open details and the focus.
function drawSection(section) {
  const [id, heading, , draw] = section;
  const box = byId(id);
  const open = [...box.querySelectorAll("details")].map((one) => one.open);
  const nameOf = (node) => [node.tagName, node.name, node.id, node.type === "radio" ? node.value : ""].join();
  const focused = box.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  const hidden = [...S.hidden].join();
  const again = () => ([...S.hidden].join() === hidden ? drawSection(section) : drawAll());
  box.replaceChildren(el("div", { class: "head" }, el("h2", { id: `${id}-heading` }, heading)));
  const filled = draw(D, S, box, again);
  box.hidden = !filled;
  const controls = box.querySelector(":scope > .controls");
  if (controls) box.firstChild.append(controls);
  box.querySelectorAll(".chart, .figure").forEach((one) => one.redraw?.());
  box.querySelectorAll("details").forEach((one, i) => { if (i < open.length) one.open = open[i]; });
  if (focused) [...box.querySelectorAll("input, select, button")].find((one) => nameOf(one) === focused)?.focus();
  return filled;
}

function drawAll() {
  firstHue = D.groups.length > 1 ? 0 : 1;
  byId("title").replaceChildren(...D.title.split(" ").flatMap((word) => [el("span", { class: "word" }, word), " "]));
  byId("lead").textContent = leadOf();
  const shown = SECTIONS.filter(drawSection);
  byId("nav").replaceChildren(...shown.map(([id, , word]) => el("a", { href: `#${id}` }, word)));
}

function offerAxes() {
  const pick = (key) => () => {
    S.axis = key;
    SECTIONS.filter((section) => section[4]).forEach(drawSection);
  };
  byId("axis").append(...Object.entries(AXES).map(([key, axis]) => el("label", {},
    el("input", { type: "radio", name: "axis", value: key, checked: key === S.axis, onchange: pick(key) }), axis.label)));
}

// Follows the system until a theme is chosen by hand. Paper is always light: see the styles.
function offerThemes() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  const follow = () => { if (!chosen) root.dataset.theme = system.matches ? "dark" : "light"; };
  system.addEventListener("change", follow);
  follow();
  byId("theme").addEventListener("click", () => {
    chosen = true;
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
}

// Paper cannot be unfolded: tables and environments are opened for it, and closed again.
function preparePrint() {
  let opened = [];
  addEventListener("beforeprint", () => {
    const folded = "details:not([open])";
    opened = [...document.querySelectorAll(`#result ${folded}, #ablation ${folded}, #repeat ${folded}`)];
    opened.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
}

// Asks for news every two seconds; an unchanged tag costs nothing.
function connect() {
  const sign = byId("live");
  let tag = "";
  const say = (text, lost) => {
    sign.hidden = false;
    sign.textContent = text;
    sign.classList.toggle("lost", lost);
  };
  async function ask() {
    setTimeout(ask, 2000);
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch("data.json", { headers, cache: "no-store" }).catch(() => null);
    if (answer?.status === 200) {
      D = await answer.json();
      tag = answer.headers.get("ETag") || "";
      drawAll();
    }
    const well = answer !== null && (answer.ok || answer.status === 304);
    say(well ? "live" : answer ? "waiting" : "the server is gone", !well);
  }
  say("live", false);
  setTimeout(ask, 2000);
}

byId("main").append(...SECTIONS.map(([id]) => el("section", { id, "aria-labelledby": `${id}-heading` })));
byId("foot").textContent = "Made by speedrun. Everything on this page is in this one file.";
offerAxes();
offerThemes();
preparePrint();
drawAll();
if (D.live) connect();
