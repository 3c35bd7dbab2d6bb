#!/usr/bin/python3
"""Soft-RoCE guests as hosts of a lab: programs run in them as in a namespace, and they leave nothing behind. What they
do over RDMA is tested elsewhere."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import e2e

sys.path.insert(0, os.path.join(e2e.ROOT, "testbed"))
import network  # noqa: E402
from guest_image import image  # noqa: E402
from network import NAMESPACE, RXE_GUEST, LabError, Network  # noqa: E402

BUDGET_S = 90

_OWNER = """
import sys, time
sys.path.insert(0, {path!r})
from network import RXE_GUEST, Network
with Network(hosts=[RXE_GUEST]) as network:
    network.start("sleeper", ["sleep", "1000"], host=1)
    print(network.prefix, network.guests[1].pid, network.directory, flush=True)
    time.sleep(1000)
"""


class GuestRunsPrograms(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.network = cls.enterClassContext(Network(hosts=[NAMESPACE, RXE_GUEST], bridge=True, rate="500mbit"))
        cls.guest = cls.network.guests[2]

    def start(self, *command, **options):
        return self.network.start(self.id().rpartition(".")[2], command, host=2, **options)

    def test_a_command_is_taken_as_it_is(self):
        odd = ["two  words", "'", '"', "$HOME", "a\nb", "\\", "", "ü", "*", ";exit 1"]
        text = self.network.run(2, "/usr/bin/python3", "-c", "import sys; print(sys.argv[1:])", *odd)
        self.assertEqual(eval(text), odd)

    def test_shell_on_the_console(self):
        self.assertEqual(self.guest.sh("echo out; echo err >&2; exit 3"), (3, "out\nerr\n"))
        self.assertEqual(self.guest.sh("if then; (")[0], 2)  # a mistake is nobody else's
        self.assertEqual(self.guest.sh("ulimit -l"), (0, "unlimited\n"))

    def test_output_and_exit_status(self):
        process = self.start("sh", "-c", "echo out; echo err >&2; echo $VALUE; exit 7", environment={"VALUE": "a b"})
        self.assertEqual(process.wait(20), 7)
        self.assertEqual((process.stdout(), process.stderr()), ("out\na b\n", "err\n"))
        self.assertLess(process.seconds, 20)

    def test_a_missing_program_says_so(self):
        process = self.start("no-such-program")
        self.assertEqual(process.wait(20), 127)
        self.assertIn("not found", process.stderr())
        with self.assertRaisesRegex(RuntimeError, "not found"):
            self.network.run(2, "no-such-program")

    def test_signals_end_a_program_as_on_a_namespace(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            process = self.start("sleep", "1000")
            self.assertGreater(process.pid, 1)
            self.assertIsNone(process.poll())
            process.signal(number)
            self.assertEqual(process.wait(20), -number)
            self.assertEqual(process.stderr(), "")
        stubborn = self.start("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done")
        while "ready" not in stubborn.stdout():
            self.assertIsNone(stubborn.wait(0.05))
        self.assertEqual(stubborn.stop(grace=0.5), -signal.SIGKILL)

    def test_much_output_and_many_programs(self):
        processes = [self.network.start(f"many{n}", ["seq", "20000"], host=2) for n in range(12)]
        for process in processes:
            self.assertEqual(process.wait(60), 0)
            self.assertEqual(process.stdout().split(), [str(n) for n in range(1, 20001)])

    def test_a_command_that_hangs_is_ended(self):
        with self.assertRaisesRegex(LabError, "ran on after 1 s"):
            self.guest.run(["sh", "-c", "echo begun; exec sleep 1000"], timeout=1)
        self.assertNotEqual(self.guest.sh("pidof sleep")[0], 0)

    def test_it_is_a_host_of_the_network(self):
        lab = self.network
        for address in (lab.address(2), lab.address(2, ipv6=True)):
            self.assertIn(" 2 received", lab.run(1, "ping", "-c", "2", "-W", "5", "-s", "4000", address))
        self.assertEqual(lab.run(2, "cat", "/sys/class/net/eth0/address").strip(), lab.mac(2))
        self.assertIn("tbf", lab.run(2, "tc", "qdisc", "show", "dev", "eth0"))
        sent, received = lab.link_bytes(2)
        self.assertGreater(min(sent, received), 4 * 4000)

    def test_its_rdma_device_follows_mtu_and_vlans(self):
        lab = self.network
        self.assertIn("active_mtu:\t\t4096", lab.run(2, "ibv_devinfo", "-d", "rxe0"))
        self.assertIn("sent_pkts", lab.rdma_counters(2))
        lab.run(2, "ip", "link", "set", "eth0", "mtu", 1500)
        self.assertIn("active_mtu:\t\t1024", lab.run(2, "ibv_devinfo", "-d", "rxe0"))
        lab.run(2, "ip", "link", "set", "eth0", "mtu", 4200)
        lab.run(2, "ip", "link", "add", "link", "eth0", "name", "eth0.7", "type", "vlan", "id", 7)
        lab.run(2, "ip", "link", "set", "eth0.7", "up")
        devices = self.guest.sh("cat /sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/* 2>/dev/null")[1].split()
        self.assertIn("eth0.7", devices)
        lab.run(2, "ip", "link", "del", "eth0.7")


class GuestLeavesNothing(unittest.TestCase):
    def end_by(self, number):
        """Starts a lab in another process and ends that by a signal."""
        owner = subprocess.Popen([sys.executable, "-c", _OWNER.format(path=os.path.join(e2e.ROOT, "testbed"))],
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        prefix, qemu, folder = owner.stdout.readline().split()
        self.assertTrue(self.runs(qemu))
        owner.send_signal(number)
        owner.wait(20)
        owner.stdout.close()
        return prefix, qemu, folder

    @staticmethod
    def runs(pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    def assert_gone(self, prefix, qemu, folder):
        self.assertFalse([n for n in network.namespaces() if n.startswith(prefix + "-")])
        self.assertFalse(self.runs(qemu))
        self.assertFalse(os.path.exists(folder))

    def test_sigterm_and_sigkill(self):
        self.assert_gone(*self.end_by(signal.SIGTERM))
        prefix, qemu, folder = self.end_by(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while self.runs(qemu) and time.monotonic() < deadline:
            time.sleep(0.01)
        with Network(hosts=1):
            self.assert_gone(prefix, qemu, folder)

    def test_a_guest_that_is_killed_ends_its_programs(self):
        with Network(hosts=[RXE_GUEST]) as lab:
            process = lab.start("sleeper", ["sleep", "1000"], host=1)
            self.assertIsNone(process.wait(0.5))
            lab.guests[1].kill()
            self.assertEqual(process.poll(), -signal.SIGKILL)
            with self.assertRaisesRegex(LabError, "has been stopped"):
                lab.run(1, "true")
            folder, qemu = lab.directory, lab.guests[1].pid
        self.assert_gone(lab.prefix, qemu, folder)

    def test_a_guest_that_does_not_come_up_is_an_error_with_its_words(self):
        class Broken(Network):
            def guest_folders(self):
                return ["/proc"]  # not to be mounted over what the guest needs itself

        with self.assertRaisesRegex(LabError, "guest h1 failed in its setup"):
            with Broken(hosts=[RXE_GUEST]):
                pass
        self.assertFalse([n for n in network.namespaces() if n.startswith(f"mr{os.getpid()}")])


class Image(unittest.TestCase):
    def test_it_is_built_once(self):
        folder = image()
        self.assertTrue(os.path.exists(os.path.join(folder, "vmlinux")))
        started = time.monotonic()
        done = subprocess.run([os.path.join(e2e.ROOT, "testbed", "guest_image.py")], capture_output=True, text=True)
        self.assertEqual((done.stdout, done.stderr, done.returncode), (folder + "\n", "", 0))
        self.assertLess(time.monotonic() - started, 20)

    def test_a_package_that_cannot_be_had_is_one_sentence(self):
        with tempfile.TemporaryDirectory() as folder:
            fake = os.path.join(folder, "apt-get")
            with open(fake, "w") as file:
                file.write("#!/bin/sh\necho 'E: Unable to fetch some archives'\nexit 100\n")
            os.chmod(fake, 0o755)
            cache = os.path.join(folder, "cache")
            done = subprocess.run([os.path.join(e2e.ROOT, "testbed", "guest_image.py")], capture_output=True, text=True,
                                  env={**os.environ, "MILLRACE_GUEST_CACHE": cache,
                                       "PATH": folder + ":" + os.environ["PATH"]})
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr.splitlines()[-1], r"^guest image: the guests' kernel .* cannot be had "
                                                           r"\(E: Unable to fetch some archives\): see that ")
            self.assertEqual(os.listdir(cache), ["lock"])


if __name__ == "__main__":
    e2e.main()
