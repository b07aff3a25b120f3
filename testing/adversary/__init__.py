"""Nodes that lie, for whoever wants to watch an attack on a swarm of his own: `swarmnode local --attack NAME:COUNT`.

    lies.py           what is offered in place of what was trained, and shared in place of what was answered
    disguise.py       puts a lie into an otherwise honest exchange method
    tasks.py          tasks of trainers that learn otherwise than they say
    __main__.py       the process of such a node, and what it refuses

`swarmnode run` has no option for any of this and never imports it: no volunteer is one flag away from attacking
others. The process listens on loopback only, joins addresses on loopback only, and takes part only in a run whose name
says that it is thrown away (`THROWAWAY` in `disguise.py`) and which `swarmnode local` makes anew each time. That keeps
honest people from accidents. It is no lock: whoever wants to attack a swarm writes a program, as the tests in
`tests/attacks/` do.
"""
