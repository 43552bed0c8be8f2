// One run and the text it writes.

import { el } from "./dom.js";
import { sightOf, scrollToSight } from "./sight.js";
import { Refusal, isAbort, write } from "./stream.js";
import { WrittenText } from "./tokens.js";
import { walkable } from "./walk.js";
import { ending, facts, pace } from "./words.js";

const ALTERNATIVES = 10;
const UNKNOWN = "What its last token saw is told when a text ends by itself.";
const STATUS_EVERY = 250; // milliseconds

export class RunColumn {
  /** @type {AbortController | null} */
  #request = null;
  #prompt = "";
  // All tokens of the text, but for those of the prompt until the server has told them.
  /** @type {number[]} */
  #ids = [];
  /** @type {number[][]} */
  #bytes = [];
  #told = false;
  /** @type {TextContext | null} */
  #context = null; // what the last token saw, if that is known
  #status = el("p", { class: "status" });
  #error = el("p", { class: "error", role: "alert" });
  #sight = el("div", {});
  #text = new WrittenText(el("div", { class: "output", role: "group" }));

  constructor(/** @type {ServedRun} */ run) {
    this.run = run;
    const name = `text-${run.id}`;
    this.#text.box.setAttribute("aria-labelledby", name);
    walkable(this.#text);
    this.element = el("section", { class: "sheet text", "aria-labelledby": name },
      el("h2", { id: name }, run.id), el("p", { class: "small facts" }, facts(run)),
      this.#text.box, this.#status, this.#error, this.#sight);
    this.clear();
  }

  get writing() { return this.#request !== null; }
  get written() { return this.#text.last !== undefined; }
  /** How it stands, in a sentence. */
  get said() { return `${this.run.id}: ${this.#error.textContent || this.#status.textContent}`; }

  clear() {
    this.stop();
    this.#request = null; // what it still has to say is of a text that is no more
    this.#text.box.classList.remove("writing");
    this.#begin("");
    this.#text.box.replaceChildren(el("p", { class: "nothing" }, "Nothing is written yet. ",
      "Type how a text begins and press Write: this run goes on from there, token by token."));
    this.#say("");
  }

  stop() {
    this.#request?.abort();
  }

  /** @type {(prompt: string, settings: Settings) => Promise<void>} */
  write(prompt, settings) {
    this.#begin(prompt);
    return this.#ask(prompt, settings);
  }

  /** On from where the text ends, token by token. @type {(settings: Settings) => Promise<void>} */
  writeOn(settings) {
    return this.#ask(null, settings);
  }

  #begin(/** @type {string} */ prompt) {
    this.#prompt = prompt;
    [this.#ids, this.#bytes, this.#told, this.#context] = [[], [], false, null];
    this.#text.begin(prompt);
    this.#fail("");
    this.#sight.replaceChildren();
  }

  /** Without a prompt: on from the tokens there are. Of more than the run remembers the later half
   * is sent, as the run itself would have kept it.
   * @type {(prompt: string | null, settings: Settings) => Promise<void>} */
  async #ask(prompt, settings) {
    const request = new AbortController();
    this.#request = request;
    this.#fail("");
    this.#sight.replaceChildren();
    this.#text.goOn();
    this.#text.box.classList.add("writing");
    this.#say("Reading the prompt …");
    const clock = new Clock();
    let [shown, end, skipped] = [0, "", 0];
    /** @type {TextContext | undefined} */
    let context;
    const timer = setInterval(() => { if (clock.tokens) this.#say(`Writing: ${clock.said}`); }, STATUS_EVERY);
    try {
      if (prompt === null && !this.#told) await this.#askForPrompt(request.signal);
      const { length } = this.#ids;
      if (prompt === null && length >= this.run.context) skipped = length - Math.floor(this.run.context / 2);
      const asked = { model: this.run.id, prompt: prompt ?? this.#ids.slice(skipped), logprobs: ALTERNATIVES, ...settings };
      await write(asked, request.signal, (choice) => {
        if (request.signal.aborted) return;
        const tokens = tokensIn(choice);
        this.#ids.push(...tokens.map((token) => token.id));
        this.#bytes.push(...tokens.map((token) => token.bytes));
        clock.count(tokens.length);
        this.#text.add(tokens);
        shown += choice.text.length;
        if (!choice.finish_reason) return;
        end = ending(choice.finish_reason, tokens.at(-1), settings.max_tokens);
        context = choice.context;
      });
    } catch (error) {
      if (error instanceof Refusal) this.#fail(error.message);
      else if (!isAbort(error)) throw error;
      [shown, end] = [Infinity, isAbort(error) ? "stopped" : ""];
    } finally {
      clearInterval(timer);
      if (this.#request === request) { // and the text was not cleared in the meantime
        this.#request = null;
        this.#text.end(shown);
        this.#text.box.classList.remove("writing");
        this.#say(clock.tokens || end ? [clock.said, end].filter(Boolean).join("; ") : "");
        if (clock.tokens) this.#context = context ? this.#join(context, skipped) : null;
        this.#see();
      }
    }
  }

  /** The tokens of the prompt, which a text that was stopped has not told. */
  async #askForPrompt(/** @type {AbortSignal} */ signal) {
    await write({ model: this.run.id, prompt: this.#prompt, max_tokens: 1 }, signal, ({ context }) => {
      if (!context) return;
      this.#ids.unshift(...context.ids.slice(0, -1));
      this.#bytes.unshift(...context.bytes.slice(0, -1));
      this.#told = true;
    });
  }

  /** Tokens that were not sent again are forgotten ones.
   * @type {(found: TextContext, skipped: number) => TextContext} */
  #join(found, skipped) {
    this.#ids.splice(skipped, Infinity, ...found.ids);
    this.#bytes.splice(skipped, Infinity, ...found.bytes);
    this.#told = true;
    return {
      ids: this.#ids,
      bytes: this.#bytes,
      first_seen: found.first_seen + skipped,
      first_remembered: found.first_remembered + skipped,
      documents: found.documents.map((token) => token + skipped),
    };
  }

  #see() {
    if (!this.#context) return this.#sight.replaceChildren(...(this.written ? [el("p", { class: "say" }, UNKNOWN)] : []));
    const view = sightOf(this.#context, this.run);
    this.#sight.replaceChildren(view);
    scrollToSight(view);
  }

  #say(/** @type {string} */ text) {
    this.#status.textContent = text;
  }

  #fail(/** @type {string} */ sentence) {
    this.#error.textContent = sentence;
    this.#error.hidden = !sentence;
  }
}

/** How fast tokens come: those after the first piece, which also waited for the prompt to be read. Where
 * that piece is most of the text, which a busy machine may hand over at once, all of them since it was asked for. */
class Clock {
  tokens = 0;
  #asked = performance.now();
  #first = 0; // tokens of the first piece
  #begun = 0;
  #last = 0;

  count(/** @type {number} */ tokens) {
    this.#last = performance.now();
    if (!this.tokens) [this.#first, this.#begun] = [tokens, this.#last];
    this.tokens += tokens;
  }

  get said() {
    const late = this.#first > this.tokens / 2;
    return late ? pace(this.tokens, this.tokens, this.#last - this.#asked)
      : pace(this.tokens, this.tokens - this.#first, this.#last - this.#begun);
  }
}

/** @type {(choice: Choice) => Token[]} */
function tokensIn({ logprobs }) {
  return (logprobs?.tokens ?? []).map((name, i) => ({
    id: logprobs?.ids[i] ?? 0,
    name,
    logOdds: logprobs?.token_logprobs[i] ?? 0,
    // Sorted here: an object of JavaScript lists names that are numbers first.
    alternatives: Object.entries(logprobs?.top_logprobs[i] ?? {})
      .map(([other, logOdds]) => ({ name: other, logOdds })).sort((a, b) => b.logOdds - a.logOdds),
    bytes: logprobs?.bytes[i] ?? [],
  }));
}

