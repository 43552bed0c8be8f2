// What sections share: groups and their colors, tables, choices, folded parts, lists of facts.

import { el } from "./dom.js";
import { known } from "./numbers.js";

/** @type {(data: PageData, group: number) => Run[]} */
export const runsOf = (data, group) => data.runs.filter((run) => run.group === group);
export const several = (/** @type {PageData} */ data) => data.groups.length > 1;
/** @type {<T>(values: T[]) => NonNullable<T> | undefined} */
export const lastOf = (values) => values.filter(known).at(-1);

const COLORS = 10; // --c0 to --c9 of page.css
let first = 0;
/** Of several groups the first is the yardstick and grey; a lone one is not. */
export function startColors(/** @type {PageData} */ data) {
  first = several(data) ? 0 : 1;
}
export function hue(/** @type {number | null} */ group) {
  return known(group) ? `var(--c${(group + first) % COLORS})` : "var(--faint)";
}
/** Past the last color they come again, dashed. */
export const dashOf = (/** @type {number} */ group) => (group >= COLORS ? "7 3" : null);
export const keyMark = (/** @type {string} */ color) => el("i", { class: "key", style: `--hue:${color}` });
/** @type {(group: number | null, text: string) => Child} */
export const named = (group, text) => [keyMark(hue(group)), text];

/** @type {<Row>(title: string, cell: Column<Row>["cell"]) => Column<Row>} */
export const textColumn = (title, cell) => ({ title, cell });
/** @type {<Row>(title: string, cell: Column<Row>["cell"]) => Column<Row>} */
export const numberColumn = (title, cell) => ({ title, cell, class: "n" });
/** @type {(text: string, changed?: boolean) => HTMLElement} */
export const monospaced = (text, changed = false) => el("td", { class: changed ? "mono changed" : "mono" }, text);

/** @type {<Row>(rows: Row[], columns: Column<Row>[]) => HTMLElement} */
export function table(rows, columns) {
  const titles = columns.map((column) => el("th", { class: column.class, scope: "col" }, column.title));
  const body = rows.map((row, index) => el("tr", {}, columns.map((column) => {
    const cell = column.cell(row, index);
    return cell instanceof HTMLTableCellElement ? cell : el("td", { class: column.class }, cell);
  })));
  return el("div", { class: "scroll" },
    el("table", { class: "data" }, el("thead", {}, el("tr", {}, titles)), el("tbody", {}, body)));
}

/** Radio buttons that set a key of the state, one a key of `options`.
 * @type {<N extends "axis" | "curve" | "range" | "rate" | "effect">(
 *   state: State, name: N, title: string, options: Record<State[N], string>, redraw: () => void) => Element} */
export function choice(state, name, title, options, redraw) {
  const keys = /** @type {(keyof typeof options)[]} */ (Object.keys(options));
  return el("fieldset", { class: "switch" }, el("legend", {}, title), keys.map((key) => {
    const choose = () => {
      state[name] = key;
      redraw();
    };
    return el("label", {},
      el("input", { type: "radio", name, value: key, checked: key === state[name], onchange: choose }), options[key]);
  }));
}

/** @type {(title: string, ...children: Child[]) => Element} */
export const folded = (title, ...children) => el("details", { class: "bare" }, el("summary", {}, title), children);
export function definitions(/** @type {Record<string, string>} */ facts) {
  const rows = Object.entries(facts).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  return el("dl", { class: "plain" }, rows);
}
