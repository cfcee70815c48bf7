"""``python -m elastictrain`` is the command line."""

from __future__ import annotations

from elastictrain.cli.main import main

if __name__ == "__main__":
    main()
