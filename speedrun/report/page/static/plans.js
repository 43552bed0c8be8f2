// What the runs would take on GPUs: a bar for each machine or recipe, cut into what a step goes to.

import { drawing, el, put, svg } from "./dom.js";
import { figure } from "./figure.js";
import { bytes, duration, percent, short } from "./numbers.js";
import { keyMark, named, numberColumn, several, table, textColumn } from "./parts.js";

const TALL = 46; // of a bar with its label
const colorOf = (/** @type {string[]} */ kinds, /** @type {string} */ kind) => `var(--c${1 + kinds.indexOf(kind)})`;

/** @type {(box: HTMLElement, plans: Planned[], kinds: string[], nameOf: (plan: Planned) => string) => HTMLElement} */
function stepFigure(box, plans, kinds, nameOf) {
  return figure(box, (width) => {
    const picture = drawing(width, plans.length * TALL, "Shares of a planned step, by what they go to");
    plans.forEach((plan, index) => {
      const top = index * TALL + 4;
      put(picture, {}, svg("text", { class: "halo", x: 0, y: top + 12 },
        svg("tspan", { class: "strong" }, nameOf(plan)), svg("tspan", { dx: 10 }, `${duration(plan.step)} a step`)));
      let left = 0;
      for (const [kind, share] of plan.parts) {
        put(picture, {}, svg("rect", {
          class: "part", x: left * width, y: top + 19, width: Math.max(0, share * width - 1), height: 16, rx: 2,
          style: `fill:${colorOf(kinds, kind)}`, "fill-opacity": 0.85,
        }, svg("title", {}, `${kind}: ${percent(share)}`)));
        left += share;
      }
    });
    return [picture];
  });
}

/** @type {Draw} */
export function planSection(data, _, box) {
  const { plans } = data;
  if (!plans.length) return;
  const many = several(data);
  const kinds = [...new Set(plans.flatMap((plan) => plan.parts.map(([kind]) => kind)))];
  const nameOf = (/** @type {Planned} */ plan) => (many ? data.groups[plan.group].label : plan.machine);
  const where = many ? ` on ${plans[0].machine}` : "";
  box.append(
    el("p", { class: "say" }, `Planned${where}, not measured: what the configuration makes a step do, at rates that were`,
      " fitted on published runs on H100. Other chips are taken to reach the same share of theirs."),
    el("p", { class: "keys" }, kinds.map((kind) => el("span", {}, keyMark(colorOf(kinds, kind)), kind))),
    stepFigure(el("div", { class: "figure", id: "plan-figure" }), plans, kinds, nameOf),
    table(plans, [
      many ? textColumn("recipe", (plan) => named(plan.group, nameOf(plan))) : textColumn("machine", nameOf),
      numberColumn("per step", ({ step }) => duration(step)),
      numberColumn("the run", ({ run }) => duration(run)),
      numberColumn("tokens/s", (plan) => short(plan.tokens_per_second)),
      numberColumn("MFU", ({ mfu }) => percent(mfu)),
      numberColumn("passes a step", ({ passes }) => String(passes)),
      numberColumn("memory a GPU", ({ memory, room, fits }) =>
        `${bytes(memory)} of ${bytes(room)}${fits ? "" : ": does not fit"}`),
    ]));
}
