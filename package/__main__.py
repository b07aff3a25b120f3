"""`python -m swarmnode` is the same as the `swarmnode` command."""

import sys

from swarmnode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
