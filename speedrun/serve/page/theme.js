// Light and dark: the styles follow the system, unless one was chosen here.

import { byId } from "./dom.js";
import { keep, recall } from "./kept.js";

const KEPT = "speedrun-theme";

export function offerThemes() {
  const { dataset } = document.documentElement;
  const kept = recall("localStorage", KEPT);
  if (kept === "light" || kept === "dark") dataset.theme = kept;
  byId("theme").addEventListener("click", () => {
    const dark = dataset.theme ? dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    dataset.theme = dark ? "light" : "dark";
    keep("localStorage", KEPT, dataset.theme);
  });
}
