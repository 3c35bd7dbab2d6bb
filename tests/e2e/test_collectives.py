#!/usr/bin/python3
"""All collectives through the switch: every type and operator that makes sense, where sizes have their edges, in place
and out of place (millrace-perf does both), in all modes, and what happens when ranks disagree.

One run of millrace-perf goes through hundreds of cases, and every rank checks all of its buffer after each."""

import os
import re
import subprocess
import unittest

import e2e
from e2e import binary

BUDGET_S = 150

TYPES = ("u8", "i8", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2")
INTEGERS = TYPES[:6]
ARITHMETIC = ("sum", "prod", "min", "max", "avg")
OPERATORS = (*ARITHMETIC, "band", "bor", "bxor", "land", "lor")
REDUCTIONS = ("all-reduce", "reduce", "reduce-scatter")
MOVES = ("broadcast", "all-gather")
# Nothing, one element, an element for each of four ranks, odd; a segment, an element less, one more, one more for each.
EDGES = "0,1e,3e,4e,1001,65472-1e,65472,65472+1e,65472+4e"
# Blocks of 63 elements, and 1,023 of them in a segment of 64-byte blocks; four shards of a block and an element.
BLOCK_EDGES = "0,1e,62e,63e,64e,252e,256e,64448e,64449e,64450e"
ONCE = ("-n", "1", "-w", "0", "-c", "1")


def kinds(types=TYPES, operators=OPERATORS, reductions=REDUCTIONS, moves=MOVES):
    """What makes sense: (collective, type, operator)."""
    return {(collective, kind, op) for collective in reductions for kind in types for op in operators
            if op in ARITHMETIC or kind in INTEGERS} | {(collective, kind, "none") for collective in moves
                                                        for kind in types}


class CollectivesTest(e2e.LabTest):
    """One lab of four hosts for all tests of a class."""

    @classmethod
    def setUpClass(cls):
        cls.shared = cls.enterClassContext(e2e.Lab(hosts=4, name=cls.__name__,
                                                   logs=os.path.join(e2e.logs_directory(), "e2e")))

    def exact(self, *arguments, hosts=(1, 2, 3, 4), lab=None, **options):
        """The lines of the table of a run that ended well, with nothing wrong."""
        outcomes = (lab or self.shared).perf(*ONCE, *arguments, hosts=hosts, **options)
        self.assert_exact(outcomes, len(hosts))
        result = outcomes[0].result
        self.assertEqual(result["wrong"], 0)
        for line in result["results"]:
            if line["collective"] != "barrier":
                self.assertEqual((line["out_of_place"]["wrong"], line["in_place"]["wrong"]), (0, 0), line)
        return result["results"]

    def assert_kinds(self, lines, expected):
        self.assertEqual({(line["collective"], line["type"], line["op"]) for line in lines
                          if line["collective"] != "barrier"}, expected)


class Collectives(CollectivesTest):
    EVERYTHING = ("--collective", "all", "--type", "all", "--op", "all")

    def test_everything_at_the_edges_over_ipv4(self):
        lines = self.exact(*self.EVERYTHING, "--sizes", EDGES)
        self.assert_kinds(lines, kinds())
        self.assertIn("barrier", {line["collective"] for line in lines})
        # Sizes are those of the whole vector, whole elements, and as many for each rank.
        sizes = {(line["collective"], line["size"], line["count"]) for line in lines if line["type"] == "f32"}
        for collective, size, count in (("all-reduce", 4, 1), ("reduce", 65468, 16367), ("broadcast", 1000, 250),
                                        ("reduce-scatter", 992, 62), ("reduce-scatter", 65488, 4093),
                                        ("all-gather", 16, 1), ("all-gather", 0, 0)):
            self.assertIn((collective, size, count), sizes)

    def test_everything_deterministic_over_ipv6(self):
        self.assert_kinds(self.exact(*self.EVERYTHING, "--sizes", EDGES, "--deterministic", ipv6=True), kinds())

    def test_everything_of_a_mebibyte_on_two_stripes_over_ipv6(self):
        lines = self.exact(*self.EVERYTHING, "--sizes", "1M", "--stripes", "2", ipv6=True)
        self.assert_kinds(lines, kinds())
        self.assertEqual({line["size"] for line in lines}, {0, e2e.MIB})

    def test_a_mebibyte_deterministic_two_in_flight(self):
        types = ("i32", "f16", "f32", "f64")
        lines = self.exact("--collective", "all", "--type", ",".join(types), "--op", "sum,prod,avg", "--sizes",
                           "1M-4e", "--deterministic", "--inflight", "2", "-n", "3")
        self.assert_kinds(lines, kinds(types, ("sum", "prod", "avg")))

    def test_every_root(self):
        for ipv6, stripes in ((False, 2), (True, 1)):
            lines = self.exact("--collective", "reduce,broadcast", "--type", "u8,bf16,f64", "--op", "sum,min", "--root",
                               "all", "--sizes", EDGES + ",1M", "--stripes", stripes, ipv6=ipv6)
            roots = {(line["collective"], line["type"], line["op"], line["root"]) for line in lines}
            self.assertEqual(roots, {(*kind, root) for kind in kinds(("u8", "bf16", "f64"), ("sum", "min"), ("reduce",),
                                                                     ("broadcast",)) for root in range(4)})

    def test_block_floating_point(self):
        types = ("f16", "bf16", "f32")
        for ipv6, sizes, more in ((False, f"{EDGES},{BLOCK_EDGES}", ()),
                                  (True, f"{BLOCK_EDGES},1M", ("--deterministic", "--stripes", "2"))):
            lines = self.exact("--collective", ",".join(REDUCTIONS), "--type", ",".join(types), "--op", "all", "--wire",
                               "bfp8", "--sizes", sizes, *more, ipv6=ipv6)
            self.assert_kinds(lines, kinds(types, ARITHMETIC, moves=()))

    def test_three_ranks_and_one(self):
        # Averages that do not come out even, shards that are no power of two, a tree with a rank over.
        types = ("i8", "u64", "f32", "f8e4m3")
        for hosts in ((1, 2, 3), (4,)):
            for mode in ((), ("--deterministic",)):
                lines = self.exact("--collective", "all", "--type", ",".join(types), "--op", ",".join(ARITHMETIC),
                                   "--root", "all", "--sizes", "0,1e,2e,3e,7e,1002,65472+3e,200001", *mode, hosts=hosts)
                self.assert_kinds(lines, kinds(types, ARITHMETIC))

    def test_the_table_has_the_columns_of_nccl_tests(self):
        out = self.shared.perf(*ONCE, "--collective", "reduce,broadcast,all-gather", "--sizes", "1000", "--root",
                               "2")[0].out
        self.assertEqual(len(re.findall(r"size +count +type +redop +root +time +algbw +busbw +#wrong", out)), 3, out)
        for row in (r"1000 +250 +f32 +sum +2 ", r"1000 +250 +f32 +none +2 ", r"992 +62 +f32 +none +-1 "):
            self.assertRegex(out, row)

    def test_bus_bandwidth_has_the_factors_of_nccl_tests(self):
        factors = {"all-reduce": 1.5, "reduce": 1, "broadcast": 1, "reduce-scatter": 0.75, "all-gather": 0.75}
        for line in self.exact("--collective", ",".join(factors), "--sizes", "1M"):
            for run in (line["out_of_place"], line["in_place"]):
                self.assertAlmostEqual(run["busbw"] / run["algbw"], factors[line["collective"]], 6, line)


class BadNetwork(e2e.LabTest):
    def test_everything_at_once_over_ipv6(self):
        with self.lab(hosts=3, ipv6=True, impair={"loss": 0.005, "duplicate": 0.01, "reorder": 0.01}) as lab:
            for mode in ((), ("--deterministic",), ("--wire", "bfp8")):
                self.assert_exact(lab.perf(*ONCE, "--collective", "all", "--op", "sum,avg", "--root", "all", "--sizes",
                                           "3e,65472+3e,300000", *mode), 3)
            counters = lab.counters()
            self.assertGreater(sum(counters[f"ports.p{host}.impair_rx.lost"] for host in (1, 2, 3)), 0)


class Disagreement(CollectivesTest):
    USUAL = {"collective": "reduce", "type": "f32", "root": "0", "sizes": "64K"}

    def disagree(self, *words, everybody=None, **rank_1):
        """Rank 1 does something else than the three others: all of them fail, at once, and are told who and what."""
        def arguments(settings):
            return [*ONCE, *(part for key, value in settings.items()
                             for part in (["--" + key] if value is True else ["--" + key, value]))]
        usual = everybody or self.USUAL
        other = {key: value for key, value in {**usual, **rank_1}.items() if value is not None}
        for ipv6 in (False, True):
            before = self.shared.ask("status")
            outcomes = self.shared.perf(*arguments(usual), per_rank={1: arguments(other)}, timeout=20, ipv6=ipv6)
            for outcome in outcomes:
                self.assertEqual(outcome.code, 1, f"rank {outcome.rank}: {e2e.describe(outcome)}")
                for word in ("rank 1", *words):
                    self.assertIn(word, outcome.err, f"rank {outcome.rank}")
                self.assertEqual(outcome.err.count("\n"), 1, outcome.err)
                self.assertLess(outcome.seconds, 3)
            self.assert_frames_return(self.shared, before)

    def test_about_the_root(self):
        self.disagree("root", root="1")

    def test_about_the_collective(self):
        self.disagree("collective", "all-reduce", "reduce", collective="all-reduce", root=None)

    def test_about_broadcasts_root(self):
        self.disagree("root", everybody={**self.USUAL, "collective": "broadcast"}, root="3")

    def test_about_deterministic_mode(self):
        self.disagree("order of ranks", deterministic=True)

    def test_about_the_wire_form(self):
        self.disagree("bfp8", wire="bfp8")

    def test_about_the_size_of_shards(self):
        self.disagree("65536", "131072", everybody={"collective": "all-gather", "sizes": "64K"}, sizes="128K")


class Usage(unittest.TestCase):
    def test_what_makes_no_sense_is_refused_in_a_line(self):
        for arguments, words in ((("--op", "band", "--type", "f32"), "band does not go with f32"),
                                 (("--collective", "broadcast", "--op", "max"), "broadcast reduces nothing"),
                                 (("--collective", "all-gather", "--wire", "bfp8"), "all-gather"),
                                 (("--type", "f64", "--wire", "bfp8"), "f64"),
                                 (("--collective", "reduce", "--root", "4"), "0 to 3"),
                                 (("--collective", "scatter"), "scatter"), (("--sizes", "8,x"), '"x"')):
            done = subprocess.run([binary("millrace-perf"), "--rank", "0", "--size", "4", "--group", "g", "--switch",
                                   "10.77.0.100", *arguments], capture_output=True, text=True, timeout=10)
            self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
            self.assertRegex(done.stderr, r"^millrace-perf: [^\n]*" + re.escape(words) + r"[^\n]*\n$")


if e2e.FULL:  # the long form
    class Large(CollectivesTest):
        def test_64_mebibytes(self):
            for size, mode in (("64M", ()), ("64M-4e", ("--deterministic", "--stripes", "2"))):
                self.exact("--collective", "all", "--type", "i32,f16,f32", "--sizes", size, *mode, timeout=600)
            self.exact("--collective", "reduce,broadcast", "--sizes", "64M", "--root", "all", timeout=300)
            self.exact("--collective", "all-reduce,reduce,reduce-scatter", "--wire", "bfp8", "--sizes", "64M", timeout=300)

        def test_a_gibibyte(self):
            # Of two ranks: each has two buffers of it.
            lines = self.exact("--collective", ",".join((*REDUCTIONS, *MOVES)), "--sizes", "1G", hosts=(1, 2), timeout=900)
            self.assertEqual({line["size"] for line in lines}, {1 << 30})


if __name__ == "__main__":
    e2e.main()
