// Along the tokens of a text by keys, with one stop of the Tab key for all of them.

import { closeCard, hover, pin } from "./card.js";
import { put } from "./dom.js";
import { visible } from "./words.js";

/** @type {(text: import("./tokens.js").WrittenText) => void} */
export function walkable(text) {
  const { box } = text;
  const tokenAt = (/** @type {Event} */ event) =>
    (event.target instanceof Element ? /** @type {HTMLElement | null} */ (event.target.closest(".token")) : null);
  const go = (/** @type {HTMLElement | undefined | null} */ span) => {
    if (!span) return;
    box.querySelector(".token[tabindex]")?.removeAttribute("tabindex");
    span.tabIndex = 0;
    span.focus();
  };
  box.addEventListener("pointerover", (event) => {
    if (event.pointerType !== "mouse") return;
    const span = tokenAt(event);
    hover(span, span ? text.tokensOf(span) : []);
  });
  box.addEventListener("pointerleave", () => hover(null, []));
  box.addEventListener("click", (event) => go(tokenAt(event)));
  box.addEventListener("focusin", (event) => {
    const span = tokenAt(event);
    if (!span) return;
    const tokens = text.tokensOf(span);
    // Only what has the focus needs a name, since its text may be a blank.
    const name = tokens.map((token) => visible(token.name)).join(" ");
    put(span, { role: "button", "aria-describedby": "card", "aria-label": name });
    pin(span, tokens);
  });
  box.addEventListener("focusout", (event) => {
    for (const name of ["role", "aria-describedby", "aria-label"]) tokenAt(event)?.removeAttribute(name);
    closeCard();
  });
  box.addEventListener("keydown", (event) => {
    const span = tokenAt(event);
    if (!span || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = destination(event.key, span, text.spans);
    if (!next) return;
    event.preventDefault();
    go(next);
  });
}

/** @type {(key: string, span: HTMLElement, spans: HTMLElement[]) => HTMLElement | undefined} */
function destination(key, span, spans) {
  const at = spans.indexOf(span);
  switch (key) {
    case "ArrowRight": return spans[Math.min(at + 1, spans.length - 1)];
    case "ArrowLeft": return spans[Math.max(at - 1, 0)];
    case "Home": return spans[0];
    case "End": return spans.at(-1);
    case "ArrowDown": return onNextLine(span, spans.slice(at + 1));
    case "ArrowUp": return onNextLine(span, spans.slice(0, at).reverse());
    case "Enter": case " ": return span;
    default: return undefined;
  }
}

/** Of the next line among `others` the token nearest to this one; none: stay.
 * @type {(span: HTMLElement, others: HTMLElement[]) => HTMLElement} */
function onNextLine(span, others) {
  const here = span.getClientRects()[0];
  /** @type {HTMLElement | null} */
  let best = null;
  let [line, distance] = [0, Infinity];
  for (const other of others) {
    const there = other.getClientRects()[0];
    if (!there || Math.abs(there.top - here.top) < here.height / 2) continue;
    if (!best) line = there.top;
    if (Math.abs(there.top - line) >= here.height / 2) break;
    const away = Math.abs(there.left - here.left);
    if (away < distance) [best, distance] = [other, away];
  }
  return best ?? span;
}
