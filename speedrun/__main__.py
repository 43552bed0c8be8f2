"""`python -m speedrun` is the `speedrun` command."""

from speedrun.cli import main

if __name__ == "__main__":
    main()
