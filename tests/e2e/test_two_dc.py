#!/usr/bin/python3
"""Two datacenters: a transfer and a burst collide at a port. Without spilling packets are lost and sequences NAKed; with
it none of those that may be spilled. What the ends counted is the judge, and what leaf2 says has to agree."""

import json
import os
import re
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

import e2e
from test_demo import traces

BUDGET_S = 300
TWO_DC = os.path.join(e2e.ROOT, "testbed", "two-dc")
WRITTEN = 8 << 20
SENDER, RECEIVER = 1, 5


class TwoDc(unittest.TestCase):
    def two_dc(self, *arguments, code=0):
        before = traces()
        svg = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "occupancy.svg")
        done = subprocess.run([TWO_DC, "--json", "--svg", svg, *map(str, arguments)], capture_output=True, text=True,
                              timeout=500)
        print(done.stderr[-6000:])
        self.assertEqual(done.returncode, code, done.stderr[-2000:] + done.stdout[-500:])
        self.assertEqual(traces(), before)
        result = json.loads(done.stdout)
        return {run["mode"]: run for run in result["runs"]}, svg

    def assert_lossless(self, *flows):
        for flow in flows:
            for what in ("naks", "wrong", "lost"):
                self.assertEqual(flow[what], 0, (what, flow))

    def assert_nothing_is_kept(self, run):
        self.assertEqual(run["spilled"], run["drained"])
        self.assertEqual(run["occupancy"][-1][1:3], [0, 0])

    def test_without_spilling_it_loses_and_with_it_nothing(self):
        runs, svg = self.two_dc()
        off, local, remote = runs["off"], runs["local"], runs["remote"]
        for run in runs.values():
            self.assertEqual(run["cross"]["bytes"], WRITTEN)
            self.assertEqual(run["burst"]["bytes"], 6 << 20)
            self.assertEqual(run["all_reduce"]["wrong"], 0)
            self.assertEqual(run["cross"]["lost"] + run["burst"]["lost"], run["drops"])
        self.assertGreater(off["cross"]["naks"], 0)
        self.assertGreater(off["cross"]["lost"], 0)
        self.assertGreaterEqual(off["cross"]["retransmitted"], off["cross"]["naks"])
        self.assertLessEqual(off["queue_bytes_max"], 100_000)
        for run in (local, remote):
            self.assert_lossless(run["cross"], run["burst"])
            self.assertEqual(run["drops"], 0)
            self.assert_nothing_is_kept(run)
            # Two senders' windows of 32 packets and the transfer's met a queue of 24 packets.
            self.assertGreater(run["resident_bytes_max"], 4096)
        self.assertEqual(local["lenders"], [])
        lender, = remote["lenders"]
        self.assertGreater(lender["written"], 0)
        self.assertEqual((lender["read"], lender["lost"], lender["deaths"]), (lender["written"], 0, 0))
        self.check_svg(svg, local)

    def check_svg(self, path, run):
        """Whose highest point of the spillway's curve is where the axis says that it is."""
        root = xml.etree.ElementTree.parse(path).getroot()
        name = "{http://www.w3.org/2000/svg}"
        texts = [element.text for element in root.iter(name + "text")]
        self.assertTrue(any(text.startswith("time") and "(s)" in text for text in texts), texts)
        self.assertIn("kB", texts)
        curves = [element.get("points") for element in root.iter(name + "polyline")]
        self.assertEqual(len(curves), 6)  # two of each run
        ys = [float(point.split(",")[1]) for point in curves[2].split()]
        tick = max(float(text) for text in texts if re.fullmatch(r"[\d.]+", text))
        top = max(sample[2] for sample in run["occupancy"]) / 1000
        bottom = max(ys)
        self.assertAlmostEqual((bottom - min(ys)) / 190, top / tick, delta=0.02)

    def test_only_what_comes_from_the_other_datacenter_is_spilled(self):
        runs, _ = self.two_dc("--spill", "local", "--eligible", "remote")
        run = runs["local"]
        self.assert_lossless(run["cross"])
        self.assertEqual(run["eligible_drops"], 0)
        # The burst has no such right.
        self.assertGreater(run["burst"]["lost"], 0)
        self.assertEqual(run["burst"]["lost"], run["drops"])
        self.assertLess(run["spilled"]["packets"], run["cross"]["packets"] + 1)
        self.assert_nothing_is_kept(run)

    def test_over_ipv6_lent_memory_does_the_same(self):
        runs, _ = self.two_dc("--ipv6", "--spill", "remote")
        run = runs["remote"]
        self.assert_lossless(run["cross"], run["burst"])
        self.assertEqual(run["drops"], 0)
        self.assertGreater(run["spilled"]["packets"], 0)
        self.assert_nothing_is_kept(run)
        lender, = run["lenders"]
        self.assertIn(":", lender["address"])
        self.assertEqual((lender["read"], lender["lost"], lender["deaths"]), (lender["written"], 0, 0))
        self.assertGreater(lender["written"], 0)

    def test_bad_input_gets_one_sentence(self):
        flow = [e2e.binary("millrace-flow"), "--connect"]
        for command, text in (
                (flow + ["17,10.0.0.1,18,8"], "write LOCAL-QPN,PEER,REMOTE-QPN,SEND,RECEIVE"),
                (flow + ["17,here,18,8,0"], "'here' is no IPv4 or IPv6 address"),
                (flow + ["x,10.0.0.1,18,8,0"], "'x' is no number"),
                (flow + ["1,10.0.0.1,18,8,0"], "have uses of their own"),
                (flow + ["17,10.0.0.1,18,9,0"], "a multiple of 8"),
                (flow + ["17,10.0.0.1,18,8,0", "--window", "1"], "a message must fit the window"),
                (flow + ["17,10.0.0.1,18,8,0", "--mtu", "1000"], "--mtu"),
                ([TWO_DC, "--spill", "all"], "'all' is none of off, local, remote"),
                ([TWO_DC, "--transfer", "12"], "write 64K"),
                ([TWO_DC, "--traffic", "kv"], "--rxe"),
                ([TWO_DC, "--rxe", "--ipv6"], "not of guests'"),
                ([TWO_DC, "--rxe", "--eligible", "all"], "only the transfer is eligible")):
            with self.subTest(command[1:]):
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(text, done.stderr)

    def test_guests_own_rdma_stack_finds_no_gap(self):
        # Neither a sender that WRITEs nor one that is READ from, and not several of both.
        for traffic in ("write", "kv", "storage"):
            with self.subTest(traffic):
                runs, _ = self.two_dc("--rxe", "--traffic", traffic, "--spill", "local", "--transfer", "4M")
                self.assert_kernels_missed_nothing(runs["local"])

    def test_guests_write_through_lent_memory(self):
        runs, _ = self.two_dc("--rxe", "--spill", "off,remote", "--transfer", "4M")
        self.assertGreater(runs["off"]["kernels"][str(RECEIVER)]["out_of_seq_request"], 0)
        self.assertGreater(runs["off"]["kernels"][str(SENDER)]["rcvd_seq_err"], 0)
        self.assert_kernels_missed_nothing(runs["remote"])
        for traffic in ("kv", "storage"):
            with self.subTest(traffic):
                runs, _ = self.two_dc("--rxe", "--traffic", traffic, "--spill", "remote", "--transfer", "4M")
                self.assert_kernels_missed_nothing(runs["remote"])

    def assert_kernels_missed_nothing(self, run):
        for host, counted in run["kernels"].items():
            self.assertGreater(counted["rcvd_pkts"], 0, host)
            for what in ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "retry_exceeded_err"):
                self.assertEqual(counted[what], 0, (host, what, counted))
        self.assertEqual(run["eligible_drops"], 0)
        self.assertGreater(run["spilled"]["packets"], 0)
        self.assert_nothing_is_kept(run)


if __name__ == "__main__":
    e2e.main()
