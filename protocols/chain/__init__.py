"""The open round's chain of rosters: who may judge, which roster is valid, which one wins, and what follows from it.

Everything here is a pure function over signed records; nothing knows a network, a clock or a tensor. Two nodes that
hold the same roster derive the same `ChainState`, and the same bits by folding contributions (`training.open_step`).

    statements.py   what is said in a round: commit, cut, reveal, seal, scores, roster, head
    state.py        what follows from a chain, as far as later rounds need it; who judges, leads and takes part
    rules.py        what the quoted records make of a round; whether a roster is valid, and the chain after it
    forks.py        the tree of valid rosters, which of them to follow, and whether it goes back to a trusted one
    duty.py         what an honest node does next in a round, given what it holds
"""
