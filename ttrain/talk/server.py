"""transformers' own commands, in a process that ends with the one that started it. Run as a module."""

from __future__ import annotations

import os

from ttrain.parent import PARENT, end_with_parent


def main() -> None:
    """What `transformers` does with the arguments, but for asking the network for a newer version."""
    end_with_parent(int(os.environ[PARENT]))
    from transformers.cli.transformers import app

    app()


if __name__ == "__main__":
    main()
