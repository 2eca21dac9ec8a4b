"""aimed at: fill_buckets: the order. Takes the list from the wrong end."""

_right = fill_buckets


def fill_buckets(params, nbytes):
    return _right(params[::-1], nbytes)
