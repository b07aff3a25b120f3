"""Trust without authority: what a node has seen of its peers, and what others say of them, as a score with its reasons.

Everything but `ledger.py` and `observations.py` is a pure function, and knows no network and no clock. No two nodes
need the same view, and nothing that all nodes must compute alike rests on one: weights in rosters follow from quoted
scores (`chain/rules.py`), in which a judge's view is one vote.

    account.py      what one node has seen of one peer, and the score, work and weight that follow; what the records of
                    an open run prove about everybody's work
    attestation.py  what a node says of another in the replicated state, and whether the records that it names agree
    view.py         all of it together: own observation, others' words; a peer's score with the reasons
    ledger.py       the object with a life: takes in what a node sees and hears, and answers who may have how much;
                    node/reputation.py keeps it: ends epochs, attests, writes it to the disk
    observations.py what else the ledger learns of: promises kept and broken, rollouts that held up
"""
