"""A checkpoint serves whoever comes back: in a smaller or larger swarm, and where another exchange method wrote it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import trio
from simswarm import RUN, SimSwarm, simulate

from swarmnode.node.storage.checkpoints import Checkpoints
from swarmnode.protocols.methods.method import Saved
from swarmnode.training.outer import Layout, OuterState


def test_a_run_of_three_goes_on_as_one_of_five_and_as_one_of_one(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.begin("abc")
        await swarm.round_done(6, "a", "b", "c")
        for name in ("a", "b", "c"):
            await swarm.leave(name)
        stood = max(swarm.nodes["a"].rounds)
        await swarm.start("a")  # alone
        await swarm.round_done(stood + 3, "a")
        assert min(swarm.nodes["a"].rounds) > stood
        for name in ("b", "d", "e", "f"):
            await swarm.start(name, join="a")
        del swarm.nodes["c"]
        await swarm.until(swarm.all_stand_together, within=300)
        assert swarm.nodes["d"].rounds[max(swarm.nodes["d"].rounds)]["members"] == 5

    simulate(body)


def test_who_resumes_a_run_waits_for_as_many_others_as_who_begins_one(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.start("a", wait_peers=1)
        await swarm.start("b", join="a")
        await swarm.round_done(3, "a", "b")
        for name in ("a", "b"):
            await swarm.leave(name)
        stood = max(swarm.nodes["a"].rounds)
        await swarm.start("a", wait_peers=1)
        await trio.sleep(20)
        assert not swarm.nodes["a"].rounds
        await swarm.start("b", join="a")
        await swarm.round_done(stood + 3, "a", "b")
        rounds = swarm.nodes["a"].rounds
        assert min(rounds) == stood + 1 and {told["members"] for told in rounds.values()} == {2}

    simulate(body)


def test_of_nodes_that_resume_a_run_at_the_same_time_one_begins_and_the_others_join_it(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        await swarm.begin("abc")
        await swarm.round_done(3, "a", "b", "c")
        for name in ("a", "b", "c"):
            await swarm.leave(name)
        stood = max(swarm.nodes["a"].rounds)
        again = [await swarm.start(name, wait_peers=2) for name in ("a", "b", "c")]
        for one, other in combinations(again, 2):
            await one.network.connect(other.network.me)
        await swarm.round_done(stood + 3, "a", "b", "c")
        for name in ("a", "b", "c"):
            rounds = swarm.nodes[name].rounds
            assert min(rounds) == stood + 1 and {told["members"] for told in rounds.values()} == {3}

    simulate(body)


def test_what_another_method_wrote_is_gone_on_from_with_its_momentum_and_residual(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        first = await swarm.start("probe")
        layout: Layout = first.trainer.layout
        swarm.kill("probe")
        size = layout.parameters
        state = OuterState(np.full(size, 0.5, np.float32), np.full(size, 0.25, np.float32))
        saved = Saved(40, state, np.full(size, 0.125, np.float32), ("x", "y"), "open", b"what only open understands")
        Checkpoints(tmp_path / "a", run_id=RUN, layout=layout, keep=3).save(saved)
        swarm.checkpoints = tmp_path
        node = await swarm.start("a")
        with trio.fail_after(20):
            while node.session.place is None:  # noqa: ASYNC110 (nobody tells)
                await trio.sleep(0.1)
        begun = node.session.method.saved()
        assert begun.state.momentum.tobytes() == state.momentum.tobytes()
        assert begun.state.parameters.tobytes() == state.parameters.tobytes()
        assert begun.residual.tobytes() == saved.residual.tobytes()
        await swarm.round_done(42, "a")
        assert min(node.rounds) == 40

    simulate(body)


def test_moments_of_the_inner_optimizer_survive_a_restart(tmp_path: Path) -> None:
    async def body(swarm: SimSwarm) -> None:
        swarm.checkpoints = tmp_path
        node = await swarm.start("a")
        node.trainer.remembered = np.arange(7, dtype=np.float32), 12
        await swarm.round_done(3, "a")
        await swarm.leave("a")
        again = await swarm.start("a")
        await swarm.round_done(max(node.rounds) + 2, "a")
        moments, updates = again.trainer.moments()
        assert again.trainer is not node.trainer
        assert (moments.tolist(), updates) == (list(range(7)), 12)

    simulate(body)
