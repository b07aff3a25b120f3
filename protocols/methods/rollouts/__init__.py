"""Sharing rollouts: each node's groups of answers reach a bounded number of others, who keep some of them in a pool.

    rollouts = Rollouts(parts, rules, limits=limits) # `rules`: the method's, with whom groups are shared
    nursery.start_soon(rollouts.watch)
    await rollouts.publish(groups)                   # [RolloutGroup]: signed, kept, spread
    drawn = rollouts.pool.candidates(16, rng)        # SignedGroups: .author, .group; rewards are the learner's job
    rollouts.pool.note(author, "gated")              # what became of them, for statistics and for reputation

- `sapo`: the method, of nodes that train and of nodes that only sample;
- `sharing`: `Rollouts`, and how groups travel;
- `intake`: how much is taken of whom; what comes is checked before it is kept or passed on;
- `pool`: what is held, with quotas and ages;
- `messages`: a group on the wire, and the calls about groups;
- `samplers`: a trainer's side towards those who only sample for it, and weights on the wire.

There is no key or topic that everybody writes, and no round that anybody waits for. Who may fail when, and what is then
true:
- a node is alone: it keeps its own groups, learns from them, and says so (`alone`); when somebody connects it asks one
  neighbour what is recent and goes on spreading what it published meanwhile;
- a peer dies or is silent: the call to it ends, it is left alone for a while, and the copies that were meant for it go
  to others; those that it held are lost, of each group a part;
- an answer to `give` is lost: the copies of that hop may exist twice; they are bounded by each hop's own cap;
- a peer floods: its groups use up its author's and sender's allowance in each receiver, and its own quota in the pool;
  everybody else's groups go on as before. Forged groups end at the first honest node;
- a receiver has no room: it says for how long, and is left alone.
"""
