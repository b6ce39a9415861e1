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
            "Offload the KV cache of a small model, find it again, and verify every token.",
        ),
        "replay": ("offload.replay:command", "Replay a request trace and report hit rates, times and bytes."),
        "scenario": ("offload.scenario:command", "Run, fuzz, shrink and explore scenarios in virtual time."),
        "incident": ("offload._recorder.command:command", "Save and print what was decided in the last minutes."),
        "serve": (
            "offload.daemon._command:command",
            "Serve the tiers and pipelines of this host to its inference engines.",
        ),
        "ping": ("offload.daemon._operator_commands:ping", "Say whether a daemon answers, and how long that takes."),
        "describe": ("offload.daemon._operator_commands:describe", "Say what daemon this is."),
        "query": ("offload.daemon._operator_commands:query", "Say which tiers of a daemon have a block."),
        "explain": ("offload.daemon._operator_commands:explain", "Explain why a block is, or is not, in a daemon."),
        "drain": ("offload.daemon._operator_commands:drain", "End a daemon, as SIGTERM does."),
        "quarantine": (
            "offload.daemon._operator_commands:quarantine",
            "List and release what a daemon has in quarantine.",
        ),
        "reload": ("offload.daemon._operator_commands:reload", "Have a daemon read its settings again."),
        "log-level": ("offload.daemon._operator_commands:log_level", "Set the log level of a daemon."),
        "doctor": ("offload.daemon._doctor_command:command", "Find what is wrong with a daemon, or will be."),
        "pinned-pool": (
            "backends.pinned_pool._command:command",
            "Keep pinned host memory for many processes, in chunks.",
        ),
        "size": (
            "offload._size.command:command",
            "Compute the pool for so many tokens of a model.",
        ),
        "top": ("offload.status._top:command", "Watch an engine: hits, stages, tiers, and what is stuck."),
        "bench": ("offload.bench:command", "Measure each figure beside its limit, in one run."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(None, "-V", "--version", package_name="trio-offload", message="%(package)s %(version)s")
def main() -> None:
    """Move KV-cache blocks of inference engines between memory tiers."""
