// The page: one node of a daemon, live, or a finished swarm from the report inside this file.
//
// Each part is a function from what is known of the node to elements. It runs again only when what it shows has
// changed, so that what a person has focused, opened or selected stays as it is.

import { Curve, Swarm, Timeline, presence, spark, stagesOf } from "./charts.js";
import { Daemon, Refused, Rounds, SILENCE, reportIn } from "./feed.js";
import { $, count, decimal, duration, h, known, mean, percent, plural, shortId, size, words } from "./text.js";

const ASK_EVERY = 10000; // ms between questions for what the stream does not bring: scores, shards, rollouts, traffic
const RATES = 300; // samples of traffic kept, one a view
const GROUPS = 8; // newest groups of answers shown
const SMOOTH = 10; // rounds a reward is the mean of: the answers of one round are few

const report = reportIn(document);
const feeds = []; // of each node: what is known of it
let at = 0; // which one is shown
let other = null; // the report that this one is compared with
let daemon = null;
let following = null; // ends the stream
let link = "connecting";
let measure = "learning";
const shown = new Map(); // what each part shows, to see whether it has changed

const feed = () => feeds[at];
const run = () => feed().status?.run ?? {};
const isReward = () => feed().rounds.list.some((round) => known(round.reward));

function feedOf({ status = null, peers = null, history = null, groups = [], ...rest }) {
  const rounds = new Rounds();
  for (const round of history?.rounds ?? []) rounds.add(round);
  return { ...rest, status, peers, rounds, rates: [], groups: new Map(groups.map((one) => [one.id, one])), asked: 0 };
}

/** A node's name, or the end of its peer id. */
function nameOf(peer) {
  const own = feeds.length > 1 && feeds.find((one) => one.peer_id === peer);
  const said = own || feed().peers?.peers.find((one) => one.peer_id === peer);
  if (peer === feed().peer_id && feeds.length === 1) return "this node";
  return said?.name ? words(said.name, 16) : shortId(peer);
}

const scores = () => (feed().scores?.peers.some((one) => one.rounds) ? feed().scores.peers : []); // where work is judged
const scoreOf = (peer) => scores().find((one) => one.peer_id === peer);
const connected = () => [...(feed().peers?.peers ?? [])].sort((a, b) => (a.peer_id < b.peer_id ? -1 : 1));
const ownWork = (rounds, peer) => rounds.filter((round) => round.own === "accepted" || presence(round, peer)[0] === "good");

/** Good, fair, bad or plain: the colour of a peer. */
function tone(score, standing) {
  if (score?.contained || standing === "banned" || standing === "refused") return "bad";
  if (standing === "slowed") return "fair";
  if (!score || (score.probation && !score.rounds)) return "plain";
  return score.score >= 0.5 ? "good" : "fair";
}

function changed(id, facts) {
  const told = JSON.stringify(facts);
  const before = shown.get(id);
  shown.set(id, told);
  return told !== before;
}

/** Whether somebody is in the middle of writing into a field of this part. */
function isTyping(box) {
  const field = document.activeElement;
  return box.contains(field) && field.type === "text" && field.value !== field.defaultValue;
}

/** Fill a part anew if what it shows has changed. Without children it is hidden. */
function part(id, facts, make) {
  if (isTyping($(id)) || !changed(id, facts)) return;
  const children = make().flat().filter(Boolean);
  $(id).hidden = !children.length;
  $(id).replaceChildren(...children);
}

const facts = (pairs) =>
  h("dl", { class: "facts" }, pairs.filter((pair) => pair && pair[1] != null).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));

/** A table; a head that begins with "#" is of numbers. */
function table(heads, rows, kind = "cards") {
  const clean = heads.map((head) => head.replace("#", ""));
  const align = heads.map((head) => (head.startsWith("#") ? "number" : null));
  return h("table", { class: kind },
    h("thead", {}, h("tr", {}, clean.map((head, n) => h("th", { scope: "col", class: align[n] }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, n) => h("td", { class: align[n], "data-head": n ? clean[n] : null }, cell))))));
}

/** Whether its owner paused it, who can then resume; limits pause it too. */
const isPaused = (status) => status.holds.some((hold) => hold.cause === "owner");

/** A duration that a glance a minute keeps true: "under a minute", "12 min", "3 h 5 min". */
const minutes = (seconds) => (seconds < 60 ? "under a minute" : duration(60 * Math.floor(seconds / 60)).replace(" 00 s", ""));

const dash = (why) => h("span", { title: why }, "–");
const peerCell = (peer) => h("span", { class: "peer", title: peer }, nameOf(peer));

// --- parts ------------------------------------------------------------------------------------------------------------

const LINKS = { gone: "the node does not answer", refused: "not let in" }; // others are shown by their names
const TROUBLE = {
  gone: "The node does not answer. What you see is the last that it said; this page tries again every few seconds. If it was stopped, swarmnode run starts it again.",
  refused: "This page was not let in: its address has no token, or that of another node. swarmnode open opens it with the right one.",
};

function alerts() {
  const status = feed()?.status;
  const declined = feed()?.declined; // a pause or an end that the node would not begin
  part("alerts", [link, status?.problems, status?.warnings, status?.holds, at, declined], () => {
    const wrong = new Set(status?.problems ?? []);
    const line = (text, kind, head) => h("p", { class: kind }, head ? h("b", {}, `${head} `) : null, words(text, 1200));
    return [
      report && line(report.verdict, "verdict", ""),
      TROUBLE[link] && line(TROUBLE[link], "wrong", ""),
      declined && line(declined, "wrong", ""),
      !report && (status?.holds ?? []).map(({ why, until }) => line(`${words(why, 300)}${until ? `, until ${new Date(1000 * until).toLocaleTimeString()}` : ""}`, "", "Not training:")),
      !report && (status?.warnings ?? []).map((text) => line(text, wrong.has(text) ? "wrong" : "", wrong.has(text) ? "To mend:" : "Note:")),
      report?.notes.length && h("details", { open: report.notes.length < 4 }, h("summary", {}, plural(report.notes.length, "remark")),
        h("ul", {}, report.notes.map((text) => h("li", {}, words(text, 1200))))),
    ].flat();
  });
}

const BEGUN = {
  "byte-lm": "a small language model, from the sources of Python",
  "digits-rl": "policies that learn from one another's answers about digits",
  file: "what a run file of yours says",
};

/** How the run of a node is chosen that was started without one. */
function choosePart() {
  const one = feed();
  const { choices, found, looking, choiceTold } = one;
  const open = !report && link === "live" && one.status?.choosing && choices;
  part("choose", [at, Boolean(open), choices, found, looking, choiceTold], () => {
    if (!open) return [];
    const told = choiceTold ?? choices.refused;
    return [
      h("h2", {}, "Choose a run"),
      h("p", { class: "soft" }, "Before you choose, nothing is trained and no run is joined. Members of a run see this node's IP address, peer id, name and version, and how far its copy of the model moves, from which something of its text may be worked out. Limits, further down, say what the node may take of this machine."),
      told && h("p", { class: "wrong", role: "alert" }, words(told, 1200)),
      choices.runs.length ? [h("h3", {}, "Go on with a run that is here"), table(["Run", "#Rounds saved", "Last", ""], choices.runs.map((run) => [
        [words(run.name || "damaged"), " ", h("code", { class: "soft" }, run.run_id.slice(0, 12))], run.rounds ?? "none", new Date(1000 * run.saved).toLocaleString(),
        h("button", { click: () => choose({ run_id: run.run_id }) }, "Go on"),
      ]))] : null,
      h("h3", {}, "Join by a link"),
      h("form", { class: "row", submit: (event) => choose({ where: event.target.elements.where.value }, event) },
        h("input", { name: "where", required: true, autocomplete: "off", spellcheck: "false", placeholder: "swarm1…", "aria-label": "link, from a member of the run" }), h("button", {}, "Join")),
      h("p", { class: "soft" }, "A member of the run has it: its page shows it, and swarmnode id --join prints it there."),
      h("h3", {}, "Join a run that wants members"),
      h("p", { class: "row" }, h("button", { id: "look", click: look, disabled: looking }, looking ? "Looking, for 20 s at the most" : "Look for runs"), found && !found.length ? "None was found. A run that is not listed is joined by its link." : null),
      found?.length ? table(["Run", "Learns", "Who takes part", "#Parameters", "#Members", "#Round", "#Memory", ""], found.map((run) => [
        [words(run.name), " ", h("code", { class: "soft" }, run.run_id.slice(0, 12))], words(run.code_sha256 ? `${run.task} (needs a file)` : run.task, 40),
        run.trust === "open" ? "anybody; work is checked" : "people who trust each other", count(run.parameters), run.members, run.round, size(run.memory),
        h("button", { click: () => choose({ run_id: run.run_id, addresses: run.addresses }) }, "Join"),
      ])) : null,
      h("h3", {}, "Begin a run"),
      h("form", { class: "row", "data-task": "byte-lm", submit: begin },
        h("select", { name: "task", "aria-label": "what is learned", change: ({ target }) => (target.form.dataset.task = target.value) }, Object.entries(BEGUN).map(([value, text]) => h("option", { value }, text))),
        h("select", { name: "open", "aria-label": "who takes part", class: "of-text" }, h("option", { value: "" }, "with whom you give its link to"), h("option", { value: "yes" }, "with anybody; work is checked")),
        h("input", { name: "called", class: "of-task", placeholder: "a name for it", "aria-label": "name of the run" }),
        h("input", { name: "file", type: "file", class: "of-file", accept: ".toml", "aria-label": "run file" }), h("button", {}, "Begin")),
    ].flat();
  });
}

/** Have the node that is shown do something, keep under `told` why it would not, and draw it. */
async function attempt(told, work) {
  const one = feed();
  try {
    await work(one);
    one[told] = null;
  } catch (error) {
    one[told] = error.message;
  }
  render();
}

function choose(wanted, event) {
  event?.preventDefault();
  document.activeElement.blur(); // what was typed is sent now
  return attempt("choiceTold", async (one) => {
    await daemon.call(at, "choose", wanted);
    Object.assign(one, { choices: null, asked: 0 });
  });
}

async function begin(event) {
  event.preventDefault();
  const { task, called, open, file } = event.target.elements;
  if (task.value !== "file") return choose({ task: task.value, name: called.value, open: task.value === "byte-lm" && open.value !== "" });
  if (file.files.length) choose({ file: await file.files[0].text() });
}

async function look() {
  const one = feed();
  one.looking = true;
  render();
  await attempt("choiceTold", async () => (one.found = (await daemon.call(at, "discover")).runs));
  one.looking = false;
  render();
}

function runPart() {
  const status = feed().status;
  part("run", [at, status?.run, status?.choosing, status?.run ? null : status?.doing, status?.paused, status?.peers, status?.role, feed().rounds.last], () => {
    if (status?.choosing) return [];
    if (!status?.run) return [h("h2", {}, report ? `${words(report.settings.run.name)}: ${words(feed().name)} said nothing at the end` : status ? (["relay", "watch"].includes(status.role) ? `This node trains in no run: it helps others find one another (role ${status.role})` : `No run yet${status.doing ? `: ${words(status.doing, 200)}` : ""}`) : "Waiting for the node")];
    const now = status.run;
    const phase = status.paused ? "paused" : now.phase;
    const last = feed().rounds.last;
    const before = feed().rounds.list.at(-2);
    const tile = (name, value, unit, below) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value, " ", unit ? h("small", {}, unit) : ""), below ? h("dd", { class: "soft" }, below) : null);
    const reward = isReward();
    const rewards = feed().rounds.list.slice(-SMOOTH).map((one) => one.reward).filter(known);
    const exact = feed().rounds.list.findLast((one) => known(one.accuracy))?.accuracy;
    const change = last && before && known(last.loss) && known(before.loss) ? last.loss - before.loss : null;
    const due = known(now.next_round_s) ? (now.next_round_s ? `next in ${duration(now.next_round_s)}` : "later than usual") : "";
    const others = (now.missing ?? []).filter((peer) => peer !== status.peer_id);
    const lost = others.length ? `missing: ${others.map(nameOf).slice(0, 3).join(", ")}` : now.missing?.length ? "own work not counted" : "";
    const measured = reward
      ? tile("Reward", decimal(mean(rewards)), "of 1", `mean of ${plural(rewards.length, "round")}${known(now.reward_by_chance) ? `; by chance ${decimal(now.reward_by_chance, 2)}` : ""}`)
      : tile("Held-out loss", decimal(now.loss ?? last?.loss), now.loss_unit, change === null ? "" : `${change > 0 ? "+" : "−"}${decimal(Math.abs(change))} in the last round; lower is better`);
    const second = reward
      ? known(last?.heldout_reward) && tile("On fresh questions", decimal(last.heldout_reward), "of 1", "expected reward")
      : known(exact) ? tile("Accuracy", percent(exact, 1), "", "of held-out text guessed right")
      : known(last?.trained_loss) && tile("Training loss", decimal(last.trained_loss), now.loss_unit, "of this node's own steps");
    return [
      h("header", {}, h("h2", {}, words(now.name)), h("p", { class: "soft" }, `run ${now.run_id.slice(0, 12)}, ${count(now.parameters)} parameters, ${now.codec}`)),
      h("dl", { class: "tiles" },
        h("div", {}, h("dt", {}, "Round"), h("dd", {}, now.round ?? "–", now.rounds ? [" ", h("small", {}, `of ${now.rounds}`)] : ""),
          h("dd", { class: "soft" }, `${phase}${due ? `, ${due}` : ""}`),
          now.rounds ? h("dd", {}, h("progress", { value: now.round ?? 0, max: now.rounds, "aria-label": "rounds done" })) : null,
          now.arriving ? h("dd", { class: "soft" }, `${size(now.arriving[0])} of ${size(now.arriving[1])} fetched from members`) : null),
        measured, second,
        tile(reward ? "Learns from" : "Members", reward ? plural(Math.max(0, (last?.members ?? 1) - 1), "peer") : now.members || "–", "", lost || `${plural(status.peers.connected, "peer")} connected, ${status.peers.relayed || "none"} by relay`),
        tile("Speed", known(now.tokens_per_second) ? count(now.tokens_per_second) : "–", "tokens/s", known(now.compute_share) ? `${percent(now.compute_share)} of the time computing` : ""),
        tile("A round takes", duration(now.round_seconds), "", known(now.round_age_s) && !report ? `the last ended ${duration(now.round_age_s)} ago` : "")),
    ];
  });
}

/** (round, mean over the nodes that told) of one figure, where at least `least` did. */
function meanOf(rounds, figure, least = 1) {
  const found = new Map();
  for (const round of rounds.flat()) {
    const value = figure(round);
    if (known(value)) found.set(round.round, [...(found.get(round.round) ?? []), value]);
  }
  return [...found].filter(([, values]) => values.length >= least).sort((a, b) => a[0] - b[0]).map(([round, values]) => [round, mean(values)]);
}

const smooth = (points) => points.map(([round], n) => [round, mean(points.slice(Math.max(0, n - SMOOTH + 1), n + 1).map((point) => point[1]))]);

const MEASURES = {
  learning: ["Learning", null],
  accuracy: ["Accuracy", (round) => round.accuracy, (share) => percent(share, 1), "of held-out text guessed right"],
  speed: ["Speed", (round) => (round.seconds ? round.tokens / round.seconds : null), count, "tokens/s"],
  time: ["Round time", (round) => round.seconds, duration, ""],
  traffic: ["Traffic", (round) => round.bytes_in + round.bytes_out, size, "in and out, of one node"],
};

function curvePart() {
  const all = feeds.map((one) => one.rounds.list);
  const exact = all.flat().some((round) => known(round.accuracy));
  part("measures", exact, () => Object.entries(MEASURES).filter(([id]) => id !== "accuracy" || exact).map(([id, [name]]) => h("button", { value: id, click: () => pick(id) }, name)));
  for (const button of $("measures").children) button.setAttribute("aria-pressed", button.value === measure);
  if (!changed("curve", [at, measure, other?.made, all.map((rounds) => [rounds.length, rounds.at(-1)])])) return;
  const swarm = feeds.length > 1 ? `, mean of the ${feeds.length} nodes` : "";
  const alone = report?.solo ? [{ name: "one node alone", tone: "third", rounds: [feedOf({ history: report.solo }).rounds.list] }] : [];
  const compared = other ? [{ name: "the other report", tone: "fourth", rounds: other.nodes.map((one) => feedOf(one).rounds.list) }] : [];
  const extra = [...alone, ...compared];
  const newest = feed().rounds.last?.round ?? Infinity;
  const [name, figure, format, unit] = MEASURES[measure];
  if (figure) {
    const series = [{ name: name.toLowerCase() + swarm, tone: "first", points: meanOf(all, figure) }];
    return curve.show({ series: [...series, ...extra.map((one) => ({ ...one, points: meanOf(one.rounds, figure) }))], format, unit, newest });
  }
  const reward = isReward();
  const first = (round) => (reward ? round.reward : round.loss);
  const even = reward ? smooth : (points) => points;
  const sure = Math.max(...meanOf(all, first, all.length / 2).map(([round]) => round)); // nodes of such a run go their own pace
  const main = meanOf(all, first).filter(([round]) => !reward || round <= sure);
  const faint = reward && feeds.length > 1 ? all.map((rounds) => ({ tone: "first", faint: true, points: even(meanOf([rounds], first)) })) : [];
  const second = meanOf(all, (round) => (reward ? round.heldout_reward : round.trained_loss)).filter(([round]) => !reward || round <= sure);
  const chance = run().reward_by_chance;
  curve.show({
    series: [
      ...faint,
      { name: (reward ? `reward, mean of ${SMOOTH} rounds` : "held-out loss") + swarm, tone: "first", points: even(main) },
      ...(second.length ? [{ name: reward ? "expected on fresh questions" : "training loss", tone: "second", points: even(second) }] : []),
      ...(reward && known(chance) && main.length ? [{ name: "by chance", tone: "chance", points: [[main[0][0], chance], [main.at(-1)[0], chance]] }] : []),
      ...extra.map((one) => ({ ...one, points: even(meanOf(one.rounds, first)) })),
    ],
    unit: reward ? "of 1" : run().loss_unit,
    newest,
  });
}

function pick(id) {
  measure = id;
  render();
}

function swarmPart() {
  const me = feed().peer_id;
  const told = (peer, standing) => ({ peer, name: nameOf(peer), tone: tone(scoreOf(peer), standing), title: peer });
  const people = [told(me), ...connected().map((one) => told(one.peer_id, one.standing))];
  const linksOf = (one) => (one.peers?.peers ?? []).map((peer) => ({ from: one.peer_id, to: peer.peer_id, relayed: peer.path === "relayed", rtt: peer.rtt_ms }));
  const links = [...feeds.filter((one) => one !== feed()).flatMap(linksOf), ...linksOf(feed())];
  if (!changed("swarm", [people, links])) return;
  swarm.show({ me, people, links });
  for (const key of document.querySelectorAll("[data-scored]")) key.hidden = !scores().length;
  $("swarm-told").textContent = `${plural(people.length - 1, "peer")} connected`;
}

const PRESENCE = { good: "counted", late: "missing", refused: "refused" };

function roundsPart() {
  const { rounds, peer_id: me } = feed();
  const named = new Set([me]);
  for (const round of rounds.list.slice(-60)) for (const peer of [...(round.counted ?? []), ...round.missing, ...Object.keys(round.verdicts ?? {})]) named.add(peer);
  for (const one of feeds) if (one.peer_id) named.add(one.peer_id);
  const owns = (peer) => new Map(feeds.find((one) => one.peer_id === peer)?.rounds.list.map((round) => [round.round, round.own]));
  const row = (peer) => ({ peer, name: nameOf(peer), own: owns(peer) });
  const others = [...named].filter((peer) => peer !== me).map(row);
  const people = isReward() ? [] : [row(me), ...others.sort((a, b) => (a.name < b.name ? -1 : 1))];
  if (!changed("rounds", [at, people, feeds.map((one) => [one.rounds.list.length, one.rounds.last])])) return;
  const stages = stagesOf(rounds.list);
  timeline.show({ rounds: rounds.list, people, stages });
  const keys = Object.entries({ ...stages, ...(people.length && PRESENCE) });
  $("legend").replaceChildren(...keys.map(([id, name]) => h("span", { class: "key" }, h("i", { class: id }), name)));
}

function ownPart() {
  const score = scores().find((one) => one.me);
  const rounds = feed().rounds.list;
  part("own", [score, rounds.length, rounds.at(-1)?.round], () => {
    if (!rounds.length && !score) return [];
    const recent = rounds.slice(-20).filter((round) => round.own || round.counted);
    const sum = (figure) => rounds.reduce((total, round) => total + (round[figure] ?? 0), 0);
    return [
      h("h2", {}, feeds.length > 1 ? `What ${words(feed().name, 20)} gave` : "What this node gave"),
      facts([
        recent.length && !isReward() && ["its work counted", `in ${ownWork(recent, feed().peer_id).length} of the last ${plural(recent.length, "round")}`],
        ["trained on", `${count(sum("tokens"))} tokens in ${plural(rounds.length, "round")}`],
        ["sent", size(sum("bytes_out"))],
        run().learned && ["the last update is from", run().learned.taken ? `${plural(run().learned.taken, "group")} of ${plural(run().learned.authors, "peer")}, and its own` : "its own answers"],
        score && ["score", `${decimal(score.score, 2)} (${decimal(score.low, 2)} to ${decimal(score.high, 2)} of 1)`],
        score && ["weight of its work", decimal(score.weight, 2)],
        score && ["standing", score.contained ? "contained" : score.probation ? "on probation" : "full"],
      ]),
      score?.reasons && [h("h3", {}, "Why this score"), h("ul", {}, score.reasons.map((reason) => h("li", {}, words(reason, 300))))],
    ].flat();
  });
}

const opened = new Set(); // peers whose reasons are open

function peersPart() {
  const people = connected();
  const kept = feed().peers?.kept_out ?? [];
  // Ages and round trips change with every view and are told to the minute and to two digits.
  const near = people.map((one) => [one.peer_id, one.path, one.relay, one.standing, one.round, one.name, one.agent, one.rtt_ms?.toPrecision(2), Math.floor(one.age_s / 60)]);
  part("peers", [at, near, kept.map((one) => one.peer_id), scores()], () => [
    h("h2", {}, "Peers"),
    ...kept.map((one) => h("p", { class: "soft" }, peerCell(one.peer_id), ` is kept out for ${duration(one.for_s)} more: ${words(one.why)}`)),
    people.length
      ? table(["Peer", "Path", "#Round trip", "#Score", "Standing", "#Round", "#Connected for"], people.map((one) => {
          const score = scoreOf(one.peer_id);
          const flip = (event) => (event.target.open ? opened.add(one.peer_id) : opened.delete(one.peer_id));
          const why = score?.reasons && h("details", { open: opened.has(one.peer_id), toggle: flip },
            h("summary", {}, "why"), h("ul", {}, score.reasons.map((reason) => h("li", {}, words(reason, 300)))));
          return [ // who runs the same version says nothing of its agent
            [h("i", { class: tone(score, one.standing) }), peerCell(one.peer_id), one.agent === `swarmnode/${feed().status?.version}` ? null : h("span", { class: "soft" }, ` ${words(one.agent, 40)}`), why],
            one.relay ? ["through ", peerCell(one.relay)] : one.path,
            known(one.rtt_ms) ? `${Number(one.rtt_ms.toPrecision(2))} ms` : dash("not measured yet"),
            score && !(score.probation && !score.rounds) ? decimal(score.score, 2) : dash("not scored yet"),
            score?.contained ? "contained" : score?.probation && one.standing === "good" ? "on probation" : one.standing,
            one.round ?? dash("its round is not known"),
            minutes(one.age_s),
          ];
        }))
      : h("p", { class: "soft" }, "Nobody is connected. The invitation below, pasted on another machine, brings somebody."),
  ]);
}

function rolloutsPart() {
  const groups = [...feed().groups.values()].sort((a, b) => b.made_at_ms - a.made_at_ms).slice(0, GROUPS);
  const courses = Object.entries(feed().answered?.reward_by_task ?? {}).map(([task, course]) => [task, smooth(course)]).sort();
  part("rollouts", [groups.map((group) => group.id), feed().pool, courses], () => {
    if (!groups.length) return [];
    const taught = (feed().pool?.authors ?? []).filter((one) => one.learned);
    const refused = (feed().pool?.authors ?? []).flatMap((one) => Object.entries(one.refused).map(([why, number]) => `${number} of ${nameOf(one.author)} (${words(why).replaceAll("-", " ")})`));
    return [
      h("h2", {}, "Answers"),
      h("p", { class: "soft" }, "The newest questions that policies answered, own and others'; what is right here is green."),
      table(["Question", "Right", "Answers", "By", "#Reward"], groups.map((group) => [
        h("code", {}, words(group.question, 200)),
        h("code", {}, words(group.key, 60)),
        h("div", { class: "answers" }, group.answers.map((one) => h("span", { class: one.reward >= 0.99 ? "right" : null, title: `reward ${one.reward}` }, words(one.text, 120)))),
        peerCell(group.author),
        decimal(mean(group.answers.map((one) => one.reward)), 2),
      ])),
      courses.length > 1 ? table(["Task", `#Reward, mean of ${SMOOTH} rounds`, "Since the start"], courses.map(([task, course]) => [words(task, 64), decimal(course.at(-1)[1]), spark(course.map(([, reward]) => reward))])) : null,
      taught.length ? h("p", { class: "soft" }, "Learned from: ", taught.slice(0, 12).flatMap((one, n) => [n ? ", " : "", `${plural(one.learned, "group")} of `, peerCell(one.author)])) : null,
      refused.length ? h("p", { class: "soft" }, `Refused: ${refused.slice(0, 6).join("; ")}`) : null,
    ];
  });
}

const PROTOCOLS = {
  rpc: "rounds and questions", bulk: "updates and parameters", shards: "shards of state and text", state: "shared records", hello: "greetings", kad: "finding peers", id: "introductions", other: "introductions",
  autonat: "whether it can be dialled", circuit: "relaying", dcutr: "ways around relays",
};

/** [what for, bytes in, bytes out] of each protocol, by the counters of a daemon or several, the most first. */
function bytesByProtocol({ metrics }) {
  const sums = new Map();
  ["received", "sent"].forEach((way, column) => {
    const told = (metrics ?? []).filter((one) => one.name === `swarmnode_${way}_bytes_total`);
    for (const { labels, value } of told.flatMap((one) => one.samples)) {
      const name = PROTOCOLS[labels.protocol.split("/")[2] ?? "other"] ?? labels.protocol;
      const sum = sums.get(name) ?? [0, 0];
      sum[column] += value;
      sums.set(name, sum);
    }
  });
  return [...sums].map(([name, sum]) => [name, ...sum]).sort((a, b) => b[1] + b[2] - a[1] - a[2]);
}

const protocolTable = (kinds) => table(["For what", "#In", "#Out"], kinds.map(([kind, ...ways]) => [kind, ...ways.map(size)]), "");

function trafficPart() {
  const { traffic } = feed().status ?? {};
  const kinds = bytesByProtocol(feed());
  part("traffic", [traffic, kinds], () => traffic ? [
    h("h2", {}, "Traffic"),
    facts([
      ["received", size(traffic.bytes_in)], ["sent", size(traffic.bytes_out)],
      !report && ["now in", [`${size(traffic.rate_in)}/s`, spark(feed().rates.map((rate) => rate[0]))]],
      !report && ["now out", [`${size(traffic.rate_out)}/s`, spark(feed().rates.map((rate) => rate[1]))]],
    ]),
    kinds.length ? protocolTable(kinds) : null,
  ] : []);
}

function shardsPart() {
  const data = run().data;
  const held = feed().shards;
  part("shards", [data, held?.bytes, held?.cap, held?.shards.length], () => [
    (data || held?.shards.length) && h("h2", {}, "Text"),
    data?.source === "local" && h("p", { class: "soft" }, "It trains on text of its own, which others do not get."),
    data && data.source !== "local" && facts([
      ["of its part here", [`${data.shards} of ${plural(data.wanted, "shard")}`, h("progress", { value: data.shards, max: data.wanted || 1, "aria-label": "shards here" })]],
      ["in the whole run", plural(data.in_run, "shard")],
      ["fetched from others", size(data.fetched)],
    ]),
    held?.shards.length && facts([["kept for others too", `${plural(held.shards.length, "shard")}, ${size(held.bytes)} of at most ${size(held.cap)}`]]),
  ]);
}

const REACH = { public: "yes, peers can dial it", private: "no, it dials out only", relayed: "through relays", unknown: "not known yet" };

function machinePart() {
  const status = feed().status;
  const trainer = status?.trainer;
  part("machine", [trainer, status?.version, Boolean(status?.run) && status.join, status?.reachability, Math.floor((status?.uptime_s ?? 0) / 60)], () => status ? [
    h("h2", {}, "Machine"),
    facts([
      ["node", h("code", {}, status.peer_id)],
      status.name && ["name", words(status.name, 60)],
      ["version", `${status.version}, up ${minutes(status.uptime_s)}`],
      ["reached from outside", REACH[status.reachability] ?? status.reachability],
      trainer && ["trains on", `${trainer.ranks > 1 ? `${trainer.ranks} × ` : ""}${trainer.device}, ${plural(trainer.threads, "thread")}`],
      trainer?.restarts && ["trainer restarted", plural(trainer.restarts, "time")],
      trainer?.sandbox && ["sandbox", !trainer.sandbox.enforced?.length ? "none" : trainer.sandbox.missing.length ? "in part" : "whole"],
    ]),
    !report && status.run && status.join && [h("h3", {}, "Invite"), h("p", {}, h("code", {}, status.join)), h("p", { class: "row" }, h("button", { click: copy }, "Copy the line"))],
  ].flat() : []);
}

const CAPS = {
  cpu: "CPU of this machine", threads: "threads", memory: "memory", device_memory: "memory of a GPU", disk: "disk", shards_cap: "disk for others' text",
  up: "sending", down: "receiving", hours: "hours of day", only_when_idle: "only when idle for", not_on_battery: "not on battery", temperature: "no hotter than",
};

/** What the node may take of its machine. A change is sent when a field is left. */
function capsPart() {
  const { caps, capsTold } = feed();
  part("caps", [caps?.caps, capsTold], () => caps ? [
    h("h2", {}, "Limits"),
    h("p", { class: "soft" }, capsTold ? words(capsTold, 300) : "A change holds at once and is kept. An empty field takes it back. 0 is no limit, but of disk for others' text none at all."),
    h("div", { class: "fields" }, Object.entries(CAPS).filter(([key]) => key in caps.caps).map(([key, label]) => {
      const { value, unit } = caps.caps[key];
      const yes = typeof value === "boolean";
      const cap = (to) => attempt("capsTold", async (one) => (one.caps = await daemon.call(at, "caps", { [key]: to })));
      const change = ({ target }) => {
        target.blur();
        cap(yes ? target.checked : target.value);
      };
      const field = h("input", { type: yes ? "checkbox" : "text", value, checked: yes && value, placeholder: "any", change });
      return h("label", {}, label, h("span", {}, field, h("small", {}, unit)));
    })),
  ] : []);
}

async function copy(event) {
  await navigator.clipboard.writeText(feed().status.join);
  event.target.textContent = "Copied";
}

// --- a finished swarm -------------------------------------------------------------------------------------------------

const flat = (settings, before = "") =>
  Object.entries(settings ?? {}).flatMap(([key, value]) => (value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${before}${key}.`) : [[before + key, JSON.stringify(value)]]));

function reportParts() {
  part("work", 0, () => [
    h("h2", {}, "Who did what"),
    table(["Node", "At the end", "#Rounds", "#Tokens", "#Computing", "#Received", "#Sent", "#Loss or reward"], feeds.map((one) => {
      const rounds = one.rounds.list;
      const sum = (figure) => rounds.reduce((total, round) => total + (figure(round) ?? 0), 0);
      const last = rounds.findLast((round) => known(round.loss ?? round.reward));
      return [[words(one.name), " ", h("span", { class: "peer soft", title: one.peer_id }, shortId(one.peer_id))], one.state, rounds.length, count(sum((round) => round.tokens)),
        percent(sum((round) => round.stages.train) / (sum((round) => round.seconds) || 1)), size(sum((round) => round.bytes_in)), size(sum((round) => round.bytes_out)), decimal(last?.loss ?? last?.reward)];
    })),
    h("h3", {}, "Bytes by kind, of all nodes"),
    protocolTable(bytesByProtocol({ metrics: feeds.flatMap((one) => one.metrics ?? []) })),
  ]);
  part("attack", 0, () => report.attack ? [
    h("h2", {}, "The attack"),
    ...report.attack.words.map((text) => h("p", {}, words(text, 400))),
    table(["Node", "Told", "#Accepted", "#Refused", "#Score", "Why refused"], report.attack.nodes.map((one) => [
      `node ${one.node}`, [h("i", { class: one.lie ? "bad" : "good" }), one.lie ? words(one.lie) : "the truth"], one.accepted,
      Object.values(one.refused).reduce((sum, number) => sum + number, 0), decimal(one.score, 2),
      Object.entries(one.refused).map(([why, number]) => `${number} × ${words(why)}`).join(", "),
    ])),
  ] : []);
  part("settings", 0, () => [
    h("h2", {}, "Figures"), facts(report.figures),
    h("details", {}, h("summary", {}, "Settings and versions"), facts([...Object.entries(report.versions ?? {}), ...flat(report.settings)])),
  ]);
  $("compare").hidden = false;
  const [chosen] = $("compare").getElementsByTagName("input");
  chosen.onchange = async () => {
    try {
      other = reportIn(new DOMParser().parseFromString(await chosen.files[0].text(), "text/html"));
      if (!other?.nodes) throw new Error();
      $("compare").lastElementChild.replaceChildren(differences());
    } catch {
      other = null;
      $("compare").lastElementChild.replaceChildren(h("p", {}, "That file is no report of swarmnode local."));
    }
    render();
  };
}

function differences() {
  const lines = (one) => new Map([...one.figures, ...Object.entries(one.versions ?? {}), ...flat(one.settings)]);
  const [here, there] = [lines(report), lines(other)];
  const names = [...new Set([...here.keys(), ...there.keys()])].filter((name) => here.get(name) !== there.get(name));
  return table(["", "this report", "the other"], names.map((name) => [words(name), words(here.get(name) ?? "–", 200), words(there.get(name) ?? "–", 200)]));
}

// --- what happens -----------------------------------------------------------------------------------------------------

let frame = 0;

/** Draw before the next frame, once, however much has come until then. */
function render() {
  frame ||= requestAnimationFrame(draw);
}

function draw() {
  frame = 0;
  document.body.className = feed()?.status?.choosing ? `${link} choosing` : link;
  $("link").className = link;
  $("link").textContent = report ? `report of ${new Date(1000 * report.made).toLocaleString()}` : LINKS[link] ?? link;
  alerts();
  if (!feed()) return;
  for (const show of [choosePart, runPart, curvePart, swarmPart, roundsPart, ownPart, peersPart, rolloutsPart, trafficPart, shardsPart, capsPart, machinePart]) show();
  const status = feed().status;
  const steers = !report && link === "live" && status;
  $("pause").hidden = !steers || !status.run;
  if (steers) $("pause").textContent = isPaused(status) ? "Resume" : "Pause";
  $("stop").hidden = !steers;
  const last = feed().rounds.last;
  if (last) document.title = `round ${last.round}, ${decimal(last.loss ?? last.reward)}: ${words(run().name ?? "swarmnode", 40)}`;
}

/** Follow the chosen node from now on, if the page can be seen. */
function follow() {
  following?.abort();
  if (report || document.hidden || !feeds.length) return;
  following = new AbortController();
  const [here, signal] = [at, following.signal];
  daemon.follow(here, {
    signal,
    state: (state) => {
      link = state;
      if (state === "live") {
        feeds[here].declined = null; // it may have been that nobody answered
        learn(here);
      }
      render();
    },
    heard: (name, told) => {
      const one = feeds[here];
      if (name === "view") {
        if (told.status.choosing && !one.status?.choosing) one.asked = 0; // what there is to choose from
        const id = told.status.run?.run_id;
        if (id && one.runId && id !== one.runId) Object.assign(one, { rounds: new Rounds(), groups: new Map(), asked: 0 });
        one.runId = id ?? one.runId;
        Object.assign(one, { status: told.status, peers: told.peers, peer_id: told.status.peer_id });
        one.rates = [...one.rates, [told.status.traffic.rate_in, told.status.traffic.rate_out]].slice(-RATES);
      } else if (name === "round" && known(told.round) && (told.event ?? "round") === "round") one.rounds.add(told);
      if (Date.now() - one.asked > ASK_EVERY) learn(here);
      render();
    },
  });
}

/** Ask one node; while it has not told all of what it was asked before, as one that is frozen, it is asked no more. */
async function once(one, work) {
  if (one.learning) return;
  one.learning = true;
  try {
    await work();
    render();
  } finally {
    one.learning = false;
  }
}

/** Ask for what the stream does not bring. What a node has nothing of, it declines: then that part stays away. */
async function learn(here) {
  const ask = (node, method, params) => daemon.call(node, method, params, SILENCE).catch((error) => (error instanceof Refused ? null : undefined));
  const rounds = async (each) => {
    const told = await ask(feeds.indexOf(each), "history", { since: each.rounds.last?.round ?? 0 });
    for (const round of told?.rounds ?? []) each.rounds.add(round);
  };
  const one = feeds[here];
  await once(one, async () => {
    one.asked = Date.now();
    await rounds(one);
    if (one.status?.choosing) one.choices = (await ask(here, "choices")) ?? null;
    one.scores = await ask(here, "scores", { why: (one.peers?.peers.length ?? 0) <= 32 });
    one.shards = await ask(here, "shards_ls");
    one.metrics = (await ask(here, "metrics"))?.metrics;
    one.caps = (await ask(here, "caps")) ?? one.caps;
    if (one.status?.run && !one.status.run.data) {
      const listed = await ask(here, "rollouts_ls", { limit: GROUPS });
      for (const { id } of listed?.groups ?? []) {
        const group = one.groups.get(id) ?? (await ask(here, "rollouts_show", { id }));
        if (group) one.groups.set(id, group);
      }
      while (one.groups.size > 4 * GROUPS) one.groups.delete(one.groups.keys().next().value);
      one.pool = await ask(here, "rollouts_pool");
      one.answered = await ask(here, "rollouts_stats");
    }
  });
  for (const each of feeds.filter((other) => other !== one))
    await once(each, async () => {
      await rounds(each);
      each.peers = (await ask(feeds.indexOf(each), "peers")) ?? null;
    });
}

async function steer(method) {
  const here = at;
  await attempt("declined", () => daemon.call(here, method));
  learn(here);
}

function choices() {
  $("nodes").hidden = feeds.length < 2;
  const [select] = $("nodes").getElementsByTagName("select");
  select.replaceChildren(...feeds.map((one, number) => h("option", { value: number }, words(one.name, 30))));
  select.value = at;
  select.onchange = () => {
    at = Number(select.value);
    follow();
    render();
  };
}

async function start() {
  if (report) {
    link = "report";
    feeds.push(...report.nodes.map(feedOf));
    at = Math.max(0, feeds.findIndex((one) => one.status));
    reportParts();
  } else {
    const token = location.hash.slice(1) || sessionStorage.getItem("token");
    if (token) sessionStorage.setItem("token", token);
    history.replaceState(null, "", location.pathname); // the token does not stay in the address bar
    addEventListener("hashchange", () => location.reload()); // a link with a token was pasted into this tab
    daemon = new Daemon(token);
    while (!feeds.length) {
      try {
        feeds.push(...(await daemon.nodes()).map(feedOf));
      } catch (error) {
        link = error instanceof Refused ? "refused" : "gone";
        render();
        if (link === "refused") return;
        await new Promise((wake) => setTimeout(wake, 2000));
      }
    }
    $("pause").onclick = () => steer(isPaused(feed().status) ? "resume" : "pause");
    $("stop").onclick = () => $("sure").showModal();
    $("stop-no").onclick = () => $("sure").close();
    $("stop-yes").onclick = () => $("sure").close() ?? steer("stop");
    document.addEventListener("visibilitychange", follow);
    follow();
  }
  choices();
  render();
}

const curve = new Curve($("curve"), "The curve over rounds; arrow keys move through it", 340);
const swarm = new Swarm($("swarm"), "The swarm as a graph; the table of peers tells the same", 300);
const timeline = new Timeline($("rounds"), "Rounds: their time, and who took part; arrow keys move through them", 160);
start();
