// What sections share: tables, switches, legends, and curves of a group of runs.
// D is the page's data, S its state. Text goes in as text, never as markup.

const runsOf = (D, index) => D.runs.filter((run) => run.group === index);
const isShown = (S, index) => !S.hidden.has(index);
const several = (D) => D.groups.length > 1;
const lastOf = (values) => values.filter(known).at(-1);
const orDash = (value, form) => (known(value) ? form(value) : "–");
const fixed = (digits) => (value) => value.toFixed(digits);
const keyMark = (color) => el("i", { class: "key", style: `--hue:${color}` });
const named = (index, text) => [keyMark(hue(index)), text];

// header: [text, class] a column; a cell is text, nodes, or {class, text}.
function fillTable(header, rows) {
  const cell = (value, i) => {
    const marked = value && !Array.isArray(value) && !(value instanceof Node) && value.text !== undefined;
    return el("td", { class: marked ? value.class : header[i][1] }, marked ? value.text : value);
  };
  const titles = header.map(([text, kind]) => el("th", { class: kind, scope: "col" }, text));
  const body = rows.map((cells) => el("tr", {}, cells.map(cell)));
  return el("div", { class: "scroll" },
    el("table", { class: "data" }, el("thead", {}, el("tr", {}, titles)), el("tbody", {}, body)));
}

function choice(S, key, name, options, again) {
  const one = ([value, text]) => el("label", {}, el("input", {
    type: "radio", name: key, value, checked: S[key] === value,
    onchange: () => { S[key] = value; again(); },
  }), text);
  return el("fieldset", { class: "switch" }, el("legend", {}, name), Object.entries(options).map(one));
}

function legend(D, S, again, extra) {
  const button = (group, index) => {
    const seeds = runsOf(D, index).length;
    const toggle = () => {
      if (!S.hidden.delete(index)) S.hidden.add(index);
      again();
    };
    return el("button", {
      type: "button", "aria-pressed": String(isShown(S, index)), style: `--hue:${hue(index)}`, onclick: toggle,
    }, el("i", { class: dashOf(index) ? "dash" : null }), group.label,
    seeds > 1 ? el("span", { class: "small" }, `× ${seeds}`) : null);
  };
  return el("div", { class: "legend", role: "group", "aria-label": "Show or hide" }, D.groups.map(button), extra);
}

// Mean over a group's runs at the steps all of them have; one run is its own mean.
function meanCurve(runs, curve, column, axis) {
  const tables = runs.map((run) => {
    const from = run[curve];
    const byStep = new Map();
    from.step.forEach((step, i) => {
      if (known(from[column][i])) byStep.set(step, [from[axis.of][i], from[column][i]]);
    });
    return byStep;
  });
  if (!tables.length) return [];
  const shared = [...tables[0].keys()].filter((step) => tables.every((table) => table.has(step)));
  return shared.map((step) => [0, 1].map((i) => average(tables.map((table) => table.get(step)[i]))));
}

function ownCurve(run, curve, column, axis) {
  const from = run[curve];
  return from.step.map((_, i) => [from[axis.of][i], from[column][i]]).filter(([, value]) => known(value));
}

// For each group its mean, and under it its seeds as thin lines that the cursor passes over.
function groupSeries(D, S, curve, column) {
  const axis = AXES[S.axis];
  const series = [];
  D.groups.forEach((group, index) => {
    if (!isShown(S, index)) return;
    const runs = runsOf(D, index);
    const color = hue(index);
    if (runs.length > 1) {
      series.push(...runs.map((run) => ({
        label: `${group.label}, seed ${run.seed}`, color, width: 1.1, opacity: 0.38, quiet: true,
        points: ownCurve(run, curve, column, axis),
      })));
    }
    series.push({
      label: group.label, color, dash: dashOf(index), dots: true, width: 2.4,
      points: meanCurve(runs, curve, column, axis),
    });
  });
  return series;
}
