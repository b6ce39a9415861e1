"""Entry point of ``python -m maru``, which is ``maru``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="maru")
