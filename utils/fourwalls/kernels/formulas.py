"""What each form must move, in bytes: the formulas that stand beside the counts.

Separate operators move the whole tensor at each step; one pass moves each input once and each result once. The ratio of the two
is the most that fusion can win where memory sets the pace. With N = rows x columns numbers of w bytes:

    softmax 8 N w + 4 r w -> 2 N w       layer norm 12 N w -> 2 N w       bias + GELU 18 N w -> 2 N w
    dropout + residual (7 w + 10) N -> (3 w + 1) N       cross-entropy 6 N w -> N w       (terms of a row or column left out)

Reference: counted from the operators themselves (kernels.traffic); Ivanov et al. 2021 (arXiv:2007.00072) for the idea.
"""

__all__ = ["OPERATORS", "one_pass_bytes", "online_softmax_bytes", "separate_bytes"]

LABEL = 8  # bytes of a target
NOISE = 4  # bytes of a random number

OPERATORS = ("softmax", "layer_norm", "bias_gelu", "dropout_residual", "cross_entropy")


def separate_bytes(operator: str, rows: int, columns: int, *, itemsize: int = 4) -> int:
    """Bytes that the separate operators of `operator` move, forward, for (rows, columns) numbers of `itemsize` bytes."""
    _check(operator, rows, columns, itemsize)
    n, r, c, w = rows * columns, rows, columns, itemsize
    return {
        "softmax": (8 * n + 4 * r) * w,
        "layer_norm": (12 * n + 8 * r + 2 * c) * w,
        "bias_gelu": (18 * n + c) * w,
        "dropout_residual": (7 * w + 2 * NOISE + 2) * n,
        "cross_entropy": (6 * n + 11 * r + 1) * w + 2 * LABEL * r + 2 * LABEL,  # the labels are looked at once before
    }[operator]


def one_pass_bytes(operator: str, rows: int, columns: int, *, itemsize: int = 4, gradient: bool = False) -> int:
    """Bytes of one pass, forward: each input read once, each result written once (for dropout the mask for backward, too).

    gradient: cross-entropy keeps two numbers a row for its backward, where one is wanted; the others here nothing more.
    """
    _check(operator, rows, columns, itemsize)
    n, r, c, w = rows * columns, rows, columns, itemsize
    return {
        "softmax": 2 * n * w,
        "layer_norm": (2 * n + 2 * c) * w,
        "bias_gelu": (2 * n + c) * w,
        "dropout_residual": (3 * w + 1) * n,
        "cross_entropy": (n + 1 + 2 * r * gradient) * w + LABEL * r,
    }[operator]


def online_softmax_bytes(rows: int, columns: int, *, itemsize: int = 4) -> int:
    """Bytes of the running softmax where a row is longer than the cache: two reads and a write of everything."""
    _check("softmax", rows, columns, itemsize)
    return 3 * rows * columns * itemsize


def _check(operator: str, rows: int, columns: int, itemsize: int) -> None:
    if operator not in OPERATORS:
        raise ValueError(f"operator is {operator!r}; allowed: {', '.join(OPERATORS)}")
    for word, value in (("rows", rows), ("columns", columns), ("itemsize", itemsize)):
        if not isinstance(value, int) or isinstance(value, bool) or value < (word == "itemsize"):
            raise ValueError(f"{word} is {value!r}; it is a whole number of at least {int(word == 'itemsize')}")
