#!/usr/bin/python3
"""Whether remote spill fills a port: one switch between a sender, a receiver whose port the traffic manager shapes, and a
lender of memory, each in a network namespace. The sender offers more than the port carries, by a window of many
packets, so that the spillway fills and all packets of the flow pass through the lent memory, in order, until the end.
What the port carries meanwhile is read at the receiver's interface and from the port's own counters."""

import argparse
import json
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "testbed"))
from lab import Lab, LabError, binary, logs_directory  # noqa: E402

SENDER, RECEIVER, LENDER = 1, 2, 3
DSCP, QUEUE = 26, 3
QUEUE_BYTES = 100_000
WIRE_OVERHEAD = 24  # FCS, preamble and gap, of each frame (IEEE 802.3)
QPNS = {SENDER: 0x1001, RECEIVER: 0x1002}
PORT = f"p{RECEIVER}"
POLL_S = 0.05


def qos(options):
    return {
        "addresses": ["10.77.0.100/24"],
        "qos": {
            "PORT": {PORT: {"rate_mbps": options.port_mbps}},
            "DSCP_TO_TC_MAP": {"lab": {DSCP: QUEUE}},
            "PORT_QOS_MAP": {"*": {"dscp_to_tc_map": "lab"}},
            "BUFFER_PROFILE": {"lossy": {"static_th": QUEUE_BYTES, "packet_discard_action": "spill"}},
            "BUFFER_QUEUE": {f"{PORT}|{QUEUE}": {"profile": "lossy"}},
        },
        # Nobody marks, so that nobody slows down; a machine that is busy stops for longer than any residence that a
        # real switch would allow.
        "spillway": {"spill_dscp": [DSCP], "spill_pool_size": "512MiB", "spill_mark_ce": False,
                     "max_residence_ms": 60_000,
                     **({"spill_lenders": [{"address": Lab.address(LENDER)}], "spill_lender_dead_ms": 30_000,
                         **({"spill_lender_reads": options.reads} if options.reads else {})}
                        if options.store == "remote" else {"spill_frames_max": 131072})},
    }


class Bench(Lab):
    def __init__(self, options):
        frames = 16384 + (131072 if options.store == "local" else 0)
        super().__init__(hosts=3, name="remote_spill", overrides={
            **qos(options), "idle": {"spin_us": options.spin_us, "sleep_us_max": 100},
            "aggregation": {"port": 18600, "mtu": 4096, "memory_limit": "32MiB"},
            "eal": ["--no-huge", "-m", str(512 + (frames * 5120 >> 20))]})
        self.options = options

    def start(self, name, command, host=None, environment=None):
        if name == "switch" and self.options.perf:
            command = command[:4] + ["perf", "record", "-g", "-F", "997", "-o", self.options.perf, "--"] + command[4:]
        process = super().start(name, command, host=host, environment=environment)
        if self.options.realtime:
            os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
        return process

    def _port(self, name, index, interface, seed=0):
        # A ring that outlasts the time for which others may have the processors.
        port = super()._port(name, index, interface, seed)
        return port | {"device": port["device"].replace("framecnt=512", "framecnt=4096")}

    def start_lender(self):
        memd = self.start("memd", [binary("millrace-memd"), "--listen", self.address(LENDER), "--size", "512MiB",
                                   "--transport", "soft"], host=LENDER)
        deadline = time.monotonic() + 30
        while (lender := self.ask("spillway")["lenders"][0])["state"] != "connected":
            if memd.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"the lender lends nothing: {memd.stderr().strip() or lender}")
            time.sleep(0.05)

    def flow(self, name, host, peer, send, receive):
        o = self.options
        return self.start(name, [
            binary("millrace-flow"), "--mtu", o.mtu, "--window", o.window, "--dscp", DSCP, "--seconds", 120,
            "--timeout-ms", 20_000, "--message", 8 * o.mtu, "--line-rate-mbps", 100_000, "--begin",
            os.path.join(self.directory, "go"), "--connect",
            f"{QPNS[host]},{self.address(peer)},{QPNS[peer]},{send},{receive}"], host=host)

    def sample(self):
        """(seconds, packets and bytes that the port has sent, packets in the spillway, that came out of it)"""
        asked = time.monotonic()
        port = next(p for p in self.ask("buffers")["ports"] if p["name"] == PORT)
        at = (asked + time.monotonic()) / 2
        spill = next(p for p in self.ask("spillway")["ports"] if p["name"] == PORT)
        sent = [queue["sent"] for queue in port["queues"]]
        return (at, sum(s["packets"] for s in sent), sum(s["bytes"] for s in sent), spill["resident"]["packets"],
                spill["drained"]["packets"])

    def received(self, receiver):
        """(seconds, packets and bytes that have come to the receiver's interface)"""
        with open(f"/proc/{receiver.pid}/net/dev") as file:
            line = next(line for line in file if line.strip().startswith("eth0:"))
        octets, packets = map(int, line.partition(":")[2].split()[:2])
        return time.monotonic(), packets, octets


def ended(process):
    """The counters of a flow that was told to end."""
    process.signal(15)
    if process.wait(20) != 0:
        raise LabError(f"{process.name} ended with {process.poll()}: {process.stderr().strip()}")
    return next(event for line in process.stdout().splitlines() if (event := json.loads(line))["event"] == "end")


def wait_for(what, processes, seconds):
    deadline = time.monotonic() + seconds
    while not all(f'"{what}"' in process.stdout() for process in processes):
        for process in processes:
            if process.poll() is not None:
                raise LabError(f"{process.name} ended with {process.poll()}: {process.stderr().strip()}")
        if time.monotonic() > deadline:
            raise LabError(f"not {what} within {seconds} s")
        time.sleep(POLL_S / 5)


def cpu_seconds(process):
    """Of a process and its threads; ip-netns-exec becomes what it starts."""
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return 0.0


def wire_mbps(first, last):
    (t0, p0, b0, *_), (t1, p1, b1, *_) = first, last
    return 8e-6 * (b1 - b0 + WIRE_OVERHEAD * (p1 - p0)) / (t1 - t0)


def measure(options):
    total = options.megabytes << 20
    with Bench(options) as lab:
        if options.realtime:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
        if options.store == "remote":
            lab.start_lender()
        if options.offer_mbps:
            lab.run(SENDER, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{options.offer_mbps}mbit",
                    "burst", "256kb", "limit", "4mb")
        flows = [lab.flow("receiver", RECEIVER, SENDER, 0, total), lab.flow("sender", SENDER, RECEIVER, total, 0)]
        wait_for("ready", flows, 30)
        open(os.path.join(lab.directory, "go"), "w").close()
        # From when something is kept until nothing is: the phase in which packets come from the store.
        samples, at_interface = [], []
        while not samples or '"done"' not in flows[1].stdout():
            sample = lab.sample()
            if sample[3] and sample[4]:
                if not samples:
                    at_interface.append(lab.received(flows[0]))
                    began = {p.name: cpu_seconds(p) for p in lab.processes}
                samples.append(sample)
                if sample[3] > 256:
                    at_interface[1:] = [lab.received(flows[0])]
                    ended_at = {p.name: cpu_seconds(p) for p in lab.processes}
            if flows[1].poll() is not None or time.monotonic() - flows[1].started > 110:
                raise LabError("the transfer did not end")
            time.sleep(POLL_S)
        while samples and samples[-1][3] <= 256:  # the end lies between two samples
            samples.pop()
        wait_for("done", flows, 30)
        reports = {process.name: ended(process) for process in flows}
        spillway, buffers = lab.ask("spillway"), lab.ask("buffers")
    return account(options, samples, at_interface, reports, spillway, buffers,
                   {n: (ended_at[n] - began[n]) / (at_interface[1][0] - at_interface[0][0]) for n in began})


def account(options, samples, at_interface, reports, spillway, buffers, cpu):
    if len(samples) < 3:
        raise LabError("hardly anything was spilled: offer more, or send more")
    sender, receiver = (reports[n]["connections"][0] for n in ("sender", "receiver"))
    windows = [wire_mbps(a, b) for a, b in zip(samples, samples[4:])]
    queues = next(p for p in buffers["ports"] if p["name"] == PORT)["queues"]
    spill = spillway["all"]
    return {"store": options.store, "mtu": options.mtu, "port_mbps": options.port_mbps,
            "seconds": round(samples[-1][0] - samples[0][0], 2),
            "mbps_interface": round(wire_mbps(*at_interface), 1),
            "mbps_port": round(wire_mbps(samples[0], samples[-1]), 1),
            "mbps_port_median": round(statistics.median(windows), 1), "mbps_port_worst": round(min(windows), 1),
            "packets": sender["sent"]["packets"], "spilled": spill["spilled"]["packets"],
            "drained": spill["drained"]["packets"], "resident_mb_max": round(spill["resident_bytes_max"] / 1e6, 1),
            "dropped": sum(q["dropped"]["packets"] for q in queues) + spill["refused"]["packets"] +
            spill["lost"]["packets"],
            "out_of_sequence": receiver["received"]["out_of_sequence"], "naks": receiver["received"]["naks_sent"],
            "wrong": receiver["received"]["wrong_packets"], "retransmitted": sender["sent"]["retransmitted"],
            "lenders": spillway["lenders"], "cpu": {n: round(c, 2) for n, c in cpu.items()}}


def complaints(run, options):
    wrong = []
    for what in ("dropped", "out_of_sequence", "naks", "wrong", "retransmitted"):
        if run[what]:
            wrong.append(f"{run[what]} {what.replace('_', ' ')}")
    if run["spilled"] != run["drained"]:
        wrong.append(f"{run['spilled']} spilled, {run['drained']} drained")
    if run["spilled"] < 0.9 * run["packets"]:
        wrong.append(f"only {run['spilled']} of {run['packets']} packets passed through the store")
    if run["mbps_interface"] < options.at_least * options.port_mbps:
        wrong.append(f"{run['mbps_interface']} Mb/s are less than {options.at_least} of {options.port_mbps}")
    return wrong


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mtu", type=int, choices=(256, 512, 1024, 2048, 4096), default=4096,
                        help="RoCE path MTU of the flow (4096)")
    parser.add_argument("--port-mbps", type=int, default=1000, help="rate of the receiver's port (1000)")
    parser.add_argument("--offer-mbps", type=int, default=1500, help="what the sender offers at most; 0: what it can")
    parser.add_argument("--megabytes", type=int, default=384, help="of the transfer, MiB (384)")
    parser.add_argument("--window", type=int, default=4096, help="packets in flight (4096)")
    parser.add_argument("--store", choices=("remote", "local"), default="remote")
    parser.add_argument("--spin-us", type=int, default=20, help="of the switch, before it sleeps (20)")
    parser.add_argument("--reads", type=int, help="spill_lender_reads of the switch (its default)")
    parser.add_argument("--at-least", type=float, default=0.97, help="share of the rate for exit status 0 (0.97)")
    parser.add_argument("--realtime", action="store_true",
                        help="all processes under SCHED_RR: on a machine that does other work, too")
    parser.add_argument("--perf", help="file for perf record of the switch")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main():
    options = parse_options()
    run = measure(options)
    wrong = complaints(run, options)
    if options.json:
        print(json.dumps(run | {"ok": not wrong}))
    else:
        print(f"{run['store']} store, RoCE MTU {run['mtu']}, port of {run['port_mbps']} Mb/s: while packets came from the "
              f"store ({run['seconds']} s) {run['mbps_interface']} Mb/s of wire bytes at the receiver's interface, "
              f"{run['mbps_port']} by the port's counters (of fifths of a second: median {run['mbps_port_median']}, worst "
              f"{run['mbps_port_worst']})\n"
              f"  {run['packets']} packets, {run['spilled']} through the store, at most {run['resident_mb_max']} MB there; "
              f"{run['dropped']} dropped, {run['out_of_sequence']} out of sequence, {run['retransmitted']} sent again\n"
              f"  CPU: " + ", ".join(f"{name} {share}" for name, share in run["cpu"].items()))
        for lender in run["lenders"]:
            print(f"  lender: written {lender['written']}, read {lender['read']}, packets sent {lender['packets_sent']}, "
                  f"sent again {lender['retransmitted']}, READs asked for again {lender['reads_again']}")
        print("FAILED: " + "; ".join(wrong) if wrong else "OK")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, RuntimeError, OSError) as error:
        print(f"remote_spill: {error}", file=sys.stderr)
        sys.exit(1)
