"""`python -m ttrain`: the command line."""

from ttrain.cli.main import main

if __name__ == "__main__":
    main()
