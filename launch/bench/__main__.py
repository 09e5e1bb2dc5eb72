"""The command `python -m launch.bench`."""

from __future__ import annotations

import json
from typing import Any

from absl import flags as absl_flags

from launch import ending
from launch.bench import measure, works
from launch.config import flags


@ending.command
def command(argv: list[str]) -> None:
    """Measures rounds."""

    def extra(values: absl_flags.FlagValues) -> None:
        absl_flags.DEFINE_string(
            "work", "w1", " or ".join(works.WORKS), flag_values=values
        )
        absl_flags.DEFINE_boolean(
            "json", False, "print the JSON object only", flag_values=values
        )

    if not any(a.partition("=")[0].lstrip("-") == "algo" for a in argv):
        argv.append(f"--algo={works.ALGORITHM}")
    with ending.refused():
        given = flags.parse(argv, extra)
        work, only_json = given.pop("work", "w1"), given.pop("json", False)
        if work not in works.WORKS:
            known = ", ".join(works.WORKS)
            raise ValueError(f"--work={work}: expected one of {known}")
        rounds = given.pop("rounds", 20)
        options = works.COMMON | works.WORKS[work] | given
        out = {"work": work} | measure.bench(options, rounds)
    _print(out, only_json)


def _print(out: dict[str, Any], only_json: bool) -> None:
    if not only_json:
        print(
            f"{out['work']} {out['algo']}: {out['seconds_per_round']:.3f} s a round, "
            f"{out['samples_per_second']:,.0f} samples/s, "
            f"{100 * out['step_efficiency']:.0f} % of the executed steps and "
            f"{100 * out['padding_efficiency']:.0f} % of the executed samples are real"
        )
        if "gflops" in out:
            share = 100 * out["share_of_matmul_peak"]
            print(
                f"{out['gflops']:.0f} GFLOP/s = {share:.0f} % of this machine's matmul "
                "peak"
            )
        if "mixing_seconds" in out:
            print(
                f"pulling and mixing alone: {out['mixing_seconds']:.3f} s, "
                f"{100 * out['mixing_over_round']:.0f} % of a round; at most "
                f"{out['peak_memory_bytes'] / 2**20:,.0f} MiB in use"
            )
        if "masked_over_bucketed" in out:
            print(
                f"with every client computing the whole model, masked: "
                f"{out['masked_seconds_per_round']:.3f} s a round, "
                f"{out['masked_over_bucketed']:.2f}x"
            )
        if "round_over_reference" in out:
            print(
                f"the optimizer steps alone, one client at a time: "
                f"{out['reference_seconds_per_round']:.3f} s; the round costs "
                f"{out['round_over_reference']:.2f}x that"
            )
    print(json.dumps(out))


if __name__ == "__main__":
    command()
