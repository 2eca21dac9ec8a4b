"""Before data moves: do all ranks of a communicator make the same collective call?

A ring in which one rank sums and another takes the maximum returns numbers, only not the right ones, and two ranks that both
think they are the root wait for ever. A statement is a collective's name and arguments, with the line it was called from; the
k-th statements of all ranks must be equal. Statements are control traffic: they appear in no Trace and cost no virtual time.

    right  <=>  for every k, the k-th statements of all ranks agree

Reference: the MPI standard asks for this ("matching collective calls, in the same order") and checks nothing.
"""

import ast
from collections.abc import Callable

import torch

from .comm import MismatchError
from .places import place

__all__ = ["STATEMENT_BYTES", "Table", "compare_statements", "tell_all"]

STATEMENT_BYTES = 512  # of one statement on the wire


class Table:
    """Statements of ranks that share memory. Nobody waits: each rank compares with the one that came first, before it sends
    anything.
    """

    def __init__(self):
        self._open: dict = {}

    def compare(self, communicator, k: int, rank: int, size: int, call: tuple, site: tuple) -> None:
        """Statement k of `rank`. Raises MismatchError where it differs from the first one made."""
        entry = self._open.setdefault((communicator, k), [rank, call, site, 0])
        if entry[1] != call:
            raise MismatchError(compare_statements({entry[0]: entry[1], rank: call}, {entry[0]: entry[2], rank: site}), rank=rank)
        entry[3] += 1
        if entry[3] == size:
            del self._open[communicator, k]


def compare_statements(calls: dict[int, tuple], sites: dict[int, tuple]) -> str:
    """What to say where the calls (rank -> ((field, value), ...)) differ: for each value, the ranks that gave it; "" if they
    agree.
    """
    said = {rank: dict(call) for rank, call in sorted(calls.items())}
    fields = list(dict.fromkeys(field for call in said.values() for field in call))
    if len({call["collective"] for call in said.values()}) > 1:
        fields = ["collective"]
    parts = []
    for field in fields:
        by_value: dict[str, list[int]] = {}
        for rank, call in said.items():
            by_value.setdefault(str(call.get(field, "(nothing)")), []).append(rank)
        if len(by_value) > 1:
            parts.append(", ".join(f"{_ranks(who)} {field}={value}" for value, who in by_value.items()))
    if not parts:
        return ""
    what = next(iter(said.values()))["collective"] if fields != ["collective"] else "a collective"
    lines = [f"the ranks call {what} differently: {'; '.join(parts)}. All ranks must make the same call; no data has moved."]
    shown: dict = {}
    for rank in said:
        shown.setdefault(_plain(sites[rank]), []).append(rank)
    lines += [f"  {_ranks(who, 'at')} {place(*site)}" for site, who in shown.items()]
    return "\n".join(lines)


def tell_all(comm, exchange: Callable, call: tuple, site: tuple) -> None:
    """Every rank tells every other its statement, in ceil(log2 n) rounds, and all raise the same MismatchError if they differ.

    `exchange(x, to, buf, frm, name)` sends and receives at once on a channel of its own.
    """
    size = comm.size
    known = torch.zeros(size, STATEMENT_BYTES, dtype=torch.uint8)  # row i belongs to rank (comm.rank - i) % size
    text = repr((call, _plain(site))).encode()
    if len(text) > STATEMENT_BYTES:
        text = repr((call, ("", 0, ""))).encode()[:STATEMENT_BYTES]
    known[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    have = 1
    while have < size:
        more = min(have, size - have)
        heard = torch.empty(more, STATEMENT_BYTES, dtype=torch.uint8)
        exchange(known[:more].clone(), (comm.rank + have) % size, heard, (comm.rank - have) % size, call[0][1])
        known[have : have + more] = heard
        have += more
    if bool((known[:, :] == known[0]).all()):
        return
    statements = {(comm.rank - i) % size: ast.literal_eval(bytes(known[i].tolist()).rstrip(b"\0").decode()) for i in range(size)}
    message = compare_statements({r: s[0] for r, s in statements.items()}, {r: s[1] for r, s in statements.items()})
    if message:
        raise MismatchError(message, rank=comm.rank)


def _plain(site: tuple) -> tuple[str, int, str]:
    """(file, line, function) of what `comm.call_site` gave."""
    if len(site) == 2:
        code, line = site
        return code.co_filename, line, code.co_name
    return site


def _ranks(ranks: list[int], verb: str = "says") -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb}"
    words = ", ".join(map(str, ranks[:-1])) + f" and {ranks[-1]}"
    return f"ranks {words} {'say' if verb == 'says' else verb}"
