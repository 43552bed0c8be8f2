// Light, dark and paper.

import { byId } from "./dom.js";

/** Follows the system until a theme is chosen by hand. Paper is always light: see the styles. */
export function offerThemes() {
  const { dataset } = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  const follow = () => { if (!chosen) dataset.theme = system.matches ? "dark" : "light"; };
  system.addEventListener("change", follow);
  follow();
  byId("theme").addEventListener("click", () => {
    chosen = true;
    dataset.theme = dataset.theme === "dark" ? "light" : "dark";
  });
}

/** Paper cannot be unfolded: tables and environments are opened for it, and closed again. */
export function preparePrint() {
  /** @type {HTMLDetailsElement[]} */
  let opened = [];
  addEventListener("beforeprint", () => {
    const folded = "details:not([open])";
    opened = [...document.querySelectorAll(`#result ${folded}, #ablation ${folded}, #repeat ${folded}`)]
      .filter((one) => one instanceof HTMLDetailsElement);
    opened.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((one) => { one.open = false; }));
}
