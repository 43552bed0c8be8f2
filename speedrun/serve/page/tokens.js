// A text as it is written: every token an element of its own, to be pointed at and walked along.

import { el } from "./dom.js";
import { END_OF_TEXT, pictured } from "./words.js";

// Probabilities at which the shade of a token changes, and what the legend calls them.
const LEVELS = [0.5, 0.2, 0.05, 0.01];
export const LEVEL_NAMES = ["over 50%", "20–50%", "5–20%", "1–5%", "under 1%"];
const REST = 3; // of the time that showing new tokens takes, the least time between
const UNFINISHED = "\ufffd";

/** What an element shows: its tokens, which are several where they share a character, and their text,
 * which is empty where a text ends.
 * @typedef {{ span: HTMLElement, tokens: Token[], text: string, from: number }} Group */

export class WrittenText {
  /** @type {Group[]} */
  #groups = [];
  /** @type {Map<Element, Group>} */
  #of = new Map();
  /** @type {Token[]} */
  #unfinished = []; // tokens of a character that is not whole yet
  #decoder = newDecoder();
  #length = 0; // characters that are whole
  #from = 0; // the first of them that the latest request wrote
  #fresh = new DocumentFragment(); // waits to be shown
  #cost = 0; // milliseconds that showing took, the last time

  constructor(/** @type {HTMLElement} */ box) {
    this.box = box;
  }

  get last() { return this.#groups.at(-1)?.tokens.at(-1); }
  get spans() { return this.#groups.map((group) => group.span); }
  /** @type {(span: Element) => Token[]} */
  tokensOf(span) { return this.#of.get(span)?.tokens ?? []; }

  /** An empty text after a prompt, in which documents may begin anew. */
  begin(/** @type {string} */ prompt) {
    this.#groups = [];
    this.#of.clear();
    this.#unfinished = [];
    this.#decoder = newDecoder();
    this.#length = this.#from = 0;
    this.#fresh = new DocumentFragment();
    const parts = pictured(prompt).split(END_OF_TEXT).map((part) => el("span", { class: "prompt" }, part));
    this.box.replaceChildren(...parts.flatMap((part, i) => (i ? [newDocument(), part] : [part])));
  }

  /** The next tokens will be those of another request: they go on where the text ends. */
  goOn() {
    this.#from = this.#length;
    if (this.#unfinished.length) this.#remove();
    for (const { span, text } of this.#groups) if (span.querySelector("s")) span.textContent = pictured(text);
  }

  add(/** @type {Token[]} */ tokens) {
    const waiting = this.#fresh.hasChildNodes();
    for (const token of tokens) {
      this.#unfinished.push(token);
      const text = this.#decoder.decode(new Uint8Array(token.bytes), { stream: true });
      if (!text && token.bytes.length) continue;
      this.#put(text, this.#unfinished);
      this.#unfinished = [];
      this.#length += text.length;
    }
    // Each change of a text is a layout of all of it: a long one changes less often than in every frame.
    if (!waiting) setTimeout(() => requestAnimationFrame(() => this.#show()), REST * this.#cost);
  }

  /** No more tokens come. Of these the server counts `shown` characters: the rest is a stop string. */
  end(/** @type {number} */ shown) {
    // The tokens stay on the list: written on, the character may still become whole.
    if (this.#unfinished.length) this.#put(UNFINISHED, this.#unfinished);
    for (const { span, text, from } of this.#groups) {
      const keep = Math.max(0, this.#from + shown - from);
      if (keep < text.length) span.replaceChildren(pictured(text.slice(0, keep)), el("s", {}, pictured(text.slice(keep))));
    }
    this.#show();
  }

  #put(/** @type {string} */ text, /** @type {Token[]} */ tokens) {
    const ends = !tokens[tokens.length - 1].bytes.length;
    const least = Math.min(...tokens.map((token) => token.logOdds));
    const level = LEVELS.filter((share) => Math.exp(least) < share).length;
    const kind = ends ? " ends" : text.startsWith("\n") ? " breaks" : "";
    const span = el("span", { class: `token level${level}${kind}` }, ends ? "end of text" : pictured(text));
    const group = { span, tokens, text, from: this.#length };
    if (!this.#groups.length) span.tabIndex = 0;
    this.#groups.push(group);
    this.#of.set(span, group);
    this.#fresh.append(span);
  }

  #remove() {
    const group = this.#groups.pop();
    group?.span.remove();
    if (group) this.#of.delete(group.span);
  }

  /** Whoever reads the end stays there; whoever reads elsewhere is left alone. */
  #show() {
    const { box } = this;
    const begun = performance.now();
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40 && !box.contains(document.activeElement);
    box.append(this.#fresh);
    if (follows) box.scrollTop = box.scrollHeight;
    this.#cost = performance.now() - begun;
  }
}

const newDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });
export const newDocument = () => el("span", { class: "border" }, "new document");
