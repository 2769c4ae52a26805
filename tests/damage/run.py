"""Count what damage does to every format: ``make damage``, or ``python -m tests.damage.run --flips N --mutants N``.

Flips: one byte of a small artifact is changed at random, and what every reader says of it is told. Mutants: bytes are
flipped, cut off, put in, left out, moved and repeated; each mutant is opened, decoded and verified by a process that
has five seconds for it. An exception that is no refusal, a process that dies, a mutant that takes longer: each is told
and makes the exit code 1, as does a change in a covered format that nobody sees.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random

from tests.support.damage import COVERED, OUTCOMES, Sample, exercise, flipped, judge, mutant, samples

LIMIT = 5.0
BATCH = 200


def work(sample: Sample, kind: str, pipe: Connection) -> None:
    """Take numbers, answer with what became of that flip or mutant."""
    while (number := pipe.recv()) is not None:
        random = Random(f"{sample.name} {kind} {number}")
        try:
            if kind == "flip":
                pipe.send(judge(sample, flipped(sample, random))[0])
            else:
                pipe.send(exercise(sample, mutant(sample, random)))
        except BaseException:
            pipe.send(f"CRASH {traceback.format_exc()}")


class Worker:
    """A process that is killed and started anew where a mutant takes too long or kills it."""

    def __init__(self, sample: Sample, kind: str) -> None:
        self._sample, self._kind = sample, kind
        self._start()

    def _start(self) -> None:
        self.pipe, other = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=work, args=(self._sample, self._kind, other), daemon=True)
        self._process.start()
        other.close()

    def give(self, number: int) -> None:
        self.number, self.since = number, time.monotonic()
        self.pipe.send(number)

    def take(self) -> str:
        try:
            return str(self.pipe.recv())
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._start()
            return f"CRASH the process ended with {code}"

    def hangs(self) -> bool:
        if time.monotonic() - self.since < LIMIT:
            return False
        self._process.kill()
        self._process.join()
        self._start()
        return True

    def end(self) -> None:
        self.pipe.send(None)
        self._process.join(1)
        self._process.kill()


def count(sample: Sample, kind: str, total: int, processes: int) -> Counter[str]:
    """Run ``total`` flips or mutants of one artifact."""
    found: Counter[str] = Counter()
    workers = [Worker(sample, kind) for _ in range(processes)]
    numbers, busy = iter(range(total)), set[Worker]()
    for worker in workers:
        if (number := next(numbers, None)) is not None:
            worker.give(number)
            busy.add(worker)
    while busy:
        ready = set(wait([worker.pipe for worker in busy], timeout=0.2))
        for worker in list(busy):
            if worker.pipe in ready:
                answer = worker.take()
            elif worker.hangs():
                answer = "HANG"
            else:
                continue
            if answer.startswith(("CRASH", "HANG")):
                print(f"{sample.name} {kind} {worker.number}: {answer}", file=sys.stderr, flush=True)
            found[answer.split()[0] if answer else "accepted"] += 1
            busy.discard(worker)
            if (number := next(numbers, None)) is not None:
                worker.give(number)
                busy.add(worker)
    for worker in workers:
        worker.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=10_000, help="of one byte, per artifact")
    parser.add_argument("--mutants", type=int, default=100_000, help="per artifact")
    parser.add_argument("--only", nargs="*", help="names of artifacts")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    os.environ["INGOT_MAX_DECODED"] = "64MiB"
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_start_method("fork")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        chosen = [sample for sample in samples(Path(folder)) if not asked.only or sample.name in asked.only]
    if asked.flips:
        print(f"| {asked.flips} flips of one byte | bytes |", *(f" {outcome} |" for outcome in OUTCOMES))
        print("| --- | ---: |", *(" ---: |" for _ in OUTCOMES))
        for sample in chosen:
            found = count(sample, "flip", asked.flips, asked.processes)
            size = sum(map(len, sample.files.values()))
            print(f"| {sample.name} | {size} |", *(f" {found[outcome]} |" for outcome in OUTCOMES), flush=True)
            bad += found["SILENT"] * (sample.name in COVERED) + found["CRASH"] + found["HANG"]
    for sample in chosen if asked.mutants else ():
        started = time.monotonic()
        found = count(sample, "mutant", asked.mutants, asked.processes)
        crashes, hangs, accepted = found.pop("CRASH", 0), found.pop("HANG", 0), found.pop("accepted", 0)
        rules = ", ".join(f"{rule} {number}" for rule, number in found.most_common(8))
        print(
            f"{sample.name}: {asked.mutants} mutants in {time.monotonic() - started:.0f} s: {crashes} crashes, "
            f"{hangs} hangs, {accepted} accepted, {found.total()} refused by {len(found)} rules ({rules}, ...)",
            flush=True,
        )
        bad += crashes + hangs
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
