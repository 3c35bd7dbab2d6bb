#!/usr/bin/python3
"""The traffic manager of the real switch, configured in SONiC's terms: a port that is shaped to less than it is sent
drops, or spills and drains in order; all-reduces go through the same queues. Nothing here depends on how fast anything
is."""

import json
import os
import subprocess
import sys

import e2e

BUDGET_S = 45
STREAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stream.py")
COUNT, BYTES, DSCP, QUEUE = 3000, 1400, 10, 1


def qos(action, limit=60_000):
    return {
        "PORT": {"p2": {"rate_mbps": 50}},
        "BUFFER_PROFILE": {"remote": {"static_th": limit, "packet_discard_action": action}},
        "BUFFER_QUEUE": {"*|1": {"profile": "remote"}},
        "WRED_PROFILE": {"early": {"green_min_threshold": 20_000, "green_max_threshold": 40_000}},
        "QUEUE": {"*|1": {"wred_profile": "early"}},
        "DSCP_TO_TC_MAP": {"map": {DSCP: QUEUE}},
        "PORT_QOS_MAP": {"*": {"dscp_to_tc_map": "map"}},
    }


SPILLWAY = {"spill_dscp": DSCP, "spill_pool_size": "16MiB", "max_residence_ms": 60_000}


class Qos(e2e.LabTest):
    def stream(self, lab):
        """From host 1 to host 2; what the receiver counted."""
        lab.run(1, "ping", "-c", "1", "-W", "2", lab.address(2))
        receiver = lab.start("receive", [sys.executable, STREAM, "receive", "--idle", 3], host=2)
        self.wait_for(lambda: "listening" in receiver.stdout(), 10, "the receiver's socket")
        sender = lab.start("send", [sys.executable, STREAM, "send", lab.address(2), "--count", COUNT, "--bytes", BYTES,
                                    "--dscp", DSCP], host=1)
        self.wait_for(lambda: sender.poll() is not None and receiver.poll() is not None, 30, "the stream's end")
        self.assertEqual((sender.poll(), receiver.poll()), (0, 0), sender.stderr() + receiver.stderr())
        counted = json.loads(receiver.stdout().splitlines()[-1])
        print(counted)
        return counted

    def queue(self, lab):
        buffers = lab.ask("buffers")
        port = next(p for p in buffers["ports"] if p["name"] == "p2")
        self.assertEqual(buffers["pool"]["used"], 0)
        return port["queues"][QUEUE]

    def ctl(self, lab, *command):
        return subprocess.run([e2e.binary("millracectl"), "--socket", lab.read_socket, *command], check=True, text=True,
                              capture_output=True, timeout=20).stdout

    def test_what_does_not_fit_is_spilled_and_drains_in_order(self):
        with self.lab(hosts=2, overrides={"qos": qos("spill"), "spillway": SPILLWAY}) as lab:
            counted = self.stream(lab)
            queue, spillway = self.queue(lab), lab.ask("spillway")
            print(queue, spillway["all"])
            # Of what the switch was given, all has arrived: kernels before and behind it may have lost some.
            self.assertGreater(queue["arrived"]["packets"], COUNT * 0.9)
            self.assertEqual(queue["dropped"]["packets"], 0)
            self.assertEqual(queue["sent"], queue["arrived"])
            self.assertEqual(counted["received"], queue["sent"]["packets"])
            self.assertEqual(counted["out_of_order"], 0)
            everything = spillway["all"]
            self.assertGreater(everything["spilled"]["packets"], 100)
            self.assertEqual(everything["spilled"]["bytes"], everything["spilled"]["packets"] * BYTES)
            self.assertEqual(everything["drained"], everything["spilled"])
            self.assertEqual([everything[k]["packets"] for k in ("resident", "refused", "lost", "rerouted")], [0] * 4)
            self.assertEqual(spillway["keys_count"], 0)
            # Marked in the queue, or as they left the spillway while it grew: a packet is counted where it was not marked before.
            self.assertEqual(counted["marked"], queue["ce_marked"] + everything["ce_marked"])
            self.assertGreater(counted["marked"], 100)
            self.assertIn("p2", self.ctl(lab, "buffers"))
            self.assertIn("SPILLED", self.ctl(lab, "spillway"))

    def test_what_does_not_fit_is_dropped_by_name(self):
        with self.lab(hosts=2, overrides={"qos": qos("drop")}) as lab:
            counted = self.stream(lab)
            queue = self.queue(lab)
            print(queue)
            self.assertGreater(queue["dropped"]["packets"], 100)
            self.assertEqual(queue["dropped_by"], {"queue_full": queue["dropped"]})
            self.assertEqual(queue["sent"]["packets"] + queue["dropped"]["packets"], queue["arrived"]["packets"])
            self.assertEqual(counted["received"], queue["sent"]["packets"])
            self.assertEqual(counted["out_of_order"], 0)
            self.assertLessEqual(queue["bytes_max"], 60_000)
            counters = lab.counters()
            self.assertEqual(counters["ports.p2.qos.dropped.queue_full.packets"], queue["dropped"]["packets"])
            self.assertIn("no spillway", self.ctl(lab, "spillway"))

    def test_all_reduces_go_through_the_same_queues(self):
        shaped = {"PORT": {"*": {"rate_mbps": 400}}, "ack_tc": 5}
        with self.lab(hosts=3, overrides={"qos": shaped}) as lab:
            before = lab.ask("status")
            self.assert_exact(lab.perf("-b", "4K", "-e", "1M", "-f", "16", "-n", "3", "-w", "1", timeout=60),
                              ranks=3)
            buffers = lab.ask("buffers")
            for port in buffers["ports"]:
                data, acks = port["queues"][0], port["queues"][5]
                self.assertGreater(data["sent"]["packets"], 256, "results: 1 MiB at least, 4 KiB each")
                self.assertGreater(acks["sent"]["packets"], 0, "a class of their own")
                self.assertEqual(sum(q["dropped"]["packets"] for q in port["queues"]), 0)
            self.assert_frames_return(lab, before)

    def test_devices_without_pfc_leave_it_to_the_traffic_manager_and_it_is_told(self):
        lossless = {"BUFFER_PROFILE": {"lossless": {"dynamic_th": 0, "xoff": "96KiB"}},
                    "BUFFER_PG": {"*|3": {"profile": "lossless"}},
                    "PORT_QOS_MAP": {"*": {"pfc_enable": "3"}}}
        with self.lab(hosts=2, overrides={"qos": lossless}) as lab:
            for port in lab.ask("buffers")["ports"]:
                self.assertEqual(port["pfc_mode"], "software")
                self.assertIn("does not send pauses of priority 3 (by priority: priority 3: ", port["pfc_why"])
            listing = self.ctl(lab, "buffers")
            print(listing, lab.switch.stderr())
            self.assertIn("p1  pfc: software (the device does not", listing)
            told = [line for line in lab.switch.stderr().splitlines() if "PFC in" in line]
            self.assertEqual(len(told), 2, told)
            self.assertIn("port p1: PFC in software: the device does not", told[0])
        with self.lab(hosts=2, switch=False, overrides={"qos": lossless | {"PORT": {"p2": {"pfc_hardware": "on"}}}}) as lab:
            with self.assertRaisesRegex(Exception, "port p2: .*pfc_hardware is on, but the device does not send"):
                lab.start_switch()
            self.assertEqual(lab.switch.poll(), 1)

    def test_a_wrong_value_is_refused_with_its_line(self):
        with self.lab(hosts=2, switch=False) as lab:
            path = os.path.join(lab.directory, "wrong.yaml")
            with open(path, "w") as file:
                file.write("name: leaf1\naddresses: [10.77.0.100]\nports:\n  - {name: p1, device: net_null0}\n"
                           "qos:\n  SCHEDULER:\n    s: {type: DWRR, weight: 101}\n")
            checked = subprocess.run([e2e.binary("millrace-switch"), "--config", path, "--check"], text=True,
                                     capture_output=True, timeout=20)
            self.assertEqual(checked.returncode, 1)
            self.assertEqual(checked.stderr, f"millrace-switch: {path}:7: qos.SCHEDULER.s.weight: '101' is not a whole "
                                             "number in 1 … 100\n")


if __name__ == "__main__":
    e2e.main()
