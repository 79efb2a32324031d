"""The command `hocket`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hocket.app import pictures, splitting, studying, vectors
from hocket.app.options import collected, pairs, takes_settings
from hocket.core.environment import launched_rank
from hocket.core.errors import RankFailed, UserError
from hocket.core.speaking import await_turn
from hocket.run.signals import Interrupts
from hocket.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

    from hocket.run.progress import Display

app = typer.Typer(
    name="hocket",
    help="Train PyTorch models with parallel SGD under many synchronisation schemes, and measure each one.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_ASKED_S = time.monotonic()  # when a command was given, but for Python's own start
_OPTIONS: dict[str, Any] = {"show_default": False}
# The base of all of Typer's complaints about a command line, wherever this version of Typer keeps it.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object, and nothing else.")]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        "--tune",
        metavar="NAME[=VALUES]",
        help="Tune lr, batch, momentum or an option of the strategy: lr, lr=0.01..1, every=4,8; give it several times.",
        **_OPTIONS,
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(help="What tuning may cost a strategy, in trainings of full length. [8]", **_OPTIONS),
]
SpecFile = Annotated[
    Path | None, typer.Option(metavar="FILE.toml", help="Settings from a file; a run's folder has one.", **_OPTIONS)
]


def main() -> NoReturn:
    status = run()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        from hocket.engines.pmi import end_all

        end_all(status)
        # Ranks that a failure left stuck, in the user's code or in MPI, must not keep the process alive.
        os._exit(status)
    sys.exit()


def run(args: list[str] | None = None) -> int:
    """Run the command. A user's mistake is one line and exit status 2, a failed run is 1, one that a signal ended
    128 and the signal's number."""
    interrupts = Interrupts(pass_on=False)
    try:
        with interrupts:
            status: int = app(args, standalone_mode=False) or 0
            if not interrupts.number:
                return status
    except (_USAGE_ERROR, UserError, RankFailed) as error:
        await_turn(launched_rank(), error)
        return _tell(error)
    except (KeyboardInterrupt, typer.Abort):
        pass
    except Exception:
        traceback.print_exc()
        return 1
    _say("interrupted")
    return 128 + (interrupts.number or 2)


def _tell(failure: Any) -> int:
    """The user's lines that led to a failure if there are any, else all; then ours."""
    from hocket.core.frames import users_frames
    from hocket.run.blame import NothingTrained

    if not isinstance(failure, RankFailed):
        if frames := getattr(failure, "frames", ""):
            print(frames, file=sys.stderr)
        _say(str(failure) if isinstance(failure, UserError) else failure.format_message().replace("\n", " "))
        return 2
    if failure.reason.startswith("UserError: "):
        _say(failure.reason.removeprefix("UserError: "))
        return 2
    frames = users_frames(failure.traceback)
    if frames or failure.traceback:
        print(frames or failure.traceback.rstrip(), file=sys.stderr)
    _say(" ".join(str(failure).split()))
    return 2 if frames and isinstance(failure, NothingTrained) else 1


def _say(line: str) -> None:
    printable = line.encode(errors="backslashreplace").decode()  # a path may hold any bytes
    print(f"hocket: {printable}", file=sys.stderr)


@contextmanager
def _display(as_json: bool) -> Iterator[Display]:
    """Where progress is shown. For JSON, what the user's code prints goes to standard error."""
    from hocket.app.display import AsJson, choose

    if as_json:
        out = sys.stdout
        with redirect_stdout(sys.stderr):
            yield AsJson(out)
    else:
        yield choose(quiet=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hocket {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def hocket(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train PyTorch models with parallel SGD under many synchronisation schemes, and measure each one."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@takes_settings("train")
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK] [KEY=VALUE]...",
            help="A task (see 'hocket list') or path/to/file.py:task; then settings that override --spec.",
        ),
    ] = None,
    *,
    spec: SpecFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run's record. [runs/TASK-STRATEGY-TIME]", **_OPTIONS)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Train a task under a strategy."""
    from hocket.run.place import new_folder
    from hocket.run.train import prepare

    with _display(as_json) as display:
        training = prepare(collected(words or [], settings, spec))
        if out is None and training.is_root:
            out, force = new_folder(f"{_short(training.plan.task)}-{training.plan.made_strategy.name}"), True
        result = training.run(out, force=force, display=display, asked_s=_ASKED_S)
    if training.is_root and not as_json:
        from hocket.app.summary import summary

        summary(result)
    _mind(result.error)


def _mind(error: str | None) -> None:
    """Training went well, but its record did not."""
    if error:
        _say(error)
        raise typer.Exit(1)


def _short(task: str) -> str:
    """A task's name, fit for a file's."""
    return (Path(task.partition(".py:")[0]).name if ".py:" in task else task.partition(":")[0])[:80]


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that wrote checkpoints.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as epochs=40.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Go on with a run from its newest checkpoint, in the same folder."""
    from hocket.app.summary import summary
    from hocket.run.resume import resume as resume_run

    with _display(as_json) as display:
        result = resume_run(run, pairs(words or [], "a change"), display)
    if not as_json and launched_rank() == 0:
        summary(result)
    _mind(result.error)


@app.command()
@takes_settings("compare")
def compare(
    strategy: Annotated[list[str], typer.Option("--strategy", "-s", help="A strategy; give it several times.")],
    workers: Annotated[str, typer.Option("--workers", "-n", help="Numbers of workers, such as 1,2,4.")] = "2",
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds from --seed on.")] = 3,
    tune: Tune = None,
    budget: Budget = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK] [KEY=VALUE]...", help="A task, or path/to/file.py:task; then settings."),
    ] = None,
    *,
    spec: SpecFile = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs. [runs/compare-TASK-TIME]", **_OPTIONS)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the runs in --out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON object, no table.")] = False,
    **settings: Any,
) -> None:
    """Compare strategies on one task: interleaved runs, medians with spread, and which was fastest to the target."""
    from hocket.app.display import choose
    from hocket.lab import tables
    from hocket.lab.compare import plan
    from hocket.lab.tune import BUDGET
    from hocket.run.place import new_folder

    if budget is not None and not tune:
        raise UserError("--budget is what tuning may cost; say with --tune what is tuned, or leave it out")
    try:
        counts = [int(word) for word in workers.split(",")]
    except ValueError:
        raise UserError(f"--workers must be numbers such as 1,2,4; got {workers!r}") from None
    real = sys.stdout
    with redirect_stdout(sys.stderr if as_json else real):
        asked = collected(words or [], settings, spec, without=("strategy", "workers"))
        comparison = plan(asked, strategy, counts, seeds, tune or [], BUDGET if budget is None else budget)
        display = choose(quiet=as_json)
        for warning in comparison.warnings():
            _say(warning)
        if out is None:
            out, force = new_folder(f"compare-{_short(asked.task)}"), True
        record = comparison.run(out, force, display)
    if as_json:
        print(json.dumps(record))
        return
    _show(tables.compared(comparison))
    print(tables.rule(comparison), tables.verdict(comparison), f"record: {out}", sep="\n")
    print(f"see it: hocket report {shlex.quote(str(out))}")


@app.command()
@takes_settings("tune")
def tune(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASK] [KEY=VALUE]...", help="A task, or path/to/file.py:task; then settings."),
    ] = None,
    tune: Tune = None,
    budget: Budget = None,
    *,
    spec: SpecFile = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tune.json. [runs/tune-TASK-TIME]", **_OPTIONS)] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the record in --out.")] = False,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Find the learning rate, or other settings, that suit a strategy best, by successive halving."""
    from hocket.app.display import choose
    from hocket.app.options import as_command
    from hocket.lab import tables
    from hocket.lab.axes import applied, described
    from hocket.lab.tune import BUDGET, DIVERGED, plan
    from hocket.run.place import new_folder

    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        asked = collected(words or [], settings, spec)
        tuning = plan(asked, tune or ["lr"], BUDGET if budget is None else budget)
        if out is None:
            out, force = new_folder(f"tune-{_short(asked.task)}"), True
        record = tuning.run(out, force, choose(quiet=as_json))
    if as_json:
        print(json.dumps(record))
        return
    _show(tables.tuned(tuning))
    if not tuning.best:
        _say(DIVERGED)
        raise typer.Exit(1)
    print(f"Best: {described(tuning.best)}{tuning.doubts()}, after {tables.cost(tuning)} of tuning. Train with it:")
    print(as_command(applied(asked, tuning.best)), f"record: {out}", sep="\n")


def _show(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False, width=250).print(table)  # a line that wraps is better than a number that is cut off


@app.command()
def demo(
    engine: Annotated[
        str | None, typer.Option(help="mpi, torch or threads. [mpi where it can start]", **_OPTIONS)
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the table to a file too.", **_OPTIONS)] = None,
) -> None:
    """Train the handwritten digits under several strategies and compare them in a table."""
    from hocket.app.demo import show
    from hocket.app.display import choose

    show(choose(quiet=False), engine, svg)


@app.command()
def clean() -> None:
    """Remove decoded data sets from the cache; they are decoded again when they are needed."""
    from hocket.tasks.decoded import place, remove

    _say(f"removed {remove() / 1e6:.0f} MB from {place()}")


@app.command(name="list")
def list_() -> None:
    """Show the tasks, strategies, engines, compressors, optimizers and schedules, with their options."""
    from rich.console import Console
    from rich.table import Table

    from hocket import optim
    from hocket.compress import compressor
    from hocket.engines.catalogue import engine
    from hocket.optim.schedules import SCHEDULES
    from hocket.strategies import strategy
    from hocket.tasks import task

    console = Console(highlight=False)
    for registry in (task, strategy, engine, compressor):
        table = Table(box=None, title=registry.plural, title_justify="left", title_style="bold", padding=(0, 2, 0, 0))
        for column in ("name", "options", "what it is"):
            table.add_column(column, no_wrap=column == "name")
        for row in registry.lines():
            table.add_row(*row)
        console.print(table)
        console.print()
    console.print("[bold]optimizers[/bold]")
    console.print(", ".join(sorted(optim.OPTIMIZERS)))
    console.print("\n[bold]schedules[/bold]")
    console.print(", ".join(sorted(SCHEDULES)))


app.command()(pictures.report)
app.command()(pictures.watch)
app.command()(splitting.layout)
app.command()(studying.study)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
@takes_settings("launch")
def launch(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="A Python script that calls hocket.join; its own arguments follow.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    *,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the record. [runs/launch-SCRIPT-TIME]", **_OPTIONS)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the record in --out.")] = False,
    **settings: Any,
) -> None:
    """Run your own script on every rank: 'hocket launch -n 4 script.py' or 'hocket launch -n 4 -m package.module'."""
    from hocket.run.launch import launch as run_script

    run_script(script, context.args, collected([""], settings, None), module=module, out=out, force=force)


vectors.add_to(app)

if __name__ == "__main__":
    main()
