#!/usr/bin/python3
"""The kernel and the initial RAM disk that Soft-RoCE guests boot: Debian's own kernel, unpacked rather than installed,
and a RAM disk with busybox, the modules that are needed and guest_init. All other programs and libraries a guest takes
from the host's /usr. Built once and kept outside the tree, by what went into it.

    guest_image.py      builds what is missing and prints the folder with vmlinux and initrd.cpio"""

import fcntl
import functools
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BUSYBOX = "/bin/busybox"
# What must be there when the guest's init has run; modules that these need come along. rdma_rxe asks the kernel's
# crypto for "crc32" by name, which no dependency tells.
MODULES = ("virtio_pci", "virtio_net", "virtio_rng", "9p", "9pnet_virtio", "crc32_generic", "rdma_rxe", "rdma_ucm",
           "ib_uverbs", "8021q", "sch_netem", "sch_tbf")
_MODULE_FOLDERS = re.compile(r"\./lib/modules/[^/]+/kernel/"
                             r"(?:(?:crypto|net|fs|lib|drivers/(?:virtio|infiniband|char))/.*|drivers/net/[^/]+)\.ko$")


class ImageError(RuntimeError):
    pass


@functools.cache
def image():
    """The folder with vmlinux and initrd.cpio, built if need be. Builds that meet wait for each other. ImageError says
    what to do when it cannot be had."""
    package, version = _kernel_package()
    inputs = hashlib.sha256()
    for path in (BUSYBOX, os.path.join(HERE, "guest_init"), os.path.abspath(__file__)):
        try:
            with open(path, "rb") as file:
                inputs.update(hashlib.sha256(file.read()).digest())
        except FileNotFoundError:
            raise ImageError(f"{path} is missing: run testbed/packages.sh guest") from None
    inputs.update(f"{package} {version}".encode())
    cache = os.environ.get("MILLRACE_GUEST_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "millrace", "guest")
    folder = os.path.join(cache, inputs.hexdigest()[:16])
    if os.path.isdir(folder):
        return folder
    os.makedirs(cache, exist_ok=True)
    with open(os.path.join(cache, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.isdir(folder):
            with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
                _build(package, version, work)
                os.rename(os.path.join(work, "image"), folder)
    return folder


def _kernel_package():
    """(name, version) of the newest kernel that Debian's package lists know."""
    def look_up():
        shown = _output("apt-cache", "show", "--no-all-versions", "linux-image-amd64")
        match = re.search(r"^Depends:.*\b(linux-image-[\w.+-]+-amd64) \(= ([^)]+)\)", shown, re.MULTILINE)
        return match.groups() if match else None
    found = look_up()
    if not found and os.geteuid() == 0:
        _output("apt-get", "-q", "update")
        found = look_up()
    if not found:
        raise ImageError("Debian's package lists do not name a kernel for the guests (linux-image-amd64): run "
                         "apt-get update as root, with Debian 12's archive in /etc/apt/sources.list")
    return found


def _output(*command, cwd=None):
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, cwd=cwd).stdout
    except FileNotFoundError:
        raise ImageError(f"this is not a Debian system (no {command[0]}): guests need Debian's kernel") from None


def _build(package, version, work):
    print(f"guest image: downloading {package} {version} (70 MB) and unpacking it", file=sys.stderr, flush=True)
    archive = _download(package, version, work)
    tree = os.path.join(work, "tree")
    unpacking = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE)
    with tarfile.open(fileobj=unpacking.stdout, mode="r|") as tar:
        for member in tar:
            if member.isfile() and (_MODULE_FOLDERS.match(member.name) or member.name.startswith("./boot/vmlinuz")):
                member.name = os.path.basename(member.name)
                tar.extract(member, tree)
    if unpacking.wait() != 0:
        raise ImageError(f"{package} could not be unpacked: is there room in {work}?")
    image_folder = os.path.join(work, "image")
    os.mkdir(image_folder)
    kernel = next(name for name in os.listdir(tree) if name.startswith("vmlinuz"))
    _unpack_kernel(os.path.join(tree, kernel), os.path.join(image_folder, "vmlinux"))
    with open(os.path.join(image_folder, "initrd.cpio"), "wb") as file:
        _write_initrd(file, tree)


def _download(package, version, work):
    command = ["apt-get", "-q", "download", f"{package}={version}"]
    for attempt in range(2):
        # apt downloads as the user _apt where it can, and warns where that one may not write.
        done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)
        found = [name for name in os.listdir(work) if name.endswith(".deb")]
        if done.returncode == 0 and found:
            return os.path.join(work, found[0])
        if attempt == 0 and os.geteuid() == 0:
            _output("apt-get", "-q", "update")  # the lists may be older than the archive
    reason = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no word").strip()
    raise ImageError(f"the guests' kernel {package} {version} cannot be had ({reason}): see that `apt-get update` and "
                     f"`apt-get download {package}` work, then try again")


def _unpack_kernel(source, target):
    """vmlinuz holds an ELF file compressed by xz. QEMU boots it by its PVH note, which saves the guest unpacking it,
    slow work for an emulated processor."""
    with open(source, "rb") as file:
        data = file.read()
    setup_sectors = data[0x1f1] or 4
    offset, length = struct.unpack_from("<II", data, 0x248)  # payload_offset, payload_length of the boot protocol
    start = 512 * (setup_sectors + 1) + offset
    elf = lzma.LZMADecompressor().decompress(data[start:start + length - 4])  # the last 4 bytes are the length
    if elf[:4] != b"\x7fELF":
        raise ImageError(f"{os.path.basename(source)} is not compressed by xz: guest_image.py has to learn how it is")
    with open(target, "wb") as file:
        file.write(elf)


def _modules_in_order(tree):
    """MODULES and what they need, each after all that it needs."""
    order = []

    def add(name):
        if name in order:
            return
        with open(paths[name], "rb") as file:
            needs = re.search(rb"\0depends=([^\0]*)\0", file.read()).group(1).decode()
        for need in filter(None, needs.split(",")):
            add(need.replace("-", "_"))
        order.append(name)
    paths = {file[:-3].replace("-", "_"): os.path.join(tree, file) for file in os.listdir(tree) if file.endswith(".ko")}
    for module in MODULES:
        if module not in paths:
            raise ImageError(f"the guests' kernel has no module {module}: guest_image.py has to look elsewhere")
        add(module)
    return [(name, paths[name]) for name in order]


def _write_initrd(out, tree):
    """A cpio archive ("newc"), the form that the kernel unpacks; it can hold device nodes without our being root."""
    count = 0

    def entry(name, mode, data=b"", device=(0, 0)):
        nonlocal count
        count += 1
        encoded = name.encode() + b"\0"
        fields = (count, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0)
        out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + encoded)
        out.write(b"\0" * (-(110 + len(encoded)) % 4) + data + b"\0" * (-len(data) % 4))

    def read(path):
        with open(path, "rb") as file:
            return file.read()
    directory, regular, link, device = 0o040755, 0o100755, 0o120777, 0o020600
    for name in ("dev", "proc", "sys", "tmp", "run", "root", "usr", "var", "etc", "etc/libibverbs.d", "busybox",
                 "modules"):
        entry(name, directory)
    for name in ("bin", "sbin", "lib", "lib64", "lib32", "libx32"):
        entry(name, link, b"usr/" + name.encode())
    entry("var/run", link, b"/run")
    entry("dev/console", device, device=(5, 1))
    entry("init", regular, read(os.path.join(HERE, "guest_init")))
    entry("busybox/busybox", regular, read(BUSYBOX))
    for applet in _output(BUSYBOX, "--list").split():
        if applet != "busybox":
            entry(f"busybox/{applet}", link, b"busybox")
    entry("etc/libibverbs.d/rxe.driver", regular, b"driver rxe\n")
    entry("etc/passwd", regular, b"root:x:0:0::/root:/bin/sh\n")
    entry("etc/group", regular, b"root:x:0:\n")
    entry("etc/hosts", regular, b"127.0.0.1 localhost\n::1 localhost\n")
    order = _modules_in_order(tree)
    for name, path in order:
        entry(f"modules/{name}.ko", regular, read(path))
    entry("modules/order", regular, "".join(f"{name}\n" for name, _ in order).encode())
    entry("TRAILER!!!", 0)


def main():
    try:
        print(image())
    except ImageError as error:
        sys.exit(f"guest image: {error}")


if __name__ == "__main__":
    main()
