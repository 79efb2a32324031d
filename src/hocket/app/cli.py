"""The command `hocket`."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from hocket.version import __version__

if TYPE_CHECKING:
    pass

app = typer.Typer(
    name="hocket",
    help="Train PyTorch models with parallel SGD under many synchronisation schemes, and measure each one.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_OPTIONS = {"show_default": False}
# The base of all of Typer's complaints about a command line, wherever this version of Typer keeps it.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def main() -> NoReturn:
    status = run()
    sys.stdout.flush()
    sys.stderr.flush()
    if status:
        # Ranks that a failure left stuck, in the user's code or in MPI, must not keep the process alive.
        os._exit(status)
    sys.exit()


def run(args: list[str] | None = None) -> int:
    """Run the command: a user's mistake is one line and exit status 2, a failed run is 1, Ctrl-C is 130."""
    from hocket.core.errors import RankFailed, UserError

    try:
        status: int = app(args, standalone_mode=False) or 0
        if status == 130:  # Typer turns Ctrl-C into this
            _say("interrupted")
        return status
    except _USAGE_ERROR as error:
        _say(error.format_message().replace("\n", " "))
        return 2
    except UserError as error:
        _say(str(error))
        return 2
    except RankFailed as failure:
        if failure.reason.startswith("UserError: "):
            _say(failure.reason.removeprefix("UserError: "))
            return 2
        if failure.traceback:
            print(failure.traceback.rstrip(), file=sys.stderr)
        _say(str(failure))
        return 1
    except (KeyboardInterrupt, typer.Abort):  # other versions of Typer
        _say("interrupted")
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def _say(line: str) -> None:
    print(f"hocket: {line}", file=sys.stderr)


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
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TASK] [KEY=VALUE]...",
            help="A task (see 'hocket list') or path/to/file.py:task; then settings that override --spec.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", "-s", help="How workers agree, such as local-sgd:every=16. [allreduce]", **_OPTIONS),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Number of workers. [2]", **_OPTIONS)] = None,
    engine: Annotated[
        str | None, typer.Option(help="mpi, torch, threads or sim. [mpi where it can start]", **_OPTIONS)
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data. [the task's]", **_OPTIONS)] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each worker, in place of epochs.", **_OPTIONS)] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step of each worker. [the task's]", **_OPTIONS)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [the task's]", **_OPTIONS)] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum. [the task's]", **_OPTIONS)] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="sgd, adam, adamw:weight_decay=0.1 ... [the task's]", **_OPTIONS)
    ] = None,
    warmup: Annotated[
        float | None, typer.Option(help="Epochs over which the learning rate rises to its full height. [0]", **_OPTIONS)
    ] = None,
    scale_lr: Annotated[
        bool | None, typer.Option("--scale-lr", help="Multiply the learning rate by the number of workers.", **_OPTIONS)
    ] = None,
    lr_decay: Annotated[
        float | None, typer.Option(help="What the learning rate is multiplied by after every epoch.", **_OPTIONS)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order and initial weights. [0]", **_OPTIONS)] = None,
    target: Annotated[float | None, typer.Option(help="Stop when the test metric reaches this.", **_OPTIONS)] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Folder with data sets, or a file of samples (logistic, svm, factorization).", **_OPTIONS),
    ] = None,
    test_data: Annotated[
        str | None, typer.Option(help="File of test samples. [a fifth of the file --data]", **_OPTIONS)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [cpu]", **_OPTIONS)] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that a rank may wait for another. [60]", **_OPTIONS)
    ] = None,
    sim: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Simulator: compute=2ms, latency=50us, bandwidth=10Gbit, stragglers=1x3.",
            **_OPTIONS,
        ),
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="Machines for the engine mpi, such as a:4,b:4.", **_OPTIONS)] = None,
    mpiexec: Annotated[
        str | None, typer.Option(help="The MPI launcher. [the one installed with Hocket]", **_OPTIONS)
    ] = None,
    trace: Annotated[
        int | None, typer.Option(help="Events that each rank logs one by one. [10000]", **_OPTIONS)
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Settings from a file; a run's folder has one.", **_OPTIONS),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run's record. [runs/TASK-STRATEGY-TIME]", **_OPTIONS)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, and nothing else.")
    ] = False,
) -> None:
    """Train a task under a strategy."""
    flags = dict(
        strategy=strategy, workers=workers, engine=engine, epochs=epochs, steps=steps, batch=batch, lr=lr,
        momentum=momentum, optimizer=optimizer, warmup=warmup, scale_lr=scale_lr, lr_decay=lr_decay,
        seed=seed, target=target, data=data, test_data=test_data,
        device=device,        deadline=deadline, hosts=hosts, mpiexec=mpiexec, trace=trace,
    )  # fmt: skip
    from hocket.app.display import choose
    from hocket.core.environment import launched_rank, launched_size
    from hocket.run.spec import RunSpec, read_toml
    from hocket.run.train import train as run_training

    settings = read_toml(spec) if spec else {}
    _override(settings, {k: v for k, v in flags.items() if v is not None})
    if sim:
        settings["sim"] = {**settings.get("sim", {}), **_pairs(sim, "--sim")}
    for i, word in enumerate(words or []):
        if i == 0 and ("=" not in word or ".py:" in word or ":" in word.partition("=")[0]):
            settings["task"] = word
        else:
            _override(settings, _pairs([word], "an override"))
    run_spec = RunSpec.from_mapping(settings, str(spec) if spec else "")
    folder = out or _default_out(run_spec)
    result = run_training(run_spec, out=folder, force=force, display=choose(quiet=as_json))
    if launched_size() is not None and launched_rank() != 0:
        return  # rank 0 speaks for all
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        from hocket.app.summary import summary

        summary(result)


def _override(settings: dict[str, Any], new: dict[str, Any]) -> None:
    """Later settings win; steps and epochs stand for the same thing."""
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if new.get(key) not in (None, "none") and other not in new:
            settings.pop(other, None)
    settings |= new


def _pairs(words: list[str], what: str) -> dict[str, str]:
    """KEY=VALUE words as a mapping."""
    from hocket.core.errors import UserError

    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise UserError(f"{what} must be KEY=VALUE, got {word!r}")
        pairs[key.strip()] = value.strip()
    return pairs


def _default_out(spec: Any) -> Path:
    """A new folder under runs/, named after what it holds."""
    task = Path(spec.task.rpartition(":")[0]).stem if ".py:" in spec.task else spec.task.partition(":")[0]
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    base = Path("runs") / f"{task}-{spec.strategy.partition(':')[0]}-{now}"
    path, number = base, 2
    while path.exists():
        path, number = base.with_name(f"{base.name}-{number}"), number + 1
    return path


@app.command()
def compare(
    task: Annotated[str, typer.Argument(metavar="TASK", help="A task, or path/to/file.py:task.")],
    strategy: Annotated[list[str], typer.Option("--strategy", "-s", help="A strategy; give it several times.")],
    workers: Annotated[str, typer.Option("--workers", "-n", help="Numbers of workers, such as 1,2,4.")] = "2",
    seeds: Annotated[int, typer.Option(help="Runs of each, with seeds from 0 on.")] = 3,
    engine: Annotated[str | None, typer.Option(help="The engine. [mpi where it can start]", **_OPTIONS)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data. [the task's]", **_OPTIONS)] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step of each worker. [the task's]", **_OPTIONS)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [the task's]", **_OPTIONS)] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum. [the task's]", **_OPTIONS)] = None,
    target: Annotated[float | None, typer.Option(help="Stop when the test metric reaches this.", **_OPTIONS)] = None,
    data: Annotated[str | None, typer.Option(help="Folder with data sets, or a file of samples.", **_OPTIONS)] = None,
    test_data: Annotated[str | None, typer.Option(help="File of test samples.", **_OPTIONS)] = None,
    sim: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Options of the simulator.", **_OPTIONS)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs. [runs/compare-TASK-TIME]", **_OPTIONS)] = None,
) -> None:
    """Compare strategies on one task: interleaved runs, medians with spread, and which was fastest to the target."""
    from rich.console import Console

    from hocket.app.display import choose
    from hocket.core.errors import UserError
    from hocket.lab import compare as lab
    from hocket.run.spec import RunSpec

    try:
        counts = [int(word) for word in workers.split(",")]
    except ValueError:
        raise UserError(f"--workers must be numbers such as 1,2,4; got {workers!r}") from None
    if min(counts) < 1 or seeds < 1:
        raise UserError("--workers and --seeds must be 1 or more")
    values = dict(
        task=task, engine=engine, epochs=epochs, batch=batch, lr=lr, momentum=momentum, target=target, data=data,
        test_data=test_data,
        sim=_pairs(sim or [], "--sim"),
    )  # fmt: skip
    spec = RunSpec.from_mapping(values)
    folder = out or _default_out(RunSpec(f"compare-{Path(task.rpartition(':')[0] or task).stem}", strategy="runs"))
    rows = lab.compare(spec, strategy, counts, seeds, folder, choose(quiet=False))
    Console(highlight=False).print(lab.table(rows))
    print(lab.verdict(rows))
    print(f"record: {folder}")


@app.command()
def demo(
    engine: Annotated[
        str | None, typer.Option(help="mpi, torch or threads. [mpi where it can start]", **_OPTIONS)
    ] = None,
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Draw the table to a file too.", **_OPTIONS)] = None,
) -> None:
    """Train the handwritten digits under several strategies and compare them in a table."""
    from hocket.app.demo import show
    from hocket.app.display import choose

    show(choose(quiet=False), engine, svg)


@app.command(name="list")
def list_() -> None:
    """Show the tasks, strategies, engines, optimizers and compressors, with their options."""
    from rich.console import Console
    from rich.table import Table

    from hocket import optim
    from hocket.compress import compressor
    from hocket.engines.catalogue import engine
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


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def launch(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python script that calls hocket.join; its own arguments follow.")],
    workers: Annotated[int, typer.Option("--workers", "-n", help="Number of ranks.")] = 2,
    engine: Annotated[
        str | None, typer.Option(help="mpi, torch, threads or sim. [mpi where it can start]", **_OPTIONS)
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds that a rank may wait for another.")] = 60.0,
    sim: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Options of the simulator.", **_OPTIONS)
    ] = None,
    hosts: Annotated[str, typer.Option(help="Machines for the engine mpi, such as a:4,b:4.")] = "",
    mpiexec: Annotated[str, typer.Option(help="The MPI launcher.")] = "",
) -> None:
    """Run your own script on every rank: 'hocket launch -n 4 script.py'."""
    from hocket.engines import mpi
    from hocket.run.launch import launch as run_script
    from hocket.run.spec import RunSpec

    options = _pairs(sim or [], "--sim")
    if engine is None:
        engine = "sim" if options else "mpi" if mpi.available() is None else "threads"
    values = dict(task="", workers=workers, engine=engine, deadline=deadline, sim=options, hosts=hosts, mpiexec=mpiexec)
    run_script(script, context.args, RunSpec.from_mapping(values))


if __name__ == "__main__":
    main()
