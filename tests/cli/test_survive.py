"""Jobs are killed, stopped, stuck and starved; each is resumed and must end with the rows of an unbroken run.

    python3 tests/cli/test_survive.py EPOCH [TEST ...]      EPOCH_faults (src/base/fault.h) lies beside it

EPOCH_SEED repeats a sequence of random moments, EPOCH_KILLS sets their number."""
import json
import os
import random
import shutil
import signal
import subprocess
import time

import h5py

from cli import DEMO, ROOT, main
from survive import GSM8K, MODEL, Job, Standing, attribute, column, hurt, path, reference, rows, same

SEED = int(os.environ.get("EPOCH_SEED", time.time_ns() % 1000000))
print(f"EPOCH_SEED={SEED}", flush=True)


def finish(out, want, *options, code=0, **job):
    Job(out, "--resume", *options, **job).gives(code)
    same(out, want)
    assert attribute(out, "state") == "complete"
    assert Standing(out).code == code


def kill_at_random(name, dice, left):
    """kill -9 of one rank, of all, of mpirun; rank counts and batches change between sessions"""
    start = time.monotonic()
    want = reference()
    wall, chains = time.monotonic() - start, 0
    while left > 0:
        out = path(f"{name}{chains}.h5")
        chains += 1
        for _ in range(4):
            job = Job(out, "--resume", "--batch", str(dice.choice([1, 3, 16])), ranks=dice.randint(1, 3))
            time.sleep(dice.uniform(.1, .9) * max(wall, 1.5))
            pids, victim = job.ranks(), dice.choice(["rank", "all", "mpirun"])
            for pid in {"rank": pids[:1], "all": pids, "mpirun": [job.process.pid]}[victim]:
                hurt(pid, signal.SIGKILL)
            if job.end() == 0:
                break
            left -= 1
        while Standing(out).running: # the ranks of a killed mpirun, on their way out; a resume would wait for them
            time.sleep(.1)
        before = Standing(out)
        finish(out, want, ranks=dice.randint(1, 3))
        # what was recorded then is recorded still, and was not decoded again
        kept = sum(s < before.sessions for s in column(out, "session"))
        assert kept == before.done, f"{before.done} rows were done, {kept} of them are still there"


KILLS = int(os.environ.get("EPOCH_KILLS", "20"))


def test_kills():
    kill_at_random("first", random.Random(SEED), KILLS // 2)


def test_more_kills():
    kill_at_random("second", random.Random(SEED + 1), KILLS - KILLS // 2)


def test_signals_in_every_phase():
    """at each point of the program: USR1 to one rank or to mpirun, TERM to mpirun, KILL of a rank"""
    want = reference()
    early, late = ["start", "check", "load", "begin", "open", "forward", "commit"], ["publish", "published"]
    for number, code in ((10, 75), (-10, 75), (-15, 1), (9, 137)):
        out = path("signal%d.h5" % number)
        for point in early + late:
            job = Job(out, "--resume", "--batch", "1", fault="%s:0:%d" % (point, number))
            if point in late and number in (10, -10): # nothing is left to be stopped
                job.gives(0)
            elif (number, point) == (-10, "start"): # mpirun may pass it on before the other rank can listen
                assert job.end() in (75, 138), job.text
                continue
            elif number < 0: # mpirun passes it on in its own time: the rows that were left may be done before a rank hears
                got = job.end()
                if got == 0:
                    assert Standing(out).code == 0, (point, job.text)
                    continue
                assert got == code, (point, got, job.text)
            else:
                job.gives(code)
            state = Standing(out)
            if code == 75 and point in early:
                assert state.code == 75 and state.left > 0, state.text
                assert "%d left" % state.left in job.text and attribute(out, "state") == "interrupted"
        finish(out, want, ranks=3)


def test_second_signal():
    """a second request ends the ranks at once, although one of them stands still"""
    out = path("second.h5")
    job = Job(out, fault="forward:1:19:2") # rank 1 stops, so that the first request cannot be followed
    while len(job.ranks()) < 2 or not Standing(out).running:
        time.sleep(.05)
    time.sleep(.5)
    hurt(job.process.pid, signal.SIGUSR1)
    time.sleep(.5)
    assert job.process.poll() is None
    hurt(job.process.pid, signal.SIGUSR1)
    assert job.end(20) == 128 + signal.SIGUSR1, job.text
    finish(out, reference())


def test_asked_to_stop():
    """--stop-file and --time-budget; a missing file with --resume starts; done rows and those left are told"""
    out, stop = path("stop.h5"), path("stop-now")
    job = Job(out, "--resume", "--stop-file", stop, "--batch", "1")
    while Standing(out).done < 1:
        time.sleep(.05)
    open(stop, "w").close()
    job.gives(75, r"rows +[1-5] of 6 done, 0 failed, [1-5] left")
    Job(out, "--resume", "--time-budget", "0.01").gives(75, "interrupted")
    before = column(out, "id")
    finish(out, reference())
    sessions = dict(zip(column(out, "id"), column(out, "session")))
    assert all(sessions[i] == 0 for i in before) and max(sessions.values()) == 2, sessions


def test_stuck():
    """a rank that stands still ends the job with 3, wherever it does"""
    out = path("stuck.h5")
    Job(out, "--timeout", "1", ranks=3, fault="forward:1:19:4").gives(
        3, r"the others wait for rank 1/3", r"rank 1/3: run, iteration \d+.*does not answer",
        r"rank 0/3: run, iteration \d+, layer \d+, \w+ done")
    Job(out, "--resume", "--timeout", "0.5", fault="load:0:19").gives(3, r"rank 0/2: load.*does not answer")
    Job(out, "--resume", "--timeout", "1", "--lock-wait", "0", fault="check:1:19").gives(3, r"rank 0/2: waited 1 s")
    Job(out, "--resume", "--timeout", "1", fault="publish:0:19").gives( # where it was when its watch last wrote it down
        3, r"rank 0/2: (publish|run, iteration \d+).*does not answer")
    finish(out, reference())


def test_rank_fails_alone():
    """its own message is told, and at once: nothing is given back that may wait for the other ranks"""
    job = Job(path("alone.h5"), "--batch", "1", "--timeout", "3", delay="close:18", more=["prlimit", "--fsize=5000"])
    job.gives(3, "rank ./2: .*File too large", "what was committed before is safe")
    assert "stuck" not in job.text and "waited" not in job.text, job.text


def test_full_disk():
    """an output without room: exit 3, and what was recorded is safe"""
    small, options = path("small"), {"ranks": 1}
    os.mkdir(small)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "epoch-test", small],
                             stderr=subprocess.DEVNULL).returncode == 0
    try:
        if mounted:
            with open(os.path.join(small, "filler"), "wb") as f:
                f.write(bytes((1 << 20) - 4 * 4096)) # four pages are left: one for each file that the run begins
        else:
            print("no tmpfs may be mounted here: a limit on the size of files in its place")
            options["more"] = ["prlimit", "--fsize=5000"]
        out = os.path.join(small, "run.h5")
        Job(out, "--batch", "1", **options).gives(3, "No space left|File too large", "what was committed before is safe")
        before = Standing(out)
        assert before.code == 75 and before.left > 0 and before.done > 0, before.text
        if mounted:
            os.truncate(os.path.join(small, "filler"), (1 << 20) - 60000) # for the journals, not for the file
            Job(out, "--resume").gives(3, "run.h5.tmp.*: No space left on device; make room, then run again")
            assert Standing(out).left == 0 and Standing(out).code == 75
            before = Standing(out)
            os.unlink(os.path.join(small, "filler"))
        finish(out, reference())
        assert sum(s < before.sessions for s in column(out, "session")) == before.done
    finally:
        if mounted:
            subprocess.run(["umount", small], check=True)


def test_occupied():
    """two runs on one output; a folder that cannot be written; a reader that holds the file"""
    out = path("two.h5")
    first = Job(out, "--batch", "1")
    while not Standing(out).running:
        time.sleep(.05)
    Job(out, "--lock-wait", "0.2").gives(2, r"held by pid \d+ on .*let that run end or stop it")
    first.gives(0)
    Job(out, "--resume").gives(0, "6 of 6 done")
    assert Standing(out).sessions == 1 # nothing was left, and nothing was begun
    Job(out).gives(2, "exists already: --resume goes on with it, or name another --out")
    Job("/proc/nowhere/x.h5").gives(2, "cannot be created.*choose an --out in a folder that exists and is writable")
    with h5py.File(out, "r") as reader:
        Job(out, "--resume=changed", limit=8).gives(0)
        assert len(reader["outputs/id"]) == 6 # the old file, whole
    same(out, reference(limit=8))


def write(name, lines):
    with open(path(name), "wb") as f:
        f.write(b"".join(l if isinstance(l, bytes) else json.dumps(l).encode() + b"\n" for l in lines))
    return "jsonl:" + path(name)


QUESTIONS = ["What is 2 + 3?", "Tom has 4 apples and buys 9 more. How many are there?", "Count from 1 to 5."]


def test_bad_rows():
    """a row that cannot run fails alone, and says where it stands"""
    good = [{"id": "g%d" % i, "prompt": q} for i, q in enumerate(QUESTIONS)]
    bad = [b'{"id": "b0", "prompt": \n', b'{"id": "b1", "prompt": "\xff\xfe"}\n', {"id": "b2", "prompt": ""},
           {"id": "b3", "prompt": "one two three " * 2000}, {"id": "b4", "prompt": ["What is 1 + 1?", "And 2 + 2?"]}]
    data = write("mixed.jsonl", [good[0]] + bad[:2] + [good[1]] + bad[2:] + [good[2]])
    alone = {r[1]: (r[6], r[-2:]) for r in reference(data=write("good.jsonl", good), limit=0)}
    out = path("bad.h5")
    Job(out, data=data, limit=0, row=6).gives(1, "3 of 9 done, 6 failed, 0 left")
    got = rows(out)
    assert {r[1]: (r[6], r[-2:]) for r in got if r[8] == "done"} == alone
    says = {r[2]: r[9] for r in got if r[8] == "failed" and r[3] == 0}
    for line, why in ((2, "not JSON"), (3, "0xff, want UTF-8"), (5, "is empty, want a text"),
                      (6, "leaves no room for an answer"), (7, "the logits are not finite")):
        assert "mixed.jsonl:%d: " % line in says[line] and why in says[line], (line, says)
    assert [r[9] for r in got if r[3] == 1][0].endswith("mixed.jsonl:7: turn 1 failed, whose answer this one wants")
    assert Standing(out).code == 1
    Job(out, "--resume", data=data, limit=0).gives(1) # failed rows stay
    assert rows(out) == got
    Job(out, "--resume=changed", data=data, limit=0).gives(1, "5 of 9 done, 4 failed") # the spoiled one was tried again
    Job(path("strict.h5"), "--strict", data=data, limit=0).gives(2, r"mixed.jsonl:2: .*--strict refuses")
    Job(path("strict.h5"), "--strict", data=write("long.jsonl", [good[0], bad[3]]), limit=0).gives(
        2, r"long.jsonl:2: the prompt has \d+ tokens, which leaves no room")
    assert not os.path.exists(path("strict.h5.d"))


def test_odd_sizes():
    """9 prompts on 8 ranks, none at all, only bad ones"""
    out = path("nine.h5")
    Job(out, ranks=8, limit=9, fault="forward:5:9:12").gives(137)
    finish(out, reference(limit=9), ranks=8, limit=9)
    out, none = path("none.h5"), write("none.jsonl", [])
    Job(out, data=none).gives(0, "0 of 0 done")
    finish(out, [], data=none)
    out, bad = path("allbad.h5"), write("allbad.jsonl", [{"id": i, "prompt": "word " * 5000} for i in range(3)])
    Job(out, data=bad, fault="commit:0:9").gives(137)
    finish(out, reference(data=bad), data=bad, code=1)
    assert column(out, "status") == ["failed"] * 3


def test_turns():
    """a conversation goes on behind its first answer"""
    talk = [{"id": i, "prompt": [q, "Are you sure?", "Why?"]} for i, q in enumerate(QUESTIONS)]
    data = write("talk.jsonl", talk)
    want, out = reference(data=data), path("talk.h5")
    assert len(want) == 9
    for count in range(16, 100, 8): # until it stops between the turns of a row
        Job(out, "--resume", data=data, fault="forward:0:10:%d" % count).end()
        if 0 < Standing(out).done % 3:
            break
    first = set(zip(column(out, "id"), column(out, "turn")))
    assert any((i, 0) in first and (i, 2) not in first for i in "012"), first
    finish(out, want, data=data, ranks=3)


def refused(out, found, *options, **job):
    Job(out, "--resume", *options, **job).gives(2, "was made otherwise: .*" + found, "--resume=changed")


def test_changes():
    """what changed is named and refused; --resume=changed does it again, and only that"""
    out = path("changed.h5")
    Job(out).gives(0)
    refused(out, "threshold was 0.95, is 0.9", "--threshold", "0.9")
    refused(out, "gen_len was 64, is 32", "--gen-len", "32")
    refused(out, 'rows of .*gsm8k_demo.jsonl was "1-6", is "1-8"', limit=8)
    refused(out, "shots was null, is", "--shots", "1:" + str(DEMO))
    refused(out, "template was null, is", "--template", str(ROOT / "models/templates/question.txt"))
    german = f"mgsm:{ROOT}/datasets/samples/mgsm_de.tsv"
    refused(out, "there were 1 --data, are 2", "--data", german)
    refused(out, '--data was "gsm8k", is "mgsm_de"', data=german)
    Job(out, "--resume", "--data", GSM8K).gives(2, "would be called gsm8k too")
    other = path("model")
    shutil.copytree(MODEL, other, ignore=shutil.ignore_patterns("training"))
    weights = os.path.join(other, "model-00001-of-00002.safetensors")
    with open(weights, "r+b") as f: # its first weight
        at = 8 + int.from_bytes(f.read(8), "little")
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    refused(out, "the checkpoint's hash was", model=other)
    with open(str(DEMO), "rb") as f:
        lines = f.read().split(b"\n")
    lines[2] = json.dumps({"question": QUESTIONS[0], "answer": "#### 5"}).encode()
    lines.insert(0, lines.pop(4)) # moved: with it, by line, rows 1 to 5 are others
    with open(path("gsm8k_demo.jsonl"), "wb") as f:
        f.write(b"\n".join(lines))
    data = "gsm8k:" + path("gsm8k_demo.jsonl")
    refused(out, "hash of .*gsm8k_demo.jsonl was .*; the first other prompt is .*gsm8k_demo.jsonl:1", data=data)

    Job(out, "--resume=changed", data=data).gives(0)
    same(out, reference(data=data))
    assert column(out, "session") == [1, 1, 1, 1, 1, 0], column(out, "session")
    Job(out, "--resume=changed", "--gen-len", "32", data=data, fault="forward:0:9:30").end()
    Job(out, "--resume", "--gen-len", "32", data=data).gives(0) # all rows again, over two sessions
    assert min(column(out, "session")) == 2
    assert max(column(out, "n_tokens")) <= 32
    shutil.rmtree(out + ".d") # the file alone
    got = rows(out)
    Job(out, "--resume=changed", "--gen-len", "32", data=data, limit=8).gives(0)
    assert rows(out)[:6] == got and len(rows(out)) == 8


main(globals())
