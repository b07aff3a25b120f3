"""What a running daemon answers to `swarmnode rollouts …`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from swarmnode.node.control import Declined
from swarmnode.protocols.methods.rollouts.messages import SignedGroup
from swarmnode.protocols.methods.rollouts.sharing import Rollouts
from swarmnode.training.rl.groups import RefusedGroup, score

if TYPE_CHECKING:
    from swarmnode.node.daemon import Daemon

LISTED = 1000  # groups in one answer at the most


class RolloutsApi:
    """The control methods. Each raises Declined with a text for a person."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def methods(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """By the names under which the control socket serves them."""
        return {
            "rollouts_ls": self.rollouts_ls,
            "rollouts_show": self.rollouts_show,
            "rollouts_pool": self.rollouts_pool,
            "rollouts_stats": self.rollouts_stats,
        }

    async def rollouts_ls(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The groups that are here, own ones and others', the newest first."""
        rollouts, limit = self._rollouts(), max(1, min(int(params.get("limit", 20)), LISTED))
        author = params.get("author")
        wanted = rollouts.me if author == "me" else author
        held = [(group, None) for group in rollouts.pool.own()]
        held += [(held.signed, held.used) for held in rollouts.pool]  # type: ignore[misc]
        chosen = [(group, used) for group, used in held if wanted in (None, group.author)]
        chosen.sort(key=lambda pair: pair[0].made_at, reverse=True)
        return {
            "groups": [{**_line(group), "used": used} for group, used in chosen[:limit]],
            "more": len(chosen) > limit,
        }

    async def rollouts_show(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """One group with its question, answers and what they earn."""
        rollouts, wanted = self._rollouts(), str(params.get("id", ""))
        held = [*rollouts.pool.own(), *(held.signed for held in rollouts.pool)]
        found = [group for group in held if wanted and group.id.hex().startswith(wanted)]
        if not found:
            raise Declined(
                f"no rollout group here has an id that begins with {wanted!r}; swarmnode rollouts ls shows them"
            )
        if len(found) > 1:
            raise Declined(f"{len(found)} rollout groups here have ids that begin with {wanted!r}; give more digits")
        (signed,) = found
        group = signed.group
        try:
            scored = score(signed.author, group, judged=self._judged())
        except RefusedGroup as refusal:
            raise Declined(f"the group cannot be read here: {refusal}") from refusal
        return {
            **_line(signed),
            "policy": group.policy,
            "vocabulary": group.vocabulary,
            "question": scored.question.prompt,
            "key": scored.question.key,
            "answers": [
                {"text": text, "reward": float(reward), "advantage": round(float(advantage), 4), "tokens": len(tokens)}
                for text, reward, advantage, tokens in zip(
                    scored.texts, scored.rewards, scored.advantages, group.answers, strict=True
                )
            ],
        }

    async def rollouts_pool(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What is held of whom, and what of each was refused."""
        pool = self._rollouts().pool
        return {"pool": asdict(pool.stats()), "authors": [asdict(author) for author in pool.by_author()]}

    async def rollouts_stats(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What sharing and learning came to since this node started."""
        session = self._daemon.session
        last = session.last if session is not None else None
        return {
            **asdict(self._rollouts().stats()),
            "learned": asdict(last.learned) if last is not None and last.learned is not None else None,
            "sampled": asdict(last.sampled) if last is not None and last.sampled is not None else None,
            "samplers": [],
            "reward_history": [[r, reward] for r, reward in session.rewards] if session is not None else [],
            **(session.method.status() if session is not None else {}),
        }

    def _judged(self) -> bool:
        chosen = self._daemon.chosen
        return chosen is not None and chosen.spec.rollouts.judge != "none"

    def _rollouts(self) -> Rollouts:
        session = self._daemon.session
        if session is None:
            raise Declined("this node takes part in no run yet; swarmnode run --task digits-rl begins one by rollouts")
        if session.method.rollouts is None:
            raise Declined(
                "the run of this node shares no rollouts; swarmnode run --task digits-rl begins one that does"
            )
        return session.method.rollouts


def _line(signed: SignedGroup) -> dict[str, Any]:
    group = signed.group
    return {
        "id": signed.id.hex(),
        "author": signed.author,
        "task": group.task.name,
        "difficulty": group.task.difficulty,
        "seed": group.task.seed,
        "answers": len(group.answers),
        "version": group.version,
        "made_at_ms": signed.made_at,
        "bytes": signed.size,
    }
