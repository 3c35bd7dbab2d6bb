"""Two datacenters in namespaces: leaf1 with hosts 1 … 4 in one, leaf2 with hosts 5 … 8 in the other, joined by one long
link. Host 1's transfer crosses it to host 5, whose port at leaf2 is where it collides with what is local there. Host 8
lends memory."""

import threading
import time

from fabric import LINK4, LINK6, Fabric
from lab import LabError, binary, merge
from process import run

__all__ = ["DSCP", "HOSTS", "LENDER", "LOCAL", "MODES", "QUEUE", "QUEUE_BYTES", "RECEIVER", "SENDER", "Occupancy",
           "Plan", "TwoDc", "port_of"]

MODES = ("off", "local", "remote")
SENDER, RECEIVER, LOCAL, LENDER = 1, 5, (5, 6, 7), 8
HOSTS = 8
DSCP = 26
QUEUE = 3            # of the transfers; the all-reduce keeps to queue 0
QUEUE_BYTES = 100_000
POLL_S = 0.02


class Plan:
    """Sizes in bytes, rates in Mb/s. eligible: "all" that is transferred, or "remote": only what comes from the other
    datacenter. traffic: of guests, see two_dc_rxe.TRAFFIC. burst_after: when this share of the transfer has arrived.
    window: packets in flight per flow; the rings between namespaces hold all that the windows of one wire allow, so
    that only the queue can lose something. ipv6: all RoCE is over IPv6, the lender's, too."""

    def __init__(self, port_mbps=100, link_mbps=200, delay_us=5000, cross_bytes=8 << 20, burst_bytes=1 << 20,
                 burst_after=0.25, window=32, mtu=4096, all_reduce_bytes=64 << 10, all_reduces=40,
                 all_reduce_hosts=(1, 2, 3, 5, 6, 7), eligible="all", traffic=None, ipv6=False):
        self.port_mbps, self.link_mbps, self.delay_us = port_mbps, link_mbps, delay_us
        self.cross_bytes, self.burst_bytes = cross_bytes, burst_bytes
        self.burst_after, self.window, self.mtu = burst_after, window, mtu
        self.all_reduce_hosts = all_reduce_hosts
        self.all_reduce_bytes, self.all_reduces = all_reduce_bytes, all_reduces
        self.eligible, self.traffic, self.ipv6 = eligible, traffic, ipv6


class TwoDc(Fabric):
    """mode: of MODES. The rest: see Fabric."""

    def __init__(self, mode, plan, types=None, **options):
        super().__init__(leaves=2, hosts_per_leaf=HOSTS // 2, spines=0, tree=True, types=types, ipv6=plan.ipv6,
                         **options)
        self.mode, self.plan = mode, plan

    # The network.

    def roce_address(self, host):
        """Of the family that the plan is about."""
        return self.address(host, self.plan.ipv6)

    def _join_switches(self):
        ends = (self.namespace_of("leaf1"), "long1", self.namespace_of("leaf2"), "long2")
        self._add_wire(*ends)
        for namespace, device in (ends[:2], ends[2:]):
            run("ip", "-n", namespace, "link", "set", device, "up")

    def _ports(self, name):
        number = int(name[-1])
        return [(f"sw{host}", None) for host in self.hosts_of(number)] + [
            (f"long{number}", [LINK4.format(1, 1, number - 1) + "/31", LINK6.format(1, 1, number - 1) + "/127"])]

    def _routes(self, name):
        other = 2 if name == "leaf1" else 1
        return [{"prefix": f"10.77.{other}.0/24", "via": [LINK4.format(1, 1, other - 1)]},
                {"prefix": f"fd77:{other}::/64", "via": [LINK6.format(1, 1, other - 1)]}]

    def switch_config(self, name):
        config = super().switch_config(name)
        long_port = config["ports"][-1]
        long_port["impair"] = {"tx": {"delay_us": self.plan.delay_us}}
        if name == "leaf2":
            del config["aggregation"]["parent"]  # it is leaf1's
        return merge(merge(config, self._buffers(name)), self.overrides)

    def _buffers(self, name):
        plan, spills = self.plan, self.mode != "off"
        long_port = f"long{name[-1]}"
        ports = {long_port: {"rate_mbps": plan.link_mbps}}
        qos = {
            "PORT": ports,
            "DSCP_TO_TC_MAP": {"lab": {DSCP: QUEUE}},
            "PORT_QOS_MAP": {"*": {"dscp_to_tc_map": "lab"}},
        }
        if name != "leaf2":
            return {"qos": qos}
        hosts = ",".join(f"sw{host}" for host in LOCAL)
        ports[hosts] = {"rate_mbps": plan.port_mbps}
        qos["BUFFER_PROFILE"] = {"lossy": {"static_th": QUEUE_BYTES, "packet_discard_action": "spill"}}
        qos["BUFFER_QUEUE"] = {f"{hosts}|{QUEUE}": {"profile": "lossy"}}
        # A machine that is busy stops for longer than any residence that a real switch would allow.
        spillway = {"enabled": spills, "spill_dscp": [DSCP], "spill_pool_size": "16MiB", "max_residence_ms": 60_000}
        if plan.eligible == "remote":
            spillway["spill_src_prefix"] = ["10.77.1.0/24", "fd77:1::/64"]
        if self.mode == "remote":
            # A lender that gets no processor time is not dead.
            spillway |= {"spill_lenders": [{"address": self.roce_address(LENDER)}], "spill_lender_dead_ms": 30_000}
        return {"qos": qos, "spillway": spillway}

    def start_lender(self):
        """Until leaf2 has what it lends."""
        memd = self.start("memd", [binary("millrace-memd"), "--listen", self.roce_address(LENDER), "--size", "16MiB"],
                          host=LENDER)
        deadline = time.monotonic() + 60
        while not [lender for lender in self.spillway()["lenders"] if lender["state"] == "connected"]:
            if memd.poll() is not None or time.monotonic() > deadline:
                raise LabError(f"host {LENDER} lends nothing: {memd.stderr().strip() or self.spillway()['lenders']}")
            time.sleep(0.05)

    # What passes through it.

    def receiver_port(self):
        return f"sw{RECEIVER}"

    def buffers(self, switch="leaf2"):
        return self.switch_ask(switch, "buffers")

    def spillway(self, switch="leaf2"):
        return self.switch_ask(switch, "spillway")


def port_of(listing, name):
    return next(port for port in listing["ports"] if port["name"] == name)


class Occupancy(threading.Thread):
    """Asks leaf2 how full the congested queue and the spillway are, until told to stop: samples of (seconds, bytes in
    the queue, bytes in the spillway, bytes that have left by the port)."""

    def __init__(self, lab):
        super().__init__(daemon=True)
        self.lab, self.samples, self.error = lab, [], None
        self._told = threading.Event()
        self.began = time.monotonic()

    def run(self):
        try:
            while not self._told.wait(POLL_S):
                self.samples.append(self._sample())
        except (OSError, LabError, ValueError) as error:
            self.error = error

    def _sample(self):
        queues = port_of(self.lab.buffers(), self.lab.receiver_port())["queues"]
        asked = time.monotonic()
        spillway = self.lab.spillway()
        resident = port_of(spillway, self.lab.receiver_port())["resident"]["bytes"] if spillway["enabled"] else 0
        return round(asked - self.began, 4), queues[QUEUE]["bytes"], resident, sum(queue["sent"]["bytes"] for queue in queues)

    def stop(self):
        self._told.set()
        self.join(15)
        if self.error:
            raise LabError(f"leaf2 stopped answering: {self.error}")

    def mbps_while_spilled(self):
        """What left by the port, the all-reduce's results among it, while there was something in the spillway: whether
        draining filled the port. None where there never was for two samples in a row."""
        seconds = sent = 0
        for (at, _, resident, left), (later, _, still, left_later) in zip(self.samples, self.samples[1:]):
            if resident and still:
                seconds, sent = seconds + later - at, sent + left_later - left
        return round(8 * sent / seconds / 1e6, 1) if seconds else None
