#!/usr/bin/python3
"""Millrace against Gloo, ring and ring-chunked, in one run: the same number of hosts in network namespaces, the same
MTU and the same shaping of both ends of every wire. Gloo's hosts meet at a kernel bridge, which forwards for
nothing; Millrace's at millrace-switch, which costs CPU on this machine. Exit status 0 when the ratio to Gloo's
better algorithm reaches --at-least."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "testbed"))
from lab import Lab, LabError, logs_directory, perf_rows  # noqa: E402
from network import Network  # noqa: E402

ALGORITHMS = ("ring", "ring-chunked")


def build_gloo_program(directory):
    program = os.path.join(directory, "gloo_allreduce")
    subprocess.run(["g++", "-std=c++17", "-O2", "-o", program, os.path.join(HERE, "gloo_allreduce.cpp"), "-lgloo",
                    "-lpthread"], check=True)
    return program


def gloo(program, options, algorithm):
    """Seconds of the median all-reduce."""
    with Network(hosts=options.hosts, mtu=options.mtu, rate=options.rate, bridge=True, name="gloo",
                 logs=logs_directory()) as network, tempfile.TemporaryDirectory(dir=network.directory) as store:
        ranks = [network.start(f"gloo-r{rank}", [program, rank, options.hosts, store, "eth0", options.bytes,
                                                 options.iterations, algorithm], host=rank + 1)
                 for rank in range(options.hosts)]
        for rank in ranks:
            if rank.wait(options.timeout) != 0:
                raise LabError(f"Gloo's {algorithm} ended with {rank.poll()}: {rank.stderr().strip()}")
        return json.loads(ranks[0].stdout())["seconds"]


def millrace(options):
    """Seconds of the mean all-reduce, the slower of in place and out of place."""
    with Lab(hosts=options.hosts, mtu=options.mtu, rate=options.rate, name="vs_gloo") as lab:
        outcomes = lab.perf("-b", options.bytes, "-e", options.bytes, "-d", "f32", "-o", "sum", "-n",
                            options.iterations, "-w", 1, "-c", 1, timeout=options.timeout)
        for outcome in outcomes:
            if outcome.code != 0:
                raise LabError(f"millrace-perf rank {outcome.rank} ended with {outcome.code}: "
                               f"{outcome.err.strip()}")
        row, = perf_rows(outcomes[0])
        return max(row.seconds, row.seconds_in_place)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit", help="of every wire, as tc writes it; none: unshaped (1gbit)")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--mtu", type=int, default=4200)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each of the three")
    parser.add_argument("--at-least", type=float, default=1.3, help="ratio for exit status 0 (1.3)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rate == "none":
        options.rate = None

    def say(text):
        if not options.json:
            print(text, flush=True)

    say(f"{options.hosts} hosts, f32 sum of {options.bytes} bytes, MTU {options.mtu}, "
        f"{'tbf ' + options.rate + ' on both ends of each wire' if options.rate else 'unshaped'}; "
        "Gloo over a kernel bridge, Millrace over millrace-switch")
    seconds = {}
    with tempfile.TemporaryDirectory() as directory:
        program = build_gloo_program(directory)
        for algorithm in ALGORITHMS:
            seconds["gloo " + algorithm] = gloo(program, options, algorithm)
    seconds["millrace"] = millrace(options)
    algbw = {name: options.bytes / value / 1e9 for name, value in seconds.items()}
    for name, value in algbw.items():
        say(f"{name:20s} {seconds[name] * 1e3:10.1f} ms   algbw {value:7.4f} GB/s ({value * 8e3:7.1f} Mb/s)")
    ratio = algbw["millrace"] / max(algbw["gloo " + algorithm] for algorithm in ALGORITHMS)
    say(f"ratio to the better of Gloo's: {ratio:.2f} (wanted: at least {options.at_least})")
    if options.json:
        print(json.dumps({"algbw_GBps": algbw, "seconds": seconds, "ratio": ratio}))
    return 0 if ratio >= options.at_least else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        print(f"vs_gloo: {error}", file=sys.stderr)
        sys.exit(1)
