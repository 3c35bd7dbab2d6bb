#!/usr/bin/python3
"""Runs Millrace's test suites one after the other, each within its time: what tests/run starts after it has seen to
the packages. Suites are gtest programs (plain and with sanitizers) and the end-to-end files test_*.py here."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BUILD = os.environ.get("MILLRACE_BUILD") or os.path.join(ROOT, "build")
BUILD_ASAN = BUILD + "-asan"
LOGS = os.path.join(BUILD, "logs", "tests")
# Over its budget, a suite is reported; at this many times the budget it hangs, and is killed as failed.
KILL_FACTOR = 4
SANITIZER_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
                     "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}


@dataclass
class Suite:
    name: str
    budget: int  # seconds
    program: str
    sanitized: bool = False

    @property
    def is_gtest(self):
        return not self.program.endswith(".py")

    @property
    def path(self):
        if self.is_gtest:
            return os.path.join(BUILD_ASAN if self.sanitized else BUILD, self.program)
        return os.path.join(HERE, self.program)


GTESTS = (("unit", 90, "tests/unit_tests"), ("vectors", 30, "tests/vector_tests"), ("sim", 180, "tests/sim_tests"),
          ("fuzz", 60, "tests/fuzz_smoke"))
SANITIZER_SLOWDOWN = 3


def all_suites():
    suites = [Suite(name, budget, program) for name, budget, program in GTESTS]
    suites += [Suite(name + "-asan", budget * SANITIZER_SLOWDOWN, program, sanitized=True)
               for name, budget, program in GTESTS]
    for file in sorted(os.listdir(HERE)):
        if re.fullmatch(r"test_\w+\.py", file):
            with open(os.path.join(HERE, file)) as text:
                budget = re.search(r"^BUDGET_S = (\d+)", text.read(), re.MULTILINE)
            suites.append(Suite("e2e-" + file[5:-3], int(budget.group(1)), file))
    return suites


@dataclass
class Result:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list = field(default_factory=list)  # (test, text)

    def add(self, test, outcome, text=""):
        if outcome == "passed":
            self.passed += 1
        elif outcome == "skipped":
            self.skipped += 1
        else:
            self.failed += 1
            self.failures.append((test, text))


def build(suites):
    """Builds what the suites need. False when that failed."""
    script = os.path.join(ROOT, "testbed", "build.sh")
    good = True
    if any(not s.sanitized for s in suites):
        good = subprocess.run([script, "--dir", BUILD, "-Dwerror=true"]).returncode == 0
    if any(s.sanitized for s in suites):
        good = subprocess.run([script, "--dir", BUILD_ASAN, "--say", "sanitizer build", "-Dwerror=true",
                               "-Ddpdk=false", "-Db_sanitize=address,undefined", "-Db_lundef=false",
                               "-Doptimization=1"] + [s.program for s in suites if s.sanitized]).returncode == 0 and good
    return good


def run_suite(suite, test_filter):
    """(result, seconds, note). The suite's whole output goes to its log."""
    result = Result()
    os.makedirs(LOGS, exist_ok=True)
    log_path = os.path.join(LOGS, suite.name + ".log")
    with tempfile.TemporaryDirectory() as directory:
        report = os.path.join(directory, "report.json")
        environment = dict(os.environ, MILLRACE_BUILD=BUILD)
        if suite.is_gtest:
            command = [suite.path, f"--gtest_output=json:{report}", "--gtest_color=no"]
            if test_filter:
                command.append(f"--gtest_filter=*{test_filter}*")
            environment.update(SANITIZER_OPTIONS if suite.sanitized else {})
        else:
            command = [sys.executable, "-u", suite.path]
            if test_filter:
                command += ["-k", test_filter]
            environment["MILLRACE_RESULTS"] = report
        started = time.monotonic()
        with open(log_path, "wb") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                     cwd=ROOT, env=environment, start_new_session=True)
            try:
                code = child.wait(timeout=KILL_FACTOR * suite.budget)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child)
        seconds = time.monotonic() - started
        (_read_gtest if suite.is_gtest else _read_e2e)(report, result)
    if code is None:
        result.add(suite.name, "failed", f"killed after {seconds:.0f} s, {KILL_FACTOR} times its budget; log: {log_path}")
    elif code != 0 and not result.failed:
        result.add(suite.name, "failed", f"ended with {code}; log: {log_path}\n" + _tail(log_path))
    note = f"log: {log_path}" if result.failed else ""
    return result, seconds, note


def _end(child):
    """A suite that is still there unwinds (its labs clean up), or is killed."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _read_gtest(path, result):
    try:
        with open(path) as file:
            report = json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return  # it crashed: its exit status counts as a failure
    for group in report.get("testsuites", []):
        for case in group.get("testsuite", []):
            name = f"{group['name']}.{case['name']}"
            if case.get("status") == "NOTRUN":
                continue  # filtered out, or disabled
            if case.get("failures"):
                result.add(name, "failed", "\n".join(f["failure"] for f in case["failures"]))
            else:
                result.add(name, "skipped" if case.get("result") == "SKIPPED" else "passed")


def _read_e2e(path, result):
    try:
        with open(path) as file:
            for line in file:
                case = json.loads(line)
                result.add(case["test"], case["outcome"], case["text"])
    except FileNotFoundError:
        pass


def _tail(path, lines=25):
    with open(path, errors="replace") as file:
        return "".join(file.readlines()[-lines:])


def main():
    parser = argparse.ArgumentParser(prog="tests/run")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--suite", action="append", default=[])
    parser.add_argument("-k", dest="filter")
    options = parser.parse_args()
    suites = all_suites()
    if unknown := set(options.suite) - {s.name for s in suites}:
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in suites)}")
    suites = [s for s in suites if not options.suite or s.name in options.suite]
    if options.list:
        for suite in suites:
            print(f"{suite.name:18s} {suite.budget:5d} s")
        return 0

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    started = time.monotonic()
    total = Result()
    if not build(suites):
        total.add("build", "failed", "see above")
    print(f"{'suite':18s} {'budget':>8s} {'used':>8s}  passed failed skipped", flush=True)
    for suite in suites if not total.failed else []:
        if sys.stdout.isatty():
            print(f"{suite.name:18s} {suite.budget:6d} s  running", end="\r", flush=True)
        result, seconds, note = run_suite(suite, options.filter)
        if seconds > suite.budget:
            note = f"over its budget  {note}"
        print(f"{suite.name:18s} {suite.budget:6d} s {seconds:6.1f} s  {result.passed:6d} {result.failed:6d} "
              f"{result.skipped:7d}  {note}".rstrip(), flush=True)
        for test, text in result.failures:
            print(f"FAILED {suite.name}: {test}\n" + "\n".join("    " + line for line in text.splitlines()[-25:]),
                  flush=True)
        total.passed += result.passed
        total.failed += result.failed
        total.skipped += result.skipped
    print(f"whole run: {time.monotonic() - started:.0f} s")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
