"""Trust without authority: what a node has seen of its peers, and what others say of them, as a score with its reasons.

Everything but `ledger.py`, `watching.py` and `favours.py` is a pure function, and knows no network and no clock. No two
nodes need the same view, and nothing that all nodes must compute alike rests on one: weights in rosters follow from
quoted scores (`chain/derive.py`), in which a judge's view is one vote.

    rating.py       how surely a peer's work is better than none: OpenSkill against the player that does nothing
    account.py      what one node has seen of one peer, and the score, work and weight that follow
    chainwork.py    what the records of the open round prove about everybody's work; anybody can recompute it
    attestation.py  what a node says of another in the replicated state, with its evidence
    checking.py     whether an attestation agrees with the records that it names
    opinions.py     others' attestations, weighed by their authors' own verified work
    shares.py       weights: probation for who was not verified, and caps
    view.py         all of it together: a peer's standing, with the reasons
    unique.py       what tests of whether a peer works on its own data come to
    favours.py      what peers served and relayed, and whether what they promised to have could be had
    ledger.py       the one object with a life: takes in what a node sees, attests, and answers who may have how much
"""
