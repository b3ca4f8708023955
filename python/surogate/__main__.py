"""`python -m surogate` is `surogate`."""

import sys

from .import_path import trusted

if __name__ == "__main__":
    # `-m` puts the working directory first: a `json.py` that lies there is not ours.
    sys.path[:] = trusted()

    from .cli import main

    raise SystemExit(main())
