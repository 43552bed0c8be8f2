// The page under --watch: asks its server for news every two seconds.

import { byId } from "./dom.js";

const PAUSE = 2000; // milliseconds

/** An unchanged tag costs nothing: the server answers 304 without data. */
export function connect(/** @type {(news: PageData) => void} */ show) {
  const sign = byId("live");
  let tag = "";
  /** @type {(text: string, lost: boolean) => void} */
  const say = (text, lost) => {
    sign.hidden = false;
    sign.textContent = text;
    sign.classList.toggle("lost", lost);
  };
  async function ask() {
    setTimeout(ask, PAUSE);
    /** @type {Record<string, string>} */
    const headers = tag ? { "If-None-Match": tag } : {};
    const answer = await fetch("data.json", { headers, cache: "no-store" }).catch(() => null);
    if (answer?.status === 200) {
      const news = await answer.json();
      tag = answer.headers.get("ETag") || "";
      show(news);
    }
    const well = answer !== null && (answer.ok || answer.status === 304);
    say(well ? "live" : answer ? "waiting" : "the server is gone", !well);
  }
  say("live", false);
  setTimeout(ask, PAUSE);
}
