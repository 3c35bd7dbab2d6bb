#!/usr/bin/python3
"""Plants known bugs one by one and says which program notices each, and how fast: that the tests, the simulator's swarm
above all, can see what they are there for.

    tests/planted.py [NAME...]

Works on a copy of the tree, as tests/mutate.py does."""

import argparse
import os
import subprocess
import sys
import time

from mutate import PROGRAMS, Tree

# name: (file, the right text, the wrong one)
BUGS = {
    "a duplicate is summed": ("roce/rc_responder.cc", "return Arrival::kDuplicate;", "return Arrival::kNew;"),
    "a slot is freed before its last ACK": ("aggregation/engine_segment.cc", "  return seen;", "  return true;"),
    "a segment may begin before its slot is free": (
        "aggregation/slots.h", "return segment < released_ + slots_.size();",
        "return segment <= released_ + slots_.size();"),
    "PSNs are compared unsigned": (
        "roce/types.h", "return static_cast<int32_t>((v_ - other.v_) << 8) >> 8;",
        "return static_cast<int32_t>(v_) - static_cast<int32_t>(other.v_);"),
    "a credit is not returned": ("roce/cm.cc", "half_open--;", ";"),
    "a result leaves before a member's header came": (
        "aggregation/engine_segment.cc", "if (++chunk.contributions == g.world)",
        "if (++chunk.contributions + 1 >= g.world)"),
    "a terminal SEND goes to one stripe only": (
        "aggregation/engine_end.cc", "counters.terminals_sent++;\n      queue(*l);",
        "counters.terminals_sent++;\n      queue(*l);\n      break;"),
    "a stale rkey is used": (
        "aggregation/engine_segment.cc", "  slot.header[link.member->rank] = h;",
        "  if (slot.header[link.member->rank].magic.value() == 0) slot.header[link.member->rank] = h;"),
    "a lost REJ is not issued again": (
        "roce/cm_receive.cc", "counters.rej_sent++;\n      counters.rej_repeated++;\n      return send(c.path, *c.answer, out);",
        "return;"),
    "a CE mark is cleared": ("aggregation/engine.cc", "if (packet.ecn_ce())", "if (false)"),
}


def first_line(program, build):
    """How a program that notices says it: its first failed assertion, or the seed."""
    done = subprocess.run([os.path.join(build, "tests", program), "--gtest_brief=1", "--gtest_break_on_failure=0"],
                          capture_output=True, text=True, errors="replace", timeout=600)
    lines = (done.stdout + done.stderr).splitlines()
    for wanted in ("seed", "Assertion", "Failure", "FAILED"):
        for line in lines:
            if wanted in line:
                return line.strip()[:160]
    return f"ended with {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--work", default="/tmp/millrace-mutate")
    parser.add_argument("--program", action="append", help="ask these only, e.g. sim_tests (default: all)")
    options = parser.parse_args()
    tree = Tree(options.work)
    unnoticed = 0
    for name, (file, right, wrong) in BUGS.items():
        if options.names and name not in options.names:
            continue
        path = os.path.join(tree.source, file)
        with open(path) as source:
            text = source.read()
        if right not in text:
            sys.exit(f"planted: {file} has no {right!r} any more: adapt the bug '{name}'")
        try:
            with open(path, "w") as source:
                source.write(text.replace(right, wrong, 1))
            if not tree.make():
                sys.exit(f"planted: '{name}' does not compile")
            said = []
            for program in options.program or PROGRAMS:
                started = time.monotonic()
                code = subprocess.run([os.path.join(tree.build, "tests", program), "--gtest_brief=1"],
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600).returncode
                if code != 0:
                    said.append(f"{program} after {time.monotonic() - started:.1f} s ({first_line(program, tree.build)})")
        finally:
            with open(path, "w") as source:
                source.write(text)
        print(f"{name}: " + ("; ".join(said) if said else "NOT NOTICED"), flush=True)
        unnoticed += not said
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
