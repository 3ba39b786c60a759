"""`python -m tfdp` is the command `tfdp`."""

from __future__ import annotations

from tfdp.cli.main import main

if __name__ == "__main__":
    main()
