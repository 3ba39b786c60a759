"""Options of other launchers, and what `tfdp run` has in their place."""

from __future__ import annotations

import re

import click

# Options of `mpirun`, `torchrun` and `horovodrun`, and what to give here.
_COUNT = "Give the number of workers with -n"
_ELSEWHERE = {
    r"-np\d*|--np|--num-proc|--nproc-per-node|-N|--gpus": _COUNT,
    r"-H.*|--host": "Give the machines with --hosts HOST:N,HOST:N",
    r"--nnodes": "Give the number of machines with --nodes",
    r"--master-.*|--rdzv-.*": "Give the machines' meeting point with --rendezvous",
    r"--standalone": "Leave it out: `tfdp run` needs no other service",
}


def _hint(option: str) -> str | None:
    """Return what to give instead of an option of another launcher."""
    name = option.replace("_", "-")
    found = [hint for names, hint in _ELSEWHERE.items() if re.fullmatch(names, name)]
    return found[0] if found else None


class HintingCommand(click.Command):
    """A command that knows the options of other launchers."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Say what to give instead of an option of another launcher."""
        options = [p for p in self.params if isinstance(p, click.Option)]
        with_value = {name for o in options if not o.is_flag for name in o.opts}
        before = ""
        for word in args:
            name = word.partition("=")[0]
            if (hint := _hint(name)) and not ctx.resilient_parsing:
                raise click.UsageError(f"{hint}. Received: {name}")
            if not word.startswith("-") and before not in with_value:
                break  # the script, and its own options
            before = word
        return super().parse_args(ctx, args)
