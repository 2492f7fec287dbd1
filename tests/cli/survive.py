"""What the tests of jobs that survive share: starting a job under mpirun, hurting it, and comparing its rows."""
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import h5py
import numpy

from cli import DEMO, MPIRUN, TINY, scratch

GSM8K = f"gsm8k:{DEMO}"
MODEL = str(TINY)
SHORT = ["--gen-len", "64", "--progress", "off", "--commit-every", "0.05"]

program = os.path.realpath(sys.argv[1])
faulty = program + "_faults"
# What a killed job leaves in shared memory and in its session folder goes with the test's own folders.
shared = tempfile.TemporaryDirectory(prefix="epoch-survive-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
environment = dict(os.environ, OMPI_MCA_btl_vader_backing_directory=shared.name, TMPDIR=str(scratch))


def path(name):
    return str(scratch / name)


class Job:
    """One mpirun. `fault`: EPOCH_FAULT of src/base/fault.h; `row`: EPOCH_FAULT_ROW; `delay`: EPOCH_FAULT_DELAY."""

    def __init__(self, out, *options, ranks=2, data=GSM8K, model=MODEL, fault=None, row=None, delay=None, limit=6, more=()):
        env = dict(environment)
        if fault:
            env["EPOCH_FAULT"] = fault
        if row is not None:
            env["EPOCH_FAULT_ROW"] = str(row)
        if delay:
            env["EPOCH_FAULT_DELAY"] = delay
        command = [*MPIRUN, "-np", str(ranks), *more, faulty if fault or delay or row is not None else program, "run",
                   "--model", model, "--data", data, "--out", out, "--limit", str(limit), *SHORT, *options]
        self.text = None
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ranks(self):
        """pids of the processes that mpirun has started"""
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open("/proc/%s/stat" % pid) as f:
                    name, rest = re.match(r"\d+ \((.*)\) (.*)", f.read()).groups()
            except (OSError, AttributeError):
                continue
            if int(rest.split()[1]) == self.process.pid and name.startswith("epoch"):
                found.append(int(pid))
        return sorted(found)

    def end(self, limit=120):
        try:
            self.text = self.process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            for pid in [self.process.pid] + self.ranks():
                hurt(pid, signal.SIGKILL)
            raise AssertionError("no end within %d s" % limit)
        return self.process.returncode

    def gives(self, code, *parts):
        got = self.end()
        assert got == code, "exit status %d, want %d; it said:\n%s" % (got, code, self.text)
        for part in parts:
            assert re.search(part, self.text), "want %r in:\n%s" % (part, self.text)
        return self


def hurt(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class Standing:
    """`epoch status`."""

    def __init__(self, out):
        done = subprocess.run([program, "status", out], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.code, self.text = done.returncode, done.stdout
        found = re.search(r"rows +(\d+) of (\d+) done, (\d+) failed, (\d+) left", self.text)
        self.done, self.total, self.failed, self.left = map(int, found.groups()) if found else (0, 0, 0, 0)
        self.sessions = int((re.search(r"sessions +(\d+)", self.text) or [0, 0])[1])
        self.running = "running: pid" in self.text


OUTPUTS = ["dataset", "id", "source_line", "turn", "order", "prompt", "text", "gold", "status", "message",
           "finish_reason", "n_prompt_tokens", "n_tokens", "n_blocks", "n_iterations", "forced"]


def rows(out):
    """Every row as a tuple of all that may not depend on ranks, batch and sessions: columns, tokens, blocks."""
    with h5py.File(out, "r") as f:
        o, tokens, blocks = f["outputs"], f["tokens"][:], f["blocks"]
        columns = [o[k].asstr()[:] if h5py.check_string_dtype(o[k].dtype) else o[k][:] for k in OUTPUTS]
        block = numpy.array([blocks[k][:] for k in sorted(blocks) if k != "output_row"], dtype="f8").T
        of, at, n = blocks["output_row"][:], o["token_offset"][:], o["n_tokens"][:]
        return [tuple(c[i] for c in columns) + (tokens[at[i]:at[i] + n[i]].tobytes(), block[of == i].tobytes())
                for i in range(len(at))]


def column(out, name):
    with h5py.File(out, "r") as f:
        c = f["outputs"][name]
        return list(c.asstr()[:] if h5py.check_string_dtype(c.dtype) else c[:])


def attribute(out, name):
    with h5py.File(out, "r") as f:
        return f.attrs[name]


def same(out, want):
    got = rows(out)
    for a, b in zip(got, want):
        assert a == b, "row %s differs:\n%s\nwant\n%s" % (a[1], a[:-2], b[:-2])
    assert len(got) == len(want), "%d rows, want %d" % (len(got), len(want))


unbroken, making = {}, threading.Lock()


def reference(**job):
    """Rows of a run that nothing disturbed, once for each data."""
    key = tuple(sorted(job.items()))
    with making:
        if key not in unbroken:
            out = path(f"unbroken{len(unbroken)}.h5")
            done = Job(out, **job)
            assert done.end() in (0, 1), done.text
            unbroken[key] = rows(out)
    return unbroken[key]
