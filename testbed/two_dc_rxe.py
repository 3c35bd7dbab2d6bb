"""The two-datacenter lab with Soft-RoCE guests as the transfer's ends: perftest on the kernel's own go-back-N, which
counts what it finds missing."""

import re
import time

from lab import NAMESPACE, RXE_GUEST, ROOT, LabError
from two_dc_lab import DSCP, HOSTS, LOCAL, QUEUE, RECEIVER, SENDER, Occupancy, TwoDc, port_of
from two_dc_run import (WAIT_S, Flows, account, begin_all_reduce, drops_of, end_all_reduce, settle, wait_for_progress)

# By kind: perftest's program, bytes of a message, how many at once, and who asks. What moves, moves from host 1 to
# host 5: a WRITE is the sender's, a READ the receiver's.
TRAFFIC = {
    "write": [("ib_write_bw", 65536, 8, SENDER)],
    "kv": [("ib_read_bw", 1 << 20, 2, RECEIVER)],
    "storage": [("ib_write_bw", 131072, 32, SENDER), ("ib_read_bw", 131072, 32, RECEIVER)],
}
NOTED = ("out_of_seq_request", "rcvd_seq_err", "completer_retry_err", "duplicate_request", "retry_exceeded_err",
         "sent_pkts", "rcvd_pkts")
# Of a queue pair, 4.096 µs · 2^n: 0.27 s where packets are lost, as nothing else finds the last one; 17 s where none
# may be, as an emulated processor may stop for longer than a real one, and what is sent again in vain tells nothing.
QP_TIMEOUTS = {"off": 16, "local": 22, "remote": 22}


def gid_index(lab, host):
    """Of the guest's IPv4 address; perftest's own choice may be another."""
    digits = "".join(f"{int(part):02x}" for part in lab.address(host).split("."))
    listing = lab.guests[host].sh("cd /sys/class/infiniband/rxe0/ports/1/gids && grep -H . *")[1]
    for line in listing.splitlines():
        number, _, gid = line.partition(":")
        if gid.replace(":", "").endswith("ffff" + digits):
            return int(number)
    raise LabError(f"host {host}'s rxe0 has no GID for {lab.address(host)}:\n{listing}")


def messages(plan, size):
    return max(5, plan.cross_bytes // size)  # perftest's minimum


class Perftest:
    """One of TRAFFIC's entries, under way."""

    def __init__(self, lab, number, program, message, depth, asker):
        self.lab, self.program, plan = lab, program, lab.plan
        server = RECEIVER if asker == SENDER else SENDER
        self.messages = messages(plan, message)
        self.bytes = self.messages * message

        def command(host):
            arguments = [program, "-d", "rxe0", "-x", gid_index(lab, host), "-m", plan.mtu, "-s", message,
                         "-n", self.messages, "-t", depth, "-Q", 1, "-u", QP_TIMEOUTS[lab.mode], "-p", 18515 + number,
                         "-F", f"--tclass={DSCP << 2}"]
            return arguments + (["-o", min(depth, 16)] if "read" in program else [])
        name = f"perftest{number}"
        self.server = lab.start(name + "-server", command(server), host=server)
        self._wait_until_listening(server, 18515 + number)
        self.client = lab.start(name + "-client", command(asker) + [lab.address(server)], host=asker)

    def _wait_until_listening(self, host, port):
        deadline = time.monotonic() + 60
        listening = f":{port:04X} "
        while not any(listening in line and " 0A " in line
                      for line in self.lab.guests[host].sh("cat /proc/net/tcp /proc/net/tcp6")[1].splitlines()):
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"{self.program} does not listen: {self.server.stderr() or self.server.stdout()}")
            time.sleep(0.1)

    def wait(self):
        """MB/s, as it measured."""
        for process in (self.client, self.server):
            if process.wait(WAIT_S) != 0:
                raise LabError(f"{self.program} ended with {process.poll()}: {process.stderr()}{process.stdout()}")
        row = re.search(r"^ *\d+ +\d+ +[\d.]+ +([\d.]+)", self.client.stdout(), re.MULTILINE)
        if not row:
            raise LabError(f"{self.program} measured nothing:\n{self.client.stdout()}")
        return float(row.group(1)) * 2**20 / 1e6


def kernel_counters(lab):
    return {host: lab.rdma_counters(host) for host in (SENDER, RECEIVER)}


def sequence_naks(kernels):
    """Gaps that were found: in requests, by the responder, which NAKs them; in the responses of READs, by the requester,
    host 5, which asks again."""
    return sum(counted["out_of_seq_request"] for counted in kernels.values()) + kernels[RECEIVER]["completer_retry_err"]


def run_mode(mode, plan, name, logs):
    """One mode: its figures. The burst at host 5's port is of datagrams (nothing but rxe may speak RoCE there), and
    of transfers between hosts 6 and 7."""
    types = [RXE_GUEST if host in (SENDER, RECEIVER) else NAMESPACE for host in range(1, HOSTS + 1)]
    with TwoDc(mode, plan, types=types, name=name, logs=logs) as lab:
        if mode == "remote":
            lab.start_lender()
        one, other = others = [host for host in LOCAL if host != RECEIVER]
        burst = Flows(lab, "burst", {a: [(b, plan.burst_bytes, plan.burst_bytes)]
                                     for a, b in ((one, other), (other, one))})
        burst.wait_for("ready")
        before = kernel_counters(lab)
        occupancy = Occupancy(lab)
        occupancy.start()
        transfers = [Perftest(lab, number, *entry) for number, entry in enumerate(TRAFFIC[plan.traffic])]
        wait_for_progress(lab, plan.burst_after / 2)  # guests take their time to begin
        perf = begin_all_reduce(lab)
        burst.go()
        flood = ["/usr/bin/python3", f"{ROOT}/testbed/two_dc_burst.py", lab.address(RECEIVER), plan.burst_bytes,
                 plan.port_mbps, DSCP]
        floods = [lab.start(f"flood-h{host}", flood, host=host) for host in others]
        rates = [transfer.wait() for transfer in transfers]
        burst.wait_for("done")
        if failed := [flood for flood in floods if flood.wait(WAIT_S) != 0]:
            raise LabError(f"the burst: {failed[0].stderr()}")
        all_reduce = end_all_reduce(perf)
        settle(lab)
        occupancy.stop()
        after = kernel_counters(lab)
        kernels = {host: {key: after[host][key] - before[host][key] for key in NOTED if key in after[host]}
                   for host in after}
        told = {"mode": mode, "traffic": plan.traffic, "bytes": (total := sum(t.bytes for t in transfers)),
                "seconds": max(transfer.bytes / rate / 1e6 for transfer, rate in zip(transfers, rates)),
                "sent_again": kernels[SENDER]["sent_pkts"] - total // plan.mtu,
                "mb_per_s": rates, "kernels": kernels,
                "naks": sequence_naks(kernels),
                "burst": account(burst.end(), [(one, other), (other, one)]), "all_reduce": all_reduce}
        return told | figures_of_rxe(lab, occupancy)


def figures_of_rxe(lab, occupancy):
    """What is dropped where there is spilling may only be the burst's datagrams."""
    queue_drops, spill_drops = drops_of(lab)
    queue = port_of(lab.buffers(), lab.receiver_port())["queues"][QUEUE]
    spillway = lab.spillway()
    spill = port_of(spillway, lab.receiver_port()) if spillway["enabled"] else None
    return {"drops": queue_drops + spill_drops, "eligible_drops": spill_drops if spill else None,
            "queue_bytes_max": queue["bytes_max"], "resident_bytes_max": spill["resident_bytes_max"] if spill else 0,
            "spilled": spill["spilled"] if spill else None, "drained": spill["drained"] if spill else None,
            "lenders": spillway.get("lenders", []), "mbps_while_spilled": occupancy.mbps_while_spilled(),
            "occupancy": occupancy.samples}


def introduction(plan):
    programs = " and ".join(f"{program} of {messages(plan, size)} times {size} B, {depth} deep"
                            for program, size, depth, _ in TRAFFIC[plan.traffic])
    return [f"between Soft-RoCE guests, {programs}, move data from host 1 to host 5 in the other datacenter, "
            f"{plan.delay_us / 1000:g} ms away by a link of {plan.link_mbps} Mb/s; ports of {plan.port_mbps} Mb/s there",
            f"the burst: hosts 6 and 7 send {plan.burst_bytes} B to each other and, as datagrams, which may be dropped, "
            f"to host 5; meanwhile {len(plan.all_reduce_hosts)} hosts sum {plan.all_reduce_bytes} B in the network",
            "NAKs: gaps in sequence that the guests' kernels counted; sent again: packets of their rxe, and the burst's"]


def complaints(run, plan):
    wrong, mode = [], run["mode"]
    if run["all_reduce"]["wrong"] or run["burst"]["wrong"]:
        wrong.append("wrong bytes")
    if dead := sum(counted.get("retry_exceeded_err", 0) for counted in run["kernels"].values()):
        wrong.append(f"{dead} queue pairs gave up")
    if mode == "off":
        if not run["naks"]:
            wrong.append("nothing collided: without spilling, no packet was missed")
    else:
        if run["eligible_drops"]:
            wrong.append(f"{run['eligible_drops']} eligible packets were dropped")
        if run["naks"]:
            wrong.append(f"{run['naks']} sequence errors")
        if not run["spilled"]["packets"] or run["spilled"] != run["drained"]:
            wrong.append(f"{run['spilled']} spilled, {run['drained']} drained")
    return wrong


def table_line(run):
    return (run["mode"], f"{run['seconds']:.2f}", f"{run['burst']['seconds']:.2f}",
            f"{1000 * run['all_reduce']['seconds']:.1f}", run["drops"],
            "-" if run["eligible_drops"] is None else run["eligible_drops"], run["naks"],
            f"{run['sent_again']} + {run['burst']['retransmitted']}", f"{run['queue_bytes_max'] / 1000:.0f}",
            f"{run['resident_bytes_max'] / 1000:.0f}", run["mbps_while_spilled"] or "-", run["burst"]["wrong"] + run["all_reduce"]["wrong"])
