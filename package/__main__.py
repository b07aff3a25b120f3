"""`python -m swarmnode` is the same as the `swarmnode` command."""

from swarmnode.cli.main import main

if __name__ == "__main__":
    main()
