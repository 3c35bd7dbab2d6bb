#!/usr/bin/python3
"""Asks the tests what they notice: changes one small thing at a time in roce/, aggregation/ and buffering/ (an operator, a
constant, a condition, a statement left out), builds, runs the suites that need no network, and prints the changes that
nobody noticed.

    tests/mutate.py --count 100 --seed 1 --rooms buffering

Works on a copy of the tree; the copy's build stays in --work for the next run. A change that does not compile, or whose
object code is the same, does not count. Initial values of members (`uint32_t payload = 0;` in a class) are left alone: most
are written before they are read, and those that are read are configuration's defaults. MILLRACE_SIM_SEEDS=300 in the
environment keeps the simulator's part of a run short."""

import argparse
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
ROOMS = ("roce", "aggregation", "buffering")
PROGRAMS = ("unit_tests", "vector_tests", "sim_tests", "fuzz_smoke")  # in the order of their speed

# (what, by what), on lines without comment and string; clang-format puts blanks around binary operators.
SWAPS = [(r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
         (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " + "), (r" / ", " * "),
         (r" % ", " + "), (r" & ", " | "), (r" \| ", " & "), (r" \^ ", " & "), (r" << ", " >> "), (r" >> ", " << "),
         (r" \+= ", " -= "), (r" -= ", " += "), (r" \|= ", " = "), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
         (r"\+\+", "--"), (r"--", "++"), (r"!(?=[\w(])", ""), (r"std::min\b", "std::max"), (r"std::max\b", "std::min"),
         (r"\bcontinue;", ";"), (r"\bbreak;", ";"), (r"\breturn;", ";")]
NUMBER = re.compile(r"(?<![\w.'\"])(\d+)(?=[uUlL]*\b)(?![.\w]*\.)")
STATEMENT = re.compile(r"^\s+[\w.>():\[\]*-]+(\(.*\)| [-+|&]?= .*|\+\+|--);$")
SKIP = re.compile(r"^\s*(//|#|static_assert|assert|using|namespace|template|case |default:|X\(|\*|constexpr \w+ k\w+\[)")
CLASS = re.compile(r"\b(?<!enum )(struct|class|union)\b[^;()]*\{")
INITIAL_VALUE = re.compile(r"^\s*(?!\s|static\b|using\b)[\w:<>,* ]+ \w+( = [^()]*(\([^()]*\))?|\{[^()]*\})(, .*)?;\s*$")


def class_scope(lines):
    """For each line whether it begins directly inside a class, where declarations are members."""
    scopes = []
    for line in lines:
        yield bool(scopes) and scopes[-1]
        code = re.sub(r"'.'|\"[^\"]*\"", "", line.split("//")[0])
        of_class = CLASS.search(code)
        for position, letter in enumerate(code):
            if letter == "{":
                scopes.append(bool(of_class) and of_class.end() == position + 1)
            elif letter == "}" and scopes:
                scopes.pop()


def sites(lines):
    """Every (line number, changed line, what was done) that one file offers."""
    found = []
    for number, (line, in_class) in enumerate(zip(lines, class_scope(lines))):
        code = line.split("//")[0]
        if SKIP.match(line) or '"' in code or "operator" in code or (in_class and INITIAL_VALUE.match(code)):
            continue
        for pattern, replacement in SWAPS:
            for match in re.finditer(pattern, code):
                found.append((number, code[:match.start()] + replacement + code[match.end():],
                              f"{match.group(0).strip() or match.group(0)} → {replacement.strip() or 'nothing'}"))
        for match in NUMBER.finditer(code):
            for value in (int(match.group(1)) + 1, 0):
                if value != int(match.group(1)):
                    found.append((number, code[:match.start()] + str(value) + code[match.end():],
                                  f"{match.group(1)} → {value}"))
        if STATEMENT.match(code.rstrip()):
            found.append((number, re.match(r"\s*", code).group(0) + ";", "statement left out"))
    return found


class Tree:
    def __init__(self, work):
        self.source, self.build = os.path.join(work, "tree"), os.path.join(work, "build")
        os.makedirs(self.source, exist_ok=True)
        files = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                               capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, files):
            origin, copy = os.path.join(ROOT, name), os.path.join(self.source, name)
            if not os.path.exists(origin):
                continue
            with open(origin, "rb") as file:
                content = file.read()
            if not os.path.exists(copy) or open(copy, "rb").read() != content:
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copyfile(origin, copy)
        if not os.path.exists(os.path.join(self.build, "build.ninja")):
            subprocess.run(["meson", "setup", "-Ddpdk=false", "-Dbuildtype=plain", "-Doptimization=1", "-Dwerror=false",
                            self.build, self.source], check=True, stdout=subprocess.DEVNULL)

    def make(self, programs):
        done = subprocess.run(["ninja", "-C", self.build, *("tests/" + p for p in programs)], capture_output=True, text=True)
        return done.returncode == 0

    def objects(self):
        """A digest of all object code."""
        digest = hashlib.sha256()
        for room in ROOMS:
            folder = os.path.join(self.build, room)
            for path, _, names in sorted(os.walk(folder)):
                for name in sorted(n for n in names if n.endswith(".o")):
                    with open(os.path.join(path, name), "rb") as file:
                        digest.update(file.read())
        for path, _, names in sorted(os.walk(os.path.join(self.build, "tests"))):  # of what stands in headers
            for name in sorted(n for n in names if n.endswith(".o")):
                with open(os.path.join(path, name), "rb") as file:
                    digest.update(file.read())
        return digest.hexdigest()

    def noticed_by(self, programs, skip, timeout_s):
        """The program that failed, or None."""
        for program in programs:
            try:
                code = subprocess.run([os.path.join(self.build, "tests", program), "--gtest_brief=1",
                                       "--gtest_fail_fast", "--gtest_filter=-" + skip], stdout=subprocess.DEVNULL,
                                      stderr=subprocess.DEVNULL, timeout=timeout_s).returncode
            except subprocess.TimeoutExpired:
                return program + " (hung)"
            if code != 0:
                return program
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", default="/tmp/millrace-mutate")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="where to change something (default %(default)s)")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="which suites are asked, in this order (default "
                        "%(default)s)")
    parser.add_argument("--skip", default="", help="tests left out: patterns of gtest, between colons")
    parser.add_argument("--timeout", type=int, default=240, help="seconds after which a suite hangs (default %(default)s)")
    options = parser.parse_args()
    rooms, programs = options.rooms.split(","), options.programs.split(",")
    for given, known in ((rooms, ROOMS), (programs, PROGRAMS)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{', '.join(unknown)}: none of {', '.join(known)}")
    tree = Tree(options.work)
    if not tree.make(programs):
        sys.exit("mutate: the tree does not build")
    if by := tree.noticed_by(programs, options.skip, options.timeout):
        sys.exit(f"mutate: {by} fails without any change")
    original = tree.objects()

    choice = random.Random(options.seed)
    files = [os.path.join(room, name) for room in rooms for name in sorted(os.listdir(os.path.join(ROOT, room)))
             if name.endswith((".cc", ".h"))]
    all_sites = []
    for name in files:
        with open(os.path.join(tree.source, name)) as file:
            lines = file.read().split("\n")
        all_sites += [(name, *site) for site in sites(lines)]
    choice.shuffle(all_sites)
    print(f"{len(all_sites)} possible changes in {len(files)} files", flush=True)

    killed, survivors, skipped = 0, [], 0
    for name, number, changed, what in all_sites:
        if killed + len(survivors) >= options.count:
            break
        path = os.path.join(tree.source, name)
        with open(path) as file:
            text = file.read()
        lines = text.split("\n")
        before, lines[number] = lines[number], changed
        started = time.monotonic()
        try:
            with open(path, "w") as file:
                file.write("\n".join(lines))
            # What the fastest program does not need is built only where that one has noticed nothing.
            if not tree.make(programs[:1]):
                skipped += 1
                continue
            by = tree.noticed_by(programs[:1], options.skip, options.timeout)
            if not by:
                if not tree.make(programs) or tree.objects() == original:
                    skipped += 1
                    continue
                by = tree.noticed_by(programs[1:], options.skip, options.timeout)
        finally:
            with open(path, "w") as file:
                file.write(text)
        if by:
            killed += 1
        else:
            survivors.append((name, number + 1, before.strip(), what))
        print(f"{killed + len(survivors):4d} {'noticed by ' + by if by else 'NOT NOTICED':28s} {name}:{number + 1} {what}   "
              f"{before.strip()[:90]}   ({time.monotonic() - started:.0f} s)", flush=True)
    total = killed + len(survivors)
    print(f"\n{killed} of {total} noticed ({100 * killed / max(total, 1):.0f} %); {skipped} more did not compile or changed nothing")
    for name, number, before, what in survivors:
        print(f"survivor {name}:{number}  {what}\n    {before}")


if __name__ == "__main__":
    main()
