"""The project's job files under a real Slurm (tests/slurm/cluster.sh) on the CPU: one is preempted, one runs out of
time, one loses a rank; each is requeued and ends with the rows of an unbroken run.

    python3 tests/cli/test_slurm.py EPOCH"""
import os
import re
import subprocess
import time

import cli
from cli import DEMO, ROOT, main
from survive import Standing, attribute, column, environment, faulty, path, program, reference, same

DATA, GERMAN = f"gsm8k:{DEMO}", f"mgsm:{ROOT}/datasets/samples/mgsm_de.tsv"
CLUSTER = str(ROOT / "tests/slurm/cluster.sh")
folder = path("slurm")


def slurm(*words):
    line = f". {folder}/env.sh && exec " + " ".join(words)
    done = subprocess.run(["bash", "-c", line], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, cwd=ROOT)
    assert done.returncode == 0, f"{words}: {done.stdout}"
    return done.stdout


def script(name, *lines):
    """An `epoch` that does something on the first start of its job."""
    with open(path(name), "w") as f:
        f.write('#!/bin/sh\nif [ "$1" = run ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then\n%s\nfi\nexec %s "$@"\n' %
                ("\n".join(lines), faulty))
    os.chmod(path(name), 0o755)
    return path(name)


def submit(job, *options, **variables):
    settings = {"EPOCH": program, "EPOCH_HOME": str(ROOT), "EPOCH_MPIRUN": " ".join(cli.MPIRUN),
                "EPOCH_OPTIONS": "--limit 6 --gen-len 64 --batch 2 --commit-every 0.05 --device cpu", **variables}
    words = [f"{k}='{v}'" for k, v in settings.items()]
    text = slurm("env", *words, "sbatch", "--gpus-per-node", "0", "--output", path(f"{job}-%j.log"), *options,
                 f"jobs/{job}.sbatch")
    return int(re.search(r"Submitted batch job (\d+)", text)[1])


def wait_for(what, seconds, true):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not within {seconds} s\n{slurm('squeue')}{logs()}"
        time.sleep(.5)


def logs():
    return "".join(f"---- {p.name}\n{p.read_text()}" for p in sorted(cli.scratch.glob("*.log")))


def restarts(job):
    return max(map(int, re.findall(r"Restarts=(\d+)", slurm("scontrol", "show", "job", str(job)))))


def run_jobs():
    preempted, timed, many, sweep = path("preempted.h5"), path("timed.h5"), path("many"), path("sweep")
    a = submit("node", "-p", "low", "--ntasks", "2", EPOCH_OUT=preempted,
               EPOCH=script("slow", "export EPOCH_FAULT_DELAY=forward:0.5"))
    want, german = reference(), reference(data=GERMAN) # meanwhile
    wait_for("a first row", 90, lambda: Standing(preempted).done > 0)
    slurm("sbatch", "-p", "urgent", "--ntasks", "4", "--output", "/dev/null", "--wrap", "true")
    b = submit("node", "--ntasks", "2", "--time", "1", "--signal", "B:USR1@30", EPOCH_OUT=timed,
               EPOCH=script("slower", "export EPOCH_FAULT_DELAY=forward:3"))
    wait_for("the preemption", 60, lambda: Standing(preempted).code == 75 and not Standing(preempted).running)
    assert attribute(preempted, "state") == "interrupted", logs()
    c = submit("array", "--array", "0-2", "--ntasks", "1", EPOCH_OUT_DIR=many, EPOCH_DATA=f"{DATA} {GERMAN}",
               EPOCH=script("dying", "export EPOCH_FAULT=forward:0:9:12"))
    submit("sweep", "--array", "0-1", "--ntasks", "1", EPOCH_OUT_DIR=sweep,
           EPOCH_SETTINGS="epoch --mode epoch\nhalf --threshold 0.5")
    wait_for("the end of all jobs", 300, lambda: not slurm("squeue", "-h").strip())

    for out, rows in ((preempted, want), (timed, want), (f"{many}/gsm8k-gsm8k_demo.h5", want),
                      (f"{many}/mgsm-mgsm_de.h5", german), (f"{sweep}/epoch.h5", want)):
        assert Standing(out).code == 0, Standing(out).text + logs()
        same(out, rows)
    assert attribute(f"{sweep}/half.h5", "state") == "complete"
    for job in a, b, c:
        assert restarts(job) > 0, slurm("scontrol", "show", "job", str(job))
    assert min(column(preempted, "session")) == 0 and max(column(preempted, "session")) > 0
    assert "none is left for task 2" in logs()


def test_job_files():
    up = subprocess.run([CLUSTER, "start", folder], env=environment, stdout=subprocess.PIPE, text=True)
    if up.returncode == 77:
        print(up.stdout, end="")
        os._exit(77)
    assert up.returncode == 0
    try:
        run_jobs()
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True)


main(globals())
