// Elements, and numbers and names for people. What peers say reaches the page as text nodes only, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "circle", "rect", "text", "title"]);

/** An element: h("td", {class: "number"}, "12 s", otherElement). Functions among the attributes listen to events. */
export function h(tag, attributes = {}, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const $ = (id) => document.getElementById(id);
export const known = (value) => typeof value === "number" && Number.isFinite(value);
export const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** 2.4131 -> "2.413"; what is not known is a dash, as everywhere. */
export function decimal(value, digits = 3) {
  if (!known(value)) return "–";
  return Math.abs(value) >= 1e4 ? value.toExponential(2) : value.toFixed(digits);
}

export const percent = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)} %` : "–");
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** Bytes in the unit that reads best: "18.4 MB". */
export function size(bytes) {
  if (!known(bytes)) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(bytes) < 999.5) return `${bytes.toFixed(unit === "B" || bytes >= 99.5 ? 0 : 1)} ${unit}`;
    bytes /= 1000;
  }
  return `${bytes.toFixed(1)} TB`;
}

/** "42 s", "3 min 05 s", "2 h 10 min", "5 d 3 h"; below ten seconds with a digit more. */
export function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A large number with a letter: "1.84 M", "12.3 k". */
export function count(number) {
  if (!known(number)) return "–";
  if (number >= 1e9) return `${(number / 1e9).toFixed(2)} G`;
  if (number >= 1e6) return `${(number / 1e6).toFixed(2)} M`;
  return number >= 1e4 ? `${(number / 1e3).toFixed(number >= 1e5 ? 0 : 1)} k` : number.toFixed(0);
}

/** A peer id by its end, as all of them begin alike; `swarmnode ping` and `scores` take this form too. */
export const shortId = (peer) => (peer?.length > 16 ? `…${peer.slice(-6)}` : peer ?? "–");

/** A person's or peer's own words, cut to a length that cannot fill the page. */
export const words = (text, most = 80) => {
  const told = String(text ?? "");
  return told.length > most ? `${told.slice(0, most)}…` : told;
};
