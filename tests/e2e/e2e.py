"""What the end-to-end suites share: the way to the lab library, checks of outcomes, and a main() that reports each
test to tests/run.

A suite is a file test_*.py with BUDGET_S, the seconds that it states for itself, and unittest cases."""

import json
import os
import sys
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "testbed"))
from lab import Lab, LabError, binary, logs_directory, perf_rows  # noqa: E402,F401

FULL = os.environ.get("MILLRACE_FULL") == "1"
KIB, MIB = 1 << 10, 1 << 20


class LabTest(unittest.TestCase):
    """A test that makes labs with self.lab(...): their logs are kept, under the test's name, when it fails."""

    def lab(self, **options):
        name = self.id().removeprefix("__main__.")
        return Lab(name=name, logs=os.path.join(logs_directory(), "e2e"), **options)

    def assert_exact(self, outcomes, ranks=None):
        """Every rank ended well and verified its results."""
        for outcome in outcomes:
            self.assertEqual(outcome.code, 0, f"rank {outcome.rank}: {describe(outcome)}")
        if ranks is not None:
            self.assertEqual(len(outcomes), ranks)
        rows = perf_rows(outcomes[0])
        self.assertTrue(rows, "rank 0 reported no measurement")
        for row in rows:
            self.assertIn(row.wrong, (0, None), str(row))  # None: it was not asked to check
        return rows

    def wait_for(self, condition, seconds, what):
        """Polls until condition() holds; what it gave."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            self.assertLess(time.monotonic(), deadline, f"{what}: not within {seconds} s")
            time.sleep(0.02)
        return value

    def assert_frames_return(self, lab, before, seconds=10):
        """The switch's frame pool and group memory are back at `before` (what ask("status") gave), read from the
        pools by the switch itself."""
        def back():
            now = lab.ask("status")
            return now["group_memory"]["reserved"] == before["group_memory"]["reserved"] and \
                now["frames"]["available"] >= before["frames"]["available"]
        try:
            self.wait_for(back, seconds, "frames and memory back")
        except AssertionError:
            now = lab.ask("status")
            self.fail(f"not returned within {seconds} s: frames {before['frames']} → {now['frames']}, memory "
                      f"{before['group_memory']} → {now['group_memory']}")


def describe(outcome):
    how = "still running when its time was over" if outcome.code is None else f"exit status {outcome.code}"
    text = (outcome.err or outcome.out).strip()
    return f"{how} after {outcome.seconds:.1f} s: {text[-600:]}"


class _Reporter(unittest.TextTestResult):
    """Also writes one JSON line per test to $MILLRACE_RESULTS, as it ends: a suite that is killed has counted."""

    def startTest(self, test):
        self._started = time.monotonic()
        self._outcome = ("passed", "")
        super().startTest(test)

    def addError(self, test, error):
        super().addError(test, error)
        if not hasattr(self, "_started"):  # in setUpClass: no test has begun
            self._started = time.monotonic()
            self._report(test, "failed", self._exc_info_to_string(error, test))
            return
        self._outcome = ("failed", self._exc_info_to_string(error, test))

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._outcome = ("failed", self._exc_info_to_string(error, test))

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._outcome = ("failed", self._exc_info_to_string(error, test))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._outcome = ("skipped", reason)

    def stopTest(self, test):
        super().stopTest(test)
        self._report(test, *self._outcome)

    def _report(self, test, outcome, text):
        path = os.environ.get("MILLRACE_RESULTS")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps({"test": test.id().removeprefix("__main__."), "outcome": outcome, "text": text,
                                       "seconds": round(time.monotonic() - self._started, 3)}) + "\n")


def main():
    unittest.main(testRunner=unittest.TextTestRunner(resultclass=_Reporter, verbosity=2))
