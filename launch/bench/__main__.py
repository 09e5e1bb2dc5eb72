"""The command `python -m launch.bench`."""

import json

from absl import flags as absl_flags

from fedjax_pfl import options as options_lib
from launch import ending
from launch.bench import host, measure
from launch.config import flags
from launch.machine import target
from launch.run import cost

# A figure -> the line that is printed if it was measured
LINES = {
    "seconds_per_round": "{work} {algo}: {seconds_per_round:.3f} s a round, "
    "{samples_per_second:,.0f} samples/s, {step_efficiency:.0%} of the executed steps "
    "and {padding_efficiency:.0%} of the executed samples are real",
    "call_ms": "the host's milliseconds of {algo}, rounds nearly empty: a call "
    "{call_ms:.2f}; with an evaluation {advance_ms:.2f}, then {launch_ms:.2f} until "
    "the next rounds are dispatched, and {read_ms:.2f} to read it",
    "plan_ms": "milliseconds of planning a round, by its clients: {plan_ms}",
    "rows_ms": "processor milliseconds of a round by the home of "
    "what clients keep: {rows_ms}",
    "gflops": "{gflops:.0f} GFLOP/s = {share_of_matmul_peak:.0%} of this machine's "
    "matmul peak",
    "mixing_seconds": "pulling and mixing alone: {mixing_seconds:.3f} s, "
    "{mixing_over_round:.0%} of a round; at most {peak_mib:,.0f} MiB in use",
    "masked_over_bucketed": "with whole models and masks: "
    "{masked_seconds_per_round:.3f} s a round, {masked_over_bucketed:.2f}x",
}


@ending.command
def command(argv: list[str]) -> None:
    """Measures the rounds of one algorithm."""

    works = measure.WORKS["values"]

    def extra(values: absl_flags.FlagValues) -> None:
        about = "the clients, data and model to time: " + " or ".join(works)
        absl_flags.DEFINE_string("work", "w1", about, values)
        absl_flags.DEFINE_boolean("json", False, "print the JSON object only", values)
        about = "compile for this chip without having one: " + " or ".join(target.CHIPS)
        absl_flags.DEFINE_string("target", "", about, values)
        about = "measure the host's work for nearly empty rounds instead of a work"
        absl_flags.DEFINE_boolean("call", False, about, values)

    if not any(a.partition("=")[0].lstrip("-") == "algo" for a in argv):
        argv.append("--algo=fedavg")
    with ending.refused():
        given = flags.parse(argv, extra)
        is_of_host = given.pop("call", False)
        if is_of_host and "work" in given:
            raise ValueError(
                f"--work={given['work']}: --call times nearly empty rounds of its own "
                "instead of a work; omit one of them"
            )
        measure.check(given)
        work, only_json = given.pop("work", "w1"), given.pop("json", False)
        options_lib.check_one_of("work", work, works)
        is_compiled = bool(given.get("target"))
        bench = measure.compiled if is_compiled else measure.bench
        if is_of_host:
            out = host.measure(given)
        else:
            options = measure.options_of(work, given.pop("rounds", 20), given)
            out = {"work": work} | bench(options)
    if is_compiled and not is_of_host and not only_json:
        print(f"{work} {cost.in_words(out)}")
    for name, line in LINES.items():
        if name in out and not only_json:
            peak = out.get("peak_memory_bytes", 0)
            print(line.format(**out, peak_mib=peak / 2**20))
    print(json.dumps(out))


if __name__ == "__main__":
    command()
