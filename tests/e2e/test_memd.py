#!/usr/bin/python3
"""millrace-memd lends memory: to the store that ships in the switch, over the soft transport between namespaces, and
over the kernel's Soft-RoCE in a guest, where the lender's process may be stopped without anybody noticing."""

import json
import os
import re
import signal
import sys

import e2e

sys.path.insert(0, os.path.join(e2e.ROOT, "testbed"))
from network import NAMESPACE, RXE_GUEST, Network  # noqa: E402

BUDGET_S = 200
BORROWER, GUEST, OTHER = 1, 2, 3


class Servers(Network):
    def guest_folders(self):
        return [os.path.dirname(os.path.dirname(e2e.binary("millrace-memd")))]


def lines(process):
    """The JSON objects that it has printed whole."""
    return [json.loads(line) for line in process.stdout().splitlines(keepends=True) if line.endswith("\n")]


class MemdTest(e2e.LabTest):
    HOSTS = [NAMESPACE, NAMESPACE, NAMESPACE]
    # And what is said a tenth of a second later, when the lender has been asked again.
    ENDED = "ended the lease|rejected the connection|did not answer"

    @classmethod
    def setUpClass(cls):
        cls.network = cls.enterClassContext(Servers(hosts=cls.HOSTS, bridge=True, name=cls.__name__,
                                                    logs=os.path.join(e2e.logs_directory(), "e2e")))

    def tearDown(self):
        for process in self.network.processes:
            if process.poll() is None:
                process.kill()

    def name(self, suffix):
        return f"{self.id().rpartition('.')[2]}-{suffix}"

    def memd(self, host, *arguments, ipv6=False):
        process = self.network.start(self.name(f"memd{host}"), [
            e2e.binary("millrace-memd"), "--listen", self.network.address(host, ipv6), "--size", "8MiB", "--json",
            "--status", "0.5", *arguments], host=host)

        def ready():
            self.assertIsNone(process.poll(), process.stderr())
            return lines(process)
        return process, self.wait_for(ready, 60, "a lender")[0]

    def store(self, *lenders, arguments=(), ipv6=False):
        return self.network.start(self.name("store"), [
            e2e.binary("store_probe"), *(self.network.address(host, ipv6) for host in lenders), "--device", "eth0",
            *arguments], host=BORROWER)

    def last(self, store, condition, seconds, what):
        """The store's newest line, once it meets the condition."""
        def met():
            self.assertIsNone(store.poll(), store.stderr() + store.stdout())
            seen = lines(store)
            return seen[-1] if seen and condition(seen[-1]) else None
        return self.wait_for(met, seconds, what)

    def assert_all_back(self, store, lost=0):
        self.assertEqual(store.wait(60), 0, store.stderr() + store.stdout())
        end = lines(store)[-1]
        self.assertEqual((end["event"], end["wrong"]), ("end", 0))
        self.assertEqual(end["lost"], lost)
        self.assertEqual(sum(lender["written"] for lender in end["lenders"]), end["read"] + lost)
        return end


class Soft(MemdTest):
    def test_what_is_lent_brings_back_what_was_written(self):
        memd, ready = self.memd(OTHER)
        # It says what it took, and why.
        self.assertRegex(ready["transport"], r"^soft on eth0 .*; no verbs: no RDMA device .*\(asked for auto\)$")
        store = self.store(OTHER, arguments=("--seconds", "3"))
        end = self.assert_all_back(store)
        self.assertGreater(end["read"], 200)
        lease = self.wait_for(lambda: lines(memd)[-1]["leases_ended"] == 1 and lines(memd), 10, "the lease's end")
        written = max(one["leases"][0]["writes"] for one in lease if one.get("leases"))
        self.assertGreaterEqual(end["lenders"][0]["written"], written)
        self.assertGreater(written, 0)
        self.assertEqual(lines(memd)[-1]["leases"], [])
        self.assertEqual(memd.stop(), 0, memd.stderr())

    def test_the_same_over_ipv6(self):
        memd, _ = self.memd(OTHER, ipv6=True)
        # Packets of full length: their headers are longer, too.
        store = self.store(OTHER, arguments=("--seconds", "2", "--bytes", "4174"), ipv6=True)
        end = self.assert_all_back(store)
        self.assertGreater(end["read"], 100)
        self.assertEqual(memd.stop(), 0, memd.stderr())
        borrowers = {lease["switch"] for line in lines(memd) for lease in line.get("leases", ())}
        self.assertEqual(borrowers, {self.network.address(BORROWER, ipv6=True)})

    def test_a_lender_that_ends_says_so(self):
        memd, _ = self.memd(OTHER)
        store = self.store(OTHER, arguments=("--seconds", "60"))
        self.last(store, lambda line: line["read"] > 100, 20, "packets read back")
        memd.signal(signal.SIGTERM)
        self.assertEqual(memd.wait(10), 0, memd.stderr())
        self.assertEqual(lines(memd)[-1]["event"], "end")
        line = self.last(store, lambda one: not one["lenders"][0]["connected"], 5, "the lease's end noticed")
        self.assertRegex(line["lenders"][0]["why"], self.ENDED)
        store.signal(signal.SIGTERM)
        self.assertEqual(store.wait(30), 0, store.stdout())

    def test_a_lenders_death_loses_what_it_held_and_no_more(self):
        lenders = [self.memd(host)[0] for host in (GUEST, OTHER)]
        store = self.store(GUEST, OTHER, arguments=("--seconds", "60", "--peer-dead-ms", "1000", "--held", "200"))
        self.last(store, lambda line: all(one["read"] > 100 for one in line["lenders"]), 20, "both lend")
        lenders[1].kill()
        line = self.last(store, lambda one: one["lenders"][1]["deaths"] == 1, 20, "the death noticed")
        self.assertIn("has not acknowledged anything", line["lenders"][1]["why"])
        lost = line["lost"]
        self.assertEqual(line["lenders"][1]["lost"], lost)
        self.assertGreater(lost, 0)
        self.assertLessEqual(lost, 200)
        before = line["lenders"][0]["read"]
        self.last(store, lambda one: one["lenders"][0]["read"] > before + 100, 20, "the other lends on")
        # And it is taken again when it is back.
        again, _ = self.memd(OTHER)
        line = self.last(store, lambda one: one["lenders"][1]["connects"] == 2, 30, "it lends again")
        before = line["lenders"][1]["read"]
        self.last(store, lambda one: one["lenders"][1]["read"] > before + 50, 20, "packets read back")
        store.signal(signal.SIGTERM)
        self.assert_all_back(store, lost)
        self.assertEqual(again.stop(), 0)

    def test_one_part_each_and_a_refusal_that_says_why(self):
        memd, _ = self.memd(OTHER, "--leases", "1")
        first = self.store(OTHER, arguments=("--seconds", "60"))
        self.last(first, lambda line: line["read"] > 10, 20, "the first borrows")
        # The soft transport's port is one a host, so the second borrower is another host.
        second = self.network.start(self.name("second"), [
            e2e.binary("store_probe"), self.network.address(OTHER), "--device", "eth0", "--seconds", "4"], host=GUEST)
        self.assertEqual(second.wait(60), 0, second.stderr() + second.stdout())
        end = lines(second)[-1]
        self.assertEqual(end["read"], 0)
        seen = " ".join(line["lenders"][0]["why"] for line in lines(second))
        self.assertIn("refused: all is lent: 1 of 1 parts", seen)
        first.signal(signal.SIGTERM)
        self.assert_all_back(first)
        self.assertGreaterEqual(lines(memd)[-1]["leases_refused"], 1)

    def test_mistakes_are_said_in_one_sentence(self):
        for arguments, code, text in (
                (("--size", "many"), 2, r'--size: "many" is no size'),
                (("--size", "1K"), 2, r"1024 B cannot be lent in 1 parts of at least 4096 B"),
                (("--listen", "10.1.2.3"), 2, r"no interface of this host has the address 10\.1\.2\.3"),
                (("--listen", "10.77.0"), 2, r'--listen: "10\.77\.0" is no address'),
                (("--listen", "10.77.0.3:0"), 2, r"is no address"),
                (("--listen", "10.77.0.3", "--transport", "verbs"), 1, r"no RDMA device"),
                ((), 2, r"say where to lend")):
            process = self.network.start(self.name("wrong"), [e2e.binary("millrace-memd"), *arguments], host=OTHER)
            self.assertEqual(process.wait(10), code, process.stdout())
            self.assertRegex(process.stderr(), r"^millrace-memd: .*" + text)
            self.assertEqual(process.stderr().count("\n"), 1)


class Verbs(MemdTest):
    HOSTS = [NAMESPACE, RXE_GUEST, NAMESPACE]

    def test_a_stopped_lender_goes_on_lending(self):
        # Bar 7: no CPU of the lender's process on the data path. A soft lender beside it shows what one notices.
        memd, ready = self.memd(GUEST)
        self.assertRegex(ready["transport"], r"^verbs on rxe0 port 1 \(eth0, RoCE path MTU up to 4096\)")
        store = self.store(GUEST, arguments=("--seconds", "120", "--held", "32"))
        before = self.last(store, lambda line: line["read"] > 50, 60, "packets read back")
        self.assertTrue(before["lenders"][0]["connected"])
        memd.signal(signal.SIGSTOP)
        state = self.network.guests[GUEST].sh(f"cat /proc/{memd.pid}/status")[1]
        self.assertRegex(state, re.compile(r"^State:\s+T", re.MULTILINE))
        stopped = self.last(store, lambda line: line["seconds"] > before["seconds"] + 2, 20, "time")
        after = self.last(store, lambda line: line["seconds"] > stopped["seconds"] + 10, 60, "time")
        self.assertGreater(after["read"], stopped["read"] + 100)
        self.assertTrue(after["lenders"][0]["connected"])
        self.assertEqual((after["lost"], after["wrong"]), (0, 0))
        state = self.network.guests[GUEST].sh(f"cat /proc/{memd.pid}/status")[1]
        self.assertRegex(state, re.compile(r"^State:\s+T", re.MULTILINE))
        memd.signal(signal.SIGCONT)
        self.last(store, lambda line: line["read"] > after["read"] + 50, 30, "it goes on")
        store.signal(signal.SIGTERM)
        self.assert_all_back(store)
        self.wait_for(lambda: lines(memd)[-1]["leases_ended"] == 1, 10, "the lease's end")
        self.assertEqual(lines(memd)[-1]["leases_died"], 0)
        self.assertEqual(memd.stop(), 0, memd.stderr())

    def test_a_device_and_a_soft_lender_are_one_pool(self):
        memds = [self.memd(host)[0] for host in (GUEST, OTHER)]
        store = self.store(GUEST, OTHER, arguments=("--seconds", "120", "--held", "100"))
        self.last(store, lambda line: all(one["read"] > 30 for one in line["lenders"]), 60, "both lend")
        # The lender on the device ends: a DREQ, and what it held is lost.
        memds[0].signal(signal.SIGTERM)
        self.assertEqual(memds[0].wait(20), 0, memds[0].stderr())
        line = self.last(store, lambda one: one["lenders"][0]["deaths"] == 1, 10, "its end noticed")
        self.assertRegex(line["lenders"][0]["why"], self.ENDED)
        lost = line["lenders"][0]["lost"]
        store.signal(signal.SIGTERM)
        end = self.assert_all_back(store, lost)
        self.assertEqual(end["lenders"][1]["lost"], 0)


class SwitchTest(e2e.LabTest):
    """A switch whose port to host 2 is slow and whose spillway lives in what host 3 lends."""
    SENDER, RECEIVER, LENDER = 1, 2, 3
    COUNT, RATE_MBPS = 1000, 10  # the burst comes at some 44 Mb/s

    def start(self, kind, ipv6=False):
        """ipv6: the lender is known by an IPv6 address; the burst itself is of IPv4 all the same."""
        address = Network.address(self.LENDER, ipv6=ipv6)
        overrides = {
            "addresses": [Network.switch_address() + "/24", Network.switch_address(ipv6=True) + "/64"],
            "qos": {"PORT": {f"p{self.RECEIVER}": {"rate_mbps": self.RATE_MBPS}},
                    "BUFFER_PROFILE": {"spilling": {"static_th": "64KiB", "packet_discard_action": "spill"}},
                    "BUFFER_QUEUE": {f"p{self.RECEIVER}|0": {"profile": "spilling"}}},
            "spillway": {"spill_dscp": [10], "max_residence_ms": 30000, "spill_mark_ce": False,
                         "spill_lenders": [{"address": address}],
                         "spill_lender_dead_ms": 5000}}
        lab = self.enterContext(self.lab(hosts=[NAMESPACE, NAMESPACE, kind], overrides=overrides))
        memd = lab.start("memd", [e2e.binary("millrace-memd"), "--listen", address, "--size", "8MiB", "--json",
                                  "--status", "0.5"], host=self.LENDER)
        self.wait_for(lambda: self.lender(lab)["state"] == "connected", 60, "a lease")
        return lab, memd

    @staticmethod
    def lender(lab):
        return lab.ask("spillway")["lenders"][0]

    def burst(self, lab, name, count):
        """A burst at the slow port; what came of it."""
        tool = ["/usr/bin/python3", os.path.join(e2e.ROOT, "tests/e2e/burst.py")]
        receiver = lab.start(f"receive-{name}", [*tool, "receive", "--count", count], host=self.RECEIVER)
        self.wait_for(receiver.stdout, 10, "a receiver")
        lab.run(self.RECEIVER, "ping", "-c", "1", lab.address(self.SENDER))  # so that its port is learned
        lab.run(self.SENDER, *tool, "send", "--count", str(count), "--source", lab.address(self.SENDER),
                "--destination", lab.address(self.RECEIVER), "--destination-mac", lab.mac(self.RECEIVER))
        self.assertEqual(receiver.wait(90), 0, receiver.stderr())
        return json.loads(receiver.stdout().splitlines()[-1])

    def assert_all_in_order(self, lab, got, count, before=0):
        spillway = lab.ask("spillway")
        self.assertEqual(got, {"received": count, "distinct": count, "wrong": 0, "disordered": 0}, spillway)
        lender = spillway["lenders"][0]
        self.assertGreater(lender["written"] - before, count // 2)
        self.assertEqual((lender["read"], lender["lost"], lender["held"]), (lender["written"], 0, 0))
        self.assertEqual(spillway["all"]["drained"]["packets"], lender["written"])
        return lender["written"]

    def test_what_does_not_fit_goes_to_the_lender_and_comes_back_in_order(self):
        self.check_that_all_comes_back(ipv6=False)

    def test_an_ipv6_lender_is_found_by_neighbour_discovery_and_serves_as_well(self):
        self.check_that_all_comes_back(ipv6=True)

    def check_that_all_comes_back(self, ipv6):
        lab, memd = self.start(NAMESPACE, ipv6)
        self.assert_all_in_order(lab, self.burst(lab, "soft", self.COUNT), self.COUNT)
        switch = self.lender(lab)
        self.assertEqual(switch["address"], Network.address(self.LENDER, ipv6=ipv6))
        # What the lender itself has counted, too. Bytes: packets share WRITEs and READs.
        leases = self.wait_for(lambda: (of := lines(memd)[-1]["leases"]) and
                               of[0]["bytes_read"] >= switch["bytes_read"] and of, 10, "the lender's count")
        self.assertEqual((leases[0]["switch"], leases[0]["bytes_written"]),
                         (lab.switch_address(ipv6=ipv6), switch["bytes_written"]))
        # A lease ends with the switch, and the switch does not wait for long.
        lab.stop_switch()
        self.wait_for(lambda: lines(memd)[-1]["leases_ended"] == 1, 10, "the lease's end")
        self.assertEqual(memd.stop(), 0, memd.stderr())

    def test_a_stopped_lender_serves_the_spillway(self):
        # Bar 7 with the switch: the lender's process has no part in it.
        lab, memd = self.start(RXE_GUEST)
        self.assertRegex(lines(memd)[0]["transport"], "^verbs on rxe0")
        written = self.assert_all_in_order(lab, self.burst(lab, "running", 400), 400)
        memd.signal(signal.SIGSTOP)
        state = lab.guests[self.LENDER].sh(f"cat /proc/{memd.pid}/status")[1]
        self.assertRegex(state, re.compile(r"^State:\s+T", re.MULTILINE))
        self.assert_all_in_order(lab, self.burst(lab, "stopped", 400), 400, before=written)
        memd.signal(signal.SIGCONT)
        lab.stop_switch()
        self.wait_for(lambda: lines(memd)[-1]["leases_ended"] == 1, 20, "the lease's end")
        self.assertEqual(memd.stop(), 0, memd.stderr())


if __name__ == "__main__":
    e2e.main()
