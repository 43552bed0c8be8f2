// How the runs went: schedules, throughput, events, attention, samples, settings, commands.

const SCHEDULES = [
  ["lr", "Learning rate", " × peak", (value) => trimmed(value.toFixed(3))],
  ["momentum", "Momentum of Muon", "", (value) => trimmed(value.toFixed(3))],
  ["window", "Attention window", " tokens", short],
];

function scheduleSection(D, S, box) {
  const panels = SCHEDULES.map(([key, name, unit, form]) => {
    const distinct = new Map();
    D.groups.forEach((group, index) => {
      const points = group.schedules[key];
      if (!points.length || !isShown(S, index)) return;
      const found = distinct.get(JSON.stringify(points));
      if (found) found.label += `, ${group.label}`;
      else {
        distinct.set(JSON.stringify(points), {
          label: group.label, color: hue(index), dash: dashOf(index), points, steps: key === "window",
        });
      }
    });
    const series = [...distinct.values()];
    if (!series.length) return null;
    const [low, high] = extent(series.flatMap((one) => one.points.map((p) => p[1])));
    const yDomain = key === "momentum" ? [Math.min(low, high - 0.05) - 0.01, high + 0.01] : [0, high * 1.08];
    const keys = series.map((one) => el("span", {}, keyMark(one.color), one.label));
    return el("div", {}, el("h3", {}, name, el("span", { class: "small" }, unit)),
      several(D) ? el("p", { class: "keys" }, keys) : null,
      lineChart(el("div", { class: "chart" }), {
        series, yDomain, height: 190, label: `${name} over steps`, xForm: AXES.steps.form, yForm: form,
      }));
  }).filter(known);
  const note = several(D) ? " Where recipes agree, one line stands for all of them." : "";
  box.append(el("div", { class: "multiples" }, panels), el("p", { class: "small" }, `Over steps.${note}`));
  return panels.length > 0;
}

// Averages of neighbours, so that a rate shows its course and not each hiccup.
function calm(points, most) {
  const size = Math.ceil(points.length / most);
  const found = [];
  for (let i = 0; i < points.length; i += size) {
    const part = points.slice(i, i + size);
    found.push([part.at(-1)[0], average(part.map((p) => p[1]))]);
  }
  return found;
}

function throughputSection(D, S, box, again) {
  if (!D.runs.some((run) => run.train.step.length)) return false;
  const axis = AXES[S.axis];
  const recorded = D.runs.some((run) => run.train.peak_share.some(known));
  const sharing = recorded && S.rate === "share";
  const series = groupSeries(D, S, "train", sharing ? "peak_share" : "tokens_per_second")
    .filter((one) => !one.quiet).map((one) => ({ ...one, width: 2, points: calm(one.points, 60) }));
  const most = Math.max(0, ...series.flatMap((one) => one.points.map((p) => p[1])));
  const noun = sharing ? "Share of peak" : "Tokens per second";
  if (recorded) {
    box.append(el("div", { class: "controls" },
      choice(S, "rate", "Rate", { tokens: "Tokens per second", share: "Share of peak" }, again)));
  }
  box.append(lineChart(el("div", { class: "chart", id: "throughput-chart" }), {
    series, height: 240, label: `${noun} over ${axis.noun}`, yDomain: [0, most * 1.08 || 1],
    xForm: axis.form, xTime: axis.form === duration, yForm: sharing ? percent : short,
  }));
  const rows = D.groups.map((group, index) => {
    const mean = (pick) => averageKnown(runsOf(D, index).map(pick));
    const rate = mean((run) => run.summary.tokens_per_second ?? lastOf(run.train.tokens) / lastOf(run.train.seconds));
    const share = mean((run) => averageKnown(run.train.peak_share));
    return [named(index, group.label), orDash(rate, grouped), rate > 0 ? duration(group.batch_tokens / rate) : "–",
      orDash(mean((run) => run.wait_share), percent), known(share) ? percent(share) : "not recorded",
      orDash(mean((run) => run.peak_flops), flops)];
  });
  box.append(fillTable([["recipe"], ["tokens/s", "n"], ["per step", "n"], ["waiting for data", "n"],
    ["share of peak", "n"], ["peak, measured", "n"]], rows));
  return true;
}

function eventSection(D, S, box) {
  const runs = D.runs.filter((run) => run.events.length);
  if (!runs.length) return false;
  const axis = AXES[S.axis];
  const kinds = [...new Set(runs.flatMap((run) => run.events.map((event) => event.kind)))];
  const rows = runs.map((run) => ({
    label: D.runs.length > 1 ? `${D.groups[run.group].label}, seed ${run.seed}` : run.name,
    color: hue(run.group),
    end: Math.max(0, ...[run.train, run.val, ...run.events].map((one) => [one[axis.of]].flat().at(-1) || 0)),
    events: run.events.map((event) => ({
      at: event[axis.of] || 0, kind: event.kind,
      title: `${eventMark(event.kind).text} at step ${event.step}${event.detail ? `: ${event.detail}` : ""}`,
    })),
  }));
  const count = runs.reduce((sum, run) => sum + run.events.length, 0);
  const list = runs.flatMap((run) => run.events.map((event) => [run.name, orDash(event.step, grouped),
    orDash(event.wall_seconds, duration), eventMark(event.kind).text, event.detail]));
  box.append(
    el("div", { class: "legend" }, kinds.map((kind) =>
      el("span", { class: "small mark" }, eventIcon(kind), eventMark(kind).text))),
    eventFigure(el("div", { class: "figure" }), rows, axis),
    el("details", { class: "bare" }, el("summary", {}, `List of ${plural(count, "event")}`),
      fillTable([["run"], ["step", "n"], ["wall", "n"], ["event"], ["detail"]], list)));
  return true;
}

function maskFacts(mask, frame) {
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const full = sum(frame.full);
  const computed = full + sum(frame.partial);
  const causal = (frame.partial.length * (frame.partial.length + 1)) / 2;
  const tokens = (window) => `${grouped(window * (mask.rule === "blocks" ? mask.block : 1))} tokens`;
  const facts = {
    step: grouped(frame.step),
    window: known(frame.window) ? tokens(frame.window) : "none: all that precedes",
    "blocks computed": `${grouped(computed)} of ${grouped(causal)} causal (${percent(computed / causal)})`,
    "of them full": `${grouped(full)} (${percent(full / computed)})`,
    "pairs visible": `${percent(frame.visible)} of the causal ones`,
  };
  return definitions(facts);
}

function maskSection(D, S, box, again) {
  if (!D.masks.length) return false;
  if (S.mask === null) S.mask = Math.max(0, D.masks.findIndex((one) => one.frames.length > 1));
  S.mask = Math.min(S.mask, D.masks.length - 1);
  const mask = D.masks[S.mask];
  const last = mask.frames.length - 1;
  S.frame = Math.min(S.frame ?? last, last);
  const picture = el("div", { class: "figure", id: "mask-figure" });
  const facts = el("div", { "aria-live": "polite" });
  const slider = el("input", { type: "range", id: "mask-step", min: 0, max: last, value: S.frame, oninput: () => {
    S.frame = Number(slider.value);
    show();
  } });
  function show() {
    const frame = mask.frames[S.frame];
    slider.setAttribute("aria-valuetext", `step ${frame.step}`);
    picture.replaceChildren(maskPicture(mask, frame));
    facts.replaceChildren(maskFacts(mask, frame));
  }
  show();
  const users = (one) => one.groups.map((index) => D.groups[index].label).join(", ");
  const options = D.masks.map((one, i) => el("option", { value: i, selected: i === S.mask }, users(one)));
  const pick = (event) => { S.mask = Number(event.target.value); S.frame = null; again(); };
  const made = mask.real ? "Documents are those of the first validation row."
    : "Documents are made up here: the run’s dataset is not at hand.";
  const total = mask.frames[0].partial.length;
  const left = D.groups.filter((_, index) => !D.masks.some((one) => one.groups.includes(index)));
  const unseen = left.length ? `No picture, to keep the page small: ${left.map((one) => one.label).join(", ")}.` : "";
  const swatch = (color, text) => el("span", { class: "line" },
    el("span", { class: "swatch", style: `background:var(${color})` }), text);
  box.append(
    el("p", { class: "say" },
      `A row of ${grouped(mask.length)} tokens in blocks of ${mask.block}: queries downward, keys to the right. `,
      mask.documents ? made : "Attention crosses documents in this recipe.",
      total > shownBlocks(mask) ? ` Shown are the first ${shownBlocks(mask)} blocks of ${total}.` : ""),
    el("div", { class: "maskbox" }, picture, el("div", {},
      D.masks.length > 1
        ? el("label", { class: "small" }, "Recipe ", el("select", { id: "mask-choice", onchange: pick }, options))
        : el("p", { class: "small" }, users(mask)),
      last > 0 ? el("label", { class: "small line", for: "mask-step" }, "Step of the run") : null,
      last > 0 ? slider : null, facts,
      el("p", { class: "small" }, swatch("--full", "full block: no mask needed"),
        swatch("--partial", "partial block: mask inside"), swatch("--grid", "skipped"),
        mask.frames[0].edge.length ? swatch("--seen", "tinted: pairs a query really sees") : null),
      el("p", { class: "small", id: "mask-unseen" }, unseen))));
  return true;
}

function sampleSection(D, S, box) {
  const runs = D.runs.filter((run) => run.samples.length);
  const firsts = runs.filter((run, i) => runs.findIndex((other) => other.group === run.group) === i);
  const text = ({ prompt, text: written }) => {
    const begun = prompt && written.startsWith(prompt);
    return el("pre", { tabindex: 0 }, begun ? [el("b", {}, prompt), written.slice(prompt.length)] : written);
  };
  const shown = (run, samples) => el("div", { class: "sample" },
    el("h3", {}, named(run.group, D.groups[run.group].label), el("span", { class: "small" }, ` seed ${run.seed}`)),
    samples.map(text));
  box.append(el("div", { class: "pairs" }, firsts.map((run) => shown(run, run.samples.slice(-1)))));
  const rest = runs.map((run) => [run, firsts.includes(run) ? run.samples.slice(0, -1) : run.samples])
    .filter(([, samples]) => samples.length);
  if (rest.length) {
    box.append(el("details", { class: "bare" }, el("summary", {}, "Other samples"),
      el("div", { class: "pairs" }, rest.map(([run, samples]) => shown(run, samples)))));
  }
  return runs.length > 0;
}

function configSection(D, S, box) {
  if (!several(D)) return false;
  const cell = (value, i, values) => ({ class: i > 0 && value !== values[0] ? "mono changed" : "mono", text: value });
  box.append(D.diff.length
    ? fillTable([["key"], ...D.groups.map((group) => [group.label])],
      D.diff.map((row) => [{ class: "mono", text: row.key }, ...row.values.map(cell)]))
    : el("p", { class: "small" }, "The runs are set alike but for recipe name and seed."));
  return true;
}

function repeatSection(D, S, box) {
  if (D.race && D.race.command) box.append(el("h3", {}, "The race"), commandBox(D.race.command));
  if (D.ablation && D.ablation.command) box.append(el("h3", {}, "The ablation"), commandBox(D.ablation.command));
  D.groups.forEach((group, index) => {
    const [first, ...others] = runsOf(D, index);
    const seeds = others.map((run) => run.seed).join(", ");
    const likewise = seeds ? ` seed ${first.seed}; likewise with --seed ${seeds}` : "";
    box.append(el("h3", {}, group.label, el("span", { class: "small" }, likewise)), commandBox(first.command));
  });
  const places = new Map();
  for (const run of D.runs) {
    const { command, ...place } = run.environment;
    const key = JSON.stringify(place);
    if (!Object.keys(place).length) continue;
    if (!places.has(key)) places.set(key, [place, []]);
    places.get(key)[1].push(run.name);
  }
  for (const [place, names] of places.values()) {
    const facts = Object.entries(place).map(([key, value]) =>
      [key.replaceAll("_", " "), key.endsWith("_bytes") ? bytes(value) : String(value)]);
    box.append(el("details", {}, el("summary", {}, "Environment ",
      el("span", { class: "small" }, places.size > 1 ? names.join(", ") : `of ${plural(D.runs.length, "run")}`)),
    definitions(Object.fromEntries(facts))));
  }
  return box.childElementCount > 1;
}

function definitions(facts) {
  const row = ([key, value]) => [el("dt", {}, key), el("dd", {}, value)];
  return el("dl", { class: "plain" }, Object.entries(facts).map(row));
}

function commandBox(text) {
  const pre = el("pre", { tabindex: 0 }, text);
  const copy = async () => {
    getSelection().selectAllChildren(pre);
    try { await navigator.clipboard.writeText(text); } catch { document.execCommand("copy"); }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  const button = el("button", { type: "button", class: "plain", onclick: copy }, "Copy");
  return el("div", { class: "command" }, pre, button);
}
