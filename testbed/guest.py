"""Soft-RoCE guests: small QEMU machines with Debian's kernel and its rdma_rxe, as hosts of a lab.

A guest mounts the host's /usr, the build tree and the lab's working folder at the very paths they have here, so that
any program of the host's runs in it by the same command line, and what a program writes into the working folder
(output, exit status, --json files) is a file here at once. Its console is a file to read and a FIFO to write: nothing
sits in a pipe that nobody reads."""

import os
import shlex
import signal
import time

from guest_image import ImageError, image
from process import LabError, Process

__all__ = ["Guest", "GuestProcess"]

MEMORY_MIB = 320
_QEMU = "/usr/bin/qemu-system-x86_64"
_READY, _FAILED = "guest_init: ready", "guest_init: failed"
# An emulated processor has no time to lose; a panic ends the machine.
_KERNEL = ("console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable audit=0 "
           "selinux=0 apparmor=0 cryptomgr.notests rcupdate.rcu_expedited=1")
# A switch's port has no offload to lend: what leaves the guest must be whole packets with their checksums.
_NO_OFFLOADS = ",".join(f"{name}=off" for name in (
    "csum", "gso", "guest_csum", "guest_tso4", "guest_tso6", "guest_ecn", "guest_ufo", "host_tso4", "host_tso6",
    "host_ecn", "host_ufo"))
_MOUNT = "trans=virtio,version=9p2000.L,msize=262144"


class Guest:
    """One machine with one port, which is the tap device `tap` (it exists already) in the network namespace
    `namespace`. directory: the lab's working folder. folders: shared read-only at the same path, besides /usr. setup:
    commands that the guest runs before it is ready, as lists of arguments.

    wait_ready() after boot(); several guests boot at the same time."""

    def __init__(self, name, directory, namespace, tap, mac, folders=(), setup=()):
        self.name, self.directory, self.namespace = name, directory, namespace
        self.tap, self.mac, self.setup = tap, mac, list(setup)
        self.folders = [folder for folder in _outermost(map(os.path.realpath, folders))
                        if not folder.startswith("/usr/")]
        self.boot_seconds = None
        self._qemu = None
        self._ready = False
        self._input = None
        self._commands = 0

    def path(self, suffix):
        return os.path.join(self.directory, f"{self.name}.{suffix}")

    # Life.

    def boot(self):
        try:
            folder = image()
        except ImageError as error:
            raise LabError(str(error)) from None
        with open(self.path("setup"), "w") as file:
            file.write(self._setup_script())
        # QEMU's "pipe" opens CONSOLE.in and CONSOLE.out; nothing says that both must be pipes. For reading too, so
        # that our opening it does not wait for QEMU.
        os.mkfifo(self.path("console.in"))
        self._input = os.open(self.path("console.in"), os.O_RDWR | os.O_NONBLOCK)
        open(self.path("console.out"), "wb").close()
        self._qemu = Process(f"{self.name}.qemu", [
            _QEMU, "-name", self.name, "-M", "pc,usb=off,vmport=off", "-accel", "tcg,thread=multi,tb-size=64",
            "-cpu", "qemu64", "-smp", "1", "-m", str(MEMORY_MIB), "-nodefaults", "-no-user-config",
            "-display", "none", "-no-reboot",
            "-kernel", os.path.join(folder, "vmlinux"), "-initrd", os.path.join(folder, "initrd.cpio"),
            "-append", f"{_KERNEL} millrace.name={self.name}",
            "-netdev", f"tap,id=port,ifname={self.tap},script=no,downscript=no,vnet_hdr=off",
            "-device", f"virtio-net-pci,netdev=port,romfile=,mac={self.mac},mrg_rxbuf=on,{_NO_OFFLOADS}",
            "-device", "virtio-rng-pci",
            "-chardev", f"pipe,id=console,path={_comma(self.path('console'))}",
            "-serial", "chardev:console",
            *_share("usr", "/usr", "readonly=on"), *_share("lab", self.directory, "readonly=off"),
            *[part for n, path in enumerate(self.folders) for part in _share(f"folder{n}", path, "readonly=on")],
        ], self.directory, self.namespace)

    def _setup_script(self):
        commands = []
        for n, path in enumerate(self.folders):
            commands += [["mkdir", "-p", path],
                         ["mount", "-t", "9p", "-o", f"{_MOUNT},ro,cache=loose", f"folder{n}", path]]
        commands += [["mkdir", "-p", self.directory], ["mount", "--bind", "/lab", self.directory], *self.setup,
                     ["dmesg", "-n", 1]]  # from here on the kernel says nothing on the console by itself
        return "".join(shlex.join(map(str, command)) + "\n" for command in commands)

    def wait_ready(self, timeout=120):
        """Until the guest has done its setup, or LabError."""
        deadline = time.monotonic() + timeout
        while not self._ready:
            alive, said = self.alive(), self.console()
            if _READY in said:
                self._ready = True
                self.boot_seconds = self._qemu.seconds
            elif _FAILED in said or not alive:
                how = f"ended with {self._qemu.poll()}" if not alive else "failed in its setup"
                raise LabError(f"guest {self.name} {how}:\n" + self._qemu.stderr() + _tail(said))
            elif time.monotonic() > deadline:
                raise LabError(f"guest {self.name} was not ready after {timeout} s:\n" + _tail(self.console()))
            else:
                time.sleep(0.03)
        return self

    def alive(self):
        return self._qemu is not None and self._qemu.poll() is None

    def stop(self):
        """Ends the machine. Its kernel gets no notice: stop what runs in it first."""
        if self._qemu:
            self._qemu.stop(grace=3)
        self._close_input()

    def kill(self):
        """The whole machine, as by pulling its plug: nobody in it says goodbye to anybody."""
        if self._qemu:
            self._qemu.kill()
        self._close_input()

    def _close_input(self):
        if self._input is not None:
            os.close(self._input)
            self._input = None

    @property
    def pid(self):
        """QEMU's."""
        return self._qemu.pid

    def cpu_seconds(self):
        """What the machine has used of the host's processors so far."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    # Use.

    def console(self):
        """All that the console has said."""
        try:
            with open(self.path("console.out"), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def type(self, line):
        """A line of shell for the console, which does one at a time: none must take long."""
        try:
            os.write(self._input, line.encode() + b"\n")
        except (TypeError, BlockingIOError):
            why = "its console is not read" if self._input is not None else "it has been stopped"
            raise LabError(f"guest {self.name} does not take a command: {why}") from None

    def start(self, name, command, environment=None):
        return GuestProcess(self, name, command, environment)

    def run(self, command, timeout=60):
        """A command to its end: (exit status, standard output, standard error)."""
        self._commands += 1
        process = self.start(f"{self.name}.command{self._commands}", command)
        code = process.wait(timeout)
        if code is None:
            process.kill()
        result = process.stdout(), process.stderr()
        if code is None:
            raise LabError(f"guest {self.name}: {shlex.join(process.command)} ran on after {timeout} s and was "
                           f"killed; it had said:\n" + _tail("".join(result)))
        process.forget()
        return code, *result

    def sh(self, command, timeout=60):
        """A line of shell, in a shell of its own: (exit status, all that it printed)."""
        code, out, _ = self.run(["sh", "-c", f"exec 2>&1\n{command}"], timeout)
        return code, out


class GuestProcess:
    """A program in a guest, with the interface of process.Process. Its files are those of the working folder."""

    def __init__(self, guest, name, command, environment=None):
        self.guest, self.name = guest, name
        self.command = [str(part) for part in command]
        self._base = os.path.join(guest.directory, name)
        self.out_path, self.err_path = self._base + ".out", self._base + ".err"
        self._code = None
        self._pid = None
        self.ended = None
        for suffix in (".pid", ".code"):
            _remove(self._base + suffix)
        for path in (self.out_path, self.err_path):
            open(path, "wb").close()
        with open(self._base + ".job", "w") as file:
            file.write(self._job(environment or {}))
        self.started = time.monotonic()
        # Not "&", which would have the program ignore SIGINT.
        guest.type(f"setsid -f sh {shlex.quote(self._base + '.job')}")

    def _job(self, environment):
        # Every program to start takes an emulated processor some 30 ms, so there is none but the one that is wanted.
        # The redirections are a subshell's, so that the shell that waits says "Killed" on the console, not in the
        # program's name.
        base = shlex.quote(self._base)
        exports = "".join(f"export {key}={shlex.quote(str(value))}\n" for key, value in environment.items())
        return (f"{exports}cd /root\n"
                f"(read -r pid _ </proc/self/stat; echo $pid >{base}.pid; exec {shlex.join(self.command)}) "
                f"</dev/null >{base}.out 2>{base}.err\n"
                f"echo $? >{base}.code\n")

    @property
    def pid(self):
        """In the guest."""
        deadline = time.monotonic() + 30
        while self._pid is None:
            try:
                with open(self._base + ".pid") as file:
                    self._pid = int(file.read() or "x")
            except (FileNotFoundError, ValueError):
                if not self.guest.alive() or time.monotonic() > deadline:
                    raise LabError(f"guest {self.guest.name} has not started {self.name}:\n"
                                   + _tail(self.guest.console())) from None
                time.sleep(0.005)
        return self._pid

    def poll(self):
        """The exit status (negative: the signal that ended it, or the guest), or None while it runs."""
        if self._code is None:
            alive = self.guest.alive()  # asked first: a status written before the guest's end counts
            try:
                with open(self._base + ".code") as file:
                    text = file.read()
            except FileNotFoundError:
                text = ""
            if text.endswith("\n"):
                code = int(text)
                self._code = 128 - code if 128 < code <= 192 else code  # a shell has no other way to say "by a signal"
            elif not alive:
                self._code = -signal.SIGKILL
            if self._code is not None:
                self.ended = time.monotonic()
        return self._code

    def wait(self, timeout):
        """Like poll(), after at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pause = 0.005
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return self.poll()

    def signal(self, number):
        if self.poll() is None:
            try:
                self.guest.type(f"kill -{int(number)} {self.pid} 2>/dev/null")
            except LabError:
                self.guest.kill()  # it does nothing any more

    def stop(self, grace=10.0):
        """SIGTERM, SIGKILL after `grace` seconds. The exit status."""
        self.signal(signal.SIGTERM)
        if self.wait(grace) is None:
            self.kill()
        return self.poll()

    def kill(self):
        """SIGKILL for the program; the guest's kernel then ends its connections, and says so to their peers (unlike
        Guest.kill). A guest that cannot even do that is killed itself."""
        self.signal(signal.SIGKILL)
        if self.wait(30) is None:
            self.guest.kill()
        self.poll()

    def forget(self):
        """Removes its files."""
        for suffix in (".out", ".err", ".job", ".pid", ".code"):
            _remove(self._base + suffix)

    @property
    def seconds(self):
        return (self.ended or time.monotonic()) - self.started

    def stdout(self):
        return _text(self.out_path)

    def stderr(self):
        return _text(self.err_path)


def _share(tag, path, access):
    return ["-fsdev", f"local,id={tag},path={_comma(path)},security_model=none,multidevs=remap,{access}",
            "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]


def _comma(text):
    return text.replace(",", ",,")  # QEMU's way to write a comma that separates nothing


def _outermost(folders):
    """Those that are not inside another one."""
    kept = []
    for folder in sorted(set(folders)):
        if not any(folder.startswith(other.rstrip("/") + "/") for other in kept):
            kept.append(folder)
    return kept


def _remove(path):
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _text(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _tail(text, lines=25):
    return "\n".join(text.strip().splitlines()[-lines:])
