"""`python -m router` is the command `router`."""

from router.cli.main import main

if __name__ == "__main__":
    main()
