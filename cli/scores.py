"""`swarmnode scores`: what the running node thinks of its peers, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import age, ask, plain, short_peer, show, table


def scores(
    peer: Annotated[
        str | None, typer.Argument(metavar="[PEER]", help="A peer id, or how it begins or ends. [default: all]")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Show what each score rests on. [default: the scores]")] = False,
) -> None:
    """Show how this node scores its peers, and what follows.

    Every node has scores of its own: from what it measured itself, and where that is little, from what others attest.

    Example: swarmnode scores --why
    """
    answer = ask("scores", peer=peer, why=why)
    show(answer, _listing(answer, why=why))


def _listing(answer: dict[str, Any], *, why: bool) -> str:
    if not answer["peers"]:
        return "nothing was seen of anybody's work yet"
    if why:
        return "\n\n".join(map(_explained, answer["peers"]))
    rows = [
        (
            short_peer(each["peer_id"]),
            f"{each['score']:.2f}",
            f"{each['low']:.2f} to {each['high']:.2f}",
            f"{each['work']:.2f}",
            f"{each['weight']:.2f}",
            f"{each['helped']} of {each['rounds']}",
            str(each["attesters"]),
            _word(each),
        )
        for each in answer["peers"]
    ]
    heads = ("PEER", "SCORE", "RANGE", "WORK", "WEIGHT", "HELPED", "ATTESTERS", "")
    more = "\nthere are more; name one to see it" if answer["more"] else ""
    if not answer["judged"]:
        more += "\nin this run scores decide nothing: the work of every member counts"
    return table(heads, rows, right=frozenset({1, 3, 4, 6})) + more


def _word(each: dict[str, Any]) -> str:
    if each["me"]:
        return "this node"
    if each["contained"]:
        return "contained"
    return "on probation" if each["probation"] else ""


def _explained(each: dict[str, Any]) -> str:
    lines = [
        each["peer_id"] + (f" ({_word(each)})" if _word(each) else ""),
        f"score {each['score']:.2f} ({each['low']:.2f} to {each['high']:.2f}), work {each['work']:.2f}, "
        f"weight {each['weight']:.2f}",
        f"rating {each['rating']['mu']:.1f} ± {each['rating']['sigma']:.1f} (doing nothing has 25)",
        *(f"- {plain(reason, 160)}" for reason in each["reasons"]),
    ]
    if each["found"]:
        seen = [(it["saw"], str(it["good"]), str(it["bad"]), it["evidence"][:16] or "-") for it in each["found"]]
        lines += ["", table(("SEEN HERE", "GOOD", "BAD", "EVIDENCE"), seen, right=frozenset({1, 2}))]
    if each["audits"]:
        audits = [_audit(audit) for audit in each["audits"]]
        columns = ("WORK OF ROUND", "VERDICT", "STEPS REPEATED", "DISTANCE", "TOLERANCE", "COMMIT")
        lines += ["", table(columns, audits, right=frozenset({0, 3, 4}))]
        lines += [f"- round {audit['round']}: {plain(audit['why'], 160)}" for audit in each["audits"] if audit["why"]]
    if each["words"]:
        words = []
        for word in each["words"]:
            figures = (f"{word[name]:.2f}" for name in ("voice", "score", "work"))
            told = str(word["rounds"]), age(word["at_ms"] / 1000), ", ".join(map(_said, word["found"]))
            words.append((short_peer(word["attester"]), *figures, *told))
        heads = ("ATTESTER", "VOICE", "SCORE", "WORK", "ROUNDS", "AGE", "GOOD/BAD")
        lines += ["", table(heads, words, right=frozenset({1, 2, 3, 4, 5}))]
    return "\n".join(lines)


def _audit(audit: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    at = audit["stretch"]
    steps = f"{at['step']} to {at['step'] + at['steps']} of round {at['round']}" if at["steps"] else "-"
    distance = f"{audit['distance']:.1e}" if audit["distance"] is not None else "infinite"
    repeated = (distance, f"{audit['tolerance']:.2g}") if at["steps"] else ("-", "-")
    return str(audit["round"]), audit["verdict"], steps, *repeated, audit["commit"][:16]


def _said(found: dict[str, Any]) -> str:
    checked = "" if found["checked"] == "unknown" else f" ({found['checked']})"
    return f"{found['saw']} {found['good']}/{found['bad']}{checked}"
