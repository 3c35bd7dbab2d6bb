#!/usr/bin/python3
"""Every collective, type, operator and size over real RDMA queue pairs, as a table in which every two of them meet:
guests are emulated, too slow for all combinations, which test_collectives.py goes through on the soft transport.

Each row is done out of place and in place, and every rank checks all of its buffer (millrace-perf does both)."""

import itertools
import os
import re
import time
import unittest

import e2e
import pairwise
from lab import RXE_GUEST
from test_collectives import kinds

BUDGET_S = 300

NONE = "none"
INTEGERS = ("u8", "i8", "i32", "u32", "i64", "u64")
BLOCK_TYPES = ("f16", "bf16", "f32")  # that can go in block floating point
FLOATS = ("f64", "f8e4m3", "f8e5m2", *BLOCK_TYPES)
ELEMENT_BYTES = {"u8": 1, "i8": 1, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
                 "f8e4m3": 1, "f8e5m2": 1}
ARITHMETIC = ("sum", "prod", "min", "max", "avg")
REDUCTIONS = ("all-reduce", "reduce", "reduce-scatter")
# Nothing, one element, odd; a segment, an element less, one more.
EDGES = ("0", "1e", "1001", "65472-1e", "65472", "65472+1e")
SHORT = {
    "collective": (*REDUCTIONS, "broadcast", "all-gather", "barrier"),
    "type": (*INTEGERS, *FLOATS, NONE),
    "op": (*ARITHMETIC, "band", "bor", "bxor", "land", "lor", NONE),
    "size": (*EDGES, "64K", "256K", "1M"),
    "wire": ("exact", "bfp8"),
    "order": ("arrival", "deterministic"),
    "root": (NONE, "first", "last"),
    "stripes": (1, 2, 4),
    "ranks": (2, 3),
    "ipv6": (False, True),
    "inflight": (1, 2),
    "register": (1, 0),
}
LONG = {**SHORT, "size": (*SHORT["size"], "4M", "16M-1e", "16M")}
# What one run of millrace-perf has in common; of the rest it takes lists.
PER_RUN = ("wire", "order", "root", "stripes", "ranks", "ipv6", "inflight", "register")


def goes(row):
    """Whether a row, or as much of it as there is, makes sense."""
    collective, kind, op, wire = (row.get(name) for name in ("collective", "type", "op", "wire"))
    if collective == "barrier":  # has no data, and no say in how it goes
        if {kind, op, row.get("size"), row.get("root")} - {NONE, "0", None} or "bfp8" == wire:
            return False
    elif collective is not None:
        if kind == NONE or (op is not None and (op == NONE) != (collective not in REDUCTIONS)):
            return False
        if wire == "bfp8" and collective not in REDUCTIONS:
            return False
        if row.get("root") is not None and (row["root"] == NONE) != (collective not in ("reduce", "broadcast")):
            return False
    if kind == NONE and (op not in (NONE, None) or row.get("size") not in ("0", None)):
        return False
    if op not in (None, NONE, *ARITHMETIC) and kind in FLOATS:
        return False
    return not (wire == "bfp8" and (op == NONE or kind not in (None, *BLOCK_TYPES) or
                                    op not in (None, *ARITHMETIC)))


def root_of(row):
    return 0 if row["root"] == "first" else row["ranks"] - 1


def shares_of(row):
    return row["ranks"] if row["collective"] in ("reduce-scatter", "all-gather") else 1


def bytes_of(row):
    """Of the vector that was asked for: "65472-1e" is an element less than that."""
    number, unit, elements = re.fullmatch(r"(?:(\d+)([KM]?))?(?:([+-]?\d+)e)?", row["size"]).groups()
    return (int(number or 0) << {"K": 10, "M": 20}.get(unit, 0)) + int(elements or 0) * ELEMENT_BYTES.get(row["type"], 0)


def arguments(row):
    """Of millrace-perf."""
    given = {"--collective": row["collective"], "--wire": row["wire"], "--stripes": row["stripes"],
             "--inflight": row["inflight"], "--register": row["register"]}
    if row["collective"] != "barrier":
        given |= {"--type": row["type"], "--sizes": row["size"]}
    if row["op"] != NONE:
        given["--op"] = row["op"]
    if row["root"] != NONE:
        given["--root"] = root_of(row)
    # Two in flight need two to be done.
    flags = ["-n", row["inflight"], "-w", 0, "-c", 1] + ["--deterministic"] * (row["order"] == "deterministic")
    return [*flags, *(part for item in given.items() for part in item)]


class Table(unittest.TestCase):
    LIMITED = ("collective", "type", "op", "size", "wire", "root")

    def test_every_two_values_meet(self):
        # Against all rows that there are of the factors that limit each other; others go with everything.
        for factors in (SHORT, LONG):
            rows = pairwise.table(factors, goes)
            covered = set().union(*map(pairwise.pairs_of, rows))
            for row in rows:
                self.assertTrue(goes(row), row)
                self.assertEqual(tuple(row), tuple(factors))
            expected = pairwise.possible_pairs({name: factors[name] for name in self.LIMITED}, goes)
            self.assertEqual({pair for pair in covered if {pair[0][0], pair[1][0]} <= set(self.LIMITED)}, expected)
            free = [name for name in factors if name not in self.LIMITED]
            values = {name: {(name, value) for value in factors[name]} for name in factors}
            for name in free:
                for other in factors:
                    if other != name:
                        met = {frozenset(pair) for pair in covered if {pair[0][0], pair[1][0]} == {name, other}}
                        self.assertEqual(met, {frozenset((a, b)) for a in values[name] for b in values[other]})
            print(f"{len(rows)} rows for {len(covered)} pairs")

    def test_what_goes_is_what_makes_sense(self):
        names = ("collective", "type", "op")
        combinations = {values for values in itertools.product(*(LONG[name] for name in names))
                        if goes(dict(zip(names, values)))}
        self.assertEqual(combinations, kinds() | {("barrier", NONE, NONE)})


class Verbs(e2e.LabTest):
    @classmethod
    def setUpClass(cls):
        cls.shared = cls.enterClassContext(e2e.Lab(hosts=[RXE_GUEST] * max(SHORT["ranks"]), name=cls.__name__,
                                                   logs=os.path.join(e2e.logs_directory(), "e2e")))

    def assert_right(self, row, outcomes):
        for outcome in outcomes:
            self.assertEqual(outcome.code, 0, f"rank {outcome.rank}: {e2e.describe(outcome)}")
        result = outcomes[0].result
        self.assertRegex(result["transport"], "^verbs on rxe0 ")
        self.assertEqual((result["path"], result["ranks"], result["stripes"], result["inflight"], result["wire"]),
                         ("network", row["ranks"], row["stripes"], row["inflight"], row["wire"]))
        self.assertEqual(result["deterministic"], row["order"] == "deterministic")
        # One line of the table, of what was asked for: no row has passed by measuring something else.
        line, = result["results"]
        barrier = row["collective"] == "barrier"
        self.assertEqual((line["collective"], line["type"], line["op"]),
                         (row["collective"], *(("-", "-") if barrier else (row["type"], row["op"]))))
        if row["root"] != NONE:
            self.assertEqual(line["root"], root_of(row))
        if not barrier:
            self.assertEqual((line["out_of_place"]["wrong"], line["in_place"]["wrong"]), (0, 0))
            self.assertLess(bytes_of(row) - line["size"], 8 * row["ranks"])  # whole elements, as many for each
            self.assertEqual(line["size"] == 0, bytes_of(row) < ELEMENT_BYTES[row["type"]] * shares_of(row))

    def test_every_two_values_meet_without_a_wrong_element(self):
        rows = pairwise.table(LONG if e2e.FULL else SHORT, goes)
        began, right, moved = time.monotonic(), 0, 0
        for row in rows:
            # A mebibyte takes some seconds, on a busy machine many.
            timeout = 60 + 15 * (bytes_of(row) >> 20)
            with self.subTest(**row):
                outcomes = self.shared.perf(*arguments(row), hosts=range(1, row["ranks"] + 1), ipv6=row["ipv6"],
                                            timeout=timeout)
                self.assert_right(row, outcomes)
                right, moved = right + 1, moved + 2 * bytes_of(row)
            if self.shared.switch.poll() is not None:
                self.fail("the switch has ended")
        print(f"{right} of {len(rows)} rows right, vectors of {moved >> 20} MiB in all, "
              f"{time.monotonic() - began:.0f} s")
        self.wait_for(lambda: not self.shared.ask("status")["queue_pairs"], 20, "queue pairs gone")
        self.assertEqual(self.shared.ask("status")["group_memory"]["reserved"], 0)


if __name__ == "__main__":
    e2e.main()
