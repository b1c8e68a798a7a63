"""`python -m service` is the command `valence`."""

from service.start import main

if __name__ == "__main__":
    raise SystemExit(main())
