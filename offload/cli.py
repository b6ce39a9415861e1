"""The command line ``offload``, with its subcommands.

The modules of a command are imported when it is used, so that ``offload --help`` is quick and does not import torch.
The table below names the module and the click command of each.
"""

from __future__ import annotations

import click

from maru.base.commands import Commands as Commands


@click.group(
    cls=Commands,
    places={
        "demo": (
            "offload._demo.command:command",
            "Offload a small model's KV cache, reload it, and verify every token.",
        ),
        "replay": ("offload.replay:command", "Replay a request trace and report hit rates, times and bytes."),
        "scenario": ("offload.scenario:command", "Run, fuzz, shrink and explore scenarios in virtual time."),
        "incident": ("offload._recorder.command:command", "Save and print the decisions of the last minutes."),
        "serve": (
            "offload.daemon._command:command",
            "Serve the tiers and pipelines of this host to its inference engines.",
        ),
        "ping": ("offload.daemon._operator_commands:ping", "Show whether a daemon answers, and how fast."),
        "describe": ("offload.daemon._operator_commands:describe", "Show the properties of a daemon."),
        "query": ("offload.daemon._operator_commands:query", "Show the tiers that have a block."),
        "explain": ("offload.daemon._operator_commands:explain", "Explain why a block is in a daemon, or is not."),
        "drain": ("offload.daemon._operator_commands:drain", "Drain and end a daemon, as SIGTERM does."),
        "quarantine": (
            "offload.daemon._operator_commands:quarantine",
            "List and release copies and keys in quarantine.",
        ),
        "reload": ("offload.daemon._operator_commands:reload", "Reload the settings of a daemon."),
        "log-level": ("offload.daemon._operator_commands:log_level", "Set the log level of a daemon."),
        "doctor": ("offload.daemon._doctor_command:command", "Check a daemon for present and coming problems."),
        "pinned-pool": (
            "backends.pinned_pool._command:command",
            "Serve pinned host memory to many processes.",
        ),
        "size": (
            "offload._size.command:command",
            "Compute the pool size for a number of tokens of a model.",
        ),
        "top": ("offload.status._top:command", "Watch an engine: hits, stages, tiers and waiting containers."),
        "bench": ("offload.bench:command", "Measure this package against the limits of the machine."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(None, "-V", "--version", package_name="trio-offload", message="%(package)s %(version)s")
def main() -> None:
    """Move KV-cache blocks of inference engines between memory tiers."""
