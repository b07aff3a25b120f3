// Three drawings in SVG: curves over rounds, rounds as columns of time with who took part, and the swarm as a graph.
// Each redraws itself when its box changes its width, and answers to pointer and arrow keys alike.

import { decimal, duration, h, known, mean, plural, words } from "./text.js";

const GUTTER = 64; // px on the left, for scales and names

/** Steps of 1, 2 or 5 times a power of ten within a range. */
function ticks(from, to, most) {
  const rough = (to - from) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step / 1e6; at += step) found.push(at);
  return [found, Math.max(0, -Math.floor(Math.log10(step)))];
}

/** At most `most` points: each stands for as many neighbours, with their mean. */
function thinned(points, most) {
  const each = Math.ceil(points.length / most);
  if (each <= 1) return points;
  const shown = [];
  for (let at = 0; at < points.length; at += each) {
    const part = points.slice(at, at + each);
    shown.push([part.at(-1)[0], mean(part.map((point) => point[1]))]);
  }
  return shown;
}

/** What the drawings share: a box, its width, and the column that is pointed at. */
class Drawing {
  constructor(box, label, height) {
    this.svg = h("svg", { role: "img", "aria-label": label, tabindex: 0, height });
    this.detail = h("div", { class: "detail" });
    box.replaceChildren(this.svg, this.detail);
    this.height = height;
    this.at = null; // index of the column that is pointed at; where none is, the newest is told
    const move = (event) => this.point(this.column(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointermove", move);
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.columns) return;
      event.preventDefault();
      this.point(Math.min(this.columns - 1, Math.max(0, (this.at ?? this.newest) + step)));
    });
    this.svg.addEventListener("blur", () => this.point(null));
    new ResizeObserver(() => this.width !== box.clientWidth && this.redraw()).observe(box);
    this.box = box;
  }

  show(what) {
    this.what = what;
    this.redraw();
  }

  redraw() {
    this.width = this.box.clientWidth;
    if (!this.what || this.width < 80) return;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("height", this.height);
    this.draw();
  }

  point(column) {
    if (column === this.at) return;
    this.at = column;
    if (this.what) this.draw();
  }
}

/** Curves over rounds. show({series: [{name, tone, points: [[round, value]], faint}], format, unit, newest}) */
export class Curve extends Drawing {
  column(x) {
    if (!this.columns) return null;
    const at = Math.round(((x - GUTTER) / (this.width - GUTTER - 12)) * (this.columns - 1));
    return at < 0 || at >= this.columns ? null : at;
  }

  draw() {
    const { series, format, unit, newest } = this.what;
    const all = series.flatMap((one) => one.points);
    if (!all.length) {
      this.columns = 0;
      this.svg.replaceChildren(h("text", { x: this.width / 2, y: this.height / 2, class: "empty" }, "no round has ended yet"));
      return this.detail.replaceChildren();
    }
    let [low, high] = [Infinity, -Infinity];
    let [first, last] = [Infinity, -Infinity];
    for (const [round, value] of all) {
      [low, high] = [Math.min(low, value), Math.max(high, value)];
      [first, last] = [Math.min(first, round), Math.max(last, round)];
    }
    const apart = high - low > 1e-9 * Math.abs(high); // means of equal values differ by what rounding does
    const pad = (apart ? 0.06 * (high - low) : 0.5 * Math.abs(high)) || 1;
    [low, high] = [low - pad, high + pad];
    this.columns = last - first + 1;
    const [right, bottom] = [this.width - 12, this.height - 24];
    const x = (round) => GUTTER + ((right - GUTTER) * (round - first)) / Math.max(1, last - first);
    const y = (value) => bottom - ((bottom - 8) * (value - low)) / (high - low);
    const drawn = [];
    const [levels, digits] = ticks(low, high, 5);
    const plain = !format || new Set(levels.map(format)).size < levels.length; // it has too few digits
    for (const level of levels) {
      drawn.push(h("line", { x1: GUTTER, x2: right, y1: y(level), y2: y(level), class: "grid" }));
      drawn.push(h("text", { x: GUTTER - 8, y: y(level) + 4, class: "scale end" }, plain ? level.toFixed(digits) : format(level)));
    }
    for (const round of ticks(first, last, Math.max(2, this.width / 110))[0].filter(Number.isInteger)) {
      drawn.push(h("text", { x: x(round), y: this.height - 6, class: "scale middle" }, `${round}`));
    }
    for (const { points, tone, faint } of series) {
      const line = thinned(points, this.width).map(([round, value]) => `${x(round).toFixed(1)} ${y(value).toFixed(1)}`);
      drawn.push(h("path", { d: `M${line.join("L")}`, class: `curve ${tone}${faint ? " faint" : ""}` }));
      if (line.length === 1) drawn.push(h("circle", { cx: x(points[0][0]), cy: y(points[0][1]), r: 3, class: `dot ${tone}` }));
    }
    const named = series.filter((one) => !one.faint);
    const ends = named.flatMap((one) => one.points.slice(-1)).map((point) => point[0]);
    this.newest = Math.max(0, Math.min(newest, Math.max(...ends)) - first);
    const round = first + (this.at ?? this.newest);
    const told = named.map((one) => {
      const point = one.points.findLast((each) => each[0] <= round);
      if (point && this.at !== null) {
        drawn.push(h("circle", { cx: x(point[0]), cy: y(point[1]), r: 3.5, class: `dot ${one.tone}` }));
      }
      return h("span", { class: "key" }, h("i", { class: one.tone }), `${one.name} `, h("b", {}, point ? (format ?? decimal)(point[1]) : "–"));
    });
    if (this.at !== null) drawn.splice(0, 0, h("line", { x1: x(round), x2: x(round), y1: 8, y2: bottom, class: "cursor" }));
    this.svg.replaceChildren(...drawn);
    this.detail.replaceChildren(...told, h("span", { class: "soft" }, `round ${round}${unit ? `, ${unit}` : ""}`));
  }
}

const STAGES = {
  train: "training",
  exchange: "exchanging",
  commit: "exchanging (committing)",
  reveal: "exchanging (revealing)",
  judge: "exchanging (judging)",
  wait: "waiting and the rest",
};
const ROW = 15; // px of one participant
const NAME = 9; // characters of its name beside that

/** The names of the stages that these rounds have. */
export function stagesOf(rounds) {
  const had = Object.entries(STAGES).filter(([stage]) => rounds.some((round) => stage in round.stages));
  if (had.length === 2) had[1][1] = `exchanging, ${STAGES.wait}`; // it is not timed apart, as in a run by rollouts
  return Object.fromEntries(had);
}

/** Rounds as columns of seconds, and below each who took part. show({rounds, people: [{peer, name}], stages}) */
export class Timeline extends Drawing {
  column(x) {
    const at = Math.floor((x - GUTTER) / this.step);
    return at < 0 || at >= this.columns ? null : at;
  }

  draw() {
    const { rounds, people, stages } = this.what;
    const most = Math.max(6, Math.floor((this.width - GUTTER - 4) / 14));
    const shown = rounds.slice(-most);
    this.columns = shown.length;
    this.newest = shown.length - 1;
    this.step = Math.min(96, (this.width - GUTTER - 4) / Math.max(shown.length, 12));
    const bars = 132; // px of the columns of time
    const rows = people.slice(0, 24);
    this.svg.setAttribute("height", (this.height = bars + 24 + ROW * rows.length));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const sum = (parts) => Object.values(parts).reduce((total, part) => total + part, 0);
    const long = shown.map((one) => one.seconds ?? sum(one.stages));
    const middle = [...long].sort((a, b) => a - b)[long.length >> 1] ?? 0;
    const high = Math.max(Math.min(Math.max(...long), 3 * middle), 0.1); // a first round that waited hides no others
    const tall = (seconds) => ((bars - 14) * Math.min(seconds, high)) / high;
    const drawn = [];
    const [levels, digits] = ticks(0, high, 3);
    for (const level of levels) {
      const y = bars - tall(level);
      drawn.push(h("line", { x1: GUTTER, x2: this.width, y1: y, y2: y, class: "grid" }));
      drawn.push(h("text", { x: GUTTER - 8, y: y + 4, class: "scale end" }, `${level.toFixed(digits)} s`));
    }
    rows.forEach(({ name }, row) => {
      const whole = name.length > NAME && h("title", {}, name);
      drawn.push(h("text", { x: GUTTER - 8, y: bars + 24 + ROW * row + 11, class: "scale end" }, whole, words(name, NAME)));
    });
    const every = Math.ceil(38 / this.step);
    let free = 0; // px from where there is room for another label above
    shown.forEach((round, column) => {
      const [x, width] = [GUTTER + this.step * column + 1, Math.max(2, this.step - 2)];
      if (column === this.at) {
        drawn.push(h("rect", { x: x - 1, y: 0, width: this.step, height: this.height, class: "pointed" }));
      }
      const bar = (stage, from, to, wide = width) => {
        const [foot, top] = [from, to].map((seconds) => bars - tall(Math.min(seconds, long[column])));
        if (top < foot) drawn.push(h("rect", { x, y: top, width: wide, height: foot - top, class: `stage ${stage}` }));
      };
      const { train, ...others } = round.stages;
      const alone = Math.max(0, long[column] - sum(others)); // s; training that lasts longer goes on beside the others
      let from = alone;
      bar("train", 0, Math.min(train, alone));
      for (const stage of Object.keys(STAGES)) if (others[stage]) bar(stage, from, (from += others[stage]));
      bar("train", alone, train, width / 2);
      if (long[column] > 1.01 * high && x >= free) {
        free = x + 72;
        const middle = Math.max(GUTTER + 36, Math.min(x + width / 2, this.width - 36));
        drawn.push(h("text", { x: middle, y: 11, class: "scale middle" }, duration(long[column])));
      }
      if (column % every === 0) {
        drawn.push(h("text", { x: x + width / 2, y: bars + 16, class: "scale middle" }, `${round.round}`));
      }
      rows.forEach(({ peer, name, own }, row) => {
        const [mark, why] = presence(round, peer, own?.get(round.round));
        const top = bars + 24 + ROW * row + 1;
        if (mark) drawn.push(h("rect", { x, y: top, width, height: ROW - 3, rx: 2, class: `mark ${mark}` }));
        else if (why) {
          const title = h("title", {}, `${name}: ${why}`);
          drawn.push(h("text", { x: x + width / 2, y: top + 10, class: "scale middle" }, title, "–"));
        }
      });
    });
    this.svg.replaceChildren(...drawn);
    const round = shown[this.at ?? this.newest];
    this.detail.replaceChildren(...(round ? told(round, people, stages) : [h("span", { class: "soft" }, "no round has ended yet")]));
  }
}

/** ["good" | "late" | "refused" | "", why] of one peer's work in a round; `own` is what that peer said of it itself.
    Both are empty where it took no part. */
export function presence(round, peer, own) {
  const verdict = round.verdicts?.[peer];
  if (verdict && verdict !== "accepted") return ["refused", verdict];
  if (round.missing.includes(peer)) return ["late", round.why[peer] ?? "missing"];
  if (round.counted?.includes(peer) || verdict || own === "accepted") return ["good", "counted"];
  if (own && own !== "none") return [own === "late" ? own : "refused", own];
  return ["", own || round.counted ? "" : "whether it took part is not known here"];
}

function told(round, people, stages) {
  const rows = new Map(people.map((row) => [row.peer, row]));
  const absent = [...new Set([...round.missing, ...Object.keys(round.verdicts ?? {}), ...rows.keys()])]
    .map((peer) => [rows.get(peer)?.name ?? peer.slice(-6), ...presence(round, peer, rows.get(peer)?.own?.get(round.round))])
    .filter(([, mark]) => mark !== "good" && mark !== "");
  const lines = [h("b", {}, `round ${round.round}, ${duration(round.seconds)}`)];
  for (const [stage, name] of Object.entries(stages).filter(([stage]) => round.stages[stage] > 0.005)) {
    lines.push(h("span", { class: "key" }, h("i", { class: stage }), `${name} ${duration(round.stages[stage])}`));
  }
  if (known(round.members)) lines.push(h("span", {}, plural(round.members, "member")));
  for (const [name, mark, why] of absent.slice(0, 8)) {
    lines.push(h("span", { class: "key" }, h("i", { class: mark }), `${name}: ${why}`));
  }
  for (const why of round.abandoned ?? []) lines.push(h("span", { class: "key" }, h("i", { class: "late" }), `tried again: ${why}`));
  return lines;
}

/** The swarm around one node. show({me, people: [{peer, name, tone, title}], links: [{from, to, relayed, rtt}]}) */
export class Swarm extends Drawing {
  column() {
    return null;
  }

  draw() {
    const { me, people, links } = this.what;
    this.svg.removeAttribute("tabindex"); // the table of peers is for the keyboard
    const others = people.filter(({ peer }) => peer !== me);
    const [cx, cy] = [this.width / 2, this.height / 2];
    const radius = Math.min(cx - 44, cy - 34);
    const places = new Map([[me, [cx, cy]]]);
    others.forEach(({ peer }, number) => {
      const angle = (2 * Math.PI * number) / others.length - Math.PI / 2;
      const ring = others.length > 18 && number % 2 ? 0.66 : 1; // two rings, where one would be full
      const wide = Math.min(1.5, (cx - 44) / radius);
      places.set(peer, [cx + wide * ring * radius * Math.cos(angle), cy + ring * radius * Math.sin(angle)]);
    });
    const lines = [];
    const labels = [];
    for (const { from, to, relayed, rtt } of links) {
      const [a, b] = [places.get(from), places.get(to)];
      if (!a || !b) continue;
      const own = from === me || to === me;
      const kind = `link${relayed ? " relayed" : ""}${own ? " own" : ""}`;
      lines.push(h("line", { x1: a[0], y1: a[1], x2: b[0], y2: b[1], class: kind }));
      if (own && known(rtt) && others.length <= 16) {
        const far = from === me ? b : a;
        const [x, y] = [cx + 0.56 * (far[0] - cx), cy + 0.56 * (far[1] - cy)];
        labels.push(h("text", { x, y: y + 4, class: "latency" }, `${rtt < 9.95 ? rtt.toFixed(1) : rtt.toFixed(0)} ms`));
      }
    }
    const dots = people.filter(({ peer }) => places.has(peer)).map(({ peer, name, tone, title }) => {
      const [x, y] = places.get(peer);
      const dot = h("circle", { cx: x, cy: y, r: peer === me ? 13 : 10, class: `node ${tone}${peer === me ? " me" : ""}` });
      const below = h("text", { x, y: y + (peer === me ? 28 : 24), class: "name" }, name);
      return h("g", {}, h("title", {}, title), dot, others.length <= 32 || peer === me ? below : null);
    });
    this.svg.replaceChildren(...lines, ...labels, ...dots);
  }
}

/** A line without scales, for a rate beside its number. */
export function spark(values, width = 120, height = 28) {
  const high = Math.max(...values, 1e-9);
  const at = (value, number) =>
    `${((width * number) / Math.max(1, values.length - 1)).toFixed(1)} ${(height - 2 - (height - 4) * (value / high)).toFixed(1)}`;
  const line = values.length > 1 ? h("path", { d: `M${values.map(at).join("L")}`, class: "curve first" }) : null;
  return h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "spark", "aria-hidden": "true" }, line);
}
