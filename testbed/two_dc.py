#!/usr/bin/python3
"""The two-datacenter lab behind testbed/two-dc, once everything is installed and built."""

import argparse
import json
import os
import re
import sys

import two_dc_run
import two_dc_rxe
from lab import LabError, build_directory, logs_directory
from two_dc_lab import MODES, QUEUE_BYTES, Plan
from two_dc_svg import draw

DEFAULT_MODES = MODES
COLUMNS = (("spill", 7), ("transfer", 10), ("burst", 8), ("all-reduce", 12), ("dropped", 11), ("eligible", 10),
           ("NAKs", 6), ("sent again", 18), ("peak queue", 12), ("peak spilled", 14), ("meanwhile", 11),
           ("wrong", 7))
UNITS = ("", "(s)", "(s)", "(ms)", "(packets)", "of these", "", "transfer + burst", "(kB)", "(kB)", "(Mb/s)", "")


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
    parser.add_argument("--rxe", action="store_true")
    parser.add_argument("--ipv6", action="store_true")
    parser.add_argument("--traffic", choices=tuple(two_dc_rxe.TRAFFIC))
    parser.add_argument("--port-mbps", type=between(5, 1000))
    parser.add_argument("--link-mbps", type=between(5, 2000))
    parser.add_argument("--delay-ms", type=between(0, 100), default=5)
    parser.add_argument("--transfer", type=size, default=8 << 20)
    parser.add_argument("--burst", type=size, default=1 << 20)
    parser.add_argument("--svg")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only-check-options", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.traffic and not options.rxe:
        parser.error("argument --traffic: is perftest's, so write --rxe, too")
    if options.rxe and options.eligible:
        parser.error("argument --eligible: with --rxe, only the transfer is eligible")
    if options.rxe and options.ipv6:
        parser.error("argument --ipv6: is of millrace-flow's transfers, not of guests'")
    options.traffic = options.traffic or "write"
    options.port_mbps = options.port_mbps or (50 if options.rxe else 100)
    folder = os.path.dirname(os.path.abspath(options.svg)) if options.svg else None
    if folder and not os.path.isdir(folder):
        parser.error(f"argument --svg: there is no folder {folder}")
    return options


def plan_of(options):
    return Plan(port_mbps=options.port_mbps, link_mbps=options.link_mbps or 2 * options.port_mbps,
                delay_us=1000 * options.delay_ms, cross_bytes=options.transfer, burst_bytes=options.burst,
                eligible=options.eligible or "all", traffic=options.traffic, ipv6=options.ipv6,
                # With guests, what their kernels count shall be the transfer's alone.
                all_reduce_hosts=(2, 3, 6, 7) if options.rxe else (1, 2, 3, 5, 6, 7))


def row(cells):
    return "".join(f"{str(cell):>{width}}" for cell, (_, width) in zip(cells, COLUMNS))


class TwoDcTable:
    def __init__(self, options):
        self.options, self.plan = options, plan_of(options)
        self.kind = two_dc_rxe if options.rxe else two_dc_run
        self.say_to = sys.stderr if options.json else sys.stdout

    def say(self, text=""):
        print(text, file=self.say_to, flush=True)

    def run(self):
        plan, kind, runs, wrong = self.plan, self.kind, [], []
        for line in kind.introduction(plan):
            self.say("# " + line)
        self.say("# hosts, switches and kernel share this machine's cores: drops, NAKs and order are results, times "
                 "hardly")
        self.say("# meanwhile: what left by host 5's port, the all-reduce's results among it, while something was spilled")
        self.say(row(name for name, _ in COLUMNS))
        self.say(row(UNITS))
        for mode in self.options.spill:
            result = kind.run_mode(mode, plan, f"two-dc-{mode}", logs_directory())
            runs.append(result)
            self.say(row(kind.table_line(result)))
            wrong += [f"spill {mode}: {text}" for text in kind.complaints(result, plan)]
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
        said = [f"{run['drops']} packets dropped and {run['naks']} sequence NAKs without spilling"
                for run in runs if run["mode"] == "off"]
        if spilling:
            said.append(f"no eligible packet dropped, no sequence NAK ({', '.join(spilling)})")
        return "; ".join(said)

    def draw(self, runs):
        path = os.path.abspath(self.options.svg or os.path.join(build_directory(), "two-dc.svg"))
        panels = [{"title": f"spill {run['mode']}: transfer {run['seconds']:.2f} s, {run['drops']} dropped",
                   "samples": run["occupancy"]} for run in runs]
        with open(path, "w") as file:
            file.write(draw(f"Host 5's port at leaf2, {self.plan.port_mbps} Mb/s", panels, QUEUE_BYTES))
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
