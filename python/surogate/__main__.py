"""`python -m surogate` is `surogate`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
