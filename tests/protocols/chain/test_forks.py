"""Which roster is followed depends on the set of blocks and heads alone, and more heads for it never change it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from chains import RULES, STATE, block, fair, hashed, offer, start
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.protocols.chain.forks import DEPTH, Block, Tree, empty_block
from swarmnode.protocols.chain.state import PATIENCE, SUCCESSION, quorum
from swarmnode.protocols.chain.statements import ForkChoiceVote

VALIDATORS = "ABCDE"


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Block], dict[str, bytes]]:
    """Blocks, parents first, and what each validator follows: one of them, or what is not here."""
    root = start(VALIDATORS)
    blocks = [Block(root.tip, b"", root, None)]
    for number in range(draw(st.integers(0, 7))):
        chain = draw(st.sampled_from(blocks)).chain
        if draw(st.booleans()):
            made = empty_block(chain)
        else:
            made = block(chain, RULES, fair(chain, [offer(chain, f"X{number}")]))
        if made.id not in [one.id for one in blocks]:
            blocks.append(made)
    followed = st.sampled_from([*(one.id for one in blocks), hashed("not here")])
    return blocks, draw(st.dictionaries(st.sampled_from(VALIDATORS + "Z"), followed))


def tree_of(blocks: list[Block]) -> Tree:
    tree = Tree(blocks[0].chain)
    for one in blocks[1:]:
        tree.add(one)
    return tree


def shuffled(blocks: list[Block], rng: random.Random) -> list[Block]:
    """The blocks in another order, each behind its parent."""
    here, left, order = {blocks[0].id}, blocks[1:], [blocks[0]]
    while left:
        one = rng.choice([one for one in left if one.parent in here])
        left.remove(one)
        order.append(one)
        here.add(one.id)
    return order


@given(forests(), st.randoms(use_true_random=False))
def test_the_choice_is_a_function_of_the_set_of_blocks_and_heads(
    forest: tuple[list[Block], dict[str, bytes]], rng: random.Random
) -> None:
    blocks, heads = forest
    tree, other = tree_of(blocks), tree_of(shuffled(blocks, rng))
    for one in rng.sample(blocks[1:], len(blocks) // 2):
        other.add(one)  # again
    mixed = list(heads.items())
    rng.shuffle(mixed)
    best = tree.best(heads)
    assert other.best(dict(mixed)) == best
    assert len(other) == len(tree) == len(blocks)
    assert [tree.support(one.id, heads) for one in blocks] == [other.support(one.id, heads) for one in blocks]
    assert tree.path(best) == other.path(best)


@given(forests())
def test_at_every_fork_the_middle_head_of_its_validator_set_lies_where_it_goes(
    forest: tuple[list[Block], dict[str, bytes]],
) -> None:
    blocks, heads = forest
    tree = tree_of(blocks)
    best = tree.best(heads)

    def votes(id: bytes) -> int:
        return sum(id in tree.ancestry(heads[peer]) for peer in VALIDATORS if peer in heads)

    for one in tree.path(best):
        assert votes(one.id) == tree.support(one.id, heads) > 0
        rivals = [votes(rival) for rival in tree.children(one.parent)]
        at = tree.children(one.parent).index(one.id)
        assert 2 * sum(rivals[:at]) < sum(rivals) and 2 * sum(rivals[at + 1 :]) <= sum(rivals)
    assert all(votes(child) == 0 for child in tree.children(best))


@given(forests(), st.sampled_from(VALIDATORS))
def test_one_more_head_for_the_best_keeps_it_the_best(
    forest: tuple[list[Block], dict[str, bytes]], validator: str
) -> None:
    blocks, heads = forest
    tree = tree_of(blocks)
    best = tree.best(heads)
    assert tree.best({**heads, validator: best}) == best


@given(forests())
def test_heads_of_who_is_no_validator_and_of_what_is_not_here_do_not_count(
    forest: tuple[list[Block], dict[str, bytes]],
) -> None:
    blocks, heads = forest
    tree = tree_of(blocks)
    counted = {peer: id for peer, id in heads.items() if peer in VALIDATORS and id in tree}
    assert tree.best(heads) == tree.best(counted)
    assert tree.best({**counted, "Z": blocks[-1].id}) == tree.best(counted)


@given(forests(), st.data())
def test_a_fork_point_is_the_last_that_both_build_on(
    forest: tuple[list[Block], dict[str, bytes]], data: st.DataObject
) -> None:
    blocks, _ = forest
    tree = tree_of(blocks)
    one, other = (data.draw(st.sampled_from(blocks)).id for _ in range(2))
    point = tree.fork_point(one, other)
    assert point == tree.fork_point(other, one)
    shared = set(tree.ancestry(one)) & set(tree.ancestry(other))
    assert point in shared and len(tree.ancestry(point)) == len(shared)


def test_nobody_s_head_leads_nowhere() -> None:
    root = start(VALIDATORS)
    tree = tree_of([Block(root.tip, b"", root, None), empty_block(root)])
    assert tree.best({}) == root.tip


def test_a_head_after_many_empty_rounds_is_found_from_the_last_block_that_is_here() -> None:
    root = start(VALIDATORS)
    made = block(root, RULES, fair(root, [offer(root, "X")]))
    later = made
    for _ in range(5):
        later = empty_block(later.chain)
    tree = tree_of([Block(root.tip, b"", root, None), made])
    head = ForkChoiceVote(later.id, later.chain.round, STATE)
    assert tree.add_empties(head)
    assert tree[later.id] == later and len(tree) == 7
    assert not tree.add_empties(ForkChoiceVote(hashed("other"), 9, STATE))
    assert not tree.add_empties(ForkChoiceVote(empty_block(later.chain).id, later.chain.round, STATE))


def test_who_worked_takes_over_where_no_validator_is_left_and_their_heads_lead_there() -> None:
    root = start("A")
    last = block(root, RULES, fair(root, [offer(root, "X"), offer(root, "Y")]))
    path = [Block(root.tip, b"", root, None), last]
    for _ in range(SUCCESSION):
        assert path[-1].chain.validators == ("A",)
        path.append(empty_block(path[-1].chain))
    heirs = path[-1].chain
    assert heirs.validators == ("A", "X", "Y") and quorum(heirs) == 2
    after = block(heirs, RULES, fair(heirs, [offer(heirs, "X")], silent="A"))
    tree = tree_of([*path, after])
    left = last.id
    assert tree.best({"A": left, "X": after.id, "Y": after.id}) == after.id
    assert tree.best({"A": left, "Z": after.id}) == left, "who did no work takes over nothing"
    again = block(last.chain, RULES, fair(last.chain, [offer(last.chain, "Z")]))
    tree.add(again)
    assert tree.best({"A": again.id, "X": after.id, "Y": after.id}) == again.id, "a validator that was there decides"


def test_a_pruned_tree_still_decides_forks_of_the_last_rounds_and_no_older_ones() -> None:
    root = start(VALIDATORS)
    old, blocks = block(root, RULES, fair(root, [offer(root, "X")])), [Block(root.tip, b"", root, None)]
    for _ in range(DEPTH + 5):
        blocks.append(empty_block(blocks[-1].chain))
    tree = tree_of([*blocks, old])
    fork = block(blocks[-3].chain, RULES, fair(blocks[-3].chain, []))
    tree.add(fork)
    tree.prune(blocks[-1].id)
    assert old.id not in tree and fork.id in tree
    assert len(tree.path(blocks[-1].id)) == DEPTH
    heads = {"A": fork.id, "B": fork.id, "C": blocks[-1].id, "D": old.id, "E": old.id}
    assert tree.best(heads) == fork.id
    with pytest.raises(KeyError):
        tree.add(empty_block(old.chain))
    before = len(tree)
    tree.prune(blocks[-1].id)
    assert len(tree) == before


def test_most_is_more_than_half_of_all_validators_where_fewer_may_decide_a_round() -> None:
    """Two of five decide after some empty rounds, so two rosters may have two heads each."""
    chain = replace(start("ABCDE"), empties=PATIENCE)
    one, other = (block(chain, RULES, fair(chain, [offer(chain, name)], silent="CDE")) for name in "XY")
    tree = Tree(chain)
    tree.add(one)
    tree.add(other)
    heads = {"A": one.id, "B": one.id, "C": other.id, "D": other.id}
    assert quorum(chain) <= 2 and not tree.has_most(one.id, heads) and not tree.has_most(other.id, heads)
    assert tree.has_most(one.id, heads | {"E": one.id})
