// Questions to the server: the runs it has, and a text that arrives in events.

/** A sentence to show; what happened is no fault of this page. */
export class Refusal extends Error {}

const GONE = "The server does not answer: is speedrun serve still running?";
const BROKEN = "The server went away in the middle of the text.";

/** @type {(path: string, options?: RequestInit) => Promise<Response>} */
async function ask(path, options) {
  const answer = await fetch(path, options).catch((error) => {
    throw isAbort(error) ? error : new Refusal(GONE);
  });
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new Refusal(sentence(said?.error?.message ?? `the server answered with status ${answer.status}`));
}

export const isAbort = (/** @type {unknown} */ error) => error instanceof DOMException && error.name === "AbortError";

const sentence = (/** @type {string} */ text) =>
  text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/** @type {() => Promise<ServedRun[]>} */
export async function servedRuns() {
  return (await (await ask("v1/models")).json()).data;
}

/** Tells each piece of a text as it comes; ends with the text, or throws why it did not.
 * @type {(request: object, signal: AbortSignal, tell: (choice: Choice) => void) => Promise<void>} */
export async function write(request, signal, tell) {
  const headers = { "content-type": "application/json" };
  const body = JSON.stringify({ ...request, stream: true, show_context: true });
  const answer = await ask("v1/completions", { method: "POST", headers, body, signal });
  for await (const data of events(answer)) {
    if (data === "[DONE]") return;
    /** @type {Answer} */
    const news = JSON.parse(data);
    if (news.error) throw new Refusal(sentence(news.error.message));
    news.choices.forEach(tell);
  }
  throw new Refusal(BROKEN);
}

/** The data of each server-sent event; a piece of the network may hold many, or a part of one.
 * @type {(answer: Response) => AsyncGenerator<string>} */
async function* events(answer) {
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read().catch((error) => {
      throw isAbort(error) ? error : new Refusal(BROKEN);
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}
