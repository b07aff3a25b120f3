// Where the page's facts come from: the daemon's HTTP API while it runs, or the report inside this file.

export const SILENCE = 10000; // ms without a word from the daemon until the page asks again
const MOST = 2000; // rounds kept of one node; of older ones every second is let go
const IN_FULL = 150; // newest rounds of which it is kept who took part

export class Refused extends Error {}

/** The daemon's API. Every request goes to the page's own origin and carries the token. */
export class Daemon {
  constructor(token) {
    this.headers = { Authorization: `Bearer ${token}` };
  }

  async nodes() {
    return this.#answer(await fetch("api/nodes", { headers: this.headers, cache: "no-store" }));
  }

  /** The result of a control method of node `node`, `within` ms. Throws an Error with a text for people. */
  async call(node, method, params = {}, within = null) {
    const headers = { ...this.headers, "Content-Type": "application/json" };
    const body = JSON.stringify(params);
    const signal = within && AbortSignal.timeout(within);
    return this.#answer(await fetch(`api/nodes/${node}/${method}`, { method: "POST", headers, body, signal }));
  }

  async #answer(response) {
    if (response.status === 401 || response.status === 403) throw new Refused();
    const told = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(told.error?.message ?? `the daemon answered with status ${response.status}`);
    return told;
  }

  /** Hand each event of node `node` to `heard(name, data)` until `signal` aborts; `state("live" | "gone" | "refused")`. */
  async follow(node, { heard, state, signal }) {
    for (let pause = 1000; !signal.aborted; ) {
      let came = false;
      const attempt = new AbortController();
      const stop = () => attempt.abort();
      signal.addEventListener("abort", stop);
      let watch = setTimeout(stop, SILENCE);
      try {
        const response = await fetch(`api/nodes/${node}/live`, { headers: this.headers, signal: attempt.signal });
        if (response.status === 401 || response.status === 403) return state("refused");
        if (!response.ok) throw new Error(response.status);
        for await (const [name, data] of events(response.body)) {
          clearTimeout(watch);
          watch = setTimeout(stop, SILENCE);
          if (!came) state("live");
          came = true;
          pause = 1000;
          if (name) heard(name, JSON.parse(data));
        }
      } catch {
        // the daemon ended or does not answer; below it is asked again
      } finally {
        clearTimeout(watch);
        signal.removeEventListener("abort", stop);
      }
      if (signal.aborted) return;
      if (came) continue; // a stream that worked may just have been cut: look again at once
      state("gone");
      await new Promise((wake) => setTimeout(wake, pause));
      pause = Math.min(1.5 * pause, 10000);
    }
  }
}

/** [name, data] of each event of a text/event-stream; comments, which keep it alive, have no name. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (text + value).replaceAll("\r", "").split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n");
      const after = (key) => lines.filter((line) => line.startsWith(key)).map((line) => line.slice(key.length).trim());
      yield [after("event:")[0] ?? "", after("data:").join("\n")];
    }
  }
}

/** The rounds of one node, in order; bounded. */
export class Rounds {
  list = [];

  add(told) {
    const round = roundOf(told);
    const list = this.list;
    while (list.length && list.at(-1).round > round.round && list.at(-1).time < round.time) list.pop(); // another history
    const at = list.findLastIndex((one) => one.round <= round.round);
    if (at >= 0 && list[at].round === round.round) list[at] = merged(list[at], round);
    else list.splice(at + 1, 0, round);
    const old = list.at(-IN_FULL - 1);
    if (old) old.counted = old.verdicts = null;
    if (list.length > MOST) this.list = list.filter((_, number) => number % 2 === 1 || number > MOST / 2);
  }

  get last() {
    return this.list.at(-1);
  }
}

const merged = (before, now) => {
  const told = Object.entries(now).filter(([, value]) => value !== null);
  return { ...before, ...Object.fromEntries(told), why: { ...before.why, ...now.why } };
};

const peers = new Map(); // each peer id once, however many rounds name it
const interned = (peer) => peers.get(peer) ?? (peers.size > 5000 ? peer : peers.set(peer, peer).get(peer));

// What the history and the events call alike; null where it is not known.
const FIGURES = ["loss", "trained_loss", "accuracy", "seconds", "members", "own", "bytes_in", "bytes_out", "abandoned", "verdicts"];

/** A round, from the daemon's history or from its events, which name some figures otherwise. */
function roundOf(told) {
  const seconds = (name) => told[`${name}_s`] ?? told[`${name}_seconds`] ?? null;
  const trained = told.trained_s ?? told.compute_seconds ?? null;
  const stages = { train: trained ?? 0 };
  for (const name of ["exchange", "commit", "reveal", "judge"]) if (seconds(name) !== null) stages[name] = seconds(name);
  const busy = Object.values(stages).reduce((sum, value) => sum + value, 0);
  stages.wait = told.waited_s ?? Math.max(0, (told.seconds ?? 0) - busy);
  const answered = told.learned ?? told.sampled;
  return {
    round: told.round,
    time: told.time,
    ...Object.fromEntries(FIGURES.map((name) => [name, told[name] ?? null])),
    reward: told.reward ?? answered?.reward ?? null,
    heldout_reward: told.heldout_reward ?? answered?.heldout ?? null,
    stages,
    tokens: told.tokens ?? 0,
    missing: (told.missing ?? []).map(interned),
    why: told.why ?? {},
    counted: told.counted ? told.counted.map(interned) : null,
  };
}

/** The report that a page has inside, or null. */
export function reportIn(page) {
  const held = page.getElementById("report");
  return held ? JSON.parse(held.textContent) : null;
}
