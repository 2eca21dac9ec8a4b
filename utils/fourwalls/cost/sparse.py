"""What a step costs where weights have owners: a parameter server's bytes, and those of rows that travel alone.

A server collects every worker's gradient and answers with the weights, so its own link carries n times what a worker's does,
until there are enough servers to share it. Rows of a table travel only when a batch asks for them, each once: ids out, rows back,
gradients out. Counts of different ids decide, and these follow from the law of the ids.

    worker sends S, server n S / servers; ring 2 (n-1)/n S        rows: sum over owners of u (id + row), and u row back to it

Reference: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Zhang et al. 2022
(arXiv:2204.04903).
"""

from collections.abc import Iterable, Sequence

__all__ = [
    "COUNT",
    "HEADER",
    "expected_different",
    "row_server_bytes",
    "server_bytes",
    "sparse_exchange",
    "zipf_probabilities",
]

HEADER = 32  # bytes ahead of each message to or from a parameter server: kind, clock, version, samples
COUNT = 8  # bytes of one count of rows


def server_bytes(sizes: Sequence[int], workers: int, steps: int) -> tuple[list[int], list[int]]:
    """(bytes each server sends, bytes each worker sends) in `steps` steps of a parameter server, all weights pulled once before.

    sizes[j]: bytes of the weights that server j owns. A worker sends, to each server, a request, then its gradients with a
    header in each step, and a goodbye; a server answers the request and each push with its weights.
    """
    servers = [workers * (steps + 1) * (HEADER + size) for size in sizes]
    worker = sum(HEADER + steps * (HEADER + size) + HEADER for size in sizes)
    return servers, [worker] * workers


def sparse_exchange(
    counts: Sequence[Sequence[int]], row_bytes: int, *, id_bytes: int = 8, checks: bool = False, backward: bool = True
) -> list[int]:
    """Bytes each rank sends in one step of an embedding whose rows are dealt out to the ranks.

    counts[r][q]: different ids that rank r asks of rank q (what it asks of itself does not travel). Ids go out after their
    counts of 8 bytes; rows and gradients are expected, so theirs are sent only where messages are checked. backward False: no
    gradients.
    """
    n = len(counts)
    if any(len(row) != n for row in counts) or any(c < 0 for row in counts for c in row):
        raise ValueError(f"counts has {n} rows; each has one number of at least 0 for each of {n} ranks")
    exchanges = 1 + (1 + backward) * checks  # of counts
    sent = []
    for r in range(n):
        asks = sum(counts[r]) - counts[r][r]
        gives = sum(counts[q][r] for q in range(n)) - counts[r][r]
        sent.append((n - 1) * COUNT * exchanges + asks * id_bytes + gives * row_bytes + backward * asks * row_bytes)
    return sent


def row_server_bytes(counts: Sequence[Sequence[int]], row_bytes: int, *, id_bytes: int = 8) -> tuple[list[int], list[int]]:
    """(bytes each server sends, bytes each worker sends) in one step of a table whose rows lie on servers.

    counts[w][j]: different ids that worker w asks of server j. To each server a worker sends a header, its ids and the rows'
    gradients; a server sends the rows.
    """
    servers = len(counts[0]) if counts else 0
    if any(len(row) != servers or min(row) < 0 for row in counts):
        raise ValueError(f"counts: each worker has one number of at least 0 for each of {servers} servers")
    gives = [sum(row[j] for row in counts) * row_bytes for j in range(servers)]
    return gives, [sum(HEADER + c * (id_bytes + row_bytes) for c in row) for row in counts]


def zipf_probabilities(rows: int, exponent: float) -> list[float]:
    """P(id = k) for k = 0 to rows - 1, in proportion to (k + 1)^(-exponent)."""
    if rows < 1 or exponent < 0:
        raise ValueError(f"rows {rows} and exponent {exponent}; at least 1 and at least 0")
    weights = [(k + 1) ** -exponent for k in range(rows)]
    total = sum(weights)
    return [w / total for w in weights]


def expected_different(probabilities: Iterable[float], draws: int) -> float:
    """How many different ids `draws` independent draws hold on average: the sum of 1 - (1 - p)^draws."""
    return sum(1 - (1 - p) ** draws for p in probabilities)
