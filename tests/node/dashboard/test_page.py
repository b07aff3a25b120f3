"""The page in a real browser, before a daemon that is made up: what is shown, how soon, and what it may not do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, Page, needs_chromium
from fakedaemon import PEERS, FakeDaemon
from realnodes import until

pytestmark = [needs_chromium, pytest.mark.slow]

HOUR = 3600  # views
HEAP = 60e6  # bytes


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    daemon = FakeDaemon()
    yield daemon
    daemon.close()


def opened(browser: Browser, daemon: FakeDaemon, **size: Any) -> Page:
    """The page once it shows something."""
    page = browser.open(f"{daemon.origin}/#secret", **size)
    page.wait("document.querySelector('#link').innerText === 'live'")
    page.wait("document.querySelectorAll('#rounds .mark').length >= 33")
    return page


def test_the_page_loads_within_a_second_and_shows_round_loss_and_peers(browser: Browser, daemon: FakeDaemon) -> None:
    daemon.warnings = ["the disk is full: make room"]
    page = opened(browser, daemon)
    took = page.js("performance.getEntriesByType('navigation')[0].loadEventEnd")
    assert 0 < took < 1000, f"{took} ms"
    assert page.text("#alerts") == "To mend: the disk is full: make room"
    assert "a run" in page.text("#run") and "5 of 40" in page.text("#run")
    assert "7.600 bits per byte" in page.text("#run")
    assert page.text("#curve .detail").startswith("held-out loss 7.600")
    assert page.js("document.querySelectorAll('#peers tbody tr').length") == 7
    assert page.js("document.querySelectorAll('#swarm .node').length") == 8
    assert "not connected" in page.text("#rounds .detail")  # why the eighth is missing in round 4
    assert page.js("document.querySelectorAll('#rounds .mark.late').length") == 1
    assert page.js("document.title") == "round 4, 7.600: a run"


ASKING = """
const all = (what) => [...document.querySelectorAll(what)];
const at = (one, name) => Number(one.getAttribute(name));
const fill = (one) => getComputedStyle(one).fill;
"""
# Of each peer that is drawn: its colour, whether the line to it is dashed, and what stands on that.
DRAWN = """
const me = document.querySelector('#swarm .node.me');
const beside = (one, x, y) => Math.hypot(at(one, x[0]) - x[1], at(one, y[0]) - y[1]) < 6;
const between = (dot, axis) => at(me, axis) + 0.56 * (at(dot, axis) - at(me, axis));
return Object.fromEntries(all('#swarm .node').map((dot) => {
  const line = all('#swarm .link.own').find((one) => beside(one, ['x2', at(dot, 'cx')], ['y2', at(dot, 'cy')]));
  const said = all('#swarm .latency').find((one) => beside(one, ['x', between(dot, 'cx')], ['y', between(dot, 'cy')]));
  const dashed = line ? getComputedStyle(line).strokeDasharray !== 'none' : null;
  return [dot.parentNode.querySelector('title').textContent, [fill(dot), dashed, said?.textContent ?? null]];
}));
"""
# The stages of the newest round from the bottom on: colour, and share of the column's height.
COLUMN = """
const last = Math.max(...all('#rounds .stage').map((bar) => at(bar, 'x')));
const bars = all('#rounds .stage').filter((bar) => at(bar, 'x') === last).sort((a, b) => at(b, 'y') - at(a, 'y'));
const whole = bars.reduce((sum, bar) => sum + at(bar, 'height'), 0);
return bars.map((bar) => [fill(bar), at(bar, 'height') / whole]);
"""
# The colours of the marks below it, by who is named before them.
MARKS = """
const last = Math.max(...all('#rounds .stage').map((bar) => at(bar, 'x')));
return Object.fromEntries(all('#rounds .mark').filter((mark) => at(mark, 'x') === last).map((mark) => {
  const name = all('#rounds .scale.end').find((one) => Math.abs(at(one, 'y') - at(mark, 'y') - 10) < 2);
  return [name.textContent, fill(mark)];
}));
"""
# What the legend of a part says of each colour.
KEYS = """
return Object.fromEntries(all('section:has(#PART) .legend .key:not([hidden])').map(
  (key) => [getComputedStyle(key.querySelector('i')).backgroundColor, key.innerText]));
"""


def drawn(page: Page, what: str) -> Any:
    return page.js(f"(() => {{ {ASKING} {what} }})()")


def test_a_relayed_peer_is_drawn_dashed_each_with_its_round_trip_and_in_the_colour_of_its_score(
    browser: Browser, daemon: FakeDaemon
) -> None:
    me, *others = PEERS
    daemon.ways = {
        others[0]: {"path": "relayed", "relay": others[1], "rtt_ms": 183.6},
        others[1]: {"rtt_ms": 3.44},
        others[3]: {"standing": "slowed"},
        others[4]: {"standing": "banned", "rtt_ms": None},
    }
    daemon.scored = {
        **{me: {"weight": 0.85}, others[0]: {"score": 0.31}, others[1]: {"score": 0.5}, others[2]: {"contained": True}},
        **{others[3]: {}, others[4]: {}, others[5]: {"rounds": 0, "probation": True}},
    }
    page = opened(browser, daemon)
    page.wait("document.querySelectorAll('#swarm .node.bad').length === 2")
    keys = drawn(page, KEYS.replace("PART", "swarm"))
    assert {peer: (keys[colour], *line) for peer, (colour, *line) in drawn(page, DRAWN).items()} == {
        me: ("scored well", None, None),
        others[0]: ("low, or slowed", True, "184 ms"),
        others[1]: ("scored well", False, "3.4 ms"),
        others[2]: ("contained, or banned", False, "12 ms"),
        others[3]: ("low, or slowed", False, "12 ms"),
        others[4]: ("contained, or banned", False, None),
        others[5]: ("not scored yet", False, "12 ms"),
        others[6]: ("not scored yet", False, "12 ms"),
    }
    rows = [row.split("\t") for row in page.text("#peers tbody").splitlines() if "\t" in row]
    assert [row[1:5] for row in rows] == [
        [f"through …{others[1][-6:]}", "180 ms", "0.31", "good"],
        ["direct", "3.4 ms", "0.50", "good"],
        ["direct", "12 ms", "0.90", "contained"],
        ["direct", "12 ms", "0.90", "slowed"],
        ["direct", "–", "0.90", "banned"],
        ["direct", "12 ms", "–", "on probation"],
        ["direct", "12 ms", "–", "good"],
    ]
    assert "it helped in 4 rounds" in page.text("#own") and "0.85" in page.text("#own")


def test_without_scores_all_peers_have_one_colour_and_none_is_explained(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    assert len({colour for colour, *_ in drawn(page, DRAWN).values()}) == 1
    assert list(drawn(page, KEYS.replace("PART", "swarm")).values()) == ["through a relay"]


def test_an_open_round_is_drawn_in_its_stages_with_who_was_late_and_whom_its_judges_refused(
    browser: Browser, daemon: FakeDaemon
) -> None:
    daemon.open = True
    page = browser.open(f"{daemon.origin}/#secret")
    page.wait("document.querySelectorAll('#rounds .stage.judge').length === 5")
    keys = drawn(page, KEYS.replace("PART", "rounds"))
    exchanged = {"exchanging (committing)": 4.0, "exchanging (revealing)": 1.0, "exchanging (judging)": 2.0}
    spent = {"training": 3.0, **exchanged, "waiting and the rest": 2.5}
    assert list(keys.values()) == [*spent, "counted", "missing", "refused"], "and nothing is exchanged"

    def column() -> list[tuple[str, float]]:
        return [(keys[colour], round(12.5 * share, 1)) for colour, share in drawn(page, COLUMN)]

    def marks() -> dict[str, str]:
        return {name: keys[colour] for name, colour in drawn(page, MARKS).items()}

    def told() -> str:
        return " ".join(page.text("#rounds .detail").split())

    me, *others = "this node", *(f"…{peer[-6:]}" for peer in PEERS[1:])
    assert column() == list(spent.items())
    assert marks() == {me: "counted", others[6]: "missing"}
    assert told() == " ".join(
        ["round 4, 13 s", *(f"{stage} {seconds} s" for stage, seconds in spent.items()), f"8 members {others[6]}: late"]
    )

    event = daemon.told(5)
    event["counted"].remove(PEERS[6])
    daemon.push("round", {**event, "missing": [PEERS[6]], "verdicts": {**event["verdicts"], PEERS[6]: "malformed"}})
    page.wait("document.querySelectorAll('#rounds .stage.judge').length === 6")
    assert column() == list(spent.items())
    assert marks() == {me: "counted", **dict.fromkeys(others, "counted"), others[5]: "refused"}
    assert told().endswith(f"8 members {others[5]}: malformed")


# Of each rectangle of the newest round: its stage; from and until when, s; and whether it is as wide as the column.
SECONDS = """
const lines = all('#rounds .grid').map((line) => at(line, 'y1'));
const told = all('#rounds .scale.end').slice(0, lines.length).map((text) => parseFloat(text.textContent));
const seconds = (y) => Math.round(10 * (told[1] - told[0]) * (lines[0] - y) / (lines[0] - lines[1])) / 10;
const last = Math.max(...all('#rounds .stage').map((bar) => at(bar, 'x')));
const bars = all('#rounds .stage').filter((bar) => at(bar, 'x') === last);
const wide = Math.max(...bars.map((bar) => at(bar, 'width')));
return bars.map((bar) => [bar.classList[1], seconds(at(bar, 'y') + at(bar, 'height')), seconds(at(bar, 'y')),
  at(bar, 'width') === wide]);
"""


def test_a_round_beside_which_it_trained_is_as_high_as_it_was_long(browser: Browser, daemon: FakeDaemon) -> None:
    daemon.open = True
    page = browser.open(f"{daemon.origin}/#secret")
    page.wait("document.querySelectorAll('#rounds .stage.judge').length === 5")
    stages = [["commit", 5.5, 9.5, True], ["reveal", 9.5, 10.5, True], ["judge", 10.5, 12.5, True]]
    for trained, end in ((9.0, 9.0), (14.0, 12.5)):  # of the latter a part was in the round before
        daemon.push("round", {**daemon.told(5), "compute_seconds": trained})
        page.wait(f"document.querySelector('#rounds .detail').innerText.includes('training {trained:g}')")
        beside = ["train", 5.5, end, False]
        assert drawn(page, SECONDS) == [["train", 0, 5.5, True], *stages, beside]


@pytest.mark.parametrize("kind", ["known", "open", "by_rollouts"])
def test_the_legend_has_the_phase_and_the_stages_of_each_kind_of_run(
    browser: Browser, daemon: FakeDaemon, kind: str
) -> None:
    setattr(daemon, kind, True)
    page = browser.open(f"{daemon.origin}/#secret")
    page.wait("document.querySelectorAll('#rounds .stage.train').length === 5")
    *stages, rest = list(drawn(page, KEYS.replace("PART", "rounds")).values())[: -3 if kind != "by_rollouts" else None]
    exchanging = {"known": [""], "open": [" (committing)", " (revealing)", " (judging)"], "by_rollouts": []}[kind]
    assert stages == ["training", *(f"exchanging{which}" for which in exchanging)]
    assert rest == ("waiting and the rest" if exchanging else "exchanging, waiting and the rest")
    for stage in (*stages, rest):
        assert f"{stage} " in page.text("#rounds .detail")


def test_among_nodes_at_their_own_pace_the_round_of_the_one_that_is_shown_is_told(
    browser: Browser, daemon: FakeDaemon
) -> None:
    daemon.by_rollouts = daemon.frozen = True
    daemon.ahead = 3
    page = browser.open(f"{daemon.origin}/#secret")
    page.wait("document.querySelectorAll('#curve .faint')[1].getAttribute('d').split('L').length === 8")
    assert "round 4, of 1" in page.text("#curve .detail") and "round 4, 13 s" in page.text("#rounds .detail")


def test_what_is_not_known_of_a_peer_is_a_dash_that_says_so(browser: Browser, daemon: FakeDaemon) -> None:
    daemon.ways = {PEERS[1]: {"rtt_ms": None, "round": None}}
    page = opened(browser, daemon)
    said = "[...document.querySelectorAll('#peers tr:first-child td [title]')].slice(1).map((one) => one.title)"
    assert page.js(said) == ["not measured yet", "not scored yet", "its round is not known"]
    titled = "[...document.querySelectorAll('#rounds text:has(title)')].map((one) => one.textContent)"
    dashes = [told for told in page.js(titled) if told.endswith("–")]
    assert len(dashes) == 7 and "not known here" in dashes[0], "of the first round the node remembers its own part only"
    assert page.js("[...document.querySelectorAll('#peers td')].every((cell) => cell.innerText)")


def test_the_second_measure_and_traffic_by_protocol_are_shown(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    assert "20.0 %" in page.text("#run")
    page.js("[...document.querySelectorAll('#measures button')].find((one) => one.innerText === 'Accuracy').click()")
    page.wait("document.querySelector('#curve .detail').innerText.startsWith('accuracy 20.0 %')")
    assert "10.0 %" in page.js("[...document.querySelectorAll('#curve .scale')].map((one) => one.textContent)")
    page.wait("document.querySelectorAll('#traffic tbody tr').length === 2")
    assert page.text("#traffic tbody tr").split() == ["updates", "and", "parameters", "4.0", "MB", "6.0", "MB"]


def test_it_asks_nobody_but_its_daemon_breaks_no_rule_and_hides_its_token(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    assert {url.split("/")[2] for url in page.requests} == {daemon.origin.partition("//")[2]}
    assert not [error for error in page.errors if "status of 400" not in error]
    assert page.js("location.href") == f"{daemon.origin}/"
    assert not daemon.asked_without_token


def test_it_follows_an_event_within_a_second_and_lets_go_of_the_dead(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    daemon.push("round", daemon.told(5))
    assert page.wait("document.querySelector('#curve .detail').innerText.includes('round 5')") < 1.0
    daemon.push("round", {**daemon.told(6), "trained_loss": None})  # as it tells NaN
    page.wait("document.querySelector('#curve .detail').innerText.includes('round 6')")
    daemon.push("round", {**daemon.told(7), "own": "too far from the others", "counted": PEERS[1:]})
    page.wait("document.querySelector('#rounds .detail').innerText.includes('this node: too far from the others')")
    view = daemon.view(peers=6)
    view["status"]["run"]["next_round_s"] = 0.0
    daemon.push("view", view)
    assert page.wait("document.querySelectorAll('#swarm .node').length === 7") < 1.0
    assert "training, later than usual" in page.text("#run")


def test_an_hour_of_events_leaves_the_heap_small(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    for number in range(HOUR):
        daemon.round = 5 + number // 2
        daemon.push("view", daemon.view())
        if number % 2:
            daemon.push("round", daemon.told(daemon.round))
        if number % 30 == 0:
            page.js("new Promise(requestAnimationFrame)")  # what comes between two frames is drawn once
    page.wait(f"document.title.startsWith('round {daemon.round},')", within=90)
    assert page.heap() < HEAP
    assert not [error for error in page.errors if "status of 400" not in error]


def test_a_hidden_page_closes_its_stream_and_asks_nothing_until_it_is_seen(
    browser: Browser, daemon: FakeDaemon
) -> None:
    page = opened(browser, daemon)
    assert len(daemon.streams) == 1
    page.hide()
    give_up = time.monotonic() + 5
    while daemon.streams:
        daemon.push("view", daemon.view())  # a server notices when it writes
        time.sleep(0.05)
        assert time.monotonic() < give_up
    time.sleep(0.5)  # what it had begun to ask before
    asked = len(daemon.called)
    time.sleep(1.5)
    assert len(daemon.called) == asked and not daemon.streams
    daemon.round = 9
    page.hide(False)
    page.wait("document.querySelector('#run').innerText.includes('9 of 40')", within=2)


def test_it_says_when_the_daemon_is_gone_and_when_it_is_back(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    daemon.gone = True
    daemon.cut()
    page.wait("document.querySelector('#alerts').innerText.includes('does not answer')")
    assert "5 of 40" in page.text("#run"), "what it said last stays"
    daemon.gone = False
    page.wait("document.querySelector('#link').innerText === 'live'")


def test_a_link_with_another_token_says_what_to_do(browser: Browser, daemon: FakeDaemon) -> None:
    page = browser.open(f"{daemon.origin}/#wrong")
    page.wait("document.querySelector('#alerts').innerText.includes('swarmnode open')")


def test_what_peers_say_is_text_and_never_html(browser: Browser, daemon: FakeDaemon) -> None:
    nasty = "<img src=x onerror='window.hurt=1'><b>bold</b>"
    daemon.agent = nasty
    daemon.groups["aa"] = {
        **{"id": "aa", "author": nasty, "made_at_ms": 1, "question": nasty, "key": nasty},
        "answers": [{"text": nasty, "reward": 1.0, "advantage": 0.0, "tokens": 3}],
    }
    page = opened(browser, daemon)
    page.wait("document.querySelector('#rollouts').innerText.includes('<b>bold</b>')")
    assert nasty[:30] in page.text("#peers")
    shown = " ".join(page.text("#rollouts").split())
    assert "gym/lcm 0.50" in shown and "gym/gcd 1.00" in shown, "the reward of each task"
    assert "Learned from: 7 groups of" in shown and "Refused: 2 of" in shown
    assert page.js("document.querySelectorAll('main img, main b b').length") == 0
    assert page.js("window.hurt") is None


@pytest.mark.parametrize("width", [320, 390, 768])
def test_no_part_is_wider_than_a_phone(browser: Browser, daemon: FakeDaemon, width: int) -> None:
    page = opened(browser, daemon, width=width, height=800)
    assert page.js("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [360, 390])
def test_on_a_phone_units_stand_beside_their_numbers_and_no_text_of_a_drawing_is_cut_off(
    browser: Browser, daemon: FakeDaemon, width: int
) -> None:
    daemon.round = 40
    page = opened(browser, daemon, width=width, height=800)
    daemon.push("round", {**daemon.told(40), "seconds": 6000.0})
    page.wait("document.querySelector('#rounds svg').textContent.includes('1 h 40 min')")
    lines = "[...document.querySelectorAll('.tiles dd:has(small)')].map((one) => one.offsetHeight)"
    assert len(set(page.js(lines))) == 1
    outside = """[...document.querySelectorAll('section svg text')].filter((text) => {
      const clips = getComputedStyle(text.ownerSVGElement).overflow !== 'visible';
      const [box, frame] = [text, text.closest(clips ? 'svg' : 'section')].map((one) => one.getBoundingClientRect());
      return box.left < frame.left || box.right > frame.right;
    }).map((text) => text.textContent)"""
    assert page.js(outside) == []


def test_pause_and_stop_reach_the_daemon_and_stop_asks_first(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    page.js("document.querySelector('#pause').click()")
    page.js("document.querySelector('#stop').click()")
    assert "stop" not in daemon.called
    assert page.js("document.querySelector('#sure').open")
    page.js("document.querySelector('#stop-yes').click()")
    until(lambda: {"pause", "stop"} <= set(daemon.called), within=5)


def test_a_limit_that_is_changed_reaches_the_daemon(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    page.wait("document.querySelectorAll('#caps input').length === 2")
    page.js("document.querySelector('#caps input').value = '50'")
    for field in ("document.querySelector('#caps input')", "document.querySelector('#caps [type=checkbox]')"):
        page.js(f"{field}.type === 'checkbox' ? {field}.click() : {field}.dispatchEvent(new Event('change'))")
        page.wait("document.querySelectorAll('#caps input').length === 2")
    until(lambda: [cap["value"] for cap in daemon.caps.values()] == ["50", True], within=5)


def test_what_somebody_types_stays_while_limits_change_elsewhere(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    page.wait("document.querySelectorAll('#caps input').length === 2")
    page.js("const field = document.querySelector('#caps input'); field.focus(); field.value = '5'")
    daemon.caps["cpu"] = {"value": 70.0, "unit": "%"}
    asked = daemon.called.count("caps")
    page.js("document.querySelector('#pause').click()")
    until(lambda: daemon.called.count("caps") > asked, within=15)
    time.sleep(0.5)
    assert page.js("document.activeElement.value") == "5"
    page.js("document.activeElement.blur()")
    page.wait("document.querySelector('#caps input').value === '70'")


def test_a_node_that_answers_nothing_does_not_hold_up_the_others(browser: Browser, daemon: FakeDaemon) -> None:
    daemon.frozen = True
    page = opened(browser, daemon)
    time.sleep(35)  # the page asks the frozen node again and again
    page.js("document.querySelector('#pause').click()")
    until(lambda: "pause" in daemon.called, within=2)
    assert daemon.called.count("metrics") >= 2


def test_another_run_of_the_same_node_has_a_curve_of_its_own(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    assert page.js("document.title").startswith("round 4")
    daemon.run_id, daemon.round = "cd" * 32, 3
    daemon.cut()
    page.wait("document.title.startsWith('round 2')", within=20)


def test_a_link_that_is_pasted_into_a_tab_without_a_token_opens_the_page(browser: Browser, daemon: FakeDaemon) -> None:
    page = browser.open(f"{daemon.origin}/#another")
    page.wait("document.querySelector('#link').innerText === 'not let in'")
    page.js("location.hash = 'secret'")
    page.wait("document.querySelector('#link')?.innerText === 'live'", within=20)


def test_why_a_pause_is_declined_is_told(browser: Browser, daemon: FakeDaemon) -> None:
    daemon.declines = "paused, but not for long: a restart ends it"
    page = opened(browser, daemon)
    page.js("document.querySelector('#pause').click()")
    page.wait("document.querySelector('#alerts').innerText.includes('a restart ends it')")
    daemon.declines = ""
    page.js("document.querySelector('#pause').click()")
    page.wait("!document.querySelector('#alerts').innerText.includes('a restart ends it')")


def test_why_it_does_not_train_is_told_and_only_its_owners_pause_can_be_ended(
    browser: Browser, daemon: FakeDaemon
) -> None:
    daemon.holds = [{"cause": "battery", "why": "the machine runs on its battery", "until": None}]
    page = opened(browser, daemon)
    assert "Not training: the machine runs on its battery" in page.text("#alerts")
    assert page.text("#pause") == "Pause"
    daemon.holds.insert(0, {"cause": "owner", "why": "paused by its owner", "until": None})
    daemon.push("view", daemon.view())
    page.wait("document.querySelector('#pause').innerText === 'Resume'")


def test_every_control_can_be_reached_by_keyboard_and_has_a_name(browser: Browser, daemon: FakeDaemon) -> None:
    page = opened(browser, daemon)
    unnamed = page.js(
        "[...document.querySelectorAll('button, select, input, [tabindex]')]"
        ".filter(e => !(e.innerText || e.getAttribute('aria-label') || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert not unnamed
    page.js("const time = document.querySelector('#measures [value=time]'); time.focus(); time.click()")
    page.wait("document.activeElement.getAttribute('aria-pressed') === 'true'")
    page.js("document.querySelector('#curve svg').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft", windowsVirtualKeyCode=37)
    assert "round 3" in page.text("#curve .detail")
