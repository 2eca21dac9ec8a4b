"""`python -m fourwalls.bench NAME [--ranks 2,4] [--sizes 4KiB,16MiB] [--format table|json|csv] [--out FILE] [--pairs N]`.

Rows go to standard output (or --out), and nothing else does; progress goes to standard error. The exit code is 0 where every row
is ok, 1 where one is not, 2 for a wrong command line. Under torchrun (`torchrun ... -m fourwalls.bench NAME`) the ranks are those
that it has started, on one node or many: all of them measure, rank 0 writes, and the record lists the hosts.

    exit code 0  <=>  every result was right

Reference: DESIGN, "One record".
"""

import argparse
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace

from ..cost.units import parse_bytes
from ..ranks.machine import under_torchrun
from . import BENCHMARKS, ONE_MACHINE, load
from .record import FORMATS, hosts, machine, write_rows

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark and write its rows; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    many = under_torchrun()
    writes = not many or os.environ["RANK"] == "0"
    if many:
        options.ranks = _ranks_of_torchrun(parser, options)
        options.quiet = options.quiet or not writes
    module = load(options.name)
    rows, here = [], machine() | (hosts() if many else {})
    try:
        with _progress(options) as bar, _ended_as_interrupted():
            for row in module.rows(options, bar.set_description_str):
                rows.append(replace(row, machine=here | row.machine))
                bar.update(1)
    except KeyboardInterrupt:
        print("interrupted; the rows measured so far follow", file=sys.stderr)
    wrong = [row for row in rows if not row.ok]
    if writes:
        write_rows(rows, format=options.format, out=options.out)
    for row in wrong if writes else ():
        print(f"wrong result: {row.benchmark} {row.metric} {row.case}", file=sys.stderr)
    return 1 if wrong or not rows else 0


def _parser() -> argparse.ArgumentParser:
    about = "\n".join(f"  {name:12} {load(name).describe}" for name in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="python -m fourwalls.bench",
        description=f"Measure a piece of Four Walls on this machine.\n\nbenchmarks:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", type=_checked(_name), metavar="NAME", help="which benchmark, from the list above")
    parser.add_argument("--ranks", type=_checked(_ranks), default=None, metavar="2,4", help="numbers of ranks")
    parser.add_argument("--sizes", type=_checked(_sizes), default=None, metavar="4KiB,16MiB", help="tensor sizes")
    parser.add_argument("--pairs", type=_checked(_count), default=15, metavar="N", help="alternating pairs (default 15)")
    parser.add_argument("--algorithms", type=_checked(_words), default=None, metavar="ring,tree", help="only these")
    parser.add_argument("--seeds", type=_checked(_seeds), default=None, metavar="1,2,3", help="of models trained here (quantize)")
    parser.add_argument("--format", choices=tuple(FORMATS), default="table")
    parser.add_argument("--out", default=None, metavar="FILE", help="write the rows there instead of to standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


@contextmanager
def _ended_as_interrupted():
    """A request to end (SIGTERM, as `timeout` sends it) is an interrupt: what was measured so far is written."""

    def interrupt(*_):
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: signals are somebody else's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ranks_of_torchrun(parser, options):
    """[the number of ranks that torchrun has started]; a wrong command line where others are asked for."""
    started = int(os.environ["WORLD_SIZE"])
    if options.name in ONE_MACHINE:
        parser.error(f"{options.name} starts its ranks itself, on one machine: run it without torchrun")
    if options.ranks not in (None, [started]):
        parser.error(f"--ranks {','.join(map(str, options.ranks))}: torchrun has started {started}; leave --ranks out")
    return [started]


def _name(text):
    load(text)
    return text.replace("_", "-")


def _ranks(text):
    counts = [int(part) for part in text.split(",")]
    if any(not 1 <= count <= 1024 for count in counts):
        raise ValueError(f"{text}: numbers of ranks are whole numbers from 1 on, such as 2,4")
    return counts


def _seeds(text):
    return [int(part) for part in text.split(",")]


def _sizes(text):
    return [parse_bytes(part) for part in text.split(",")]


def _words(text):
    return text.split(",")


def _count(text):
    if int(text) < 1:
        raise ValueError(f"{text}: at least 1")
    return int(text)


def _checked(parse):
    """argparse swallows the words of a ValueError; this keeps them."""

    def convert(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _progress(options):
    from tqdm import tqdm

    return tqdm(desc=options.name, unit=" rows", file=sys.stderr, disable=options.quiet)


if __name__ == "__main__":
    sys.exit(main())
