"""aimed at: reduce_scatter: values. Chunks of numel // n: what does not divide is dropped."""


def cut(flat, n):
    return flat[: flat.numel() // n * n].split(max(flat.numel() // n, 1)) if flat.numel() >= n else (flat,) * n
