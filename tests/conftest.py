"""How many examples property tests try: 100 by default, 2000 with `--hypothesis-profile thorough`.

Tests of promises therefore do not set `max_examples` themselves. Examples have no deadline, since runs share machines.
"""

from hypothesis import settings

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")
