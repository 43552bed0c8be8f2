// How tokens are drawn: fields that say what is wrong with what stands in them.

import { byId, el, svg } from "./dom.js";
import { keep, recall } from "./kept.js";

const KEPT = "speedrun-settings";
const SEEDS = 2 ** 32; // of which the dice picks one

/** @type {Record<SettingName, SettingField>} */
const FIELDS = {
  temperature: { label: "Temperature", start: 0.8, step: 0.1, least: 0, hint: "0: the likeliest token",
    wrong: "0 or more" },
  top_k: { label: "Top-k", start: 50, step: 1, whole: true, least: 0, most: 1e6, hint: "0: all tokens",
    wrong: "a whole number, 0 or more" },
  seed: { label: "Seed", start: 0, step: 1, whole: true, least: 0, most: Number.MAX_SAFE_INTEGER,
    hint: "same seed, same text", wrong: "a whole number, 0 or more" },
  max_tokens: { label: "Tokens", start: 200, step: 10, whole: true, least: 1, most: 8192, hint: "to write at most",
    wrong: "a whole number from 1 to 8,192" },
  top_p: { label: "Top-p", start: 1, step: 0.05, least: 0, most: 1, hint: "1: all tokens", wrong: "from 0 to 1",
    more: true },
  repetition_penalty: { label: "Repetition penalty", start: 1, step: 0.05, least: 0.01, most: 1000, hint: "1: none",
    wrong: "from 0.01 to 1,000", more: true },
};
const MOST_STOPS = 16, LONGEST_STOP = 256;
const STOP_HINT = "one a line; \\n is a new line";

export class SettingForm {
  /** @type {Map<SettingName, HTMLInputElement>} */
  #inputs = new Map();
  #stops = el("textarea", { id: "stop-strings", rows: 2, spellcheck: "false", "aria-describedby": "stop-strings-hint" });

  constructor(/** @type {HTMLElement} */ box) {
    const kept = remembered();
    const inside = el("div", { class: "fields" });
    for (const [name, field] of /** @type {[SettingName, SettingField][]} */ (Object.entries(FIELDS))) {
      const input = el("input", {
        type: "number", id: name, step: field.step, min: field.least, max: field.most, autocomplete: "off",
        inputmode: field.whole ? "numeric" : "decimal", "aria-describedby": `${name}-hint`,
        value: kept[name] ?? field.start, oninput: () => { this.#wrong(name); this.#sum(); },
      });
      this.#inputs.set(name, input);
      (field.more ? inside : box).append(labelled(field.label, input, field.hint, name === "seed" && dice(input)));
    }
    this.#stops.value = kept.stop ?? "";
    this.#stops.addEventListener("input", () => this.#wrongStops());
    inside.append(labelled("Stop strings", this.#stops, STOP_HINT));
    box.append(el("details", {}, el("summary", {}, "More"), inside));
    addEventListener("pagehide", () => this.#remember());
    this.#fold();
    this.#sum();
  }

  /** On a narrow screen the fields are folded away, or the text would begin below its end. */
  #fold() {
    const narrow = matchMedia("(max-width: 760px)");
    const follow = () => { /** @type {HTMLDetailsElement} */ (byId("drawing")).open = !narrow.matches; };
    narrow.addEventListener("change", follow);
    follow();
  }

  /** What stands there while they are. */
  #sum() {
    const [temperature, k, seed, tokens] = [...this.#inputs.values()].map((input) => input.value);
    byId("drawn-by").textContent = `Temperature ${temperature} · top-k ${k} · seed ${seed} · ${tokens} tokens`;
  }

  /** The settings, or null if one is wrong: it then says so, and is where one types next.
   * @type {() => Settings | null} */
  read() {
    const wrong = [...this.#inputs].filter(([name]) => this.#wrong(name)).map(([, input]) => input);
    const first = wrong[0] ?? (this.#wrongStops() ? this.#stops : undefined);
    if (first) {
      for (const fold of document.querySelectorAll("details")) if (fold.contains(first)) fold.open = true;
      first.focus();
      return null;
    }
    const numbers = [...this.#inputs].map(([name, input]) => [name, input.valueAsNumber]);
    return { ...Object.fromEntries(numbers), stop: this.#stopStrings() };
  }

  #wrong(/** @type {SettingName} */ name) {
    const [field, input] = [FIELDS[name], /** @type {HTMLInputElement} */ (this.#inputs.get(name))];
    const value = input.valueAsNumber;
    const bad = !Number.isFinite(value) || value < field.least || value > (field.most ?? Infinity)
      || (field.whole && !Number.isInteger(value));
    return mark(input, bad ? `${field.label} is ${field.wrong}` : "", field.hint);
  }

  #wrongStops() {
    const stops = this.#stopStrings();
    const bad = stops.length > MOST_STOPS || stops.some((stop) => stop.length > LONGEST_STOP);
    const limit = `At most ${MOST_STOPS} strings of ${LONGEST_STOP} characters`;
    return mark(this.#stops, bad ? limit : "", STOP_HINT);
  }

  #stopStrings() {
    /** @type {Record<string, string>} */
    const meant = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
    return this.#stops.value.split("\n").filter(Boolean).map((line) => line.replace(/\\[nt\\]/g, (c) => meant[c]));
  }

  #remember() {
    const values = [...this.#inputs].map(([name, input]) => [name, input.value]);
    const prompt = /** @type {HTMLTextAreaElement} */ (byId("prompt")).value;
    keep("sessionStorage", KEPT, JSON.stringify({ ...Object.fromEntries(values), stop: this.#stops.value, prompt }));
  }
}

/** What stood in the fields when this tab last left the page.
 * @type {() => Partial<Record<SettingName | "stop" | "prompt", string>>} */
export function remembered() {
  return JSON.parse(recall("sessionStorage", KEPT) ?? "{}");
}

/** @type {(label: string, input: HTMLElement, hint: string, beside?: Child) => HTMLElement} */
function labelled(label, input, hint, beside) {
  return el("div", { class: "field" },
    el("label", { for: input.id }, label), el("span", { class: "entry" }, input, beside),
    el("p", { class: "small", id: `${input.id}-hint` }, hint));
}

/** Says what is wrong where the hint stood. @type {(input: HTMLElement, wrong: string, hint: string) => boolean} */
function mark(input, wrong, hint) {
  const place = byId(`${input.id}-hint`);
  input.setAttribute("aria-invalid", String(Boolean(wrong)));
  place.classList.toggle("wrong", Boolean(wrong));
  place.textContent = wrong || hint;
  return Boolean(wrong);
}

function dice(/** @type {HTMLInputElement} */ input) {
  const dots = [[5, 5], [11, 5], [8, 8], [5, 11], [11, 11]].map(([cx, cy]) => svg("circle", { cx, cy, r: 1.1 }));
  return el("button", {
    type: "button", class: "plain dice", id: "new-seed", "aria-label": "New seed", title: "New seed",
    onclick: () => {
      input.value = String(Math.floor(Math.random() * SEEDS));
      input.dispatchEvent(new Event("input"));
    },
  }, svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("rect", { x: 1.5, y: 1.5, width: 13, height: 13, rx: 3 }), dots));
}
