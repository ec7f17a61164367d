"""`python -m outrider`: the command line, without its script."""

from outrider.cli import main

if __name__ == "__main__":
    main()
