#!/usr/bin/python3
"""The two-datacenter lab behind testbed/two-dc, once everything is installed and built."""

import argparse
import json
import os
import re
import sys

from lab import LabError, build_directory, logs_directory
from two_dc_lab import MODES, QUEUE_BYTES, Plan
from two_dc_run import run_mode
from two_dc_svg import draw

DEFAULT_MODES = ("off", "local")
COLUMNS = (("spill", 7), ("transfer", 10), ("burst", 8), ("all-reduce", 12), ("dropped", 11), ("eligible", 10),
           ("NAKs", 6), ("sent again", 18), ("peak queue", 12), ("peak spilled", 14), ("wrong", 7))
UNITS = ("", "(s)", "(s)", "(ms)", "(packets)", "of these", "", "transfer + burst", "(kB)", "(kB)", "")


def modes(text):
    chosen = text.split(",")
    if unknown := [mode for mode in chosen if mode not in MODES]:
        raise argparse.ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(MODES)}")
    return tuple(dict.fromkeys(chosen))


def size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    value = int(match.group(1)) << {"": 0, "K": 10, "M": 20, "G": 30}[match.group(2)] if match else 0
    if not match or value % 8 or not 1 << 16 <= value <= 1 << 30:
        raise argparse.ArgumentTypeError(f"'{text}': write 64K … 1G, as 8M")
    return value


def between(least, most):
    def number(text):
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"'{text}' is not in {least} … {most}")
        return value
    return number


def parse_options():
    parser = argparse.ArgumentParser(prog="two-dc", usage="two-dc [options] (--help lists them)", add_help=False)
    parser.add_argument("--spill", type=modes, default=DEFAULT_MODES)
    parser.add_argument("--eligible", choices=("all", "remote"))
    parser.add_argument("--port-mbps", type=between(5, 1000), default=100)
    parser.add_argument("--link-mbps", type=between(5, 2000))
    parser.add_argument("--delay-ms", type=between(0, 100), default=5)
    parser.add_argument("--transfer", type=size, default=8 << 20)
    parser.add_argument("--burst", type=size, default=1 << 20)
    parser.add_argument("--svg")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = os.path.dirname(os.path.abspath(options.svg)) if options.svg else None
    if folder and not os.path.isdir(folder):
        parser.error(f"argument --svg: there is no folder {folder}")
    return options


def plan_of(options):
    return Plan(port_mbps=options.port_mbps, link_mbps=options.link_mbps or 2 * options.port_mbps,
                delay_us=1000 * options.delay_ms, cross_bytes=options.transfer, burst_bytes=options.burst,
                eligible=options.eligible or "all")


def complaints(run, plan):
    """What must hold of a run, whatever time it took."""
    mode, cross, burst = run["mode"], run["cross"], run["burst"]
    eligible = [cross, burst] if plan.eligible == "all" else [cross]
    wrong = []
    if bad := cross["wrong"] + burst["wrong"]:
        wrong.append(f"{bad} packets with wrong bytes")
    if run["all_reduce"]["wrong"]:
        wrong.append(f"{run['all_reduce']['wrong']} wrong sums")
    naks = sum(flows["naks"] for flows in eligible)
    if mode == "off":
        if not run["drops"] or not naks:
            wrong.append("nothing collided: without spilling, nothing was dropped")
    else:
        if run["eligible_drops"]:
            wrong.append(f"{run['eligible_drops']} eligible packets were dropped")
        if naks:
            wrong.append(f"{naks} sequence NAKs for eligible flows")
        if not run["spilled"]["packets"]:
            wrong.append("nothing was spilled")
        if run["spilled"] != run["drained"]:
            wrong.append(f"{run['spilled']} were spilled and {run['drained']} drained")
    # The switch's word against the ends': whatever was sent and did not come, it says to have dropped.
    if (lost := cross["lost"] + burst["lost"]) != run["drops"]:
        wrong.append(f"{lost} packets were lost, of which leaf2 knows {run['drops']}")
    return [f"spill {mode}: {text}" for text in wrong]


def table_line(run):
    cross, burst = run["cross"], run["burst"]
    return (run["mode"], f"{cross['seconds']:.2f}", f"{burst['seconds']:.2f}",
            f"{1000 * run['all_reduce']['seconds']:.1f}", run["drops"], run["eligible_drops"],
            cross["naks"] + burst["naks"], f"{cross['retransmitted']} + {burst['retransmitted']}",
            f"{run['queue_bytes_max'] / 1000:.0f}", f"{run['resident_bytes_max'] / 1000:.0f}",
            cross["wrong"] + burst["wrong"] + run["all_reduce"]["wrong"])


def row(cells):
    return "".join(f"{str(cell):>{width}}" for cell, (_, width) in zip(cells, COLUMNS))


class TwoDcTable:
    def __init__(self, options):
        self.options, self.plan = options, plan_of(options)
        self.say_to = sys.stderr if options.json else sys.stdout

    def say(self, text=""):
        print(text, file=self.say_to, flush=True)

    def run(self):
        plan, runs, wrong = self.plan, [], []
        self.say(f"# host 1 sends {plan.cross_bytes} B to host 4 in the other datacenter, {plan.delay_us / 1000:g} ms away by "
                 f"a link of {plan.link_mbps} Mb/s; ports of {plan.port_mbps} Mb/s there")
        self.say(f"# the burst: hosts 4, 5 and 6 send {plan.burst_bytes} B to each other; meanwhile all six hosts sum "
                 f"{plan.all_reduce_bytes} B in the network")
        self.say("# hosts, switches and kernel share this machine's cores: drops, NAKs and order are results, times hardly")
        self.say(row(name for name, _ in COLUMNS))
        self.say(row(UNITS))
        for mode in self.options.spill:
            result = run_mode(mode, plan, f"two-dc-{mode}", logs_directory())
            runs.append(result)
            self.say(row(table_line(result)))
            wrong += complaints(result, plan)
        svg = self.draw(runs)
        verdict = "FAILED: " + "; ".join(wrong) if wrong else "OK: " + self.summary(runs)
        self.say(f"# occupancy over time: {svg}")
        self.say(verdict)
        if self.options.json:
            print(json.dumps({"ok": not wrong, "verdict": verdict, "plan": vars(plan), "svg": svg, "runs": runs}))
        return 1 if wrong else 0

    @staticmethod
    def summary(runs):
        spilling = [run["mode"] for run in runs if run["mode"] != "off"]
        said = [f"{run['drops']} packets dropped and {run['cross']['naks'] + run['burst']['naks']} NAKs without spilling"
                for run in runs if run["mode"] == "off"]
        if spilling:
            said.append(f"no eligible packet dropped, no sequence NAK ({', '.join(spilling)})")
        return "; ".join(said)

    def draw(self, runs):
        path = os.path.abspath(self.options.svg or os.path.join(build_directory(), "two-dc.svg"))
        panels = [{"title": f"spill {run['mode']}: transfer {run['cross']['seconds']:.2f} s, {run['drops']} dropped",
                   "samples": run["occupancy"]} for run in runs]
        with open(path, "w") as file:
            file.write(draw(f"Host 4's port at leaf2, {self.plan.port_mbps} Mb/s", panels, QUEUE_BYTES))
        return path


def main():
    options = parse_options()
    if options.only_check_options:
        return 0
    try:
        return TwoDcTable(options).run()
    except (LabError, RuntimeError, OSError) as error:
        text = f"FAILED: {error}"
        print(json.dumps({"ok": False, "verdict": text}) if options.json else text, flush=True)
        print(f"two-dc: what the switches and every program said is in {logs_directory()}/", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("two-dc: interrupted; everything is cleaned up", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
