"""The open round's chain of rosters: who may judge, which roster is valid, which one wins, and what follows from it.

Everything here is a pure function over signed records; nothing knows a network, a clock or a tensor. Two nodes that
hold the same roster derive the same `ChainState`, and the same bits by folding contributions (`training.open_step`).

    statements.py   what is said in a round: commit, cut, reveal, seal, scores, roster, head
    chainstate.py   what follows from a chain, as far as later rounds need it: electors, seed, history
    electorate.py   who is an elector, a judge, a leader or a participant of a round
    seats.py        who leaves the electorate between its changes, as silent, and who takes the seat
    beacon.py       the hash chains from which seeds are drawn
    derive.py       what the quoted records make of a round: accepted, refused, weights
    validity.py     whether a roster is one that its leader may have made, and the chain after it
    forks.py        the tree of valid rosters, and which of them to follow
    duty.py         what an honest node does next in a round, given what it holds
"""
