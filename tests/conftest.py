"""How many examples property tests try: 100 by default, 2000 with `--hypothesis-profile thorough`.

Tests of promises therefore do not set `max_examples` themselves. Examples have no deadline, since runs share machines.
"""

import os

from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: with a pool of threads each, torch and numpy mostly wait for one another. Set before
    # either is imported; the nodes that tests start inherit it.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

settings.register_profile("quick", max_examples=100, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile("quick")
