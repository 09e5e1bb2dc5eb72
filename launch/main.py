"""Runs one algorithm: `python -m launch.main --algo=cdkt [--flagfile=...] [--...]`.

Results are written to --workdir, and `--algo=NAME --help` lists the options. Ctrl-C or
SIGTERM ends the run after the current call (about 10 seconds or one round), saves it,
and prints the command that continues it.
"""

import shlex
import sys
from typing import Any

from launch import ending
from launch import experiment as experiment_lib
from launch.config import algorithm_file, flags
from launch.folder import workdir
from launch.machine import devices, processes
from launch.run.stop import Stop
from launch.show import words

# Options that a folder does not record, and a run that goes on still needs
_OF_A_PROCESS = ("wandb", "emulate", "compile_cache")


def execute(given: dict[str, Any]) -> dict[str, Any]:
    """Builds, runs and reports one experiment; returns its summary.

    Raises SystemExit(2) after one line about bad input, SystemExit(130 or 143) after a
    signal, and OSError if results cannot be written.
    """
    with ending.refused():
        devices.begin(given.get("distributed") or "")
        experiment = experiment_lib.experiment(**workdir.with_stored_rounds(given))
    with experiment.folder as folder:
        return _execute(experiment, folder, given.get("algo"))


def _execute(
    experiment: experiment_lib.Experiment, folder: workdir.Workdir, algo: Any
) -> dict[str, Any]:
    """Runs the experiment of `--algo=algo` while this process holds its folder."""
    is_new, say = not (folder.path / workdir.RUN_FLAGS).exists(), processes.say
    with ending.refused():
        done = folder.open()
    if done is not None:
        folder.finish()
        _say_finished(experiment, folder, done)
        return done
    config = experiment.config
    say("\n".join(words.rules(experiment)))
    say(_headline(experiment, folder, algo), flush=True)
    if config.resume and is_new:
        say(f"--resume: {folder.path} holds no run yet, a new one starts")
    if experiment.round:
        say(f"resumed after round {experiment.round}", flush=True)
    stop = Stop()
    experiment.train(stop, folder)
    if not experiment.is_over:
        command = _continuation(experiment, folder, algo)
        line = f"stopped after round {experiment.round}; continue with: {command}"
        say(line, file=sys.stderr)
        raise SystemExit(128 + stop.signal)
    if experiment.stopped_early:
        say(words.early_stop(config, experiment.round))
    say(words.table(folder.summary))
    if note := devices.advice(experiment):
        say(note, file=sys.stderr)
    say(f"results in {folder.path}", flush=True)
    if stop.signal is not None:
        # The run is complete, but a loop over several runs must end.
        raise SystemExit(128 + stop.signal)
    return folder.summary


def _say_finished(
    experiment: experiment_lib.Experiment, folder: workdir.Workdir, done: dict[str, Any]
) -> None:
    """Shows a finished run, and the options that have no effect on it."""
    config, say = experiment.config, processes.say
    for name in ("tensorboard", "wandb"):
        if getattr(config, name):
            cure = f"build.load({str(folder.path)!r}, {name}=...).run() logs it"
            say(f"note: --{name} has no effect on a finished run; {cure}")
    best = processes.on_first(lambda: folder.best)
    if config.keep_best and not best:
        say(
            "note: --keep_best has no effect on a finished run; choose another "
            "--workdir"
        )
    if done.get("stopped_early"):
        say(words.early_stop(config, done["rounds"]))
    say(f"{folder.path} holds this finished run:\n{words.table(done)}")


def _headline(
    experiment: experiment_lib.Experiment, folder: workdir.Workdir, algo: Any
) -> str:
    """The first line of a run: method, data, clients, devices and folder."""
    config, num_devices = experiment.config, experiment.task.execution.num_devices
    is_file = algorithm_file.is_one(algo)
    return (
        f"{config.algo}{f' of {algo}' * is_file} on {config.dataset}: "
        f"{config.num_clients} clients, "
        f"{config.clients_per_round} a round, {config.rounds} rounds, "
        f"{config.num_seeds} seed(s), on "
        f"{words.devices(num_devices, devices.name())} -> {folder.path}"
    )


def _continuation(
    experiment: experiment_lib.Experiment, folder: workdir.Workdir, algo: Any
) -> str:
    """The command that continues a stopped run, quoted for a shell."""
    config, is_script = experiment.config, sys.argv[:1] == ["fedjax-pfl run"]
    same = [f"--flagfile={folder.path / 'run.flags'}"]
    same += [f"--algo={algo}"] * algorithm_file.is_one(algo)
    same += [f"--workdir={folder.path}"]
    here = {name: getattr(config, name) for name in _OF_A_PROCESS}
    same += [f"--{name}={value}" for name, value in here.items() if value]
    each = config.distributed not in ("", "auto")
    same += ["--distributed=auto"] * (config.distributed == "auto")
    return (
        f"{'fedjax-pfl run' if is_script else 'python -m launch.main'} "
        f"{shlex.join([*same, '--resume'])}"
        f"{', in each process with its own --distributed' * each}"
    )


@ending.command
def main(argv: list[str]) -> None:
    """Runs one algorithm."""
    execute(flags.parse(argv))


if __name__ == "__main__":
    main()
