"""SAPO's learning half (2509.08721): policies learn from their own rollouts and from one another's.

    learner = Learner("me", build(PolicySpec(), seed=1), Settings(split=AdaptiveSplit(), gate=TokenGate()), seed=1)
    learner.warm_up(well_formed)                          # tiny policies only: teach the form of an answer
    while training:
        own = learner.sample()                            # [Scored]: questions, answers and rewards of this round
        for scored in own:
            publish(scored.group.to_map())                # msgpack-able; the signature around it says whose it is
        pool = [(author, RolloutGroup.from_map(sent)) for author, sent in received()]       # GroupError: no group
        report = learner.learn(own, pool)                 # what was taken, and what was refused for which reason

The daemon has no torch. It may import `tasks`, `vocabulary`, `groups` and `hub`, with which it checks and scores what
peers send, and has a model fetched; all else belongs to the trainer process.
"""
