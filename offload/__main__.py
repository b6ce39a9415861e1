"""The command ``python -m offload``: the same as ``offload``."""

from .cli import main

if __name__ == "__main__":
    main(prog_name="offload")
