"""Audits that replay a random slice of a node's work: what is recorded, drawn, replayed and compared. No torch.

    trace.py      the record that a contribution is bound to: digests of the trainer's state between stretches of steps
    recorder.py   keeps those states while a trainer trains
    vectors.py    where they lie on the disk, within a bounded size
    replay.py     whom an auditor looks at, how far a replay may end from what was claimed, and whether a contribution
                  is what the record of its author's work leads to

The idea is proof of learning (Jia et al. 2103.05633): the states between steps are evidence of the steps, as who has
them can repeat any stretch. What makes it cheap here: data and step are known by (run, author, round, step), so only
states travel; what will be looked at is drawn after everything is committed, so one stretch tells of all; and encoding
and error feedback are elementwise, so they are computed again from the ends of stretches, exactly.

What it proves: that somebody did these steps on these data. What it does not: that nobody else did them (a copy of
states is found by its data, which belong to the author's identity), and anything about stretches shorter than one
that are false while all others are true: each audit finds one of n false stretches with chance 1 / n.
"""
