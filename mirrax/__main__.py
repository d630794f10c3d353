"""`python -m mirrax`: the command `mirrax`."""

from mirrax._src.command_line.main import main

if __name__ == "__main__":
    main()
