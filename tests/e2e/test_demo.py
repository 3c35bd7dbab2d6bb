#!/usr/bin/python3
"""What a newcomer types, on a built tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import e2e
from check_capture import check, packets_per_member

sys.path.insert(0, os.path.join(e2e.ROOT, "testbed"))
import network  # noqa: E402

BUDGET_S = 480
DEMO = os.path.join(e2e.ROOT, "testbed", "demo")


def traces():
    """What a demo that has ended could have left: namespaces and folders of labs without an owner, orphaned programs of
    ours, DPDK's files, hugepages. Other labs may be at work on this machine."""
    def orphaned(name):
        match = re.match(r"mr(\d+)(x\d+)?-", name)
        return match and not os.path.exists(f"/proc/{match.group(1)}")

    def status(pid):
        try:
            with open(f"/proc/{pid}/status") as file:
                return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except (FileNotFoundError, ProcessLookupError):
            return {}
    processes = {(pid, s["Name"]) for pid in filter(str.isdigit, os.listdir("/proc"))
                 if (s := status(pid)).get("PPid") == "1" and s["Name"].startswith(("millrace", "ip", "qemu"))}
    with open("/proc/sys/vm/nr_hugepages") as file:
        hugepages = file.read()
    return {"namespaces": {n for n in network.namespaces() if orphaned(n)}, "processes": processes,
            "folders": {n for n in os.listdir(tempfile.gettempdir()) if orphaned(n)},
            "dpdk": set(os.listdir("/run/dpdk")) if os.path.isdir("/run/dpdk") else set(),
            "hugepages": hugepages}


class Demo(unittest.TestCase):
    def demo(self, *arguments, code=0, timeout=600):
        before = traces()
        done = subprocess.run([DEMO, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
        print(done.stdout[-6000:])
        self.assertEqual(done.returncode, code, done.stderr[-2000:] + done.stdout[-1000:])
        self.assertEqual(traces(), before)
        return done

    def test_as_it_is(self):
        # Bar 1: 8 B to 64 MiB, f32 sum, IPv4; then every type and operator to 1 MiB over IPv6, two in flight.
        result = json.loads(self.demo("--json").stdout)
        self.assertTrue(result["ok"])
        first, second = result["parts"]
        self.assertEqual([row["bytes"] for row in first["rows"]], [8 << n for n in range(24)])
        self.assertTrue(second["ipv6"])
        self.assertEqual(len({(row["type"], row["op"], row["bytes"]) for row in second["rows"]}), 10 * 4 * 18)
        self.assertEqual({row["wrong"] for part in result["parts"] for row in part["rows"]}, {0})

    def test_eight_hosts_and_one_percent_of_loss(self):
        # Bar 2.
        done = self.demo("--hosts", 8, "--loss", 0.01, "--json")
        result = json.loads(done.stdout)
        self.assertTrue(result["ok"])
        for part in result["parts"]:
            counters = part["counters"]
            self.assertEqual({row["wrong"] for row in part["rows"]}, {0})
            self.assertGreater(counters["aggregation.retransmitted_packets"], 0)
            self.assertGreater(part["hosts_transport"]["retransmitted"], 0)
            for port in range(1, 9):
                for direction in ("rx", "tx"):
                    self.assertGreater(counters[f"ports.p{port}.impair_{direction}.lost"], 0)

    def test_rxe_guests_beside_namespaces_on_a_bad_network(self):
        done = self.demo("--hosts", 1, "--hosts-rxe", 1, "--size", "8:1M", "--type", "bf16", "--loss", 0.01,
                         "--dup", 0.01, "--reorder", 0.01, "--json")
        result = json.loads(done.stdout)
        self.assertTrue(result["ok"])
        part = result["parts"][0]
        self.assertEqual({row["wrong"] for row in part["rows"]}, {0})
        self.assertGreater(part["kernels"]["2"]["rcvd_pkts"], 1000)
        for port in ("p1", "p2"):
            for kind in ("lost", "duplicated", "reordered"):
                self.assertGreater(part["counters"][f"ports.{port}.impair_rx.{kind}"], 0, kind)
        for line in ("transport soft: host 1,", "transport verbs: host 2,", "kernel of host 2: "):
            self.assertIn(line, done.stderr)

    def test_a_tree_with_an_rxe_guest(self):
        # Two leaves with two hosts each; the last host is a guest.
        done = self.demo("--tree", "2x2", "--hosts-rxe", 1, "--size", "8:1M", "--json")
        result = json.loads(done.stdout)
        self.assertTrue(result["ok"])
        part = result["parts"][0]
        self.assertEqual({row["wrong"] for row in part["rows"]}, {0})
        self.assertEqual(part["roots"], ["spine1"])
        self.assertEqual([part["switches"][leaf]["aggregation.partials_sent"] > 100 for leaf in ("leaf1", "leaf2")],
                         [True, True])
        for way in ("sent", "received"):
            busiest = max(link[way] for link in part["links"])
            for uplink in part["uplinks"]:
                self.assertLess(part["reduced_bytes"], uplink[way])
                self.assertLess(uplink[way], 1.1 * busiest)
        self.assertGreater(part["kernels"]["4"]["sent_pkts"], 1000)

    def test_without_root(self):
        # In a copy that the user `nobody` can read; the programs are root's, so they are used as they are.
        if subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", "unshare", "-Urnm", "true"],
                          capture_output=True).returncode != 0:
            self.skipTest("this kernel lets no user make namespaces")
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            shutil.copytree(os.path.dirname(DEMO), os.path.join(folder, "testbed"))
            for name in ("millrace-switch", "millrace-perf", "millracectl"):
                path = e2e.binary(name)
                target = os.path.join(folder, "build", os.path.basename(os.path.dirname(path)))
                os.makedirs(target, exist_ok=True)
                shutil.copy(path, target)
            before = traces()
            user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
            environment = {key: value for key, value in os.environ.items() if key != "MILLRACE_BUILD"}
            done = subprocess.run([*user, os.path.join(folder, "testbed", "demo"), "--hosts", "2", "--size", "8:64K"],
                                  capture_output=True, text=True, timeout=120, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr + done.stdout)
            self.assertIn("OK: 14 cases", done.stdout.splitlines()[-1])
            self.assertEqual(traces(), before)
            # Where it cannot be, it says why, in a line.
            nested = ["unshare", "--user", "--map-user=1000", "--keep-caps", "sh", "-c",
                      "echo 0 >/proc/sys/user/max_user_namespaces; exec \"$@\"", "sh"]
            done = subprocess.run([*user, *nested, os.path.join(folder, "testbed", "demo")], capture_output=True,
                                  text=True, timeout=60, env=environment)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, r"^demo: needs root \(sudo .*\), or user namespaces, which .*\n$")

    def test_a_capture(self):
        # Bar 3.
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "f.pcapng")
            done = self.demo("--size", "1M", "--capture", file)
            self.assertIn("OK: ", done.stdout.strip().splitlines()[-1])
            report = check(file, min_packets=2 * 4 * packets_per_member(1 << 20))
            self.assertEqual(report.errors, [])

    def test_mistakes_are_usage_errors(self):
        for arguments in (["--hosts", "none"], ["--size", "12Q"], ["--loss", "2"], ["--colour"], ["--type", "f31"],
                          ["--rate", "fast"], ["--dup", "1"], ["--reorder", "x"], ["--hosts-rxe", "0"],
                          ["--hosts-rxe", "65"], ["--tree", "2"], ["--tree", "2x4", "--hosts", "2"],
                          ["--tree", "9x9"], ["--tree", "2x2", "--hosts-rxe", "5"]):
            done = self.demo(*arguments, code=2)
            self.assertIn("demo: error", done.stderr)

    def test_a_failure_says_where_the_logs_are(self):
        done = self.demo("--hosts", 2, "--size", "8", "--capture", "/proc/nowhere.pcapng", code=1)
        self.assertIn("FAILED", done.stdout)
        folder = done.stderr.strip().splitlines()[-1].split(" is in ")[1]
        self.assertTrue(os.path.exists(os.path.join(folder, "switch.err")), folder)


if __name__ == "__main__":
    e2e.main()
