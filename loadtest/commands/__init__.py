"""`outrider bench`: the command line of the load tests.

Nothing heavy is imported before a command runs, so that `outrider --help` stays quick, and works where the extra
`loadtest` is not installed.
"""

from __future__ import annotations

import typer

from loadtest.commands.compare import bench_compare
from loadtest.commands.page import bench_page
from loadtest.commands.serve import bench_serve
from loadtest.commands.sweep import bench_sweep

bench_app = typer.Typer(no_args_is_help=True, help="Load tests: one server, several side by side, or a whole sweep.")
bench_app.command("serve", context_settings={"allow_extra_args": True})(bench_serve)
bench_app.command("compare")(bench_compare)
bench_app.command("sweep")(bench_sweep)
bench_app.command("page")(bench_page)
