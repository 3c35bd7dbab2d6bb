"""Labs of several switches: leaves with hosts behind them, and spines that join the leaves by routed wires.

    with Fabric(leaves=2, hosts_per_leaf=4, spines=1, tree=True) as fabric:
        outcomes = fabric.perf("-b", "8", "-e", "1M")
        print(fabric.uplink_bytes(1), fabric.roots())"""

import os

from lab import Lab, flatten, merge
from network import NAMESPACE
from process import run

__all__ = ["CORE4", "CORE6", "LEAVES_MAX", "LINK4", "LINK6", "Fabric"]

# By leaf and spine: the ends of their wire, leaf's first. By spine and 0: those of its wire to the core.
LINK4, LINK6 = "10.255.{}{}.{}", "fd00:{}{}::{}"
CORE4, CORE6 = "10.88.0.1", "fd88::1"
LEAVES_MAX = SPINES_MAX = 9  # one digit each
_FRAMES = 8192  # of a switch, by eight hosts; three quarters of them may be groups'


class Fabric(Lab):
    """Hosts 1 … n behind leaf1, the next n behind leaf2, and so on, all leaves joined by all spines; each switch is in
    a namespace of its own. A leaf is the gateway of its hosts.

    types: of each host, as in Network. tree: each rank joins its own leaf, and the leaves' parent is spine1; otherwise
    all ranks join leaf1. core: one switch more, core1, joined to all spines. It is the root of the tree: "parent" of the
    spines, each of which is the parent of every so many-th leaf; or that of the leaves, "beyond" the spines, which only
    route to it, so that a leaf has as many ways to its parent as there are spines. next_hop_probe_ms: of every switch's routing. overrides: merged into every switch's
    configuration. capture: a file per switch, with the switch's name in its own. The rest: see Lab."""

    def __init__(self, leaves=2, hosts_per_leaf=2, spines=2, tree=False, types=None, core=None, next_hop_probe_ms=200,
                 **options):
        assert core in (None, "parent", "beyond") and (tree or core is None)
        assert 1 <= leaves <= LEAVES_MAX and 0 <= spines <= SPINES_MAX
        super().__init__(hosts=types or [NAMESPACE] * (leaves * hosts_per_leaf), switch=False, **options)
        assert self.hosts == leaves * hosts_per_leaf
        self.leaves, self.hosts_per_leaf, self.spines, self.tree = leaves, hosts_per_leaf, spines, tree
        self.core, self.next_hop_probe_ms = core, next_hop_probe_ms

    # Names and addresses.

    @property
    def leaf_names(self):
        return [f"leaf{leaf}" for leaf in range(1, self.leaves + 1)]

    @property
    def spine_names(self):
        return [f"spine{spine}" for spine in range(1, self.spines + 1)]

    @property
    def switch_names(self):
        return self.leaf_names + self.spine_names + ["core1"] * (self.core is not None)

    def leaf_of(self, host):
        return (host - 1) // self.hosts_per_leaf + 1

    def hosts_of(self, leaf):
        return range((leaf - 1) * self.hosts_per_leaf + 1, leaf * self.hosts_per_leaf + 1)

    def address(self, host, ipv6=False):
        leaf = self.leaf_of(host)
        return f"fd77:{leaf}::{host}" if ipv6 else f"10.77.{leaf}.{host}"

    @staticmethod
    def gateway(leaf, ipv6=False):
        """A leaf's address."""
        return f"fd77:{leaf}::100" if ipv6 else f"10.77.{leaf}.100"

    def gateway_of(self, host, ipv6=False):
        return self.gateway(self.leaf_of(host), ipv6)

    @classmethod
    def switch_address(cls, ipv6=False):
        return cls.gateway(1, ipv6)

    def switch_of(self, host, ipv6=False):
        return self.gateway_of(host, ipv6) if self.tree else self.switch_address(ipv6)

    def address_of(self, switch):
        """Of a leaf its hosts' gateway, of a spine the end of its wire to leaf1."""
        number = int(switch[-1])
        if switch == "core1":
            return CORE6 if self.ipv6 else CORE4
        if switch.startswith("leaf"):
            return self.gateway(number, self.ipv6)
        return (LINK6 if self.ipv6 else LINK4).format(1, number, 1)

    def namespace_of(self, switch):
        return f"{self.prefix}-{switch}"

    @property
    def switch_namespace(self):
        return self.namespace_of("leaf1")

    def switch_namespaces(self):
        # One for each: af_packet's fan-out groups, by process and interface, may collide within one.
        return [self.namespace_of(name) for name in self.switch_names]

    def port_namespace(self, host):
        return self.namespace_of(f"leaf{self.leaf_of(host)}")

    # Making.

    def _make(self):
        super()._make()
        self._join_switches()
        self.start_switches(*self.switch_names)

    def _join_switches(self):
        wires = [(f"leaf{leaf}", f"l{leaf}s{spine}", f"spine{spine}", f"s{spine}l{leaf}")
                 for leaf in range(1, self.leaves + 1) for spine in range(1, self.spines + 1)]
        if self.core:
            wires += [(f"spine{spine}", f"s{spine}c1", "core1", f"c1s{spine}") for spine in range(1, self.spines + 1)]
        for one, device, other, peer in wires:
            ends = self.namespace_of(one), device, self.namespace_of(other), peer
            self._add_wire(*ends)
            for namespace, end in (ends[:2], ends[2:]):
                run("ip", "-n", namespace, "link", "set", end, "up")

    # The switches.

    def _ports(self, name):
        """(name of the port and interface, addresses or None)."""
        def wired(interface, *wire):
            return interface, [LINK4.format(*wire) + "/31", LINK6.format(*wire) + "/127"]
        number, spines = int(name[-1]), range(1, self.spines + 1)
        if name == "core1":
            return [wired(f"c1s{spine}", spine, 0, 1) for spine in spines]
        if name.startswith("leaf"):
            return [(f"sw{host}", None) for host in self.hosts_of(number)] + \
                [wired(f"l{number}s{spine}", number, spine, 0) for spine in spines]
        return [wired(f"s{number}l{leaf}", leaf, number, 1) for leaf in range(1, self.leaves + 1)] + \
            [wired(f"s{number}c1", number, 0, 0)] * (self.core is not None)

    def _routes(self, name):
        number, leaves, spines = int(name[-1]), range(1, self.leaves + 1), range(1, self.spines + 1)
        routes = []

        def route(prefixes, *wires):
            routes.extend({"prefix": prefix, "via": [link.format(*wire) for wire in wires]}
                          for prefix, link in zip(prefixes, (LINK4, LINK6)))
        for leaf in leaves:
            hosts = f"10.77.{leaf}.0/24", f"fd77:{leaf}::/64"
            if name == "core1":
                route(hosts, *((spine, 0, 0) for spine in spines))
            elif not name.startswith("leaf"):
                route(hosts, (leaf, number, 0))
            elif leaf != number:
                route(hosts, *((number, spine, 1) for spine in spines))
        core = CORE4 + "/32", CORE6 + "/128"
        if self.core and name.startswith("leaf"):
            route(core, *((number, spine, 1) for spine in spines))
        elif self.core and name != "core1":
            route(core, (number, 0, 1))
        elif self.core == "parent":
            # A spine says who it is by the address of its first port.
            for spine in spines:
                route([LINK4.format(1, spine, 0) + "/31", LINK6.format(1, spine, 0) + "/127"], (spine, 0, 0))
        return routes

    def parent_of(self, name):
        """A switch's parent in the tree, or None."""
        link, number = LINK6 if self.ipv6 else LINK4, int(name[-1])
        if not self.tree or name == "core1" or (name.startswith("spine") and self.core != "parent"):
            return None
        if self.core == "beyond" or name.startswith("spine"):
            return self.address_of("core1")
        return link.format(number, (number - 1) % self.spines + 1 if self.core else 1, 1)

    def switch_config(self, name):
        number, leaf = int(name[-1]), name.startswith("leaf")
        kind = ["leaf", "spine", "core"].index(name[:-1]) + 1
        ports = []
        for index, (interface, own) in enumerate(self._ports(name)):
            ports.append(self._port(interface, index, interface, 1000 * self.switch_names.index(name)))
            if own:
                ports[-1]["addresses"] = own
        frames = _FRAMES * -(-self.hosts // 8)
        megabytes = frames * 4608 >> 20
        config = {
            "name": name,
            "mac": f"02:4d:52:00:0{kind}:0{number}",
            "aggregation": {"mtu": 4096, "memory_limit": f"{megabytes * 3 // 4 - 2}MiB"},
            "ports": ports,
            "routes": self._routes(name),
            "routing": {"next_hop_probe_ms": self.next_hop_probe_ms},
            "frames": {"count": frames},
            "idle": {"spin_us": 0, "sleep_us_max": 200},
            "eal": ["--no-huge", "-m", str(56 + 2 * megabytes)],
            "control": {"read": self.socket(name)},
            "log": {"level": "info"},
        }
        if leaf:
            config["addresses"] = [f"{self.gateway(number)}/24", f"{self.gateway(number, True)}/64"]
        elif name == "core1":
            config["addresses"] = [f"{CORE4}/32", f"{CORE6}/128"]
        if parent := self.parent_of(name):
            config["aggregation"]["parent"] = parent
        if self.capture:
            config["capture"] = {"file": self.capture_of(name), "limit": self.capture_limit}
        return merge(config, self.overrides)

    def capture_of(self, switch):
        stem, extension = os.path.splitext(self.capture)
        return f"{stem}-{switch}{extension}"

    def socket(self, name):
        return os.path.join(self.directory, name + ".sock")

    def start_switches(self, *names):
        """All at once, as each takes its time; until they are ready."""
        for name in names:
            self._launch(name, self.namespace_of(name), self.switch_config(name))
        for name in names:
            self._wait_until_ready(name)

    # Use.

    def switch_ask(self, name, command):
        return self._request(self.socket(name), {"cmd": command})

    def switch_counters(self, name):
        return flatten(self.switch_ask(name, "counters")["counters"])

    def counters_by_switch(self):
        return {name: self.switch_counters(name) for name in self.switch_names}

    def roots(self):
        """The switches at which groups have been rooted: where contributions came together and no result came from
        above."""
        return [name for name, counters in self.counters_by_switch().items()
                if counters["aggregation.contributions"] and not counters["aggregation.results_received"]]

    def next_hops(self, name):
        return {way["address"]: way for route in self.switch_ask(name, "routes")["routes"] for way in route["via"]}

    def uplink_bytes(self, leaf):
        """(sent, received) of a leaf's interfaces to the spines together, as link_bytes() of a host's."""
        stats = [self._link(self.namespace_of(f"leaf{leaf}"), f"l{leaf}s{spine}")["stats64"]
                 for spine in range(1, self.spines + 1)]
        return sum(s["tx"]["bytes"] for s in stats), sum(s["rx"]["bytes"] for s in stats)

    def ping(self, host, address, *options):
        return self.run(host, "ping", "-n", "-i", "0.05", "-W", "2", *options, address, check=False)
