"""`python -m service` is the command `valence`."""

from service.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
