// What the browser remembers of this page. Where it may not, the page works all the same.

/** @type {(place: "localStorage" | "sessionStorage", key: string) => string | null} */
export function recall(place, key) {
  try {
    return window[place].getItem(key);
  } catch {
    return null;
  }
}

/** @type {(place: "localStorage" | "sessionStorage", key: string, value: string) => void} */
export function keep(place, key, value) {
  try {
    window[place].setItem(key, value);
  } catch {
    // forbidden, or full
  }
}
