"""Processes that a lab starts: in a namespace, with their output in files (no pipe that nobody reads), waited for
with bounded time, and dead with their parent whatever ends it."""

import ctypes
import os
import signal
import subprocess
import time

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class LabError(RuntimeError):
    """The lab could not do its part; the text says what, and what the program concerned had to say."""


def _die_with_parent():
    # A SIGKILLed lab cannot clean up; its switch and its ranks must not poll on for ever. Survives execve.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """One child. `namespace` is a network namespace's name or None. stdout and stderr go to NAME.out and NAME.err
    in `directory`. Its own session: a terminal's Ctrl-C reaches the lab alone, which then stops its children."""

    def __init__(self, name, command, directory, namespace=None, environment=None):
        self.name = name
        self.command = [str(part) for part in command]
        self.out_path = os.path.join(directory, name + ".out")
        self.err_path = os.path.join(directory, name + ".err")
        if namespace:
            self.command = ["ip", "netns", "exec", namespace] + self.command
        self.started = time.monotonic()
        self.ended = None
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self._popen = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                preexec_fn=_die_with_parent, env={**os.environ, **(environment or {})})

    @property
    def pid(self):
        return self._popen.pid

    def poll(self):
        """The exit status (negative: the signal that ended it), or None while it runs."""
        code = self._popen.poll()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def wait(self, timeout):
        """Like poll(), after at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        pause = 0.002
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return self.poll()

    def signal(self, number):
        if self.poll() is None:
            self._popen.send_signal(number)

    def stop(self, grace=10.0):
        """SIGTERM, SIGKILL after `grace` seconds. The exit status."""
        self.signal(signal.SIGTERM)
        if self.wait(grace) is None:
            self.signal(signal.SIGKILL)
            self._popen.wait()
        return self.poll()

    def kill(self):
        self.signal(signal.SIGKILL)
        self._popen.wait()
        self.poll()

    @property
    def seconds(self):
        return (self.ended or time.monotonic()) - self.started

    def stdout(self):
        return _text(self.out_path)

    def stderr(self):
        return _text(self.err_path)


def _text(path):
    try:
        with open(path, "r", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def run(*command, namespace=None, check=True, timeout=60):
    """A short command to its end; its output. RuntimeError with what it said when it fails."""
    command = [str(part) for part in command]
    if namespace:
        command = ["ip", "netns", "exec", namespace] + command
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done.stdout
